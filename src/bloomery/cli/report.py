"""`bloomery report`: the page about a run, or about a model and its base on a text and on prompts."""

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
    from bloomery.report.model_page import ModelFacts, ModelResults
    from bloomery.report.validation_text import Excerpt, ScoredText
    from bloomery.train.model_folder import ModelFiles
    from bloomery.train.use import Use


@dataclass(frozen=True)
class Arguments:
    """Arguments other than the model."""

    data: Path | None = None
    prompts: tuple[str, ...] = ()
    template: str | None = None
    out: Path | None = None
    devices: str = "auto"

    def command(self, model: str) -> str:
        """The command that creates the page again."""
        typed = ["bloomery", "report", model]
        typed += ["--data", str(self.data)] if self.data is not None else []
        typed += [word for prompt in self.prompts for word in ("--prompt", prompt)]
        typed += ["--template", self.template] if self.template is not None else []
        typed += ["--devices", self.devices] if self.devices != "auto" else []
        return shlex.join([*typed, *(["--out", str(self.out)] if self.out is not None else [])])


@dataclass(frozen=True)
class _Prompts:
    """Input of every model: prompts as token ids, their format, the end of a response, and a passage of the text."""

    ids: tuple[list[int], ...]
    form: str
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    passage: "Excerpt"


def report_model(name: str, arguments: Arguments, out: Path) -> Path:
    """Writes the page about the model `name` to `out`. Raises UserError."""
    folder = model_path(name)
    use = chosen_use(arguments.devices)  # before torch is imported
    from bloomery.model.config import refuse_values
    from bloomery.report import write_model_report
    from bloomery.report.model_page import ModelResults, read_facts
    from bloomery.train.model_folder import find_model

    files = find_model(folder)
    facts, results = read_facts(files), ModelResults()
    if arguments.data is not None or arguments.prompts:
        refuse_values(facts.config, where=name)
        with text_flags():
            results = _results(files, facts, arguments, where=name, use=use)
    model = name if expanded(name).exists() or "+" in name or "/" in name else str(folder)  # "last" would change
    last = expanded(model if expanded(model).exists() else model.rpartition("+")[2])
    title = last.resolve().name if last.exists() else str(last)  # a Hub id unchanged
    return write_model_report(facts, results, name=title, command=arguments.command(model), out=out)


def _results(
    files: "ModelFiles", facts: "ModelFacts", arguments: Arguments, *, where: str, use: "Use"
) -> "ModelResults":
    """Loads one model at a time."""
    from bloomery.data.tokenizer.tokenizer import load_tokenizer
    from bloomery.report.model_page import CheckedModel, ModelResults
    from bloomery.report.validation_text import MAX_TOKENS, scored_spans
    from bloomery.runs.evaluate import evaluate, load_found
    from bloomery.train.evaluation.answers import cut, drawn, shown
    from bloomery.train.evaluation.scoring import score_documents
    from bloomery.train.model_folder import ModelFiles

    data = data_path(arguments.data) if arguments.data is not None else None
    prompts = _prompts(load_tokenizer(files.tokenizer), facts, arguments, data)
    models = [("model" if files.base is None else "with the adapter", files)]
    if files.base is not None:
        models.insert(0, ("base", ModelFiles(files.base, None, files.tokenizer, files.trained)))
    checked: list[CheckedModel] = []
    notes: list[str] = []
    for title, each in models:
        decoder, tokenizer = load_found(each, where=where, vocab_size=facts.config.vocab_size, use=use)
        responses = []
        for ids in prompts.ids:
            response = drawn(decoder, tokenizer, ids, max_new_tokens=MAX_TOKENS, ends=prompts.stop_ids)
            whole = shown(tokenizer, response.ids)
            text = cut(whole, prompts.stop_strings)
            responses.append(text + ("" if response.ended or text != whole else " …"))
        result, (tokens, mask) = None, prompts.passage
        spans: list[ScoredText] = []
        if data is not None:
            result, notes = evaluate(decoder, tokenizer, data, template=arguments.template)
            if tokens:
                spans = scored_spans(tokens, next(score_documents(decoder, [tokens])), tokenizer, mask)
        checked.append(CheckedModel(title, result, spans, tuple(responses)))
    name = None if arguments.data is None else arguments.data.name or str(arguments.data)
    return ModelResults(name, tuple(notes), arguments.prompts, prompts.form, tuple(checked))


def _prompts(tokenizer: "Tokenizer", facts: "ModelFacts", arguments: Arguments, data: Path | None) -> _Prompts:
    from bloomery.data.chat.render import chat_format
    from bloomery.data.examples import Message
    from bloomery.report.validation_text import excerpt
    from bloomery.runs.evaluate import texts_of
    from bloomery.runs.generate import refuse_prompt

    passage: Excerpt = ([], [])
    if data is not None:
        texts = texts_of(data, tokenizer, template=arguments.template)
        masked = ((t.tokens, [True] * len(t.tokens) if t.loss_mask is None else t.loss_mask.tolist()) for t in texts)
        passage = excerpt(masked, tokenizer)
    if not arguments.prompts:
        return _Prompts((), "", (), (), passage)
    with chat_format(tokenizer, arguments.template) as template:
        prompts = tuple(template.encode([Message("user", prompt)]) for prompt in arguments.prompts)
        for ids in prompts:
            refuse_prompt(ids, facts.config)
        form = "prompts without a chat template (the model has none)"
        if facts.templates or arguments.template:
            form = f"prompts formatted with {template.description}"
        return _Prompts(prompts, form, template.stop_ids, template.stop_strings, passage)


def refuse_prompts(prompts: tuple[str, ...]) -> None:
    """Raises UserError (code 2) for an empty prompt."""
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("the prompt is empty", where="--prompt", fix="set a prompt, or remove --prompt", code=2)


@click.command()
@click.argument("model")
@click.option(
    "--data", type=click.Path(path_type=Path), help="Show the loss on a text, data file, folder or hub:ORG/NAME."
)
@click.option("--prompt", "prompts", multiple=True, help="Show a response to this prompt; may be repeated.")
@click.option("--template", help="Chat template [default: the one of the tokenizer].")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write to this file [default: RUN/report.html; for a model ./report.html].",
)
@devices_option
def command(
    model: str, data: Path | None, prompts: tuple[str, ...], template: str | None, out: Path | None, devices: str
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
    refuse_prompts(prompts)
    if template is not None and data is None and not prompts:
        fix = "add --data FILE or --prompt TEXT, or remove --template"
        raise UserError("--template needs --data or --prompt", where="--template", fix=fix, code=2)
    from bloomery.report import refuse_place, write_report

    arguments = Arguments(data, prompts, template, out, devices)
    run = None if data is not None or prompts else _run_of(model)
    place = (expanded(out) if out is not None else (run or Path()) / "report.html").absolute()
    refuse_place(place)
    if run is None:
        click.echo(report_model(model, arguments, place))
    else:
        click.echo(write_report(run, out=None if out is None else place, use=chosen_use(devices)))


def _run_of(name: str) -> Path | None:
    """The run `name`, or the run of this checkpoint or export; None for another model. Raises UserError (code 2)."""
    whole = expanded(name)
    made = whole if whole.is_dir() else expanded(name.rpartition("+")[2])
    if name == "last" or is_run(Path("runs") / name):
        return find_run(name)
    if is_run(made) or not made.is_dir():
        return made if is_run(made) else None
    above = (folder for folder in made.resolve().parents if is_run(folder))  # not a folder with a recipe of yours
    return next((folder for folder in above if (folder / "events.jsonl").is_file()), None)
