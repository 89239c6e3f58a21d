"""The gated short convolution of LFM2 as the mixer of a layer. B batch, T time, D width."""

from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Layer
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.cache import StateCache
from bloomery.model.mixers import compiled
from bloomery.model.mixers.convolution import DepthwiseConvolution
from bloomery.model.rope import Rotary


class GatedShortConvolution(nn.Module):
    """arXiv:2511.23404, parameters as in transformers' LFM2.

    `backend` is of attention: with "compiled", sequences without a cache go to C++ (`mixers.compiled`), too. One gate
    before a convolution of each number by itself over the last tokens of its document, one after it.
    """

    def __init__(self, config: ModelConfig, layer: Layer, backend: str) -> None:
        super().__init__()
        self.backend = backend
        assert layer.short_convolution is not None
        sizes = layer.short_convolution
        width = config.hidden_size
        self.kernel = sizes.kernel
        self.conv = DepthwiseConvolution(width, sizes.kernel, bias=sizes.bias)
        self.in_proj = nn.Linear(width, 3 * width, bias=sizes.bias)
        self.out_proj = nn.Linear(width, width, bias=sizes.bias)

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: StateCache | None
    ) -> Tensor:
        del rotary  # the kernel tells near tokens from far ones
        gates_and_x = self.in_proj(x_BTD)
        projected: Tensor
        if self.backend == "compiled" and cache is None and gates_and_x.dtype in compiled.DTYPES:
            conv = self.conv
            weight_DK = conv.weight.squeeze(1)
            projected = self.out_proj(
                compiled.convolution(
                    gates_and_x, weight_DK, conv.bias, layout.first_BT, compiled.GATED
                )
            )
            return projected
        gate_BTD, output_gate_BTD, x_BTD = gates_and_x.chunk(3, -1)
        gated_BTD = gate_BTD * x_BTD
        past = None
        if cache is not None:
            past = cache.current("convolved", (self.kernel - 1, x_BTD.shape[-1]), gated_BTD)
        projected = self.out_proj(output_gate_BTD * self.conv(gated_BTD, layout.first_BT, past))
        return projected
