"""Why something is not fetched from the Hub: what is unsafe or not whole, and the library's own errors as sentences"""

import errno
import fnmatch
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, final

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
        fix = "train it first (runs/demo: `bloomery demo`), or name another model"
        raise UserError("that run is not here, or has no model in this place", where=name, fix=fix)
    if not _ID.fullmatch(name) or ".." in name:
        if name and expanded(name).exists():
            problem = "it lies on this machine: there is nothing to fetch"
            raise UserError(problem, where=name, fix="name it as it is where it is needed")
        what = "model" if kind == "model" else "data set"
        raise UserError(
            f"there is no such folder, and no {what} of the Hub can have this name",
            where=name[:200] or "an empty name",
            fix="mend the path, or write ORG/NAME as it stands on huggingface.co",
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
    """Raises UserError where the repository does not hold what is asked of it, or in no form that is safe to open: a
    model has a config and safetensors, a data set files of a format that is read here.
    """
    held = ", ".join(sorted(listing)[:4]) or "no file at all"
    problem = ""
    if part == "tokenizer":
        if not wanted.keys() & {"tokenizer.json", "tokenizer.model", "spiece.model"}:
            problem = "it holds neither tokenizer.json nor tokenizer.model"
            fix = "name another model of the same family, or a tokenizer.json"
    elif part == "dataset":
        script = next((name for name in sorted(listing) if name.endswith(".py")), None)
        if not wanted and script is not None:
            problem = f"its data come from a program, {script}, which is never run here"
            fix = f"take the Hub's own copy in parquet: {named.repo}@refs/convert/parquet"
        elif not wanted:
            problem = f"no file of it is one that can be read here: {held}"
            fix = "mend data.glob, or name a data set of parquet, jsonl, json, csv, arrow or text files"
    elif "config.json" not in listing and "adapter_config.json" not in listing:
        problem = f"it holds no config.json, so it is no model: {held}"
        fix = f"check the name; a data set needs --dataset: `bloomery download {named} --dataset`"
        if any(name.endswith(".gguf") for name in listing):
            fix = "name the repository that its author converted it from"
    elif not any(name.endswith(".safetensors") and "/" not in name for name in listing):
        pickled = next((name for name in sorted(listing) if name.endswith(PICKLED)), None)
        problem, fix = "it holds no weights", "name a repository that has model.safetensors"
        if pickled is not None:
            problem = f"its weights are pickles ({pickled}): opening one could run anything, so none is downloaded"
            fix = f"look for a copy in safetensors: {named.page}/discussions often has a branch, ID@refs/pr/N"
    if problem:
        raise UserError(problem, where=named.page, fix=fix)


def refuse_full(named: Named, goal: Path, size: int) -> None:
    """Counts what is there already as missing, so that only a disk which could not hold all of it twice is refused."""
    place = next(folder for folder in (goal.absolute(), *goal.absolute().parents) if folder.is_dir())
    own = goal / f"{named.kind}s--{named.repo.replace('/', '--')}"
    files = (path for path in (own if own.is_dir() else goal).rglob("*") if path.is_file() and not path.is_symlink())
    free, here = shutil.disk_usage(place).free, sum(path.stat().st_size for path in files) if goal.is_dir() else 0
    if free + here < size:
        raise UserError(
            f"{named} takes {format_bytes(size)}, and {format_bytes(free)} are free", where=str(place),
            fix="free some space, or set HF_HUB_CACHE to a folder on a larger disk",
        )  # fmt: skip


def checked(folder: Path, wanted: dict[str, int], named: Named) -> Path:
    """Raises UserError when a file is missing, has another size than the Hub says, or leads out of the repository."""
    home = folder.resolve()
    roots = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    for name, size in wanted.items():
        path = (folder / name).resolve()
        if not any(path.is_relative_to(root) for root in roots):
            fix = "delete it, and run the same command again"
            raise UserError(f"{name} is a link that leads out of the folder", where=str(folder), fix=fix)
        found = path.stat().st_size if path.is_file() else None
        if found is None or (size and found != size):
            told = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            fix = f"delete {path if found is not None else folder}, and run `{named.command}` again"
            raise UserError(f"{name} {told}", where=str(folder), fix=fix)
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

    status = getattr(getattr(error, "response", None), "status_code", None)
    again, page, known = f"`{named.command}` goes on with the files that are missing", named.page, token()
    tokens = "a token of https://huggingface.co/settings/tokens"
    # The library wraps its refusal where it looked into the cache first.
    offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
    # The library's HTTP client changed its name between versions.
    network = type(error).__module__.split(".")[0] in ("requests", "httpx", "httpx2", "httpcore", "urllib3")
    match error:
        case errors.GatedRepoError() if known:
            problem = "your token has no access to it yet"
            return UserError(problem, where=page, fix=f"ask for it on {page} with the account that the token is of")
        case errors.GatedRepoError():
            problem = "its author asks for an agreement before it is downloaded"
            return UserError(problem, where=page, fix=f"agree on {page}, then `export HF_TOKEN=...` ({tokens})")
        case errors.RepositoryNotFoundError():
            what, other = ("data set", "") if named.kind == "dataset" else ("model", "a data set needs --dataset")
            private = "" if known else "if it is private, `export HF_TOKEN=...`"
            fix = "; ".join(part for part in ("mend the name", private, other) if part)
            return UserError(f"the Hub knows no {what} {named.repo}, or it is private", where=page, fix=fix)
        case errors.RevisionNotFoundError():
            fix = f"see {page}/tree/main for its branches and tags"
            return UserError(f"it has no revision {named.revision}", where=page, fix=fix)
        case _ if offline or isinstance(error, errors.OfflineModeIsEnabled):
            problem = f"{named} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it"
            fix = f"unset HF_HUB_OFFLINE, or run `{named.command} --to DIR` elsewhere and bring that folder here"
            return UserError(problem, where="HF_HUB_OFFLINE", fix=fix)
        case _ if status in (401, 403):
            refused = "the Hub refuses the token in HF_TOKEN" if known else "the Hub asks for a token"
            fix = f"`export HF_TOKEN=...` with {tokens} that may read it"
            return UserError(f"{refused} ({status})", where=page, fix=fix)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return UserError("the disk is full", where=str(cache_folder()), fix=f"free some space; then {again}")
        case PermissionError():
            fix = "set HF_HUB_CACHE to a folder that you may write, or give --to"
            where = str(error.filename or cache_folder())
            return UserError("the folder cannot be written", where=where, fix=fix)
        case _ if network or isinstance(error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError | OSError):
            cause: BaseException = error
            while isinstance(cause.__cause__, Exception):
                cause = cause.__cause__
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:160]
            reason = reason if status is None else f"it answers {status}"
            fix = f"check the network; {again}. Without one, bring the folder here and name it"
            return UserError(f"the Hub cannot be reached: {reason}", where=page, fix=fix)
    return None


