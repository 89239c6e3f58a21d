"""The gated delta net of Qwen and OLMo-Hybrid as the mixer of a layer: convolution, delta rule, gated norm.

B batch, T time, D width, C convolved numbers, G key heads, H value heads, E width of a key, F width of a value,
Q = G E, V = H F.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import Layer, delta_net_projections
from bloomery.facts.limits import delta_net_groups
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.cache import StateCache
from bloomery.model.mixers import compiled
from bloomery.model.mixers.convolution import DepthwiseConvolution, convolved, convolved_with_past
from bloomery.model.mixers.delta_rule import chunked_delta_rule, delta_rule_step
from bloomery.model.mixers.recomputed import recomputed
from bloomery.model.norms import RMSNorm, rms_norm, widened, working_dtype
from bloomery.model.rope import Rotary

KEY_EPS = 1e-6  # under the root of a key's and query's length, as in flash-linear-attention


class GatedDeltaNet(nn.Module):
    """arXiv:2412.06464, parameters as in transformers' Qwen3.5, or others for the same projections (`DeltaNet`).

    `backend` is of attention: with "compiled", sequences without a cache go to C++ (`mixers.compiled`), too.
    """

    in_proj_qkv: nn.Linear
    in_proj_z: nn.Linear
    in_proj_b: nn.Linear
    in_proj_a: nn.Linear

    def __init__(self, config: ModelConfig, layer: Layer, backend: str) -> None:
        super().__init__()
        self.backend = backend
        assert layer.delta_net is not None
        sizes = layer.delta_net
        width = config.hidden_size
        self.sizes = sizes
        # Of the device whose number of groups it computes; None: that of its inputs. A simulation hands it in.
        self.device_type: str | None = None
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.A_log = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.convolved_width = 2 * sizes.key_width + sizes.value_width
        self.widths = (sizes.key_width, sizes.key_width, sizes.value_width)
        if sizes.projections == "separate":
            for name, part in zip("qkv", self.widths, strict=True):
                self.add_module(f"{name}_conv1d", DepthwiseConvolution(part, sizes.kernel))
        else:
            self.conv1d = DepthwiseConvolution(self.convolved_width, sizes.kernel)
        norm_eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        self.norm = RMSNorm(sizes.value_head_dim, norm_eps, unit_offset=False)
        for name, outputs in delta_net_projections(sizes).items():
            self.add_module(name, nn.Linear(width, outputs, bias=False))
        self.out_proj = nn.Linear(sizes.value_width, width, bias=False)

    def _projected(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, before they are convolved [B, T, C]; gates z [B, T, V], b and a [B, T, H]."""
        read = [self.get_submodule(name)(x_BTD) for name in delta_net_projections(self.sizes)]
        match self.sizes.projections:
            case "together":
                return tuple(read)
            case "separate":
                return torch.cat(read[:3], -1), *read[3:]
            case "by_head":
                return self._sorted_by_kind(*read)

    def _sorted_by_kind(self, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
        """Of each key head: its query, its key, its values, their gates; the strengths and decays of its values."""
        sizes = self.sizes
        values_per_key = sizes.num_value_heads // sizes.num_key_heads
        values_width = values_per_key * sizes.value_head_dim
        widths = (sizes.key_head_dim, sizes.key_head_dim, values_width, values_width)
        heads = (sizes.num_key_heads, -1)
        *qkv, z = (part.flatten(-2) for part in qkvz.unflatten(-1, heads).split(widths, -1))
        b, a = (part.flatten(-2) for part in ba.unflatten(-1, heads).split(values_per_key, -1))
        return torch.cat(qkv, -1), z, b, a

    def _taps(self) -> Tensor:
        """The weight of their convolution [C, 1, K]."""
        if self.sizes.projections != "separate":
            return self.conv1d.weight
        return torch.cat([self.get_parameter(f"{name}_conv1d.weight") for name in "qkv"])

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, layout: DocumentLayout, cache: StateCache | None
    ) -> Tensor:
        del rotary  # the decay tells near tokens from far ones
        dtype = working_dtype(x_BTD)
        projections = self._projected(x_BTD)
        if cache is not None:
            y_BTV = self._read_with_cache(projections, cache)
        elif self.backend == "compiled" and projections[0].dtype in compiled.DTYPES:
            y_BTV = self._read_compiled(projections, layout.first_BT)
        else:
            y_BTV = self._read_all(projections, layout.first_BT)
        projected: Tensor = self.out_proj(y_BTV.to(dtype))
        return projected

    def _read_all(self, projections: tuple[Tensor, ...], first_BT: Tensor | None) -> Tensor:
        """Of whole sequences [B, T, H F]: some heads at a time, of which backward keeps the projections alone."""
        sizes = self.sizes
        qkv_BTC, z_BTV, b_BTH, a_BTH = projections
        on_cpu = (self.device_type or qkv_BTC.device.type) == "cpu"
        num_groups = delta_net_groups(sizes, qkv_BTC.shape[0] * qkv_BTC.shape[1], on_cpu=on_cpu)

        # Key heads of a group are neighbors, and so are the value heads that share them.
        q, k, v = (part.chunk(num_groups, -1) for part in qkv_BTC.split(self.widths, -1))
        taps = (part.chunk(num_groups) for part in self._taps().split(self.widths))
        by_head = (
            tensor.chunk(num_groups, -1)
            for tensor in (z_BTV, b_BTH, a_BTH, self.dt_bias, self.A_log)
        )
        read = [
            recomputed(self._read, first_BT, self.norm.weight, *group)
            for group in zip(q, k, v, *taps, *by_head, strict=True)
        ]
        return read[0] if num_groups == 1 else torch.cat(read, -1)

    def _read(self, first_BT: Tensor | None, gain_F: Tensor, *group: Tensor) -> Tensor:
        """What each token reads with some of the heads, normed and gated [B, T, h F], in the dtype of projections."""
        q, k, v, *taps, z, b, a, dt_bias, A_log = group  # the parameter's name
        wide = torch.promote_types(z.dtype, torch.float32)
        q, k, v = (
            F.silu(convolved(x, tap.squeeze(1), first_BT, wide))
            for x, tap in zip((q, k, v), taps, strict=True)
        )
        inputs = self._inputs_of_rule(q, k, v, b, a, dt_bias, A_log)
        read_BHTF, _ = chunked_delta_rule(*inputs, first_BT=first_BT)
        return self._gated(read_BHTF.transpose(1, 2), z, gain_F).to(z.dtype)

    def _read_compiled(self, projections: tuple[Tensor, ...], first_BT: Tensor | None) -> Tensor:
        """The same with all heads in C++ (`mixers.compiled`), which keeps a chunk of a head at a time."""
        qkv_BTC, z_BTV, b_BTH, a_BTH = projections
        sizes = self.sizes
        gain_F = self.norm.weight
        assert gain_F is not None
        decay_BTH, beta_BTH = self._decays_and_strengths(b_BTH, a_BTH, self.dt_bias, self.A_log)
        inputs = compiled.RuleInputs(
            qkv_BTC,
            compiled.taps_of(self._taps().squeeze(1), None),
            decay_BTH,
            beta_BTH,
            z_BTV.to(qkv_BTC.dtype),
            gain_F.float(),
        )
        heads = compiled.HeadSizes(
            sizes.num_key_heads, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim
        )
        return compiled.delta_net(inputs, first_BT, heads, self.norm.eps)

    def _read_with_cache(self, projections: tuple[Tensor, ...], cache: StateCache) -> Tensor:
        """Of new tokens of texts whose states are in the cache [B, T, H F]; nothing is differentiated."""
        sizes = self.sizes
        qkv_BTC, z_BTV, b_BTH, a_BTH = projections
        past = cache.current("convolved", (sizes.kernel - 1, self.convolved_width), qkv_BTC)
        qkv_BTC = F.silu(convolved_with_past(widened(qkv_BTC), self._taps().squeeze(1), past))
        q, k, v = qkv_BTC.split(self.widths, -1)
        inputs = self._inputs_of_rule(q, k, v, b_BTH, a_BTH, self.dt_bias, self.A_log)
        shape = (sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
        state = cache.current("memory", shape, v)
        with torch.autocast(v.device.type, enabled=False):
            if v.shape[1] == 1:
                q, k, v, decay, beta = (tensor[:, :, 0] for tensor in inputs)
                read_BHTF = delta_rule_step(q, k, v, decay, beta, state)[:, :, None]
            else:
                read_BHTF, last_state = chunked_delta_rule(*inputs, state_BHEF=state)
                state.copy_(last_state)
        assert self.norm.weight is not None
        return self._gated(read_BHTF.transpose(1, 2), z_BTV, self.norm.weight)

    def _inputs_of_rule(
        self,
        q_BTQ: Tensor,
        k_BTQ: Tensor,
        v_BTV: Tensor,
        b_BTH: Tensor,
        a_BTH: Tensor,
        dt_bias_H: Tensor,
        A_log_H: Tensor,  # the parameter's name
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [B, H, T, .], decays and strengths [B, H, T] of the heads given; all float32."""
        sizes = self.sizes
        q_BTGE, k_BTGE = (_unit(x.unflatten(-1, (-1, sizes.key_head_dim))) for x in (q_BTQ, k_BTQ))
        v_BTHF = v_BTV.unflatten(-1, (-1, sizes.value_head_dim))
        repeats = sizes.num_value_heads // sizes.num_key_heads
        q_BTHE = (q_BTGE * sizes.key_head_dim**-0.5).repeat_interleave(repeats, 2)
        k_BTHE = k_BTGE.repeat_interleave(repeats, 2)

        decay_BTH, beta_BTH = self._decays_and_strengths(b_BTH, a_BTH, dt_bias_H, A_log_H)
        inputs = (q_BTHE, k_BTHE, v_BTHF, decay_BTH, beta_BTH)
        q, k, v, decay, beta = (tensor.transpose(1, 2) for tensor in inputs)
        return q, k, v, decay, beta

    def _gated(self, read_BTHF: Tensor, z_BTV: Tensor, gain_F: Tensor) -> Tensor:
        """Each head normed, then times SiLU(z), float32 [B, T, h F]."""
        normed_BTHF = rms_norm(read_BTHF, gain_F, self.norm.eps, read_BTHF.dtype)
        return normed_BTHF.flatten(2) * F.silu(widened(z_BTV))

    def _decays_and_strengths(
        self,
        b_BTH: Tensor,
        a_BTH: Tensor,
        dt_bias_H: Tensor,
        A_log_H: Tensor,  # the parameter's name
    ) -> tuple[Tensor, Tensor]:
        """How fast each head forgets, and how strongly each token is written: [B, T, H] in float32."""
        steps_BTH = F.softplus(widened(a_BTH) + widened(dt_bias_H))
        decay_BTH = -widened(A_log_H).exp() * steps_BTH
        beta_BTH = widened(b_BTH).sigmoid()
        return decay_BTH, 2 * beta_BTH if self.sizes.negative_eigenvalues else beta_BTH


def _unit(x: Tensor) -> Tensor:
    """Of length one."""
    return x * (x.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()
