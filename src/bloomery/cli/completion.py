"""What the shell offers after Tab: recipes, runs, keys and their values, GPUs, files and folders. No torch."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

# Options and arguments by their metavar, and the names of arguments without one.
MODELS = ("MODEL", "MODEL...", "MODEL ...", "SRC")
FILES = ("PATH", "FILE", "DIR", "FOLDER", "NAME=PATH")
ARGUMENTS = {"model": "MODEL", "models": "MODEL", "folder": "PATH"}
# Keys of any text whose value is a file or a folder, or may be one.
PATH_KEYS = (
    "model.from",
    "tokenizer.from",
    "data.path",
    "data.validation",
    "data.prepared",
    "data.pictures",
    "data.chat.template",
    "objective.teacher",
    "objective.teacher_scores",
)
_COUNT = re.compile(r"(\d+x)?(.*)")


class _Completed(StringParamType):
    """A text, with a completion by the shell."""

    def __init__(self, offer: Callable[[str], list[CompletionItem]]) -> None:
        self._offer = offer

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        del ctx, param
        return self._offer(incomplete)


def complete_paths(command: click.Command) -> None:
    """Gives each parameter that takes a model, a file, a folder or a GPU its completion, where it has none."""
    if isinstance(command, click.Group):
        for inner_command in command.commands.values():
            complete_paths(inner_command)
    for parameter in command.params:
        if type(parameter.type) is not StringParamType:
            continue
        metavar = parameter.metavar or ARGUMENTS.get(parameter.name or "", "")
        if metavar in MODELS:
            parameter.type = _Completed(models_or_files)
        elif metavar in FILES:
            parameter.type = _Completed(files)
        elif "--template" in parameter.opts:
            parameter.type = _Completed(templates)
        elif "--gpu" in parameter.opts:
            parameter.type = _Completed(gpus)
        elif metavar == "SITE":
            parameter.type = _Completed(sites)
        elif "--devices" in parameter.opts:
            parameter.type = _Completed(devices)


def files(start: str) -> list[CompletionItem]:
    """The shell completes a file or a folder itself."""
    return [CompletionItem(start, type="file")]


def models_or_files(start: str) -> list[CompletionItem]:
    """Runs, RUN@STEP, and what is in this folder; where no run fits, the shell completes a path itself."""
    run, at, step = start.rpartition("@")
    if at and run in _runs():
        return [CompletionItem(f"{run}@{item.value}") for item in steps(run, step)]
    runs = [name for name in _runs() if name.startswith(start)]
    if not runs:
        return files(start)
    return [CompletionItem(name) for name in [*runs, *_paths(start)]]


def recipes(start: str) -> list[CompletionItem]:
    """Packaged recipes and YAML files; where none fits, the shell completes a path itself."""
    from bloomery.recipe.load import packaged

    yaml_files = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
    names = [name for name in (*packaged(), *yaml_files) if name.startswith(start)]
    # Next to --model and --data the first argument may be an override.
    keys = overrides(start) if start and not names else []
    return [CompletionItem(name) for name in names] or keys or files(start)


def runs(start: str) -> list[CompletionItem]:
    """`last` and the folders below runs/; where none fits, the shell completes a path itself."""
    names = [name for name in _runs() if name.startswith(start)]
    return [CompletionItem(name) for name in names] or files(start)


def steps(run: str, start: str) -> list[CompletionItem]:
    """`best`, `last` and the steps of a run's checkpoints, the newest first."""
    from bloomery.core.errors import UserError
    from bloomery.core.run_folder import RunFolder, find_run

    names = ["best", "last"]
    try:
        folders = RunFolder(find_run(run)).checkpoints.glob("step-*")
        numbers = sorted(
            (int(folder.name.removeprefix("step-")) for folder in folders), reverse=True
        )
        names += map(str, numbers)
    except (UserError, ValueError):  # no run: a model without checkpoints
        pass
    return [CompletionItem(name) for name in names if name.startswith(start)]


def templates(start: str) -> list[CompletionItem]:
    """Chat templates of Bloomery; where none fits, the shell completes a file itself."""
    from bloomery.data.tokenizer.templates import BUILTIN

    names = [name for name in BUILTIN if name.startswith(start)]
    return [CompletionItem(name) for name in names] or files(start)


