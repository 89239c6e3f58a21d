"""`bloomery merge MODEL MODEL --method linear|slerp|ties|task-arithmetic --out DIR`"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import NewPath, devices_option, numbers, show_export

if TYPE_CHECKING:
    from bloomery.export.merge import Method


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--method", type=click.Choice(["linear", "slerp", "ties", "task-arithmetic"]), default="linear", show_default=True,
    help="How the weights are combined.",
)  # fmt: skip
@click.option("--weights", callback=numbers, metavar="LIST", help="One weight per model [default: 1 each].")
@click.option("--base", metavar="MODEL", help="Their common base model, for ties and task-arithmetic.")
@click.option("--density", type=float, default=0.2, show_default=True, help="Share of changes that ties keeps.")
@click.option("--out", metavar="PATH", type=NewPath(), required=True, help="Write to this new folder.")
@click.option(
    "--type", "dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights [default: as in the first model].",
)  # fmt: skip
@click.option("--verify/--no-verify", default=True, help="Read the merged model back and run it.")
@devices_option
def command(
    models: tuple[str, ...], method: "Method", weights: tuple[float, ...] | None, base: str | None, density: float,
    out: Path, dtype: str | None, verify: bool, devices: str,
) -> None:  # fmt: skip
    """Merge models of one architecture and tokenizer into a new one.

    linear: the weighted mean. slerp: two models along the arc between them, the second one's share being its weight
    over the sum. ties: the base plus the largest changes that agree in sign. task-arithmetic: the base plus the
    weighted changes. Weights are read one tensor at a time and computed in float32.

    Example: bloomery merge model-a model-b --weights 0.7,0.3 --out merged

    Example: bloomery merge model-a model-b --method ties --base original --out merged
    """
    from bloomery.api import merge

    show_export(merge(
        models, out, method=method, weights=weights, base=base, density=density, dtype=dtype, verify=verify,
        device=devices,
    ))  # fmt: skip
