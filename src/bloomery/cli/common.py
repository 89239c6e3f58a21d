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

from bloomery.cli import completion
from bloomery.core.errors import UserError, of_the_system
from bloomery.core.files import open_regular, state_folder, write_json
from bloomery.core.text import expanded, fitted, harmless, redact_secrets
from bloomery.core.units import GIB, parse_bytes

if TYPE_CHECKING:
    from rich.text import Text

    from bloomery.export.layouts import Exported
    from bloomery.recipe.load import LoadedRecipe

F = TypeVar("F", bound=Callable[..., Any])


def _complete(offer: Callable[[str], list[Any]]) -> Callable[..., list[Any]]:
    """The shell completion of an argument, by what is typed of it."""

    def complete(_context: click.Context, _parameter: click.Parameter, start: str) -> list[Any]:
        return offer(start)

    return complete


def _complete_override(
    context: click.Context, _parameter: click.Parameter, start: str
) -> list[Any]:
    recipe = context.params.get("recipe")
    words = context.params.get("overrides") or ()
    return completion.overrides(start, (*([recipe] if recipe and words else []), *words))


def run_argument(function: F) -> F:
    """Click argument `run: str`: a path, a name under runs/, or `last`."""
    return click.argument("run", shell_complete=_complete(completion.runs))(function)


def recipe_argument(function: F) -> F:
    """Click arguments `recipe: str` and `overrides: tuple[str, ...]` for `RECIPE [section.key=value ...]`."""
    return click.argument("recipe", shell_complete=_complete(completion.recipes))(
        overrides_argument(function)
    )


