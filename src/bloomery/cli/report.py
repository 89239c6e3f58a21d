"""`bloomery report MODEL`: the page about a run, or about a model that no run here made."""

from pathlib import Path

import click

from bloomery.cli.common import chosen_use, devices_option, expanded, find_run, is_run, refuse_undecoded
from bloomery.cli.report_model import Words, refuse_prompts, report_model
from bloomery.errors import UserError


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
        remedy = "add --data FILE or --prompt TEXT, or leave out --template"
        raise UserError("there is nothing that a template writes", where="--template", remedy=remedy, code=2)
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
