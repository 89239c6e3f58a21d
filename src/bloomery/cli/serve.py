"""`bloomery serve MODEL ...`: models over HTTP, as OpenAI does, with a page to try them"""

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import (
    devices_option,
    echo,
    loading,
    quantize_option,
    step_option,
    text_flags,
)
from bloomery.cli.sampling import default_options, finite
from bloomery.cli.tools import episodes_of, tools_options
from bloomery.core.child import die_with_parent
from bloomery.core.errors import UserError
from bloomery.runs.chosen_model import chosen_use, model_path

if TYPE_CHECKING:
    from bloomery.plan.types import EpisodesPlan
    from bloomery.serve.served import Served
    from bloomery.serve.server_tools import ServerTools


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
def command(
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
    adapter_folders = _adapter_folders(adapters, num_models=len(models))
    set_defaults = {name: value for name, value in finite(defaults).items() if value is not None}
    from bloomery.serve.address import bound, token_for

    token = token_for(host, os.environ)
    episodes = episodes_of(tools, environment, max_turns)
    _refuse_settings(host, episodes, media_folder, seconds)
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
        _print_models(served_models, adapter_folders)

        # An image is larger than any text.
        if body_bytes is None:
            sees = any(model.intake is not None for model in served_models)
            body_bytes = SEEING_BODY if sees else limits.body_bytes
        serve(
            served_models,
            replace(limits, body_bytes=body_bytes),
            listener,
            host=host,
            token=token,
            on_ready=partial(_announce, host),
            show=open_browser,
            defaults=set_defaults,
            tools=_server_tools(episodes, served_models, stack, most=slots),
        )
    echo("stopped", err=True)


def _refuse_settings(
    host: str, episodes: "EpisodesPlan | None", media_folder: Path | None, seconds: float
) -> None:
    """Raises UserError (code 2) for tools that other machines could call, for a folder of images that is not there, and
    for seconds without an end.
    """
    from bloomery.serve.address import LOCAL

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


def _print_models(models: "Sequence[Served]", adapters: Iterable[str]) -> None:
    """The names by which requests choose. Raises UserError (code 2) where two are one."""
    names = [*(model.name for model in models), *adapters]
    if len(set(names)) < len(names):
        problem = "two models have one name"
        raise UserError(problem, where=", ".join(names), fix="rename a folder", code=2)
    echo("models     " + ", ".join(names), err=True)
    seeing_names = [model.name for model in models if model.intake is not None]
    if seeing_names:
        echo("images     " + ", ".join(seeing_names), err=True)


def _server_tools(
    episodes: "EpisodesPlan | None", models: "Sequence[Served]", stack: ExitStack, *, most: int
) -> "ServerTools | None":
    """Tools that the server calls itself, which `stack` closes; `most` requests use them at once. Raises UserError."""
    if episodes is None:
        return None
    from bloomery.serve.server_tools import ServerTools

    tools = ServerTools(episodes, models, most=most)
    stack.callback(tools.close)
    names = [tool["function"]["name"] for tool in tools.schemas]
    echo(f"tools      {', '.join(names)}  (called by this server)", err=True)
    for note in tools.notes:
        echo(f"warning    {note}", err=True)
    return tools


def _announce(host: str, url: str) -> None:
    from bloomery.serve.address import url_for_others

    echo(f"serving    {url}  (API: {url}v1, Ctrl+C ends it)", err=True)
    if (others := url_for_others(url, host)) is not None:
        echo(f"others     {others}  (from another machine)", err=True)


def _parse_model(model: str, step: str) -> tuple[Path, str, str]:
    """The folder of MODEL or RUN@STEP, its name in the API and the checkpoint."""
    run, separator, checkpoint = model.rpartition("@")
    is_checkpoint = checkpoint in ("best", "last") or checkpoint.isdecimal()
    if separator and is_checkpoint and not Path(model).exists():
        folder = model_path(run)
        return folder, f"{folder.resolve().name}@{checkpoint}", checkpoint
    folder = model_path(model)
    return folder, folder.resolve().name, step


def _adapter_folders(adapters: Sequence[str], *, num_models: int) -> dict[str, Path]:
    """The folder of each adapter by its name. Raises UserError, with code 2 for adapters of several models."""
    places = dict(_parse_adapter(adapter) for adapter in adapters)
    if places and num_models > 1:
        raise UserError("adapters need one base", where="--adapter", fix="name one MODEL", code=2)
    return {name: model_path(place) for name, place in places.items()}


def _parse_adapter(argument: str) -> tuple[str, str]:
    """The name and the path in NAME=PATH. Raises UserError (code 2)."""
    name, sign, path = argument.partition("=")
    if not (name and sign and path):
        problem = f"expected NAME=PATH: {argument!r}"
        raise UserError(problem, where="--adapter", fix="--adapter poet=runs/poet", code=2)
    return name, path
