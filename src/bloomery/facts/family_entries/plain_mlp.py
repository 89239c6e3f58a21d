"""Families with rotary positions whose MLP has no gate."""

from collections.abc import Mapping
from types import MappingProxyType

from bloomery.facts.config_fields import ModelFacts
from bloomery.facts.family import BIASES, LLAMA_KEYS, Family, StoredNames
from bloomery.facts.family_rules import windows_everywhere
from bloomery.facts.family_rules_dense import named_dropouts, write_starcoder2
from bloomery.facts.gguf_graphs import GgufGraph

_PLAIN: ModelFacts = {"gated_mlp": False}
_ALL_BIASES = {**BIASES, "mlp_bias": "mlp_bias"}
_FREE_BIASES = ("attention_bias", "output_bias", "mlp_bias")


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "arcee": Family(
            "ArceeForCausalLM",
            "Arcee",
            _PLAIN,
            flags=_ALL_BIASES,
            defaults={
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "hidden_act": "relu2",
                "rope_theta": 1e4,
            },
            gguf=GgufGraph("arcee", {**_PLAIN, "activation": "relu2"}, free=(), interleaved=True),
        ),
        "starcoder2": Family(
            "Starcoder2ForCausalLM",
            "StarCoder 2",
            {**_PLAIN, "norm": "layer"},
            keys=LLAMA_KEYS | {"norm_eps": "norm_epsilon"},
            flags={
                "attention_bias": "use_bias",
                "output_bias": "use_bias",
                "mlp_bias": "use_bias",
            },
            windows=windows_everywhere,
            extra=named_dropouts,
            write=write_starcoder2,
            defaults={
                "num_key_value_heads": 2,
                "max_position_embeddings": 4096,
                "norm_epsilon": 1e-5,
                "hidden_act": "gelu_pytorch_tanh",
                "rope_theta": 1e4,
                "use_bias": True,
                "tie_word_embeddings": True,
            },
            stored=StoredNames(renamed={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
            gguf=GgufGraph(
                "starcoder2",
                {**_PLAIN, "norm": "layer", "activation": "gelu_tanh"},
                free=_FREE_BIASES,
            ),
        ),
        "nemotron": Family(
            "NemotronForCausalLM",
            "Nemotron",
            {**_PLAIN, "norm": "layer_unit_offset"},
            keys=LLAMA_KEYS | {"norm_eps": "norm_eps"},
            flags=_ALL_BIASES,
            reads_rotary_share=True,
            defaults={
                "max_position_embeddings": 4096,
                "norm_eps": 1e-5,
                "hidden_act": "relu2",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
            gguf=GgufGraph(
                "nemotron",
                {**_PLAIN, "norm": "layer_unit_offset", "activation": "relu2"},
                free=(*_FREE_BIASES, "rotary_share"),
            ),
        ),
        "jais2": Family(
            "Jais2ForCausalLM",
            "Jais 2",
            {**_PLAIN, "norm": "layer"},
            keys=LLAMA_KEYS | {"norm_eps": "layer_norm_eps"},
            flags=_ALL_BIASES,
            defaults={
                "max_position_embeddings": 8192,
                "layer_norm_eps": 1e-5,
                "hidden_act": "relu2",
                "rope_theta": 1e4,
                "attention_bias": True,
                "mlp_bias": True,
            },
            gguf=GgufGraph(
                "jais2",
                {**_PLAIN, "norm": "layer", "activation": "relu2"},
                free=_FREE_BIASES,
            ),
        ),
    }
)
