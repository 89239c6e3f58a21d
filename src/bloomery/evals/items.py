"""Task files: multiple choice and exact match, asked and scored."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.text import closest
from bloomery.core.units import counted
from bloomery.data.chat.channels import Channels, channels_of
from bloomery.data.chat.render import chat_format
from bloomery.data.chat.thoughts import (
    ThoughtFormat,
    answer_marks,
    is_thinking,
    thought_format,
    without_thought,
)
from bloomery.data.examples import BadRow, Message, Role
from bloomery.data.sources.files import DATA, TABLES, suffix_of
from bloomery.data.sources.readers import read_values
from bloomery.data.tokenizer.templates import find_template, own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, refuse_unknown_ids
from bloomery.evals.statistics import CorpusScores, Scores, shares
from bloomery.infer.forward import eval_mode
from bloomery.infer.generate import TextRequest, complete_requests
from bloomery.infer.sampling import NotFinite, Sampling
from bloomery.model.decoder import Decoder
from bloomery.train.evaluation.scoring import score_continuations

Kind = Literal["multiple-choice", "exact-match"]
SLOTS = 8  # texts that are decoded at once
_STOPS = ("\n\n", "\nQuestion:")  # of a text that continues after the answer
_FIX = 'write {"question": "...", "choices": ["...", "..."], "answer": 0} or {"question": "...", "answer": "..."}'


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How a task is asked. `shots`: first items that are shown with their answer and not scored. `limit`: items scored.
    `extract`: a regular expression; its last match in a completion is the answer.
    """

    shots: int = 0
    limit: int | None = None
    bos: bool = True
    chat: bool = False
    template: str | None = None
    extract: str | None = None
    max_new_tokens: int | None = None  # 256, and at most half of the context
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    seed: int = 0

    def most(self, decoder: Decoder) -> int:
        """New tokens of a completion."""
        return self.max_new_tokens or min(256, decoder.config.max_positions // 2)


@dataclass(frozen=True)
class Item:
    """One row of a task. `prompt`: the text before the answer. `question`: the same without "Question:", for a chat.

    `answers`: accepted ones; of multiple choice the right one, which is choice number `right`.
    """

    name: str
    prompt: str
    question: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    right: int = 0


@dataclass(frozen=True)
class Task:
    name: str
    kind: Kind
    items: tuple[Item, ...]


@dataclass(frozen=True)
class TaskScores:
    """`scores`: of the same items; the first metric is the headline. `outputs`: one JSON object per item."""

    scores: tuple[Scores | CorpusScores, ...]
    outputs: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_task(path: Path) -> Task:
    """The task in a JSONL, Parquet, Arrow, JSON or CSV file. Raises UserError for a row that is not like the first."""
    format = (DATA | TABLES).get(suffix_of(path))
    if format is None or not path.is_file():
        problem = (
            "a task is a JSONL, Parquet, Arrow, JSON or CSV file"
            if path.exists()
            else "no such file"
        )
        raise UserError(f"{problem}: {path.name}", where=str(path), fix=_FIX, code=2)
    items: list[Item] = []
    kind: Kind | None = None
    for value in read_values(path, path.name, format):
        if isinstance(value, BadRow):
            raise UserError(value.problem, where=value.where, fix=value.fix)
        row = value.content
        if not isinstance(row, dict):
            raise UserError("a row of a task is an object", where=value.where, fix=_FIX)
        kind = kind or _kind_of(row, value.where)
        items.append(
            _item(row, kind, value.where, str(row.get("id", row.get("task_id", len(items) + 1))))
        )
    if kind is None:
        raise UserError("the task has no item", where=str(path), fix=_FIX)
    return Task(path.stem, kind, tuple(items))


def _kind_of(row: dict[str, Any], where: str) -> Kind:
    if {"prompt", "entry_point", "test"} <= row.keys():
        problem = "a task of programs with tests, as in HumanEval, is not scored here"
        fix = "use the tasks humaneval or mbpp of lm-evaluation-harness, or the reward unit_tests"
        raise UserError(problem, where=where, fix=fix, code=2)
    if "answer" not in row:
        similar = closest("answer", list(row), count=1, cutoff=0.5)
        hint = f"; is it {similar[0]!r}?" if similar else ""
        raise UserError(f"a row of a task has the key 'answer'{hint}", where=where, fix=_FIX)
    return "multiple-choice" if "choices" in row else "exact-match"


def _item(row: dict[str, Any], kind: Kind, where: str, name: str) -> Item:
    def text(key: str) -> str:
        if not isinstance(row.get(key), str):
            raise UserError(
                f"the key {key!r} is a text in each row of this task", where=where, fix=_FIX
            )
        return str(row[key])

    question = text("prompt") if "prompt" in row else text("question")
    prompt = question if "prompt" in row else f"Question: {question}\nAnswer:"
    answer = row.get("answer")
    choices = row.get("choices")
    if kind == "exact-match":
        answers = answer if isinstance(answer, list) else [answer]
        if not answers or any(
            isinstance(entry, bool) or not isinstance(entry, str | int | float) for entry in answers
        ):
            raise UserError(
                "an answer is a text, a number or a list of them", where=where, fix=_FIX
            )
        return Item(name, prompt, question, tuple(str(entry) for entry in answers))
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(entry, str) and entry for entry in choices)
    ):
        raise UserError("choices are a list of at least two texts", where=where, fix=_FIX)
    choice = answer
    if isinstance(answer, str):
        letters = [chr(ord("A") + number) for number in range(len(choices))]
        choice = next(
            (names.index(answer) for names in (choices, letters) if answer in names), None
        )
    if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < len(choices):
        problem = f"the answer is the number of a choice from 0, its letter from A, or its text: {answer!r}"
        raise UserError(problem, where=where, fix=_FIX)
    return Item(name, prompt, question, (choices[choice],), tuple(choices), choice)


