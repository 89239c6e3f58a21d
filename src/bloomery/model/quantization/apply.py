"""Quantised bases: which frozen weights of a model are kept in 4 or 8 bits."""

from collections.abc import Iterator

from torch import Tensor, nn

from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.decoder import Decoder
from bloomery.model.quantization.weight import QuantisedWeight
from bloomery.recipe.schema import Quantize


class QuantisedLinear(nn.Module):
    """A frozen linear map without an adapter."""

    def __init__(self, stored: QuantisedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.stored, self.bias = stored, bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.stored(x, self.bias)
        return product


def quantise(model: Decoder, quantize: Quantize, *, reader: str = "torch") -> None:
    """In place: the frozen matrices inside the layers; biases, norms, embeddings and the head stay as they are.

    On the meta device their numbers come later (`QuantisedWeight.fill`), elsewhere from the weights that are there.
    """
    for path, linear in list(model.named_modules()):
        if not path.startswith("model.layers.") or not isinstance(linear, nn.Linear) or linear.weight.requires_grad:
            continue
        weight = linear.weight
        stored = QuantisedWeight(weight.shape, quantize, reader=reader, device=weight.device)
        if weight.device.type != "meta":
            stored.fill([weight.detach()], name=f"{path}.weight")
        if isinstance(linear, LoraLinear):
            linear.register_parameter("weight", None)
            linear.stored = stored
        else:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantisedLinear(stored, linear.bias))


def quantised_weights(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """By the name that the weight has as a parameter."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedWeight):
            yield name.removesuffix(".stored") + ".weight", module
