"""Rules for slow runs and for a loss that does not fall: each gives a problem, its evidence and a fix."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import log
from statistics import median
from typing import final

from bloomery.monitor.events import EvalDone, Event, StepDone, Warned
from bloomery.monitor.history import FEW, Diagnosis, PlanFacts, RunHistory, history_of, middle
from bloomery.monitor.reward_rules import why_rewards_do_not_rise

__all__ = ["Diagnoser", "Diagnosis", "PlanFacts", "diagnose_run", "why_not_learning", "why_slow"]
Rule = Callable[[RunHistory, PlanFacts], Iterable[Diagnosis]]
_CHECK_STEPS = (10, 25, 50, 100, 200, 500)  # then every thousand steps, and at evaluations
ENOUGH = 50  # steps before the curve is checked
LONG = 200  # steps after the warmup before a plateau is reported

# Share of the labels that must be the next token. The share is 1 by construction; a label of another position agrees by
# chance as often as the most common tokens repeat, below a quarter in text.
NEXT = 0.5

# How many times as often as by chance two pairs of adjacent tokens are the same. Measured on Python source and
# English, vocabularies of 300 to 32,000, 2,048 tokens: 1.8 to 20 in order, 0.98 to 1.5 shuffled, medians 3.3 and 1.2.
ORDER = 1.35
ORDER_SAMPLES = 5

# Share of the parameters. In a healthy run fewer are unchanged: biases of keys, to which the softmax is invariant.
FROZEN = 0.1

# An update of 0.001 of the weights is the rule of thumb (Karpathy, "makemore", part 3); small models with large
# learning rates reach 0.1 and train well. A ratio is reported only when the loss does not fall, from ten times on.
TOO_LARGE = 0.01
OVERWRITTEN = 3.0  # a step that large replaces the weights, whatever the loss does later
# Random weights that have moved this far had room for more than token frequencies: packaged recipes and other runs that
# train well are at 80% of that loss by then, runs at a hundred times the learning rate at 100% and more.
FAR = 3.0

# Random weights are noise, and training shows in their change: the sum of all update-to-weight ratios bounds how far
# they can have moved, in units of their own size. Below a half the weights are still mostly noise.
MOVED = 0.5
# Share of the distance from the first loss to the token entropy: even a poor run has it after 50 steps.
FALLEN = 0.1

# The logits of a random model have a standard deviation of 0.02 sqrt(width) and less: ln V + 0.0002 width nats at most,
# which is below 1.2 ln V up to a width of 8,192. A first loss far below ln V means that labels leak.
FIRST_HIGH = 1.5
FIRST_LOW = 0.7
# Bytes per token: on its training dataset a byte-level vocabulary of 300 has 1.6, one of 2,048 has 3.
TINY_TOKENS = 1.5
REPEATS = 0.3  # of the documents
# Repeated tokens help as much as new ones up to there (Muennighoff et al., arXiv:2305.16264)
EPOCHS = 4

# Experts that no token chose in any of the newest loads, at least UNCHOSEN_STEPS apart, each with an even share of
# UNCHOSEN_TOKENS tokens of them: by chance alone none is without one. Of many thousand some may be.
UNCHOSEN_STEPS = 50
UNCHOSEN_TOKENS = 200
UNCHOSEN = 0.01  # of all experts

SECONDS = 30.0  # of steps before a speed is checked: less is noise

# Each threshold is a share of the time that is worth an edit of the recipe.
# The loader reads memory-mapped shards ahead of the step; in healthy runs it is below 1%.
DATA = 0.1
RETRIES = 0.1  # of the steps: each stops the device and frees all cached memory
CORES = 0.15  # of the wall clock; the training thread feeds a GPU, too
BETWEEN = 0.2  # of the run, in evaluations or in checkpoints
COMPILING = 0.1
LATE = 1.25  # times the upper end of the plan's range, which holds four of five runs

QUADRATIC = ("math", "mask")
LONG_SEQUENCE = 512  # below, the attention scores of a sequence fit in a cache
THROTTLING_CELSIUS = 80.0  # degrees Celsius
COOLED = 0.85  # of the highest clock of this device


def _masked(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    steps = [step for step in history.recent if step.loss_tokens is not None][-FEW:]
    if len(steps) < 5 or not facts.tokens_per_step:
        return
    loss_tokens = sum(step.loss_tokens or 0 for step in steps) / len(steps)
    share = loss_tokens / facts.tokens_per_step
    fix = "check the loss mask: `bloomery prepare RECIPE --preview 3`"
    if share == 0:
        evidence = f"0 loss tokens of {facts.tokens_per_step:,} tokens per step in the last {len(steps)} steps"
        yield Diagnosis("masked", "all labels are masked: no token is trained on", evidence, fix)
    elif share < 0.05:
        padded = facts.layout == "padded"
        evidence = f"{loss_tokens:,.0f} loss tokens of {facts.tokens_per_step:,} tokens per step ({share:.1%})"
        fix = "set data.packing=true" if padded else fix
        yield Diagnosis(
            "masked",
            "few loss tokens" + (": most positions are padding" if padded else ""),
            evidence,
            fix,
        )


def _labels(history: RunHistory, _: PlanFacts) -> Iterator[Diagnosis]:
    share_next = middle([health.labels_next for health in history.health])
    if share_next is None or share_next >= NEXT:
        return
    share_own = middle(health.labels_own for health in history.health) or 0.0
    share_after = middle(health.labels_after for health in history.health) or 0.0
    if share_own > 0.9:
        problem = "off by one: each label is the input token at the same position"
        evidence = f"{share_own:.0%} of the labels are the token at their position, {share_next:.0%} the next token"
    elif share_after > 0.9:
        problem = "off by one: each label is the token after the next"
        evidence = f"{share_after:.0%} of the labels are the token after the next, {share_next:.0%} the next token"
    else:
        problem = "not the next tokens: the tokens or the labels were shuffled"
        evidence = f"{share_next:.0%} of the labels are the next token"
    fix = "labels[t] must be tokens[t + 1] of the same document: compare them with"
    yield Diagnosis(
        "labels",
        f"the labels are {problem}",
        evidence,
        f"{fix} `bloomery prepare RECIPE --preview 3`",
    )


def _shuffled(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    samples = [health.pair_excess for health in history.health if health.pair_excess is not None]
    loss = history.loss
    floor = facts.unigram_nats
    if (
        len(samples) < ORDER_SAMPLES
        or median(samples) >= ORDER
        or history.step < ENOUGH
        or loss is None
        or history.first_rollouts  # generated text may repeat itself or be noise
    ):
        return
    if floor is not None and loss < 0.95 * floor:
        return
    loss_text = f"; loss {loss:.2f}, token entropy {floor:.2f}" if floor is not None else ""
    yield Diagnosis(
        "shuffled",
        "the tokens of the dataset look shuffled",
        f"pairs of adjacent tokens repeat {median(samples):.1f} times as often as by chance (text: 2 to 20){loss_text}",
        "check the tokens that the model reads: `bloomery prepare RECIPE --preview 3`",
    )


def _frozen(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    # Equal rewards leave no gradient in any weight: that is a matter of the rewards, not of these weights.
    without_gradient = history.steps_without_gradient
    samples = [
        health
        for health in history.healthy_rate
        if health.unchanged_share is not None and health.step not in without_gradient
    ][-10:]
    if len(samples) < 3:
        return
    no_gradient_share = median(health.no_gradient_share or 0.0 for health in samples)
    share = max(no_gradient_share, median(health.unchanged_share or 0.0 for health in samples))
    if share < FROZEN:
        return
    name = f", for example {samples[-1].unchanged}" if samples[-1].unchanged else ""
    if no_gradient_share >= 0.9 * share:
        reason = "no gradient reaches them"
        fix = "check for requires_grad=False, detach() and no_grad()"
    elif facts.precision == "bfloat16-pure":
        reason = "their updates are lost in rounding to bfloat16"
        fix = "set train.precision=bfloat16"
    else:
        reason = "they have gradients but no update"
        fix = "check that the optimizer has these parameters"
    evidence = f"unchanged in {len(samples)} sampled steps{name}"
    yield Diagnosis(
        "frozen", f"{share:.0%} of the parameters do not change: {reason}", evidence, fix
    )


def _first_loss(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    first_loss = history.begin
    size = facts.vocab_size
    if first_loss is None or size is None or size < 2:
        return
    chance = log(size)
    evidence = (
        f"first loss {first_loss:.2f}, uniform over {size:,} tokens: ln {size:,} = {chance:.2f}"
    )
    if facts.fresh and first_loss < FIRST_LOW * chance:
        fix = "check the attention mask and the shift of the labels"
        yield Diagnosis(
            "first-loss",
            "initial loss is too low for random weights: labels are leaking",
            evidence,
            fix,
        )
    elif first_loss > FIRST_HIGH * chance:
        tokenizer_fix = "use the tokenizer of these weights: set tokenizer.from=same"
        fix = "lower model.initializer_range" if facts.fresh else tokenizer_fix
        yield Diagnosis(
            "first-loss", "initial loss is above that of a uniform guess", evidence, fix
        )


def _fell_little(history: RunHistory, facts: PlanFacts) -> bool:
    """Less than FALLEN of the way from the first loss to the entropy of tokens, or to 2/3 of it."""
    if (
        not facts.falls
        or history.begin is None
        or history.loss is None
        or len(history.losses) < ENOUGH
    ):
        return False
    # The floor is the loss of a model that knows nothing but how frequent each token is.
    floor = facts.unigram_nats if facts.unigram_nats is not None else history.begin * 2 / 3
    distance = max(0.0, history.begin - floor)
    return history.loss > history.begin - FALLEN * max(distance, 0.05 * history.begin)


def _stuck(history: RunHistory, facts: PlanFacts) -> bool:
    """Hardly below the first loss, well above the lowest loss, or long at the token entropy."""
    first_loss = history.begin
    loss = history.loss
    lowest = history.lowest
    if (
        not facts.falls
        or first_loss is None
        or loss is None
        or lowest is None
        or history.step < facts.warmup_steps + ENOUGH
    ):
        return False
    is_long = history.step >= facts.warmup_steps + LONG
    rose = len(history.losses) >= 2 * ENOUGH and loss > lowest + max(
        0.25 * (first_loss - lowest), 0.02 * first_loss
    )
    counting = (
        is_long
        and facts.unigram_nats is not None
        and loss > 0.98 * facts.unigram_nats
        and history.flat
    )
    return _fell_little(history, facts) or rose or counting


def _curve(history: RunHistory, facts: PlanFacts) -> str:
    entropy = f"; token entropy {facts.unigram_nats:.2f}" if facts.unigram_nats is not None else ""
    return f"loss {history.loss or 0:.2f} after {history.step:,} steps, {history.begin or 0:.2f} at the start{entropy}"


def _rate_key(facts: PlanFacts) -> tuple[str, float]:
    """The learning rate that applies to most matrices: its recipe key and value."""
    if facts.matrix_rate:
        return facts.matrix_rate_key, facts.matrix_rate
    return "optimizer.learning_rate", facts.learning_rate


def _too_far(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    if history.step < ENOUGH or history.loss is None:
        return
    counting = facts.unigram_nats is not None and history.loss > 0.98 * facts.unigram_nats
    if history.largest_ratio >= OVERWRITTEN:
        yield _too_high(
            f"one update was {history.largest_ratio:.1f} times the size of the weights",
            history,
            facts,
        )
    elif facts.fresh and counting and history.path >= FAR:
        yield _too_high(
            f"updates were up to {history.largest_ratio:.0%} of the size of the weights",
            history,
            facts,
        )


def _rate_too_high(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    if history.ratio is not None and history.ratio >= TOO_LARGE:
        yield _too_high(
            f"each update is {history.ratio:.1%} of the size of the weights", history, facts
        )


def _too_high(changes: str, history: RunHistory, facts: PlanFacts) -> Diagnosis:
    key, rate = _rate_key(facts)
    problem = "the learning rate is too high"
    evidence = f"{changes} (0.1% is typical); {_curve(history, facts)}"
    fix = f"set {key}={_rounded(rate / 100)} (now {rate:g}); if the loss falls, try ten times that"
    return Diagnosis("rate-high", problem, evidence, fix)


def _rate_too_low(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """From how far the weights can move: so far, and by the end of the run at the peak learning rate."""
    ratio = history.ratio
    key, rate = _rate_key(facts)
    is_flat = _fell_little(history, facts) or _stuck(history, facts)
    if not facts.fresh or not ratio or not history.recent or not is_flat or history.path >= MOVED:
        return
    current_rate = history.recent[-1].learning_rate
    steps_left = max(0, (facts.steps or history.step) - history.step)
    reach = history.path + steps_left * ratio * (
        facts.learning_rate / current_rate if current_rate else 1.0
    )
    if reach >= MOVED and history.step < facts.warmup_steps + LONG:
        return
    yield Diagnosis(
        "rate-low",
        "the learning rate is too low",
        f"an update is {ratio:.1g} of the size of the weights, {history.path:.1%} at most in {history.step:,} steps; "
        f"{_curve(history, facts)}",
        f"set {key}={_rounded(rate * min(1e4, 10 / max(reach, 1e-6)))} (now {rate:g})",
    )


def _gradient(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    norms = [step.grad_norm for step in history.recent if step.grad_norm is not None]
    if len(norms) < FEW:
        return
    recent_norm = median(norms[-FEW:])
    first_norm = median(history.first_norms)
    if recent_norm == 0:
        evidence = f"gradient norm 0 in the last {FEW} steps; {_curve(history, facts)}"
        fix = "check for detach() and no_grad()"
        yield Diagnosis("gradient", "no gradient flows back from the loss", evidence, fix)
    elif recent_norm > 10 * first_norm > 0:
        fix = (
            f"set {_rate_key(facts)[0]} to a tenth of its value"
            if facts.clip
            else "set train.max_grad_norm=1.0"
        )
        grew = f"gradient norm {first_norm:.2g} in the first steps, {recent_norm:.2g} now; {_curve(history, facts)}"
        yield Diagnosis("gradient", "the gradient explodes", grew, fix)
    elif facts.clip is not None and sum(norm > 10 * facts.clip for norm in norms) >= 0.95 * len(
        norms
    ):
        share_kept = facts.clip / recent_norm
        evidence = f"gradient norm {recent_norm:.2g}; train.max_grad_norm={facts.clip:g} keeps {share_kept:.1%} of it"
        fix = f"set train.max_grad_norm={_rounded(recent_norm)}, or check the dataset for outliers"
        problem = "gradient clipping removes most of every gradient"
        yield Diagnosis("clipped", problem, evidence, fix)


def _warmup(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    if facts.steps is not None and facts.warmup_steps >= facts.steps:
        share = history.peak_rate / facts.learning_rate if facts.learning_rate else 0.0
        reached = f"{facts.warmup_steps:,} warmup steps in a run of {facts.steps:,}: {share:.0%} of it reached so far"
        fix = f'set optimizer.warmup="{max(1, facts.steps // 20)} steps"'
        yield Diagnosis("warmup", "the learning rate never reaches its peak", reached, fix)


def _tokenizer(_: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    if facts.bytes_per_token is not None and facts.bytes_per_token < TINY_TOKENS:
        evidence = f"{facts.bytes_per_token:.1f} bytes per token"
        fix = "train a tokenizer on this dataset: set tokenizer.train.vocab_size=32000"
        yield Diagnosis(
            "tokenizer",
            "poor tokenization: the tokenizer does not match this dataset",
            evidence,
            fix,
        )


def _repeats(_: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    if facts.duplicates is not None and facts.duplicates > REPEATS:
        evidence = f"{facts.duplicates:.0%} of the documents are exact copies of another one"
        fix = "remove the duplicates, then run `bloomery prepare RECIPE`"
        yield Diagnosis("duplicates", "the dataset has many duplicate documents", evidence, fix)


def _overfitting(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """The validation loss rises while the training loss falls. The last two evaluations must agree, by 0.05 nats."""
    evaluations = sorted(history.evaluations.items())
    if len(evaluations) < 4 or history.loss is None:
        return
    best_at, best = min(evaluations, key=lambda pair: pair[1])
    later_losses = [loss for eval_step, loss in evaluations if eval_step > best_at]
    if len(later_losses) < 2 or min(later_losses[-2:]) < best + 0.05 or history.loss >= best:
        return
    num_epochs = (
        (history.step * facts.tokens_per_step) / facts.text_tokens if facts.text_tokens else 0.0
    )
    times = f"; {num_epochs:.1f} epochs" if num_epochs > EPOCHS else ""
    yield Diagnosis(
        "overfitting",
        "overfitting: the validation loss rises",
        f"validation loss {best:.2f} at step {best_at:,}, {later_losses[-1]:.2f} now; "
        f"training loss {history.loss:.2f}{times}",
        "use the best checkpoint (`--step best`), set eval.early_stopping_patience=3, or add data",
    )
    yield from _repeats(history, facts)


def _unchosen_experts(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """Experts of trained routers that get no tokens, and so no gradient. A frozen router chooses as it always did."""
    loads = [dict(load.rows()) for load in history.expert_loads]
    if facts.router_loss is None or len(loads) < FEW // 2 or not all(loads):
        return
    num_steps = history.expert_loads[-1].step - history.expert_loads[0].step + 1
    num_experts = len(next(iter(loads[0].values())))
    if (
        num_steps < UNCHOSEN_STEPS
        or len(loads) * facts.tokens_per_step < UNCHOSEN_TOKENS * num_experts
    ):
        return
    unchosen = {
        layer: sum(not any(ratios) for ratios in zip(*(load[layer] for load in loads), strict=True))
        for layer in loads[-1]
        if all(len(load.get(layer, ())) == num_experts for load in loads)
    }
    count = sum(unchosen.values())
    if count < UNCHOSEN * num_experts * max(1, len(unchosen)):
        return
    worst = max(unchosen, key=unchosen.__getitem__)
    evidence = (
        f"no token chose them in {len(loads)} of the last {num_steps:,} steps; "
        f"{unchosen[worst]} of {num_experts} in layer {worst}"
    )
    if facts.router_bias_update:
        fix = f"set router.bias_update={_rounded(10 * facts.router_bias_update)} (now {facts.router_bias_update:g})"
    elif facts.router_loss:
        fix = (
            f"set router.loss={_rounded(10 * facts.router_loss)} (now {facts.router_loss:g}), "
            "and router.pooled=false for a new model"
        )
    else:
        fix = "set router.loss=0.01: nothing asks the routers to use all experts"
    yield Diagnosis("experts", f"{count:,} experts are dead: they learn nothing", evidence, fix)


def _rounded(value: float) -> str:
    """One digit: a value to try, not a result."""
    return f"{float(f'{value:.0e}'):g}"


def _data(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """From the recent steps: the share of their time that waits for batches."""
    waits = [step.data_wait_seconds for step in history.recent]
    share = sum(waits) / max(1e-9, sum(step.step_seconds for step in history.recent))
    if share > DATA:
        evidence = f"{share:.0%} of step time, {median(waits) * 1000:,.0f} ms per step"
        fix = "put the prepared dataset on a local disk (data.prepared=/a/local/folder) and set data.prefetch=16"
        if (
            facts.has_pictures
        ):  # decoding takes longer than reading, and a longer queue does not shorten it
            fix = "store large pictures smaller, then prepare again: the processor resizes each of them in every epoch"
        yield Diagnosis("data", "the steps wait for data", evidence, fix)


def _attention(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """A mask is right for short sequences on a CPU; sdpa is quadratic where no fused kernel exists."""
    quadratic = (
        history.attention in QUADRATIC if facts.device != "cpu" else history.attention == "math"
    )
    fallen = (
        history.attention == "sdpa" and facts.fused_attention is False and facts.device != "cpu"
    )
    if (quadratic or fallen) and facts.sequence_length >= LONG_SEQUENCE:
        kernel = "the math kernel of PyTorch" if fallen else f"the kernel {history.attention}"
        evidence = (
            f"{kernel} stores {facts.sequence_length:,} x {facts.sequence_length:,} scores per head"
        )
        fix = "set train.attention=blockwise" if fallen else "set train.attention=auto"
        yield Diagnosis(
            "attention", "attention writes the full score matrix to memory", evidence, fix
        )


def _heat(history: RunHistory, _: PlanFacts) -> Iterator[Diagnosis]:
    """As the device reports it; else a clock that falls on a hot, busy device: an idle one lowers its clock, too."""
    for device in sorted({sample.device for sample in history.gpus}):
        samples = [sample for sample in history.gpus if sample.device == device]
        reasons = [sample.throttled for sample in samples if sample.throttled]
        hottest = max((sample.temperature or 0.0 for sample in samples), default=0.0)
        busy_samples = [
            s for s in samples if s.clock_mhz and (s.utilization is None or s.utilization > 50)
        ]
        clocks = [s.clock_mhz or 0.0 for s in busy_samples]
        recent_samples = busy_samples[-FEW:]
        is_hot = (
            len(recent_samples) == FEW
            and median(s.temperature or 0.0 for s in recent_samples) >= THROTTLING_CELSIUS
        )
        unreported = not reasons and all(s.throttled != "" for s in recent_samples)
        if len(reasons) > 0.1 * len(samples):
            share = len(reasons) / len(samples)
            evidence = (
                f"reported in {share:.0%} of the samples ({reasons[-1]}), at up to {hottest:.0f} °C"
            )
        elif unreported and is_hot and median(clocks[-FEW:]) < COOLED * max(clocks):
            evidence = f"clock fell from {max(clocks):,.0f} to {median(clocks[-FEW:]):,.0f} MHz at {hottest:.0f} °C"
        else:
            continue
        too_warm = hottest >= THROTTLING_CELSIUS
        problem = (
            f"thermal throttling of GPU {device}" if too_warm else f"GPU {device} is throttled"
        )
        fix = "improve the airflow, or lower the power limit (`rocm-smi --setpoweroverdrive`, `nvidia-smi -pl`)"
        yield Diagnosis(f"heat-{device}", problem, evidence, fix)


def _cores(history: RunHistory, _: PlanFacts) -> Iterator[Diagnosis]:
    health = [v for v in history.health if v.core_wait_seconds is not None and v.seconds > 0][-FEW:]
    seconds = sum(v.seconds for v in health)
    waited_seconds = sum(v.core_wait_seconds or 0.0 for v in health)
    if seconds >= SECONDS / 3 and waited_seconds > CORES * seconds:
        evidence = f"the training thread waited for a core for {waited_seconds / seconds:.0%} of {seconds:,.0f} s"
        fix = "end other programs, or use fewer threads: OMP_NUM_THREADS=1 before the command"
        yield Diagnosis(
            "cores",
            "CPU contention: other programs or too many threads use the cores",
            evidence,
            fix,
        )


def _compiling(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    if not facts.compiled or not facts.steps or history.began is None:
        return
    typical = median(step.step_seconds for step in history.recent)
    compile_seconds = history.began.step_seconds - typical
    all_seconds = facts.steps * typical
    if compile_seconds > SECONDS and compile_seconds > COMPILING * (all_seconds + compile_seconds):
        problem = "torch.compile costs more time than it saves"
        fix = "set train.compile=false"
        evidence = f"first step {history.began.step_seconds:,.0f} s, all {facts.steps:,} steps {all_seconds:,.0f} s"
        yield Diagnosis("compile", problem, evidence, fix)


def _graphs(history: RunHistory, _: PlanFacts) -> Iterator[Diagnosis]:
    """Shapes are fixed: no graph is compiled after the first evaluation."""
    early_graphs = history.compiled_graphs
    latest_graphs = history.health[-1].graphs if history.health else None
    if (
        early_graphs is not None
        and latest_graphs is not None
        and latest_graphs > 2 * early_graphs + 4
    ):
        evidence = f"{early_graphs} graphs at the start, {latest_graphs} at step {history.health[-1].step:,}"
        fix = "set train.compile=false, and report the shape that changes"
        yield Diagnosis("recompiled", "torch.compile recompiles again and again", evidence, fix)


def _crowded(history: RunHistory, _: PlanFacts) -> Iterator[Diagnosis]:
    """The count starts at zero in a resumed process."""
    counts = [
        (sample, sample.alloc_retries)
        for sample in history.allocator
        if sample.alloc_retries is not None
    ]
    if len(counts) < 2:
        return
    retries = sum(max(0, later - earlier) for (_, earlier), (_, later) in pairwise(counts))
    steps = counts[-1][0].step - counts[0][0].step
    latest = counts[-1][0]
    if retries > RETRIES * max(steps, FEW):
        fragmented = (
            f"{latest.fragmentation or 0:.0%} of {latest.reserved_gib or 0:.1f} GiB is fragmented"
        )
        yield Diagnosis(
            "crowded",
            "memory is nearly full: PyTorch frees its cache and retries allocations",
            f"{retries:,} retries in {steps:,} steps; {fragmented}",
            "set a smaller train.micro_batch_size: gradient accumulation keeps the tokens per step",
        )


def _between(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    saving = 0.0 if facts.saves_in_background else history.saving_seconds
    eval_fix = "raise eval.every or lower eval.tokens"
    for cause, name, seconds, fix in (
        ("evaluation", "evaluations take", history.evaluation_seconds, eval_fix),
        ("saving", "saving checkpoints takes", saving, "raise checkpoint.every"),
    ):
        run_seconds = history.steps_seconds + history.evaluation_seconds + saving
        if seconds > BETWEEN * run_seconds:
            yield Diagnosis(
                cause,
                f"{name} {seconds / run_seconds:.0%} of the run",
                f"{seconds:,.0f} of {run_seconds:,.0f} s",
                fix,
            )


def _recomputing(history: RunHistory, facts: PlanFacts) -> Iterator[Diagnosis]:
    """Recomputation is a third of a step (forward 1, backward 2: Chen et al., arXiv:1604.06174)."""
    limit = facts.memory_limit_gib
    if facts.checkpointing != "none" and limit and 0 < history.peak_gib < 0.5 * limit:
        yield Diagnosis(
            "recomputing",
            "activations are recomputed although memory is free",
            f"activation_checkpointing={facts.checkpointing}; peak memory {history.peak_gib:.1f} of {limit:.1f} GiB",
            "check that it fits: `bloomery plan RECIPE train.activation_checkpointing=none`",
        )


def _late(history: RunHistory, facts: PlanFacts, *, explained: bool) -> Iterator[Diagnosis]:
    if facts.step_seconds is None:
        return
    planned_most = facts.step_seconds[1]
    seconds = median(step.update_seconds for step in history.recent)
    if seconds > LATE * planned_most:
        cause = "" if explained else ", for no measured reason"
        times = seconds / planned_most
        evidence = f"{seconds:.3g} s per step, planned at most {planned_most:.3g} s: {times:.1f} times as long"
        fix = "measure this machine with `bloomery bench RECIPE`, then plan again"
        yield Diagnosis("late", f"steps are slower than planned{cause}", evidence, fix)


RULES: dict[str, tuple[Rule, ...]] = {
    "direct": (_masked, _labels, _shuffled, _frozen),  # direct evidence, the most certain first
    "curve": (_first_loss, _rate_too_low, _too_far),
    "plateau": (_rate_too_high, _gradient),  # of a loss that does not fall
    "plateau, too": (_warmup, _tokenizer, _repeats),
    "overfit": (_overfitting,),
    "experts": (_unchosen_experts,),  # beside whatever the loss does
    "slow at once": (_attention,),
    "slow": (
        _data,
        _attention,
        _heat,
        _cores,
        _compiling,
        _graphs,
        _crowded,
        _between,
        _recomputing,
    ),
}


def _apply(rules: str, history: RunHistory, facts: PlanFacts) -> list[Diagnosis]:
    return [diagnosis for rule in RULES[rules] for diagnosis in rule(history, facts)]


def why_not_learning(history: RunHistory, facts: PlanFacts) -> list[Diagnosis]:
    """Reasons why the loss does not fall, the most certain first; empty for a healthy or a young run.

    Rules with direct evidence first; the loss curve is only interpreted when none of them applies. Rewards and the load
    of experts are judged next to either: what is wrong with them is measured, too.
    """
    beside = [*why_rewards_do_not_rise(history, facts), *_apply("experts", history, facts)]
    for rule in RULES["direct"]:
        if evident := list(rule(history, facts)):
            return [*evident, *beside]

    diagnoses = _apply("curve", history, facts)
    if not diagnoses and _stuck(history, facts):
        diagnoses = _apply("plateau", history, facts)
        if not diagnoses:
            evidence = (
                f"{_curve(history, facts)}; labels, loss mask, gradients and update sizes are ok"
            )
            fix = "check `bloomery prepare RECIPE --preview 3`; then try train.seed=1 and a tenth of the learning rate"
            diagnoses = [
                Diagnosis("stuck", "the loss does not fall, for no measured reason", evidence, fix)
            ]
        diagnoses += _apply("plateau, too", history, facts)
    return [*diagnoses, *beside, *_apply("overfit", history, facts)]


def why_slow(history: RunHistory, facts: PlanFacts) -> list[Diagnosis]:
    """Avoidable costs of time, after 30 seconds of steps; empty where there are none."""
    if sum(step.step_seconds for step in history.recent) < SECONDS or len(history.recent) < FEW:
        return _apply("slow at once", history, facts)
    diagnoses = _apply("slow", history, facts)
    return [*diagnoses, *_late(history, facts, explained=bool(diagnoses))]


def diagnose_run(events: Iterable[Event], facts: PlanFacts) -> list[Diagnosis]:
    """Why the loss does not fall, then why the run is slow."""
    history = history_of(events)
    return [*why_not_learning(history, facts), *why_slow(history, facts)]


@final
class Diagnoser:
    """Reads the events of a run as they are written and warns of each cause once, also across resumes."""

    def __init__(self, facts: Callable[[], PlanFacts], before: Iterable[Event] = ()) -> None:
        self._facts = facts
        self._history = RunHistory()
        self._known: PlanFacts | None = None
        self._warned: set[str] = set()
        for event in before:
            self._read(event)

    def check(self, event: Event) -> Iterator[Warned]:
        """New warnings after this event."""
        self._read(event)
        steps = isinstance(event, StepDone) and (
            event.step in _CHECK_STEPS or event.step % 1000 == 0
        )
        if not steps and not (isinstance(event, EvalDone) and event.step >= ENOUGH):
            return
        self._known = self._known or self._facts()
        for diagnosis in (
            *why_not_learning(self._history, self._known),
            *why_slow(self._history, self._known),
        ):
            if diagnosis.cause not in self._warned:
                self._warned.add(diagnosis.cause)
                yield Warned(step=self._history.step, reason=str(diagnosis), cause=diagnosis.cause)

    def _read(self, event: Event) -> None:
        self._history.add(event)
        if isinstance(event, Warned) and event.cause:
            self._warned.add(event.cause)
