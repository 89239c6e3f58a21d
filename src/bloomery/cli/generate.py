"""`bloomery generate MODEL`: a model continues prompts."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import devices_option, loading, print_json, quantize_option, refuse_undecoded
from bloomery.cli.sampling import drawing_options, finite
from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.text import harmless
from bloomery.core.units import MIB, format_bytes
from bloomery.runs.names import chosen_use, model_path

if TYPE_CHECKING:
    pass

MOST_PROMPTS = 16 * MIB  # of a file of them
_LONGEST_PROMPT = 4 * MIB  # of one that is piped in


@click.command()
@click.argument("model")
@click.option("--prompt", help="The text that the model goes on with.")
@click.option("--prompts", type=click.Path(path_type=Path), help="A file with a prompt on each line.")
@drawing_options
@click.option("--chat", is_flag=True, help="Each prompt is a question, put by the model's chat template.")
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
@click.option("--step", default="best", show_default=True, help="A run's checkpoint: best, last or a number.")
@devices_option
@quantize_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the text.")
def command(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    stop: tuple[str, ...],
    step: str,
    devices: str,
    quantize: str | None,
    as_json: bool,
    **drawing: Any,
) -> None:
    """Let MODEL (a run, a folder, a Hub id, or BASE+ADAPTER) continue a prompt, or what is piped in.

    Example: bloomery generate last --prompt "func main() {" --max-tokens 100
    """
    finite(drawing)
    asked = _asked(prompt, prompts)
    folder = model_path(model)
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.model.sampling import Sampling
    from bloomery.runs.generate import load_model, writer

    decoder, tokenizer = load_model(folder, step=step, use=use, tell=loading)
    sampling = Sampling(**drawing)
    with writer(decoder, tokenizer, sampling, stop, chat=chat) as answer:
        if as_json:
            print_json({"results": [{"prompt": text, "text": "".join(answer(text))} for text in asked]})
            return
        for number, text in enumerate(asked):
            if number:
                click.echo("\n" + "-" * 40)
            _stream(text + "\n" if chat else text, answer(text))


def _asked(prompt: str | None, prompts: Path | None) -> list[str]:
    if prompt is None and prompts is None and sys.stdin is not None and not sys.stdin.isatty():
        data = sys.stdin.buffer.read(_LONGEST_PROMPT + 1)  # a pipe, or a file behind `<`, less its last line's end
        if len(data) > _LONGEST_PROMPT:
            problem = f"the prompt is longer than {format_bytes(_LONGEST_PROMPT)}"
            raise UserError(problem, where="standard input", fix="a model reads a few pages: pipe in less", code=2)
        try:
            prompt = data.decode("utf-8").removesuffix("\n") or None
        except UnicodeDecodeError as error:
            raise UserError("the prompt is not UTF-8", where="standard input", fix="convert it", code=2) from error
    if (prompt is None) == (prompts is None):
        problem, fix = "say either --prompt TEXT or --prompts FILE", 'add --prompt "...", or pipe text in'
        raise UserError(problem, where="`bloomery generate`", fix=fix, code=2)
    if prompt is not None:
        refuse_undecoded(prompt)
        return [prompt]
    assert prompts is not None
    try:
        text = read_input(prompts, MOST_PROMPTS, pipes=True, code=2).decode("utf-8")
    except UnicodeDecodeError as error:
        fix = "name a text file in UTF-8"
        raise UserError(f"the prompts cannot be read: {error}", where=str(prompts), fix=fix, code=2) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError("the file holds no prompt", where=str(prompts), fix="write one on each line", code=2)
    return lines


def _stream(prompt: str, pieces: Iterator[str]) -> None:
    safe = harmless if sys.stdout.isatty() else str  # a file gets every character
    click.echo(safe(prompt), nl=False)
    for piece in pieces:
        click.echo(safe(piece), nl=False)
        sys.stdout.flush()
    click.echo()
