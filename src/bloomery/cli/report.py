"""What `bloomery report` does with a model: facts of its files, a text and prompts put to it and to its base"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import data_path, devices_option, refuse_undecoded, text_flags
from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.runs.names import chosen_use, find_run, is_run, model_path

if TYPE_CHECKING:
    from bloomery.data.tokenizer.tokenizer import Tokenizer
    from bloomery.model.decoder import Decoder
    from bloomery.report.heldout import Excerpt
    from bloomery.report.model_page import Asked, CheckedModel, ModelFacts
    from bloomery.train.model_folder import ModelFiles
    from bloomery.train.use import Use


@dataclass(frozen=True)
class Words:
    """What was typed besides the model."""

    data: Path | None = None
    prompts: tuple[str, ...] = ()
    template: str | None = None
    out: Path | None = None
    devices: str = "auto"

    def command(self, model: str) -> str:
        """What repeats the page."""
        typed = ["bloomery", "report", model]
        typed += ["--data", str(self.data)] if self.data is not None else []
        typed += [word for prompt in self.prompts for word in ("--prompt", prompt)]
        typed += ["--template", self.template] if self.template is not None else []
        typed += ["--devices", self.devices] if self.devices != "auto" else []
        return shlex.join([*typed, *(["--out", str(self.out)] if self.out is not None else [])])


@dataclass(frozen=True)
class _Put:
    """What every model is shown: prompts as ids, how they were put, what ends an answer; the text's own stretch."""

    prompts: tuple[list[int], ...]
    form: str
    ends: tuple[int, ...]
    stops: tuple[str, ...]
    stretch: "Excerpt"


def report_model(name: str, words: Words, out: Path) -> Path:
    """Writes the page about the model that `name` means to `out`. Raises UserError."""
    folder = model_path(name)
    use = chosen_use(words.devices)  # before torch is imported
    from bloomery.model.config import refuse_values
    from bloomery.report import write_model_report
    from bloomery.report.model_page import Asked, read_facts
    from bloomery.train.model_folder import find_model

    found = find_model(folder)
    facts, asked = read_facts(found), Asked()
    if words.data is not None or words.prompts:
        refuse_values(facts.config, where=name)
        with text_flags():
            asked = _examined(found, facts, words, where=name, use=use)
    typed = name if expanded(name).exists() or "+" in name or "/" in name else str(folder)  # "last" is another one soon
    return write_model_report(facts, asked, name=_title(typed), command=words.command(typed), out=out)


def _title(name: str) -> str:
    """The folder's or the adapter's own name; an id on the Hub as it is."""
    last = name if expanded(name).exists() else name.rpartition("+")[2]
    return expanded(last).resolve().name if expanded(last).exists() else last


def _examined(found: "ModelFiles", facts: "ModelFacts", words: Words, *, where: str, use: "Use") -> "Asked":
    """One model at a time is in memory."""
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.report.model_page import Asked
    from bloomery.train.model_folder import ModelFiles

    data = data_path(words.data) if words.data is not None else None
    put = _put(load_tokenizer(found.tokenizer), facts, words, data)
    models = [("model" if found.base is None else "with the adapter", found)]
    if found.base is not None:
        models.insert(0, ("base", ModelFiles(found.base, None, found.tokenizer, found.trained)))
    examined: list[CheckedModel] = []
    notes: list[str] = []
    for title, one in models:
        model, notes = _examine(
            title, one, put, data, template=words.template, where=where, size=facts.config.vocab_size, use=use
        )
        examined.append(model)
    text = None if words.data is None else words.data.name or str(words.data)
    return Asked(text, tuple(notes), words.prompts, put.form, tuple(examined))


def _put(tokenizer: "Tokenizer", facts: "ModelFacts", words: Words, data: Path | None) -> _Put:
    from bloomery.data.chat.examples import Message
    from bloomery.data.chat.render import chat_format
    from bloomery.report.heldout import excerpt
    from bloomery.runs.evaluate import texts_of
    from bloomery.runs.generate import refuse_prompt

    stretch: Excerpt = ([], [])
    if data is not None:
        texts = texts_of(data, tokenizer, template=words.template)
        flagged = ((t.tokens, [True] * len(t.tokens) if t.learned is None else t.learned.tolist()) for t in texts)
        stretch = excerpt(flagged, tokenizer)
    if not words.prompts:
        return _Put((), "", (), (), stretch)
    with chat_format(tokenizer, words.template) as form:
        prompts = tuple(form.encode([Message("user", prompt)]) for prompt in words.prompts)
        for ids in prompts:
            refuse_prompt(ids, facts.config)
        own = facts.templates or words.template
        told = (
            f"put by {form.description}"
            if own
            else "not put by a chat template, since it has none: what follows a text"
        )
        return _Put(prompts, told, form.stop_ids, form.stop_strings, stretch)


