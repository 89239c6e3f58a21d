"""`bloomery eval MODEL`: how well a model predicts a text, and a reward model judges pairs."""

from dataclasses import asdict
from pathlib import Path

import click

from bloomery.cli.common import data_path, devices_option, loading, print_json, quantize_option, say, text_flags
from bloomery.core.units import counted


@click.command()
@click.argument("model")
@click.option("--data", type=click.Path(path_type=Path), help="A text, data file, folder or hub:ORG/NAME.")
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@click.option("--no-bos", is_flag=True, help="Put no BOS before a text: its first token is then not scored.")
@click.option("--template", help="How conversations are written [default: the tokenizer's own chat template].")
@devices_option
@quantize_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; notes go to stderr.")
def command(
    model: str,
    data: Path | None,
    step: str,
    no_bos: bool,
    template: str | None,
    devices: str,
    quantize: str | None,
    as_json: bool,
) -> None:
    """Loss, perplexity and bits per byte of MODEL (a run, a folder, a Hub id, or BASE+ADAPTER).

    Without --data a run is examined on its validation split. Of conversations only the assistant's turns are scored. A
    reward model is examined on pairs: how often the chosen answer has the higher value, and by how much.

    Example: bloomery eval last --data ~/my-texts
    """
    from bloomery.api import evaluate

    with text_flags():
        result = evaluate(
            model, None if data is None else data_path(data), step=step, bos=not no_bos, template=template,
            device=devices, quantize=quantize, tell=loading, note=lambda text: say(f"note: {text}", err=True),
        )  # fmt: skip
    if as_json:
        print_json(asdict(result))
        return
    from bloomery.runs.evaluate import Evaluation

    if isinstance(result, Evaluation):
        bits = result.bits_per_byte
        rows = {
            "loss": f"{result.loss:.4f} nats per token",
            "perplexity": f"{result.perplexity:.4g}",
            "bits/byte": "unknown: these tokens stand for no text" if bits is None else f"{bits:.4f}",
            "tokens": f"{result.tokens:,}",
            "bytes": f"{result.bytes:,}",
        }
    else:
        pairs = counted(result.pairs, "pairs")
        sides = f"chosen {result.chosen_reward:.4f}, rejected {result.rejected_reward:.4f}"
        rows = {
            "accuracy": f"{result.accuracy:.1%} of {pairs}: the chosen answer has the higher value",
            "margin": f"{result.margin:.4f} on average: {sides}",
            "loss": f"{result.loss:.4f} a pair",
        }
    for name, value in rows.items():
        say(f"{name:<11}{value}")
