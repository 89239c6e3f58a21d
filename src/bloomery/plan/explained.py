"""What a diagnosis of a run needs of its plan, its machine and its text."""

from bloomery.data.traits import Traits, read_traits
from bloomery.errors import UserError
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.explain import Facts
from bloomery.plan.types import Plan
from bloomery.units import GIB


def diagnosis_facts(plan: Plan, machine: Machine | None) -> Facts:
    """Reads a sample of the shards: a tenth of a second. Text that is gone or damaged is not known."""
    config, train, optimizer, traits = plan.model.config, plan.train, plan.optimizer, _traits(plan)
    estimate, kind = plan.step_seconds, plan.objective.kind
    return Facts(
        vocab_size=config.vocab_size if kind in ("pretrain", "sft") else None,  # a guess is worth ln V to these alone
        fresh=plan.model.source is None and kind in ("pretrain", "sft"),  # other losses begin and fall otherwise
        falls=kind in ("pretrain", "sft", "distil"),
        steps=train.steps,
        tokens_per_step=train.tokens_per_step,
        sequence_length=plan.data.sequence_length,
        layout=plan.data.layout,
        optimizer=optimizer.kind,
        learning_rate=optimizer.learning_rate,
        matrix_learning_rate=optimizer.matrix_learning_rate,
        warmup_steps=optimizer.warmup_steps,
        clip=train.clip,
        precision=train.precision,
        unigram_nats=traits.unigram_nats if traits and kind == "pretrain" else None,  # counted over all of the text
        bytes_per_token=traits.bytes_per_token if traits else None,
        duplicates=traits.duplicates if traits else None,
        text_tokens=traits.tokens if traits else None,
        device=train.device,
        fused_attention=None if machine is None else build_profile(machine).attention.value == "fused",
        checkpointing=train.activation_checkpointing,
        compiled=train.compile,
        saves_in_background=plan.checkpoint.asynchronous,
        memory_limit_gib=plan.memory.limit / GIB,
        step_seconds=None if estimate is None else (estimate.low, estimate.high),
    )


def _traits(plan: Plan) -> Traits | None:
    try:
        return read_traits(plan.data.prepared)
    except (UserError, OSError):
        return None