@final
class Asker:
    """Token ids of prompts with their examples, and of continuations. `stops` end a completion."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: TaskSettings,
        shots: Sequence[Item],
        encode: Callable[[Sequence[Message]], list[int]] | None,
        stops: tuple[str, ...],
        stop_ids: tuple[int, ...],
        thoughts: ThoughtFormat | Channels | None = None,
        around: Sequence[str] = (),
    ) -> None:
        """`thoughts`: how the chat template marks them; `around`: what it writes around an answer."""
        self.thoughts = thoughts
        self.around = around
        self.is_thinking = False
        self.tokenizer = tokenizer
        self.settings = settings
        self.shots = shots
        self._encode = encode
        self.stops = stops
        self.stop_ids = stop_ids

    def pair(self, item: Item, answer: str) -> tuple[list[int], list[int]]:
        """The prompt, and the answer as its continuation, both with at least one token. Raises UserError."""
        if self._encode is not None:
            context = self.prompt(item)
            continuation = self.tokenizer.encode(answer)
        else:
            text = self._text(item)
            context, continuation = encode_pair(
                self.tokenizer, text, _spaced(text, answer), bos=self.settings.bos
            )
        if not context or not continuation:
            problem = f"the {'answer' if context else 'prompt'} has no token of its own"
            raise UserError(
                problem, where=f"item {item.name}", fix="lengthen it, or remove the item"
            )
        return context, continuation

    def prompt(self, item: Item) -> list[int]:
        if self._encode is None:
            prefix = self.tokenizer.prefix if self.settings.bos else []
            return prefix + self.tokenizer.encode(self._text(item))
        turns = [
            turn
            for shot in self.shots
            for turn in (_turn("user", shot.question), _turn("assistant", shot.answers[0]))
        ]
        return self._encode([*turns, _turn("user", item.question)])

    def _text(self, item: Item) -> str:
        examples = [shot.prompt + _spaced(shot.prompt, shot.answers[0]) for shot in self.shots]
        return "\n\n".join([*examples, item.prompt])


def _turn(role: Role, text: str) -> Message:
    return Message(role, text)


def _spaced(prompt: str, answer: str) -> str:
    """The answer after a space, unless one of them has white space there."""
    return answer if prompt[-1:].isspace() or not prompt or answer[:1].isspace() else f" {answer}"


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, *, bos: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids as lm-evaluation-harness makes them: of the whole text, cut behind the context without its last spaces.

    An empty context becomes the BOS or EOS token; without either, it has no token.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    prefix = tokenizer.prefix if bos else []
    if not stripped:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        return ([] if start is None else [start]), tokenizer.encode(continuation)
    context_ids = tokenizer.encode(stripped)
    return prefix + context_ids, tokenizer.encode(stripped + continuation)[len(context_ids) :]


@contextmanager
def asking(
    tokenizer: Tokenizer, settings: TaskSettings, shots: Sequence[Item] = ()
) -> Iterator[Asker]:
    """Raises UserError for a chat with a model without a chat template."""
    if not settings.chat:
        yield Asker(tokenizer, settings, shots, None, settings.stop or _STOPS, ())
        return
    if settings.template is None and not own_templates(tokenizer.config):
        fix = "remove --chat, or add --template chatml"
        raise UserError("this model has no chat template", where="--chat", fix=fix, code=2)
    template = find_template(settings.template, tokenizer.config).text
    thoughts = channels_of(template) or thought_format(template)
    with chat_format(tokenizer, settings.template) as form:
        asker = Asker(
            tokenizer,
            settings,
            shots,
            form.encode,
            (*settings.stop, *form.stop_strings),
            form.stop_ids,
            thoughts,
            answer_marks(template),
        )
        if thoughts is not None:
            # Does the template begin the thought of every answer?
            prompt = form.encode([Message("user", "a")])
            asker.is_thinking = is_thinking(tokenizer.decode(prompt), thoughts)
        yield asker


def ask(decoder: Decoder, tokenizer: Tokenizer, task: Task, settings: TaskSettings) -> TaskScores:
    """The scores of multiple choice or exact match. Raises UserError."""
    shots = task.items[: settings.shots]
    items = task.items[settings.shots :][: settings.limit]
    if not items:
        problem = f"no item is left to score: {counted(len(task.items), 'items')}, {settings.shots} shown as examples"
        raise UserError(problem, where=task.name, fix="use fewer --shots", code=2)
    with asking(tokenizer, settings, shots) as asker:
        if task.kind == "multiple-choice":
            return _choose(decoder, asker, items)
        return _match(decoder, asker, items)


def _choose(decoder: Decoder, asker: Asker, items: Sequence[Item]) -> TaskScores:
    """`acc`: the likeliest choice is right; `acc_norm`: by log-likelihood per character, as lm-evaluation-harness."""
    pairs = [asker.pair(item, choice) for item in items for choice in item.choices]
    _refuse_ids(decoder, pairs)
    likelihoods = iter(score_continuations(decoder, pairs))
    outputs = []
    for item in items:
        sums = [next(likelihoods).logprob for _ in item.choices]
        normed = [nats / len(choice) for nats, choice in zip(sums, item.choices, strict=True)]
        if not np.isfinite(sums).all():
            raise NotFinite
        outputs.append(
            {
                "item": item.name,
                "right": item.right,
                "chosen": int(np.argmax(sums)),
                "chosen_norm": int(np.argmax(normed)),
                "logprobs": sums,
            }
        )
    scores = [
        shares(metric, [output[key] == output["right"] for output in outputs])
        for metric, key in (("acc", "chosen"), ("acc_norm", "chosen_norm"))
    ]
    longest = max(len(context) + len(continuation) for context, continuation in pairs)
    cut = sum(
        len(context) + len(continuation) > decoder.config.max_positions + 1
        for context, continuation in pairs
    )
    notes = (
        [
            f"{cut:,} of {len(pairs):,} prompts are cut at their start: the longest has {longest:,} tokens"
        ]
        if cut
        else []
    )
    return TaskScores(tuple(scores), tuple(outputs), tuple(notes))


def _match(decoder: Decoder, asker: Asker, items: Sequence[Item]) -> TaskScores:
    """`exact_match`: the completion without white space around it, or its extracted answer, is an accepted answer."""
    settings = asker.settings
    new_tokens = asker.settings.most(decoder)
    sampling = Sampling(
        max_new_tokens=new_tokens,
        temperature=settings.temperature or 0.0,
        seed=settings.seed,
        stop_ids=asker.stop_ids,
    )
    prompts, notes = fitted_prompts(decoder, [asker.prompt(item) for item in items], new_tokens)
    completions = complete_prompts(
        decoder, asker.tokenizer, [TextRequest(ids, sampling, asker.stops) for ids in prompts]
    )
    outputs = []
    num_unfinished = 0
    for item, completion in zip(items, completions, strict=True):
        spoken = without_thought(completion, asker.thoughts, inside=asker.is_thinking)
        for mark in asker.around:
            spoken = None if spoken is None else spoken.replace(mark, "").strip()
        num_unfinished += spoken is None
        answer = None if spoken is None else extracted(spoken, settings.extract)
        accepted = [output.strip() for output in item.answers]
        outputs.append(
            {
                "item": item.name,
                "completion": completion,
                "answer": answer,
                "accepted": accepted,
                "correct": answer is not None and answer in accepted,
            }
        )
    if num_unfinished:
        notes.append(
            f"{num_unfinished:,} of {len(outputs):,} completions end inside a thought: counted as wrong; "
            f"raise --max-new-tokens, which is {new_tokens:,}"
        )
    if num_unmatched := sum(output["answer"] is None for output in outputs) - num_unfinished:
        notes.append(
            f"no match of --extract in {num_unmatched:,} of {len(outputs):,} completions: counted as wrong"
        )
    return TaskScores(
        (shares("exact_match", [bool(output["correct"]) for output in outputs]),),
        tuple(outputs),
        tuple(notes),
    )


def extracted(completion: str, pattern: str | None) -> str | None:
    """The last match of the pattern (its first group, if it has one), else the whole completion, stripped."""
    if pattern is None:
        return completion.strip()
    matches = list(compiled(pattern).finditer(completion))
    return (matches[-1][1 if matches[-1].re.groups else 0] or "").strip() if matches else None


def compiled(pattern: str) -> re.Pattern[str]:
    """Raises UserError (code 2) for what is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        fix = r"write a regular expression, such as '(-?\d+)'"
        raise UserError(
            f"not a regular expression: {error}", where="--extract", fix=fix, code=2
        ) from error


