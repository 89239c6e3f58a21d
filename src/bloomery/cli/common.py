"""Shared by the commands: arguments, completion by the shell, printing of text and JSON, internal errors"""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import click
from click.shell_completion import CompletionItem, get_completion_class

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.files import open_regular, state_folder, write_json
from bloomery.core.text import expanded, fitted, harmless, redact_secrets

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.export.layouts import Exported
    from bloomery.recipe.load import LoadedRecipe

F = TypeVar("F", bound=Callable[..., Any])


def _complete(kind: str) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Shell completion of recipes, runs or keys, imported when the shell asks."""

    def complete(_context: click.Context, _parameter: click.Parameter, start: str) -> list[Any]:

        return candidates(kind, start)

    return complete


def run_argument(function: F) -> F:
    """Click argument `run: str`: a path, a name under runs/, or `last`."""
    return click.argument("run", shell_complete=_complete("runs"))(function)


def recipe_argument(function: F) -> F:
    """Click arguments `recipe: str` and `overrides: tuple[str, ...]` for `RECIPE [section.key=value ...]`."""
    return click.argument("recipe", shell_complete=_complete("recipes"))(
        overrides_argument(function)
    )


def recipe_or_model(function: F) -> F:
    """As `recipe_argument`, or `--model M --data D` without a recipe; `chosen_recipe` makes one of them."""
    options = (
        click.option(
            "--model", metavar="MODEL", help="Set model.from; with --data, RECIPE can be omitted."
        ),
        click.option(
            "--data",
            metavar="PATH",
            help="Set data.path, the dataset: file, folder or hub:ORG/NAME.",
        ),
        click.argument("recipe", required=False, shell_complete=_complete("recipes")),
        overrides_argument,
    )
    for decorate in reversed(options):
        function = decorate(function)
    return function


def chosen_recipe(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    *,
    fetch: bool = False,
    planning: bool = False,
) -> "tuple[LoadedRecipe, str]":
    """The recipe, and the arguments that name it to another command. With a recipe, `model` and `data` are overrides;
    without one, a recipe is generated from both, and printed. Raises UserError (code 2).

    `planning`: a dataset is assumed where none is named, and where it is not downloaded.
    """
    from bloomery.hub import PREFIX, fetch_dataset, fetch_model, is_hub_id
    from bloomery.plan.made import made_recipe, reading_lines, refuse_data
    from bloomery.plan.unsupported import refuse_untrained
    from bloomery.recipe.load import load_recipe, load_text, packaged

    if recipe is not None and "=" in recipe and (model or data) and not Path(recipe).exists():
        overrides = (recipe, *overrides)
        recipe = None
    if recipe is not None:
        if recipe not in packaged():
            _refuse_run(recipe)
            refuse_data(recipe)
        given = [
            f"{key}={value}"
            for key, value in (("model.from", model), ("data.path", data))
            if value is not None
        ]
        words = (*given, *overrides)
        loaded = load_recipe(recipe, words)
        for line in reading_lines(loaded.recipe):
            echo(f"columns    {line}", err=True)
        return loaded, shlex.join([recipe, *words])
    if model is None or (data is None and not planning):
        missing = "missing RECIPE" if model is data else f"missing --{'data' if model else 'model'}"
        fix = "add a recipe (`bloomery recipes` lists the packaged ones), or --model MODEL --data PATH"
        raise UserError(missing, where="the command line", fix=fix, code=2)
    with text_flags():
        if fetch and is_hub_id(model):
            refuse_untrained(model)
            fetch_model(model)
        if fetch and data is not None and (data.startswith(PREFIX) or is_hub_id(data)):
            fetch_dataset(PREFIX + data.removeprefix(PREFIX))
        recipe_made = made_recipe(model, data, overrides, planning=planning)
    made = ["--model", model, *([] if data is None else ["--data", data])]
    loaded = load_text(
        recipe_made.text, name=recipe_made.name, source=shlex.join(made), overrides=overrides
    )
    typed = shlex.join([*made, *overrides])
    # a plan without a dataset answers at once, and its notes name what it assumes
    if data is not None:
        if _first_time(recipe_made.shown):
            echo(
                f"# generated for {typed}; save this as a file to edit it\n{recipe_made.shown}",
                err=True,
            )
        else:
            echo(f"recipe     generated; to print it: bloomery recipes show {typed}", err=True)
    for line in reading_lines(loaded.recipe):
        echo(f"columns    {line}", err=True)
    return loaded, typed


def _refuse_run(name: str) -> None:
    """Raises UserError (code 2) for a run where a recipe should be, with the command that was meant."""
    from bloomery.runs.folder import all_runs, is_run

    known = name == "last" or is_run(Path("runs") / name) or is_run(expanded(name))
    if not known or expanded(name).is_file():
        return
    if name == "last" and not all_runs():
        fix = "start one: bloomery train RECIPE (`bloomery recipes list` lists the packaged ones)"
        raise UserError(
            "`last` is the last run, and there are no runs here",
            where=str(Path("runs").resolve()),
            fix=fix,
            code=2,
        )
    fix = f"to continue it: bloomery resume {name}; to train its recipe again: bloomery recipes copy {name} mine.yaml"
    raise UserError(f"`{name}` is a run, not a recipe", where="RECIPE", fix=fix, code=2)


_MOST_REMEMBERED = 200  # generated recipes


def _first_time(text: str) -> bool:
    """Whether a generated recipe was not printed before in this folder; it is then remembered."""
    path = state_folder() / "generated.json"
    key = hashlib.sha256(f"{Path.cwd()}\n{text}".encode()).hexdigest()[:16]
    try:
        printed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        printed = []
    if not isinstance(printed, list) or key not in printed:
        write_json(
            path, [*(printed if isinstance(printed, list) else [])[1 - _MOST_REMEMBERED :], key]
        )
        return True
    return False


def overrides_argument(function: F) -> F:
    """The click argument `overrides: tuple[str, ...]`; refuses arguments that are not `section.key=value`."""
    return click.argument(
        "overrides",
        nargs=-1,
        metavar="[section.key=value ...]",
        callback=_overrides,
        shell_complete=_complete("keys"),
    )(function)


def _overrides(
    context: click.Context, parameter: click.Parameter, value: Sequence[str]
) -> tuple[str, ...]:
    """Exits with code 2 at a word without "=", before any file is read."""
    del parameter
    for word in value:
        if "=" not in word:
            fix = f"write section.key=value, such as train.epochs=2; see `{context.command_path} --help`"
            if gpus := context.params.get("gpu"):  # --gpu RTX 4070, or --gpu RTX 4090 x 2
                rest = " ".join(word for word in value if "=" not in word)
                fix = f'quote a name with spaces: --gpu "{gpus[-1]} {rest}"'
            raise UserError(
                f"not an override: {word!r}", where=f"`{context.command_path}`", fix=fix, code=2
            )
    return tuple(value)


def devices_option(function: F) -> F:
    """The click option `devices: str`."""
    line = "Run on this device: auto, cpu or a GPU number."
    return click.option(
        "-d", "--devices", metavar="DEVICE", default="auto", show_default=True, help=line
    )(function)


def step_option(function: F) -> F:
    """The click option `step: str`."""
    line = "Use this checkpoint of a run: best, last or a step."
    return click.option("--step", metavar="STEP", default="best", show_default=True, help=line)(
        function
    )


def json_option(function: F) -> F:
    """The click option `as_json: bool`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
    )(function)


