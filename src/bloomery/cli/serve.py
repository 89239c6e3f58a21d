"""`bloomery serve MODEL ...`: an OpenAI-compatible server, with a page to try models by hand"""

import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from bloomery.cli.common import devices_option, echo, loading, quantize_option, step_option, text_flags
from bloomery.cli.generate import default_options, finite
from bloomery.core.errors import UserError
from bloomery.runs.folder import chosen_use, model_path

INSTALL = 'pip install "bloomery[serve]"'


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL ...")
@click.option("--adapter", "adapters", multiple=True, metavar="NAME=PATH",
              help="Serve this LoRA adapter, too; can be repeated.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Listen on this port.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--template", help="Chat template: chatml, llama2, llama3, qwen, ... or a file.")
@click.option("--max-requests", "slots", type=click.IntRange(1, 256), default=8, show_default=True,
              help="Decode this many completions at once.")  # fmt: skip
@click.option("--max-queue", "queue", type=click.IntRange(0, 100_000), default=64, show_default=True,
              help="Let this many completions wait.")  # fmt: skip
@click.option("--max-context", "context", type=click.IntRange(2), default=4096, show_default=True,
              help="Limit prompt and completion to N tokens.")  # fmt: skip
@click.option("--max-new-tokens", "new_tokens", type=click.IntRange(1), default=2048, show_default=True,
              help="Limit a completion to N tokens.")  # fmt: skip
@click.option("--max-seconds", "seconds", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True,
              help="Limit a request's time, waiting included.")  # fmt: skip
@click.option("--max-body", "body_bytes", type=click.IntRange(1), default=2**21, show_default=True,
              help="Limit a request's size in bytes.")  # fmt: skip
@step_option
@devices_option
@quantize_option
@default_options
def command(
    models: tuple[str, ...], adapters: tuple[str, ...], host: str, port: int, show: bool, template: str | None,
    slots: int, queue: int, context: int, new_tokens: int, seconds: float, body_bytes: int, step: str, devices: str,
    quantize: str | None, **defaults: Any,
) -> None:  # fmt: skip
    """Serve models with OpenAI's API, and a page to try them, until Ctrl+C.

    RUN@STEP serves that checkpoint. For other hosts than 127.0.0.1, set BLOOMERY_SERVE_TOKEN.

    Example: bloomery serve last --open
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"{missing[0]} is not installed", where="`bloomery serve`", fix=INSTALL)
    places = [_placed(name, step) for name in models]  # all are found before one is loaded
    pairs = dict(_pair(word) for word in adapters)
    if pairs and len(models) > 1:
        raise UserError("adapters need one base", where="--adapter", fix="name one MODEL", code=2)
    folders = {name: model_path(path) for name, path in pairs.items()}
    use = chosen_use(devices, quantize)  # before torch is imported
    from bloomery.serve.engine import Limits, load_served, serve, token_for

    token = token_for(host, os.environ)
    limits = Limits(slots=slots, context=context, new_tokens=new_tokens, queue=queue, seconds=seconds,
                    body_bytes=body_bytes)  # fmt: skip
    with ExitStack() as stack, text_flags():
        served = [
            load_served(folder, name, limits, stack, step=at, use=use, template=template, adapters=folders,
                        on_load=loading)
            for folder, name, at in places
        ]  # fmt: skip
        names = [model.name for model in served] + list(pairs)
        if len(set(names)) < len(names):
            raise UserError("two models have one name", where=", ".join(names), fix="rename a folder", code=2)
        echo("models     " + ", ".join(names), err=True)

        def ready(url: str) -> None:
            echo(f"serving    {url}  (API: {url}v1, Ctrl+C ends it)", err=True)

        given = {name: value for name, value in finite(defaults).items() if value is not None}
        serve(served, limits, host=host, port=port, token=token, on_ready=ready, show=show, defaults=given)
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
        raise UserError(f"expected NAME=PATH: {word!r}", where="--adapter", fix="--adapter poet=runs/poet", code=2)
    return name, path
