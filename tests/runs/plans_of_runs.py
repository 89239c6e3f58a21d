"""A plan by hand, for what the launcher decides of it."""

from pathlib import Path

from bloomery.facts.config import ModelConfig
from bloomery.plan.types import RunPlan

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=64,
    family="llama",
)


def plan_of(*, attention: str = "mask", **train: object) -> RunPlan:
    """`train`: fields of its section."""
    plan = {
        "name": "tiny",
        "torch": "2.13.0",
        "step_seconds": None,
        "total_tokens": None,
        "choices": (),
        "model": {"config": CONFIG, "source": None, "attention": attention, "score_chunk": 64},
        "data": {
            "prepared": Path(),
            "sequence_length": 32,
            "layout": "packed",
            "pin_memory": False,
            "prefetch": 2,
        },
        "optimizer": {
            "kind": "adamw",
            "learning_rate": 0.01,
            "muon_learning_rate": 0.02,
            "momentum": 0.95,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "fused": True,
            "schedule": "cosine",
            "min_lr_ratio": 0.0,
            "warmup_steps": 2,
            "decay_steps": 0,
        },
        "train": {
            "steps": 6,
            "seconds": None,
            "tokens_per_step": 128,
            "micro_batch_size": 2,
            "accumulation": 2,
            "precision": "float32",
            "compile": False,
            "activation_checkpointing": "none",
            "max_grad_norm": 1.0,
            "seed": 0,
            "deterministic": False,
            "threads": 1,
            "device": "cpu",
        }
        | train,
        "checkpoint": {"every_steps": 3, "keep": 2, "async_save": False},
        "eval": {"every_steps": 3, "early_stopping_patience": None, "micro_batch_size": 2},
        "sample": {"prompts": (), "max_new_tokens": 4, "temperature": 0.8, "top_p": 0.95},
        "logging": {"every_steps": 1, "trackers": (), "commands": ()},
        "memory": {"parts": {}, "low": 0, "high": 0, "limit": 1, "origin": "table"},
    }
    return RunPlan.model_validate(plan)
