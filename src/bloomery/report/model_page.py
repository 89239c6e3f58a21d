"""The page about a model: what its files are, how it predicts a text, what it answers; an adapter beside its base"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bloomery.core.units import counted, format_bytes, format_count
from bloomery.core.version import __version__
from bloomery.data.chat.templates import own_templates
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.adapters.base_model import TENSORS, Base, read_settings, refuse_other_base
from bloomery.model.adapters.peft_files import read_adaptation
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families.presets import read_config
from bloomery.model.families.registry import architecture_of
from bloomery.model.io.stored import Stored, find_tensors, stored_in, stored_parameters
from bloomery.report.heldout import ANSWERS_NOTE, LEGEND, Priced, level
from bloomery.report.render import render
from bloomery.train.model_folder import ModelFiles


@dataclass(frozen=True)
class Files:
    """Safetensors: the bytes of all, how many there are, and the dtypes of their tensors, most numbers first."""

    bytes: int
    count: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class AdapterFacts:
    """`base`: an id on the Hub or a folder. `ranks`: those that occur, empty where the method has none. `trained`: of
    the `stored` numbers those that learn, None where the file does not tell.
    """

    method: str
    base: str
    ranks: tuple[int, ...]
    alpha: float | None
    modules: tuple[str, ...]
    in_full: tuple[str, ...]
    trained: int | None
    stored: int
    files: Files


@dataclass(frozen=True)
class ModelFacts:
    """`config` has the vocabulary that an adapter brings. `tokens`, of the tokenizer: None where none is there."""

    config: ModelConfig
    files: Files
    tokens: int | None
    templates: tuple[str, ...]
    adapter: AdapterFacts | None


def read_facts(found: ModelFiles) -> ModelFacts:
    """Raises UserError for what is damaged, pickled, or an adapter of another base."""
    source = found.base or found.weights
    config = read_config(source)
    stored_parameters(source, config)
    files, adapter = _files(find_tensors(source).values()), None
    if found.base is not None:
        refuse_other_base(found.weights, found.base)
        config, adapter = _adapter(found.weights, config, base=Base(str(found.base), "").name)
    beside = found.tokenizer
    if not any(place.is_file() for place in (beside / "tokenizer.json", *beside.glob("*.model"))):
        return ModelFacts(config, files, None, (), adapter)
    tokenizer = load_tokenizer(beside)
    return ModelFacts(config, files, tokenizer.vocab_size, tuple(own_templates(tokenizer.config)), adapter)


def _files(tensors: Iterable[Stored]) -> Files:
    sizes, paths = Counter[str](), set[Path]()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
        paths.add(tensor.path)
    return Files(sum(path.stat().st_size for path in paths), len(paths), tuple(name for name, _ in sizes.most_common()))


def _adapter(folder: Path, config: ModelConfig, *, base: str) -> tuple[ModelConfig, AdapterFacts]:
    said, tensors = read_settings(folder), stored_in(folder, TENSORS).values()
    stored, files = sum(math.prod(tensor.shape) for tensor in tensors), _files(tensors)
    if said["peft_type"] != "LORA":
        names = said.get("target_modules")
        modules = _short(names) if isinstance(names, list) else ()
        method = f"{said['peft_type'][:40]} of PEFT"
        rank = said.get("target_r" if said["peft_type"] == "ADALORA" else "r")  # AdaLoRA's r says where training began
        ranks = (rank,) if isinstance(rank, int) and rank > 0 else ()
        told = AdapterFacts(method, base, ranks, None, modules, (), None, stored, files)
        return config, told
    read, config = read_adaptation(folder, config)
    method = ("DoRA" if read.dora else "LoRA") + (" scaled by the root of its rank (rsLoRA)" if read.rslora else "")
    method = method if read.pairs else "modules in full"
    told = AdapterFacts(
        method=method, base=base, ranks=tuple(sorted({pair.rank for pair in read.pairs.values()})),
        alpha=said.get("lora_alpha", 8), modules=_short(read.pairs), in_full=_short(read.whole),
        trained=read.trained(config), stored=stored, files=files,
    )  # fmt: skip
    return config, told


def _short(names: Iterable[Any]) -> tuple[str, ...]:
    """The last part of each name, once."""
    return tuple(dict.fromkeys(str(name).rpartition(".")[2][:80] for name in names))


class Figures(Protocol):
    """How well a model predicts a text; `loss` is nats per token."""

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
class CheckedModel:
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
    models: tuple[CheckedModel, ...] = ()


def model_page(facts: ModelFacts, asked: Asked, *, name: str, command: str) -> str:
    """The whole document. `command` repeats it."""
    adapter = facts.adapter
    is_reward = facts.config.head == "values"
    lead = f"{'reward model' if is_reward else 'language model'} · {architecture_of(facts.config)}"
    priced = [(model.title, model.priced) for model in asked.models]
    return render(
        "model.html",
        name=name,
        written=f"Written by Bloomery {__version__} from the files of this model.",
        lead=lead if adapter is None else f"{adapter_in_words(adapter)}, on {adapter.base}",
        cards=[*_measured(asked), *_sizes(facts)],
        described=described(facts),
        asked=asked,
        figures=figures(asked),
        priced=priced if any(text for _, text in priced) else [],
        legend=LEGEND,
        level=level,
        questions=[
            (prompt, [(model.title, model.answers[number]) for model in asked.models])
            for number, prompt in enumerate(asked.prompts)
        ],
        answers_note=f"{asked.form}; {ANSWERS_NOTE}" if asked.form else ANSWERS_NOTE,
        is_reward=is_reward,
        beside=", beside its base's" if adapter is not None else "",
        command=command,
    )


def _measured(asked: Asked) -> list[tuple[str, str]]:
    """Of the last model, with the first one's figure where there are two."""
    told = [model.figures for model in asked.models if model.figures is not None]
    if not told:
        return []
    first, last = told[0], told[-1]
    pairs = [
        ("bits per byte", first.bits_per_byte, last.bits_per_byte, ".3f"),
        ("nats per token", first.loss, last.loss, ".3f"),
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


def described(facts: ModelFacts) -> list[tuple[str, str]]:
    """Title and figure of each fact."""
    config, adapter, templates = facts.config, facts.adapter, facts.templates
    heads = f"{counted(config.num_heads, 'heads')} of {config.head_dim}"
    heads += f", {config.num_kv_heads} of keys and values" if config.num_kv_heads != config.num_heads else ""
    transformers_backend = ", computed by transformers' layers" if config.transformers_backend is not None else ""
    shared = ", embedding and head are one matrix" if config.tie_embeddings else ""
    own = "none" if not templates else "its own" if len(templates) == 1 else f"its own: {', '.join(templates)}"

    def written(files: Files) -> str:
        return f"{format_bytes(files.bytes)} in {counted(files.count, 'files')}, {' and '.join(files.dtypes)}"

    def first(names: Sequence[str]) -> str:
        more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more or "modules unnamed"

    rows = [
        ("architecture", architecture_of(config) + transformers_backend),
        ("layers", f"{config.num_layers:,} of width {config.hidden_size:,}, inner width {config.intermediate_size:,}"),
        ("attention", heads),
        ("parameters", f"{parameter_count(config):,}{shared}"),
        ("tokenizer", "none beside the weights" if facts.tokens is None else f"{facts.tokens:,} tokens"),
        ("chat template", own),
        ("weights", written(facts.files)),
    ]
    if adapter is None:
        return rows
    rows += [("adapter", adapter_in_words(adapter)), ("base", adapter.base), ("adapted", first(adapter.modules))]
    if adapter.in_full:
        rows.append(("trained in full", first(adapter.in_full)))
    learned = (
        ("numbers in its file", adapter.stored) if adapter.trained is None else ("trained numbers", adapter.trained)
    )
    return [*rows, (learned[0], f"{learned[1]:,}"), ("adapter's file", written(adapter.files))]


def figures(asked: Asked) -> dict[str, list[Any]]:
    """A row a figure, a column a model: what fits on a phone."""
    told = [(model.title, model.figures) for model in asked.models if model.figures is not None]
    bits = ["unknown" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}" for _, each in told]
    rows = [
        ["bits per byte", *bits],
        ["nats per token", *(f"{each.loss:.4f}" for _, each in told)],
        ["perplexity", *(f"{each.perplexity:.4g}" for _, each in told)],
        ["tokens", *(f"{each.tokens:,}" for _, each in told)],
        ["bytes", *(f"{each.bytes:,}" for _, each in told)],
    ]
    return {"head": ["", *(title for title, _ in told)], "rows": rows}
