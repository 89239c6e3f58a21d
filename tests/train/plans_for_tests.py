"""Plans made by hand, for models that a test trains in a second."""

from pathlib import Path

import torch

from bloomery.core.units import Duration
from bloomery.facts.config import LayerSizes, ModelConfig, RopeScaling
from bloomery.plan.types import (
    CheckpointPlan,
    DataPlan,
    EvalPlan,
    Lengths,
    LoggingPlan,
    MemoryEstimate,
    ModelPlan,
    OptimizerPlan,
    RunPlan,
    SamplePlan,
    TrainPlan,
)
from device_for_tests import DEVICE, MEMORY_LIMIT, SIMULATED, STREAM

# models this small are slower on two threads, and much slower on a busy machine
torch.set_num_threads(1)

THOUSAND = Duration(1000, "steps")
LENGTHS = Lengths(
    train=Duration(1, "seconds"),
    warmup=Duration(1, "percent"),
    decay=None,
    checkpoint=THOUSAND,
    evaluation=Duration(50, "percent"),
)


def tiny_config(**changes) -> ModelConfig:
    facts = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_positions": 64,
        "qk_norm": "head",
        "tie_embeddings": True,
        "family": "qwen3",
    }
    return ModelConfig(**(facts | changes))


def sharing_config() -> ModelConfig:
    """Gemma 4's small models: layers with the keys of another, and inputs of each layer."""
    narrow, wide = (
        LayerSizes(num_heads=4, num_kv_heads=2, head_dim=width, intermediate_size=48)
        for width in (8, 16)
    )
    return tiny_config(
        family="gemma4_text",
        vocab_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        activation="gelu_tanh",
        norm_placement="both",
        value_norm=True,
        scale_embeddings=True,
        layer_scalar=True,
        attention_scale=1.0,
        local_rope_theta=1e4,
        rope_theta=1e6,
        rope_scaling=RopeScaling(kind="proportional", factor=1.0, turning_share=0.25),
        sliding_window=(8, None, 8, None),
        layer_sizes=(narrow, wide, narrow, wide),
        num_kv_shared_layers=2,
        per_layer_input_size=8,
    )


def tiny_plan(prepared: Path = Path(), *, config: ModelConfig | None = None, **sections) -> RunPlan:
    """`sections`: changes by section, such as train={"steps": 4}."""
    parts = {
        "model": ModelPlan(
            config=config or tiny_config(), source=None, attention="mask", score_chunk=64
        ),
        "data": DataPlan(
            prepared=prepared,
            sequence_length=32,
            layout="packed",
            pin_memory=SIMULATED,
            prefetch=2,
        ),
        "optimizer": OptimizerPlan(
            kind="adamw",
            learning_rate=0.01,
            muon_learning_rate=0.02,
            momentum=0.95,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            fused=True,
            schedule="cosine",
            min_lr_ratio=0.0,
            warmup_steps=2,
            decay_steps=0,
        ),
        "train": TrainPlan(
            steps=6,
            seconds=None,
            tokens_per_step=128,
            micro_batch_size=2,
            accumulation=2,
            precision="float32",
            compile=False,
            max_grad_norm=1.0,
            seed=0,
            deterministic=False,
            threads=1,
            device=DEVICE,
            **{"activation_checkpointing": "none", **STREAM},
        ),
        "checkpoint": CheckpointPlan(every_steps=3, keep=2, async_save=False),
        "eval": EvalPlan(
            every_steps=3,
            sequences=None,
            early_stopping_patience=None,
            micro_batch_size=8,  # with fewer, an evaluation takes longer than the steps before it
        ),
        "sample": SamplePlan(prompts=(), max_new_tokens=4, temperature=0.8, top_p=0.95),
        "logging": LoggingPlan(every_steps=1, trackers=(), commands=()),
    }
    changed = {name: part.model_copy(update=sections.get(name, {})) for name, part in parts.items()}
    return RunPlan(
        name="tiny",
        **changed,
        torch=torch.__version__,
        step_seconds=None,
        total_tokens=None,
        choices=(),
        memory=MemoryEstimate(parts={}, low=0, high=0, limit=MEMORY_LIMIT, origin="table"),
        lengths=LENGTHS,
    )
