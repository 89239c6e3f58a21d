"""Decoding: several texts at once, each in a slot of one KV cache. Chat, generate, samples and serve all come here.

A step reads a piece of one prompt, then gives every running text one token, in one forward for all of them.
Sampling: the settings, and the distribution that they make of logits. Speculation: guesses of a text's next tokens,
several of which one forward checks, by prompt lookup or by a smaller draft model.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.facts.config import ModelConfig
from bloomery.model.cache import FEW, Cache
from bloomery.model.decoder import ALL_LOGITS, Decoder, Output
from bloomery.model.heads import LastLogits

COLDEST = 1e-4  # below it float32 logits overflow, and the likeliest token is certain anyway
# The likeliest tokens, which nearly always reach top_p: sorting a full vocabulary takes milliseconds.
HEAD = 1024


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy; filters run in the order of the fields.

    `logit_bias` is added to the logits of tokens. `repetition_penalty` divides positive logits of tokens that occurred,
    and multiplies negative ones (Keskar et al. 2019); `frequency_penalty` is subtracted for each time that a token was
    generated, `presence_penalty` once, as by OpenAI; no sequence of `no_repeat_ngram_size` tokens occurs twice;
    `stop_ids` end the text and are not part of it, and are not drawn before `min_new_tokens`. `top_k` keeps the k
    likeliest; `top_p` the fewest whose probabilities add up to p; `min_p` those at least p times as likely as the
    likeliest.
    """

    max_new_tokens: int = 200
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert (
            self.temperature >= 0
            and self.repetition_penalty > 0
            and 0 < self.top_p <= 1
            and 0 <= self.min_p <= 1
        )


def known_ids(*ids: int | None) -> tuple[int, ...]:
    """The distinct ids that are not None: end tokens of a tokenizer, a model and a template."""
    return tuple(sorted({token for token in ids if token is not None}))


class NotFinite(UserError):
    """The logits of a model hold NaN or infinity."""

    def __init__(self) -> None:
        super().__init__(
            "the model answers with numbers that are not finite: its weights are damaged or have diverged",
            where="the model",
            fix="try an earlier checkpoint with --step, or another copy of the model",
        )


def draw(
    logits: Tensor,
    prompt: Sequence[int],
    new: Sequence[int],
    sampling: Sampling,
    random: torch.Generator,
) -> int:
    """A token from float32 logits [V] on the CPU, after the prompt and the new tokens."""
    penalized_logits = penalized(logits, prompt, new, sampling)
    if sampling.temperature < COLDEST:
        return int(penalized_logits.argmax())
    distribution = next_distribution(penalized_logits, sampling)
    return int(torch.multinomial(distribution, 1, generator=random))


def penalized(
    logits: Tensor, prompt: Sequence[int], new: Sequence[int], sampling: Sampling
) -> Tensor:
    """Logits [V] after the biases, and the penalties of tokens that occurred; the same tensor where there are none."""
    if sampling.logit_bias:
        ids = torch.tensor([token for token, _ in sampling.logit_bias])
        logits = logits.index_add(0, ids, torch.tensor([bias for _, bias in sampling.logit_bias]))
    # Lower logits, for repetition in all of the text and for frequency in the new tokens.
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*prompt, *new}))
        id_logits = logits[ids]
        penalty = sampling.repetition_penalty
        penalized_logits = torch.where(id_logits > 0, id_logits / penalty, id_logits * penalty)
        logits = logits.index_copy(0, ids, penalized_logits)
    if new and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = torch.tensor(new).unique(return_counts=True)
        logits = logits.index_add(
            0, ids, -(sampling.frequency_penalty * counts + sampling.presence_penalty)
        )

    # Impossible tokens: an end that is too early, and the end of an n-gram that occurred.
    banned = list(sampling.stop_ids) if len(new) < sampling.min_new_tokens else []
    if size := sampling.no_repeat_ngram_size:
        tokens = [*prompt, *new]
        ngram_start = tokens[len(tokens) - size + 1 :]
        for start in range(len(tokens) - size + 1):
            end = start + size - 1
            if tokens[start:end] == ngram_start:
                banned.append(tokens[end])
    if not banned:
        return logits

    # A grammar may allow nothing but banned tokens: then they stay.
    allowed_logits = logits.index_fill(0, torch.tensor(banned), float("-inf"))
    return allowed_logits if allowed_logits.max() > float("-inf") else logits


