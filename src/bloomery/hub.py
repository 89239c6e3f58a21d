"""Download models and datasets from the Hugging Face Hub: safe files only, checked by size, errors with a fix"""

import errno
import fnmatch
import glob
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
from bloomery.core.text import expanded, redact_secrets
from bloomery.core.units import format_bytes

Kind = Literal["model", "dataset"]
# config: of a model whose weights are needed later
Part = Literal["model", "config", "tokenizer", "dataset"]
# huggingface_hub allows no "--", no ".git" at the end, and no "-" or "." at the end of a part.
_ID = re.compile(
    r"(?!.*\.\.|[^@]*(--|\.git(@|$)))[A-Za-z0-9]([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?(@\w[\w./-]{0,199})?"
)


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
        """The command that downloads it."""
        return f"bloomery download {self}" + (" --dataset" if self.kind == "dataset" else "")

    @property
    def page(self) -> str:
        site = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        return f"{site}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id, `ORG/NAME` or `ORG/NAME@REVISION`, and no local path has that name."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def parse(name: str, kind: Kind) -> Named:
    """Raises UserError for what is neither a path that exists nor an id."""
    if name.startswith("runs/"):
        fix = "train it first (runs/demo: `bloomery demo`), or name another model"
        raise UserError("no such run, or no model in this folder of it", where=name, fix=fix)
    if not _ID.fullmatch(name):
        if name and expanded(name).exists():
            problem = "this is a local path: there is nothing to download"
            raise UserError(problem, where=name, fix="use the path itself as the model or dataset")
        raise UserError(
            f"no such folder, and not a valid Hub {kind} id",
            where=name[:200] or "an empty name",
            fix="correct the path, or write ORG/NAME as on huggingface.co",
        )
    repo, _, revision = name.partition("@")
    return Named(repo, revision or None, kind)


def token() -> str | Literal[False]:
    """HF_TOKEN of the environment; False keeps the library from looking for one in the home folder."""
    return os.environ.get("HF_TOKEN", "").strip() or False


