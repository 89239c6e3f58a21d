"""Decoding: several texts at once, each in a slot of one KV cache. Chat, generate, serve, rollouts all come here.

A step reads a piece of one prompt, then gives every running text one token, in one forward for all of them. A single
text is a batch of one; the completions of one prompt begin with keys and values that were read once.

A batch samples in one of two ways. Both stay, because the bits of both are promised (docs/decisions/infer.md):

|                | each text (`sample_rows` is None)              | rows (`sample_rows` is given)                      |
|----------------|------------------------------------------------|----------------------------------------------------|
| used by        | chat, generate, serve, tasks of evaluation     | rollouts (`infer/completions.py`)                  |
| samples        | `sample_token`, a text at a time on the CPU    | `sample_each_row`, all texts on the logits' device |
| random numbers | a stream of each text, from its seed           | keyed by prompt, completion and position           |
| stop id        | not in `new`; its update has no token          | the last of `new`, and the token of its update     |
| temperature    | 0 is greedy                                    | above 0                                            |
| penalties      | all, and biases                                | none: `sample_each_row` asserts it                 |
| constraint     | a grammar of each text                         | none                                               |
| logprobs       | of the model's logits, where a text asks       | after temperature and filters, of every token      |
| `agree`        | the token of the first rank                    | none: ranks sample texts of their own              |
| guesses        | `speculation`                                  | none                                               |
| prompts        | `add`: read in the slot of the text            | `add_read`: read once for all of its completions   |
| not finite     | ends the text                                  | raised: it ends all                                |

Legend: N texts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.infer.past import Adapter, Past, is_length_independent
from bloomery.infer.sampling import NotFinite, Sampling, sample_token
from bloomery.model.cache import STEP_TOKENS, Cache
from bloomery.model.decoder import Decoder


class Constraint(Protocol):
    """A grammar of new tokens, such as JSON of a schema."""

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [V] in which tokens that the grammar forbids are impossible."""

    def take(self, token: int) -> None:
        """Must be called with each new token."""


@final
@dataclass(eq=False)
class RunningText:
    """A text that is being decoded. `new`: its new tokens; `unread`: tokens that the cache lacks.

    `max_new_tokens`: those of the sampling settings, or fewer where the cache or the model's positions end.
    `logprobs`: how many of the likeliest tokens are reported, too. `random`: the text's own stream.
    """

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    unread: list[int]
    adapter: Adapter = None
    logprobs: int | None = None
    random: torch.Generator = field(default_factory=torch.Generator)
    constraint: Constraint | None = None
    # Without the stop id that ended it; of rows of completions, with it.
    new: list[int] = field(default_factory=list)
    stop_id: int | None = None  # the one that ended it, once it has
    is_removed: bool = False  # by `remove`: no update of it is handed out any more


@final
@dataclass(frozen=True)
class TextUpdate:
    """A token of a text, or its end, or both.

    `ended`: why the text ended after the token, or instead of it (`token` is then None). At "stop" the token is None,
    or in rows of completions the stop id; at "length" it is the last one, or None where no token was allowed; an error
    comes where the logits of the text are not finite (NotFinite), or its grammar gave up.
    `logprob`: of the token before temperature and filters, with those of the `top` likeliest; None unless asked for.
    """

    text: RunningText
    token: int | None
    ended: Literal["stop", "length"] | UserError | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


# The next tokens of all texts from their logits [N, V], on any device. It appends them to the texts.
SampleRows = Callable[[Sequence[RunningText], Tensor], list[TextUpdate]]


@final
@dataclass
class Speculation:
    """Guesses of next tokens. `guess` gets a text and a limit, and returns at most so many tokens.

    Each token is sampled as without guesses, from the same random numbers: the text is the same, whatever is guessed.
    """

    guess: Callable[[RunningText, int], list[int]]
    guessed: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return f"{self.accepted / max(self.guessed, 1):.0%} of {counted(self.guessed, 'guessed tokens')} accepted"


