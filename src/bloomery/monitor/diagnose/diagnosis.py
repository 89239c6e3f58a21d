"""Why a run is slow and why a loss does not fall: rules that give a sentence, its evidence in figures and a remedy."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import log
from statistics import median
from typing import final

from bloomery.monitor.diagnose.history import FEW, Facts, Finding, Seen, middle, seen_of, total
from bloomery.monitor.events import EvalDone, Event, StepDone, Warned

__all__ = ["Diagnosis", "Facts", "Finding", "findings", "why_not_learning", "why_slow"]
Rule = Callable[[Seen, Facts], Iterable[Finding]]
_LOOKS = (10, 25, 50, 100, 200, 500)  # steps after which a run is looked at; then every thousand, and at evaluations
ENOUGH = 50  # steps before a curve is judged
LONG = 200  # steps after the warmup before a plateau is judged

# Share of the learned labels that must be the next token. It is 1 by construction; a label of another place agrees by
# chance as often as the commonest tokens repeat, below a quarter in text.
NEXT = 0.5

# How many times as often as by chance two pairs of neighbours are the same. Measured on Python source and English with
# vocabularies of 300 to 32,000, 2,048 tokens at once: 1.8 to 20 as written, 0.98 to 1.5 shuffled, medians 3.3 and 1.2.
ORDER = 1.35
ORDER_LOOKS = 5

# Of the parameters. What may stand still in a sound run is less: biases of keys, which the softmax cannot feel.
FROZEN = 0.1

# An update of 0.001 of the weights is the rule of thumb (Karpathy, "makemore", part 3); small models with large rates
# reach 0.1 and learn. So a ratio is judged only when the loss does not fall, and only from ten times the rule on.
TOO_LARGE = 0.01
OVERWRITTEN = 3.0  # a step that large leaves nothing of what was there, whatever the loss does later
# Fresh weights that have come as far in all have had room for more than counting tokens: packaged recipes and others
# that learn are at 80% of that loss by then, a rate a hundred times too high at 100% and more.
FAR = 3.0

# Fresh weights are noise, and what is learned is their change: the sum of all update-to-weight ratios bounds how far
# they can have moved, in units of their own size. Below a half of it what was noise at the start still is.
MOVED = 0.5
FALLEN = 0.1  # of the way from the first loss to that of counting tokens: what even a poor run has after 50 steps

# The logits of a fresh model have a standard deviation of 0.02 sqrt(width) and less: ln V + 0.0002 width nats at most,
# which is below 1.2 ln V to a width of 8,192. And no fresh model knows an answer.
FIRST_HIGH, FIRST_LOW = 1.5, 0.7
TINY_TOKENS = 1.5  # bytes a token; a byte-level vocabulary of 300 has 1.6 on the text it was made for, 2,048 has 3
REPEATS = 0.3
EPOCHS = 4  # repeats are worth new text up to there (Muennighoff et al., arXiv:2305.16264)

SECONDS = 30.0  # of steps before a speed is judged: less is noise, and nobody waits for it

# Each threshold is a share of the time that a person would want back: what is below is not worth an edit.
DATA = 0.1  # the loader reads memory-mapped shards ahead of the step; in sound runs it is below 1%
RETRIES = 0.1  # of the steps: each stops the device and gives all that is cached back to the driver
CORES = 0.15  # of the wall clock; the training thread feeds a GPU, too
BETWEEN = 0.2  # of the run: evaluations and saves are the price of knowing and of not losing
COMPILING = 0.1
LATE = 1.25  # times the upper end of the plan's range, which holds four of five runs

QUADRATIC = ("math", "mask")
LONG_ROWS = 512  # below, all scores of a row fit in a cache
HOT = 80.0  # degrees Celsius
COOLED = 0.85  # of the clock that this device has shown it can keep


def _masked(seen: Seen, facts: Facts) -> Iterator[Finding]:
    told = [step for step in seen.recent if step.loss_tokens is not None][-FEW:]
    if len(told) < 5 or not facts.tokens_per_step:
        return
    learned = sum(step.loss_tokens or 0 for step in told) / len(told)
    share, positions = learned / facts.tokens_per_step, f"{facts.tokens_per_step:,} positions a step"
    if share == 0:
        yield Finding(
            "masked",
            "nothing is learned, because every token is masked",
            f"of {positions} none counted in the loss of the last {len(told)} steps",
            "look at what is learned with `bloomery prepare RECIPE --preview 3`, and mend the text or its mask",
        )
    elif share < 0.05:
        padded = facts.layout == "padded"
        yield Finding(
            "masked",
            "hardly anything is learned" + (": most positions are padding" if padded else ""),
            f"of {positions} {learned:,.0f} counted in the loss ({share:.1%})",
            "set data.packing=true" if padded else "look at the masks with `bloomery prepare RECIPE --preview 3`",
        )


def _labels(seen: Seen, _: Facts) -> Iterator[Finding]:
    following = middle([health.labels_next for health in seen.health])
    if following is None or following >= NEXT:
        return
    own, after = (middle([getattr(v, name) for v in seen.health]) or 0.0 for name in ("labels_own", "labels_after"))
    fix = (
        "labels[t] must be tokens[t + 1] of the same document: compare them with `bloomery prepare RECIPE --preview 3`"
    )
    if own > 0.9:
        where = "off by one, so that the model is asked for the token that it has just been shown"
        seen_there = f"{own:.0%} of the labels are their own token, {following:.0%} the next one"
    elif after > 0.9:
        where = "off by one, so that the model is asked for the token after the next"
        seen_there = f"{after:.0%} of the labels are the token after the next, {following:.0%} the next one"
    else:
        where = "not the text's next tokens: the tokens were shuffled after the labels were made, or the labels were"
        seen_there = f"{following:.0%} of the labels are the token that follows"
    yield Finding("labels", f"the labels are {where}", seen_there, fix)


def _shuffled(seen: Seen, facts: Facts) -> Iterator[Finding]:
    looks = [health.pair_excess for health in seen.health if health.pair_excess is not None]
    loss, floor = seen.loss, facts.unigram_nats
    if len(looks) < ORDER_LOOKS or median(looks) >= ORDER or seen.step < ENOUGH or loss is None:
        return
    if floor is not None and loss < 0.95 * floor:
        return
    known = f", and the loss is {loss:.2f} where counting tokens alone gives {floor:.2f}" if floor is not None else ""
    yield Finding(
        "shuffled",
        "the tokens are in no order that could be learned: they look shuffled",
        f"pairs of neighbours repeat {median(looks):.1f} times as often as by chance (text: 2 to 20 times){known}",
        "look at the text as the model sees it with `bloomery prepare RECIPE --preview 3`",
    )


def _frozen(seen: Seen, facts: Facts) -> Iterator[Finding]:
    looks = [v for v in seen.healthy_rate if v.unchanged_share is not None][-10:]
    if len(looks) < 3:
        return
    still, without = (
        median(getattr(v, name) or 0.0 for v in looks) for name in ("unchanged_share", "no_gradient_share")
    )
    share = max(still, without)
    if share < FROZEN:
        return
    name = f", {looks[-1].unchanged} among them" if looks[-1].unchanged else ""
    if without >= 0.9 * share:
        why, fix = "no gradient reaches them", "look for requires_grad=False, detach() and no_grad() on their way"
    elif facts.precision == "bfloat16-pure":
        why, fix = "their updates are lost in rounding to bfloat16", "set train.precision=bfloat16"
    else:
        why, fix = (
            "they have gradients, but no update reaches them",
            "look whether the optimizer holds these parameters",
        )
    yield Finding(
        "frozen",
        f"{share:.0%} of the weights are frozen: {why}",
        f"{len(looks)} steps that were looked at left them as they were{name}",
        fix,
    )


def _first_loss(seen: Seen, facts: Facts) -> Iterator[Finding]:
    begin, size = seen.begin, facts.vocab_size
    if begin is None or size is None or size < 2:
        return
    chance = log(size)
    said = f"the first loss is {begin:.2f}, that of a guess among {size:,} tokens ln {size:,} = {chance:.2f}"
    if facts.fresh and begin < FIRST_LOW * chance:
        fix = "check that no position sees its own label: the mask of attention, and how labels are shifted"
        yield Finding("first-loss", "a model that has learned nothing knows the answers", said, fix)
    elif begin > FIRST_HIGH * chance:
        fix = "lower model.initializer_range" if facts.fresh else "take the tokenizer of those weights: tokenizer.from"
        yield Finding("first-loss", "the model begins worse than a guess", said, fix)


def _fell_little(seen: Seen, facts: Facts) -> bool:
    if not facts.falls or seen.begin is None or seen.loss is None or len(seen.losses) < ENOUGH:
        return False
    floor = facts.unigram_nats if facts.unigram_nats is not None else seen.begin * 2 / 3  # what counting tokens reaches
    way = max(0.0, seen.begin - floor)
    return seen.loss > seen.begin - FALLEN * max(way, 0.05 * seen.begin)


def _stuck(seen: Seen, facts: Facts) -> bool:
    """Hardly below the first loss, well above what it had reached, or long no better than counting tokens."""
    begin, loss, lowest = seen.begin, seen.loss, seen.lowest
    if not facts.falls or begin is None or loss is None or lowest is None or seen.step < facts.warmup_steps + ENOUGH:
        return False
    long = seen.step >= facts.warmup_steps + LONG
    rose = len(seen.losses) >= 2 * ENOUGH and loss > lowest + max(0.25 * (begin - lowest), 0.02 * begin)
    counting = long and facts.unigram_nats is not None and loss > 0.98 * facts.unigram_nats and seen.flat
    return _fell_little(seen, facts) or rose or counting


def _curve(seen: Seen, facts: Facts) -> str:
    counting = f"; counting tokens alone gives {facts.unigram_nats:.2f}" if facts.unigram_nats is not None else ""
    return (
        f"after {seen.step:,} steps the loss is {seen.loss or 0:.2f}, where it began at {seen.begin or 0:.2f}{counting}"
    )


def _rate_key(facts: Facts) -> tuple[str, float]:
    """The key that moves most matrices, and its value."""
    if facts.optimizer == "muon" and facts.muon_learning_rate:
        return "optimizer.muon_learning_rate", facts.muon_learning_rate
    return "optimizer.learning_rate", facts.learning_rate


def _too_far(seen: Seen, facts: Facts) -> Iterator[Finding]:
    if seen.step < ENOUGH or seen.loss is None:
        return
    counting = facts.unigram_nats is not None and seen.loss > 0.98 * facts.unigram_nats
    if seen.largest_ratio >= OVERWRITTEN:
        yield _too_high(f"a step changed the weights by {seen.largest_ratio:.1f} times their size", seen, facts)
    elif facts.fresh and counting and seen.path >= FAR:
        yield _too_high(f"steps changed the weights by up to {seen.largest_ratio:.0%} of their size", seen, facts)


def _rate_too_high(seen: Seen, facts: Facts) -> Iterator[Finding]:
    if seen.ratio is not None and seen.ratio >= TOO_LARGE:
        yield _too_high(f"each step changes the weights by {seen.ratio:.1%} of their size", seen, facts)


def _too_high(changes: str, seen: Seen, facts: Facts) -> Finding:
    key, rate = _rate_key(facts)
    return Finding(
        "rate-high",
        "the learning rate is too high",
        f"{changes}, where 0.1% is usual; {_curve(seen, facts)}",
        f"set {key}={_rounded(rate / 100)} (it is {rate:g}), and see whether the loss falls at ten times that",
    )


def _rate_too_low(seen: Seen, facts: Facts) -> Iterator[Finding]:
    """Judged by how far the weights can get: until now, and until the end of the run at the rate of its peak."""
    ratio, (key, rate) = seen.ratio, _rate_key(facts)
    flat = _fell_little(seen, facts) or _stuck(seen, facts)
    if not facts.fresh or not ratio or not seen.recent or not flat or seen.path >= MOVED:
        return
    now = seen.recent[-1].learning_rate
    left = max(0, (facts.steps or seen.step) - seen.step)
    reach = seen.path + left * ratio * (facts.learning_rate / now if now else 1.0)
    if reach >= MOVED and seen.step < facts.warmup_steps + LONG:
        return
    yield Finding(
        "rate-low",
        "the learning rate is too low",
        f"a step changes the weights by {ratio:.1g} of their size, so that {seen.step:,} steps have moved them by "
        f"{seen.path:.1%} at most; {_curve(seen, facts)}",
        f"set {key}={_rounded(rate * min(1e4, 10 / max(reach, 1e-6)))} (it is {rate:g})",
    )


def _gradient(seen: Seen, facts: Facts) -> Iterator[Finding]:
    norms = [step.grad_norm for step in seen.recent if step.grad_norm is not None]
    if len(norms) < FEW:
        return
    now, then = median(norms[-FEW:]), median(seen.first_norms)
    if now == 0:
        seen_norm = f"its norm was 0 in the last {FEW} steps; {_curve(seen, facts)}"
        yield Finding("gradient", "no gradient comes back from the loss", seen_norm, "look for detach() and no_grad()")
    elif now > 10 * then > 0:
        fix = (
            "set train.max_grad_norm=1.0"
            if facts.clip is None
            else f"set {_rate_key(facts)[0]} to a tenth of what it is"
        )
        grew = f"its norm was {then:.2g} in the first steps and is {now:.2g} now; {_curve(seen, facts)}"
        yield Finding("gradient", "the gradient explodes", grew, fix)
    elif facts.clip is not None and sum(norm > 10 * facts.clip for norm in norms) >= 0.95 * len(norms):
        cut = f"its norm is {now:.2g}, and train.max_grad_norm={facts.clip:g} leaves {facts.clip / now:.1%} of it"
        fix = f"set train.max_grad_norm={_rounded(now)} or look for what is that large in the text"
        yield Finding("clipped", "every step is cut to a small part of its gradient", cut, fix)


def _warmup(seen: Seen, facts: Facts) -> Iterator[Finding]:
    if facts.steps is not None and facts.warmup_steps >= facts.steps:
        reached = f"{facts.warmup_steps:,} steps of warmup in a run of {facts.steps:,}: the rate came to"
        share = seen.peak_rate / facts.learning_rate if facts.learning_rate else 0.0
        fix = f'set optimizer.warmup="{max(1, facts.steps // 20)} steps"'
        yield Finding("warmup", "the learning rate never reaches its peak", f"{reached} {share:.0%} of it", fix)


def _tokenizer(_: Seen, facts: Facts) -> Iterator[Finding]:
    if facts.bytes_per_token is not None and facts.bytes_per_token < TINY_TOKENS:
        yield Finding(
            "tokenizer",
            "the tokenizer cuts this text into crumbs, as one does that was made for another",
            f"a token stands for {facts.bytes_per_token:.1f} bytes",
            "train one on this text: tokenizer.train.vocab_size=32000",
        )


def _repeats(_: Seen, facts: Facts) -> Iterator[Finding]:
    if facts.duplicates is not None and facts.duplicates > REPEATS:
        yield Finding(
            "duplicates",
            "much of the text is there more than once",
            f"{facts.duplicates:.0%} of the documents repeat another one, token for token",
            "remove the copies, then `bloomery prepare RECIPE`",
        )


def _unexplained(seen: Seen, facts: Facts) -> Finding:
    return Finding(
        "stuck",
        "the loss does not fall, and nothing that is measured says why",
        f"{_curve(seen, facts)}; labels, masks, gradients and the size of the updates are as they should be",
        "read `bloomery prepare RECIPE --preview 3`; then try train.seed=1 and a tenth of the learning rate",
    )


def _memorised(seen: Seen, facts: Facts) -> Iterator[Finding]:
    """The held-out loss has turned while that in training falls on. Two evaluations must agree, by 0.05 nats."""
    exams = sorted(seen.evaluations.items())
    if len(exams) < 4 or seen.loss is None:
        return
    best_at, best = min(exams, key=lambda exam: exam[1])
    after = [loss for at, loss in exams if at > best_at]
    if len(after) < 2 or min(after[-2:]) < best + 0.05 or seen.loss >= best:
        return
    read = (seen.step * facts.tokens_per_step) / facts.text_tokens if facts.text_tokens else 0.0
    times = f", and the text was read {read:.1f} times" if read > EPOCHS else ""
    yield Finding(
        "memorised",
        "the model learns the text by heart",
        f"the held-out loss was {best:.2f} at step {best_at:,} and is {after[-1]:.2f} now; in training it is "
        f"{seen.loss:.2f}{times}",
        "use the best checkpoint (`--step best`), stop early with eval.early_stopping_patience=3, or bring more text",
    )
    yield from _repeats(seen, facts)


def _rounded(value: float) -> str:
    """One digit: a rate to try, not a result."""
    return f"{float(f'{value:.0e}'):g}"


def _data(seen: Seen, _: Facts) -> Iterator[Finding]:
    waits = [step.data_wait_seconds for step in seen.recent]
    share = sum(waits) / max(1e-9, sum(step.step_seconds for step in seen.recent))
    if share > DATA:
        evidence = f"{share:.0%} of their time, {median(waits) * 1000:,.0f} ms a step"
        place = "put the prepared text on a local disk (data.prepared=/a/local/folder)"
        fix = f"{place} and read further ahead (data.prefetch=16)"
        yield Finding("data", "the steps wait for data", evidence, fix)


def _attention(seen: Seen, facts: Facts) -> Iterator[Finding]:
    """On a CPU a mask is right for short rows; plain sdpa is quadratic where no fused kernel exists."""
    quadratic = seen.attention in QUADRATIC if facts.device != "cpu" else seen.attention == "math"
    fallen = seen.attention == "sdpa" and facts.fused_attention is False and facts.device != "cpu"
    if (quadratic or fallen) and facts.sequence_length >= LONG_ROWS:
        length, kernel = facts.sequence_length, "PyTorch's math kernel" if fallen else f"the kernel {seen.attention}"
        yield Finding(
            "attention",
            "attention writes every score to memory",
            f"{kernel} runs, which holds {length:,} x {length:,} scores a head",
            "set train.attention=blockwise" if fallen else "set train.attention=auto",
        )


def _heat(seen: Seen, _: Facts) -> Iterator[Finding]:
    """As devices tell it; else slower than before, while hot and at work: one without work lowers its clock, too."""
    for device in sorted({sample.device for sample in seen.gpus}):
        samples = [sample for sample in seen.gpus if sample.device == device]
        told = [sample.throttled for sample in samples if sample.throttled]
        hottest = max((sample.temperature or 0.0 for sample in samples), default=0.0)
        clocks = [s.clock_mhz for s in samples if s.clock_mhz and (s.utilization is None or s.utilization > 50)]
        now = [s for s in samples if s.clock_mhz and (s.utilization is None or s.utilization > 50)][-FEW:]
        hot = len(now) == FEW and median(s.temperature or 0.0 for s in now) >= HOT
        if len(told) > 0.1 * len(samples):
            share = len(told) / len(samples)
            evidence = f"it says so in {share:.0%} of the samples ({told[-1]}), at up to {hottest:.0f} °C"
        elif not told and hot and all(s.throttled != "" for s in now) and median(clocks[-FEW:]) < COOLED * max(clocks):
            evidence = f"its clock fell from {max(clocks):,.0f} to {median(clocks[-FEW:]):,.0f} MHz at {hottest:.0f} °C"
        else:
            continue
        fix = "give it air, or lower its power limit so that it keeps one speed (`rocm-smi --setpoweroverdrive`)"
        yield Finding(f"heat-{device}", f"GPU {device} slows itself down", evidence, fix)


def _cores(seen: Seen, _: Facts) -> Iterator[Finding]:
    health = [v for v in seen.health if v.core_wait_seconds is not None and v.seconds > 0][-FEW:]
    seconds = sum(v.seconds for v in health)
    waited = total([v.core_wait_seconds for v in health])
    if seconds >= SECONDS / 3 and waited > CORES * seconds:
        yield Finding(
            "cores",
            "other programs, or too many threads, hold the processor's cores",
            f"the training thread was ready to run and had no core for {waited / seconds:.0%} of {seconds:,.0f} s",
            "end what else runs here, or train on fewer threads: OMP_NUM_THREADS=1 before the command",
        )


def _compiling(seen: Seen, facts: Facts) -> Iterator[Finding]:
    if not facts.compiled or not facts.steps or seen.began is None:
        return
    typical = median(step.step_seconds for step in seen.recent)
    took, whole = seen.began.step_seconds - typical, facts.steps * typical
    if took > SECONDS and took > COMPILING * (whole + took):
        yield Finding(
            "compile",
            "compiling takes longer than it can win back",
            f"the first step took {seen.began.step_seconds:,.0f} s and all {facts.steps:,} take {whole:,.0f} s",
            "set train.compile=false",
        )


def _graphs(seen: Seen, _: Facts) -> Iterator[Finding]:
    """Shapes are fixed in training and in evaluation, so that nothing is left to compile after the first exam."""
    early, last = seen.compiled_graphs, seen.health[-1].graphs if seen.health else None
    if early is not None and last is not None and last > 2 * early + 4:
        yield Finding(
            "recompiled",
            "torch.compile keeps compiling",
            f"{early} graphs at the start, {last} at step {seen.health[-1].step:,}",
            "set train.compile=false, and report the shape that changes",
        )


def _crowded(seen: Seen, _: Facts) -> Iterator[Finding]:
    """A process that resumes counts from zero again."""
    told = [(sample, sample.alloc_retries) for sample in seen.allocator if sample.alloc_retries is not None]
    if len(told) < 2:
        return
    retries = sum(max(0, after - before) for (_, before), (_, after) in pairwise(told))
    steps, last = told[-1][0].step - told[0][0].step, told[-1][0]
    if retries > RETRIES * max(steps, FEW):
        yield Finding(
            "crowded",
            "memory is so full that PyTorch gives its cache back and asks the driver again and again",
            f"{retries:,} times in {steps:,} steps; {last.fragmentation or 0:.0%} of {last.reserved_gib or 0:.1f} GiB"
            f" lies free in pieces",
            "set a smaller train.micro_batch_size: it is accumulated to the same tokens a step",
        )


def _between(seen: Seen, facts: Facts) -> Iterator[Finding]:
    saving = 0.0 if facts.saves_in_background else seen.saving_seconds
    looks = "evaluate less often or less: eval.every, eval.tokens"
    for cause, name, seconds, fix in (
        ("evaluation", "evaluations take", seen.evaluation_seconds, looks),
        ("saving", "writing checkpoints takes", saving, "save less often: checkpoint.every"),
    ):
        whole = seen.steps_seconds + seen.evaluation_seconds + saving
        if seconds > BETWEEN * whole:
            yield Finding(cause, f"{name} a good part of the run", f"{seconds:,.0f} of {whole:,.0f} s", fix)


def _recomputing(seen: Seen, facts: Facts) -> Iterator[Finding]:
    """A forward more is a third of a step (forward 1, backward 2: Chen et al., arXiv:1604.06174)."""
    limit = facts.memory_limit_gib
    if facts.checkpointing != "none" and limit and 0 < seen.peak_gib < 0.5 * limit:
        yield Finding(
            "recomputing",
            "activations are computed twice although memory is free",
            f"activation checkpointing is {facts.checkpointing}, and {seen.peak_gib:.1f} of {limit:.1f} GiB are used",
            "see whether it fits: `bloomery plan RECIPE train.activation_checkpointing=none`",
        )


def _late(seen: Seen, facts: Facts, *, explained: bool) -> Iterator[Finding]:
    if facts.step_seconds is None:
        return
    high, took = facts.step_seconds[1], median(step.step_seconds for step in seen.recent)
    if took > LATE * high:
        why = "" if explained else ", and nothing that is measured says why"
        yield Finding(
            "late",
            f"the steps take longer than the plan's range{why}",
            f"{took:.3g} s each, where the plan's range ends at {high:.3g} s: {took / high:.1f} times as long",
            "measure this machine with `bloomery bench RECIPE`, and plan again",
        )


RULES: dict[str, tuple[Rule, ...]] = {
    "direct": (_masked, _labels, _shuffled, _frozen),  # seen as such, the surest first: one of them is the answer
    "curve": (_first_loss, _rate_too_low, _too_far),
    "plateau": (_rate_too_high, _gradient),  # of a loss that does not fall
    "plateau, too": (_warmup, _tokenizer, _repeats),
    "overfit": (_memorised,),
    "slow at once": (_attention,),
    "slow": (_data, _attention, _heat, _cores, _compiling, _graphs, _crowded, _between, _recomputing),
}


def _apply(rules: str, seen: Seen, facts: Facts) -> list[Finding]:
    return [found for rule in RULES[rules] for found in rule(seen, facts)]


def _not_learning(seen: Seen, facts: Facts) -> list[Finding]:
    """Masks, labels, order and frozen weights are seen directly; guesses from the curve are made only without them."""
    direct = next((found for rule in RULES["direct"] if (found := list(rule(seen, facts)))), None)
    if direct is not None:
        return direct
    found = _apply("curve", seen, facts)
    if not found and _stuck(seen, facts):
        found = _apply("plateau", seen, facts) or [_unexplained(seen, facts)]
        found += _apply("plateau, too", seen, facts)
    return [*found, *_apply("overfit", seen, facts)]


def _slow(seen: Seen, facts: Facts) -> list[Finding]:
    """What takes time that could be had back, and when the plan's range is missed by how much."""
    if sum(step.step_seconds for step in seen.recent) < SECONDS or len(seen.recent) < FEW:
        return _apply("slow at once", seen, facts)
    found = _apply("slow", seen, facts)
    return [*found, *_late(seen, facts, explained=bool(found))]