def next_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V] after temperature, top-k, top-p and min-p; at least one token stays."""
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    if sampling.top_p < 1.0:
        # Sorting the largest probabilities is enough unless they do not reach p together.
        top_p = max(sampling.top_p, 1e-30)
        shares = logits.softmax(-1)
        head, order = shares.topk(min(HEAD, len(shares)))
        if len(head) < len(shares) and head.sum() < top_p:
            head, order = shares.sort(descending=True)
        # A token stays when those likelier than it do not reach p yet.
        likelier_mass = head.cumsum(-1) - head
        top_ids = order[likelier_mass < top_p]
        logits = torch.full_like(logits, float("-inf")).index_copy(0, top_ids, logits[top_ids])
    shares = logits.softmax(-1)
    if sampling.min_p > 0.0:
        shares = shares.masked_fill(shares < sampling.min_p * shares.max(), 0.0)
    return shares / shares.sum()


LAST = LastLogits()
Adapter = str | None  # the name of a text's adapter
Choose = Callable[[Sequence[Adapter]], None]


def in_one_forward(config: ModelConfig) -> bool:
    """Whether texts of several lengths can share a forward; some rotations depend on the longest of them."""
    stretched = config.rope_scaling is not None and config.rope_scaling.kind in (
        "dynamic",
        "longrope",
    )
    return config.transformers_backend is None and not stretched


@final
class Past:
    """The tokens and KV cache of a decoder's slots, reused for texts that begin alike, such as the turns of a chat.

    `capacity`: tokens in a slot; a single slot grows. `choose` gets the adapter of each row before a forward.
    """

    def __init__(
        self, decoder: Decoder, slots: int = 1, capacity: int = 0, choose: Choose | None = None
    ) -> None:
        self.decoder = decoder
        self.slots = slots
        self.choose = choose
        self.ids: list[list[int]] = [[] for _ in range(slots)]
        self.adapters: list[Adapter] = [None] * slots
        self.cache = Cache(decoder.config, capacity, slots)

    def common(self, slot: int, ids: Sequence[int], adapter: Adapter = None) -> int:
        """How many tokens of `ids` a slot holds already; the last one always is read again."""
        if adapter != self.adapters[slot]:
            return 0
        slot_ids = self.ids[slot]
        pairs = zip(slot_ids, ids[:-1], strict=False)
        for position, (slot_id, new_id) in enumerate(pairs):
            if slot_id != new_id:
                return position
        return min(len(slot_ids), len(ids) - 1)

    def reuse(
        self, ids: Sequence[int], capacity: int, slot: int = 0, adapter: Adapter = None
    ) -> list[int]:
        """Keeps the beginning that a slot has in common with `ids`, and returns the tokens that are not read yet.

        Afterwards `capacity` tokens fit into the slot.
        """
        common = self.common(slot, ids, adapter)
        if capacity > self.cache.capacity:
            assert self.slots == 1, (
                f"{capacity} tokens do not fit into a slot of {self.cache.capacity}"
            )
            larger_capacity = max(capacity, min(2 * capacity, self.decoder.config.max_positions))
            common = 0
            self.cache = Cache(self.decoder.config, larger_capacity)
        elif not self.cache.cut(common, slot):
            common = 0
            self.cache.cut(0, slot)
        self.ids[slot] = list(ids[:common])
        self.adapters[slot] = adapter
        return list(ids[common:])

    def read(
        self, tokens: Sequence[Sequence[int]], first: int = 0, *, every: bool = False
    ) -> Tensor:
        """Appends tokens to the slots from `first` on, and returns logits, float32 on the CPU.

        They are [slots, V], after the last token of each slot, or with `every` [N, V], after each token, of as many as
        `max_guesses` allows. An interruption leaves nothing of the slots' past.
        """
        # Compiled code takes few tokens of any slots; a forward of PyTorch takes equally many of
        # each, and some models one slot at a time.
        rows = range(first, first + len(tokens))
        step = self.decoder.step
        if step is not None and step.takes(tokens, first, self.cache):
            logits = step(tokens, first, self.cache, every=every)
            for row, new_ids in zip(rows, tokens, strict=True):
                self.ids[row].extend(new_ids)
            return logits
        if len(rows) > 1 and not in_one_forward(self.decoder.config):
            return torch.cat([self.read([ids], row) for row, ids in zip(rows, tokens, strict=True)])

        # While the forward runs, the slots have no valid tokens.
        old_ids = [self.ids[row] for row in rows]
        self.cache.rows = rows
        for row in rows:
            self.ids[row] = []
        if self.choose is not None:
            self.choose([self.adapters[row] for row in rows])
        device = next(self.decoder.parameters()).device
        head = ALL_LOGITS if every else LAST
        try:
            with torch.no_grad():
                output: Output = self.decoder(
                    torch.tensor(tokens, device=device), head=head, cache=self.cache
                )
        except BaseException:  # Ctrl+C too: half a forward would stay in the cache
            for row in rows:
                self.cache.clear(row)
            raise
        for row, ids, new_ids in zip(rows, old_ids, tokens, strict=True):
            ids.extend(new_ids)
            self.ids[row] = ids
        return output.head.flatten(0, -2).float().cpu()

    def max_guesses(self, slots: int) -> int:
        """How many guessed tokens of each of the first slots one forward can check, and drop again.

        A token that a window's ring has lost to a guess would not come back: all of them must fit.
        """
        if not in_one_forward(self.decoder.config) or (self.decoder.step is None and slots > 1):
            return 0
        length = max(self.cache.lengths[:slots])
        capacity = min(layer.capacity for layer in self.cache.layers)
        return max(0, min(FEW // slots, capacity - length) - 1)

    def drop(self, slot: int, count: int) -> None:
        """Forgets the last tokens of a slot, guesses that `max_guesses` allowed."""
        length = len(self.ids[slot]) - count
        self.cache.cut(length, slot)
        del self.ids[slot][length:]

    def forget(self, slot: int) -> None:
        """Clears a slot: numbers of a text that were not finite must not reach another text."""
        self.ids[slot] = []
        self.cache.clear(slot)

    def swap(self, slot: int, other_slot: int) -> None:
        """Exchanges the contents of two slots."""
        if slot == other_slot:
            return
        self.cache.swap(slot, other_slot)
        ids = self.ids
        ids[slot], ids[other_slot] = ids[other_slot], ids[slot]
        adapters = self.adapters
        adapters[slot], adapters[other_slot] = adapters[other_slot], adapters[slot]


class Constraint(Protocol):
    """A grammar of new tokens, such as JSON of a schema."""

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [V] in which tokens that the grammar forbids are impossible."""

    def take(self, token: int) -> None:
        """Must be called with each new token."""


