"""GPT-2: learned positions, layer norms, fused and transposed matrices."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.family import QKV, Family, StoredNames
from bloomery.facts.gguf_graphs import GgufGraph

GPT2_KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        "attention_dropout": "attn_pdrop",
    }
)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            "GPT2LMHeadModel",
            "GPT-2",
            {
                "norm": "layer",
                "gated_mlp": False,
                "attention_bias": True,
                "output_bias": True,
                "mlp_bias": True,
                "positions": "learned",
            },
            keys=GPT2_KEYS,
            gelu_tanh="gelu_new",
            states_dropout=True,
            extra=lambda fields, _: {
                "attention_scale": 1.0 if fields.get("scale_attn_weights") is False else None
            },
            write=lambda config: {"scale_attn_weights": config.attention_scale is None},
            defaults={
                "n_positions": 1024,
                "layer_norm_epsilon": 1e-5,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "tie_word_embeddings": True,
            },
            refused=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
            stored=StoredNames(
                renamed={
                    "model.embed_tokens": "transformer.wte",
                    "model.embed_positions": "transformer.wpe",
                    "model.norm": "transformer.ln_f",
                    "model.layers": "transformer.h",
                    "input_layernorm": "ln_1",
                    "post_attention_layernorm": "ln_2",
                    "self_attn.o_proj": "attn.c_proj",
                    "mlp.up_proj": "mlp.c_fc",
                    "mlp.down_proj": "mlp.c_proj",
                },
                fused={QKV: "attn.c_attn"},
                transposed=True,
            ),
            gguf=GgufGraph(
                "gpt2",
                {
                    "norm": "layer",
                    "activation": "gelu_tanh",
                    "gated_mlp": False,
                    "positions": "learned",
                    "attention_bias": True,
                    "output_bias": True,
                    "mlp_bias": True,
                },
                free=(),
                full_width=True,
                fused={QKV: "attn_qkv"},
                takes_exact_gelu=True,
            ),
        ),
    }
)
