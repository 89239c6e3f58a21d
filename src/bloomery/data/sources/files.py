"""Which files a source means, in an order that no file system decides, and what format each has."""

import fnmatch
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bloomery.core.errors import UserError, one_line
from bloomery.core.text import closest
from bloomery.core.units import counted
from bloomery.data.chat.formats import FORMATS
from bloomery.data.sources.readers import COMPRESSED
from bloomery.hub import PREFIX, data_place
from bloomery.recipe.schema import Source

DATA = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
TABLES = {".json": "json", ".csv": "csv", ".tsv": "tsv"}  # data or configuration: it depends on what lies beside them
TEXT = {".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tex": "text"}
CODE_SUFFIXES = """
asm bash c cc clj cmake cpp cs css cu cuh cxx d dart el erl ex exs f f90 fs go h hip hpp hs html java jl js jsx kt lisp
lua m ml mli mm nim nix php pl proto ps1 py pyi r rb rs s scala scm scss sh sql sv swift tf ts tsx v vhd vue zig zsh
"""
CODE = {f".{suffix}": "code" for suffix in CODE_SUFFIXES.split()}
_SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?(?=\.)")  # how the Hub's data sets number the files of a split
_VALIDATION = ("validation", "valid", "val", "dev", "eval")  # splits to evaluate on while training, the likeliest first
_EVALUATION = {*_VALIDATION, "test"}
_DESCRIPTIONS = ("readme", "license", "licence", "dataset_card", "changelog")


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name`: its path below the source's own; `found`: from the working folder, or of a data set
    of the Hub, where a person finds it.
    """

    path: Path
    name: str
    format: str
    found: str | None = None

    @property
    def shown(self) -> str:
        """What messages call it: one line of plain text, whatever its name is made of."""
        return one_line(self.found or self.name)


def suffix_of(path: Path) -> str:
    """The suffix that tells the format, without a compression's."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def list_files(source: Source, *, rows: bool = False) -> list[SourceFile]:
    """Sorted by name. Raises UserError when there are none, naming what lies there instead, and for what may not be
    read. `rows`: conversations and pairs are looked for, so that tables come before texts that only describe them.
    """
    try:
        return _listed(source, rows=rows)
    except OSError as error:
        problem, fix = f"cannot be read: {error.strerror}", "check its owner, its permissions and the disk"
        raise UserError(problem, where=str(error.filename or source.path), fix=fix) from error
    except UnicodeEncodeError as error:
        problem, fix = "this locale has no bytes for the letters of the name", "set LANG=C.UTF-8"
        raise UserError(problem, where=f"data.path: {source.path}", fix=fix) from error


def _listed(source: Source, *, rows: bool) -> list[SourceFile]:
    root = data_place(source.path)
    if not root.exists() and source.path.startswith(PREFIX):
        fix = f"`bloomery download {source.path.removeprefix(PREFIX)} --dataset` fetches it"
        raise UserError("the data set has not been downloaded", where=f"data.path: {source.path}", fix=fix)
    if not root.exists():
        raise UserError("there is no such file or folder", where=f"data.path: {source.path}", fix=_near(root))
    if not root.is_file() and not root.is_dir():
        fix = "name a file or a folder of files"
        raise UserError("is neither a file nor a folder", where=f"data.path: {source.path}", fix=fix)
    shown = _shown(source.path, root)
    if root.is_file():
        return [SourceFile(root, root.name, _format(root, source.format), str(shown))]
    if (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
        return [replace(file, found=str(shown / file.path.relative_to(root))) for file in _saved_dataset(root)]
    found = sorted(_walk(root, source.glob))
    chosen = found if source.glob else _recognized(found, rows=rows or source.format in FORMATS)
    if not chosen:
        raise _nothing(root, source.glob, found)
    chosen = chosen if source.glob else train_files(chosen, str(root))
    return [SourceFile(root / name, name, _format(root / name, source.format), str(shown / name)) for name in chosen]


def _shown(said: str, root: Path) -> Path:
    """A source as a person finds it: below the working folder without that folder."""
    if said.startswith(PREFIX):
        return Path(said)
    here = Path.cwd()
    return root.relative_to(here) if root.is_relative_to(here) else root


def _near(root: Path) -> str:
    """What to do about a path that does not exist: the name beside it that was probably meant."""
    beside = list(root.parent.iterdir()) if root.parent.is_dir() else []
    names = {path.stem: path for path in sorted(beside, key=lambda path: (path.suffix == root.suffix, path.name))}
    near = closest(root.stem, names)  # that both end in .jsonl makes no two names alike
    return f"did you mean data.path={shlex.quote(str(names[near[0]]))}?" if near else "mend data.path"


def _walk(root: Path, glob: str | None) -> Iterator[str]:
    """Names below `root`. Links are followed, each real folder is entered once, hidden ones never."""
    seen: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in files:
            below = os.path.relpath(Path(folder, name), root)
            matches = glob is None or fnmatch.fnmatch(below if "/" in glob else name, glob.removeprefix("**/"))
            if matches and not name.startswith(".") and Path(folder, name).is_file():
                yield below


def _recognized(names: list[str], *, rows: bool) -> list[str]:
    """Of a folder without a glob: its data files; without any, its texts and code; without any, its tables. With
    `rows` tables come first where all else is a description.
    """
    suffixes = {name: suffix_of(Path(name)) for name in names}
    data = [name for name in names if suffixes[name] in DATA]
    texts = [name for name in names if suffixes[name] in TEXT or suffixes[name] in CODE]
    tables = [name for name in names if suffixes[name] in TABLES]
    described = all(Path(name).name.lower().startswith(_DESCRIPTIONS) for name in texts)
    return data or (tables if rows and described else []) or texts or tables


def other_splits(source: Source, *, rows: bool = False) -> dict[str, list[SourceFile]]:
    """The splits of a data set that `list_files` leaves aside, by their names: of a folder of datasets' save_to_disk,
    or of data files that are named after splits. None of a single file or where a glob chooses.
    """
    root = data_place(source.path)
    if source.glob or not root.is_dir() or (root / "state.json").is_file():
        return {}
    shown, splits = _shown(source.path, root), dict[str, list[SourceFile]]()
    if (root / "dataset_dict.json").is_file():
        for split in _names_of_splits(root):
            files = _saved_dataset(root / split) if split != "train" else []
            splits[split] = [replace(file, found=str(shown / split / file.name)) for file in files]
        return {split: files for split, files in splits.items() if files}
    found = _recognized(sorted(_walk(root, None)), rows=rows or source.format in FORMATS)
    kept = set(train_files(found, str(root)))
    for name in found:
        own = _split_of(name)
        if own and name not in kept:
            file = SourceFile(root / name, name, _format(root / name, source.format), str(shown / name))
            splits.setdefault(own, []).append(file)
    return splits


def validation_split(splits: Collection[str]) -> str | None:
    """Of the names of a data set's splits the one that is evaluated while training; what is called test is not."""
    begins = {split: re.split(r"[_.-]", split)[0] for split in sorted(splits)}
    ranked = [split for usual in _VALIDATION for split in (usual, *begins) if begins.get(split) == usual]
    return ranked[0] if ranked else None


_SETTINGS = ("config", "dataset_info", "metadata", "package", "special_tokens", "tokenizer")  # of programs, not data


def unread_files(source: Source, *, rows: bool = False, key: str = "data.glob=") -> str | None:
    """What of a folder may be data and is left aside by `list_files`, being of another kind than the files that it
    takes, and the glob that takes it; `key`: what the glob is written after. None where nothing is.
    """
    root = data_place(source.path)
    if source.glob or not root.is_dir() or (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
        return None
    found, rows = sorted(_walk(root, None)), rows or source.format in FORMATS
    taken = _recognized(found, rows=rows)
    aside = [name for name in found if name not in set(taken) and _may_be_data(name, taken, rows=rows)]
    if not aside:
        return None
    such = f"is not read: {aside[0]}" if len(aside) == 1 else f"are not read, such as {aside[0]}"
    told = f"{counted(len(aside), 'files')} that may be data {such}"
    wanted = {*train_files(taken, str(root)), *aside}
    for glob in ("*.json*", "*"):
        if {name for name in found if fnmatch.fnmatch(Path(name).name, glob)} == wanted:
            return f'{told}; {key}"{glob}" reads all'
    return f'{told}; {key}"*{suffix_of(Path(aside[0]))}*" reads such files instead'


def _may_be_data(name: str, taken: list[str], *, rows: bool) -> bool:
    """Of a file beside those that are taken. Tables beside code are mostly settings; texts hold no rows."""
    if not taken or Path(name).name.lower().startswith((*_DESCRIPTIONS, *_SETTINGS)):
        return False
    if re.split(r"[_.-]", _split_of(name) or "")[0] in _EVALUATION:
        return False
    suffix, data = suffix_of(Path(name)), suffix_of(Path(taken[0])) in DATA
    return (suffix in TABLES and (rows or data)) or (suffix in TEXT and data and not rows)


def train_files(names: list[str], where: str) -> list[str]:
    """Of data files that are named after splits, as the Hub's data sets are, those of train. Raises UserError where
    there are splits to examine with and none is called train.
    """
    splits = {name: split for name in names if (split := _split_of(name))}
    examined = {split for split in splits.values() if re.split(r"[_.-]", split)[0] in _EVALUATION}
    if "train" in splits.values():
        sharded = {name for name in splits if _SHARD.search(Path(name).name)}
        others = {name for name, split in splits.items() if split != "train" and (name in sharded or split in examined)}
        return [name for name in names if name not in others]
    other = sorted(set(splits.values()) - examined)
    if examined and other and all(_SHARD.search(Path(name).name) for name in splits):
        problem = f"none of its splits is called train: {', '.join(sorted(set(splits.values())))}"
        raise UserError(problem, where=f"data.path: {where}", fix=f'name one: data.glob="{other[0]}-*"')
    return names


def _split_of(name: str) -> str | None:
    """What a data file's name says of its split: train-00000-of-00002.parquet and train.jsonl are of train."""
    if suffix_of(Path(name)) not in DATA and suffix_of(Path(name)) not in TABLES:
        return None
    return _SHARD.sub("", Path(name).name).partition(".")[0]


def _format(path: Path, asked: str) -> str:
    if asked == "tokens" or asked in FORMATS:
        return _format(path, "auto")
    if asked != "auto":
        return asked
    suffix = suffix_of(path)
    known = DATA.get(suffix) or TABLES.get(suffix) or TEXT.get(suffix) or "code"
    if path.suffix in COMPRESSED and known in ("parquet", "arrow"):
        problem = f"a {known} file inside {path.suffix} is not read"
        raise UserError(problem, where=str(path), fix="decompress it: it is compressed inside")
    return known


def _nothing(root: Path, glob: str | None, found: list[str]) -> UserError:
    if glob:
        found = sorted(_walk(root, None))
    if not found:
        return UserError("the folder is empty", where=f"data.path: {root}", fix="put text there, or mend the path")
    suffixes = Counter(suffix_of(Path(name)) for name in found).most_common(3)
    kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in suffixes)
    if glob:
        meant = next((f'data.glob="*{suffix}"' for suffix, _ in suffixes if suffix), "mend data.glob")
        return UserError(f"no file matches {glob!r}; most are {kinds}", where=f"data.path: {root}", fix=meant)
    problem = f"no file of a known format lies here; most are {kinds}"
    return UserError(problem, where=f"data.path: {root}", fix='name them: data.glob="*.xyz"')


def _saved_dataset(root: Path) -> list[SourceFile]:
    """A folder that datasets' save_to_disk wrote; of a dictionary of splits, the one called train."""
    if (root / "dataset_dict.json").is_file():
        splits = _names_of_splits(root)
        if "train" not in splits:
            problem = f"none of its splits is called train: {', '.join(splits)}"
            raise UserError(problem, where=str(root), fix=f"set data.path to {root}/<split>")
        return _saved_dataset(root / "train")
    try:
        state = json.loads((root / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem, fix = "is no folder of datasets' save_to_disk, or a damaged one", "save the dataset again"
        raise UserError(problem, where=str(root / "state.json"), fix=fix) from error
    missing = [name for name in names if Path(name).name != name or not (root / name).is_file()]
    if missing:
        raise UserError(f"{missing[0]} is missing", where=str(root), fix="save the dataset again")
    return [SourceFile(root / name, name, "arrow") for name in names]


def _names_of_splits(root: Path) -> list[str]:
    """Of a dictionary of splits that datasets' save_to_disk wrote. Raises UserError when it is damaged."""
    path = root / "dataset_dict.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["splits"]
        plain = (isinstance(name, str) and name != ".." and Path(name).name == name for name in names)
        if not isinstance(names, list) or not all(plain):
            raise TypeError("splits is no list of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem, fix = "is no folder of datasets' save_to_disk, or a damaged one", "save the dataset again"
        raise UserError(problem, where=str(path), fix=fix) from error
    return names