PREFIX = "hub:"  # before a data set's id where a path is expected
CONFIG = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")  # all of a model but its weights
WEIGHTS = ("*.safetensors",)
ASIDE = ("*/*", "consolidated*", "*.index.fp*.json", "*.fp16.safetensors", "*.fp32.safetensors")  # the same once more
TABLES = ("*.parquet", "*.jsonl", "*.ndjson", "*.json", "*.csv", "*.tsv", "*.arrow", "*.txt")
DATA = (*TABLES, *(f"{pattern}.{packed}" for pattern in TABLES for packed in ("gz", "zst", "xz", "bz2")))
NO_DATA = ("dataset_infos.json", "*/dataset_infos.json", ".*")


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
        raise UserError(problem, where=error.where, fix=error.fix) from error


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
        raise UserError(f"{named} has not been downloaded", where=str(name), fix=f"`{named.command}` fetches it")
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


def download(name: str, *, part: Part = "model", to: Path | None = None, glob: str | None = None) -> Path:
    """Fetch what is still missing into the Hub's cache, or into `to`; returns the folder. `glob`: of a data set.

    A download that was broken off goes on: files that are whole are kept. Within one call a file whose connection
    broke goes on in its middle. Raises UserError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    named = parse(name, "dataset" if part == "dataset" else "model")
    allow, aside = _patterns(part, glob)
    if to is None and HF_HUB_OFFLINE and (kept := _cached(named, allow, aside)) is not None:
        return kept
    with explained(named):
        api = HfApi(token=token())
        info: Any = api.repo_info(named.repo, repo_type=named.kind, revision=named.revision, files_metadata=True)
        listing = {str(entry.rfilename): int(entry.size or 0) for entry in info.siblings or []}
        for held in listing:
            path = PurePosixPath(held)
            if path.is_absolute() or ".." in path.parts or "\\" in held or not held.isprintable():
                problem = f"it holds a file named {ascii(held)[:80]}, which leads out of its folder"
                raise UserError(problem, where=named.page, fix="use a copy from a source that you trust")
        wanted = {
            held: size
            for held, size in listing.items()
            if any(fnmatch.fnmatch(held, pattern) for pattern in allow)
            and not any(fnmatch.fnmatch(held, pattern) for pattern in aside)
        }
        refuse(named, part, listing, wanted)
        goal = to or cache_folder()
        refuse_full(named, goal, sum(wanted.values()))
        told = f"{named}: {len(wanted)} files, {format_bytes(sum(wanted.values()))}, into {goal}"
        print(told, file=sys.stderr, flush=True)
        folder = _snapshot(named, allow, aside, local_dir=to, token=token())
    _tidy(folder)
    return checked(folder, wanted, named)


def _tidy(folder: Path) -> None:
    """Delete what killed downloads left of files that are whole by now: the library takes no such rest up again."""
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
    rests = (blobs or folder / ".cache" / "huggingface").rglob("*.incomplete")
    for rest in list(rests):
        if blobs is None or (blobs / rest.name.split(".")[0]).is_file():
            rest.unlink(missing_ok=True)


def _patterns(part: Part, glob: str | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which files are fetched, and which of these are not. A recipe's glob means names where it has no slash, and paths
    below the folder where it has one.
    """
    if part != "dataset":
        return (*CONFIG, *WEIGHTS) if part == "model" else CONFIG, ASIDE
    plain = (glob or "").removeprefix("**/")
    return DATA if glob is None else (plain,) if "/" in plain else (plain, f"*/{plain}"), NO_DATA


def _snapshot(named: Named, allow: Sequence[str], aside: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it warns of is said here, or is an error
    if not sys.stderr.isatty():
        disable_progress_bars()
    options |= {"allow_patterns": list(allow) or None, "ignore_patterns": list(aside) or None}
    return Path(str(snapshot_download(named.repo, repo_type=named.kind, revision=named.revision, **options)))


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
