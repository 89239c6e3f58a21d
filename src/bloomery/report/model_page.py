"""The page about a model: its files, its loss on a text, its responses; for an adapter also those of its base."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bloomery.core import __version__
from bloomery.core.units import counted, format_bytes, format_count
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.adapters.peft_files import read_adaptation
from bloomery.model.adapters.settings import TENSORS, Base, read_settings, refuse_other_base
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families import architecture_of
from bloomery.model.io.stored import Stored, find_tensors, stored_in, stored_parameters
from bloomery.model.presets import read_config
from bloomery.report.charts import render
from bloomery.report.validation_text import HEAT_LEGEND, RESPONSES_NOTE, ScoredText, heat_level
from bloomery.train.model_folder import ModelFiles


@dataclass(frozen=True)
class Files:
    """Safetensors: total bytes, number of files, and dtypes by number of elements."""

    bytes: int
    count: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class AdapterFacts:
    """`base`: a Hub id or a folder. `ranks`: all that occur, empty for a method without rank. `trainable`: parameters
    of the `stored` ones, None: unknown.
    """

    method: str
    base: str
    ranks: tuple[int, ...]
    alpha: float | None
    modules: tuple[str, ...]
    in_full: tuple[str, ...]
    trainable: int | None
    stored: int
    files: Files


@dataclass(frozen=True)
class ModelFacts:
    """`config` includes the vocabulary of the adapter. `tokens`: of the tokenizer, None without one."""

    config: ModelConfig
    files: Files
    tokens: int | None
    templates: tuple[str, ...]
    adapter: AdapterFacts | None


def read_facts(model: ModelFiles) -> ModelFacts:
    """Raises UserError for damaged or pickled files and for an adapter of another base."""
    source = model.base or model.weights
    config = read_config(source)
    stored_parameters(source, config)
    files = _files(find_tensors(source).values())
    adapter = None
    if model.base is not None:
        refuse_other_base(model.weights, model.base)
        config, adapter = _adapter(model.weights, config, base=Base(str(model.base), "").name)
    folder = model.tokenizer
    if not any(place.is_file() for place in (folder / "tokenizer.json", *folder.glob("*.model"))):
        return ModelFacts(config, files, None, (), adapter)
    tokenizer = load_tokenizer(folder)
    return ModelFacts(
        config, files, tokenizer.vocab_size, tuple(own_templates(tokenizer.config)), adapter
    )


def _files(tensors: Iterable[Stored]) -> Files:
    sizes = Counter[str]()
    paths = set[Path]()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
        paths.add(tensor.path)
    return Files(
        sum(path.stat().st_size for path in paths),
        len(paths),
        tuple(name for name, _ in sizes.most_common()),
    )


def _adapter(folder: Path, config: ModelConfig, *, base: str) -> tuple[ModelConfig, AdapterFacts]:
    settings = read_settings(folder)
    tensors = stored_in(folder, TENSORS).values()
    stored = sum(math.prod(tensor.shape) for tensor in tensors)
    files = _files(tensors)
    if settings["peft_type"] != "LORA":
        names = settings.get("target_modules")
        modules = _short(names) if isinstance(names, list) else ()
        method = f"{settings['peft_type'][:40]} of PEFT"
        # AdaLoRA: r is the initial rank
        rank = settings.get("target_r" if settings["peft_type"] == "ADALORA" else "r")
        ranks = (rank,) if isinstance(rank, int) and rank > 0 else ()
        return config, AdapterFacts(method, base, ranks, None, modules, (), None, stored, files)
    read, config = read_adaptation(folder, config)
    method = ("DoRA" if read.dora else "LoRA") + (" with rsLoRA scaling" if read.rslora else "")
    method = method if read.pairs else "modules_to_save only"
    return config, AdapterFacts(
        method=method,
        base=base,
        ranks=tuple(sorted({pair.rank for pair in read.pairs.values()})),
        alpha=settings.get("lora_alpha", 8),
        modules=_short(read.pairs),
        in_full=_short(read.whole),
        trainable=read.trained(config),
        stored=stored,
        files=files,
    )


def _short(names: Iterable[Any]) -> tuple[str, ...]:
    """The last part of each name, once."""
    return tuple(dict.fromkeys(str(name).rpartition(".")[2][:80] for name in names))


@dataclass(frozen=True)
class CheckedModel:
    """Results of one model: the figures of `bloomery eval --json` on the text, the per-token loss of a part of it, a
    response per prompt.
    """

    title: str
    figures: Mapping[str, float | None] | None
    scored: list[ScoredText]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class ModelResults:
    """Results on a text and on prompts. `models`: the base first, if any."""

    text: str | None = None
    notes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    form: str = ""  # of the prompts: the chat template
    models: tuple[CheckedModel, ...] = ()


def model_page(facts: ModelFacts, results: ModelResults, *, name: str, command: str) -> str:
    """The whole document. `command` creates it again."""
    adapter = facts.adapter
    is_reward = facts.config.head == "values"
    lead = f"{'reward model' if is_reward else 'language model'} · {architecture_of(facts.config)}"
    scored = [(model.title, model.scored) for model in results.models]
    return render(
        "model.html",
        name=name,
        written=f"Written by Bloomery {__version__} from the files of this model.",
        lead=lead if adapter is None else f"{adapter_text(adapter)}, base model {adapter.base}",
        cards=[*_measured(results), *_sizes(facts)],
        described=described(facts),
        results=results,
        figures=figures(results),
        scored=scored if any(text for _, text in scored) else [],
        legend=HEAT_LEGEND,
        level=heat_level,
        prompts=[
            (prompt, [(model.title, model.responses[number]) for model in results.models])
            for number, prompt in enumerate(results.prompts)
        ],
        note=f"{results.form}; {RESPONSES_NOTE}" if results.form else RESPONSES_NOTE,
        is_reward=is_reward,
        base=", for the adapter and its base" if adapter is not None else "",
        command=command,
    )


def _measured(results: ModelResults) -> list[tuple[str, str]]:
    """Of the last model, with the figure of its base if there is one."""
    known = [model.figures for model in results.models if model.figures is not None]
    if not known:
        return []
    cards = []
    for title, key, form in (
        ("bits per byte", "bits_per_byte", ".3f"),
        ("nats per token", "loss", ".3f"),
        ("perplexity", "perplexity", ".4g"),
    ):
        base = known[0][key]
        now = known[-1][key]
        if base is not None and now is not None:
            cards.append(
                (f"{now:{form}}", title + (f"; base {base:{form}}" if len(known) > 1 else ""))
            )
    return cards


def _sizes(facts: ModelFacts) -> list[tuple[str, str]]:
    config = facts.config
    adapter = facts.adapter
    total = parameter_count(facts.config)
    files = (format_bytes(facts.files.bytes), f"weights, {facts.files.dtypes[0]}")
    shared = [
        (f"{config.vocab_size:,}", "vocabulary size"),
        (f"{config.max_positions:,}", "context length, tokens"),
    ]
    if adapter is None:
        return [(format_count(total), "parameters"), *shared, files]
    own = (format_count(adapter.stored), "parameters in the adapter file")
    if adapter.trainable is not None:
        own = (
            format_count(adapter.trainable),
            f"trainable parameters, {adapter.trainable / total:.2%} of the model",
        )
    return [(format_count(total), "parameters"), own, *shared, files]


def adapter_text(adapter: AdapterFacts) -> str:
    """For example "LoRA, rank 8, alpha 16"."""
    ranks = adapter.ranks
    rank = (
        [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"]
        if ranks
        else []
    )
    return ", ".join(
        [
            adapter.method,
            *rank,
            *([f"alpha {adapter.alpha:g}"] if adapter.alpha is not None else []),
        ]
    )


def described(facts: ModelFacts) -> list[tuple[str, str]]:
    """Title and text of each row."""
    config = facts.config
    adapter = facts.adapter
    templates = facts.templates
    heads = f"{counted(config.num_heads, 'heads')} of {config.head_dim}"
    heads += f", {config.num_kv_heads} KV heads" if config.num_kv_heads != config.num_heads else ""
    backend = ", transformers implementation" if config.transformers_backend is not None else ""
    shared = ", tied embeddings" if config.tie_embeddings else ""
    own = (
        "none"
        if not templates
        else "yes"
        if len(templates) == 1
        else f"yes: {', '.join(templates)}"
    )

    def written(files: Files) -> str:
        return f"{format_bytes(files.bytes)} in {counted(files.count, 'files')}, {' and '.join(files.dtypes)}"

    def first(names: Sequence[str]) -> str:
        more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more or "unknown"

    rows = [
        ("architecture", architecture_of(config) + backend),
        ("layers", f"{config.num_layers:,}"),
        ("hidden size", f"{config.hidden_size:,}, intermediate size {config.intermediate_size:,}"),
        ("attention", heads),
        ("parameters", f"{parameter_count(config):,}{shared}"),
        ("tokenizer", "none" if facts.tokens is None else f"{facts.tokens:,} tokens"),
        ("chat template", own),
        ("weights", written(facts.files)),
    ]
    if adapter is None:
        return rows
    rows += [
        ("adapter", adapter_text(adapter)),
        ("base model", adapter.base),
        ("target modules", first(adapter.modules)),
    ]
    if adapter.in_full:
        rows.append(("modules to save", first(adapter.in_full)))
    count = ("parameters in its file", adapter.stored)
    if adapter.trainable is not None:
        count = ("trainable parameters", adapter.trainable)
    return [*rows, (count[0], f"{count[1]:,}"), ("adapter file", written(adapter.files))]


def figures(results: ModelResults) -> dict[str, list[Any]]:
    """One row per figure, one column per model."""
    known = [(model.title, model.figures) for model in results.models if model.figures is not None]
    forms = {
        "bits per byte": ".4f",
        "loss, nats per token": ".4f",
        "perplexity": ".4g",
        "tokens": ",",
        "bytes": ",",
    }
    keys = ("bits_per_byte", "loss", "perplexity", "tokens", "bytes")
    rows = [
        [
            title,
            *(
                "unknown" if (value := each[key]) is None else f"{value:{form}}"
                for _, each in known
            ),
        ]
        for key, (title, form) in zip(keys, forms.items(), strict=True)
    ]
    return {"head": ["", *(title for title, _ in known)], "rows": rows}
