"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one vector.

B batch, T time, S keys that are seen, D width, H heads, E head width as `attend` computes it, N numbers of a query or
key that have no position, P those that rotate, V numbers of a value, C of the latent vector.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bloomery.facts.config import LatentAttention as LatentSizes
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import LATENT_EPS, Layer
from bloomery.model.attention.attend import DocumentLayout, attend
from bloomery.model.cache import LayerCache, VisiblePast
from bloomery.model.io.parameters import is_linear_map
from bloomery.model.mixers.attention import Attention, plain_backend
from bloomery.model.norms import RMSNorm, widened
from bloomery.model.rope import Rotary, rotate


class LatentAttention(Attention):
    """Attention whose keys rotate in a part that all heads share. The cache holds that part and the latent vector.

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

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        layout: DocumentLayout,
        cache: LayerCache | None,
        lent: VisiblePast | None = None,
    ) -> Tensor | tuple[Tensor, VisiblePast]:
        if cache is None:
            return super().forward(x_BTD, rotary, layout, cache, lent)

        # All heads have one cached key, of which their keys and values are made: nothing is left for values.
        q_BHTE, _ = self.queries(x_BTD, rotary)
        latent_BTC, turned_BTP = self.latent(x_BTD, rotary)
        key_B1TX = torch.cat((latent_BTC, turned_BTP), dim=-1)[:, None]
        past = cache.extend(key_B1TX, key_B1TX[..., :0])
        if self.reads_latents(x_BTD.shape[1]):
            y_BTQ = self.of_latents(q_BHTE, past.keys[:, 0], past.mask)
        else:
            if past.mask is not None:
                layout = DocumentLayout(mask_B1TS=past.mask)
            seen = past.keys[:, 0].split([self.sizes.rank, self.sizes.rotary_width], dim=-1)
            keys, values, _ = self.expanded(*seen)
            y_BHTE = attend(
                q_BHTE,
                keys,
                values,
                layout,
                backend=plain_backend(self.config),
                window=None,
                softcap=None,
                scale=self.scale,
                dropout=0.0,
            )
            y_BTQ = self.output(y_BHTE)
        projected: Tensor = self.o_proj(y_BTQ)
        return projected

    def reads_latents(self, num_queries: int) -> bool:
        """Whether latent vectors are read as they are: for few queries, of a matrix that is no more than one.

        To expand a key and a value takes C (N + V) products a head, to read them as they are 2 C + P for each query.
        """
        sizes = self.sizes
        reading = num_queries * (2 * sizes.rank + sizes.rotary_width)
        expanding = sizes.rank * (sizes.plain_width + sizes.value_width)
        return is_linear_map(self.kv_b_proj) and reading <= expanding

    def of_latents(self, q_BHTE: Tensor, keys_BSX: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """[B, T, H V]: attention to the latent vectors and rotated parts [B, S, C + P], which no head expands.

        What would make keys of them goes into the queries instead, and what would make values comes after the sum
        (section 2.1.2): the same sums in another order.
        """
        sizes = self.sizes
        batch, num_heads, num_queries, _ = q_BHTE.shape
        num_keys = keys_BSX.shape[1]
        weight_HXC = self.kv_b_proj.weight.to(q_BHTE.dtype).unflatten(0, (self.num_heads, -1))
        to_keys_HNC, to_values_HVC = weight_HXC.split([sizes.plain_width, sizes.value_width], dim=1)
        plain_BHTN = q_BHTE[..., : sizes.plain_width]
        turned_BHTP = q_BHTE[..., sizes.plain_width : sizes.plain_width + sizes.rotary_width]
        made_HBTC = plain_BHTN.transpose(0, 1).flatten(1, 2) @ to_keys_HNC
        made_BHTC = made_HBTC.unflatten(1, (batch, num_queries)).transpose(0, 1)
        q_BHTX = torch.cat((made_BHTC, turned_BHTP), dim=-1)
        # The queries of all heads are rows of one product: no head copies the keys. In half precision a CPU would
        # compile a kernel for each number of keys, which takes longer than to widen them.
        if keys_BSX.device.type == "cpu":
            keys_BSX = widened(keys_BSX)
        q_BRX = q_BHTX.flatten(1, 2).to(keys_BSX.dtype)
        scores_BHTS = widened(q_BRX @ keys_BSX.mT).unflatten(1, (num_heads, -1)) * self.scale

        # The queries are the last of the keys, each of which sees those before and itself.
        places_S = torch.arange(num_keys, device=scores_BHTS.device)
        is_seen = places_S <= places_S[num_keys - num_queries :, None]
        if mask_B11S is not None:
            is_seen = mask_B11S
        weights_BHTS = scores_BHTS.masked_fill(~is_seen, -torch.inf).softmax(-1)
        latents_BSC = keys_BSX[..., : sizes.rank]
        sums_BRC = (weights_BHTS.to(keys_BSX.dtype).flatten(1, 2) @ latents_BSC).to(q_BHTE.dtype)
        sums_HBTC = sums_BRC.unflatten(1, (num_heads, -1)).transpose(0, 1).flatten(1, 2)
        # The matrix comes first: PyTorch would copy its transpose.
        y_HVBT = (to_values_HVC @ sums_HBTC.mT).unflatten(2, (batch, num_queries))
        y_BTQ: Tensor = y_HVBT.permute(2, 3, 0, 1).flatten(2)
        return y_BTQ

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
        return self.expanded(*self.latent(x_BTD, rotary))

    def latent(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """The normed vector [B, T, C], and the rotated part [B, T, P] of the keys of all heads."""
        latent = self.kv_a_proj_with_mqa(x_BTD)
        latent_BTC, turning = latent.split([self.sizes.rank, self.sizes.rotary_width], dim=-1)
        turned_BTP = self.turned(turning[..., None, :], rotary).squeeze(-2)
        return self.kv_a_layernorm(latent_BTC), turned_BTP

    def expanded(self, latent_BTC: Tensor, turned_BTP: Tensor) -> VisiblePast:
        """The keys and values of each head."""
        sizes = self.sizes
        heads = self.kv_b_proj(latent_BTC).unflatten(-1, (self.num_heads, -1))
        plain_BTHN, v_BTHV = heads.split([sizes.plain_width, sizes.value_width], dim=-1)
        shared = turned_BTP[..., None, :].expand(-1, -1, self.num_heads, -1)
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
