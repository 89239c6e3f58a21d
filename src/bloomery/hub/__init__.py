"""Models and data sets of the Hugging Face Hub: fetched once into its cache, from then on read without a network

A token comes from the environment (HF_TOKEN) and from nowhere else. Pickled weights and programs are never fetched.
"""

import fnmatch
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from bloomery.errors import UserError
from bloomery.hub.named import Named, Part, cache_folder, is_hub_id, parse, token
from bloomery.hub.refusals import checked, explained, refuse, refuse_full
from bloomery.shell import expanded
from bloomery.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = [
    "PREFIX", "Named", "Part", "cached_model", "data_place", "download", "fetch_dataset", "fetch_model",
    "fetch_tokenizer", "is_hub_id", "local_model", "parse",
]  # fmt: skip

PREFIX = "hub:"  # before a data set's id where a path is expected
CONFIG = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")  # all of a model but its weights
WEIGHTS = ("*.safetensors",)
ASIDE = ("*/*", "consolidated*", "*.index.fp*.json", "*.fp16.safetensors", "*.fp32.safetensors")  # the same once more
TABLES = ("*.parquet", "*.jsonl", "*.ndjson", "*.json", "*.csv", "*.tsv", "*.arrow", "*.txt")
DATA = (*TABLES, *(f"{pattern}.{packed}" for pattern in TABLES for packed in ("gz", "zst", "xz", "bz2")))
NO_DATA = ("dataset_infos.json", "*/dataset_infos.json", ".*")
Say = Callable[[str], None]