def recipe_or_model(function: F) -> F:
    """Click arguments and options for `RECIPE [section.key=value ...]`, or for `--model M --data D` instead of RECIPE;
    `chosen_recipe` reads either.
    """
    options = (
        click.option(
            "--model", metavar="MODEL", help="Set model.from; with --data, RECIPE can be omitted."
        ),
        click.option(
            "--data",
            metavar="PATH",
            help="Set data.path, the dataset: file, folder or hub:ORG/NAME.",
        ),
        click.argument("recipe", required=False, shell_complete=_complete(completion.recipes)),
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
    """Load or generate a recipe; return it with the arguments that name it to another command.

    With a recipe, `model` and `data` are overrides; without one, a recipe is generated from both, and printed.
    `fetch` downloads the model and the dataset first. `planning` assumes a dataset where none is named, and where it
    is not downloaded. Raises UserError (code 2).
    """
    from bloomery.hub import PREFIX, fetch_dataset, fetch_model, is_hub_id
    from bloomery.plan.made import made_recipe, reading_lines, refuse_data
    from bloomery.recipe.load import load_recipe, load_text, packaged

    # Beside --model and --data the first argument may be an override: click took it for RECIPE.
    if recipe is not None and "=" in recipe and (model or data) and not Path(recipe).exists():
        overrides = (recipe, *overrides)
        recipe = None

    # A named recipe: the options come before the overrides, so that an override of the same key wins.
    if recipe is not None:
        if recipe not in packaged():
            _refuse_run(recipe)
            refuse_data(recipe)
        options = (("model.from", model), ("data.path", data))
        option_overrides = [f"{key}={value}" for key, value in options if value is not None]
        all_overrides = (*option_overrides, *overrides)
        loaded_recipe = load_recipe(recipe, all_overrides)
        for line in reading_lines(loaded_recipe.recipe):
            echo(f"columns    {line}", err=True)
        return loaded_recipe, shlex.join([recipe, *all_overrides])

    if model is None or (data is None and not planning):
        problem = "missing RECIPE" if model is data else f"missing --{'data' if model else 'model'}"
        fix = "add a recipe (`bloomery recipes` lists the packaged ones), or --model MODEL --data PATH"
        raise UserError(problem, where="the command line", fix=fix, code=2)

    # A generated recipe reads the model's config and the first rows of the dataset, so both are downloaded first.
    with text_flags():
        if fetch and is_hub_id(model):
            fetch_model(model)
        if fetch and data is not None and (data.startswith(PREFIX) or is_hub_id(data)):
            fetch_dataset(PREFIX + data.removeprefix(PREFIX))
        generated = made_recipe(model, data, overrides, planning=planning)
    arguments = ["--model", model, *([] if data is None else ["--data", data])]
    loaded_recipe = load_text(
        generated.text, name=generated.name, source=shlex.join(arguments), overrides=overrides
    )
    command_line = shlex.join([*arguments, *overrides])

    # A plan without a dataset prints no recipe: its notes name what it assumes.
    if data is not None:
        if _first_time(generated.complete_text):
            heading = f"# generated for {command_line}; save this as a file to edit it"
            echo(f"{heading}\n{generated.complete_text}", err=True)
        else:
            hint = f"to print it: bloomery recipes show {command_line}"
            echo(f"recipe     generated; {hint}", err=True)
    for line in reading_lines(loaded_recipe.recipe):
        echo(f"columns    {line}", err=True)
    return loaded_recipe, command_line


def _refuse_run(name: str) -> None:
    """Raises UserError (code 2) for a run where a recipe should be, with the command that was meant."""
    from bloomery.core.run_folder import all_runs, is_run

    names_run = name == "last" or is_run(Path("runs") / name) or is_run(expanded(name))
    if not names_run or expanded(name).is_file():
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


def shown_path(path: Path) -> str:
    """The path relative to the working folder where it is below that."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


_MAX_REMEMBERED_RECIPES = 200


def _first_time(text: str) -> bool:
    """Whether a generated recipe is printed for the first time in this folder; it is then remembered."""
    path = state_folder() / "generated.json"
    digest = hashlib.sha256(f"{Path.cwd()}\n{text}".encode()).hexdigest()[:16]
    try:
        printed_digests = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        printed_digests = []
    if not isinstance(printed_digests, list):
        printed_digests = []
    if digest in printed_digests:
        return False
    write_json(path, [*printed_digests[1 - _MAX_REMEMBERED_RECIPES :], digest])
    return True


def overrides_argument(function: F) -> F:
    """The click argument `overrides: tuple[str, ...]`; refuses arguments that are not `section.key=value`."""
    return click.argument(
        "overrides",
        nargs=-1,
        metavar="[section.key=value ...]",
        callback=_overrides,
        shell_complete=_complete_override,
    )(function)


def _overrides(
    context: click.Context, parameter: click.Parameter, value: Sequence[str]
) -> tuple[str, ...]:
    """Raises UserError (code 2) for an argument without "=", before any file is read."""
    del parameter
    if (
        context.resilient_parsing
    ):  # bash completes a value: the key before its `=` is a word of its own
        return tuple(value)
    stray_arguments = [argument for argument in value if "=" not in argument]
    if not stray_arguments:
        return tuple(value)
    fix = f"write section.key=value, such as train.epochs=2; see `{context.command_path} --help`"
    if gpus := context.params.get("gpu"):  # --gpu RTX 4070, or --gpu RTX 4090 x 2
        fix = f'quote a name with spaces: --gpu "{gpus[-1]} {" ".join(stray_arguments)}"'
    problem = f"not an override: {stray_arguments[0]!r}"
    raise UserError(problem, where=f"`{context.command_path}`", fix=fix, code=2)


def flag_of(name: str) -> str:
    """The command-line option of a setting: --top-k of `top_k`."""
    return f"--{name.replace('_', '-')}"


def devices_option(function: F) -> F:
    """The click option `devices: str`."""
    line = "Run on this device: auto, cpu or a GPU number."
    return click.option(
        "-d", "--devices", metavar="DEVICE", default="auto", show_default=True, help=line
    )(function)


def step_option(function: F) -> F:
    """The click option `step: str`."""
    line = "Use this checkpoint of a run: best, last or a step."

    def complete(context: click.Context, _parameter: click.Parameter, start: str) -> list[Any]:
        # An option whose value is being typed stops click's parser before it names the arguments.
        names = [context.params.get("model"), *context.args, "last"]
        model = next(name for name in names if isinstance(name, str))
        return completion.steps(model, start)

    return click.option(
        "--step",
        metavar="STEP",
        default="best",
        show_default=True,
        help=line,
        shell_complete=complete,
    )(function)


def json_option(function: F) -> F:
    """The click option `as_json: bool`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
    )(function)


