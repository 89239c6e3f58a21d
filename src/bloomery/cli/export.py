"""`bloomery export MODEL --to hf|adapter|merged --out PATH`: the model in the layout of other programs."""

from pathlib import Path

import click

from bloomery.cli.common import NewPath, chosen_use, devices_option, model_path, say
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes

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
def command(model: str, layout: str, out: Path, dtype: str | None, step: str, verify: bool, devices: str) -> None:
    """Write MODEL (a run, a folder in Hugging Face's layout, or BASE+ADAPTER) in the layout of other programs.

    Example: bloomery export last --to hf --out my-model
    """
    if dtype is not None and layout != "merged":
        problem = f"--to {layout} copies the weights as they are"
        raise UserError(problem, where="--type", remedy="leave out --type", code=2)
    source, use = model_path(model), chosen_use(devices)
    from bloomery.export.layouts import export, export_adapter, export_merged
    from bloomery.train.model_folder import find_model

    found = find_model(source, step)
    if layout == "hf":
        done = export(found.weights, out, verify=verify, use=use)
    elif layout == "adapter":
        done = export_adapter(found, out, verify=verify, use=use)
    else:
        done = export_merged(found, out, dtype=dtype, verify=verify, use=use)
    for proof in done.proofs:
        say(f"verified   {proof}", err=True)
    say(f"export     {done.folder} ({format_bytes(done.bytes)})")
