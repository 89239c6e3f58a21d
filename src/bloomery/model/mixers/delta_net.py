"""The gated delta net of Qwen3.5 as the mixer of a layer: convolution, delta rule, gated norm.

B batch, T time, D width, C convolved numbers, G key heads, H value heads, E width of a key, F width of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Layer
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.cache import StateCache
from bloomery.model.mixers.convolution import DepthwiseConvolution
from bloomery.model.mixers.delta_rule import chunked_delta_rule, delta_rule_step
from bloomery.model.norms import RMSNorm, widened, working_dtype
from bloomery.model.rope import Rotary

KEY_EPS = 1e-6  # under the root of a key's and query's length, as in flash-linear-attention


class GatedDeltaNet(nn.Module):
    """arXiv:2412.06464, parameters as in transformers' Qwen3.5. `backend` is of attention, and not read."""

    def __init__(self, config: ModelConfig, layer: Layer, backend: str) -> None:
        del backend
        super().__init__()
        assert layer.delta_net is not None
        sizes = layer.delta_net
        width = config.hidden_size
        self.sizes = sizes
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.A_log = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.convolved_width = 2 * sizes.key_width + sizes.value_width
        self.conv1d = DepthwiseConvolution(self.convolved_width, sizes.kernel)
        self.norm = RMSNorm(sizes.value_head_dim, config.norm_eps, unit_offset=False)
        self.in_proj_qkv = nn.Linear(width, self.convolved_width, bias=False)
        self.in_proj_z = nn.Linear(width, sizes.value_width, bias=False)
        self.in_proj_b = nn.Linear(width, sizes.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(width, sizes.num_value_heads, bias=False)
        self.out_proj = nn.Linear(sizes.value_width, width, bias=False)

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: StateCache | None
    ) -> Tensor:
        del rotary  # the decay tells near tokens from far ones
        sizes = self.sizes
        dtype = working_dtype(x_BTD)

        # A convolution over the last tokens, then queries, keys and values; all that follows is float32.
        qkv_BTC = self.in_proj_qkv(x_BTD)
        past = None
        if cache is not None:
            past = cache.current("convolved", (sizes.kernel - 1, self.convolved_width), qkv_BTC)
        qkv_BTC = F.silu(self.conv1d(qkv_BTC, layout.first_BT, past))
        widths = (sizes.key_width, sizes.key_width, sizes.value_width)
        q_BTGE, k_BTGE, v_BTHF = (
            widened(x).unflatten(-1, (-1, head_width))
            for x, head_width in zip(
                qkv_BTC.split(widths, -1),
                (sizes.key_head_dim, sizes.key_head_dim, sizes.value_head_dim),
                strict=True,
            )
        )
        repeats = sizes.num_value_heads // sizes.num_key_heads
        q_BTHE = _unit(q_BTGE).repeat_interleave(repeats, 2) * sizes.key_head_dim**-0.5
        k_BTHE = _unit(k_BTGE).repeat_interleave(repeats, 2)

        # How fast each head forgets, and how strongly the token is written.
        steps_BTH = F.softplus(widened(self.in_proj_a(x_BTD)) + widened(self.dt_bias))
        decay_BTH = -widened(self.A_log).exp() * steps_BTH
        beta_BTH = widened(self.in_proj_b(x_BTD)).sigmoid()

        y_BTHF = self._mixed((q_BTHE, k_BTHE, v_BTHF, decay_BTH, beta_BTH), layout.first_BT, cache)
        z_BTHF = self.in_proj_z(x_BTD).unflatten(-1, (-1, sizes.value_head_dim))
        y_BTHF = self.norm(y_BTHF, y_BTHF.dtype) * F.silu(widened(z_BTHF))
        projected: Tensor = self.out_proj(y_BTHF.flatten(2).to(dtype))
        return projected

    def _mixed(
        self, inputs_BTH: tuple[Tensor, ...], first_BT: Tensor | None, cache: StateCache | None
    ) -> Tensor:
        """What each token reads [B, T, H, F], from queries, keys, values, decays and strengths."""
        q, k, v, decay, beta = (x.transpose(1, 2) for x in inputs_BTH)
        state = None
        if cache is not None:
            shape = (v.shape[1], k.shape[-1], v.shape[-1])
            state = cache.current("memory", shape, v)
        if state is not None and v.shape[2] == 1:
            return delta_rule_step(
                q[:, :, 0], k[:, :, 0], v[:, :, 0], decay[..., 0], beta[..., 0], state
            )[:, None]
        with torch.autocast(v.device.type, enabled=False):
            read_BHTF, last_state = chunked_delta_rule(
                q, k, v, decay, beta, first_BT=first_BT, state_BHEF=state
            )
        if state is not None:
            state.copy_(last_state)
        return read_BHTF.transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """Of length one."""
    return x * (x.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()