def fetch_model(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: a local one as it is, else the Hub's cache, else downloaded into it. Raises UserError.

    Without `weights` its config and tokenizer are enough, and nothing more is downloaded.
    """
    found = cached_model(name, weights=weights)
    if found is not None:
        return found
    try:
        return download(str(name), part="model" if weights else "config")
    except UserError as error:
        problem = f"there is no folder {name} here; on the Hub: {error.problem}"
        raise UserError(problem, where=error.where, remedy=error.remedy) from error


def cached_model(name: str | Path, *, weights: bool = False) -> Path | None:
    """`fetch_model` without a network: None where the Hub would have to be asked. Raises UserError."""
    path = expanded(str(name))
    if path.exists():
        return path
    named = parse(str(name), "model")
    folder = _cached(named, *_patterns("model" if weights else "config"))
    complete = folder is not None and (not weights or _has_weights(folder))
    return folder if complete else None


def local_model(name: str | Path) -> Path:
    """The folder of a model that was fetched before, or of a local one. Raises UserError; no network is asked."""
    found = cached_model(name)
    if found is None:
        named = parse(str(name), "model")
        raise UserError(f"{named} has not been downloaded", where=str(name), remedy=f"`{named.command}` fetches it")
    return found


def fetch_tokenizer(name: str) -> Path:
    """A tokenizer's file or folder, as `fetch_model`; of a model it is fetched without weights, whatever they are."""
    path = expanded(name)
    if path.exists():
        return path
    named = parse(name, "model")
    return _cached(named, CONFIG, ASIDE) or download(name, part="tokenizer")


def fetch_dataset(name: str, *, glob: str | None = None) -> Path:
    """The folder of a data set, `hub:ORG/NAME` or `ORG/NAME`; with `glob` the files that match. Raises UserError."""
    named = parse(name.removeprefix(PREFIX), "dataset")
    found = _cached(named, *_patterns("dataset", glob))
    return download(str(named), part="dataset", glob=glob) if found is None else found


def data_place(path: str) -> Path:
    """Where the data of a recipe's `path` lie: a path as it is; for `hub:ORG/NAME` the folder that was fetched before,
    or a path at which nothing is. No network is asked; the cache's layout is the one that its documentation states.
    """
    if not path.startswith(PREFIX):
        return Path(path)
    named = parse(path.removeprefix(PREFIX), "dataset")
    kept = cache_folder() / f"datasets--{named.repo.replace('/', '--')}"
    ref = kept / "refs" / (named.revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else named.revision or "main"
    folder = kept / "snapshots" / commit
    return folder if folder.is_dir() else Path(path)


def download(
    name: str, *, part: Part = "model", to: Path | None = None, glob: str | None = None, say: Say | None = None
) -> Path:
    """Fetch what is still missing into the Hub's cache, or into `to`; returns the folder. `glob`: of a data set.

    A download that was broken off goes on: files that are whole are kept. Within one call a file whose connection
    broke goes on in its middle. Raises UserError.
    """
    named = parse(name, "dataset" if part == "dataset" else "model")
    say = say or _say
    allow, aside = _patterns(part, glob)
    if to is None and _forbidden() and (kept := _cached(named, allow, aside)) is not None:
        return kept
    with explained(named):
        api = _api()
        listing = _listing(api, named)
        wanted = {path: size for path, size in listing.items() if _matches(path, allow) and not _matches(path, aside)}
        refuse(named, part, listing, wanted)
        goal = to or cache_folder()
        refuse_full(named, goal, sum(wanted.values()))
        say(f"{named}: {len(wanted)} files, {format_bytes(sum(wanted.values()))}, into {goal}")
        folder = _snapshot(named, allow, aside, local_dir=to, token=token())
    _tidy(folder)
    return checked(folder, wanted, named)


def _forbidden() -> bool:
    """Whether HF_HUB_OFFLINE is set, in the library's reading."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return bool(HF_HUB_OFFLINE)


def _tidy(folder: Path) -> None:
    """Delete what killed downloads left of files that are whole by now: the library takes no such rest up again."""
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
    rests = (blobs or folder / ".cache" / "huggingface").rglob("*.incomplete")
    for rest in list(rests):
        if blobs is None or (blobs / rest.name.split(".")[0]).is_file():
            rest.unlink(missing_ok=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _patterns(part: Part, glob: str | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which files are fetched, and which of these are not."""
    if part == "dataset":
        return _globbed(glob), NO_DATA
    return (*CONFIG, *WEIGHTS) if part == "model" else CONFIG, ASIDE


def _globbed(glob: str | None) -> tuple[str, ...]:
    """A recipe's glob means names where it has no slash, and paths below the folder where it has one."""
    if glob is None:
        return DATA
    plain = glob.removeprefix("**/")
    return (plain,) if "/" in plain else (plain, f"*/{plain}")


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _api() -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(token=token())


def _listing(api: "HfApi", named: Named) -> dict[str, int]:
    """Every file of the repository and its bytes. Raises UserError for names that lead elsewhere."""
    info: Any = api.repo_info(named.repo, repo_type=named.kind, revision=named.revision, files_metadata=True)
    listing = {str(entry.rfilename): int(entry.size or 0) for entry in info.siblings or []}
    for name in listing:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
            problem = f"it holds a file named {ascii(name)[:80]}, which leads out of its folder"
            raise UserError(problem, where=named.page, remedy="use a copy from a source that you trust")
    return listing


def _snapshot(named: Named, allow: Sequence[str], aside: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it warns of is said here, or is an error
    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = snapshot_download(
        named.repo,
        repo_type=named.kind,
        revision=named.revision,
        allow_patterns=list(allow) or None,
        ignore_patterns=list(aside) or None,
        **options,
    )
    return Path(str(folder))


def _cached(named: Named, allow: Sequence[str], aside: Sequence[str]) -> Path | None:
    """The snapshot in the cache, where the library finds it complete; None where there is none."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(named, allow, aside, local_files_only=True, token=False)
    except LocalEntryNotFoundError:  # also of a snapshot whose listing says that files are missing
        return None
    return folder if any(path.is_file() for path in folder.rglob("*")) else None


def _has_weights(folder: Path) -> bool:
    """Older versions of the library know no listing: a model counts as whole when every shard of its index is there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = set(re.findall(r'"([^"/\\]+\.safetensors)"', index.read_text(encoding="utf-8", errors="replace")))
    return bool(names) and all((folder / name).is_file() for name in names)
