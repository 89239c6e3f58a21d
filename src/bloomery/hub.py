"""Models and datasets of the Hugging Face Hub: downloads of safe files, uploads of exports, and errors with a fix.

Transfers are huggingface_hub's own: it resumes them, compares sizes and fills its cache. Here is decided which files
are wanted, what is refused before anything is downloaded, and when the network is used at all.
"""

import fnmatch
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, final

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.growth import told_growth
from bloomery.core.progress import progress
from bloomery.core.text import closest, expanded, redact_secrets
from bloomery.core.units import MIB
from bloomery.random_models import folder_of, is_random

Kind = Literal["model", "dataset"]
# "config": a model whose weights are needed later
Part = Literal["model", "config", "tokenizer", "dataset"]

PREFIX = "hub:"  # before a dataset's id where a path is expected
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

CONFIG_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
WEIGHT_PATTERNS = ("*.safetensors",)
SECOND_COPIES = (
    "*/*",
    "consolidated*",
    "*.index.fp*.json",
    "*.fp16.safetensors",
    "*.fp32.safetensors",
)
TABLE_PATTERNS = (
    "*.parquet",
    "*.jsonl",
    "*.ndjson",
    "*.json",
    "*.csv",
    "*.tsv",
    "*.arrow",
    "*.txt",
)
COMPRESSED_TABLE_PATTERNS = tuple(
    f"{pattern}.{suffix}" for pattern in TABLE_PATTERNS for suffix in ("gz", "zst", "xz", "bz2")
)
NO_DATA = ("dataset_infos.json", "*/dataset_infos.json", ".*")

# huggingface_hub allows no "--", no ".git" at the end, and no "-" or "." at the end of a part.
_ID = re.compile(
    r"(?!.*\.\.|[^@]*(--|\.git(@|$)))[A-Za-z0-9]([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?(@\w[\w./-]{0,199})?"
)


# Names


@final
@dataclass(frozen=True)
class Repository:
    """`ORG/NAME` or `ORG/NAME@REVISION` on the Hub; the revision is a branch, a tag or a commit."""

    name: str
    revision: str | None
    kind: Kind

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def download_command(self) -> str:
        return f"bloomery download {self}" + (" --dataset" if self.kind == "dataset" else "")

    @property
    def page(self) -> str:
        site = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        return f"{site}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id, `ORG/NAME` or `ORG/NAME@REVISION`, and no local path has that name."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def parse_id(name: str, kind: Kind) -> Repository:
    """Raises UserError for a name that is not an id; the caller has looked for a local path before."""
    if name.startswith("runs/"):
        raise UserError(
            "no such run, or no model in this folder of it",
            where=name,
            fix="train it first (runs/demo: `bloomery demo`), or name another model",
        )
    if not _ID.fullmatch(name):
        if name and expanded(name).exists():
            raise UserError(
                "this is a local path: there is nothing to download",
                where=name,
                fix="use the path itself as the model or dataset",
            )
        base, _, adapter = name.rpartition("+")
        if base and adapter and (expanded(adapter) / "adapter_config.json").is_file():
            raise UserError(
                "not supported: training from a base and its adapter",
                where=name[:200],
                fix=f"merge them first: bloomery export {shlex.quote(name)} --to merged --out merged; "
                "then name that folder",
            )
        similar = _similar_folder(expanded(name)) if name else None
        meant = "" if similar is None else f"did you mean {similar}? Otherwise "
        raise UserError(
            f"no such folder, and not a valid Hub {kind} id",
            where=name[:200] or "an empty name",
            fix=f"{meant}correct the path, or write ORG/NAME as on huggingface.co",
        )
    repository, _, revision = name.partition("@")
    return Repository(repository, revision or None, kind)


def hub_token() -> str | Literal[False]:
    """HF_TOKEN of the environment; False keeps the library from looking for one in the home folder."""
    return os.environ.get("HF_TOKEN", "").strip() or False


def hub_cache_folder() -> Path:
    """The cache of huggingface_hub: HF_HUB_CACHE, or a folder in HF_HOME."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


# Folders of models and datasets: local, cached, or downloaded


def fetch_model(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model: local, in the Hub's cache, or downloaded into it. Raises UserError.

    Without `weights` only config and tokenizer are downloaded.
    """
    folder = cached_model(name, weights=weights)
    if folder is not None:
        return folder
    try:
        return download(str(name), part="model" if weights else "config")
    except UserError as error:
        problem = f"no local folder {name}; on the Hub: {error.problem}"
        similar = _similar_folder(expanded(str(name)))
        fix = error.fix if similar is None else f"did you mean {similar}? On the Hub: {error.fix}"
        raise UserError(problem, where=error.where, fix=fix) from error


