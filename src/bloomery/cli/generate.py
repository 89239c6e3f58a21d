"""`bloomery generate MODEL`: a model continues prompts."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import model_path, print_json
from bloomery.errors import UserError

if TYPE_CHECKING:
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.model.decoder import Decoder
    from bloomery.model.sampling import Sampling


@click.command()
@click.argument("model")
@click.option("--prompt", help="The text that the model goes on with.")
@click.option("--prompts", type=click.Path(path_type=Path), help="A file with a prompt on each line.")
@click.option("--max-tokens", type=click.IntRange(1), default=200, show_default=True)
@click.option("--temperature", type=click.FloatRange(0.0), default=0.8, show_default=True, help="0: the likeliest.")
@click.option("--top-k", type=click.IntRange(1), help="Draw from the k likeliest tokens.")
@click.option("--top-p", type=click.FloatRange(0.0, 1.0, min_open=True), default=0.95, show_default=True)
@click.option("--min-p", type=click.FloatRange(0.0, 1.0), default=0.0, show_default=True)
@click.option("--repetition-penalty", type=click.FloatRange(0.01, 100.0), default=1.0, show_default=True)
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the text.")
def command(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    stop: tuple[str, ...],
    step: str,
    as_json: bool,
    **drawing: Any,
) -> None:
    """Let MODEL (a run, or a folder in Hugging Face's layout) continue a prompt.

    Example: bloomery generate last --prompt "func main() {" --max-tokens 100
    """
    for name, value in drawing.items():
        if isinstance(value, float) and not math.isfinite(value):
            where = f"--{name.replace('_', '-')}"
            raise UserError(f"{value} is no number to draw with", where=where, remedy="write a finite number", code=2)
    asked = _asked(prompt, prompts)
    folder = model_path(model)
    from bloomery.hardware.adopt import adopt

    adopt()  # before torch is imported
    from bloomery.generate import load_model
    from bloomery.model.sampling import Sampling

    decoder, tokenizer = load_model(folder, step=step)
    sampling = Sampling(**drawing)
    if as_json:
        answers = [_answer(decoder, tokenizer, text, sampling, stop) for text in asked]
        print_json({"results": answers})
        return
    for number, text in enumerate(asked):
        if number:
            click.echo("\n" + "-" * 40)
        _stream(decoder, tokenizer, text, sampling, stop)


def _asked(prompt: str | None, prompts: Path | None) -> list[str]:
    if (prompt is None) == (prompts is None):
        problem, remedy = "say either --prompt TEXT or --prompts FILE", 'add --prompt "..."'
        raise UserError(problem, where="`bloomery generate`", remedy=remedy, code=2)
    if prompt is not None:
        if any(0xD800 <= ord(letter) < 0xE000 for letter in prompt):
            problem, remedy = "the prompt is not text in this terminal's encoding", "write it in UTF-8: LANG=C.UTF-8"
            raise UserError(problem, where="--prompt", remedy=remedy, code=2)
        return [prompt]
    assert prompts is not None
    try:
        lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        remedy = "name a text file in UTF-8"
        raise UserError(f"the prompts cannot be read: {error}", where=str(prompts), remedy=remedy, code=2) from error
    if not lines:
        raise UserError("the file holds no prompt", where=str(prompts), remedy="write one on each line", code=2)
    return lines


def _answer(
    decoder: "Decoder", tokenizer: "Tokenizer", prompt: str, sampling: "Sampling", stop: tuple[str, ...]
) -> dict[str, str]:
    from bloomery.generate import generate

    return {"prompt": prompt, "text": "".join(generate(decoder, tokenizer, prompt, sampling, stop))}


def _stream(
    decoder: "Decoder", tokenizer: "Tokenizer", prompt: str, sampling: "Sampling", stop: tuple[str, ...]
) -> None:
    from bloomery.generate import generate

    click.echo(prompt, nl=False)
    for piece in generate(decoder, tokenizer, prompt, sampling, stop):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