def sites(start: str) -> list[CompletionItem]:
    """Sites of the table; where none fits, the shell completes a file itself."""
    from bloomery.hardware.sites import site_names

    names = [name for name in site_names() if name.startswith(start)]
    return [CompletionItem(name) for name in names] or files(start)


def devices(start: str) -> list[CompletionItem]:
    """`cpu`, and the numbers of this machine's GPUs."""
    from bloomery.hardware.detect import detect

    names = [*(str(device.index) for device in detect().accelerators), "cpu"]
    return [CompletionItem(name) for name in names if name.startswith(start)]


def overrides(start: str, preceding: tuple[str, ...] = ()) -> list[CompletionItem]:
    """Keys such as `train.epochs=`, or after the `=` the values of a key.

    `preceding`: the words before, as bash makes words of the key, the `=` and the value.
    """
    from bloomery.recipe.aliases import all_keys

    keys = dict.fromkeys(".".join(path) for path in all_keys())
    *_, key_before = ("", *(word for word in preceding if word != "="))
    is_value = preceding[-1:] == ("=",) or (not start and key_before in keys)
    if is_value:
        return [CompletionItem(word) for word in values_of(key_before, start)]
    key, equals, value = start.partition("=")
    if equals:
        return [CompletionItem(f"{key}={word}") for word in values_of(key, value)]
    return [CompletionItem(f"{name}=") for name in keys if name.startswith(start)]


def values_of(key: str, start: str) -> list[str]:
    """The words that a key takes, or the paths in its folder; of several values behind commas the last one's."""
    if key in PATH_KEYS:
        names = [item.value for item in templates(start)] if key == "data.chat.template" else []
        return [name for name in names if name != start] + _paths(start)
    before, comma, last = start.rpartition(",")
    if comma:  # of a sweep
        return [f"{before},{word}" for word in values_of(key, last)]
    return [word for word in allowed_words(tuple(key.split("."))) if word.startswith(start)]


def allowed_words(path: tuple[str, ...]) -> list[str]:
    """The words of a key, such as auto, true and false; of a section that a word stands for, its kinds."""
    from bloomery.recipe.aliases import fields
    from bloomery.recipe.mistakes import models_at

    words = list[str]()
    for model in models_at(path[:-1]):
        annotation = fields(model).get(path[-1])
        words += _words(annotation)
    for model in models_at(path):
        words += _words(fields(model).get("kind"))
    return list(dict.fromkeys(words))


def _words(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(word) for word in get_args(annotation) if isinstance(word, str))
    else:
        for inner in get_args(annotation):
            yield from _words(inner)


def gpus(start: str) -> list[CompletionItem]:
    """GPUs of the table with hyphens for spaces, which need no quotes; after a count such as 8x, too."""
    from bloomery.hardware.specs import gpu_table

    match = _COUNT.fullmatch(start)
    assert match is not None, "both groups are optional"
    count, name = match[1] or "", match[2]
    names = list[str]()
    for spec in gpu_table().gpu:
        if not spec.memory_gib:  # it shares the host's: its size must be typed
            continue
        sizes = [f"-{size:g}GB" for size in spec.memory_gib] if len(spec.memory_gib) > 1 else [""]
        product = spec.name.replace(" ", "-")
        short = re.sub(r"^(GeForce|Radeon|Instinct|Tesla)-", "", product)
        names += [each + size for size in sizes for each in dict.fromkeys((short, product))]
    names.append("all")
    fitting = [each for each in names if each.lower().startswith(name.lower())]
    # Without a start the short names alone: each GPU once.
    if not name:
        fitting = [each for each in fitting if not each.startswith(("GeForce-", "Radeon-"))]
    return [CompletionItem(count + each) for each in fitting]


def _runs() -> list[str]:
    return ["last", *sorted(path.name for path in Path("runs").glob("*") if path.is_dir())]


def _paths(start: str) -> list[str]:
    """Files and folders that begin so, folders with a slash; hidden ones only where the start is."""
    folder, slash, name = start.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return []
    return [
        f"{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(name) and (name or not entry.name.startswith("."))
    ]
