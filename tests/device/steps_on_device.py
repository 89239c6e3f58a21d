"""Steps of a model of six layers whose weights stream, by the functions of a run, on random tokens."""

from typing import Any

import torch
from plans_for_tests import tiny_config, tiny_plan

from bloomery.data.batch import Batch
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Quantize
from device_for_tests import MEMORY_LIMIT

LAYERS = 6
CONFIG = tiny_config(num_layers=LAYERS, vocab_size=96)
UNTIED = tiny_config(num_layers=LAYERS, vocab_size=96, tie_embeddings=False)
LORA = Lora(kind="lora", rank=2, alpha=4.0, target_modules=["q_proj", "down_proj"])
FULL_BFLOAT16 = {
    "train": {"precision": "bfloat16-pure"},
    "optimizer": {"fused": False, "state_dtype": "int8"},
}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full bfloat16": FULL_BFLOAT16,
    "lora": {"adapter": LORA},
    "nf4": {"adapter": LORA, "quantize": Quantize(kind="nf4")},
    "full, staged": {"train": {"stream_host": "staged"}},
    "lora, staged": {"adapter": LORA, "train": {"stream_host": "staged"}},
    # The gradients of a tied matrix would be added in another order.
    "full, two per load": {"train": {"stream_micro_batches": 2}, "config": UNTIED},
    "lora, two per load": {"adapter": LORA, "train": {"stream_micro_batches": 2}},
}


def streamed_plan(case: str, *, accumulation: int = 2, stream: str = "layers") -> RunPlan:
    """Of one row of 16 tokens in each micro-batch. `stream`: "off" for weights that are on the device."""
    sections = dict(CASES[case])
    whole = {name: sections.pop(name) for name in ("adapter", "quantize") if name in sections}
    sections["train"] = {
        "device": "cuda",
        "stream": stream,
        "activation_checkpointing": "full",
        "micro_batch_size": 1,
        "accumulation": accumulation,
        "tokens_per_step": 16 * accumulation,
    } | sections.get("train", {})
    if stream == "off":
        sections["train"] |= {"stream_micro_batches": 1}
    plan = tiny_plan(
        config=sections.pop("config", CONFIG),
        data={"sequence_length": 16, "pin_memory": True},
        memory={"limit": MEMORY_LIMIT},
        **sections,
    )
    return plan.model_copy(update=whole)


def batches_of(step: int, plan: RunPlan) -> list[Batch]:
    """The micro-batches of a step: the tokens are drawn from its number."""
    generator = torch.Generator().manual_seed(step)
    shape = plan.train.micro_batch_size, plan.data.sequence_length
    batches = []
    for _ in range(plan.train.accumulation):
        tokens_BT = torch.randint(0, plan.model.config.vocab_size, shape, generator=generator)
        positions_BT = torch.arange(shape[1]).expand(shape)
        batches.append(
            Batch(
                tokens_BT,
                tokens_BT.roll(-1, 1),
                torch.ones(shape),
                positions_BT,
                torch.zeros_like(positions_BT),
            )
        )
    return batches