def cache_folder() -> Path:
    """The cache of huggingface_hub: HF_HUB_CACHE, or a folder in HF_HOME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def refuse(named: Named, part: Part, listing: dict[str, int], wanted: dict[str, int]) -> None:
    """Raises UserError where the repository lacks what is asked for, or has it only in an unsafe format. A model has a
    config and safetensors; a dataset has files of a supported format.
    """
    held = ", ".join(sorted(listing)[:4]) or "none"
    problem = ""
    if part == "tokenizer":
        if not wanted.keys() & {"tokenizer.json", "tokenizer.model", "spiece.model"}:
            problem = "the repository has neither tokenizer.json nor tokenizer.model"
            fix = "name another model of the same family, or a tokenizer.json"
    elif part == "dataset":
        script = next((name for name in sorted(listing) if name.endswith(".py")), None)
        if not wanted and script is not None:
            problem = f"the dataset is a loading script: {script}; Bloomery does not run code of a repository"
            fix = f"use the Hub's copy in parquet: {named.repo}@refs/convert/parquet"
        elif not wanted:
            problem = f"the dataset has no file of a supported format; its files: {held}"
            fix = "correct data.glob, or name a dataset of parquet, jsonl, json, csv, arrow or text files"
    elif "config.json" not in listing and "adapter_config.json" not in listing:
        problem = f"the repository has no config.json, so it is not a model; its files: {held}"
        fix = f"check the name; for a dataset: `bloomery download {named} --dataset`"
        if any(name.endswith(".gguf") for name in listing):
            fix = "name the repository that the GGUF files were converted from"
    elif not any(name.endswith(".safetensors") and "/" not in name for name in listing):
        pickled = next((name for name in sorted(listing) if name.endswith(PICKLE_SUFFIXES)), None)
        problem = "the repository has no weights"
        fix = "name a repository that has model.safetensors"
        if pickled is not None:
            problem = f"the weights are pickle files, which can run code when opened: {pickled}; nothing was downloaded"
            fix = f"look for a safetensors copy: {named.page}/discussions often has a branch, ID@refs/pr/N"
    if problem:
        raise UserError(problem, where=named.page, fix=fix)


def refuse_full(named: Named, goal: Path, size: int) -> None:
    """Raises UserError when the disk is too small for all files, those included that are already downloaded."""
    place = next(
        folder for folder in (goal.absolute(), *goal.absolute().parents) if folder.is_dir()
    )
    own = goal / f"{named.kind}s--{named.repo.replace('/', '--')}"
    files = (
        path
        for path in (own if own.is_dir() else goal).rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    free = shutil.disk_usage(place).free
    here = sum(path.stat().st_size for path in files) if goal.is_dir() else 0
    if free + here < size:
        raise UserError(
            f"not enough disk space: {named} takes {format_bytes(size)}, and {format_bytes(free)} are free",
            where=str(place),
            fix="free some space, or set HF_HUB_CACHE to a folder on a larger disk",
        )


def checked(folder: Path, wanted: dict[str, int], named: Named) -> Path:
    """Raises UserError when a file is missing, has another size than on the Hub, or is a link out of the repository."""
    home = folder.resolve()
    roots = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    for name, size in wanted.items():
        path = (folder / name).resolve()
        if not any(path.is_relative_to(root) for root in roots):
            fix = "delete it, and run the same command again"
            raise UserError(
                f"{name} is a link that leads out of the folder", where=str(folder), fix=fix
            )
        actual = path.stat().st_size if path.is_file() else None
        if actual is None or (size and actual != size):
            difference = (
                "is missing" if actual is None else f"has {actual:,} bytes instead of {size:,}"
            )
            fix = f"delete {folder if actual is None else path}, and run `{named.command}` again"
            raise UserError(f"{name} {difference}", where=str(folder), fix=fix)
    return folder


@contextmanager
def explained(named: Named) -> Iterator[None]:
    """Turns the library's exceptions into a UserError with a fix; one without a fix passes through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        explanation = _explanation(named, error)
        if explanation is None:
            raise
        raise explanation from error


def _explanation(named: Named, error: Exception) -> UserError | None:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    again = f"`{named.command}` resumes the download"
    page = named.page
    known = token()
    tokens = "a token from https://huggingface.co/settings/tokens"
    # The library wraps its refusal after a search in the cache.
    offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
    # The library's HTTP client changed its name between versions.
    network = type(error).__module__.split(".")[0] in (
        "requests",
        "httpx",
        "httpx2",
        "httpcore",
        "urllib3",
    )
    match error:
        case errors.GatedRepoError() if known:
            problem = "gated repository: your token has no access yet"
            return UserError(
                problem, where=page, fix=f"request access on {page} with the account of your token"
            )
        case errors.GatedRepoError():
            problem = "gated repository: accept its terms before you download it"
            return UserError(
                problem, where=page, fix=f"accept on {page}, then `export HF_TOKEN=...` ({tokens})"
            )
        case errors.RepositoryNotFoundError():
            other = "" if named.kind == "dataset" else "for a dataset, add --dataset"
            private = "" if known else "if it is private, `export HF_TOKEN=...`"
            fix = "; ".join(part for part in ("correct the name", private, other) if part)
            return UserError(
                f"no {named.kind} on the Hub, or it is private: {named.repo}", where=page, fix=fix
            )
        case errors.RevisionNotFoundError():
            fix = f"see {page}/tree/main for its branches and tags"
            return UserError(f"no such revision: {named.revision}", where=page, fix=fix)
        case _ if offline or isinstance(error, errors.OfflineModeIsEnabled):
            problem = f"{named} is not on this machine, and HF_HUB_OFFLINE prevents the download"
            fix = f"unset HF_HUB_OFFLINE, or run `{named.command} --to DIR` elsewhere and copy that folder here"
            return UserError(problem, where="HF_HUB_OFFLINE", fix=fix)
        case _ if status in (401, 403):
            refused = (
                "the Hub refuses the token in HF_TOKEN" if known else "the Hub requires a token"
            )
            fix = f"`export HF_TOKEN=...` with {tokens} that has read access"
            return UserError(f"{refused} ({status})", where=page, fix=fix)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return UserError(
                "the disk is full", where=str(cache_folder()), fix=f"free some space; then {again}"
            )
        case PermissionError():
            fix = "set HF_HUB_CACHE to a writable folder, or use --to"
            where = str(error.filename or cache_folder())
            return UserError("permission denied: cannot write the folder", where=where, fix=fix)
        case _ if network or isinstance(
            error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError | OSError
        ):
            cause: BaseException = error
            while isinstance(cause.__cause__, Exception):
                cause = cause.__cause__
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:160]
            reason = reason if status is None else f"HTTP status {status}"
            fix = f"check the network; {again}. Without a network, copy the folder here and use its path"
            return UserError(f"cannot reach the Hub: {reason}", where=page, fix=fix)
    return None