def quantize_option(function: F) -> F:
    """The click option `quantize: str | None`."""
    kinds = click.Choice(["none", "nf4", "int8"])
    line = "Quantize frozen weights [default: as in training]."
    return click.option("--quantize", type=kinds, help=line)(function)


def loading(text: str) -> None:
    """Print on stderr what is loaded."""
    echo(f"loading    {text}", err=True)


SILENT_SECONDS = 2.0  # after which a line says what is being done


@contextmanager
def progress_line(doing: str) -> Iterator[None]:
    """Shows on stderr what a long operation does now: a line that is replaced on a terminal; elsewhere a line every few
    seconds, the first one after two.
    """
    from rich.console import Console

    from bloomery.core.progress import told_to

    now = [f"{doing} ..."]
    ended = threading.Event()
    console = Console(stderr=True)
    if console.is_terminal:
        with (
            console.status(literal(doing)) as status,
            told_to(lambda text: status.update(literal(f"{doing}: {text}"))),
        ):
            yield
        return

    def repeat() -> None:
        shown = ""
        pause = SILENT_SECONDS
        while not ended.wait(pause):
            if now[0] != shown:
                shown = now[0]
                pause = min(2 * pause, 30.0)
                echo(f"{'progress':<11}{shown}", err=True)

    def take(text: str) -> None:
        now[0] = f"{doing}: {text}"

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        with told_to(take):
            yield
    finally:
        ended.set()
        thread.join()


