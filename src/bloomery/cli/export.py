"""`bloomery export MODEL --to hf|adapter|merged --out PATH`: the model in the layout of other programs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import NewPath, devices_option, say
from bloomery.core.units import format_bytes

if TYPE_CHECKING:
    from bloomery.api import Layout

LAYOUTS = "hf: for transformers, vLLM and kin; adapter: for PEFT; merged: an adapter and its base as one model."


@click.command()
@click.argument("model")
@click.option("--to", "layout", type=click.Choice(["hf", "adapter", "merged"]), required=True, help=LAYOUTS)
@click.option("--out", type=NewPath(), required=True, help="A folder that does not exist yet.")
@click.option(
    "--type", "dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of merged weights (default: the base's); they are computed in float32.",
)  # fmt: skip
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@click.option("--verify/--no-verify", default=True, help="Read the copy back, compare it and run it.")
@devices_option
def command(
    model: str, layout: "Layout", out: Path, dtype: str | None, step: str, verify: bool, devices: str
) -> None:  # fmt: skip
    """Write MODEL (a run, a folder in Hugging Face's layout, or BASE+ADAPTER) in the layout of other programs.

    Example: bloomery export last --to hf --out my-model
    """
    from bloomery.api import export

    done = export(model, out, layout=layout, dtype=dtype, step=step, verify=verify, device=devices)
    for proof in done.proofs:
        say(f"verified   {proof}", err=True)
    say(f"export     {done.folder} ({format_bytes(done.bytes)})")
