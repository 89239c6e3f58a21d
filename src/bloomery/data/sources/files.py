"""The files of a source, sorted by name on every file system, and the format of each."""

import fnmatch
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bloomery.core.errors import UserError, one_line
from bloomery.core.text import closest
from bloomery.core.units import counted
from bloomery.data.sources.picture_files import (
    CAPTIONED,
    WEBDATASET,
    is_picture,
    picture_beside,
    with_pictures_beside,
)
from bloomery.data.sources.plugin_formats import is_row_format
from bloomery.data.sources.readers import COMPRESSED
from bloomery.data.sources.splits import Division, divide, split_of
from bloomery.hub import PREFIX, data_place
from bloomery.recipe.schema import Source

DATA = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": WEBDATASET,
}
# Data or configuration, depending on the other files.
TABLES = {".json": "json", ".csv": "csv", ".tsv": "tsv"}
TEXT = {".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tex": "text"}
CODE_SUFFIXES = """
asm bash c cc clj cmake cpp cs css cu cuh cxx d dart el erl ex exs f f90 fs go h hip hpp hs html java jl js jsx kt lisp
lua m ml mli mm nim nix php pl proto ps1 py pyi r rb rs s scala scm scss sh sql sv swift tf ts tsx v vhd vue zig zsh
"""
CODE = {f".{suffix}": "code" for suffix in CODE_SUFFIXES.split()}
_DESCRIPTIONS = ("readme", "license", "licence", "dataset_card", "changelog")


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name`: its path below the source; `shown_path`: its path below the working folder, or its
    Hub id.
    """

    path: Path
    name: str
    format: str
    shown_path: str | None = None

    @property
    def shown(self) -> str:
        """The name in messages: one line of printable text."""
        return one_line(self.shown_path or self.name)


def suffix_of(path: Path) -> str:
    """The suffix of the format, without that of the compression."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def list_files(source: Source, *, rows: bool = False) -> list[SourceFile]:
    """Sorted by name. Raises UserError without files, naming the files of other formats, and for unreadable ones.
    `rows`: for conversations and pairs; tables come before texts that describe them.
    """
    try:
        return _listed(source, rows=rows)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        fix = "check its owner, its permissions and the disk"
        raise UserError(problem, where=str(error.filename or source.path), fix=fix) from error
    except UnicodeEncodeError as error:
        problem = "the locale cannot encode this name"
        fix = "set LANG=C.UTF-8"
        raise UserError(problem, where=f"data.path: {source.path}", fix=fix) from error


def _listed(source: Source, *, rows: bool) -> list[SourceFile]:
    root = data_place(source.path)
    if not root.exists() and source.path.startswith(PREFIX):
        fix = f"bloomery download {source.path.removeprefix(PREFIX)} --dataset"
        raise UserError("the dataset is not downloaded", where=f"data.path: {source.path}", fix=fix)
    if not root.exists():
        raise UserError(
            "no such file or folder", where=f"data.path: {source.path}", fix=_near(root)
        )
    if not root.is_file() and not root.is_dir():
        fix = "set data.path to a file or a folder of files"
        raise UserError(
            "the path is neither a file nor a folder", where=f"data.path: {source.path}", fix=fix
        )
    shown_root = _shown(source.path, root)
    if root.is_file():
        return [SourceFile(root, root.name, _format(root, source.format), str(shown_root))]
    if (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
        return _saved_dataset(root, shown_root)
    names = sorted(_walk(root, source.glob))
    candidates = (
        names if source.glob else _recognized(names, rows=rows or is_row_format(source.format))
    )
    if not candidates:
        raise _nothing(root, source.glob, names)
    return _files(source, root, shown_root, _divided(source, candidates).train, rows=rows)


def _divided(source: Source, names: list[str]) -> Division:
    """Files of a folder by split. The names of code say nothing: test.py is a program."""
    suffixes = {name: suffix_of(Path(name)) for name in names}
    texts = {name for name, suffix in suffixes.items() if suffix in TEXT}
    code = {name for name, suffix in suffixes.items() if suffix not in {*DATA, *TABLES, *TEXT}}
    counted_names = [name for name in names if name not in code]
    if not counted_names:
        return Division(names, {})
    division = divide(
        counted_names, texts=texts, where=source.path, by_glob=source.glob is not None
    )
    return Division(sorted({*division.train, *code}), division.others)


def _files(
    source: Source, root: Path, shown_root: Path, names: list[str], *, rows: bool
) -> list[SourceFile]:
    """`rows`: for conversations, where a text beside a picture of its name is what describes it."""
    texts = rows and source.format == "auto"
    captions = {name for name in names if texts and _is_caption(root / name)}
    return [
        SourceFile(
            root / name,
            name,
            CAPTIONED if name in captions else _format(root / name, source.format),
            str(shown_root / name),
        )
        for name in names
    ]


def _is_caption(path: Path) -> bool:
    return suffix_of(path) in TEXT and picture_beside(path) is not None


def _shown(name: str, root: Path) -> Path:
    """The path of a source in messages: relative to the working folder."""
    if name.startswith(PREFIX):
        return Path(name)
    local = Path.cwd()
    return root.relative_to(local) if root.is_relative_to(local) else root


def _near(root: Path) -> str:
    """The fix for a path that does not exist: the closest name in its folder."""
    neighbors = list(root.parent.iterdir()) if root.parent.is_dir() else []
    names = {
        path.stem: path
        for path in sorted(neighbors, key=lambda path: (path.suffix == root.suffix, path.name))
    }
    similar = closest(root.stem, names)  # without the suffix, which would make names similar
    return (
        f"did you mean data.path={shlex.quote(str(names[similar[0]]))}?"
        if similar
        else "set data.path"
    )


def _walk(root: Path, glob: str | None) -> Iterator[str]:
    """Names below `root`. Follows links, reads each real folder once and no hidden one."""
    entered: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name != "__pycache__"
        )
        for name in files:
            relative_name = os.path.relpath(Path(folder, name), root)
            matches = glob is None or fnmatch.fnmatch(
                relative_name if "/" in glob else name, glob.removeprefix("**/")
            )
            if matches and not name.startswith(".") and Path(folder, name).is_file():
                yield relative_name


def _recognized(names: list[str], *, rows: bool) -> list[str]:
    """The files to read of a folder without a glob: data files, else texts and code, else tables. With `rows`, tables
    come first where all texts are descriptions.
    """
    suffixes = {name: suffix_of(Path(name)) for name in names}
    data = [name for name in names if suffixes[name] in DATA]
    texts = [name for name in names if suffixes[name] in TEXT or suffixes[name] in CODE]
    tables = [name for name in names if suffixes[name] in TABLES]
    described = all(Path(name).name.lower().startswith(_DESCRIPTIONS) for name in texts)
    if rows and not data and (captions := with_pictures_beside(texts, names)):
        return captions
    return data or (tables if rows and described else []) or texts or tables


def other_splits(source: Source, *, rows: bool = False) -> dict[str, list[SourceFile]]:
    """The splits of a dataset that `list_files` does not read, by name: of a folder of datasets' save_to_disk, or of
    files named after splits, with a glob of those that it names. Empty for a single file.
    """
    root = data_place(source.path)
    if not root.is_dir() or (root / "state.json").is_file():
        return {}
    shown_root = _shown(source.path, root)
    splits = dict[str, list[SourceFile]]()
    if (root / "dataset_dict.json").is_file():
        split_names = [split for split in _names_of_splits(root) if split != "train"]
        splits = {split: _saved_dataset(root / split, shown_root / split) for split in split_names}
        return {split: files for split, files in splits.items() if files}
    all_names = sorted(_walk(root, source.glob))
    candidates = (
        all_names
        if source.glob
        else _recognized(all_names, rows=rows or is_row_format(source.format))
    )
    divided = _divided(source, candidates).others if candidates else {}
    return {
        split: _files(source, root, shown_root, names, rows=rows)
        for split, names in divided.items()
    }


# Beginnings of names of settings, which are no data.
_SETTINGS = ("config", "dataset_info", "metadata", "package", "special_tokens", "tokenizer")


def unread_files(source: Source, *, rows: bool = False, key: str = "data.glob=") -> str | None:
    """The warning about files of a folder that may be data, but of another format than those that `list_files` reads,
    and the glob that reads them. `key`: the option before the glob. None without such files.
    """
    root = data_place(source.path)
    if (
        source.glob
        or not root.is_dir()
        or (root / "state.json").is_file()
        or (root / "dataset_dict.json").is_file()
    ):
        return None
    all_names = sorted(_walk(root, None))
    rows = rows or is_row_format(source.format)
    read_names = _recognized(all_names, rows=rows)
    if rows and read_names and with_pictures_beside(read_names, all_names) == read_names:
        # Captions beside pictures: one may have been forgotten.
        stems = {str(PurePosixPath(name).with_suffix("")) for name in read_names}
        bare = [
            name
            for name in all_names
            if is_picture(name) and str(PurePosixPath(name).with_suffix("")) not in stems
        ]
        if bare:
            number = counted(len(bare), "pictures")
            text = PurePosixPath(bare[0]).with_suffix(".txt").name
            return f"{number} without a text, not trained on, the first {bare[0]}: write {text} beside it"
    unread_names = [
        name
        for name in all_names
        if name not in set(read_names) and _may_be_data(name, read_names, rows=rows)
    ]
    if not unread_names:
        return None
    examples = (
        f"is not read: {unread_names[0]}"
        if len(unread_names) == 1
        else f"are not read, such as {unread_names[0]}"
    )
    warning = f"{counted(len(unread_names), 'files')} that may be data {examples}"
    all_files = {*_divided(source, read_names).train, *unread_names}
    for glob in ("*.json*", "*"):
        if {name for name in all_names if fnmatch.fnmatch(Path(name).name, glob)} == all_files:
            return f'{warning}; {key}"{glob}" reads all'
    return f'{warning}; {key}"*{suffix_of(Path(unread_names[0]))}*" reads such files instead'


def _may_be_data(name: str, read_names: list[str], *, rows: bool) -> bool:
    """Whether a file that is not in `read_names` may be data. Tables next to code are mostly settings.

    `rows`: of a dataset of rows, which texts do not have.
    """
    if not read_names or Path(name).name.lower().startswith((*_DESCRIPTIONS, *_SETTINGS)):
        return False
    split = split_of(name)
    if split is not None and split.kind != "train":
        return False
    suffix = suffix_of(Path(name))
    data = suffix_of(Path(read_names[0])) in DATA
    return (suffix in TABLES and (rows or data)) or (suffix in TEXT and data and not rows)


def _format(path: Path, format: str) -> str:
    if format == "tokens" or is_row_format(format):
        return _format(path, "auto")
    if format != "auto":
        return format
    suffix = suffix_of(path)
    format_of_suffix = DATA.get(suffix) or TABLES.get(suffix) or TEXT.get(suffix) or "code"
    if path.suffix in COMPRESSED and format_of_suffix in ("parquet", "arrow"):
        problem = f"a {format_of_suffix} file compressed as {path.suffix} is not supported"
        raise UserError(problem, where=str(path), fix="decompress it")
    return format_of_suffix


def _nothing(root: Path, glob: str | None, names: list[str]) -> UserError:
    if glob:
        names = sorted(_walk(root, None))
    if not names:
        return UserError(
            "the folder is empty", where=f"data.path: {root}", fix="add files, or set data.path"
        )
    if not glob and any(map(is_picture, names)):
        return UserError(
            "the folder has pictures, and no file that says what is in them",
            where=f"data.path: {root}",
            fix='add metadata.jsonl with rows such as {"file_name": "a.png", "text": "A red box."}, or a.txt beside'
            " a.png",
        )
    suffixes = Counter(suffix_of(Path(name)) for name in names).most_common(3)
    kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in suffixes)
    if glob:
        meant = next(
            (f'set data.glob="*{suffix}"' for suffix, _ in suffixes if suffix), "set data.glob"
        )
        return UserError(
            f"no file matches {glob!r}; most are {kinds}", where=f"data.path: {root}", fix=meant
        )
    problem = f"no file of a known format; most are {kinds}"
    return UserError(problem, where=f"data.path: {root}", fix='set data.glob="*.xyz"')


def _saved_dataset(root: Path, shown_root: Path) -> list[SourceFile]:
    """The files of a folder that datasets' save_to_disk wrote; of several splits, of train."""
    if (root / "dataset_dict.json").is_file():
        splits = _names_of_splits(root)
        if "train" not in splits:
            problem = f"none of its splits is called train: {', '.join(splits)}"
            raise UserError(problem, where=str(root), fix=f"set data.path to {root}/<split>")
        return _saved_dataset(root / "train", shown_root / "train")
    names = _read_saved(
        root / "state.json",
        lambda state: [str(entry["filename"]) for entry in state["_data_files"]],
    )
    missing_names = [
        name for name in names if Path(name).name != name or not (root / name).is_file()
    ]
    if missing_names:
        raise UserError(
            f"{missing_names[0]} is missing", where=str(root), fix="save the dataset again"
        )
    return [SourceFile(root / name, name, "arrow", str(shown_root / name)) for name in names]


def _names_of_splits(root: Path) -> list[str]:
    """The splits that datasets' save_to_disk wrote. Raises UserError when the file is damaged."""

    def checked(description: Any) -> list[str]:
        names = description["splits"]
        plain = (
            isinstance(name, str) and name != ".." and Path(name).name == name for name in names
        )
        if not isinstance(names, list) or not all(plain):
            raise TypeError("splits is no list of names")
        return names

    return _read_saved(root / "dataset_dict.json", checked)


def _read_saved(path: Path, names: Callable[[Any], list[str]]) -> list[str]:
    """The `names` in a JSON file of datasets' save_to_disk. Raises UserError when it is damaged."""
    try:
        return names(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = "not a folder of datasets' save_to_disk, or damaged"
        fix = "save the dataset again"
        raise UserError(problem, where=str(path), fix=fix) from error