def _similar_folder(path: Path) -> Path | None:
    """The folder next to a path that does not exist whose name is most like it."""
    try:
        names = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
    # No such folder, none that can be read, or no name of one: nothing is similar.
    except (OSError, ValueError):
        return None
    similar = closest(path.name, names)
    return path.with_name(similar[0]) if similar else None


def cached_model(name: str | Path, *, weights: bool = False) -> Path | None:
    """`fetch_model` without the network: None where a download would be needed. Raises UserError."""
    if is_random(name):
        return folder_of(str(name), weights=weights)
    path = expanded(str(name))
    if path.exists():
        return path
    repository = parse_id(str(name), "model")
    folder = _cached(repository, *_patterns("model" if weights else "config"))
    complete = folder is not None and (not weights or _has_weights(folder))
    return folder if complete else None


def local_model(name: str | Path) -> Path:
    """The folder of a local or downloaded model. Uses no network. Raises UserError."""
    folder = cached_model(name)
    if folder is None:
        repository = parse_id(str(name), "model")
        raise UserError(
            f"{repository} is not downloaded", where=str(name), fix=repository.download_command
        )
    return folder


def fetch_tokenizer(name: str) -> Path:
    """A tokenizer's file or folder, as `fetch_model`; a model's weights are neither downloaded nor checked."""
    if is_random(name):
        return folder_of(name)
    path = expanded(name)
    if path.exists():
        return path
    repository = parse_id(name, "model")
    return _cached(repository, *_patterns("tokenizer")) or download(name, part="tokenizer")


def fetch_dataset(name: str, *, glob: str | None = None) -> Path:
    """The folder of a dataset, `hub:ORG/NAME` or `ORG/NAME`; with `glob` the files that match. Raises UserError."""
    repository = parse_id(name.removeprefix(PREFIX), "dataset")
    folder = _cached(repository, *_patterns("dataset", glob))
    return folder or download(str(repository), part="dataset", glob=glob)


def data_place(path: str) -> Path:
    """The place of a recipe's `data.path`: a path unchanged; for `hub:ORG/NAME` the downloaded folder, or a path that
    does not exist. Uses no network; the cache's layout is the one of huggingface_hub's documentation.
    """
    if not path.startswith(PREFIX):
        return Path(path)
    repository = parse_id(path.removeprefix(PREFIX), "dataset")
    repository_folder = hub_cache_folder() / f"datasets--{repository.name.replace('/', '--')}"
    revision = repository.revision or "main"
    reference = repository_folder / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository_folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else Path(path)


def _cached(repository: Repository, wanted: Sequence[str], unwanted: Sequence[str]) -> Path | None:
    """The snapshot in the cache where it is complete, else None."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(repository, wanted, unwanted, local_files_only=True, token=False)
    except LocalEntryNotFoundError:  # also where the snapshot lacks files of its listing
        return None
    return folder if any(path.is_file() for path in folder.rglob("*")) else None


def _has_weights(folder: Path) -> bool:
    """Whether every shard of the index exists: a plan downloads the index, and training the shards."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    text = index.read_text(encoding="utf-8", errors="replace")
    shards = set(re.findall(r'"([^"/\\]+\.safetensors)"', text))
    return bool(shards) and all((folder / shard).is_file() for shard in shards)


# Downloads


