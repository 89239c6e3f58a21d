"""`bloomery generate MODEL`: text from a prompt, a file of prompts, or the rows of a dataset"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from bloomery.runs.chosen_model import chosen_use, model_path

if TYPE_CHECKING:
    from bloomery.data.examples import Example
    from bloomery.infer.answer_files import Shard
    from bloomery.infer.generate import Writer
    from bloomery.infer.picture_prompts import Eyes

Json = dict[str, Any]

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
    _refuse_combinations(
        data,
        out,
        has_prompts=prompt is not None or prompts is not None or bool(images),
        is_printed=as_json or jsonl,
        shard=shard,
        top_scores=top_scores,
        stop=stop,
    )
    folder = model_path(model)
    draft_path = draft_folder(prompt_lookup, draft)
    use = chosen_use(devices, quantize)
    from bloomery.infer.answer_files import Shard, shard_of
    from bloomery.infer.dataset_answers import printed_answers
    from bloomery.infer.dataset_prompts import dataset_prompts
    from bloomery.infer.generate import Speed, load_files, writer
    from bloomery.infer.held_model import held_model
    from bloomery.infer.picture_prompts import Eyes, picture_source, seeing_source
    from bloomery.infer.sampling import Sampling
    from bloomery.infer.speculation import speculation_of

    part = Shard(0, 1) if shard is None else shard_of(shard)
    with ExitStack() as stack:
        files = stack.enter_context(held_model(folder, step))
        source = seeing_source(files) if images else picture_source(files)
        decoder, tokenizer = load_files(files, where=str(folder), use=use, on_load=loading)
        # What reads pictures is read from the files with the first of them; all else is in memory now.
        if source is None:
            stack.close()
        speculation = speculation_of(
            decoder, tokenizer, lookup=prompt_lookup, draft=draft_path, use=use, on_load=loading
        )
        eyes = None if source is None else Eyes(decoder, files, source)
        speed = Speed(speculation)
        is_chat = chat or data is not None or bool(images)
        generator = stack.enter_context(
            writer(
                decoder,
                tokenizer,
                Sampling(**settings),
                stop,
                chat=is_chat,
                speed=speed,
                schema=schema,
                pictures=eyes.encoder if eyes is not None and is_chat else None,
            )
        )
        if out is not None:
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
            _write_answers(generator, data, part, out, begun_with, top=top_scores)
        elif data is not None:
            answers = printed_answers(generator, dataset_prompts(data), eyes)
            _print_answers(answers, as_json=as_json, jsonl=jsonl, prompt_end="\n")
        else:
            prompt_end = "\n" if is_chat else ""
            inputs = texts if eyes is None else _with_images(texts, images, eyes)
            if len(texts) == 1 and not (as_json or jsonl):
                _print_pieces(texts[0] + prompt_end, generator.pieces(inputs[0]))
            else:
                completions = zip(texts, generator.complete(inputs), strict=True)
                answers = ({"prompt": text, "text": answer} for text, answer in completions)
                _print_answers(answers, as_json=as_json, jsonl=jsonl, prompt_end=prompt_end)
    echo(f"speed      {speed}", err=True)


def _with_images(
    texts: Sequence[str], images: Sequence[Path], eyes: "Eyes"
) -> "Sequence[str] | Sequence[Example]":
    """The prompts with all images before each. Raises UserError for a file that is no picture."""
    from bloomery.data.examples import Example, Message, with_pictures_before

    if not images:
        return texts
    references = [eyes.reference(path) for path in images]
    turns = [with_pictures_before(Message("user", text), references) for text in texts]
    return [Example("", "prompt", (turn,), ()) for turn in turns]


def _write_answers(
    generator: "Writer",
    data: Path,
    part: "Shard",
    out: Path,
    begun_with: Json,
    *,
    top: int | None,
) -> None:
    """Adds to the file `out` the answers to a part of the rows that it does not have yet.

    `begun_with`: what has to be as it was when the file began. `top`: so many of the likeliest tokens at each token of
    an answer are written, too. Raises UserError.
    """
    from bloomery.data.top_scores import ScoresHeader
    from bloomery.infer.answer_files import answer_file
    from bloomery.infer.dataset_answers import add_answers, add_scored_answers
    from bloomery.infer.dataset_prompts import dataset_prompts

    header = None
    if top is not None:
        vocab_size = generator.decoder.lm_head.out_features
        header = ScoresHeader(min(top, vocab_size), vocab_size, generator.tokenizer.hash)
        begun_with = {**begun_with, "top_scores": header.top}
        size = format_bytes(header.token_bytes)
        echo(f"scores     {header.top:,} of each token: {size} per token of an answer", err=True)
    with answer_file(out, begun_with, header) as file:
        prompts = islice(part.of(dataset_prompts(data)), file.num_rows, None)
        if header is None:
            add_answers(file, generator, prompts)
        else:
            add_scored_answers(file, generator, prompts, header.top)


def _print_answers(answers: Iterator[Json], *, as_json: bool, jsonl: bool, prompt_end: str) -> None:
    """One JSON document of all, a line of JSON each, or prompts and texts for a reader."""
    if as_json:
        print_json({"results": list(answers)})
        return
    if jsonl:
        for answer in answers:
            click.echo(json.dumps(answer, ensure_ascii=False))
            sys.stdout.flush()
        return
    printable = _printable()
    for index, answer in enumerate(answers):
        rule = "\n" + "-" * 40 + "\n" if index else ""
        click.echo(rule + printable(answer["prompt"] + prompt_end) + printable(answer["text"]))


def _print_pieces(prompt: str, pieces: Iterator[str]) -> None:
    """A single prompt and its completion, each piece as it is decoded."""
    printable = _printable()
    click.echo(printable(prompt), nl=False)
    for piece in pieces:
        click.echo(printable(piece), nl=False)
        sys.stdout.flush()
    click.echo()


def _printable() -> Callable[[str], str]:
    """A terminal gets no control characters; a file gets every character."""
    return harmless if sys.stdout.isatty() else str


def _refuse_combinations(
    data: Path | None,
    out: Path | None,
    *,
    has_prompts: bool,
    is_printed: bool,
    shard: str | None,
    top_scores: int | None,
    stop: tuple[str, ...],
) -> None:
    """Raises UserError (code 2) for options that exclude or need each other.

    `has_prompts`: a prompt or an image is given beside the dataset. `is_printed`: the answers are to be printed as
    JSON.
    """
    if data is not None and has_prompts:
        problem = "--data has its own prompts and images"
        raise UserError(
            problem, where="--data", fix="remove --prompt, --prompts and --image", code=2
        )
    if out is not None and (data is None or is_printed):
        problem = "--out writes the answers to the rows of --data, in place of printing them"
        raise UserError(problem, where="--out", fix="add --data, remove --json and --jsonl", code=2)
    if shard is not None and out is None:
        problem = "--shard is a part of the rows that --out writes"
        raise UserError(problem, where="--shard", fix="add --out FILE", code=2)
    if top_scores is not None and (out is None or stop):
        problem = "--top-scores writes token ids and scores beside the answers of --out, which end tokens alone end"
        raise UserError(problem, where="--top-scores", fix="add --out FILE, remove --stop", code=2)


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
