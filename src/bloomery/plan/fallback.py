"""A plan made safer after a failure: in less memory, on plainer kernels, in a wider precision, or at a lower rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from bloomery.plan.types import Decision, RunPlan

MOST_HALVINGS = 3  # of the learning rate: what still diverges at an eighth of it has another cause


@final
@dataclass(frozen=True)
class Fallback:
    """The plan one rung safer, and in a few words what the run does from here on and what that costs.

    `only_time`: it computes the same, up to the order of sums, so that nobody needs to ask for it.
    """

    plan: RunPlan
    action: str
    only_time: bool = False


def decided(plan: RunPlan, key: str, value: object, reason: str) -> RunPlan:
    """The plan's table of choices says so; what it said of this key before is replaced."""
    new = Decision(key=key, value=str(value), reason=reason)
    kept = [old for old in plan.choices if old.key != key]
    place = next((index for index, old in enumerate(plan.choices) if old.key == key), len(kept))
    return plan.model_copy(update={"choices": (*kept[:place], new, *kept[place:])})


def smaller_micro_batch(plan: RunPlan, reason: str) -> Fallback | None:
    """Half the rows at once, twice as often (or the next divisor); None at one row. Everything else of a step stays.

    Tokens per step, order of the data and the gradient's mathematics are the same; sums are formed in another order.
    """
    sequences = plan.train.micro_batch_size
    if sequences == 1 or plan.optimizer.fused_backward:  # gradients that are freed at once cannot be added up
        return None
    factor = next(number for number in range(2, sequences + 1) if sequences % number == 0)
    fewer, more = sequences // factor, plan.train.accumulation * factor
    cut = {
        "train": plan.train.model_copy(update={"micro_batch_size": fewer, "accumulation": more}),
        "model": plan.model.model_copy(
            update={"score_chunk": min(plan.model.score_chunk, fewer * plan.data.sequence_length)}
        ),
    }
    smaller = decided(plan.model_copy(update=cut), "train.micro_batch_size", fewer, reason)
    action = f"micro-batch {fewer} instead of {sequences}, accumulated {more} times: the same tokens a step"
    return Fallback(smaller, action, only_time=True)


def smaller_evaluation(plan: RunPlan, reason: str) -> Fallback | None:
    """Half the rows at once in an evaluation; None at one row."""
    sequences = plan.eval.micro_batch_size
    if sequences == 1:
        return None
    smaller = plan.model_copy(update={"eval": plan.eval.model_copy(update={"micro_batch_size": sequences // 2})})
    action = f"evaluation in micro-batches of {sequences // 2} instead of {sequences}: the same score"
    return Fallback(decided(smaller, "eval.micro_batch_size", sequences // 2, reason), action, only_time=True)


def plainer(plan: RunPlan, reason: str) -> Fallback | None:
    """The next of: no compilation, blockwise attention, float32, a smaller micro-batch; None when all are taken."""
    if plan.train.compile:
        return Fallback(_trained(plan, "train.compile", False, reason), "without compilation")
    if plan.model.attention != "blockwise":
        return blockwise(plan, reason)
    if plan.train.precision != "float32":
        return _precise(plan, "float32", reason)
    return smaller_micro_batch(plan, reason)


def blockwise(plan: RunPlan, reason: str) -> Fallback | None:
    """Attention in plain PyTorch; None where it is."""
    if plan.model.attention == "blockwise":
        return None
    changed = plan.model_copy(update={"model": plan.model.model_copy(update={"attention": "blockwise"})})
    action = f"blockwise attention instead of {plan.model.attention}"
    return Fallback(decided(changed, "train.attention", "blockwise", reason), action)


def roomier(plan: RunPlan, reason: str) -> Fallback | None:
    """The next of what takes less memory, or takes it elsewhere; None when all are taken.

    A smaller micro-batch, in evaluations too; recomputed activations; on a GPU activations, then optimizer states, in
    the host's memory; last, and the only one that changes numbers, optimizer states in 8 bits.
    """
    fallback = smaller_micro_batch(plan, reason)
    if fallback is not None:
        sequences = min(plan.eval.micro_batch_size, fallback.plan.train.micro_batch_size)
        looked = fallback.plan.model_copy(
            update={"eval": fallback.plan.eval.model_copy(update={"micro_batch_size": sequences})}
        )
        return Fallback(looked, fallback.action, only_time=True)
    optimizer, gpu = plan.optimizer, plan.train.device != "cpu"
    if plan.train.activation_checkpointing != "full":
        action = "activations are recomputed: less memory, a third more compute"
        return Fallback(_trained(plan, "train.activation_checkpointing", "full", reason), action, only_time=True)
    if gpu and not plan.train.offload_activations:
        action = "activations wait in the host's memory: they travel twice a step"
        return Fallback(_trained(plan, "train.offload_activations", True, reason), action, only_time=True)
    if gpu and optimizer.kind == "adamw" and not (optimizer.offload or optimizer.paged):
        action = "optimizer states wait in the host's memory: they travel twice a step"
        return Fallback(
            _optimized(plan, {"offload": True}, "optimizer.offload", "true", reason), action, only_time=True
        )
    if optimizer.kind != "adamw" or optimizer.state_dtype == "int8":
        return None
    changed = _optimized(plan, {"state_dtype": "int8"}, "optimizer.state_dtype", "int8", reason)
    action = f"optimizer states in int8 instead of {optimizer.state_dtype}: nearly the same training"
    return Fallback(_noted(changed, "optimizer.state_dtype"), action)


def steadier(plan: RunPlan, reason: str, *, bfloat16: bool) -> Fallback | None:
    """What losses that stay non-finite may need; None when all is taken.

    float16, whose numbers end at 65,504, becomes bfloat16 where the device has it (`bfloat16`), else float32. Then half
    the learning rate, three times at most; last, bfloat16 becomes float32.
    """
    if plan.train.precision == "float16":
        return _precise(plan, "bfloat16" if bfloat16 else "float32", reason)
    if plan.recovered.count("optimizer.learning_rate") < MOST_HALVINGS:
        old = plan.optimizer
        halves = {"learning_rate": old.learning_rate / 2, "muon_learning_rate": old.muon_learning_rate / 2}
        changed = _optimized(plan, halves, "optimizer.learning_rate", f"{old.learning_rate / 2:g}", reason)
        rate = f"{old.learning_rate / 2:g} instead of {old.learning_rate:g}"
        action = f"learning rate {rate}: another training from here on"
        return Fallback(_noted(changed, "optimizer.learning_rate"), action)
    return _precise(plan, "float32", reason) if plan.train.precision != "float32" else None


def _precise(plan: RunPlan, precision: str, reason: str) -> Fallback:
    cost = ": more memory, and slower" if precision == "float32" else ": the same memory"
    action = f"matrix products in {precision} instead of {plan.train.precision}{cost}"
    return Fallback(_noted(_trained(plan, "train.precision", precision, reason), "train.precision"), action)


def _noted(plan: RunPlan, key: str) -> RunPlan:
    return plan.model_copy(update={"recovered": (*plan.recovered, key)})


def _optimized(plan: RunPlan, update: Mapping[str, object], key: str, value: str, reason: str) -> RunPlan:
    changed = plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update=update)})
    return decided(changed, key, value, reason)


def _trained(plan: RunPlan, key: str, value: object, reason: str) -> RunPlan:
    field = key.partition(".")[2]
    changed = plan.model_copy(update={"train": plan.train.model_copy(update={field: value})})
    said = {True: "compiled", False: "uncompiled"}[bool(value)] if field == "compile" else value
    return decided(changed, key, said, reason)