def download(
    name: str, *, part: Part = "model", to: Path | None = None, glob: str | None = None
) -> Path:
    """Downloads missing files into the Hub's cache, or into `to`; returns the folder. `glob`: of a dataset.

    A download that was interrupted resumes. Raises UserError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.file_download import repo_folder_name

    repository = parse_id(name, "dataset" if part == "dataset" else "model")
    wanted, unwanted = _patterns(part, glob)
    if to is None and HF_HUB_OFFLINE:
        folder = _cached(repository, wanted, unwanted)
        if folder is not None:
            return folder

    with explained(repository):
        # The listing alone shows what to refuse: weights that are pickles, a dataset that is a program.
        api = HfApi(token=hub_token())
        info: Any = api.repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            files_metadata=True,
        )
        files = [str(sibling.rfilename) for sibling in info.siblings or []]
        for file in files:
            _refuse_escaping_name(repository, file)
        wanted_files = [
            file
            for file in files
            if any(fnmatch.fnmatch(file, pattern) for pattern in wanted)
            and not any(fnmatch.fnmatch(file, pattern) for pattern in unwanted)
        ]
        _refuse_unusable(repository, part, files, wanted_files)

        place = to or hub_cache_folder()
        print(f"{repository}: {len(wanted_files)} files, into {place}", file=sys.stderr, flush=True)
        cached = hub_cache_folder() / repo_folder_name(
            repo_id=repository.name, repo_type=repository.kind
        )
        files_there = to or cached / "snapshots" / str(info.sha)
        missing_bytes = sum(
            sibling.size or 0
            for sibling in info.siblings or []
            if sibling.rfilename in wanted_files and not (files_there / sibling.rfilename).is_file()
        )
        with told_growth(to or cached, missing_bytes):
            return _snapshot(repository, wanted, unwanted, local_dir=to, token=hub_token())


def _patterns(part: Part, glob: str | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns to download, and those to leave out. A recipe's glob matches names where it has no slash, and paths
    in the folder where it has one.
    """
    if part == "model":
        return (*CONFIG_PATTERNS, *WEIGHT_PATTERNS), SECOND_COPIES
    if part != "dataset":
        return CONFIG_PATTERNS, SECOND_COPIES
    if glob is None:
        return (*TABLE_PATTERNS, *COMPRESSED_TABLE_PATTERNS), NO_DATA
    pattern = glob.removeprefix("**/")
    return (pattern,) if "/" in pattern else (pattern, f"*/{pattern}"), NO_DATA


def _snapshot(
    repository: Repository, wanted: Sequence[str], unwanted: Sequence[str], **options: Any
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # Its warnings are messages or errors of this module.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = snapshot_download(
        repository.name,
        repo_type=repository.kind,
        revision=repository.revision,
        allow_patterns=list(wanted),
        ignore_patterns=list(unwanted),
        **options,
    )
    return Path(str(folder))


def _refuse_escaping_name(repository: Repository, file: str) -> None:
    """Raises UserError for a file name that leads out of the folder it is written to."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or not file.isprintable():
        raise UserError(
            f"the repository has a file name that leads out of its folder: {ascii(file)[:80]}",
            where=repository.page,
            fix="use a copy from a source that you trust",
        )


def _refuse_unusable(
    repository: Repository, part: Part, files: Sequence[str], wanted_files: Sequence[str]
) -> None:
    """Raises UserError where the repository lacks what is asked for, or has it only in an unsafe format.

    A model has a config and safetensors; a dataset has files of a supported format.
    """
    some_files = ", ".join(sorted(files)[:4]) or "none"
    problem = fix = ""
    if part == "tokenizer":
        vocabularies = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json"}
        if not vocabularies.intersection(wanted_files):
            problem = "the repository has neither tokenizer.json nor tokenizer.model"
            fix = "name another model of the same family, or a tokenizer.json"
    elif part == "dataset":
        script = next((file for file in sorted(files) if file.endswith(".py")), None)
        if not wanted_files and script is not None:
            problem = (
                f"the dataset is a loading script: {script}; "
                "Bloomery does not run code of a repository"
            )
            fix = f"use the Hub's copy in parquet: {repository.name}@refs/convert/parquet"
        elif not wanted_files:
            problem = f"the dataset has no file of a supported format; its files: {some_files}"
            fix = (
                "correct data.glob, or name a dataset of parquet, jsonl, json, csv, arrow or "
                "text files"
            )
    elif "config.json" not in files and "adapter_config.json" not in files:
        problem = (
            f"the repository has no config.json, so it is not a model; its files: {some_files}"
        )
        fix = f"check the name; for a dataset: `bloomery download {repository} --dataset`"
        if any(file.endswith(".gguf") for file in files):
            fix = "name the repository that the GGUF files were converted from"
    elif not any(file.endswith(".safetensors") and "/" not in file for file in files):
        problem = "the repository has no weights"
        fix = "name a repository that has model.safetensors"
        pickle = next((file for file in sorted(files) if file.endswith(PICKLE_SUFFIXES)), None)
        if pickle is not None:
            problem = (
                f"the weights are pickle files, which can run code when opened: {pickle}; "
                "nothing was downloaded"
            )
            fix = (
                f"look for a safetensors copy: {repository.page}/discussions often has a branch, "
                "ID@refs/pr/N"
            )
    if problem:
        raise UserError(problem, where=repository.page, fix=fix)


# Errors


@contextmanager
def explained(repository: Repository) -> Iterator[None]:
    """Turns the library's exceptions into a UserError with a fix; one without a fix passes through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        explanation = _explanation(repository, error)
        if explanation is None:
            raise
        raise explanation from error


