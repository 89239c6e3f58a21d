"""Models and datasets of the Hugging Face Hub by words, for lists of what may be chosen. Does not import torch."""

import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from bloomery.core.errors import UserError
from bloomery.core.text import expanded, harmless
from bloomery.core.units import format_count
from bloomery.hub import PREFIX, Kind, Repository, explained, hub_token
from bloomery.studio.model_choices import Choice

FEWEST_CHARACTERS = 3
MOST_FOUND = 8
CONNECT_SECONDS = 3.0
_OFFLINE = "HF_HUB_OFFLINE"
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True)
class Found:
    """`remark`: why there are none."""

    choices: tuple[Choice, ...] = ()
    remark: str = ""


def is_searched(words: str) -> bool:
    """Whether the words may mean something of the Hub: a path of this machine is not sent to it."""
    is_path = words.startswith((".", "/", "~")) or "\\" in words or expanded(words).exists()
    return len(words) >= FEWEST_CHARACTERS and not is_path


def search(kind: Kind, words: str) -> Found:
    """The most downloaded ones, or a line that says why there are none."""
    if os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return Found(remark=f"{_OFFLINE} is set: the Hub is not searched.")
    if not _is_reachable():
        return Found(remark="The Hub cannot be reached. Folders and files here work without it.")
    from huggingface_hub import HfApi

    api = HfApi(token=hub_token())
    words = words.removeprefix(PREFIX)
    try:
        with explained(Repository(words, None, kind)):
            if kind == "model":
                models = api.list_models(search=words, sort="downloads", limit=MOST_FOUND)
                choices = [_choice(one.id, one.id, one.downloads) for one in models]
            else:
                datasets = api.list_datasets(search=words, sort="downloads", limit=MOST_FOUND)
                choices = [_choice(PREFIX + one.id, one.id, one.downloads) for one in datasets]
    except UserError as error:
        return Found(remark=f"{harmless(error.problem)}. Folders and files here work without it.")
    return Found(tuple(choices), "" if choices else f"The Hub has no {kind} with these words.")


def _is_reachable() -> bool:
    """Whether its host answers; the library would try again for half a minute. A proxy is left to the library."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    site = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = site.port or (80 if site.scheme == "http" else 443)
    try:
        with socket.create_connection((site.hostname or "", port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _choice(value: str, name: str, downloads: int | None) -> Choice:
    words = "" if downloads is None else f"{format_count(downloads)} downloads"
    return Choice(value, name, words)
