"""The page about a model: what it is, how well it predicts a text and what it answers; an adapter beside its base"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bloomery.core.units import counted, format_bytes, format_count
from bloomery.core.version import __version__
from bloomery.model.counting import parameter_count
from bloomery.model.families.registry import architecture_of
from bloomery.report.answers import draw_asked
from bloomery.report.heldout import Priced, draw_priced
from bloomery.report.html import Html, el, join, table
from bloomery.report.model_facts import AdapterFacts, Files, ModelFacts
from bloomery.report.page import card, document, section


class Figures(Protocol):
    """How well a model predicts a text; `loss` is nats a token."""

    @property
    def loss(self) -> float: ...
    @property
    def perplexity(self) -> float: ...
    @property
    def bits_per_byte(self) -> float | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class Examined:
    """What one model did: its figures on the text, the price of each token of a stretch of it, an answer a prompt."""

    title: str
    figures: Figures | None
    priced: list[Priced]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What a page shows besides facts. `models`: the base first, where there is one."""

    text: str | None = None
    notes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    form: str = ""  # how the prompts are put
    models: tuple[Examined, ...] = ()


def model_page(facts: ModelFacts, asked: Asked, *, name: str, command: str) -> str:
    """The whole document. `command` repeats it."""
    answers = [
        (prompt, [(model.title, model.answers[number]) for model in asked.models])
        for number, prompt in enumerate(asked.prompts)
    ]
    priced = [(model.title, model.priced) for model in asked.models]
    return document(
        name, f"Written by Bloomery {__version__} from the files of this model.",
        headline(facts, asked, name),
        section("What it is", described(facts)),
        section(f"On {asked.text}", figures(asked)) if asked.text is not None else None,
        section("A stretch of it, token by token", draw_priced(priced)) if any(text for _, text in priced) else None,
        section("What it says", draw_asked(answers, form=asked.form)),
        section("What to add", more(facts, asked)),
        section("Again", el("pre", command)),
    )  # fmt: skip


def headline(facts: ModelFacts, asked: Asked, name: str) -> Html:
    kind = "reward model" if facts.config.head == "values" else "language model"
    lead = f"{kind} · {architecture_of(facts.config)}"
    if facts.adapter is not None:
        lead = f"{adapter_in_words(facts.adapter)}, on {facts.adapter.base}"
    cards = [card(value, title) for value, title in (*_measured(asked), *_sizes(facts))]
    return join(el("h1", name), el("p", lead, class_="lead"), el("div", *cards, class_="cards"))


def _measured(asked: Asked) -> list[tuple[str, str]]:
    """Of the last model, with the first one's figure where there are two."""
    told = [model.figures for model in asked.models if model.figures is not None]
    if not told:
        return []
    first, last = told[0], told[-1]
    pairs = [
        ("bits per byte", first.bits_per_byte, last.bits_per_byte, ".3f"),
        ("nats a token", first.loss, last.loss, ".3f"),
        ("perplexity", first.perplexity, last.perplexity, ".4g"),
    ]
    return [
        (format(now, form), title + (f"; the base {old:{form}}" if len(told) > 1 else ""))
        for title, old, now, form in pairs
        if old is not None and now is not None
    ]


def _sizes(facts: ModelFacts) -> list[tuple[str, str]]:
    config, adapter, total = facts.config, facts.adapter, parameter_count(facts.config)
    files = (format_bytes(facts.files.bytes), f"of weights, {facts.files.dtypes[0]}")
    shared = [
        (f"{config.vocab_size:,}", "tokens in the vocabulary"),
        (f"{config.max_positions:,}", "tokens of context"),
    ]
    if adapter is None:
        return [(format_count(total), "parameters"), *shared, files]
    trained = (format_count(adapter.stored), "numbers in the adapter's file")
    if adapter.trained is not None:
        trained = (format_count(adapter.trained), f"numbers trained, {adapter.trained / total:.2%} of the model's")
    return [(format_count(total), "parameters"), trained, *shared, files]