def _explanation(repository: Repository, error: Exception) -> UserError | None:
    """What the library's exception means for the user; None for one that is no error of the network or the disk."""
    from huggingface_hub import errors

    page = repository.page
    has_token = bool(hub_token())
    token_page = "a token from https://huggingface.co/settings/tokens"
    resume = f"`{repository.download_command}` resumes the download"
    status = getattr(getattr(error, "response", None), "status_code", None)
    # The library wraps its refusal after a search in the cache.
    offline = isinstance(error.__cause__ or error, errors.OfflineModeIsEnabled)

    # Refusals of the Hub, the most particular first: each class is one of HTTP errors, too.
    if isinstance(error, errors.GatedRepoError):
        fix = f"accept on {page}, then `export HF_TOKEN=...` ({token_page})"
        if has_token:
            fix = f"request access on {page} with the account of your token"
        return UserError("gated repository: you have no access to it yet", where=page, fix=fix)
    if isinstance(error, errors.RepositoryNotFoundError):
        fixes = ["correct the name"]
        if not has_token:
            fixes.append("if it is private, `export HF_TOKEN=...`")
        if repository.kind == "model":
            fixes.append("for a dataset, add --dataset")
        return UserError(
            f"no {repository.kind} on the Hub, or it is private: {repository.name}",
            where=page,
            fix="; ".join(fixes),
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"no such revision: {repository.revision}",
            where=page,
            fix=f"see {page}/tree/main for its branches and tags",
        )
    if offline:
        return UserError(
            f"{repository} is not on this machine, and HF_HUB_OFFLINE prevents the download",
            where="HF_HUB_OFFLINE",
            fix=f"unset HF_HUB_OFFLINE, or run `{repository.download_command} --to DIR` elsewhere "
            "and copy that folder here",
        )
    if status in (401, 403):
        subject = "refuses the token in HF_TOKEN" if has_token else "requires a token"
        return UserError(
            f"the Hub {subject} ({status})",
            where=page,
            fix=f"`export HF_TOKEN=...` with {token_page} that has read access",
        )

    # A full disk, a folder that cannot be written.
    if isinstance(error, OSError) and (system_error := of_the_system(error)) is not None:
        where = system_error.where or str(hub_cache_folder())
        return UserError(system_error.problem, where=where, fix=system_error.fix)

    # Everything else that comes from the network; the library's HTTP client changed its name between versions.
    library = type(error).__module__.split(".")[0]
    of_network = library in ("requests", "httpx", "httpx2", "httpcore", "urllib3") or isinstance(
        error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError | OSError
    )
    if not of_network:
        return None
    cause: BaseException = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    first_line = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:160]
    reason = first_line if status is None else f"HTTP status {status}"
    return UserError(
        f"cannot reach the Hub: {reason}",
        where=page,
        fix=f"check the network; {resume}. "
        "Without a network, copy the folder here and use its path",
    )


# Uploads

LARGEST_SEARCHED_TEXT = 2**20  # bytes
SEARCHED_SUFFIXES = (".md", ".json", ".jinja", ".txt", "Modelfile")
# Their tokens look like secrets, and are in every copy of the tokenizer.
VOCABULARIES = ("tokenizer.json", "vocab.json")


@final
@dataclass(frozen=True)
class Pushed:
    """`files`: sizes in bytes by name."""

    page: str
    files: dict[str, int]
    warnings: tuple[str, ...]