def why_slow(events: Iterable[Event], facts: Facts) -> tuple[str, ...]:
    """What takes time that could be had back; empty where nothing does. Judged after 30 seconds of steps."""
    return tuple(str(found) for found in _slow(seen_of(events), facts))


def why_not_learning(events: Iterable[Event], facts: Facts) -> tuple[str, ...]:
    """What keeps the loss from falling, the surest first; empty for a run that learns or is too young to judge."""
    return tuple(str(found) for found in _not_learning(seen_of(events), facts))


def findings(events: Iterable[Event], facts: Facts) -> list[Finding]:
    """Why it did not learn, then why it was slow, for those who lay them out themselves."""
    seen = seen_of(events)
    return [*_not_learning(seen, facts), *_slow(seen, facts)]


@final
class Diagnosis:
    """Reads a run's events as they come and says each cause once, also over resumes. `facts` is asked when needed."""

    def __init__(self, facts: Callable[[], Facts], before: Iterable[Event] = ()) -> None:
        self._facts, self._seen = facts, Seen()
        self._known: Facts | None = None
        self._said: set[str] = set()
        for event in before:
            self._read(event)

    def look(self, event: Event) -> Iterator[Warned]:
        """What is to be said after this event."""
        self._read(event)
        steps = isinstance(event, StepDone) and (event.step in _LOOKS or event.step % 1000 == 0)
        if not steps and not (isinstance(event, EvalDone) and event.step >= ENOUGH):
            return
        self._known = self._known or self._facts()
        for found in (*_not_learning(self._seen, self._known), *_slow(self._seen, self._known)):
            if found.cause not in self._said:
                self._said.add(found.cause)
                yield Warned(step=self._seen.step, reason=str(found), cause=found.cause)

    def _read(self, event: Event) -> None:
        self._seen.add(event)
        if isinstance(event, Warned) and event.cause:
            self._said.add(event.cause)