@final
class RunningBatch:
    """Texts that are decoded together: `texts[i]` is in slot i of `past`. The decoder is in evaluation mode.

    Random streams are the texts' own and live on the CPU, so that the same logits give the same text on every device;
    with `sample_rows`, one call samples the tokens of all texts instead, on the decoder's device.
    `piece`: tokens of a prompt that one step reads at most. `agree`: of several ranks, returns the first one's token.
    """

    def __init__(
        self,
        past: Past,
        *,
        piece: int | None = None,
        agree: Callable[[float], float] | None = None,
        speculation: Speculation | None = None,
        sample_rows: SampleRows | None = None,
    ) -> None:
        assert sample_rows is None or (speculation is None and agree is None), (
            "rows of completions are sampled without guesses, by each rank for itself"
        )
        self.past = past
        self.sample_rows = sample_rows
        self.agree = agree
        self.speculation = speculation
        # Where rotations depend on the length, the result for a token depends on the piece in which it is read.
        self.is_length_independent = is_length_independent(past.decoder.config)
        self.piece = piece if self.is_length_independent else None
        self.texts: list[RunningText] = []

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
    ) -> RunningText:
        """Begins a text in the free slot that holds most of its prompt. `logprobs`: how many of the likeliest, too."""
        assert prompt, "a decoder needs at least one token to start from"
        assert not self.full
        self._refuse_extras_of_rows(constraint, logprobs)
        past = self.past
        slot = len(self.texts)

        # A single slot grows with its text; several share what the cache has.
        max_tokens = past.decoder.config.max_positions
        if past.slots > 1:
            max_tokens = min(max_tokens, past.cache.capacity)
        max_new_tokens = max(0, min(sampling.max_new_tokens, max_tokens - len(prompt)))

        # Running texts hold the first slots: the best of the free ones is swapped to the place
        # behind them.
        if self.is_length_independent:
            best_slot = max(
                range(slot, past.slots),
                key=lambda free_slot: past.num_shared(free_slot, prompt, adapter),
            )
            past.swap(slot, best_slot)
        elif past.slots > 1:
            past.ids[slot] = []
        text = RunningText(
            prompt=prompt if isinstance(prompt, list) else list(prompt),
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

    def add_read(
        self,
        texts: Sequence[RunningText],
        logits: Tensor,
        cache: Cache,
        source_slots: Sequence[int],
    ) -> list[TextUpdate]:
        """Begins texts whose prompts were read once for several of them, with their first tokens.

        Their prompts are in the slots `source_slots` of `cache`; `logits` [N, V] are those after them. A text that ends
        here takes no slot.
        """
        assert self.sample_rows is not None and len(texts) <= self.past.slots - len(self.texts)
        for text in texts:
            self._refuse_extras_of_rows(text.constraint, text.logprobs)
        updates = self.sample_rows(texts, logits)
        running_texts = [update.text for update in updates if update.ended is None]
        running_slots = [
            slot for update, slot in zip(updates, source_slots, strict=True) if update.ended is None
        ]
        prompts = [text.prompt for text in running_texts]
        self.past.copy_prompts(prompts, cache, running_slots, first=len(self.texts))
        self.texts += running_texts
        return updates

    def go_on(self, texts: Sequence[RunningText], logits: Tensor) -> list[TextUpdate]:
        """Begins texts whose prompts are in the first slots already, with their first tokens after `logits` [N, V]."""
        assert self.sample_rows is not None and not self.texts
        for text in texts:
            self._refuse_extras_of_rows(text.constraint, text.logprobs)
        self.texts = list(texts)
        return self._sample(texts, [[]] * len(texts), logits)

    def _refuse_extras_of_rows(self, constraint: Constraint | None, logprobs: int | None) -> None:
        assert self.sample_rows is None or (constraint is None and logprobs is None), (
            "rows of completions have no grammar, and always report the log-probability of their token"
        )

    def remove(self, text: RunningText) -> None:
        """Ends a text; it has no more updates, not even those that its last step has made with guesses.

        A text that has ended may be removed, too.
        """
        text.is_removed = True
        if text in self.texts:
            self._free(text)

    def _free(self, text: RunningText) -> None:
        """The slot of the text is free, and keeps the tokens for a text that begins alike."""
        slot = self.texts.index(text)
        last_text = self.texts.pop()
        self.past.swap(slot, len(self.texts))
        if last_text is not text:
            self.texts[slot] = last_text

    def step(self) -> Iterator[TextUpdate]:
        """New tokens, and ends of texts, whose slots are free. Texts whose prompt is not read yet have none.

        All is computed at the call. A text with guesses has several updates: those after its `remove` are left out.
        """
        updates = self._step()
        return (update for update in updates if not update.text.is_removed)

    def _step(self) -> list[TextUpdate]:
        # A text that may have no new token ends before anything is computed for it.
        updates = []
        for text in [text for text in self.texts if text.max_new_tokens == 0]:
            self._free(text)
            updates.append(TextUpdate(text, None, "length"))
        waiting = next((text for text in self.texts if not text.new), None)

        # Short prompts are read together with the tokens of the running texts, in one forward.
        if waiting is not None and (slot_tokens := self._short_prompts()):
            texts = [text for text, ids in zip(self.texts, slot_tokens, strict=True) if ids]
            logits = self.past.read(slot_tokens)
            return updates + self._sample(texts, [[]] * len(texts), logits)

        # A long prompt is read a piece at each step, so that the running texts do not wait for all
        # of it.
        if waiting is not None:
            slot = self.texts.index(waiting)
            count = len(waiting.unread) if self.piece is None else self.piece
            piece_tokens = waiting.unread[: self.past.whole_piece(slot, count)]
            waiting.unread = waiting.unread[len(piece_tokens) :]
            logits = self.past.read([piece_tokens], slot)
            if not waiting.unread:
                updates += self._sample([waiting], [[]], logits)

        # Running texts, which have one unread token, are moved to the first slots, so that they are
        # the rows of one forward.
        running_texts = [text for text in self.texts if text.new and text is not waiting]
        if len(running_texts) < len(self.texts):
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
            updates += self._sample(running_texts, guesses, logits)
        return updates

    def _short_prompts(self) -> list[list[int]]:
        """The tokens of each slot for a step that reads short prompts with the other texts; none where it cannot."""
        # Every running text has its token; prompts share the other tokens of a compiled step.
        num_free = STEP_TOKENS - sum(bool(text.new) for text in self.texts)
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
        if num_prompts == 0 or not self.past.can_step(slot_tokens, 0):
            return []
        return slot_tokens

    def _guess(self, text: RunningText, num_texts: int) -> list[int]:
        """The text's next tokens as speculation guesses them, where one forward can check any."""
        if self.speculation is None:
            return []
        # The forward gives one token more than it checks.
        num_missing = text.max_new_tokens - len(text.new)
        limit = min(self.past.max_guesses(num_texts), num_missing - 1)
        return self.speculation.guess(text, limit) if limit > 0 else []

    def _sample(
        self, texts: Sequence[RunningText], guesses: Sequence[Sequence[int]], logits: Tensor
    ) -> list[TextUpdate]:
        """One token of each text, and one more after each guess that is right. `logits`: after each token in turn."""
        if self.sample_rows is not None:
            updates = self.sample_rows(texts, logits)
        else:
            updates = self._sample_each(texts, guesses, logits.cpu())

        # Texts that have ended leave, the one in the lowest slot first: the last text moves into its slot.
        ends = {update.text: update.ended for update in updates if update.ended is not None}
        slot = 0
        while ends and slot < len(self.texts):
            text = self.texts[slot]
            if text not in ends:
                slot += 1
                continue
            if isinstance(ends.pop(text), UserError):
                self.past.forget(slot)
            self._free(text)
        return updates

    def _sample_each(
        self, texts: Sequence[RunningText], guesses: Sequence[Sequence[int]], logits: Tensor
    ) -> list[TextUpdate]:
        """Each text samples by itself, from its own random numbers."""
        updates = list[TextUpdate]()
        row = 0
        for text, guess in zip(texts, guesses, strict=True):
            # The logits after a guess hold only while every guess before it was sampled.
            num_right = 0
            while True:
                update = self._next(text, logits[row + num_right])
                updates.append(update)
                if update.ended is not None or num_right == len(guess):
                    break
                if update.token != guess[num_right]:
                    break
                num_right += 1
            row += len(guess) + 1
            if self.speculation is not None and guess:
                self.speculation.guessed += len(guess)
                self.speculation.accepted += num_right
                self.past.drop(self.texts.index(text), len(guess) - num_right)
        return updates

    def _next(self, text: RunningText, logits: Tensor) -> TextUpdate:
        """Samples a text's next token from logits [V], and appends it unless it ends the text."""
        if not bool(logits.isfinite().all()):
            return TextUpdate(text, None, NotFinite())
        try:
            allowed = logits if text.constraint is None else text.constraint.masked(logits)
        except UserError as error:  # of this text alone
            return TextUpdate(text, None, error)
        token = sample_token(allowed, text.prompt, text.new, text.sampling, text.random)
        token = token if self.agree is None else int(self.agree(token))
        if token in text.sampling.stop_ids:
            text.stop_id = token
            return TextUpdate(text, None, "stop")
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
        return TextUpdate(text, token, "length" if is_full else None, logprob, top)


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
        for update in batch.step():
            if update.token is not None:
                yield update.token
            if isinstance(update.ended, UserError):
                raise update.ended
