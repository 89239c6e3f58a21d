"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one vector.

B batch, T time, D width, H heads, E head width as `attend` computes it, N numbers of a query or key that have no
position, P those that rotate, V numbers of a value, C of the latent vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.facts.config import LatentAttention as LatentSizes
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import LATENT_EPS, Layer
from bloomery.model.cache import VisiblePast
from bloomery.model.mixers.attention import Attention
from bloomery.model.norms import RMSNorm
from bloomery.model.rope import Rotary, rotate


class LatentAttention(Attention):
    """Attention whose keys rotate in a part that all heads share; the cache holds keys and values of each head.

    Queries and keys have N + P numbers and values V; the narrower ones are filled up with zeros, which add nothing.
    """

    def build(self, layer: Layer) -> None:
        config = self.config
        sizes = _sizes(config)
        width = config.hidden_size
        query_width = layer.num_heads * (sizes.plain_width + sizes.rotary_width)
        bias = config.attention_bias
        self.sizes = sizes
        self.num_heads = layer.num_heads
        self.q_a_proj: nn.Linear | None = None
        self.q_a_layernorm: nn.Module | None = None
        if sizes.query_rank is None:
            self.q_proj = nn.Linear(width, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, sizes.query_rank, bias=bias)
            self.q_b_proj = nn.Linear(sizes.query_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, sizes.rank + sizes.rotary_width, bias=bias)
        self.kv_b_proj = nn.Linear(
            sizes.rank, layer.num_heads * (sizes.plain_width + sizes.value_width), bias=False
        )
        self.o_proj = nn.Linear(layer.num_heads * sizes.value_width, width, bias=bias)
        if sizes.query_rank is not None:
            self.q_a_layernorm = RMSNorm(sizes.query_rank, LATENT_EPS, unit_offset=False)
        self.kv_a_layernorm = RMSNorm(sizes.rank, LATENT_EPS, unit_offset=False)

    def queries(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, None]:
        if self.q_a_proj is None:
            q = self.q_proj(x_BTD)
        else:
            assert self.q_a_layernorm is not None
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_BTHE = q.unflatten(-1, (self.num_heads, -1))
        plain, turning = q_BTHE.split([self.sizes.plain_width, self.sizes.rotary_width], dim=-1)
        q_BTHE = torch.cat((plain, self.turned(turning, rotary)), dim=-1)
        return self.filled(q_BTHE).transpose(1, 2), None

    def keys_and_values(self, x_BTD: Tensor, rotary: Rotary | None) -> VisiblePast:
        sizes = self.sizes
        latent = self.kv_a_proj_with_mqa(x_BTD)
        latent_BTC, turning = latent.split([sizes.rank, sizes.rotary_width], dim=-1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent_BTC)).unflatten(-1, (self.num_heads, -1))
        plain_BTHN, v_BTHV = heads.split([sizes.plain_width, sizes.value_width], dim=-1)
        # One rotated part for the keys of all heads.
        shared = self.turned(turning[..., None, :], rotary).expand(-1, -1, self.num_heads, -1)
        k_BTHE = torch.cat((plain_BTHN, shared), dim=-1)
        return VisiblePast(
            self.filled(k_BTHE).transpose(1, 2), self.filled(v_BTHV).transpose(1, 2), mask=None
        )

    def turned(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        return x if rotary is None else rotate(x, rotary, x.dtype)

    def filled(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.head_dim - x.shape[-1]))

    def output(self, y_BHTE: Tensor) -> Tensor:
        y_BTHV = y_BHTE.transpose(1, 2)[..., : self.sizes.value_width]
        return y_BTHV.flatten(2)


def _sizes(config: ModelConfig) -> LatentSizes:
    assert config.latent_attention is not None
    return config.latent_attention
