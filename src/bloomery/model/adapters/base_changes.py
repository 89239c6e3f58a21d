"""What an adapter of PEFT changes in its base besides the linear layers: embedding, head and biases.

LoRA of an embedding is E + scale (B A)^T with A [rank, vocabulary] and B [width, rank]; DoRA scales its columns to
magnitudes. LoRA of the head is that of any linear layer. Both are merged into the weight when it is read: the loss and
the head multiply whole matrices in pieces, and no row of a table can be a sum of two.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.adapters.peft_names import TOKEN_ROWS
from bloomery.model.adapters.peft_reading import MAGNITUDE, base_tensors
from bloomery.model.adapters.settings import EMBEDDING, Adaptation
from bloomery.model.decoder import Decoder
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import tensor_locations


class BaseChanges:
    """The changes in one adapter's folder. `names`: the parameters of the base that they are merged into."""

    def __init__(self, settings: Adaptation, config: ModelConfig, folder: Path) -> None:
        self._settings = settings
        self._config = config
        self._locations = tensor_locations(config)
        self._tensors = {}
        names = [f"{module}.weight" for module in settings.vocabulary]
        biases = [f"{module}.bias" for module in settings.lora_biases]
        self.names = frozenset([*names, *settings.biases, *biases])
        if self.names:
            self._tensors = dict(base_tensors(folder, config).by_name)

    def applied(self, name: str, parameter: Tensor) -> Tensor:
        """The parameter with the adapter's change, in the parameter's dtype, computed in float32 at least."""
        if name not in self.names:
            return parameter
        module = name.rpartition(".")[0]
        wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        with TensorReader() as reader:

            def read(stored_name: str) -> Tensor:
                return reader.read(self._tensors[stored_name]).to(wide)

            if name in self._settings.biases:
                location = self._locations[name]
                rows = slice(location.first, location.first + location.rows)
                wide = read(location.name)[rows]
            if module in self._settings.lora_biases:
                location = self._locations[f"{module}.weight"]
                rows = slice(location.first, location.first + location.rows)
                stored_module = location.name.removesuffix(".weight")
                bias = read(f"{stored_module}.lora_B.bias")[rows]
                wide = wide + self._settings.pairs[module].scale * bias
            if module in self._settings.vocabulary:
                wide = self._changed_vocabulary(module, wide, read)
        return wide.to(parameter.dtype)

    def _changed_vocabulary(
        self, module: str, weight_VD: Tensor, read: Callable[[str], Tensor]
    ) -> Tensor:
        change = self._settings.vocabulary[module]
        stored_module = self._locations[f"{module}.weight"].name.removesuffix(".weight")
        if change.pair is not None:
            if module == EMBEDDING:
                A_VR = read(f"{stored_module}.lora_embedding_A").T
                B_RD = read(f"{stored_module}.lora_embedding_B").T
                update_VD = A_VR @ B_RD
            else:
                B = read(f"{stored_module}.lora_B.weight")
                update_VD = B @ read(f"{stored_module}.lora_A.weight")
            weight_VD = weight_VD + change.pair.scale * update_VD
            if self._settings.dora:
                # The magnitudes of a linear layer belong to its rows, those of an embedding to its columns.
                dim = 0 if module == EMBEDDING else 1
                norms = torch.linalg.vector_norm(weight_VD, dim=dim, keepdim=True)
                magnitudes = read(f"{stored_module}.{MAGNITUDE}")
                weight_VD = weight_VD * (magnitudes.unsqueeze(dim) / norms)
        if change.token_ids:
            rows = read(f"{stored_module}.token_adapter.{TOKEN_ROWS}")
            ids = torch.tensor(change.token_ids, device=weight_VD.device)
            weight_VD = weight_VD.index_copy(0, ids, rows)
        return weight_VD


@torch.no_grad()
def merge_into_base(
    decoder: Decoder, settings: Adaptation, config: ModelConfig, folder: Path
) -> None:
    """In place, once the base and the adapter's trained tensors were read."""
    changes = BaseChanges(settings, config, folder)
    for name in changes.names:
        path, _, kind = name.rpartition(".")
        module = decoder.get_submodule(path)
        parameter = getattr(module, kind)
        # A bias of the adapter alone: the layer has one from now on.
        if parameter is None:
            assert isinstance(module, LoraLinear)
            zeros = torch.zeros(module.out_features, dtype=module.lora_B.dtype)
            zeros = zeros.to(module.lora_B.device)
            module.bias = nn.Parameter(changes.applied(name, zeros), requires_grad=False)
        else:
            parameter.copy_(changes.applied(name, parameter.detach()))


def refuse_unmergeable_biases(settings: Adaptation, config: ModelConfig, folder: Path) -> None:
    """Raises UserError where a merged model has no place for the bias of a LoRA matrix, as PEFT does."""
    locations = tensor_locations(config)
    for module in settings.lora_biases:
        if f"{module}.bias" not in locations:
            raise UserError(
                f"lora_bias gives {module} a bias, which a {config.family} model cannot store",
                where=str(folder),
                fix="--to adapter exports it without its base",
            )


def changes_of_base(settings: Adaptation) -> list[str]:
    """What the adapter changes besides LoRA matrices of linear layers and whole modules, for a message."""
    parts = []
    for module, change in settings.vocabulary.items():
        leaf = module.rpartition(".")[2]
        parts.append(f"LoRA on {leaf}" if change.pair else f"trained tokens of {leaf}")
    parts += ["biases"] if settings.biases or settings.lora_biases else []
    parts += [f"init_lora_weights {settings.residual}"] if settings.residual else []
    return parts
