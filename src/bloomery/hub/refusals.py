"""Why something is not fetched from the Hub: what is unsafe or not whole, and the library's own errors as sentences"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.errors import UserError
from bloomery.hub.named import Named, Part, cache_folder, token
from bloomery.units import format_bytes

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
        return _forbidden(named, int(status))
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
        remedy = f"agree on {named.page}, then `export HF_TOKEN=...` (a token of https://huggingface.co/settings/tokens)"
    return UserError(problem, where=named.page, remedy=remedy)


def _unknown(named: Named) -> UserError:
    what, other = ("model", "a data set needs --dataset") if named.kind == "model" else ("data set", "")
    private = "" if token() else "if it is private, `export HF_TOKEN=...`"
    remedy = "; ".join(part for part in ("mend the name", private, other) if part)
    return UserError(f"the Hub knows no {what} {named.repo}, or it is private", where=named.page, remedy=remedy)


def _forbidden(named: Named, status: int) -> UserError:
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
