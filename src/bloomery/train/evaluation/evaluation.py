"""Evaluation during training: validation loss and samples, without changing the training state."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bloomery.core.progress import progress
from bloomery.core.units import counted
from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.infer.forward import eval_mode, to_device
from bloomery.infer.sampling import NotFinite
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import EvalDone, Recovered, Sampled, Warned
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.fallback import smaller_evaluation
from bloomery.plan.types import EvalPlan
from bloomery.train.context import RunContext
from bloomery.train.evaluation.answers import samples
from bloomery.train.failures import Stopped
from bloomery.train.objectives.losses import joined_metrics, means
from bloomery.train.objectives.objective import Objective
from bloomery.train.recover import AllocationFailed, adopt_plan, attempt_with_kernels
from bloomery.train.rl.rollout_source import HeldOutDivergence, HeldOutReward, RolloutSource
from bloomery.train.step import compute_loss
from bloomery.view.summary import MEASURABLE_PROMPTS, MEASURABLE_TOKENS


@dataclass(frozen=True)
class EvalResult:
    """`loss`: nats per loss token, or the objective's loss per pair or response. `bytes`: text of the loss tokens; None
    where the loss is not per token.
    """

    loss: float
    tokens: int
    bytes: int | None
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    prompts: int = 0  # of which completions were rewarded

    @classmethod
    def of_reward(cls, held_out: HeldOutReward) -> "EvalResult":
        """A higher reward is a lower loss."""
        metrics = {"reward": held_out.reward}
        if (taught := held_out.taught) is not None:
            metrics |= taught.metrics
        return cls(
            loss=-held_out.reward,
            tokens=held_out.tokens,
            bytes=None,
            seconds=held_out.seconds,
            metrics=metrics,
            prompts=held_out.prompts,
        )

    @classmethod
    def of_divergence(cls, held_out: HeldOutDivergence) -> "EvalResult":
        metrics = held_out.metrics
        if held_out.reward is not None:
            metrics["reward"] = held_out.reward
        return cls(
            loss=held_out.divergence,
            tokens=held_out.tokens,
            bytes=None,
            seconds=held_out.seconds,
            metrics=metrics,
        )

    @property
    def perplexity(self) -> float | None:
        """None for a loss that is not in nats per token."""
        if self.bytes is None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text; None when no byte was scored."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def event(self, step: int) -> EvalDone:
        """The event; a non-finite loss becomes None."""
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


def validation_result(
    model: Decoder,
    loader: Loader,
    objective: Objective,
    *,
    plan: EvalPlan,
    precision: str,
    token_bytes: np.ndarray,
    limit: int | None,
    mesh: Mesh = SINGLE_RANK,
) -> EvalResult | None:
    """Loss over the validation set, in batches of one shape, shared out over the ranks. None without loss tokens.

    `token_bytes`: int32 [vocabulary], bytes of text per token. `limit`: sequences at most, of all ranks together.
    """
    # Sums of this rank: the loss, what it counts (tokens, pairs), loss tokens, the bytes of their text, metrics.
    start_time = time.perf_counter()
    device = model.device
    totals = list[Tensor]()
    counts = list[Tensor]()
    loss_tokens = 0
    text_bytes = 0
    num_done = 0
    num_sequences = min(limit or loader.sequences, loader.sequences)
    metric_sums: dict[str, Tensor] = {}
    batches: Iterable[Batch] = loader.validation_batches(plan.micro_batch_size, limit=limit)
    with eval_mode(model):
        for batch in complete_batches(model, batches, objective):
            parts = compute_loss(model, to_device(batch, device), objective, precision=precision)
            num_done = min(
                num_done + len(batch.tokens), num_sequences
            )  # the last batch is filled up
            progress(f"{num_done:,} of {counted(num_sequences, 'sequences')}")
            totals.append(parts.total)
            counts.append(parts.count)
            metric_sums = joined_metrics(metric_sums, parts.metrics)
            if not mesh.last_stage:  # the stages of a pipeline read the same batches
                continue
            has_loss = batch.loss_mask > 0
            loss_tokens += int(has_loss.sum())
            text_bytes += int(token_bytes[batch.labels[has_loss].numpy()].sum())

    # Read from the device once: the host has queued every batch, and the device waited for none.
    total = 0.0
    count = 0.0
    if totals:
        for batch_total in torch.stack(totals).tolist():
            total += batch_total
        for batch_count in torch.stack(counts).tolist():
            count += batch_count

    # Sums over all ranks; a loss per pair or response has no bytes that it could be compared to.
    total, *reduced_counts = mesh.all_reduce_sum(total, count, loss_tokens, text_bytes)
    count, loss_tokens, text_bytes = map(round, reduced_counts)
    metric_sums = {name: mesh.all_reduce(sums) for name, sums in metric_sums.items()}
    if count == 0:
        return None
    return EvalResult(
        loss=total / count,
        tokens=loss_tokens,
        bytes=text_bytes if objective.loss_unit == "token" else None,
        seconds=time.perf_counter() - start_time,
        metrics=means(metric_sums),
    )


def complete_batches(
    model: Decoder, batches: Iterable[Batch], objective: Objective
) -> Iterator[Batch]:
    """The batches with what `objective.before` adds, one at a time unless it needs all of them.

    Only KTO needs all, for its KL term: 4 bytes per token on the model's device.
    """
    if objective.before is None:
        yield from batches
        return
    if objective.together:
        yield from objective.before(model, list(batches))
        return
    for batch in batches:
        yield from objective.before(model, [batch])


def evaluate_start(context: RunContext) -> None:
    """Evaluate the model as it begins, as the measure of what training changes. It is never the best one: no checkpoint
    has it. Raises Stopped.
    """
    result = evaluate_validation(context, context.plan.eval.sequences)
    if result is not None:
        context.emit(result.event(context.step))


def evaluate_and_sample(context: RunContext) -> None:
    """Evaluate and sample, once per step, without changing the RNG states of training.

    Raises Stopped when the run is stopped meanwhile: the results are dropped and a resumed run repeats them.
    """
    if context.last_eval_step == context.step or context.plan.eval.every_steps is None:
        return
    step = context.step
    # A stop restores this progress, in which the evaluation is still due.
    progress_before = replace(context.state.progress, eval_due=True)

    num_sampled = 0

    def emit_samples() -> None:
        nonlocal num_sampled
        texts = samples(
            context.model,
            context.tokenizer,
            context.prompts,
            sample=context.plan.sample,
            train=context.plan.train,
            mesh=context.mesh,
        )
        for number, (prompt, text) in enumerate(texts):
            # A second attempt begins at the first prompt.
            if number == num_sampled:
                num_sampled += 1
                images = context.prompts.images
                context.emit(
                    Sampled(
                        step=step,
                        prompt=prompt,
                        completion=text,
                        chat=context.prompts.answers,
                        image=images[number] if images else "",
                    )
                )

    try:
        # The validation loss, which decides whether these weights are the best.
        with context.state.averaged():
            result = evaluate_validation(context, context.plan.eval.sequences)
            if result is not None:
                is_first = context.state.progress.best_step is None
                context.best_due = context.state.progress.note_evaluation(result.loss)
                context.emit(result.event(step))
                warn_of_few_tokens(context, result, is_first=is_first and context.best_due)

        # Samples are for the reader alone: a run goes on without them.
        with interruptible(context), context.state.averaged():
            failure = attempt_with_kernels(
                emit_samples, context, f"while sampling after step {step}"
            )
            if isinstance(failure, AllocationFailed):
                moment = f"while sampling after step {step}; samples are missing"
                context.emit(Warned(step=step, reason=failure.problem(moment)))
    except NotFinite as error:
        # The losses of the next steps are non-finite, too: what to do about it is decided there.
        context.emit(Warned(step=step, reason=f"no samples after step {step}: {error.problem}"))
    except Stopped:
        context.state.progress = progress_before
        context.best_due = False
        raise
    context.last_eval_step = step
    context.state.progress.eval_due = False


def warn_of_few_tokens(context: RunContext, result: EvalResult, *, is_first: bool) -> None:
    """Report an early stop, and at the first evaluation and at an early stop, that too few tokens decide."""
    progress = context.state.progress
    shortage = ""
    if result.prompts:
        if result.prompts < MEASURABLE_PROMPTS:
            held_out = counted(result.prompts, "held-out prompts")
            shortage = f"an evaluation has {held_out}, fewer than {MEASURABLE_PROMPTS}"
    elif result.tokens < MEASURABLE_TOKENS:
        shortage = (
            f"an evaluation has {result.tokens:,} loss tokens, fewer than {MEASURABLE_TOKENS:,}"
        )

    if context.stops_early:
        better = "a higher reward" if result.prompts else "a lower loss"
        reason = f"early stopping: {progress.evaluations_since_best} evaluations without {better}"
        if progress.best_step is not None:
            reason += f" than that of step {progress.best_step:,}"
        if shortage:
            reason += f"; {shortage}: it may be noise"
        context.emit(Warned(step=context.step, reason=reason))
    elif is_first and shortage:
        reason = (
            f"{shortage}: which checkpoint is the best may be noise;"
            " set data.validation to a larger share"
        )
        context.emit(Warned(step=context.step, reason=reason))


@contextmanager
def interruptible(context: RunContext) -> Iterator[None]:
    """Inside the block, check for a stop before each forward: each batch, each token. Raises Stopped.

    Ranks agree on the answer, for which stages of a pipeline wait for each other: these ask once for several forwards,
    so that every stage has work meanwhile.
    """
    stages = context.mesh.stages
    forwards_per_check = 1 if stages == 1 else 4 * stages
    count = 0

    def raise_if_stopped(*_: object) -> None:
        nonlocal count
        count += 1
        if count % forwards_per_check == 0 and context.stop():
            raise Stopped

    hook = context.model.register_forward_pre_hook(raise_if_stopped)
    try:
        yield
    finally:
        hook.remove()


def evaluate_validation(context: RunContext, limit: int | None) -> EvalResult | None:
    """Evaluate at most `limit` sequences, with smaller micro-batches when out of memory.

    None without a validation set, without loss tokens in it, or when one sequence does not fit in memory.
    """
    moment = f"the evaluation after step {context.step}"
    if isinstance(context.source, RolloutSource):
        # It looks for a stop itself: ranks that sample take different numbers of forwards.
        held_out = attempt_with_kernels(
            partial(context.source.evaluate, context.plan, limit), context, f"in {moment}"
        )
        if isinstance(held_out, AllocationFailed):
            reason = f"{held_out.problem(f'in {moment}')}: no held-out reward"
            context.emit(Warned(step=context.step, reason=reason))
            return None
        if isinstance(held_out, HeldOutDivergence):
            return EvalResult.of_divergence(held_out)
        return None if held_out is None else EvalResult.of_reward(held_out)
    if context.validation is None:
        return None
    while True:
        plan = context.plan
        work = partial(
            validation_result,
            context.model,
            context.validation,
            context.objective,
            plan=plan.eval,
            precision=plan.train.precision,
            token_bytes=context.tokenizer.token_bytes(),
            limit=limit,
            mesh=context.mesh,
        )
        list_memory = partial(
            context.recorder.record_out_of_memory, plan.train.device, context.step, moment
        )
        with interruptible(context):
            result = attempt_with_kernels(work, context, f"in {moment}", list_memory)
        if not isinstance(result, AllocationFailed):
            return result

        # Out of memory: half the micro-batch gives the same loss, down to one sequence.
        problem = result.problem(f"in {moment}")
        fallback = smaller_evaluation(plan, f"{problem} with {plan.eval.micro_batch_size}")
        if fallback is None:
            reason = f"{problem}, micro-batch 1: no validation loss"
            context.emit(Warned(step=context.step, reason=reason))
            return None
        adopt_plan(context, fallback.plan)
        action = fallback.action + result.note
        context.emit(Recovered(step=context.step, reason=problem, action=action))