PREFIX = "hub:"  # before a dataset's id where a path is expected
# a model without its weights
CONFIG = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
WEIGHTS = ("*.safetensors",)
# duplicate weights
ASIDE = ("*/*", "consolidated*", "*.index.fp*.json", "*.fp16.safetensors", "*.fp32.safetensors")
TABLES = ("*.parquet", "*.jsonl", "*.ndjson", "*.json", "*.csv", "*.tsv", "*.arrow", "*.txt")
DATA = (
    *TABLES,
    *(f"{pattern}.{packed}" for pattern in TABLES for packed in ("gz", "zst", "xz", "bz2")),
)
NO_DATA = ("dataset_infos.json", "*/dataset_infos.json", ".*")


def fetch_model(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: local, in the Hub's cache, or downloaded into it. Raises UserError.

    Without `weights` only config and tokenizer are downloaded.
    """
    found = cached_model(name, weights=weights)
    if found is not None:
        return found
    try:
        return download(str(name), part="model" if weights else "config")
    except UserError as error:
        problem = f"no local folder {name}; on the Hub: {error.problem}"
        raise UserError(problem, where=error.where, fix=error.fix) from error


def cached_model(name: str | Path, *, weights: bool = False) -> Path | None:
    """`fetch_model` without the network: None where a download would be needed. Raises UserError."""
    path = expanded(str(name))
    if path.exists():
        return path
    named = parse(str(name), "model")
    folder = _cached(named, *_patterns("model" if weights else "config"))
    complete = folder is not None and (not weights or _has_weights(folder))
    return folder if complete else None


def local_model(name: str | Path) -> Path:
    """The folder of a local or downloaded model. Uses no network. Raises UserError."""
    found = cached_model(name)
    if found is None:
        named = parse(str(name), "model")
        raise UserError(f"{named} is not downloaded", where=str(name), fix=named.command)
    return found


def fetch_tokenizer(name: str) -> Path:
    """A tokenizer's file or folder, as `fetch_model`; a model's weights are neither downloaded nor checked."""
    path = expanded(name)
    if path.exists():
        return path
    named = parse(name, "model")
    return _cached(named, CONFIG, ASIDE) or download(name, part="tokenizer")


def fetch_dataset(name: str, *, glob: str | None = None) -> Path:
    """The folder of a dataset, `hub:ORG/NAME` or `ORG/NAME`; with `glob` the files that match. Raises UserError."""
    named = parse(name.removeprefix(PREFIX), "dataset")
    found = _cached(named, *_patterns("dataset", glob))
    return download(str(named), part="dataset", glob=glob) if found is None else found


def data_place(path: str) -> Path:
    """The place of a recipe's `data.path`: a path unchanged; for `hub:ORG/NAME` the downloaded folder, or a path that
    does not exist. Uses no network; the cache's layout is the one of huggingface_hub's documentation.
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
    name: str, *, part: Part = "model", to: Path | None = None, glob: str | None = None
) -> Path:
    """Download missing files into the Hub's cache, or into `to`; returns the folder. `glob`: of a dataset.

    Resumes an interrupted download: complete files are kept. Within one call a file resumes in the middle after a
    lost connection. Raises UserError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    named = parse(name, "dataset" if part == "dataset" else "model")
    allow, aside = _patterns(part, glob)
    if to is None and HF_HUB_OFFLINE and (kept := _cached(named, allow, aside)) is not None:
        return kept
    with explained(named):
        api = HfApi(token=token())
        info: Any = api.repo_info(
            named.repo, repo_type=named.kind, revision=named.revision, files_metadata=True
        )
        listing = {str(entry.rfilename): int(entry.size or 0) for entry in info.siblings or []}
        for held in listing:
            path = PurePosixPath(held)
            if path.is_absolute() or ".." in path.parts or "\\" in held or not held.isprintable():
                problem = f"the repository has a file name that leads out of its folder: {ascii(held)[:80]}"
                raise UserError(
                    problem, where=named.page, fix="use a copy from a source that you trust"
                )
        wanted = {
            held: size
            for held, size in listing.items()
            if any(fnmatch.fnmatch(held, pattern) for pattern in allow)
            and not any(fnmatch.fnmatch(held, pattern) for pattern in aside)
        }
        refuse(named, part, listing, wanted)
        goal = to or cache_folder()
        size = sum(wanted.values())
        refuse_full(named, goal, size)
        print(
            f"{named}: {len(wanted)} files, {format_bytes(size)}, into {goal}",
            file=sys.stderr,
            flush=True,
        )
        folder = _snapshot(named, allow, aside, local_dir=to, token=token())
    _tidy(folder)
    return checked(folder, wanted, named)


def _tidy(folder: Path) -> None:
    """Delete partial files of killed downloads whose files are complete now: the library never reuses them."""
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
    rests = (blobs or folder / ".cache" / "huggingface").rglob("*.incomplete")
    for rest in list(rests):
        if blobs is None or (blobs / rest.name.split(".")[0]).is_file():
            rest.unlink(missing_ok=True)


def _patterns(part: Part, glob: str | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns to download, and those to leave out. A recipe's glob matches names where it has no slash, and paths
    in the folder where it has one.
    """
    if part != "dataset":
        return (*CONFIG, *WEIGHTS) if part == "model" else CONFIG, ASIDE
    plain = (glob or "").removeprefix("**/")
    return DATA if glob is None else (plain,) if "/" in plain else (plain, f"*/{plain}"), NO_DATA


