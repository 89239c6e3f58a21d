"""`bloomery generate MODEL`, `bloomery serve MODEL ...`, and the sampling settings of all commands

Sampling settings are command-line options, and `/set NAME VALUE` in a chat.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
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
from bloomery.cli.tools import episodes_of, tools_options
from bloomery.core.child import die_with_parent
from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.text import did_you_mean, harmless
from bloomery.core.units import MIB, format_bytes
from bloomery.runs.chosen_model import chosen_use, model_path

F = TypeVar("F", bound=Callable[..., Any])
Value = int | float | None
Json = dict[str, Any]

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
    for name, (value_type, default, help_text) in reversed(SETTINGS.items()):
        option = click.option(
            _flag(name),
            type=value_type,
            default=default,
            show_default=default is not None,
            help=help_text,
        )
        function = option(function)
    return function


def _flag(name: str) -> str:
    """The command-line option of a setting."""
    return f"--{name.replace('_', '-')}"


def default_options(function: F) -> F:
    """Click options for the defaults of requests that leave a setting out: those of `sampling_options` without
    `max_new_tokens`, and None where an option is not given.
    """
    for name, (value_type, _, help_text) in reversed(SETTINGS.items()):
        if name != "max_new_tokens":
            function = click.option(_flag(name), type=value_type, help=help_text)(function)
    return function


def speculation_options(function: F) -> F:
    """The click options `prompt_lookup: int | None` and `draft: str | None`."""
    function = click.option(
        "--draft", metavar="MODEL", help="Speculate with this smaller model of the same vocabulary."
    )(function)
    line = "Speculate with N tokens that followed the same words."
    return click.option("--prompt-lookup", type=click.IntRange(1, 31), metavar="N", help=line)(
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
            problem = f"not a finite number: {value}"
            raise UserError(problem, where=_flag(name), fix="use a finite number", code=2)
    return settings


def setting(text: str) -> tuple[str, Value]:
    """Name and value of "temperature 0.7", also with `=` or with an option's name. Raises UserError."""
    typed_name, _, typed_value = text.replace("=", " ", 1).strip().partition(" ")
    typed_value = typed_value.strip()
    name = typed_name.lstrip("-").replace("-", "_").lower()
    if name not in SETTINGS:
        fix = did_you_mean(name, SETTINGS, f"settings: {', '.join(SETTINGS)}")
        raise UserError(f"no such setting: {name[:40]!r}", where="/set", fix=fix, code=2)

    # Only settings that are off by default can be switched off.
    value_type, default, _ = SETTINGS[name]
    if default is None and typed_value.lower() in ("", "off", "none"):
        return name, None
    try:
        value: Value = value_type.convert(typed_value, None, None)
    except click.BadParameter as error:
        problem = f"missing value of {name}"
        if typed_value:
            problem = f"invalid {name}: {error.message.rstrip('.')}"
        fix = f"for example: /set {name} {default or 40}"
        raise UserError(problem, where="/set", fix=fix, code=2) from error
    return name, finite({name: value})[name]


_ROWS_AT_ONCE = 32  # of a dataset
_MAX_FILE_BYTES = 16 * MIB  # of prompts, or of a JSON schema
_MAX_STDIN_BYTES = 4 * MIB