def adapter_in_words(adapter: AdapterFacts) -> str:
    """As "LoRA, rank 8, alpha 16"."""
    ranks = adapter.ranks
    rank = [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"] if ranks else []
    return ", ".join([adapter.method, *rank, *([f"alpha {adapter.alpha:g}"] if adapter.alpha is not None else [])])


def described(facts: ModelFacts) -> Html:
    config, adapter = facts.config, facts.adapter
    heads = f"{counted(config.num_heads, 'heads')} of {config.head_dim}"
    heads += f", {config.num_kv_heads} of keys and values" if config.num_kv_heads != config.num_heads else ""
    foreign = ", computed by transformers' layers" if config.foreign is not None else ""
    shared = ", embedding and head are one matrix" if config.tie_embeddings else ""
    rows: list[list[str | Html]] = [
        ["architecture", architecture_of(config) + foreign],
        ["layers", f"{config.num_layers:,} of width {config.hidden_size:,}, inner width {config.intermediate_size:,}"],
        ["attention", heads],
        ["parameters", f"{parameter_count(config):,}{shared}"],
        ["tokenizer", "none beside the weights" if facts.tokens is None else f"{facts.tokens:,} tokens"],
        ["chat template", _templates(facts.templates)],
        ["weights", _files(facts.files)],
        *(_adapter(adapter) if adapter is not None else []),
    ]
    return table([], rows)


def _templates(names: Sequence[str]) -> str:
    return "none" if not names else "its own" if len(names) == 1 else f"its own: {', '.join(names)}"


def _files(files: Files) -> str:
    return f"{format_bytes(files.bytes)} in {counted(files.count, 'files')}, {' and '.join(files.dtypes)}"


def _adapter(adapter: AdapterFacts) -> list[list[str | Html]]:
    trained = ["numbers in its file", f"{adapter.stored:,}"]
    if adapter.trained is not None:
        trained = ["trained numbers", f"{adapter.trained:,}"]
    full = [["trained in full", _row(adapter.in_full)]] if adapter.in_full else []
    rows = [["adapter", adapter_in_words(adapter)], ["base", adapter.base], ["adapted", _row(adapter.modules)]]
    return [list(row) for row in (*rows, *full, trained, ["adapter's file", _files(adapter.files)])]


def _row(names: Sequence[str]) -> str:
    """Of many the first few."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "") or "modules unnamed"


def figures(asked: Asked) -> Html:
    """A row a figure, a column a model: what fits on a phone."""
    told = [(model.title, model.figures) for model in asked.models if model.figures is not None]
    bits = ["unknown" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}" for _, each in told]
    rows: list[list[str | Html]] = [
        ["bits per byte", *bits],
        ["nats a token", *(f"{each.loss:.4f}" for _, each in told)],
        ["perplexity", *(f"{each.perplexity:.4g}" for _, each in told)],
        ["tokens", *(f"{each.tokens:,}" for _, each in told)],
        ["bytes", *(f"{each.bytes:,}" for _, each in told)],
    ]
    notes = [el("p", f"{note[:1].upper()}{note[1:]}.", class_="note") for note in asked.notes]
    return join(table(["", *(title for title, _ in told)], rows, class_="numbers named few"), *notes)


def more(facts: ModelFacts, asked: Asked) -> Html | None:
    """What to add; None where both were asked or nothing can be."""
    if facts.config.head == "values":
        return el("p", "A reward model gives values and no text: facts are all that this page has.", class_="absent")
    beside = ", beside its base's" if facts.adapter is not None else ""
    lines = []
    if asked.text is None:
        lines.append(el("p", el("code", "--data FILE"), f" adds its loss on a text{beside}.", class_="absent"))
    if not asked.prompts:
        told = f" adds an answer{beside}; say it as often as you like."
        lines.append(el("p", el("code", "--prompt TEXT"), told, class_="absent"))
    return join(*lines) if lines else None
