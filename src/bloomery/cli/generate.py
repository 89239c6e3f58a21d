"""`bloomery generate MODEL`, `bloomery serve MODEL ...`, and the sampling settings of all commands

Sampling settings are command-line options, and `/set NAME VALUE` in a chat.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

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
    text_flags,
)
from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.text import did_you_mean, harmless
from bloomery.core.units import MIB, format_bytes
from bloomery.runs.folder import chosen_use, model_path

F = TypeVar("F", bound=Callable[..., Any])
Value = int | float | None

# name -> (type, default, help)
SETTINGS: dict[str, tuple[click.ParamType[Any], Value, str | None]] = {
    "max_new_tokens": (click.IntRange(1), 200, "Generate at most N tokens."),
    "temperature": (click.FloatRange(0.0), 0.8, "Set the sampling temperature; 0 is greedy."),
    "top_k": (click.IntRange(1), None, "Sample from the K most likely tokens."),
    "top_p": (
        click.FloatRange(0.0, 1.0, min_open=True),
        0.95,
        "Sample from this probability mass.",
    ),
    "min_p": (click.FloatRange(0.0, 1.0), 0.0, "Drop tokens below P times the most likely."),
    "repetition_penalty": (
        click.FloatRange(0.01, 100.0),
        1.0,
        "Divide the logits of repeated tokens by P.",
    ),
    "seed": (click.IntRange(0, 2**63 - 1), 0, "Seed the random generator."),
}


def sampling_options(function: F) -> F:
    """Click options for every setting, passed on by their names."""
    for name, (kind, default, line) in reversed(SETTINGS.items()):
        flag = f"--{name.replace('_', '-')}"
        function = click.option(
            flag, type=kind, default=default, show_default=default is not None, help=line
        )(function)
    return function


def default_options(function: F) -> F:
    """The same, but for `max_new_tokens`, for requests that leave a setting out; None where it is not given."""
    for name, (kind, _, line) in reversed(SETTINGS.items()):
        if name != "max_new_tokens":
            flag = f"--{name.replace('_', '-')}"
            function = click.option(flag, type=kind, help=line)(function)
    return function


def speculation_options(function: F) -> F:
    """`prompt_lookup` and `draft`."""
    function = click.option(
        "--draft", metavar="MODEL", help="Speculate with this smaller model of the same vocabulary."
    )(function)
    lookup = "Speculate with N tokens that followed the same words."
    return click.option("--prompt-lookup", type=click.IntRange(1, 31), metavar="N", help=lookup)(
        function
    )


def draft_folder(prompt_lookup: int | None, draft: str | None) -> Path | None:
    """The folder of `--draft`. Raises UserError where it is not a model, or with `--prompt-lookup`."""
    if prompt_lookup is not None and draft is not None:
        problem = "prompt lookup and a draft model exclude each other"
        raise UserError(problem, where="--draft", fix="remove --prompt-lookup or --draft", code=2)
    return None if draft is None else model_path(draft)


def finite(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings unchanged. Raises UserError for NaN and infinity."""
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            where = f"--{name.replace('_', '-')}"
            raise UserError(
                f"not a finite number: {value}", where=where, fix="use a finite number", code=2
            )
    return settings


def setting(words: str) -> tuple[str, Value]:
    """Name and value of "temperature 0.7", also with `=` or with an option's name. Raises UserError."""
    name, _, text = words.replace("=", " ", 1).strip().partition(" ")
    name = name.lstrip("-").replace("-", "_").lower()
    text = text.strip()
    if name not in SETTINGS:
        known = did_you_mean(name, SETTINGS, f"settings: {', '.join(SETTINGS)}")
        raise UserError(f"no such setting: {name[:40]!r}", where="/set", fix=known, code=2)
    kind, default, _ = SETTINGS[name]
    if default is None and text.lower() in ("", "off", "none"):
        return name, None
    try:
        value: Value = kind.convert(text, None, None)
    except click.BadParameter as error:
        problem = (
            f"invalid {name}: {error.message.rstrip('.')}" if text else f"missing value of {name}"
        )
        raise UserError(
            problem, where="/set", fix=f"for example: /set {name} {default or 40}", code=2
        ) from error
    return name, finite({name: value})[name]


MOST_PROMPTS = 16 * MIB  # of a file
_LONGEST_PROMPT = 4 * MIB  # of standard input