def push(folder: Path, repo: str, *, public: bool = False, dry_run: bool = False) -> Pushed:
    """Uploads the files of an export to `ORG/NAME` or `ORG/NAME@BRANCH`, which is created, private, if it is missing.

    Nothing is deleted on the Hub. `dry_run`: uses no network. Raises UserError for a folder that is no export, holds
    pickles, links or secrets, without a token, and when the Hub refuses.
    """
    if not _ID.fullmatch(repo):
        problem = f"not a valid Hub model id: {repo[:200]!r}"
        raise UserError(problem, where="ORG/NAME", fix="write ORG/NAME", code=2)
    repository = parse_id(repo, "model")
    files = _files_to_push(folder)
    pushed = Pushed(repository.page, files, _card_warnings(folder))
    if dry_run:
        return pushed
    token = hub_token()
    if not token:
        raise UserError(
            "no token: the Hub asks who uploads",
            where="HF_TOKEN",
            fix="`export HF_TOKEN=...` with a token of https://huggingface.co/settings/tokens "
            "that has write access",
        )
    _upload(repository, folder, files, token, public=public)
    return pushed


def _upload(
    repository: Repository, folder: Path, files: Mapping[str, int], token: str, *, public: bool
) -> None:
    """`files`: the bytes of each, by its name."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=token)
    branch = repository.revision
    with explained(repository):
        try:
            api.create_repo(repository.name, private=not public, exist_ok=True)
            if branch is not None:
                api.create_branch(repository.name, branch=branch, exist_ok=True)

            # Weights go one after the other, and are no part of the branch before the commit with all files. What has
            # been uploaded is not sent again when an upload that was interrupted is repeated.
            total = sum(files.values())
            done = 0
            additions = []
            for name, num_bytes in files.items():
                progress(f"{done / MIB:,.0f} of {total / MIB:,.0f} MiB, {name}")
                addition = CommitOperationAdd(name, folder / name)
                api.preupload_lfs_files(repository.name, [addition], revision=branch)
                additions.append(addition)
                done += num_bytes
            api.create_commit(
                repository.name, additions, commit_message="Upload with Bloomery", revision=branch
            )
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            if status not in (401, 403, 404):
                raise
            raise UserError(
                f"the Hub refuses the upload: HTTP status {status}",
                where=repository.page,
                fix=f"use a token that has write access to {repository.name}, or correct the name",
            ) from error


def _card_warnings(folder: Path) -> tuple[str, ...]:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    metadata = text.partition("\n---")[0]
    if re.search(r"^license:", metadata, flags=re.MULTILINE):
        return ()
    return ("the model card states no license: add `license: ...` to the head of README.md",)


def _files_to_push(folder: Path) -> dict[str, int]:
    """The files of an export and their sizes, by their path in the folder. Raises UserError."""
    # An export, and no run: a checkpoint holds what training needs to resume.
    patterns = ("config.json", "adapter_config.json", "*.gguf")
    if not folder.is_dir() or not any(any(folder.glob(pattern)) for pattern in patterns):
        raise UserError(
            "not an export: no config.json, adapter_config.json or .gguf file is here",
            where=str(folder),
            fix="`bloomery export MODEL --to hf --out DIR` writes one",
        )
    if (folder / "state.json").is_file() and (folder / "MANIFEST.json").is_file():
        raise UserError(
            "this is the checkpoint of a run: it holds what training needs to resume, "
            "such as the optimizer",
            where=str(folder),
            fix="`bloomery export RUN --to hf --out DIR` (of a LoRA: --to adapter) writes the "
            "model alone",
        )

    # Hidden files stay here; everything else is uploaded, or a reason to stop.
    files = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if is_hidden or (path.is_dir() and not path.is_symlink()):
            continue
        _refuse_to_push(folder, path)
        files[relative.as_posix()] = path.stat().st_size
    return files


def _refuse_to_push(folder: Path, path: Path) -> None:
    """Raises UserError for a file that must not become public: a link, a pickle, a text with a secret."""
    name = path.relative_to(folder).as_posix()
    if path.is_symlink() or not path.is_file():
        raise UserError(
            f"{name} is a link, or not a regular file",
            where=str(folder),
            fix="put the file itself there, or delete it",
        )
    if name.endswith(PICKLE_SUFFIXES):
        raise UserError(
            f"{name} is a pickle, which can run code where it is opened",
            where=str(folder),
            fix="delete it: the weights are in the safetensors files",
        )
    is_searched = name.endswith(SEARCHED_SUFFIXES) and path.name not in VOCABULARIES
    if is_searched and path.stat().st_size < LARGEST_SEARCHED_TEXT:
        text = path.read_text(encoding="utf-8", errors="replace")
        if redact_secrets(text) != text:
            raise UserError(
                f"{name} seems to hold a secret, such as a token",
                where=str(folder),
                fix="remove it from the file; if it was public before, revoke it",
            )
