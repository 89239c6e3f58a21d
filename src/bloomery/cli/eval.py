"""`bloomery eval MODEL`: how well a model predicts a text, and a reward model judges pairs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import (
    chosen_use,
    data_path,
    devices_option,
    loading,
    model_path,
    print_json,
    quantize_option,
    say,
    text_flags,
)
from bloomery.core.errors import UserError
from bloomery.core.units import counted

if TYPE_CHECKING:
    from bloomery.runs.evaluate import Evaluation
    from bloomery.train.evaluation.scoring import Judgement


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
    folder = model_path(model)
    text, row = _validation(folder) if data is None else (data_path(data), None)
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.plan.store import read_plan
    from bloomery.runs.evaluate import evaluate, evaluate_as_trained, judge, load_to_evaluate

    decoder, tokenizer = load_to_evaluate(folder, step=step, use=use, tell=loading)
    result: Evaluation | Judgement
    with text_flags():
        if decoder.config.head == "values":
            result, notes = judge(decoder, tokenizer, text, template=template, row=row)
            rows = _judged(result)
        else:
            same = None
            if row is not None and not no_bos and template is None:
                same = evaluate_as_trained(decoder, tokenizer, read_plan(folder / "plan.json"))
            result, notes = same or evaluate(decoder, tokenizer, text, bos=not no_bos, template=template)
            rows = _predicted(result)
            if row is not None and same is None:
                notes.append(
                    f"the run evaluates packed sequences of {row:,} tokens while it trains; here each text is scored"
                    f" whole, with up to {decoder.config.max_positions:,} tokens of context: the two losses differ"
                )
    for note in notes:
        say(f"note: {note}", err=True)
    if as_json:
        print_json(asdict(result))
        return
    for name, value in rows.items():
        say(f"{name:<11}{value}")


def _predicted(result: "Evaluation") -> dict[str, str]:
    return {
        "loss": f"{result.loss:.4f} nats a token",
        "perplexity": f"{result.perplexity:.4g}",
        "bits/byte": "unknown: these tokens stand for no text"
        if result.bits_per_byte is None
        else f"{result.bits_per_byte:.4f}",
        "tokens": f"{result.tokens:,}",
        "bytes": f"{result.bytes:,}",
    }


def _judged(result: "Judgement") -> dict[str, str]:
    pairs = counted(result.pairs, "pairs")
    sides = f"chosen {result.chosen_reward:.4f}, rejected {result.rejected_reward:.4f}"
    return {
        "accuracy": f"{result.accuracy:.1%} of {pairs}: the chosen answer has the higher value",
        "margin": f"{result.margin:.4f} on average: {sides}",
        "loss": f"{result.loss:.4f} a pair",
    }


def _validation(folder: Path) -> tuple[Path, int]:
    """The prepared folder of a run, and how long its rows are. Raises UserError for anything that has none."""
    if not (folder / "plan.json").is_file():
        remedy = "name a text, or pairs for a reward model: --data PATH"
        raise UserError("this is no run with a text of its own", where=str(folder), remedy=remedy, code=2)
    from bloomery.plan.store import read_plan

    data = read_plan(folder / "plan.json").data
    return data.prepared, data.sequence_length