@final
@dataclass(eq=False)
class Text:
    """A text that is being decoded. `new`: its new tokens; `unread`: tokens that the cache lacks.

    `max_new_tokens`: those of the sampling settings, or fewer where the cache or the model's positions end.
    """

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    unread: list[int]
    adapter: Adapter
    logprobs: int | None
    random: torch.Generator
    constraint: Constraint | None = None
    new: list[int] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Drawn:
    """A token of a text, or its end, or both.

    `ended`: why the text ended after the token, or instead of it (`token` is then None); an error where its logits are
    not finite (NotFinite), or its grammar gave up.
    `logprob`: of the token before temperature and filters, with those of the `top` likeliest; None unless asked for.
    """

    text: Text
    token: int | None
    ended: Literal["stop", "length"] | UserError | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@final
@dataclass
class Speculation:
    """Guesses of next tokens. `guess` gets a text and a limit, and returns at most so many tokens.

    Each token is sampled as without guesses, from the same random numbers: the text is the same, whatever is guessed.
    """

    guess: Callable[[Text, int], list[int]]
    guessed: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return f"{self.accepted / max(self.guessed, 1):.0%} of {counted(self.guessed, 'guessed tokens')} accepted"


@final
class RunningBatch:
    """Texts that are decoded together: `texts[i]` is in slot i of `past`. The decoder is in evaluation mode.

    Random streams are the texts' own and live on the CPU, so that the same logits give the same text on every device.
    `piece`: tokens of a prompt that one step reads at most. `agree`: of several ranks, returns the first one's token.
    """

    def __init__(
        self,
        past: Past,
        *,
        piece: int | None = None,
        agree: Callable[[float], float] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.past = past
        self.agree = agree
        self.speculation = speculation
        # Where rotations depend on the length, the result for a token depends on the piece in which it is read.
        self.exact = in_one_forward(past.decoder.config)
        self.piece = piece if self.exact else None
        self.texts: list[Text] = []

    @property
    def full(self) -> bool:
        return len(self.texts) == self.past.slots

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        adapter: Adapter = None,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
    ) -> Text:
        """Begins a text in the free slot that holds most of its prompt. `logprobs`: how many of the likeliest, too."""
        assert prompt, "a decoder needs at least one token to start from"
        assert not self.full
        past = self.past
        slot = len(self.texts)

        # A single slot grows with its text; several share what the cache has.
        max_tokens = past.decoder.config.max_positions
        if past.slots > 1:
            max_tokens = min(max_tokens, past.cache.capacity)
        max_new_tokens = max(0, min(sampling.max_new_tokens, max_tokens - len(prompt)))

        # Running texts hold the first slots: the best of the free ones is swapped to the place
        # behind them.
        if self.exact:
            best_slot = max(
                range(slot, past.slots),
                key=lambda free_slot: past.common(free_slot, prompt, adapter),
            )
            past.swap(slot, best_slot)
        elif past.slots > 1:
            past.ids[slot] = []
        text = Text(
            prompt=list(prompt),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            unread=past.reuse(prompt, len(prompt) + max_new_tokens, slot, adapter),
            adapter=adapter,
            logprobs=logprobs,
            random=torch.Generator().manual_seed(sampling.seed),
            constraint=constraint,
        )
        self.texts.append(text)
        return text

    def remove(self, text: Text) -> None:
        """Ends a text; its slot is free, and keeps the tokens for a text that begins alike."""
        slot = self.texts.index(text)
        last_text = self.texts.pop()
        self.past.swap(slot, len(self.texts))
        if last_text is not text:
            self.texts[slot] = last_text

    def step(self) -> list[Drawn]:
        """New tokens, and ends of texts; these are removed. Texts whose prompt is not read yet have none."""
        # A text that may have no new token ends before anything is computed for it.
        drawn = []
        for text in [text for text in self.texts if text.max_new_tokens == 0]:
            self.remove(text)
            drawn.append(Drawn(text, None, "length"))
        waiting = next((text for text in self.texts if not text.new), None)

        # Short prompts are read together with the tokens of the running texts, in one forward.
        if waiting is not None and (slot_tokens := self._short_prompts()):
            texts = [text for text, ids in zip(self.texts, slot_tokens, strict=True) if ids]
            logits = self.past.read(slot_tokens)
            return drawn + self._draw(texts, [[]] * len(texts), logits)

        # A long prompt is read a piece at each step, so that the running texts do not wait for all
        # of it.
        if waiting is not None:
            slot = self.texts.index(waiting)
            piece_tokens = waiting.unread[: self.piece]
            waiting.unread = waiting.unread[len(piece_tokens) :]
            logits = self.past.read([piece_tokens], slot)
            if not waiting.unread:
                drawn += self._draw([waiting], [[]], logits)

        # Running texts, which have one unread token, are moved to the first slots, so that they are
        # the rows of one forward.
        running_texts = [text for text in self.texts if text.new and text is not waiting]
        for slot, text in enumerate(running_texts):
            old_slot = self.texts.index(text)
            self.past.swap(slot, old_slot)
            self.texts[slot], self.texts[old_slot] = self.texts[old_slot], self.texts[slot]
        if running_texts:
            guesses = [self._guess(text, len(running_texts)) for text in running_texts]
            tokens = [
                [*text.unread, *guess] for text, guess in zip(running_texts, guesses, strict=True)
            ]
            logits = self.past.read(tokens, every=any(guesses))
            drawn += self._draw(running_texts, guesses, logits)
        return drawn

    def _short_prompts(self) -> list[list[int]]:
        """The tokens of each slot for a step that reads short prompts with the other texts; none where it cannot."""
        # Every running text has its token; prompts share the other tokens of a compiled step.
        step = self.past.decoder.step
        num_free = FEW - sum(bool(text.new) for text in self.texts)
        num_prompts = 0
        slot_tokens = list[list[int]]()
        for text in self.texts:
            if text.new:
                slot_tokens.append(text.unread)
            elif len(text.unread) <= num_free:
                slot_tokens.append(text.unread)
                num_free -= len(text.unread)
                num_prompts += bool(text.unread)
            else:
                slot_tokens.append([])
        if step is None or num_prompts == 0 or not step.takes(slot_tokens, 0, self.past.cache):
            return []
        return slot_tokens

    def _guess(self, text: Text, num_texts: int) -> list[int]:
        """The text's next tokens as speculation guesses them, where one forward can check any."""
        if self.speculation is None:
            return []
        # The forward draws one token more than it checks.
        num_missing = text.max_new_tokens - len(text.new)
        limit = min(self.past.max_guesses(num_texts), num_missing - 1)
        return self.speculation.guess(text, limit) if limit > 0 else []

    def _draw(
        self, texts: Sequence[Text], guesses: Sequence[Sequence[int]], logits: Tensor
    ) -> list[Drawn]:
        """One token of each text, and one more after each guess that is right. `logits`: after each token in turn."""
        drawn = list[Drawn]()
        row = 0
        for text, guess in zip(texts, guesses, strict=True):
            # The logits after a guess hold only while every guess before it was drawn.
            num_right = 0
            while True:
                drawn_token = self._next(text, logits[row + num_right])
                drawn.append(drawn_token)
                if drawn_token.ended is not None or num_right == len(guess):
                    break
                if drawn_token.token != guess[num_right]:
                    break
                num_right += 1
            row += len(guess) + 1
            if self.speculation is not None and guess:
                self.speculation.guessed += len(guess)
                self.speculation.accepted += num_right
                self.past.drop(self.texts.index(text), len(guess) - num_right)

        # Texts are removed last: removing one moves another to its slot.
        for drawn_token in drawn:
            if drawn_token.ended is not None:
                if isinstance(drawn_token.ended, UserError):
                    self.past.forget(self.texts.index(drawn_token.text))
                self.remove(drawn_token.text)
        return drawn

    def _next(self, text: Text, logits: Tensor) -> Drawn:
        """Draws a text's next token from logits [V], and appends it unless it ends the text."""
        if not bool(logits.isfinite().all()):
            return Drawn(text, None, NotFinite())
        try:
            allowed = logits if text.constraint is None else text.constraint.masked(logits)
        except UserError as error:  # of this text alone
            return Drawn(text, None, error)
        token = draw(allowed, text.prompt, text.new, text.sampling, text.random)
        token = token if self.agree is None else int(self.agree(token))
        if token in text.sampling.stop_ids:
            return Drawn(text, None, "stop")
        if text.constraint is not None:
            text.constraint.take(token)
        text.new.append(token)
        text.unread = [token]

        # Log-probabilities are the model's own, before the grammar and the sampling settings.
        logprob = None
        top = tuple[tuple[int, float], ...]()
        if text.logprobs is not None:
            logprobs = logits.log_softmax(-1)
            logprob = float(logprobs[token])
            likeliest = logprobs.topk(min(text.logprobs, len(logprobs)))
            top = tuple(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        is_full = len(text.new) == text.max_new_tokens
        return Drawn(text, token, "length" if is_full else None, logprob, top)


def sample_tokens(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    past: Past | None = None,
    *,
    agree: Callable[[float], float] | None = None,
    speculation: Speculation | None = None,
    constraint: Constraint | None = None,
) -> Iterator[int]:
    """Yields new tokens after `prompt_ids`, until a stop token, `max_new_tokens`, or the end of the positions.

    With a `past`, only tokens that are not in its cache are computed; the cache then holds all of them.
    """
    batch = RunningBatch(past or Past(decoder), agree=agree, speculation=speculation)
    batch.add(prompt_ids, sampling, constraint=constraint)
    while batch.texts:
        for drawn in batch.step():
            if drawn.token is not None:
                yield drawn.token
            if isinstance(drawn.ended, UserError):
                raise drawn.ended


NGRAMS = (3, 2)  # tokens at the end of a text that are searched in it, the longer first


@final
class PromptLookup:
    """Guesses the tokens that followed the last ones where these occurred before.

    transformers calls it `prompt_lookup_num_tokens`.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, text: Text, limit: int) -> list[int]:
        """At most `limit` tokens; none where the end of the text did not occur before."""
        # The search of bytes is quick; a match that begins within a number is none.
        ids = array("q", [*text.prompt, *text.new])
        text_bytes = ids.tobytes()
        for size in NGRAMS:
            ngram_bytes = ids[-size:].tobytes()
            offset = 1
            end = len(text_bytes) - ids.itemsize
            while offset > 0 and offset % ids.itemsize:
                offset = text_bytes.rfind(ngram_bytes, 0, end)
                end = offset + len(ngram_bytes) - 1
            if offset >= 0 and len(ids) > size:
                first = offset // ids.itemsize + size
                return ids[first : first + min(limit, self.tokens)].tolist()
        return []


@final
class DraftModel:
    """Guesses with a smaller model of the same vocabulary, sampled with the text's own random numbers.

    The same random numbers with nearly the same probabilities mostly give the same token, at any temperature.
    """

    def __init__(self, decoder: Decoder, target: Decoder, tokens: int = 4) -> None:
        """Raises UserError where the vocabularies differ."""
        target_size = target.config.vocab_size
        draft_size = decoder.config.vocab_size
        if draft_size != target_size:
            raise UserError(
                f"the draft model has {draft_size:,} tokens in its vocabulary, the model {target_size:,}",
                where="--draft",
                fix="take a smaller model of the same family",
                code=2,
            )
        self.decoder = decoder
        self.tokens = tokens
        self._pasts = WeakKeyDictionary[Text, Past]()

    def __call__(self, text: Text, limit: int) -> list[int]:
        """At most `limit` tokens; none where the draft model's positions end before the text does."""
        past = self._pasts.get(text)
        if past is None:
            past = Past(self.decoder)
            self._pasts[text] = past
        max_positions = self.decoder.config.max_positions
        capacity = len(text.prompt) + text.max_new_tokens + 1
        num_free_positions = max_positions - len(text.prompt) - len(text.new) - 1
        num_guesses = min(limit, self.tokens, num_free_positions)
        if num_guesses < 1 or capacity > max_positions:
            return []

        # A copy of the text's random stream: drawing the text itself must not notice the guesses.
        unread = past.reuse([*text.prompt, *text.new], capacity)
        new = list(text.new)
        random = torch.Generator()
        random.set_state(text.random.get_state())
        for _ in range(num_guesses):
            [logits] = past.read([unread])
            if not bool(logits.isfinite().all()):
                break
            token = draw(logits, text.prompt, new, text.sampling, random)
            new.append(token)
            if token in text.sampling.stop_ids:
                break
            unread = [token]
        return new[len(text.new) :]
