"""`bloomery export MODEL --to hf --out PATH`: the model in the layout of other programs."""

from pathlib import Path

import click

from bloomery.cli.common import model_path
from bloomery.units import format_bytes


@click.command()
@click.argument("model")
@click.option("--to", "layout", type=click.Choice(["hf"]), required=True, help="hf: for transformers, vLLM and kin.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder that does not exist yet.")
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@click.option("--verify/--no-verify", default=True, help="Read the copy back, compare it and run it.")
def command(model: str, layout: str, out: Path, step: str, verify: bool) -> None:
    """Write MODEL (a run, or a folder in Hugging Face's layout) in the layout of other programs.

    Example: bloomery export last --to hf --out my-model
    """
    assert layout == "hf"
    source = model_path(model)
    from bloomery.export.hf import export
    from bloomery.train.model_folder import model_folder

    done = export(model_folder(source, step), out, verify=verify)
    for proof in done.proofs:
        click.echo(f"verified   {proof}", err=True)
    click.echo(f"export     {done.folder} ({format_bytes(done.bytes)})")