def training_devices_option(function: F) -> F:
    """The click option `devices: str | None` of commands that begin to train."""
    return click.option(
        "-d",
        "--devices",
        metavar="LIST",
        help="Train on these devices: 0,1 or cpu [default: all alike GPUs].",
    )(function)


def trust_code_option(function: F) -> F:
    """The click option `trust_code: bool`."""
    return click.option(
        "--trust-code", is_flag=True, help="Run the Python rewards and hooks that the run names."
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
def progress_line(operation: str) -> Iterator[None]:
    """Shows on stderr what a long operation does now: a line that is replaced on a terminal; elsewhere a line every few
    seconds, the first one after two.
    """
    from rich.console import Console

    from bloomery.core.progress import told_to

    console = Console(stderr=True)
    if console.is_terminal:
        with (
            console.status(literal(operation)) as status,
            told_to(lambda text: status.update(literal(f"{operation}: {text}"))),
        ):
            yield
        return

    # A log gets no spinner: a thread prints the newest message, at growing intervals and only when it has changed.
    newest_line = f"{operation} ..."
    finished = threading.Event()

    def remember(message: str) -> None:
        nonlocal newest_line
        newest_line = f"{operation}: {message}"

    def print_changes() -> None:
        printed_line = ""
        pause_seconds = SILENT_SECONDS
        while not finished.wait(pause_seconds):
            if newest_line != printed_line:
                printed_line = newest_line
                pause_seconds = min(2 * pause_seconds, 30.0)
                echo(f"{'progress':<11}{printed_line}", err=True)

    thread = threading.Thread(target=print_changes, name="progress", daemon=True)
    thread.start()
    try:
        with told_to(remember):
            yield
    finally:
        finished.set()
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
        """The path with `~` expanded. Raises UserError for an empty path and for an unknown user."""
        path = expanded(Path(os.fsdecode(super().convert(value, param, ctx))))
        if not str(value) or str(path).startswith("~"):
            problem = f"no such user: {path.parts[0][1:]!r}" if str(value) else "the path is empty"
            where = f"{param.opts[0] if param else 'the path'} {value}".rstrip()
            raise UserError(problem, where=where, fix="use a path that can be created", code=2)
        return path


def memory_size(
    _context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    """A callback for an option of bytes of memory, such as 32GiB. Raises UserError for a size of no machine."""
    if value is None:
        return None
    try:
        num_bytes = parse_bytes(value)
    except ValueError:
        num_bytes = 0.0
    if not GIB <= num_bytes <= 2**50:
        raise UserError(
            f"not a size of memory: {value!r}",
            where=f"{parameter.opts[0]} {value}",
            fix="write a number with its unit, such as 32GiB, from 1GiB to 1048576GiB",
            code=2,
        )
    return int(num_bytes)


def numbers(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """A callback for an option of numbers with commas between them, such as 0.7,0.3."""
    try:
        return None if value is None else tuple(float(number) for number in value.split(","))
    except ValueError as error:
        problem = f"{value!r} is not a list of numbers such as 0.7,0.3"
        raise click.BadParameter(problem, ctx=context, param=parameter) from error


def show_export(export: "Exported") -> None:
    """Print the checks that passed and the folder or file."""
    from bloomery.core.units import format_bytes

    for proof in export.proofs:
        echo(f"{'' if proof.startswith('differs') else 'verified   '}{proof}", err=True)
    mmproj_bytes = 0 if export.mmproj is None else export.mmproj.stat().st_size
    echo(f"export     {export.folder} ({format_bytes(export.bytes - mmproj_bytes)})")
    if export.mmproj is not None:
        echo(f"mmproj     {export.mmproj} ({format_bytes(mmproj_bytes)})")
    for command in export.next.splitlines():
        echo(f"next       {command}", err=True)


def data_path(data: Path) -> Path:
    """A path unchanged; `hub:ORG/NAME` as the folder of that dataset, downloaded if missing.

    Raises UserError for a path that does not exist: before a model is loaded.
    """
    from bloomery.data.sources.files import list_files
    from bloomery.hub import PREFIX, fetch_dataset
    from bloomery.recipe.schema import Source

    if str(data).startswith(PREFIX):
        return fetch_dataset(str(data))
    if not data.exists():
        list_files(Source(path=str(data)))  # raises, with a similar name
    return data


@contextmanager
def text_flags() -> Iterator[None]:
    """Errors about a dataset or chat template name `--data` and `--template` instead of recipe keys."""
    try:
        yield
    except UserError as error:
        if error.where == "data.chat.template":
            fix = "add --template chatml (or llama2, llama3, qwen, mistral, gemma, or a file)"
            raise UserError(error.problem, where="--template", fix=fix, code=2) from error

        # The remaining fixes name recipe keys in the middle of a sentence.
        fix = "use --data PATH" if re.fullmatch(r"\w+ data\.path", error.fix) else error.fix
        fix = re.sub(r",( or)? set data\.on_error(=| to )skip", "", fix)  # no option skips rows
        fix = fix.replace("set data.chat.template to another", "use another --template")
        fix = re.sub(r"^[^:]*: data\.columns=\{(\w+): NAME\}", r"rename its column to \1", fix)
        fix = fix.replace("data.path=", "--data ").replace("set data.path", "use another --data")
        where = error.where.removeprefix("data.path: ")
        raise UserError(error.problem, where=where, fix=fix, code=error.code) from error


def refuse_undecoded(text: str, *, subject: str = "the prompt", where: str = "--prompt") -> None:
    """Raises UserError (code 2) for bytes that are not text in this terminal's encoding."""
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        problem = f"{subject} is not text in this terminal's encoding"
        fix = "use UTF-8: set LANG=C.UTF-8"
        raise UserError(problem, where=where, fix=fix, code=2)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text that may be untrusted (file names, parts of a dataset, completions), without control characters."""
    click.echo(harmless(text), err=err, nl=nl)


def echo_page(lines: Iterable[str]) -> None:
    """Print a page of 100 columns, folded where the terminal is narrower; a pipe gets full lines."""
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
    """Print the script that completes commands, recipes, runs, keys, values and paths.

    \b
    Example: bloomery completion bash >> ~/.bashrc
             bloomery completion zsh >> ~/.zshrc     # below compinit
             bloomery completion fish > ~/.config/fish/completions/bloomery.fish
    """
    script = Path(__file__).parent / "shells" / f"completion.{shell}"
    echo(script.read_text(encoding="utf-8"), nl=False)


# Set by a command with a run folder: the traceback goes to the run's log.txt.
traceback_file: ContextVar[Path | None] = ContextVar("traceback_file", default=None)


def explain(kind: type[BaseException], error: BaseException) -> None:
    """Print the error of an uncaught exception; its traceback goes to a file."""
    if issubclass(kind, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return
    traceback_text = "".join(traceback.format_exception(kind, error, error.__traceback__))
    message = str(_sentence(error, _save_traceback(traceback_text)))
    click.echo(harmless(redact_secrets(message)), err=True)


def _sentence(error: BaseException, traceback_path: Path | None) -> UserError:
    """The error that a user reads for an exception that nothing caught."""
    # Three kinds are no bug of ours: a full disk and its like, a missing torch, too little memory.
    system_error = of_the_system(error) if isinstance(error, OSError) else None
    if system_error is not None:
        return system_error
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        from bloomery.hardware.detect import detect
        from bloomery.hardware.doctor.software import torch_missing

        return torch_missing(detect())
    if isinstance(error, MemoryError):
        fix = "close other programs, or use smaller sizes"
        return UserError("out of host memory (RAM)", where=str(error), fix=fix)

    first_line = (str(error).strip().splitlines() or [""])[0][:200]
    problem = f"internal error: {type(error).__name__}" + (f": {first_line}" if first_line else "")
    where = f"traceback in {traceback_path}" if traceback_path else ""
    return UserError(problem, where=where, fix="report this bug; --debug prints the traceback")


def _save_traceback(text: str) -> Path | None:
    """Append the traceback to the run's log, else to a separate file; None when no file can be written."""
    time_stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    public_text = redact_secrets(text)  # users attach these files to bug reports
    paths = (
        traceback_file.get(),
        state_folder() / "errors.txt",
        Path(tempfile.gettempdir()) / f"bloomery-errors-{os.getpid()}.txt",
    )
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(f"{time_stamp}\n{public_text}\n")
        except (OSError, UserError):
            continue
        return path
    return None
