"""Why a loss does not fall: masks, labels, order, frozen weights, the learning rate, the text."""

from collections.abc import Iterator
from math import log
from statistics import median

from bloomery.monitor.diagnose.history import FEW, Facts, Finding, Seen, middle

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


def not_learning(seen: Seen, facts: Facts) -> list[Finding]:
    """The causes that the evidence shows, the surest first; empty for a run that learns or is too young to judge.

    Masks, labels, order and frozen weights are seen directly; guesses from the curve are made only without them.
    """
    for direct in (_masked(seen, facts), _labels(seen), _shuffled(seen, facts), _frozen(seen, facts)):
        if found := list(direct):
            return found
    found = [*_first_loss(seen, facts), *_rate_too_low(seen, facts), *_too_far(seen, facts)]
    if not found and _stuck(seen, facts):
        found = [*_rate_too_high(seen, facts), *_gradient(seen, facts)] or [*_unexplained(seen, facts)]
        found += [*_warmup(seen, facts), *_text(facts)]
    return [*found, *_memorised(seen, facts)]


def _masked(seen: Seen, facts: Facts) -> Iterator[Finding]:
    told = [step for step in seen.recent if step.learned_tokens is not None][-FEW:]
    if len(told) < 5 or not facts.tokens_per_step:
        return
    learned = sum(step.learned_tokens or 0 for step in told) / len(told)
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
            "set data.layout=packed" if padded else "look at the masks with `bloomery prepare RECIPE --preview 3`",
        )


def _labels(seen: Seen) -> Iterator[Finding]:
    following = middle([vitals.labels_next for vitals in seen.vitals])
    if following is None or following >= NEXT:
        return
    own, after = (middle([getattr(v, name) for v in seen.vitals]) or 0.0 for name in ("labels_own", "labels_after"))
    mend = (
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
    yield Finding("labels", f"the labels are {where}", seen_there, mend)


def _shuffled(seen: Seen, facts: Facts) -> Iterator[Finding]:
    looks = [vitals.pair_excess for vitals in seen.vitals if vitals.pair_excess is not None]
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
    looks = [v for v in seen.healthy_rate if v.still_share is not None][-10:]
    if len(looks) < 3:
        return
    still, without = (median(getattr(v, name) or 0.0 for v in looks) for name in ("still_share", "no_gradient_share"))
    share = max(still, without)
    if share < FROZEN:
        return
    name = f", {looks[-1].still} among them" if looks[-1].still else ""
    if without >= 0.9 * share:
        why, mend = "no gradient reaches them", "look for requires_grad=False, detach() and no_grad() on their way"
    elif facts.precision == "bfloat16-pure":
        why, mend = "their updates are lost in rounding to bfloat16", "set train.precision=bfloat16"
    else:
        why, mend = (
            "they have gradients, but no update reaches them",
            "look whether the optimizer holds these parameters",
        )
    yield Finding(
        "frozen",
        f"{share:.0%} of the weights are frozen: {why}",
        f"{len(looks)} steps that were looked at left them as they were{name}",
        mend,
    )


def _first_loss(seen: Seen, facts: Facts) -> Iterator[Finding]:
    begin, size = seen.begin, facts.vocab_size
    if begin is None or size is None or size < 2:
        return
    chance = log(size)
    said = f"the first loss is {begin:.2f}, that of a guess among {size:,} tokens ln {size:,} = {chance:.2f}"
    if facts.fresh and begin < FIRST_LOW * chance:
        mend = "check that no position sees its own label: the mask of attention, and how labels are shifted"
        yield Finding("first-loss", "a model that has learned nothing knows the answers", said, mend)
    elif begin > FIRST_HIGH * chance:
        mend = "lower model.initializer_range" if facts.fresh else "take the tokenizer of those weights: tokenizer.from"
        yield Finding("first-loss", "the model begins worse than a guess", said, mend)


def _floor(begin: float, facts: Facts) -> float:
    """What counting tokens would reach; without the text's entropy, two thirds of the first loss."""
    return facts.unigram_nats if facts.unigram_nats is not None else begin * 2 / 3


def _fell_little(seen: Seen, facts: Facts) -> bool:
    if not facts.falls or seen.begin is None or seen.loss is None or len(seen.losses) < ENOUGH:
        return False
    way = max(0.0, seen.begin - _floor(seen.begin, facts))
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
    if facts.optimizer == "muon" and facts.matrix_learning_rate:
        return "optimizer.matrix_learning_rate", facts.matrix_learning_rate
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
        mend = "set train.clip=1.0" if facts.clip is None else f"set {_rate_key(facts)[0]} to a tenth of what it is"
        grew = f"its norm was {then:.2g} in the first steps and is {now:.2g} now; {_curve(seen, facts)}"
        yield Finding("gradient", "the gradient explodes", grew, mend)
    elif facts.clip is not None and sum(norm > 10 * facts.clip for norm in norms) >= 0.95 * len(norms):
        cut = f"its norm is {now:.2g}, and train.clip={facts.clip:g} leaves {facts.clip / now:.1%} of it"
        mend = f"set train.clip={_rounded(now)} or look for what is that large in the text"
        yield Finding("clipped", "every step is cut to a small part of its gradient", cut, mend)


def _warmup(seen: Seen, facts: Facts) -> Iterator[Finding]:
    if facts.steps is not None and facts.warmup_steps >= facts.steps:
        reached = f"{facts.warmup_steps:,} steps of warmup in a run of {facts.steps:,}: the rate came to"
        share = seen.peak_rate / facts.learning_rate if facts.learning_rate else 0.0
        mend = f'set optimizer.warmup="{max(1, facts.steps // 20)} steps"'
        yield Finding("warmup", "the learning rate never reaches its peak", f"{reached} {share:.0%} of it", mend)


def _text(facts: Facts) -> Iterator[Finding]:
    """What the text has against it; said only of a run that does not learn."""
    if facts.bytes_per_token is not None and facts.bytes_per_token < TINY_TOKENS:
        yield Finding(
            "tokenizer",
            "the tokenizer cuts this text into crumbs, as one does that was made for another",
            f"a token stands for {facts.bytes_per_token:.1f} bytes",
            "train one on this text: tokenizer.train.vocab_size=32000",
        )
    if facts.duplicates is not None and facts.duplicates > REPEATS:
        yield _repeats(facts)


def _repeats(facts: Facts) -> Finding:
    return Finding(
        "duplicates",
        "much of the text is there more than once",
        f"{facts.duplicates or 0:.0%} of the documents repeat another one, token for token",
        "remove the copies, then `bloomery prepare RECIPE`",
    )


def _unexplained(seen: Seen, facts: Facts) -> Iterator[Finding]:
    yield Finding(
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
        "use the best checkpoint (`--step best`), stop early with eval.stop_early=3, or bring more text",
    )
    if facts.duplicates is not None and facts.duplicates > REPEATS:
        yield _repeats(facts)


def _rounded(value: float) -> str:
    """One digit: a rate to try, not a result."""
    return f"{float(f'{value:.0e}'):g}"
