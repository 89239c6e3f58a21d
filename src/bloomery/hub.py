"""Why something is not fetched from the Hub: what is unsafe or not whole, and the library's own errors as sentences"""

import errno
import fnmatch
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, final

from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.core.units import format_bytes

Kind = Literal["model", "dataset"]
Part = Literal["model", "config", "tokenizer", "dataset"]  # config: of a model whose weights will be wanted, too
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(@\w[\w./-]{0,199})?")


@final
@dataclass(frozen=True)
class Named:
    """`ORG/NAME` or `ORG/NAME@REVISION`, a branch, tag or commit."""

    repo: str
    revision: str | None
    kind: Kind

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def command(self) -> str:
        """What a person types to fetch it."""
        return f"bloomery download {self}" + (" --dataset" if self.kind == "dataset" else "")

    @property
    def page(self) -> str:
        site = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        return f"{site}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id, `ORG/NAME` or `ORG/NAME@REVISION`, and nothing of that name lies here."""
    return _ID.fullmatch(name) is not None and ".." not in name and not Path(name).exists()


def parse(name: str, kind: Kind) -> Named:
    """Raises UserError for what is neither a path that exists nor an id."""
    if name.startswith("runs/"):
        remedy = "train it first (runs/demo: `bloomery demo`), or name another model"
        raise UserError("that run is not here, or has no model in this place", where=name, remedy=remedy)
    if not _ID.fullmatch(name) or ".." in name:
        if name and expanded(name).exists():
            problem = "it lies on this machine: there is nothing to fetch"
            raise UserError(problem, where=name, remedy="name it as it is where it is needed")
        what = "model" if kind == "model" else "data set"
        raise UserError(
            f"there is no such folder, and no {what} of the Hub can have this name",
            where=name[:200] or "an empty name",
            remedy="mend the path, or write ORG/NAME as it stands on huggingface.co",
        )  # fmt: skip
    repo, _, revision = name.partition("@")
    return Named(repo, revision or None, kind)


def token() -> str | Literal[False]:
    """HF_TOKEN of the environment; False keeps the library from looking for one in the home folder."""
    return os.environ.get("HF_TOKEN", "").strip() or False


def cache_folder() -> Path:
    """Where the Hub's own tools keep what they fetch: HF_HUB_CACHE, or below HF_HOME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def refuse(named: Named, part: Part, listing: dict[str, int], wanted: dict[str, int]) -> None:
    """Raises UserError where the repository does not hold what is asked of it, or in no form that is safe to open."""
    if part == "dataset":
        refuse_dataset(named, listing, wanted)
    elif part != "tokenizer":
        refuse_model(named, listing)
    elif not wanted.keys() & {"tokenizer.json", "tokenizer.model", "spiece.model"}:
        remedy = "name another model of the same family, or a tokenizer.json"
        raise UserError("it holds neither tokenizer.json nor tokenizer.model", where=named.page, remedy=remedy)


def refuse_model(named: Named, listing: dict[str, int]) -> None:
    """Raises UserError for a repository without a config, or without weights that are safe to open."""
    if "config.json" not in listing and "adapter_config.json" not in listing:
        held = ", ".join(sorted(listing)[:4]) or "no file at all"
        gguf = any(name.endswith(".gguf") for name in listing)
        remedy = "name the repository that its author converted it from" if gguf else "check the name"
        remedy += f"; a data set needs --dataset: `bloomery download {named} --dataset`" if not gguf else ""
        raise UserError(f"it holds no config.json, so it is no model: {held}", where=named.page, remedy=remedy)
    if any(name.endswith(".safetensors") and "/" not in name for name in listing):
        return
    pickled = next((name for name in sorted(listing) if name.endswith(PICKLED)), None)
    if pickled is None:
        raise UserError("it holds no weights", where=named.page, remedy="name a repository that has model.safetensors")
    raise UserError(
        f"its weights are pickles ({pickled}): opening one could run anything, so none is downloaded",
        where=named.page,
        remedy=f"look for a copy in safetensors: {named.page}/discussions often has a branch, ID@refs/pr/N",
    )


def refuse_dataset(named: Named, listing: dict[str, int], wanted: dict[str, int]) -> None:
    """Raises UserError where no file of a format that is read here would be fetched."""
    if wanted:
        return
    script = next((name for name in sorted(listing) if name.endswith(".py")), None)
    if script is not None:
        raise UserError(
            f"its data come from a program, {script}, which is never run here",
            where=named.page, remedy=f"take the Hub's own copy in parquet: {named.repo}@refs/convert/parquet",
        )  # fmt: skip
    held = ", ".join(sorted(listing)[:4]) or "no file at all"
    raise UserError(
        f"no file of it is one that can be read here: {held}", where=named.page,
        remedy="mend data.glob, or name a data set of parquet, jsonl, json, csv, arrow or text files",
    )  # fmt: skip


def refuse_full(named: Named, goal: Path, size: int) -> None:
    """Counts what is there already as missing, so that only a disk which could not hold all of it twice is refused."""
    place = next(folder for folder in (goal.absolute(), *goal.absolute().parents) if folder.is_dir())
    free, here = shutil.disk_usage(place).free, _bytes_here(named, goal)
    if free + here < size:
        raise UserError(
            f"{named} takes {format_bytes(size)}, and {format_bytes(free)} are free", where=str(place),
            remedy="free some space, or set HF_HUB_CACHE to a folder on a larger disk",
        )  # fmt: skip


def _bytes_here(named: Named, goal: Path) -> int:
    """Of this model or data set, whole files and beginnings alike."""
    own = goal / f"{named.kind}s--{named.repo.replace('/', '--')}"
    files = (path for path in (own if own.is_dir() else goal).rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) if goal.is_dir() else 0


def checked(folder: Path, wanted: dict[str, int], named: Named) -> Path:
    """Raises UserError when a file is missing, has another size than the Hub says, or leads out of the repository."""
    home = folder.resolve()
    roots = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    for name, size in wanted.items():
        path = (folder / name).resolve()
        if not any(path.is_relative_to(root) for root in roots):
            remedy = "delete it, and run the same command again"
            raise UserError(f"{name} is a link that leads out of the folder", where=str(folder), remedy=remedy)
        found = path.stat().st_size if path.is_file() else None
        if found is None or (size and found != size):
            told = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            remedy = f"delete {path if found is not None else folder}, and run `{named.command}` again"
            raise UserError(f"{name} {told}", where=str(folder), remedy=remedy)
    return folder


@contextmanager
def explained(named: Named) -> Iterator[None]:
    """What the library raises, as one sentence and what to do about it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = _told(named, error)
        if told is None:
            raise
        raise told from error