def _examine(
    title: str,
    one: "ModelFiles",
    put: _Put,
    data: Path | None,
    *,
    template: str | None,
    where: str,
    size: int,
    use: "Use",
) -> "tuple[CheckedModel, list[str]]":
    from bloomery.report.heldout import stretches
    from bloomery.report.model_page import CheckedModel
    from bloomery.runs.evaluate import evaluate, load_found
    from bloomery.train.evaluation.scoring import score_documents

    decoder, tokenizer = load_found(one, where=where, vocab_size=size, use=use)
    answers = tuple(_said(decoder, tokenizer, ids, put) for ids in put.prompts)
    if data is None:
        return CheckedModel(title, None, [], answers), []
    result, notes = evaluate(decoder, tokenizer, data, template=template)
    tokens, learned = put.stretch
    priced = stretches(tokens, next(score_documents(decoder, [tokens])), tokenizer, learned) if tokens else []
    return CheckedModel(title, result, priced, answers), notes


def _said(decoder: "Decoder", tokenizer: "Tokenizer", ids: list[int], put: _Put) -> str:
    from bloomery.report.heldout import MAX_TOKENS
    from bloomery.train.evaluation.answers import cut, drawn, shown

    answer = drawn(decoder, tokenizer, ids, max_new_tokens=MAX_TOKENS, ends=put.ends)
    whole = shown(tokenizer, answer.ids)
    text = cut(whole, put.stops)
    return text + ("" if answer.ended or text != whole else " …")


def refuse_prompts(prompts: tuple[str, ...]) -> None:
    """Raises UserError (code 2) for one that is empty."""
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("the prompt is empty", where="--prompt", fix="write one, or leave out --prompt", code=2)


@click.command()
@click.argument("model")
@click.option("--data", type=click.Path(path_type=Path), help="A text, data file, folder or hub:ORG/NAME, priced.")
@click.option("--prompt", "prompts", multiple=True, help="Show an answer to this; may be given several times.")
@click.option("--template", help="How conversations are written [default: the tokenizer's own chat template].")
@click.option("--out", type=click.Path(path_type=Path), help="[default: RUN/report.html; of a model report.html here]")
@devices_option
def command(
    model: str, data: Path | None, prompts: tuple[str, ...], template: str | None, out: Path | None, devices: str
) -> None:
    """Write report.html of MODEL (a run, a folder, a Hub id, or BASE+ADAPTER): one page that works offline.

    Of a run it shows curves, samples, incidents, plan against run, whatever state the run is in; a checkpoint or an
    export inside a run's folder stands for its run. Of other models, and of any with --data or --prompt, it shows what
    the model is, how well it predicts the text and what it answers; an adapter stands beside its base.

    Example: bloomery report last
    """
    for prompt in prompts:
        refuse_undecoded(prompt)
    refuse_prompts(prompts)
    if template is not None and data is None and not prompts:
        fix = "add --data FILE or --prompt TEXT, or leave out --template"
        raise UserError("there is nothing that a template writes", where="--template", fix=fix, code=2)
    from bloomery.report import refuse_place, write_report

    words = Words(data, prompts, template, out, devices)
    run = None if data is not None or prompts else _run_of(model)
    place = (expanded(out) if out is not None else (run or Path()) / "report.html").absolute()
    refuse_place(place)
    if run is None:
        click.echo(report_model(model, words, place))
    else:
        click.echo(write_report(run, out=None if out is None else place, use=chosen_use(devices)))


def _run_of(name: str) -> Path | None:
    """The run that is named, or that made what is named; None of another model. Raises UserError (code 2)."""
    whole = expanded(name)
    made = whole if whole.is_dir() else expanded(name.rpartition("+")[2])
    if name == "last" or is_run(Path("runs") / name):
        return find_run(name)
    if is_run(made) or not made.is_dir():
        return made if is_run(made) else None
    above = (folder for folder in made.resolve().parents if is_run(folder))  # or a folder with a recipe of a person
    return next((folder for folder in above if (folder / "events.jsonl").is_file()), None)
