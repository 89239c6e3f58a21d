"""`bloomery export MODEL --to hf|adapter|merged --out PATH`"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import NewPath, devices_option, echo, step_option
from bloomery.core.units import format_bytes

if TYPE_CHECKING:
    from bloomery.api import Layout


@click.command()
@click.argument("model")
@click.option(
    "--to", "layout", type=click.Choice(["hf", "adapter", "merged"]), required=True,
    help="Export the full model, the adapter, or both merged.",
)  # fmt: skip
@click.option("--out", metavar="PATH", type=NewPath(), required=True, help="Write to this new folder.")
@click.option(
    "--type", "dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Store merged weights as [default: as in the base model].",
)  # fmt: skip
@step_option
@click.option("--verify/--no-verify", default=True, help="Read the export back, compare and run it.")
@devices_option
def command(
    model: str, layout: "Layout", out: Path, dtype: str | None, step: str, verify: bool, devices: str
) -> None:  # fmt: skip
    """Export MODEL in Hugging Face format.

    hf: a full model for transformers and vLLM. adapter: an adapter for PEFT. merged: an adapter merged into its base
    model, computed in float32.

    Example: bloomery export last --to hf --out my-model
    """
    from bloomery.api import export

    done = export(model, out, layout=layout, dtype=dtype, step=step, verify=verify, device=devices)
    for proof in done.proofs:
        echo(f"verified   {proof}", err=True)
    echo(f"export     {done.folder} ({format_bytes(done.bytes)})")