def _told(named: Named, error: Exception) -> UserError | None:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return _gated(named)
    if isinstance(error, errors.RepositoryNotFoundError):
        return _unknown(named)
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = f"see {named.page}/tree/main for its branches and tags"
        return UserError(f"it has no revision {named.revision}", where=named.page, remedy=remedy)
    if isinstance(error, errors.OfflineModeIsEnabled) or _offline(error):
        return UserError(
            f"{named} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it", where="HF_HUB_OFFLINE",
            remedy=f"unset HF_HUB_OFFLINE, or run `{named.command} --to DIR` elsewhere and bring that folder here",
        )  # fmt: skip
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return _refused_access(named, int(status))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError("the disk is full", where=str(cache_folder()), remedy=f"free some space; then {_again(named)}")
    if isinstance(error, PermissionError):
        remedy = "set HF_HUB_CACHE to a folder that you may write, or give --to"
        return UserError("the folder cannot be written", where=str(error.filename or cache_folder()), remedy=remedy)
    if isinstance(error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError | OSError) or _of_the_network(error):
        return _unreachable(named, error, status)
    return None


def _offline(error: Exception) -> bool:
    """The library wraps its refusal where it looked into the cache first."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error.__cause__, OfflineModeIsEnabled)


def _of_the_network(error: Exception) -> bool:
    """The library's HTTP client changed its name between versions: requests, httpx, httpx2."""
    return type(error).__module__.split(".")[0] in ("requests", "httpx", "httpx2", "httpcore", "urllib3")


def _again(named: Named) -> str:
    return f"`{named.command}` goes on with the files that are missing"


def _gated(named: Named) -> UserError:
    if token():
        problem = "your token has no access to it yet"
        remedy = f"ask for it on {named.page} with the account that the token is of"
    else:
        problem = "its author asks for an agreement before it is downloaded"
        remedy = (
            f"agree on {named.page}, then `export HF_TOKEN=...` (a token of https://huggingface.co/settings/tokens)"
        )
    return UserError(problem, where=named.page, remedy=remedy)


def _unknown(named: Named) -> UserError:
    what, other = ("model", "a data set needs --dataset") if named.kind == "model" else ("data set", "")
    private = "" if token() else "if it is private, `export HF_TOKEN=...`"
    remedy = "; ".join(part for part in ("mend the name", private, other) if part)
    return UserError(f"the Hub knows no {what} {named.repo}, or it is private", where=named.page, remedy=remedy)


def _refused_access(named: Named, status: int) -> UserError:
    problem = f"the Hub refuses the token in HF_TOKEN ({status})" if token() else f"the Hub asks for a token ({status})"
    remedy = "`export HF_TOKEN=...` with a token of https://huggingface.co/settings/tokens that may read it"
    return UserError(problem, where=named.page, remedy=remedy)


def _unreachable(named: Named, error: Exception, status: int | None) -> UserError:
    reason = f"it answers {status}" if status is not None else _reason(error)
    return UserError(
        f"the Hub cannot be reached: {reason}", where=named.page,
        remedy=f"check the network; {_again(named)}. Without one, bring the folder here and name it",
    )  # fmt: skip


def _reason(error: Exception) -> str:
    """The innermost cause, in a line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


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