def fitted_prompts(
    decoder: Decoder, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """The prompts, cut at their start so that `new_tokens` fit into the context, and a note about them."""
    _refuse_ids(decoder, [(ids, []) for ids in prompts])
    prompt_tokens = decoder.config.max_positions - new_tokens
    if prompt_tokens < 1:
        problem = f"--max-new-tokens {new_tokens:,} leaves no room for a prompt in a context of"
        fix = "use a smaller --max-new-tokens"
        raise UserError(
            f"{problem} {decoder.config.max_positions:,}", where="--max-new-tokens", fix=fix, code=2
        )
    cut = sum(len(ids) > prompt_tokens for ids in prompts)
    notes = (
        [f"{cut:,} of {len(prompts):,} prompts are cut at their start to {prompt_tokens:,} tokens"]
        if cut
        else []
    )
    return [ids[-prompt_tokens:] for ids in prompts], notes


def _refuse_ids(decoder: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    refuse_unknown_ids(
        (token for pair in pairs for ids in pair for token in ids), decoder.config.vocab_size
    )


def complete_prompts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    requests: Sequence[TextRequest],
    *,
    slots: int = SLOTS,
) -> list[str]:
    """The completion of each request, `slots` decoded at once.

    Prompts that begin alike follow each other, so that a slot reads what they share once. Raises UserError for logits
    that are not finite.
    """
    order = sorted(range(len(requests)), key=lambda number: tuple(requests[number].ids))
    completions = [""] * len(requests)
    num_done = 0
    with eval_mode(decoder):
        for place, completion in complete_requests(
            decoder, tokenizer, [requests[number] for number in order], slots=slots
        ):
            completions[order[place]] = completion.text
            num_done += 1
            progress(f"{num_done:,} of {counted(len(requests), 'completions')}")
    return completions