def _snapshot(named: Named, allow: Sequence[str], aside: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # its warnings are messages or errors of this module
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    options |= {"allow_patterns": list(allow) or None, "ignore_patterns": list(aside) or None}
    return Path(
        str(snapshot_download(named.repo, repo_type=named.kind, revision=named.revision, **options))
    )


def _cached(named: Named, allow: Sequence[str], aside: Sequence[str]) -> Path | None:
    """The snapshot in the cache where it is complete, else None."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(named, allow, aside, local_files_only=True, token=False)
    except LocalEntryNotFoundError:  # also where the snapshot lacks files of its listing
        return None
    return folder if any(path.is_file() for path in folder.rglob("*")) else None


def _has_weights(folder: Path) -> bool:
    """Whether every shard of the index exists: older versions of the library store no listing."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    names = set(
        re.findall(
            r'"([^"/\\]+\.safetensors)"', index.read_text(encoding="utf-8", errors="replace")
        )
    )
    return bool(names) and all((folder / name).is_file() for name in names)


LARGEST_TEXT = 2**20
VOCABULARIES = ("tokenizer.json", "vocab.json")
TEXTS = (".md", ".json", ".jinja", ".txt", "Modelfile")  # searched for secrets before an upload


@final
@dataclass(frozen=True)
class Pushed:
    """`files`: sizes in bytes by name."""

    page: str
    files: dict[str, int]
    warnings: tuple[str, ...]


