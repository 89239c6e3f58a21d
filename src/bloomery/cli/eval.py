"""`bloomery eval MODEL`: loss on a text, or accuracy of a reward model on preference pairs."""

from dataclasses import asdict
from pathlib import Path

import click

from bloomery.cli.common import (
    data_path,
    devices_option,
    echo,
    json_option,
    loading,
    print_json,
    quantize_option,
    step_option,
    text_flags,
)
from bloomery.core.units import counted


@click.command()
@click.argument("model")
@click.option(
    "--data", metavar="PATH", type=click.Path(path_type=Path), help="Evaluate this file, folder or hub:ORG/NAME."
)
@step_option
@click.option("--no-bos", is_flag=True, help="Add no BOS token; the first token is not scored.")
@click.option("--template", help="Format conversations with this chat template.")
@devices_option
@quantize_option
@json_option
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
    """Compute loss, perplexity and bits per byte of MODEL.

    Without --data, a run is evaluated on its validation set. In conversations, only assistant tokens are scored. A
    reward model is evaluated on preference pairs: accuracy, margin and loss.

    Example: bloomery eval last --data ~/my-texts
    """
    from bloomery.api import evaluate

    with text_flags():
        result = evaluate(
            model, None if data is None else data_path(data), step=step, bos=not no_bos, template=template,
            device=devices, quantize=quantize, on_load=loading, on_note=lambda text: echo(f"note: {text}", err=True),
        )  # fmt: skip
    if as_json:
        print_json(asdict(result))
        return
    from bloomery.runs.evaluate import TextScores

    if isinstance(result, TextScores):
        bits = result.bits_per_byte
        lines = {
            "loss": f"{result.loss:.4f} nats per token",
            "perplexity": f"{result.perplexity:.4g}",
            "bits/byte": "unknown: no scored token has text" if bits is None else f"{bits:.4f}",
            "tokens": f"{result.tokens:,}",
            "bytes": f"{result.bytes:,}",
        }
    else:
        means = f"chosen {result.chosen_reward:.4f}, rejected {result.rejected_reward:.4f}"
        lines = {
            "accuracy": f"{result.accuracy:.1%} of {counted(result.pairs, 'pairs')}",
            "margin": f"{result.margin:.4f} on average: {means}",
            "loss": f"{result.loss:.4f} per pair",
        }
    for name, value in lines.items():
        echo(f"{name:<11}{value}")
