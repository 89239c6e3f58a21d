"""`bloomery report`: the page about a run, or about a model and its base on a text and on prompts."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import (
    data_path,
    devices_option,
    progress_line,
    refuse_undecoded,
    text_flags,
)
from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.text import expanded
from bloomery.runs.folder import chosen_use, find_run, is_run, model_path

if TYPE_CHECKING:
    from bloomery.report.model_page import ModelFacts, ModelResults
    from bloomery.train.model_folder import ModelFiles
    from bloomery.train.use import Use


def _report_model(
    name: str,
    place: Path,
    *,
    data: Path | None,
    prompts: tuple[str, ...],
    template: str | None,
    out: Path | None,
    devices: str,
) -> Path:
    """Writes the page about the model `name` to `place`. Raises UserError."""
    folder = model_path(name)
    use = chosen_use(devices)  # before torch is imported
    from bloomery.model.config import refuse_values
    from bloomery.report import write_model_report
    from bloomery.report.model_page import ModelResults, read_facts
    from bloomery.train.model_folder import find_model

    files = find_model(folder)
    facts = read_facts(files)
    results = ModelResults()
    if data is not None or prompts:
        refuse_values(facts.config, where=name)
        with text_flags():
            results = _results(
                files, facts, where=name, use=use, data=data, prompts=prompts, template=template
            )
    # "last" would change
    model = name if expanded(name).exists() or "+" in name or "/" in name else str(folder)
    last = expanded(model if expanded(model).exists() else model.rpartition("+")[2])
    title = last.resolve().name if last.exists() else str(last)  # a Hub id unchanged
    options = [
        ("--data", data),
        *(("--prompt", prompt) for prompt in prompts),
        ("--template", template),
    ]
    options += [("--devices", None if devices == "auto" else devices), ("--out", out)]
    typed = [str(word) for flag, value in options if value is not None for word in (flag, value)]
    again = shlex.join(["bloomery", "report", model, *typed])
    return write_model_report(facts, results, name=title, command=again, out=place)


def _results(
    files: "ModelFiles",
    facts: "ModelFacts",
    *,
    where: str,
    use: "Use",
    data: Path | None,
    prompts: tuple[str, ...],
    template: str | None,
) -> "ModelResults":
    """Loads one model at a time."""
    from bloomery.data.chat.render import chat_format
    from bloomery.data.examples import Message
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.report.model_page import CheckedModel, ModelResults
    from bloomery.report.validation_text import MAX_TOKENS, excerpt, scored_spans
    from bloomery.runs.evaluate import evaluate, load_found, texts_of
    from bloomery.runs.generate import refuse_prompt
    from bloomery.train.evaluation.answers import cut, drawn, shown
    from bloomery.train.evaluation.scoring import score_documents
    from bloomery.train.model_folder import ModelFiles

    place = None if data is None else data_path(data)
    tokenizer = load_tokenizer(files.tokenizer)
    tokens: list[int] = []
    if place is not None:
        texts = texts_of(place, tokenizer, template=template)
        flags = (
            (t.tokens, [True] * len(t.tokens) if t.loss_mask is None else t.loss_mask.tolist())
            for t in texts
        )
        tokens, mask = excerpt(flags, tokenizer)
    questions = []
    form = ""
    if prompts:
        with chat_format(tokenizer, template) as chat:
            questions = [chat.encode([Message("user", prompt)]) for prompt in prompts]
            for ids in questions:
                refuse_prompt(ids, facts.config)
            form = "prompts without a chat template (the model has none)"
            if facts.templates or template:
                form = f"prompts formatted with {chat.description}"
    models = [("model" if files.base is None else "with the adapter", files)]
    if files.base is not None:
        models.insert(0, ("base", ModelFiles(files.base, None, files.tokenizer, files.trained)))
    checked: list[CheckedModel] = []
    notes: list[str] = []
    for title, each in models:
        progress(f"loading the model ({title})")
        decoder, tokenizer = load_found(
            each, where=where, vocab_size=facts.config.vocab_size, use=use
        )
        responses = []
        for number, ids in enumerate(questions, 1):
            progress(f"response {number} of {len(questions)} ({title})")
            response = drawn(decoder, tokenizer, ids, max_new_tokens=MAX_TOKENS, ends=chat.stop_ids)
            whole = shown(tokenizer, response.ids)
            text = cut(whole, chat.stop_strings)
            responses.append(text + ("" if response.ended or text != whole else " …"))
        result = None
        spans = []
        if place is not None:
            progress(f"loss on the text ({title})")
            result, notes = evaluate(decoder, tokenizer, place, template=template)
            if tokens:
                spans = scored_spans(
                    tokens, next(score_documents(decoder, [tokens])), tokenizer, mask
                )
        figures = None if result is None else asdict(result)
        checked.append(CheckedModel(title, figures, spans, tuple(responses)))
    name = None if data is None else data.name or str(data)
    return ModelResults(name, tuple(notes), prompts, form, tuple(checked))


@click.command()
@click.argument("model")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Show the loss on a text, data file, folder or hub:ORG/NAME.",
)
@click.option(
    "--prompt", "prompts", multiple=True, help="Show a response to this prompt; may be repeated."
)
@click.option("--template", help="Chat template [default: the one of the tokenizer].")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write to this file [default: RUN/report.html; for a model ./report.html].",
)
@devices_option
def command(
    model: str,
    data: Path | None,
    prompts: tuple[str, ...],
    template: str | None,
    out: Path | None,
    devices: str,
) -> None:
    """Write report.html about a run or a model: one page that works offline.

    MODEL is a run, a folder, a Hub id, or BASE+ADAPTER. The page of a run has training curves, samples, events, and
    planned and measured figures, also of an unfinished run. A checkpoint or export of a run is reported as its run.
    The page of another model, or with --data or --prompt, has its settings, its loss and its responses, for an adapter
    also those of its base.

    Example: bloomery report last
    """
    for prompt in prompts:
        refuse_undecoded(prompt)
    if any(not prompt.strip() for prompt in prompts):
        raise UserError(
            "the prompt is empty", where="--prompt", fix="set a prompt, or remove --prompt", code=2
        )
    if template is not None and data is None and not prompts:
        fix = "add --data FILE or --prompt TEXT, or remove --template"
        raise UserError("--template needs --data or --prompt", where="--template", fix=fix, code=2)
    from bloomery.report import refuse_place, write_report

    run = None if data is not None or prompts else _run_of(model)
    place = (expanded(out) if out is not None else (run or Path()) / "report.html").absolute()
    refuse_place(place)
    with progress_line("report"):
        if run is None:
            page = _report_model(
                model,
                place,
                data=data,
                prompts=prompts,
                template=template,
                out=out,
                devices=devices,
            )
        else:
            page = write_report(run, out=None if out is None else place, use=chosen_use(devices))
    click.echo(page)


def _run_of(name: str) -> Path | None:
    """The run `name`, or the run of this checkpoint or export; None for another model. Raises UserError (code 2)."""
    whole = expanded(name)
    made = whole if whole.is_dir() else expanded(name.rpartition("+")[2])
    if name == "last" or is_run(Path("runs") / name):
        return find_run(name)
    if is_run(made) or not made.is_dir():
        return made if is_run(made) else None
    # not a folder with a recipe of yours
    above = (folder for folder in made.resolve().parents if is_run(folder))
    return next((folder for folder in above if (folder / "events.jsonl").is_file()), None)
