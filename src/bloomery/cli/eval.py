"""`bloomery eval MODEL`: how well a model predicts a text."""

from dataclasses import asdict
from pathlib import Path

import click

from bloomery.cli.common import data_path, model_path, print_json, text_flags
from bloomery.errors import UserError


@click.command()
@click.argument("model")
@click.option("--data", type=click.Path(path_type=Path), help="A text, data file, folder or hub:ORG/NAME.")
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@click.option("--no-bos", is_flag=True, help="Put no BOS before a text: its first token is then not scored.")
@click.option("--template", help="How conversations are written [default: the tokenizer's own chat template].")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; notes go to stderr.")
def command(model: str, data: Path | None, step: str, no_bos: bool, template: str | None, as_json: bool) -> None:
    """Loss, perplexity and bits per byte of MODEL (a run, a folder, a Hub id, or BASE+ADAPTER).

    Without --data a run is examined on its validation split. Of conversations only the assistant's turns are scored.

    Example: bloomery eval last --data ~/my-texts
    """
    folder = model_path(model)
    text = _validation(folder) if data is None else data_path(data)
    from bloomery.hardware.adopt import adopt

    adopt()  # before torch is imported
    from bloomery.evaluate import evaluate, load_to_evaluate

    decoder, tokenizer = load_to_evaluate(folder, step=step)
    with text_flags():
        result, notes = evaluate(decoder, tokenizer, text, bos=not no_bos, template=template)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        print_json(asdict(result))
        return
    rows = {
        "loss": f"{result.loss:.4f} nats a token",
        "perplexity": f"{result.perplexity:.4g}",
        "bits/byte": "unknown: these tokens stand for no text"
        if result.bits_per_byte is None
        else f"{result.bits_per_byte:.4f}",
        "tokens": f"{result.tokens:,}",
        "bytes": f"{result.bytes:,}",
    }
    for name, value in rows.items():
        click.echo(f"{name:<11}{value}")


def _validation(folder: Path) -> Path:
    """The prepared folder of a run. Raises UserError for anything that has none."""
    if not (folder / "plan.json").is_file():
        remedy = "name a text: --data PATH"
        raise UserError("this is no run with a text of its own", where=str(folder), remedy=remedy, code=2)
    from bloomery.plan.store import read_plan

    return read_plan(folder / "plan.json").data.prepared
