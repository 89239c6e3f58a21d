"""Safer plans after a failure: less memory, plainer kernels, a wider precision, a lower learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.plan.batch import SMALLEST_CHUNK
from bloomery.plan.types import Decision, RunPlan

LOGITS_SHARE = 0.02  # of the planned memory, below which smaller chunks of logits are no help
MOST_HALVINGS = 3  # of the learning rate: a run that diverges at an eighth of it has another cause


@final
@dataclass(frozen=True)
class Fallback:
    """The plan with safer settings, and a short description of the change and its cost.

    `only_time`: the same training up to the order of sums; applied without asking.
    """

    plan: RunPlan
    action: str
    only_time: bool = False


def decided(plan: RunPlan, key: str, value: object, reason: str) -> RunPlan:
    """The plan with a changed choice of this key."""
    decision = Decision(key=key, value=str(value), reason=reason)
    other_choices = [choice for choice in plan.choices if choice.key != key]
    position = next(
        (index for index, choice in enumerate(plan.choices) if choice.key == key),
        len(other_choices),
    )
    return plan.model_copy(
        update={"choices": (*other_choices[:position], decision, *other_choices[position:])}
    )


def smaller_micro_batch(plan: RunPlan, reason: str) -> Fallback | None:
    """Half the micro-batch size (or the next divisor), more gradient accumulation; None at micro-batch size 1.

    Tokens per step, order of the data and the gradient's mathematics stay; sums are formed in another order.
    """
    sequences = plan.train.micro_batch_size
    if sequences == 1 or plan.optimizer.fused_backward:  # freed gradients cannot be accumulated
        return None
    factor = next(number for number in range(2, sequences + 1) if sequences % number == 0)
    smaller_size = sequences // factor
    accumulation_steps = plan.train.accumulation * factor
    smaller_tokens = smaller_size * plan.data.sequence_length // plan.train.context
    cut = {
        "train": plan.train.model_copy(
            update={"micro_batch_size": smaller_size, "accumulation": accumulation_steps}
        ),
        "model": plan.model.model_copy(
            update={"score_chunk": min(plan.model.score_chunk, smaller_tokens)}
        ),
    }
    smaller = decided(plan.model_copy(update=cut), "train.micro_batch_size", smaller_size, reason)
    accumulation = f"gradient accumulation {plan.train.accumulation} -> {accumulation_steps}"
    action = f"micro-batch {sequences} -> {smaller_size}, {accumulation}; tokens per step unchanged"
    return Fallback(smaller, action, only_time=True)


def smaller_evaluation(plan: RunPlan, reason: str) -> Fallback | None:
    """Half the micro-batch size of evaluations; None at 1."""
    sequences = plan.eval.micro_batch_size
    if sequences == 1:
        return None
    smaller = plan.model_copy(
        update={"eval": plan.eval.model_copy(update={"micro_batch_size": sequences // 2})}
    )
    action = f"evaluation micro-batch {sequences} -> {sequences // 2}; same result"
    return Fallback(
        decided(smaller, "eval.micro_batch_size", sequences // 2, reason), action, only_time=True
    )


def plainer(plan: RunPlan, reason: str) -> Fallback | None:
    """The next of: no compilation, blockwise attention, float32, a smaller micro-batch; None when all are taken."""
    if plan.train.compile:
        return Fallback(
            _trained(plan, "train.compile", False, reason), "train.compile true -> false"
        )
    if plan.model.attention != "blockwise":
        return blockwise(plan, reason)
    if plan.train.precision != "float32":
        return _precise(plan, "float32", reason)
    return smaller_micro_batch(plan, reason)


def blockwise(plan: RunPlan, reason: str) -> Fallback | None:
    """Attention in plain PyTorch; None where the plan has it.

    In place of Triton kernels that the plan chose by itself this only costs time, and stays on any machine.
    """
    if plan.model.attention == "blockwise":
        return None
    only_time = plan.model.attention == "triton" and not plan.model.attention_is_set
    changed_plan = plan.model_copy(
        update={"model": plan.model.model_copy(update={"attention": "blockwise"})}
    )
    changed_plan = decided(changed_plan, "train.attention", "blockwise", reason)
    action = f"attention {plan.model.attention} -> blockwise"
    if only_time:
        return Fallback(
            _noted(changed_plan, "model.attention"), f"{action}; slower", only_time=True
        )
    return Fallback(changed_plan, action)


def through_the_host(plan: RunPlan, reason: str) -> Fallback:
    """The same pipeline, whose stages send through the memory of their hosts: the numbers stay."""
    train = plan.train.model_copy(update={"pipeline_link": "host"})
    changed_plan = plan.model_copy(update={"train": train})
    return Fallback(
        decided(changed_plan, "parallel.pipeline_link", "host", reason),
        "parallel.pipeline_link auto -> host; same numbers, slower transfers",
        only_time=True,
    )


def roomier(plan: RunPlan, reason: str) -> Fallback | None:
    """The next change that needs less memory, or moves it to the CPU; None when all are taken.

    A smaller micro-batch, in evaluations too; fewer that share a load of streamed weights; logits in smaller chunks;
    recomputed activations; on a GPU activations, then optimizer states, in CPU memory; last, and the only one that
    changes numbers, optimizer states in 8 bits.
    """
    fallback = smaller_micro_batch(plan, reason)
    if fallback is not None:
        sequences = min(plan.eval.micro_batch_size, fallback.plan.train.micro_batch_size)
        evaluated = fallback.plan.model_copy(
            update={"eval": fallback.plan.eval.model_copy(update={"micro_batch_size": sequences})}
        )
        return Fallback(evaluated, fallback.action, only_time=True)
    together = plan.train.stream_micro_batches
    if together > 1:
        action = f"micro-batches per load of streamed weights {together} -> {together // 2}; same training"
        changed_plan = _trained(plan, "parallel.stream_micro_batches", together // 2, reason)
        return Fallback(changed_plan, action, only_time=True)
    chunk = plan.model.score_chunk
    logits = plan.step_memory.parts.get("logits", 0.0)
    if chunk > SMALLEST_CHUNK and logits > LOGITS_SHARE * plan.step_memory.total:
        model = plan.model.model_copy(update={"score_chunk": SMALLEST_CHUNK})
        smaller = decided(
            plan.model_copy(update={"model": model}), "model.score_chunk", SMALLEST_CHUNK, reason
        )
        action = f"logits in chunks of {chunk:,} -> {SMALLEST_CHUNK} tokens; same training"
        return Fallback(smaller, action, only_time=True)
    optimizer = plan.optimizer
    gpu = plan.train.device != "cpu"
    settings = OPTIMIZERS[optimizer.kind].settings
    if plan.train.activation_checkpointing != "full":
        action = "activation checkpointing: full (recompute); less memory, a third more compute"
        return Fallback(
            _trained(plan, "train.activation_checkpointing", "full", reason), action, only_time=True
        )
    # `refuse_unsupported` has no row for it with shards.
    if gpu and not plan.train.offload_activations and plan.train.shard == 1:
        action = "activations offloaded to CPU memory; two copies per step"
        return Fallback(
            _trained(plan, "train.offload_activations", True, reason), action, only_time=True
        )
    # Of weights that stream and are all trained the states are in CPU memory already.
    states_stream = plan.train.stream == "layers" and plan.adapter.kind == "none"
    if gpu and "offload" in settings and not optimizer.offload and not states_stream:
        action = "optimizer states offloaded to CPU memory; two copies per step"
        return Fallback(
            _optimized(plan, {"offload": True}, "optimizer.offload", "true", reason),
            action,
            only_time=True,
        )
    if "state_dtype" not in settings or optimizer.state_dtype == "int8" or plan.train.shard > 1:
        return None
    changed_plan = _optimized(
        plan, {"state_dtype": "int8"}, "optimizer.state_dtype", "int8", reason
    )
    action = f"optimizer states {optimizer.state_dtype} -> int8; nearly the same training"
    return Fallback(_noted(changed_plan, "optimizer.state_dtype"), action)


def steadier(plan: RunPlan, reason: str, *, bfloat16: bool) -> Fallback | None:
    """The next change for losses that stay non-finite; None when all are taken.

    float16, whose numbers end at 65,504, becomes bfloat16 where the device has it (`bfloat16`), else float32. Then half
    the learning rate, three times at most; last, bfloat16 becomes float32.
    """
    if plan.train.precision == "float16":
        return _precise(plan, "bfloat16" if bfloat16 else "float32", reason)
    if plan.recovered.count("optimizer.learning_rate") < MOST_HALVINGS:
        optimizer = plan.optimizer
        halves = {
            "learning_rate": optimizer.learning_rate / 2,
            "muon_learning_rate": optimizer.muon_learning_rate / 2,
        }
        changed_plan = _optimized(
            plan, halves, "optimizer.learning_rate", f"{optimizer.learning_rate / 2:g}", reason
        )
        rate = f"{optimizer.learning_rate:g} -> {optimizer.learning_rate / 2:g}"
        action = f"learning rate {rate}; changes the training"
        return Fallback(_noted(changed_plan, "optimizer.learning_rate"), action)
    return _precise(plan, "float32", reason) if plan.train.precision != "float32" else None


def _precise(plan: RunPlan, precision: str, reason: str) -> Fallback:
    cost = "more memory, slower" if precision == "float32" else "same memory"
    action = f"precision {plan.train.precision} -> {precision}; {cost}"
    return Fallback(
        _noted(_trained(plan, "train.precision", precision, reason), "train.precision"), action
    )


def _noted(plan: RunPlan, key: str) -> RunPlan:
    return plan.model_copy(update={"recovered": (*plan.recovered, key)})


def _optimized(
    plan: RunPlan, update: Mapping[str, object], key: str, value: str, reason: str
) -> RunPlan:
    changed_plan = plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update=update)})
    return decided(changed_plan, key, value, reason)


def _trained(plan: RunPlan, key: str, value: object, reason: str) -> RunPlan:
    field = key.partition(".")[2]
    changed_plan = plan.model_copy(update={"train": plan.train.model_copy(update={field: value})})
    shown_value = (
        {True: "compiled", False: "uncompiled"}[bool(value)] if field == "compile" else value
    )
    return decided(changed_plan, key, shown_value, reason)
