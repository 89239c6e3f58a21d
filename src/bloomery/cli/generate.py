"""`bloomery generate MODEL`: completions of prompts"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from bloomery.cli.common import (
    devices_option,
    echo,
    json_option,
    loading,
    print_json,
    quantize_option,
    refuse_undecoded,
    step_option,
)
from bloomery.cli.sampling import draft_folder, finite, sampling_options, speculation_options
from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.text import harmless
from bloomery.core.units import MIB, format_bytes
from bloomery.runs.names import chosen_use, model_path

MOST_PROMPTS = 16 * MIB  # of a file
_LONGEST_PROMPT = 4 * MIB  # of standard input


@click.command()
@click.argument("model")
@click.option("--prompt", metavar="TEXT", help="Complete this prompt.")
@click.option("--prompts", metavar="FILE", type=click.Path(path_type=Path), help="Complete each line of FILE.")
@sampling_options
@click.option("--chat", is_flag=True, help="Format each prompt with the chat template.")
@speculation_options
@click.option("--json-schema", "schema", metavar="FILE", type=click.Path(path_type=Path),
              help="Generate JSON that follows this schema.")  # fmt: skip
@click.option("--jsonl", is_flag=True, help="Print one JSON object per prompt and line.")
@click.option("--stop", metavar="TEXT", multiple=True, help="Stop before this text; can be repeated.")
@step_option
@devices_option
@quantize_option
@json_option
def command(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    prompt_lookup: int | None,
    draft: str | None,
    schema: Path | None,
    jsonl: bool,
    stop: tuple[str, ...],
    step: str,
    devices: str,
    quantize: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Generate text from a prompt, a file of prompts, or standard input.

    Up to 8 prompts of a file decode together; each text is the same as alone.

    Example: bloomery generate last --prompt "func main() {" --max-new-tokens 100
    """
    finite(settings)
    asked = None if schema is None else _schema(schema)
    texts = _prompts(prompt, prompts)
    folder, drafts = model_path(model), draft_folder(prompt_lookup, draft)
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.model.sampling import Sampling
    from bloomery.runs.generate import Speed, load_model, speculation_of, writer

    decoder, tokenizer = load_model(folder, step=step, use=use, on_load=loading)
    safe = harmless if sys.stdout.isatty() else str  # a file gets every character
    speed = Speed(speculation_of(decoder, tokenizer, lookup=prompt_lookup, draft=drafts, use=use, on_load=loading))
    with writer(decoder, tokenizer, Sampling(**settings), stop, chat=chat, speed=speed, schema=asked) as write:
        pairs = zip(texts, write.complete(texts), strict=True)
        if as_json:
            print_json({"results": [{"prompt": text, "text": said} for text, said in pairs]})
        elif jsonl:
            for text, said in pairs:
                click.echo(json.dumps({"prompt": text, "text": said}, ensure_ascii=False))
                sys.stdout.flush()
        elif len(texts) == 1:
            click.echo(safe(texts[0] + "\n" if chat else texts[0]), nl=False)
            for piece in write.pieces(texts[0]):
                click.echo(safe(piece), nl=False)
                sys.stdout.flush()
            click.echo()
        else:
            for number, (text, said) in enumerate(pairs):
                rule = "\n" + "-" * 40 + "\n" if number else ""
                click.echo(rule + safe(text + "\n" if chat else text) + safe(said))
    echo(f"speed      {speed}", err=True)


def _schema(path: Path) -> dict[str, Any]:
    """The JSON schema of a file. Raises UserError."""
    try:
        schema = json.loads(read_input(path, MOST_PROMPTS, pipes=True, code=2))
    except (ValueError, RecursionError) as error:
        fix = "write a JSON schema"
        raise UserError(f"not JSON: {error}", where=str(path), fix=fix, code=2) from error
    if not isinstance(schema, dict):
        raise UserError("a JSON schema is an object", where=str(path), fix='for example {"type": "object"}', code=2)
    return schema


def _prompts(prompt: str | None, prompts: Path | None) -> list[str]:
    if prompt is None and prompts is None and sys.stdin is not None and not sys.stdin.isatty():
        data = sys.stdin.buffer.read(_LONGEST_PROMPT + 1)
        if len(data) > _LONGEST_PROMPT:
            problem = f"the prompt is longer than {format_bytes(_LONGEST_PROMPT)}"
            raise UserError(problem, where="standard input", fix="pipe in a shorter prompt", code=2)
        try:
            prompt = data.decode("utf-8").removesuffix("\n") or None
        except UnicodeDecodeError as error:
            fix = "convert it to UTF-8"
            raise UserError("the prompt is not UTF-8", where="standard input", fix=fix, code=2) from error
    if (prompt is None) == (prompts is None):
        problem, fix = "expected either --prompt or --prompts", 'add --prompt "...", or pipe in text'
        raise UserError(problem, where="`bloomery generate`", fix=fix, code=2)
    if prompt is not None:
        refuse_undecoded(prompt)
        return [prompt]
    assert prompts is not None
    try:
        text = read_input(prompts, MOST_PROMPTS, pipes=True, code=2).decode("utf-8")
    except UnicodeDecodeError as error:
        fix = "use a text file in UTF-8"
        raise UserError(f"cannot read the prompts: {error}", where=str(prompts), fix=fix, code=2) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError("the file has no prompts", where=str(prompts), fix="write one prompt per line", code=2)
    return lines