def push(folder: Path, repo: str, *, public: bool = False, dry_run: bool = False) -> Pushed:
    """Upload the files of an export to `ORG/NAME` or `ORG/NAME@BRANCH`, which is created, private, if it is missing.

    Nothing is deleted on the Hub. `dry_run`: uses no network. Raises UserError for a folder that is no export, holds
    pickles, links or secrets, without a token, and when the Hub refuses.
    """
    if not _ID.fullmatch(repo) or ".." in repo:
        raise UserError(
            f"not a valid Hub model id: {repo[:200]!r}",
            where="ORG/NAME",
            fix="write ORG/NAME",
            code=2,
        )
    files = _to_push(folder)
    warnings = list[str]()
    (name, _, revision) = repo.partition("@")
    named = Named(name, revision or None, "model")
    card = (
        (folder / "README.md").read_text(encoding="utf-8", errors="replace")
        if "README.md" in files
        else ""
    )
    if not re.search(r"^license:", card.partition("\n---")[0], flags=re.MULTILINE):
        warnings.append(
            "the model card states no license: add `license: ...` to the head of README.md"
        )
    if dry_run:
        return Pushed(named.page, files, tuple(warnings))
    if not (own := token()):
        fix = "`export HF_TOKEN=...` with a token of https://huggingface.co/settings/tokens that has write access"
        raise UserError("no token: the Hub asks who uploads", where="HF_TOKEN", fix=fix)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=own)
    with explained(named):
        try:
            api.create_repo(named.repo, private=not public, exist_ok=True)
            if named.revision is not None:
                api.create_branch(named.repo, branch=named.revision, exist_ok=True)
            api.upload_folder(
                repo_id=named.repo,
                folder_path=folder,
                revision=named.revision,
                commit_message="Upload with Bloomery",
                allow_patterns=[glob.escape(name) for name in files],
            )
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            if status not in (401, 403, 404):
                raise
            problem = f"the Hub refuses the upload: HTTP status {status}"
            fix = f"use a token that has write access to {named.repo}, or correct the name"
            raise UserError(problem, where=named.page, fix=fix) from error
    return Pushed(named.page, files, tuple(warnings))


def _to_push(folder: Path) -> dict[str, int]:
    """The files of an export and their sizes, by their path in the folder. Raises UserError."""
    known = folder.is_dir() and any(
        any(folder.glob(pattern)) for pattern in ("config.json", "adapter_config.json", "*.gguf")
    )
    if not known:
        problem = "not an export: no config.json, adapter_config.json or .gguf file is here"
        fix = "`bloomery export MODEL --to hf --out DIR` writes one"
        raise UserError(problem, where=str(folder), fix=fix)
    if (folder / "state.json").is_file() and (folder / "MANIFEST.json").is_file():
        problem = "this is the checkpoint of a run: it holds what training needs to resume, such as the optimizer"
        fix = "`bloomery export RUN --to hf --out DIR` (of a LoRA: --to adapter) writes the model alone"
        raise UserError(problem, where=str(folder), fix=fix)
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in path.relative_to(folder).parts) or (
            path.is_dir() and not path.is_symlink()
        ):
            continue
        if path.is_symlink() or not path.is_file():
            problem = f"{name} is a link, or not a regular file"
            raise UserError(
                problem, where=str(folder), fix="put the file itself there, or delete it"
            )
        if name.endswith(PICKLE_SUFFIXES):
            problem = f"{name} is a pickle, which can run code where it is opened"
            raise UserError(
                problem,
                where=str(folder),
                fix="delete it: the weights are in the safetensors files",
            )
        if (
            name.endswith(TEXTS)
            and path.name not in VOCABULARIES
            and path.stat().st_size < LARGEST_TEXT
        ):
            text = path.read_text(encoding="utf-8", errors="replace")
            if redact_secrets(text) != text:
                fix = "remove it from the file; if it was public before, revoke it"
                raise UserError(
                    f"{name} seems to hold a secret, such as a token", where=str(folder), fix=fix
                )
        files[name] = path.stat().st_size
    return files
