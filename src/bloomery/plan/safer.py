"""A plan made safer after a failure: the same training in smaller micro-batches, or on plainer kernels."""

from dataclasses import dataclass
from typing import final

from bloomery.plan.types import Decision, Plan


@final
@dataclass(frozen=True)
class Rung:
    """The plan one rung safer, and in a few words what the run does from here on."""

    plan: Plan
    action: str


def decided(plan: Plan, key: str, value: object, because: str) -> Plan:
    """The plan's table of choices says so; what it said of this key before is replaced."""
    new = Decision(key=key, value=str(value), because=because)
    kept = [old for old in plan.decisions if old.key != key]
    place = next((index for index, old in enumerate(plan.decisions) if old.key == key), len(kept))
    return plan.model_copy(update={"decisions": (*kept[:place], new, *kept[place:])})


def smaller_micro_batch(plan: Plan, because: str) -> Rung | None:
    """Half the rows at once, twice as often (or the next divisor); None at one row. Everything else of a step stays.

    Tokens per step, order of the data and the gradient's mathematics are the same; sums are formed in another order.
    """
    rows = plan.train.micro_batch
    if rows == 1 or plan.optimizer.in_backward:  # gradients that are freed at once cannot be added up
        return None
    factor = next(number for number in range(2, rows + 1) if rows % number == 0)
    fewer, more = rows // factor, plan.train.accumulation * factor
    cut = {
        "train": plan.train.model_copy(update={"micro_batch": fewer, "accumulation": more}),
        "model": plan.model.model_copy(
            update={"score_chunk": min(plan.model.score_chunk, fewer * plan.data.sequence_length)}
        ),
    }
    smaller = decided(plan.model_copy(update=cut), "train.micro_batch", fewer, because)
    return Rung(smaller, f"micro-batch {fewer} instead of {rows}, accumulated {more} times: the same tokens a step")


def smaller_evaluation(plan: Plan, because: str) -> Rung | None:
    """Half the rows at once in an evaluation; None at one row."""
    rows = plan.eval.micro_batch
    if rows == 1:
        return None
    smaller = plan.model_copy(update={"eval": plan.eval.model_copy(update={"micro_batch": rows // 2})})
    action = f"evaluation in micro-batches of {rows // 2} instead of {rows}: the same score"
    return Rung(decided(smaller, "eval.micro_batch", rows // 2, because), action)


def recomputed(plan: Plan, because: str) -> Rung | None:
    """Activations computed twice instead of kept; None where they are."""
    key = "train.activation_checkpointing"
    if plan.train.activation_checkpointing == "full":
        return None
    return Rung(_trained(plan, key, "full", because), "activations are recomputed: less memory, a third more compute")


def plainer(plan: Plan, because: str) -> Rung | None:
    """The next of: no compilation, blockwise attention, float32, a smaller micro-batch; None when all are taken."""
    if plan.train.compile:
        return Rung(_trained(plan, "train.compile", False, because), "without compilation")
    if plan.model.attention != "blockwise":
        return blockwise(plan, because)
    if plan.train.precision != "float32":
        return Rung(_trained(plan, "train.precision", "float32", because), "matrix products in float32")
    return smaller_micro_batch(plan, because)


def blockwise(plan: Plan, because: str) -> Rung | None:
    """Attention in plain PyTorch; None where it is."""
    if plan.model.attention == "blockwise":
        return None
    changed = plan.model_copy(update={"model": plan.model.model_copy(update={"attention": "blockwise"})})
    action = f"blockwise attention instead of {plan.model.attention}"
    return Rung(decided(changed, "train.attention", "blockwise", because), action)


def roomier(plan: Plan, because: str) -> Rung | None:
    """The next of: a smaller micro-batch, in evaluations too, then recomputed activations; None when all are taken."""
    rung = smaller_micro_batch(plan, because)
    if rung is None:
        return recomputed(plan, because)
    rows = min(plan.eval.micro_batch, rung.plan.train.micro_batch)
    looked = rung.plan.model_copy(update={"eval": rung.plan.eval.model_copy(update={"micro_batch": rows})})
    return Rung(looked, rung.action)


def _trained(plan: Plan, key: str, value: object, because: str) -> Plan:
    field = key.partition(".")[2]
    changed = plan.model_copy(update={"train": plan.train.model_copy(update={field: value})})
    said = value if not isinstance(value, bool) else {True: "compiled", False: "uncompiled"}[value]
    return decided(changed, key, said, because)