@click.command()
@click.argument("model")
@click.option("--prompt", metavar="TEXT", help="Complete this prompt.")
@click.option(
    "--prompts", metavar="FILE", type=click.Path(path_type=Path), help="Complete each line of FILE."
)
@sampling_options
@click.option("--chat", is_flag=True, help="Format each prompt with the chat template.")
@speculation_options
@click.option(
    "--json-schema",
    "schema",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Generate JSON that follows this schema.",
)
@click.option("--jsonl", is_flag=True, help="Print one JSON object per prompt and line.")
@click.option(
    "--stop", metavar="TEXT", multiple=True, help="Stop before this text; can be repeated."
)
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
    folder = model_path(model)
    drafts = draft_folder(prompt_lookup, draft)
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.model.decoding import Sampling
    from bloomery.runs.generate import Speed, load_model, speculation_of, writer

    decoder, tokenizer = load_model(folder, step=step, use=use, on_load=loading)
    safe = harmless if sys.stdout.isatty() else str  # a file gets every character
    speed = Speed(
        speculation_of(
            decoder, tokenizer, lookup=prompt_lookup, draft=drafts, use=use, on_load=loading
        )
    )
    with writer(
        decoder, tokenizer, Sampling(**settings), stop, chat=chat, speed=speed, schema=asked
    ) as write:
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
        raise UserError(
            "a JSON schema is an object",
            where=str(path),
            fix='for example {"type": "object"}',
            code=2,
        )
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
            raise UserError(
                "the prompt is not UTF-8", where="standard input", fix=fix, code=2
            ) from error
    if (prompt is None) == (prompts is None):
        problem = "expected either --prompt or --prompts"
        fix = 'add --prompt "...", or pipe in text'
        raise UserError(problem, where="`bloomery generate`", fix=fix, code=2)
    if prompt is not None:
        refuse_undecoded(prompt)
        return [prompt]
    assert prompts is not None
    try:
        text = read_input(prompts, MOST_PROMPTS, pipes=True, code=2).decode("utf-8")
    except UnicodeDecodeError as error:
        fix = "use a text file in UTF-8"
        raise UserError(
            f"cannot read the prompts: {error}", where=str(prompts), fix=fix, code=2
        ) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UserError(
            "the file has no prompts", where=str(prompts), fix="write one prompt per line", code=2
        )
    return lines


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL ...")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="Serve this LoRA adapter, too; can be repeated.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Listen on this port.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--template", help="Chat template: chatml, llama2, llama3, qwen, ... or a file.")
@click.option(
    "--max-requests",
    "slots",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Decode this many completions at once.",
)
@click.option(
    "--max-queue",
    "queue",
    type=click.IntRange(0, 100_000),
    default=64,
    show_default=True,
    help="Let this many completions wait.",
)
@click.option(
    "--max-context",
    "context",
    type=click.IntRange(2),
    help="Limit a request to N tokens (default: the model's).",
)
@click.option(
    "--max-new-tokens",
    "new_tokens",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Limit a completion to N tokens.",
)
@click.option(
    "--max-seconds",
    "seconds",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Limit a request's time, waiting included.",
)
@click.option(
    "--max-body",
    "body_bytes",
    type=click.IntRange(1),
    default=2**21,
    show_default=True,
    help="Limit a request's size in bytes.",
)
@step_option
@devices_option
@quantize_option
@default_options
def serve_command(
    models: tuple[str, ...],
    adapters: tuple[str, ...],
    host: str,
    port: int,
    show: bool,
    template: str | None,
    slots: int,
    queue: int,
    context: int | None,
    new_tokens: int,
    seconds: float,
    body_bytes: int,
    step: str,
    devices: str,
    quantize: str | None,
    **defaults: Any,
) -> None:
    """Serve models with OpenAI's API, and a page to try them, until Ctrl+C.

    RUN@STEP serves that checkpoint. For other hosts than 127.0.0.1, set BLOOMERY_SERVE_TOKEN.

    Example: bloomery serve last --open
    """
    places = [_placed(name, step) for name in models]  # all are found before one is loaded
    pairs = dict(_pair(word) for word in adapters)
    if pairs and len(models) > 1:
        raise UserError("adapters need one base", where="--adapter", fix="name one MODEL", code=2)
    folders = {name: model_path(path) for name, path in pairs.items()}
    from bloomery.serve.address import bound, token_for

    token = token_for(host, os.environ)
    if not math.isfinite(seconds):
        problem = f"--max-seconds is {seconds}"
        fix = "pass a number of seconds"
        raise UserError(problem, where="--max-seconds", fix=fix, code=2)
    # A taken port is reported before a model is loaded, and before torch is imported.
    with bound(host, port) as listener, ExitStack() as stack, text_flags():
        use = chosen_use(devices, quantize)
        from bloomery.serve.limits import Limits
        from bloomery.serve.listen import serve
        from bloomery.serve.served import load_served

        limits = Limits(
            slots=slots,
            context=context,
            new_tokens=new_tokens,
            queue=queue,
            seconds=seconds,
            body_bytes=body_bytes,
        )
        served = [
            load_served(
                folder,
                name,
                limits,
                stack,
                step=at,
                use=use,
                template=template,
                adapters=folders,
                parts=len(places),
                on_load=loading,
            )
            for folder, name, at in places
        ]
        names = [model.name for model in served] + list(pairs)
        if len(set(names)) < len(names):
            raise UserError(
                "two models have one name", where=", ".join(names), fix="rename a folder", code=2
            )
        echo("models     " + ", ".join(names), err=True)

        def ready(url: str) -> None:
            echo(f"serving    {url}  (API: {url}v1, Ctrl+C ends it)", err=True)

        given = {name: value for name, value in finite(defaults).items() if value is not None}
        serve(
            served,
            limits,
            listener,
            host=host,
            token=token,
            on_ready=ready,
            show=show,
            defaults=given,
        )
    echo("stopped", err=True)


def _placed(model: str, step: str) -> tuple[Path, str, str]:
    """The folder of MODEL or RUN@STEP, its name in the API and the checkpoint."""
    run, at, number = model.rpartition("@")
    if at and not Path(model).exists() and (number in ("best", "last") or number.isdecimal()):
        folder = model_path(run)
        return folder, f"{folder.resolve().name}@{number}", number
    folder = model_path(model)
    return folder, folder.resolve().name, step


def _pair(word: str) -> tuple[str, str]:
    name, sign, path = word.partition("=")
    if not (name and sign and path):
        raise UserError(
            f"expected NAME=PATH: {word!r}",
            where="--adapter",
            fix="--adapter poet=runs/poet",
            code=2,
        )
    return name, path