@click.command()
@click.argument("model")
@click.option("--prompt", metavar="TEXT", help="Complete this prompt.")
@click.option(
    "--prompts", metavar="FILE", type=click.Path(path_type=Path), help="Complete each line of FILE."
)
@click.option(
    "--data",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Answer the rows of a dataset, with their images.",
)
@click.option(
    "--image",
    "images",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Put an image before each prompt; can be repeated.",
)
@sampling_options
@click.option("--chat", is_flag=True, help="Format each prompt with the chat template.")
@speculation_options
@click.option(
    "--json-schema",
    "schema_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Generate JSON that follows this schema.",
)
@click.option("--jsonl", is_flag=True, help="Print one JSON object per prompt and line.")
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --data: write a dataset of answers, or continue it.",
)
@click.option("--shard", metavar="I/N", help="With --out: answer part I of N of the rows.")
@click.option(
    "--top-scores",
    metavar="K",
    type=click.IntRange(min=1),
    help="With --out: write the K likeliest tokens of each.",
)
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
    data: Path | None,
    images: tuple[Path, ...],
    chat: bool,
    prompt_lookup: int | None,
    draft: str | None,
    schema_path: Path | None,
    jsonl: bool,
    out: Path | None,
    shard: str | None,
    top_scores: int | None,
    stop: tuple[str, ...],
    step: str,
    devices: str,
    quantize: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Generate text from a prompt, a file of prompts, or standard input.

    Up to 8 prompts of a file decode together; each text is the same as alone. --data and --image use the chat template.

    Example: bloomery generate last --prompt "func main() {" --max-new-tokens 100
    """
    # Everything that the user can have mistyped is checked before torch is imported.
    finite(settings)
    schema = None if schema_path is None else _schema(schema_path)
    texts = [] if data is not None else _prompts(prompt, prompts)
    if data is not None and (prompt is not None or prompts is not None or images):
        problem = "--data has its own prompts and images"
        raise UserError(
            problem, where="--data", fix="remove --prompt, --prompts and --image", code=2
        )
    if out is not None and (data is None or as_json or jsonl):
        problem = "--out writes the answers to the rows of --data, in place of printing them"
        raise UserError(problem, where="--out", fix="add --data, remove --json and --jsonl", code=2)
    if shard is not None and out is None:
        problem = "--shard is a part of the rows that --out writes"
        raise UserError(problem, where="--shard", fix="add --out FILE", code=2)
    if top_scores is not None and (out is None or stop):
        problem = "--top-scores writes token ids and scores beside the answers of --out, which end tokens alone end"
        raise UserError(problem, where="--top-scores", fix="add --out FILE, remove --stop", code=2)
    folder = model_path(model)
    draft_path = draft_folder(prompt_lookup, draft)
    use = chosen_use(devices, quantize)
    from bloomery.data.examples import Example, Message, num_pictures, with_pictures_before
    from bloomery.data.top_scores import ScoresHeader
    from bloomery.infer.answer_files import Shard, answer_file, shard_of, training_row
    from bloomery.infer.dataset_prompts import dataset_prompts
    from bloomery.infer.generate import Speed, load_model, writer
    from bloomery.infer.model_folder import find_model
    from bloomery.infer.picture_prompts import Eyes, picture_source, seeing_source
    from bloomery.infer.sampling import Sampling
    from bloomery.infer.speculation import speculation_of
    from bloomery.infer.top_scores import top_scores as answer_scores

    part = Shard(0, 1) if shard is None else shard_of(shard)
    chat = chat or data is not None or bool(images)
    files = find_model(folder, step)
    source = seeing_source(files) if images else picture_source(files)
    decoder, tokenizer = load_model(folder, step=step, use=use, on_load=loading)
    speculation = speculation_of(
        decoder, tokenizer, lookup=prompt_lookup, draft=draft_path, use=use, on_load=loading
    )
    speed = Speed(speculation)
    eyes = None if source is None else Eyes(decoder, files, source)
    encoder = None if eyes is None else eyes.encoder

    # A terminal gets no control characters; a file gets every character. JSON, a file of prompts and a dataset decode
    # in batches, a single prompt is printed as it is decoded.
    printable = harmless if sys.stdout.isatty() else str
    prompt_end = "\n" if chat else ""
    sampling = Sampling(**settings)
    with writer(
        decoder,
        tokenizer,
        sampling,
        stop,
        chat=chat,
        speed=speed,
        schema=schema,
        pictures=encoder if chat else None,
    ) as generator:

        def answered() -> Iterator[Json]:
            """What is printed of each prompt."""
            if data is None:
                for text, completion in zip(texts, generator.complete(asked), strict=True):
                    yield {"prompt": text, "text": completion}
                return
            rows = dataset_prompts(data)
            # Pictures take memory until their prompt has been read.
            while batch := list(islice(rows, _ROWS_AT_ONCE)):
                if eyes is not None and any(num_pictures(row.example) for row in batch):
                    eyes.open()
                completions = generator.complete([row.example for row in batch])
                for row, completion in zip(batch, completions, strict=True):
                    answer = {} if row.answer is None else {"answer": row.answer}
                    place = {"row": row.example.source, "prompt": row.text}
                    yield {**place, **answer, "text": completion}

        def write(path: Path) -> None:
            """Adds the answers that the file does not have yet."""
            assert data is not None
            begun_with = {
                "model": str(files.weights.resolve()),
                "data": str(data.resolve()),
                "shard": f"{part.part}/{part.num_parts}",
                "stop": list(stop),
                "schema": schema,
                "quantize": quantize,
                **settings,
            }
            if top_scores is not None:
                write_scored(path, top_scores, begun_with)
                return
            with answer_file(path, begun_with) as answers:
                rows = islice(part.of(dataset_prompts(data)), answers.num_rows, None)
                while batch := list(islice(rows, _ROWS_AT_ONCE)):
                    completions = generator.complete([row.example for row in batch])
                    for row, completion in zip(batch, completions, strict=True):
                        answers.add(training_row(row.example, completion))

        def write_scored(path: Path, top: int, begun_with: Json) -> None:
            """The same as token ids, each answer with the likeliest tokens at each of its own."""
            assert data is not None
            vocab_size = decoder.lm_head.out_features
            header = ScoresHeader(min(top, vocab_size), vocab_size, tokenizer.hash)
            begun_with["top_scores"] = header.top
            size = format_bytes(header.token_bytes)
            echo(
                f"scores     {header.top:,} of each token: {size} per token of an answer", err=True
            )
            with answer_file(path, begun_with, header) as answers:
                rows = islice(part.of(dataset_prompts(data)), answers.num_rows, None)
                while batch := list(islice(rows, _ROWS_AT_ONCE)):
                    for row in batch:
                        training_row(row.example, "")  # raises UserError for pictures
                    for prompt_ids, answer in generator.answers([row.example for row in batch]):
                        ends = [] if not answer.is_ended else [generator.end_id]
                        answer_ids = [*answer.ids, *(end for end in ends if end is not None)]
                        scores = answer_scores(decoder, prompt_ids, answer_ids, header.top)
                        answers.add_scored(prompt_ids, answer_ids, *scores)

        asked: list[Any] = list(texts)
        if images and eyes is not None:
            references = [eyes.reference(path) for path in images]
            turns = [with_pictures_before(Message("user", text), references) for text in texts]
            asked = [Example("", "prompt", (turn,), ()) for turn in turns]
        if out is not None:
            write(out)
        elif as_json:
            print_json({"results": list(answered())})
        elif jsonl:
            for result in answered():
                click.echo(json.dumps(result, ensure_ascii=False))
                sys.stdout.flush()
        elif len(texts) == 1:
            click.echo(printable(texts[0] + prompt_end), nl=False)
            for piece in generator.pieces(asked[0]):
                click.echo(printable(piece), nl=False)
                sys.stdout.flush()
            click.echo()
        else:
            for index, result in enumerate(answered()):
                rule = "\n" + "-" * 40 + "\n" if index else ""
                click.echo(
                    rule + printable(result["prompt"] + prompt_end) + printable(result["text"])
                )
    echo(f"speed      {speed}", err=True)


def _schema(path: Path) -> dict[str, Any]:
    """The JSON schema of a file. Raises UserError."""
    try:
        schema = json.loads(read_input(path, _MAX_FILE_BYTES, pipes=True, code=2))
    except (ValueError, RecursionError) as error:
        fix = "write a JSON schema"
        raise UserError(f"not JSON: {error}", where=str(path), fix=fix, code=2) from error
    if not isinstance(schema, dict):
        fix = 'for example {"type": "object"}'
        raise UserError("a JSON schema is an object", where=str(path), fix=fix, code=2)
    return schema


def _prompts(prompt: str | None, prompts: Path | None) -> list[str]:
    """The text of --prompt, the lines of --prompts that are not blank, or the text on standard input.

    Raises UserError (code 2).
    """
    # A pipe is read where no option names a prompt.
    single_prompt = prompt
    if prompt is None and prompts is None and sys.stdin is not None and not sys.stdin.isatty():
        data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
        if len(data) > _MAX_STDIN_BYTES:
            problem = f"the prompt is longer than {format_bytes(_MAX_STDIN_BYTES)}"
            raise UserError(problem, where="standard input", fix="pipe in a shorter prompt", code=2)
        try:
            single_prompt = data.decode("utf-8").removesuffix("\n") or None
        except UnicodeDecodeError as error:
            problem = "the prompt is not UTF-8"
            fix = "convert it to UTF-8"
            raise UserError(problem, where="standard input", fix=fix, code=2) from error
    if (single_prompt is None) == (prompts is None):
        problem = "expected either --prompt or --prompts"
        fix = 'add --prompt "...", or pipe in text'
        raise UserError(problem, where="`bloomery generate`", fix=fix, code=2)
    if single_prompt is not None:
        refuse_undecoded(single_prompt)
        return [single_prompt]

    # A file has one prompt per line.
    assert prompts is not None
    try:
        text = read_input(prompts, _MAX_FILE_BYTES, pipes=True, code=2).decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"cannot read the prompts: {error}"
        fix = "use a text file in UTF-8"
        raise UserError(problem, where=str(prompts), fix=fix, code=2) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        fix = "write one prompt per line"
        raise UserError("the file has no prompts", where=str(prompts), fix=fix, code=2)
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
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser.")
@click.option("--parent", type=int, hidden=True)  # studio: the model does not outlive it
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
    help="Limit a request's size in bytes [default: 2 MiB; 32 MiB with images].",
)
@click.option(
    "--max-images",
    "pictures",
    type=click.IntRange(0, 1000),
    default=16,
    show_default=True,
    help="Limit a request's images; 0: none are read.",
)
@click.option(
    "--allowed-local-media-path",
    "media_folder",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Let requests name image files in this folder.",
)
@tools_options
@step_option
@devices_option
@quantize_option
@default_options
def serve_command(
    models: tuple[str, ...],
    adapters: tuple[str, ...],
    host: str,
    port: int,
    open_browser: bool,
    parent: int | None,
    template: str | None,
    slots: int,
    queue: int,
    context: int | None,
    new_tokens: int,
    seconds: float,
    body_bytes: int | None,
    pictures: int,
    media_folder: Path | None,
    tools: tuple[str, ...],
    environment: str | None,
    max_turns: int,
    step: str,
    devices: str,
    quantize: str | None,
    **defaults: Any,
) -> None:
    """Serve models with OpenAI's API, and a page to try them, until Ctrl+C.

    RUN@STEP serves that checkpoint. For other hosts than 127.0.0.1, set BLOOMERY_SERVE_TOKEN.

    Example: bloomery serve last --open
    """
    if parent is not None:
        die_with_parent(parent)
    # Mistyped names, a missing token and a taken port are reported before torch is imported and a model is loaded.
    sources = [_parse_model(model, step) for model in models]
    adapter_paths = dict(_parse_adapter(adapter) for adapter in adapters)
    if adapter_paths and len(models) > 1:
        raise UserError("adapters need one base", where="--adapter", fix="name one MODEL", code=2)
    adapter_folders = {name: model_path(path) for name, path in adapter_paths.items()}
    from bloomery.serve.address import LOCAL, bound, token_for, url_for_others

    token = token_for(host, os.environ)
    episodes = episodes_of(tools, environment, max_turns)
    if episodes is not None and host not in LOCAL:
        problem = "tools are called for clients of this machine alone"
        fix = "leave out --host, or --tools and --environment"
        raise UserError(problem, where=f"--host {host}", fix=fix, code=2)
    if media_folder is not None and not media_folder.is_dir():
        problem = "there is no such folder"
        fix = "name the folder of the images that requests may name"
        where = f"--allowed-local-media-path {media_folder}"
        raise UserError(problem, where=where, fix=fix, code=2)
    if not math.isfinite(seconds):
        problem = f"--max-seconds is {seconds}"
        fix = "pass a number of seconds"
        raise UserError(problem, where="--max-seconds", fix=fix, code=2)
    with bound(host, port) as listener, ExitStack() as stack, text_flags():
        use = chosen_use(devices, quantize)
        from bloomery.serve.limits import SEEING_BODY, Limits
        from bloomery.serve.listen import serve
        from bloomery.serve.served import load_served

        # Every model decodes with the same limits, and shares the device's memory with the others.
        limits = Limits(
            slots=slots,
            context=context,
            new_tokens=new_tokens,
            queue=queue,
            seconds=seconds,
            pictures=pictures,
            media_folder=media_folder,
        )
        served_models = [
            load_served(
                folder,
                name,
                limits,
                stack,
                step=checkpoint,
                use=use,
                template=template,
                adapters=adapter_folders,
                parts=len(sources),
                on_load=loading,
            )
            for folder, name, checkpoint in sources
        ]

        # A request chooses its model by name.
        names = [model.name for model in served_models] + list(adapter_paths)
        if len(set(names)) < len(names):
            problem = "two models have one name"
            raise UserError(problem, where=", ".join(names), fix="rename a folder", code=2)
        echo("models     " + ", ".join(names), err=True)
        seeing_names = [model.name for model in served_models if model.intake is not None]
        if seeing_names:
            echo("images     " + ", ".join(seeing_names), err=True)
        if body_bytes is None:
            body_bytes = SEEING_BODY if seeing_names else limits.body_bytes
        limits = replace(limits, body_bytes=body_bytes)
        server_tools = None
        if episodes is not None:
            from bloomery.serve.server_tools import ServerTools

            server_tools = ServerTools(episodes, served_models, most=slots)
            stack.callback(server_tools.close)
            names = [tool["function"]["name"] for tool in server_tools.schemas]
            echo(f"tools      {', '.join(names)}  (called by this server)", err=True)
            for note in server_tools.notes:
                echo(f"warning    {note}", err=True)

        def announce(url: str) -> None:
            echo(f"serving    {url}  (API: {url}v1, Ctrl+C ends it)", err=True)
            if (others := url_for_others(url, host)) is not None:
                echo(f"others     {others}  (from another machine)", err=True)

        set_defaults = {
            name: value for name, value in finite(defaults).items() if value is not None
        }
        serve(
            served_models,
            limits,
            listener,
            host=host,
            token=token,
            on_ready=announce,
            show=open_browser,
            defaults=set_defaults,
            tools=server_tools,
        )
    echo("stopped", err=True)


def _parse_model(model: str, step: str) -> tuple[Path, str, str]:
    """The folder of MODEL or RUN@STEP, its name in the API and the checkpoint."""
    run, separator, checkpoint = model.rpartition("@")
    is_checkpoint = checkpoint in ("best", "last") or checkpoint.isdecimal()
    if separator and is_checkpoint and not Path(model).exists():
        folder = model_path(run)
        return folder, f"{folder.resolve().name}@{checkpoint}", checkpoint
    folder = model_path(model)
    return folder, folder.resolve().name, step


def _parse_adapter(argument: str) -> tuple[str, str]:
    """The name and the path in NAME=PATH. Raises UserError (code 2)."""
    name, sign, path = argument.partition("=")
    if not (name and sign and path):
        problem = f"expected NAME=PATH: {argument!r}"
        raise UserError(problem, where="--adapter", fix="--adapter poet=runs/poet", code=2)
    return name, path
