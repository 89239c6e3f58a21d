"""Fifty configurations of a run, none of which computes anything wrong: other families, precisions, adapters,
quantizations, optimizers, attention backends and layouts, each with each other in turn.
"""

from itertools import islice, product

from faulty_devices import plan_of

from bloomery.facts.config import RopeScaling
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, NoAdapter, Quantize
from device_for_tests import DEVICE

FAMILIES = {
    "llama": {"family": "llama", "qk_norm": "none"},
    "qwen2": {"family": "qwen2", "qk_norm": "none", "attention_bias": True},
    "qwen3": {"tie_embeddings": True},
    "gemma2": {
        "family": "gemma2",
        "qk_norm": "none",
        "norm": "rms_unit_offset",
        "norm_placement": "both",
        "activation": "gelu_tanh",
        "attention_softcap": 50.0,
        "final_softcap": 30.0,
        "scale_embeddings": True,
        "tie_embeddings": True,
        "num_layers": 4,
        "sliding_window": (512, None, 512, None),
    },
    "gemma3": {
        "family": "gemma3_text",
        "norm": "rms_unit_offset",
        "norm_placement": "both",
        "activation": "gelu_tanh",
        "scale_embeddings": True,
        "local_rope_theta": 1000.0,
        "num_layers": 4,
        "sliding_window": (512, 512, 512, None),
    },
    "gpt2": {
        "family": "gpt2",
        "qk_norm": "none",
        "norm": "layer",
        "positions": "learned",
        "num_kv_heads": 4,
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "max_positions": 1024,
        "tie_embeddings": True,
    },
    "olmo2": {"family": "olmo2", "qk_norm": "full", "norm_placement": "after", "num_kv_heads": 4},
    "smollm3": {
        "family": "smollm3",
        "qk_norm": "none",
        "num_layers": 4,
        "rotary_layers": (True, True, True, False),
    },
    "llama3": {
        "family": "llama",
        "qk_norm": "none",
        "rope_theta": 500_000.0,
        "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_positions=256),
        "vocab_size": 9_001,
    },
}
PRECISIONS = ("float32", "bfloat16", "float16", "bfloat16-pure")
ALL = ["all-linear"]
ADAPTERS = {
    "full": (NoAdapter(), Quantize()),
    "lora": (Lora(kind="lora", rank=4, dropout=0.1), Quantize()),
    "lora nf4": (Lora(kind="lora", rank=4, target_modules=ALL), Quantize(kind="nf4")),
    "dora int8": (Lora(kind="dora", rank=4, target_modules=ALL), Quantize(kind="int8")),
    "pissa": (Lora(kind="lora", rank=4, init="pissa", target_modules=ALL), Quantize()),
    "rslora nf4": (
        Lora(kind="lora", rank=8, use_rslora=True, dtype="bfloat16", modules_to_save=["norms"]),
        Quantize(kind="nf4", double_quant=False),
    ),
}
OPTIMIZERS = (
    {},
    {"kind": "muon"},
    {"fused": False, "betas": (0.9, 0.999), "eps": 1e-6},
    {"kind": "adafactor"},
    {"state_dtype": "int8"},
    {"state_dtype": "bfloat16"},
    {"learning_rate": 1e-5, "weight_decay": 0.0},
)
# `per_document` has a kernel for the CPU alone.
PACKED = "per_document" if DEVICE == "cpu" else "blockwise"
ATTENTION = ("mask", "blockwise", PACKED, "math", "sdpa")
CHECKPOINTING = ("none", "full", "selective")


def healthy_plans(count: int = 50) -> dict[str, RunPlan]:
    """By a name that says what they are. Each list goes round at its own pace: every pair of entries meets."""
    plans = {}
    families, adapters = list(FAMILIES), list(ADAPTERS)
    for index, _ in enumerate(islice(product(range(10), repeat=2), count)):
        family = families[index % 9]
        adapter_name = adapters[(index + index // 9) % 6]
        precision = PRECISIONS[(index + index // 4) % 4]
        optimizer = dict(OPTIMIZERS[index % 7])
        config = FAMILIES[family]
        attention = ATTENTION[(index + index // 5) % 5]
        if config.get("attention_softcap") and attention in ("mask", "sdpa"):
            attention = "blockwise"
        layout = "packed" if attention != "sdpa" else ("padded", "fixed")[index % 2]
        if precision == "bfloat16-pure" and not optimizer:
            optimizer = {"stochastic_rounding": True}
        adapter, quantize = ADAPTERS[adapter_name]
        name = f"{index}: {family}, {precision}, {adapter_name}, {attention}, {layout}, {optimizer}"
        plans[name] = plan_of(
            config=config,
            model={"attention": attention},
            data={"layout": layout},
            train={
                "precision": precision,
                "activation_checkpointing": CHECKPOINTING[index % 3],
                "max_grad_norm": (1.0, None)[index % 2],
            },
            optimizer=optimizer,
            adapter=adapter,
            quantize=quantize,
        )
    return plans
