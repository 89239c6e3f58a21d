"""Tokens per step, micro-batch size and gradient accumulation."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import counted, format_count
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import parameter_count
from bloomery.facts.limits import CPU_TILE
from bloomery.plan.choices import ASKED
from bloomery.plan.estimate.moments import BACKWARD_DIVERGENCE
from bloomery.plan.estimate.speed import keeps_logits
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import MemoryEstimate
from bloomery.recipe.schema import Train

TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv:2203.15556
TUNING_TOKENS = 65_536
EPOCH_STEPS = 32  # at least, where the dataset allows: AdamW needs about three epochs of them
CPU_TOKENS = 2048  # of a micro-batch: measured, larger ones are no faster and hold more
# Tokens of a chunk of logits. Matmuls are not faster above the first, and hardly slower down to the second.
LARGEST_CHUNK = 1024
SMALLEST_CHUNK = 256
CHUNK_BYTES = 2**27  # of the logits of a small chunk
ONE_CHUNK_SHARE = 0.8  # of the limit, under which all logits of a micro-batch may exist at once
# Of the fastest micro-batch's time: the estimate does not tell two apart that differ by less.
SAME_TIME = 1.01
# On a CPU over a frozen base: what a smaller micro-batch may take, of the fastest's time, if it needs no more than this
# share of the memory. It has these tokens at least: weights are read once for all of them.
LEAN_TIME = 1.08
LEAN_MEMORY = 0.8
LEAN_TOKENS = 1024

Measure = Callable[[StepShape], MemoryEstimate]
StepSeconds = Callable[[StepShape], float | None]


def choose_tokens_per_step(
    tokens_per_step: int | str,
    config: ModelConfig,
    sequence_length: int,
    *,
    sequences_per_epoch: int | None = None,
    tuning: bool = False,
) -> Choice[int]:
    """Depends on the model and the dataset alone, so that one recipe is one training run on every machine.

    The best batch grows with the compute that is spent: 0.292 C^0.3271 tokens (DeepSeek LLM, arXiv:2401.02954, 3.1).
    C is taken at 20 tokens per parameter, 6 N 20 N, and the batch rounded to a power of two of sequences. `tuning`
    takes TUNING_TOKENS at most. An epoch of a small dataset has EPOCH_STEPS steps all the same, or one per sequence.
    Raises UserError.
    """
    if tokens_per_step == "auto":
        best = _fitting_batch(config, sequence_length)
        if tuning and best.value > TUNING_TOKENS:
            reason = (
                f"fine-tuning: no more than {TUNING_TOKENS:,} tokens (Alpaca: 128 examples of 512)"
            )
            best = Choice(max(1, TUNING_TOKENS // sequence_length) * sequence_length, reason)
        return _within_an_epoch(best, sequence_length, sequences_per_epoch)
    assert isinstance(tokens_per_step, int)
    if tokens_per_step % sequence_length:
        lower_multiple = tokens_per_step // sequence_length * sequence_length
        upper_multiple = -(-tokens_per_step // sequence_length) * sequence_length
        multiples = (
            f"{lower_multiple} or {upper_multiple}" if lower_multiple else str(upper_multiple)
        )
        raise UserError(
            f"tokens per step is not a multiple of data.sequence_length={sequence_length}: {tokens_per_step:,}",
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={multiples}",
            code=2,
        )
    return Choice(tokens_per_step, ASKED)


def of_whole_groups(
    tokens: Choice[int], sequence_length: int, *, num_generations: int
) -> Choice[int]:
    """A step of completions has all of each prompt: rounded down, to one prompt at least. Raises UserError."""
    completions = tokens.value // sequence_length
    if completions % num_generations == 0:
        return tokens
    completions_of_groups = max(1, completions // num_generations) * num_generations
    if tokens.reason == ASKED:
        raise UserError(
            f"a step has {completions:,} completions, which is no multiple of the {num_generations:,} of a prompt",
            where="train.tokens_per_step",
            fix=f"set train.batch_size={completions_of_groups} and leave out train.tokens_per_step",
            code=2,
        )
    reason = f"{tokens.reason}; whole groups of {num_generations} completions"
    return Choice(completions_of_groups * sequence_length, reason)


def _within_an_epoch(
    best: Choice[int], sequence_length: int, sequences_per_epoch: int | None
) -> Choice[int]:
    """The largest power of two of sequences of which an epoch holds EPOCH_STEPS."""
    if (
        sequences_per_epoch is None
        or sequences_per_epoch * sequence_length >= EPOCH_STEPS * best.value
    ):
        return best
    sequences = 2 ** max(0, (sequences_per_epoch // EPOCH_STEPS).bit_length() - 1)
    if sequences * sequence_length >= best.value:
        return best
    steps = counted(sequences_per_epoch // sequences, "steps")
    reason = f"an epoch of {counted(sequences_per_epoch, 'sequences')} then has {steps}; the model size alone gives"
    return Choice(sequences * sequence_length, f"{reason} {best.value:,} tokens per step")


def _fitting_batch(config: ModelConfig, sequence_length: int) -> Choice[int]:
    count = parameter_count(config)
    best = 0.2920 * (6 * TOKENS_PER_PARAMETER * count**2) ** 0.3271
    sequences = 1
    # the nearest power of two on a logarithmic scale
    while sequences * 2 * sequence_length <= best * 2**0.5:
        sequences *= 2
    reason = (
        f"{format_count(count)} parameters at {TOKENS_PER_PARAMETER} tokens each train best with batches of about"
        f" {float(f'{best:.3g}'):,.0f} tokens (arXiv:2401.02954)"
    )
    return Choice(sequences * sequence_length, reason)


@dataclass(frozen=True, kw_only=True)
class MicroBatching:
    """How a step runs on one device."""

    micro_batch_size: Choice[int]
    checkpointing: Choice[str]
    score_chunk: Choice[int]
    step: StepShape
    memory: MemoryEstimate


def choose_micro_batching(
    train: Train,
    step: StepShape,
    *,
    sequences_per_step: int,
    measure: Measure,
    seconds: StepSeconds,
    any_divisor: bool = False,
    together: Callable[[StepShape], StepShape] = lambda step: step,
) -> MicroBatching:
    """The fastest micro-batch that fits, without activation checkpointing where possible; `step`: everything else.

    `measure`: the peak of the whole run, of which a step is one moment. `seconds`: of a whole step, None where the
    device's speed is unknown; then the largest micro-batch is taken. Of those within SAME_TIME it is the largest one
    whose memory surely fits, else the fastest. `any_divisor`: not powers of two alone, for a device's
    share of a step. `together`: a step that fits, with the micro-batches that share a load of streamed
    weights. When nothing fits, the smallest is planned, and the plan does not fit. Raises UserError for a size that
    does not divide the step.
    """
    modes = (
        ["none", "full"]
        if train.activation_checkpointing == "auto"
        else [train.activation_checkpointing]
    )
    sizes = _sizes(train, step, sequences_per_step, any_divisor)

    def planned(mode: str, sequences: int) -> StepShape:
        """In chunks of logits, which need the least memory."""
        tokens = sequences * step.sequence_length // step.context
        return replace(
            step,
            accumulating=not step.mode.fused_backward and sequences < sequences_per_step,
            micro_batch_size=sequences,
            checkpointing=mode,
            score_chunk=min(small_chunk(step), tokens),
        )

    # The first kind of checkpointing under which anything fits, with its sizes that do, largest first.
    fitting_steps: list[StepShape] = []
    for mode in modes:
        for size in sizes:
            planned_step = planned(mode, size)
            if measure(planned_step).fits:
                fitting_steps.append(together(planned_step))
        if fitting_steps:
            break
    candidates = [
        _with_logits(fitting_step, measure) for fitting_step in fitting_steps or [planned_step]
    ]
    planned_step, chunk = candidates[0]

    # Larger micro-batches are mostly faster. One whose logits are computed again may not be. An optimizer inside
    # backward updates once per micro-batch: its steps cannot be compared.
    step_seconds = [seconds(candidate) for candidate, _ in candidates]
    known_seconds = [value for value in step_seconds if value is not None]
    reason = "the largest power of two that divides the step and fits"
    if not step.on_gpu:
        reason = "a larger one exceeds the CPU caches"
    elif any_divisor:
        reason = f"the largest that divides the {counted(sequences_per_step, 'sequences')} of a device and fits"
    if len(known_seconds) == len(candidates) and not step.mode.fused_backward:
        steps = [candidate for candidate, _ in candidates]
        chosen, why_smaller = _fastest(steps, known_seconds, measure)
        planned_step, chunk = candidates[chosen]
        reason = why_smaller or reason
    mode = planned_step.checkpointing
    fit = (
        "all activations fit in memory"
        if mode == "none"
        else "activations do not fit in memory without recomputation"
    )
    size = planned_step.micro_batch_size
    return MicroBatching(
        micro_batch_size=Choice(size, reason if train.micro_batch_size == "auto" else ASKED),
        checkpointing=Choice(mode, fit if train.activation_checkpointing == "auto" else ASKED),
        score_chunk=chunk,
        step=planned_step,
        memory=measure(planned_step),
    )


def _fastest(
    steps: list[StepShape], step_seconds: list[float], measure: Measure
) -> tuple[int, str]:
    """Which of the micro-batches, largest first, to take, and why if not the largest.

    What the estimate leaves out favors larger ones (small matmuls are less efficient), unless they may run out of
    memory. On a CPU over a frozen base activations are most of the memory: there it is the smallest within LEAN_TIME.
    Training all weights adds every gradient to memory once for each micro-batch, which the estimate leaves out.
    """
    fewest_seconds = min(step_seconds)
    chosen = step_seconds.index(fewest_seconds)
    for index, step in enumerate(steps):
        peak = measure(step)
        if step_seconds[index] <= SAME_TIME * fewest_seconds and peak.high <= peak.limit:
            chosen = index
            break
    largest = steps[0].micro_batch_size
    if not steps[0].on_gpu and steps[0].mode.frozen:
        lean = max(
            index
            for index, (step, seconds) in enumerate(zip(steps, step_seconds, strict=True))
            if index == chosen
            or (
                step.tokens_per_micro_batch >= LEAN_TOKENS and seconds <= LEAN_TIME * fewest_seconds
            )
        )
        share = measure(steps[lean]).total / measure(steps[0]).total
        if lean > chosen and share <= LEAN_MEMORY:
            longer = max(0.0, step_seconds[lean] / step_seconds[0] - 1)
            return lean, f"takes {longer:.0%} longer than {largest:,}, in {share:.0%} of the memory"
    if chosen == 0:
        return 0, ""
    slower = step_seconds[0] / step_seconds[chosen] - 1
    if slower <= SAME_TIME - 1:
        return chosen, f"as fast as {largest:,}, with which memory may not suffice"
    return chosen, f"the fastest that fits: a step with {largest:,} takes {slower:.1%} longer"


def small_chunk(step: StepShape) -> int:
    """Tokens of a chunk of logits where memory is short: a power of two, the fewer the larger the vocabulary.

    A CPU holds the logits of one tile of it at a time. Distillation holds those of both models, on a GPU with what is
    made of them.
    """
    if step.teacher_width is not None:
        token_bytes = (BACKWARD_DIVERGENCE if step.on_gpu else 4) * step.head_outputs
    else:
        token_bytes = 2 * (step.head_outputs if step.on_gpu else min(step.head_outputs, CPU_TILE))
    tokens = CHUNK_BYTES // token_bytes
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, 1 << tokens.bit_length() >> 1))


def _with_logits(step: StepShape, measure: Measure) -> tuple[StepShape, Choice[int]]:
    """The step with all logits of a micro-batch at once where they fit, else in the largest chunks that do; and why."""
    tokens = step.tokens_per_micro_batch
    one_chunk_step = replace(step, score_chunk=tokens)
    if step.teacher_width is not None and tokens > step.score_chunk:
        reason = "backward computes the logits of both models again, whatever the chunk"
        return step, Choice(step.score_chunk, reason)
    if tokens <= step.score_chunk or _has_room(measure(one_chunk_step)):
        reason = "all logits of a micro-batch fit, and are kept for backward"
        if not keeps_logits(one_chunk_step):
            reason = (
                f"all tokens by {CPU_TILE:,} entries of the vocabulary, which a CPU's caches hold"
            )
        return one_chunk_step, Choice(tokens, reason)
    largest_step = replace(step, score_chunk=min(LARGEST_CHUNK, tokens))
    if step.score_chunk == LARGEST_CHUNK or _has_room(measure(largest_step)):
        reason = "all logits together would take too much memory; larger chunks are not faster"
        return largest_step, Choice(largest_step.score_chunk, reason)
    reason = f"memory is short, and each token has {step.head_outputs:,} logits"
    return step, Choice(step.score_chunk, reason)


def _has_room(memory: MemoryEstimate) -> bool:
    return memory.total <= ONE_CHUNK_SHARE * memory.limit


def _sizes(train: Train, step: StepShape, sequences_per_step: int, any_divisor: bool) -> list[int]:
    """Micro-batch sizes to try, largest first: powers of two, or any numbers, that divide the step."""
    if step.mode.fused_backward and not train.auto_batch:  # one micro-batch is a step
        return [sequences_per_step]
    if train.micro_batch_size != "auto":
        if sequences_per_step % train.micro_batch_size and not step.mode.fused_backward:
            divisors = [
                str(n)
                for n in range(1, min(sequences_per_step, 1024) + 1)
                if sequences_per_step % n == 0
            ]
            raise UserError(
                f"micro-batch size does not divide the {sequences_per_step:,} sequences per step:"
                f" {train.micro_batch_size}",
                where="train.micro_batch_size",
                fix="set train.micro_batch_size to one of " + ", ".join(divisors),
                code=2,
            )
        return [train.micro_batch_size]
    largest = sequences_per_step
    if not step.on_gpu:
        largest = max(1, CPU_TOKENS * step.context // step.sequence_length)
    sizes = [
        size
        for size in range(1, min(largest, sequences_per_step) + 1)
        if sequences_per_step % size == 0
    ]
    return [size for size in reversed(sizes) if any_divisor or size.bit_count() == 1]