def literal(text: str) -> "Text":
    """Text for a status line of rich: its spinner would parse [brackets] in a str as markup."""
    from rich.text import Text

    return Text(text)


@final
class NewPath(click.Path):
    """A path to write to. Refuses `~name` of an unknown user, and an empty name."""

    def __init__(self, *, file_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """`~` is expanded. Raises UserError for an empty path and for an unknown user."""
        path = expanded(Path(os.fsdecode(super().convert(value, param, ctx))))
        if not str(value) or str(path).startswith("~"):
            problem = f"no such user: {path.parts[0][1:]!r}" if str(value) else "the path is empty"
            where = f"{param.opts[0] if param else 'the path'} {value}".rstrip()
            raise UserError(problem, where=where, fix="use a path that can be created", code=2)
        return path


def numbers(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """A callback for an option of numbers with commas between them, such as 0.7,0.3."""
    try:
        return None if value is None else tuple(float(each) for each in value.split(","))
    except ValueError as error:
        problem = f"{value!r} is not a list of numbers such as 0.7,0.3"
        raise click.BadParameter(problem, ctx=context, param=parameter) from error


def show_export(done: "Exported") -> None:
    """Print the checks that passed and the folder or file."""
    from bloomery.core.units import format_bytes

    for proof in done.proofs:
        echo(f"{'' if proof.startswith('differs') else 'verified   '}{proof}", err=True)
    echo(f"export     {done.folder} ({format_bytes(done.bytes)})")
    if done.next:
        echo(f"next       {done.next}", err=True)


def data_path(data: Path) -> Path:
    """A path unchanged; `hub:ORG/NAME` as the folder of that dataset, downloaded if missing."""
    from bloomery.hub import PREFIX, fetch_dataset

    return fetch_dataset(str(data)) if str(data).startswith(PREFIX) else data


@contextmanager
def text_flags() -> Iterator[None]:
    """Errors about a dataset or chat template name `--data` and `--template` instead of recipe keys."""
    try:
        yield
    except UserError as error:
        if error.where == "data.chat.template":
            fix = "add --template chatml (or llama2, llama3, qwen, mistral, gemma, or a file)"
            raise UserError(error.problem, where="--template", fix=fix, code=2) from error
        fix = "use --data PATH" if re.fullmatch(r"\w+ data\.path", error.fix) else error.fix
        fix = re.sub(r",( or)? set data\.on_error(=| to )skip", "", fix)  # no option skips rows
        fix = fix.replace("set data.chat.template to another", "use another --template")
        fix = re.sub(r"^[^:]*: data\.columns=\{(\w+): NAME\}", r"rename its column to \1", fix)
        where = error.where.removeprefix("data.path: ")
        fix = fix.replace("data.path=", "--data ")
        raise UserError(error.problem, where=where, fix=fix, code=error.code) from error


def refuse_undecoded(text: str, *, what: str = "the prompt", where: str = "--prompt") -> None:
    """Raises UserError (code 2) for bytes that are not text in this terminal's encoding."""
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        problem = f"{what} is not text in this terminal's encoding"
        fix = "use UTF-8: set LANG=C.UTF-8"
        raise UserError(problem, where=where, fix=fix, code=2)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text that may be untrusted (file names, parts of a dataset, completions), without control characters."""
    click.echo(harmless(text), err=err, nl=nl)


def echo_page(lines: Iterable[str]) -> None:
    """Print a page of 100 columns, folded where the terminal is narrower; a pipe gets it whole."""
    echo("\n".join(fitted(lines, shutil.get_terminal_size((1000, 24)).columns)))


def print_json(value: object) -> None:
    """Print one JSON document on stdout. NaN and infinity become null."""
    ascii_only = (getattr(sys.stdout, "encoding", None) or "utf-8").lower() not in ("utf-8", "utf8")
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=ascii_only, allow_nan=False))


def plain(value: object) -> Any:
    """Dataclasses, pydantic models and paths as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json", by_alias=True))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the script that completes commands, recipes, runs and recipe keys.

    \b
    Example: bloomery completion bash >> ~/.bashrc
             bloomery completion fish > ~/.config/fish/completions/bloomery.fish
    """
    from bloomery.cli import cli

    made = get_completion_class(shell)
    assert made is not None, "click completes all of SHELLS"
    echo(made(cli, {}, "bloomery", "_BLOOMERY_COMPLETE").source())


def candidates(kind: str, start: str) -> list[CompletionItem]:
    """Of recipes: packaged ones and YAML files; of runs: `last` and the folders below runs/; of keys: `train.epochs=`.

    A path where no recipe or run fits.
    """
    match kind:
        case "recipes":
            from bloomery.recipe.load import packaged

            files = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
            names = [*packaged(), *files]
        case "runs":
            names = ["last", *sorted(path.name for path in Path("runs").glob("*") if path.is_dir())]
        case _:
            from bloomery.recipe.aliases import all_keys

            names = [".".join(path) + "=" for path in all_keys()]
    found = [CompletionItem(name) for name in names if name.startswith(start)]
    return found or ([] if kind == "keys" else [CompletionItem(start, type="file")])


# Set by a command with a run folder: the traceback goes to the run's log.txt.
traceback_file: ContextVar[Path | None] = ContextVar("traceback_file", default=None)


def explain(kind: type[BaseException], error: BaseException) -> None:
    """Print the error of an uncaught exception; its traceback goes to a file."""
    if issubclass(kind, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return
    kept = _keep("".join(traceback.format_exception(kind, error, error.__traceback__)))
    click.echo(harmless(redact_secrets(str(_sentence(error, kept)))), err=True)


def _sentence(error: BaseException, kept: Path | None) -> UserError:
    known = of_the_system(error) if isinstance(error, OSError) else None
    if known is not None:
        return known
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        from bloomery.hardware.detect import detect
        from bloomery.hardware.doctor.software import torch_missing

        return torch_missing(detect())
    if isinstance(error, MemoryError):
        fix = "close other programs, or use smaller sizes"
        return UserError("out of host memory (RAM)", where=str(error), fix=fix)
    message = (str(error).strip().splitlines() or [""])[0][:200]
    problem = f"internal error: {type(error).__name__}" + (f": {message}" if message else "")
    where = f"traceback in {kept}" if kept else ""
    return UserError(problem, where=where, fix="report this bug; --debug prints the traceback")


def _keep(text: str) -> Path | None:
    """Append the traceback to the run's log, else to a separate file; None when neither can be written."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    state = state_folder() / "errors.txt"
    text = redact_secrets(text)  # users attach these files to bug reports
    for place in (
        traceback_file.get(),
        state,
        Path(tempfile.gettempdir()) / f"bloomery-errors-{os.getpid()}.txt",
    ):
        if place is None:
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(
                open_regular(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8"
            ) as file:
                file.write(f"{stamp}\n{text}\n")
        except (OSError, UserError):
            continue
        return place
    return None
