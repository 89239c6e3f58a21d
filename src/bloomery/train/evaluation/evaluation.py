"""Looking at a model in the middle of training, without leaving a trace: its loss on the validation split, samples."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor

from bloomery.data.loading.loader import Batch, Loader
from bloomery.model.decoder import Decoder
from bloomery.model.sampling import NotFinite
from bloomery.monitor.events import EvalDone, Phase, Recovered, Sampled, Warned
from bloomery.plan.fallback import smaller_evaluation
from bloomery.plan.store import write_plan
from bloomery.plan.types import EvalPlan
from bloomery.train.context import RunContext
from bloomery.train.evaluation.answers import samples
from bloomery.train.forward import eval_mode, to_device
from bloomery.train.length import Costs, current, measured, with_next_block
from bloomery.train.objectives.build import Objective
from bloomery.train.objectives.losses import added, means
from bloomery.train.objectives.reference import Stopped
from bloomery.train.recover import AllocationFailed, attempt, replan
from bloomery.train.step import compute_loss

# A guess at checkpoints, for the share of a wall-time length that they take: a hash, a copy, a disk.
WRITTEN_PER_SECOND, COPIED_PER_SECOND = 300e6, 3e9


@dataclass(frozen=True)
class EvalResult:
    """`loss` is nats per scored token, or what the objective has a pair or an answer; `bytes` are those that the scored
    tokens stand for, None where the loss is not about them.
    """

    loss: float
    tokens: int
    bytes: int | None
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """None of a loss that is not nats per token."""
        if self.bytes is None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Nats to bits, per byte of text: what a compressor would need. None when no byte was scored."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def event(self, step: int) -> EvalDone:
        """What is told of it; a loss that is not finite is None there."""
        return EvalDone(
            step=step,
            loss=_finite(self.loss),
            perplexity=_finite(self.perplexity),
            bits_per_byte=_finite(self.bits_per_byte),
            tokens=self.tokens,
            seconds=self.seconds,
            metrics=self.metrics,
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def evaluate(
    model: Decoder,
    loader: Loader,
    objective: Objective,
    *,
    plan: EvalPlan,
    precision: str,
    token_bytes: np.ndarray,
    limit: int | None,
) -> EvalResult | None:
    """Loss over the rows of `loader`, the validation split, in batches of one shape. None when nothing can be scored.

    `token_bytes`: int32 [vocabulary], how many bytes of text each id stands for. `limit`: rows read at most.
    """
    begun = time.perf_counter()
    device = next(model.parameters()).device
    total, count, tokens, size = 0.0, 0, 0, 0
    sums: dict[str, Tensor] = {}
    batches: Iterable[Batch] = loader.validation_batches(plan.micro_batch_size, limit=limit)
    with eval_mode(model):
        for batch in complete_batches(model, batches, objective):
            parts = compute_loss(model, to_device(batch, device), objective, precision=precision)
            total += float(parts.total)
            count += round(float(parts.count))
            sums = added(sums, parts.metrics)
            tokens += int((batch.loss_mask > 0).sum())
            size += int(token_bytes[batch.labels[batch.loss_mask > 0].numpy()].sum())
    if count == 0:
        return None
    scored = size if objective.per == "token" else None
    return EvalResult(total / count, tokens, scored, time.perf_counter() - begun, means(sums))


def complete_batches(model: Decoder, batches: Iterable[Batch], objective: Objective) -> Iterator[Batch]:
    """With what the objective asks the model before it scores them; all are read at once only where all must be known.

    KTO alone needs that, for its drift: 4 bytes a token on the model's device.
    """
    if objective.before is None:
        yield from batches
        return
    parts: Iterable[Sequence[Batch]] = [list(batches)] if objective.together else ([batch] for batch in batches)
    for part in parts:
        yield from objective.before(model, part)


def evaluate_and_sample(context: RunContext) -> None:
    """Evaluates and samples, once a step; the random numbers of training stay where they are.

    Raises Stopped when the run is asked to stop meanwhile: then nothing of it counts, and a resumed run does it again.
    """
    if context.last_eval_step == context.step or context.plan.eval.every_steps is None:
        return
    before = replace(context.state.progress, eval_due=True)

    def draw() -> None:
        for prompt, text in samples(
            context.state.model_and_optimizer.model, context.tokenizer, context.prompts, plan=context.plan
        ):
            context.emit(Sampled(step=context.step, prompt=prompt, completion=text, chat=context.prompts.answers))

    try:
        with interruptible(context), context.timer.aside() as seconds:
            found = evaluate_validation(context, context.plan.eval.sequences)
            if found is not None:
                context.evaluated = (context.step, found.loss)
                context.state.progress.note_evaluation(found.loss)
                context.emit(found.event(context.step))
            context.timer.note_evaluation(seconds(), context.plan)
        with interruptible(context), context.timer.aside() as seconds:
            if isinstance(drawn := attempt(draw, context.state), AllocationFailed):
                context.emit(
                    Warned(step=context.step, reason=f"not all samples were drawn after step {context.step}: {drawn}")
                )
            context.timer.note_samples(seconds())
    except NotFinite as error:  # the next steps' losses say so, too, and are skipped, rewound, or end the run
        context.emit(Warned(step=context.step, reason=f"no samples after step {context.step}: {error.problem}"))
    except Stopped:
        context.state.progress, context.evaluated = before, None
        raise
    context.last_eval_step, context.state.progress.eval_due = context.step, False


@contextmanager
def interruptible(context: RunContext) -> Iterator[None]:
    """Inside the block a request to stop is heard before each forward: each batch, each token. Raises Stopped."""

    def ask(*_: object) -> None:
        if context.stop():
            raise Stopped

    hook = context.state.model_and_optimizer.model.register_forward_pre_hook(ask)
    try:
        yield
    finally:
        hook.remove()


def evaluate_validation(context: RunContext, limit: int | None) -> EvalResult | None:
    """None when there is no validation split, nothing in it to score, or no memory for even one row of it."""
    if context.validation is None:
        return None
    work = partial(
        evaluate,
        context.state.model_and_optimizer.model,
        context.validation,
        token_bytes=context.tokenizer.token_bytes(),
        limit=limit,
    )
    while True:
        plan = context.plan
        evaluate_now = partial(work, context.objective, plan=plan.eval, precision=plan.train.precision)
        where = f"the evaluation after step {context.step}"
        found = attempt(
            evaluate_now, context.state, partial(context.recorder.record_out_of_memory, plan, context.step, where)
        )
        if not isinstance(found, AllocationFailed):
            return found
        fallback = smaller_evaluation(plan, f"{found} in {where} with {plan.eval.micro_batch_size}")
        if fallback is None:
            reason = f"{where} was left out: {found} for a single row"
            context.emit(Warned(step=context.step, reason=reason))
            return None
        replan(context, fallback.plan)
        action = fallback.action + (f"; what filled memory is listed in {found.listed}" if found.listed else "")
        context.emit(Recovered(step=context.step, reason=f"{found} in {where}", action=action))


def keep_time(context: RunContext) -> None:
    """Of a wall-time run: fixes the schedule of the next steps, in `plan.json` first, so that a resume repeats it."""
    if context.plan.train.seconds is None:
        return
    known = current(context.plan, step=context.step)
    if known is not None:
        context.plan = known
        return
    with interruptible(context), context.timer.aside():
        if context.timer.costs is None and measured(context.plan, context.timer, step=context.step) is not None:
            context.timer.costs = measure_costs(context)  # which may make evaluations smaller, in the plan, too
        before, context.plan = context.plan.train.steps, with_next_block(context.plan, context.timer, step=context.step)
        write_plan(context.plan, context.run_dir / "plan.json")
    if context.plan.train.steps not in (None, before):
        context.emit(Phase(step=context.step, name="length", done=context.step, total=context.plan.train.steps or 0))


def measure_costs(context: RunContext) -> Costs:
    """What the run repeats, timed on small parts of it that leave no trace."""
    plan, clock = context.plan, context.timer.clock
    evaluate_validation(context, plan.eval.micro_batch_size)  # the first one compiles
    begun = clock()
    evaluate_validation(context, plan.eval.micro_batch_size)
    looked = clock()
    try:
        sampled = attempt(partial(sampling_seconds, context, tokens=16), context.state)
    except NotFinite:  # then no samples are drawn, either
        sampled = 0.0
    token_seconds = 0.0 if isinstance(sampled, AllocationFailed) else sampled / 16  # then none will be drawn, either
    written = sum(tensor.nbytes for part in context.state.parts().values() for tensor in part.values())
    save, copy = written / WRITTEN_PER_SECOND, written / COPIED_PER_SECOND
    return Costs(
        step=0.0,
        sequence=(looked - begun) / plan.eval.micro_batch_size,
        sequences=0 if context.validation is None else context.validation.sequences,
        samples=len(plan.sample.prompts) * plan.sample.max_new_tokens * token_seconds,
        save=copy if plan.checkpoint.async_save else save,
        end=save if plan.checkpoint.async_save else 0.0,
    )


def sampling_seconds(context: RunContext, *, tokens: int) -> float:
    """Of so many tokens after the first prompt; the first call warms caches and is not counted."""
    plan = context.plan.model_copy(update={"sample": context.plan.sample.model_copy(update={"max_new_tokens": tokens})})
    draw = partial(
        samples,
        context.state.model_and_optimizer.model,
        context.tokenizer,
        replace(context.prompts, asked=context.prompts.asked[:1]),
    )
    list(draw(plan=plan))
    begun = context.timer.clock()
    list(draw(plan=plan))
    return context.timer.clock() - begun
