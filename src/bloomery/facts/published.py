"""Shapes of well-known models (table: published.toml), for plans before anything is downloaded. No torch.

A run never reads the table: it reads the folder that was fetched.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from bloomery.core.text import closest
from bloomery.facts.config import ModelConfig
from bloomery.facts.copies import Copy, quantized_copy
from bloomery.facts.hf_config import config_from_hf


class Published(NamedTuple):
    """An entry of the table. `parameters` and `active`: the published numbers, as they are written there."""

    names: tuple[str, ...]
    kind: str
    parameters: int | str
    active: str | None
    config: Mapping[str, Any]


@cache
def _table() -> dict[str, Any]:
    text = (resources.files("bloomery.facts") / "published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def published_models() -> tuple[Published, ...]:
    """Every entry of the table."""
    return tuple(
        Published(
            tuple(entry["names"]),
            entry["kind"],
            entry["parameters"],
            entry.get("active"),
            entry["config"],
        )
        for entry in _table()["model"]
    )


@cache
def _entries() -> dict[str, Published]:
    """Entries by lower-case name: names of the Hub that differ in case alone mean one model."""
    entries = {name.lower(): entry for entry in published_models() for name in entry.names}
    aliases = {alias.lower(): entries[name.lower()] for alias, name in _table()["aliases"].items()}
    return {**aliases, **entries}


@cache
def _mirrored() -> dict[str, Published]:
    """Entries by the name without its organization, for organizations that publish copies."""
    return {name.rpartition("/")[2]: entry for name, entry in _entries().items()}


def published_entry(name: str) -> Published | None:
    """The entry of a Hub id or of a mirror of it, with or without a revision; None where the table has none."""
    hub_id = name.partition("@")[0].lower()
    if (entry := _entries().get(hub_id)) is not None:
        return entry
    organization, _, model = hub_id.rpartition("/")
    mirrors = {mirror.lower() for mirror in _table()["mirrors"]}
    if organization in mirrors and model in _mirrored():
        return _mirrored()[model]
    # A quantized copy has the shape of its original.
    copy = quantized_copy(name)
    original = None if copy is None else original_of(copy)
    return None if original is None else published_entry(original)


# Who publishes copies in full precision under the same name, for which no licence is accepted; and their own models.
_UNGATED = ("unsloth",)
_PUBLISHERS = ("allenai", "google", "ibm-granite", "liquidai", "mistralai", "qwen")


def original_of(copy: Copy) -> str | None:
    """The Hub id of the model that a quantized copy was made from; None where its name says no known one."""
    if copy.organization.lower() in _UNGATED:
        return f"{copy.organization}/{copy.stem}"
    # Some write the publisher in front of the name: bartowski/google_gemma-3-4b-it-GGUF.
    for candidate in (copy.stem, copy.stem.partition("_")[2], copy.stem.partition("-")[2]):
        if candidate and (known_name := published_name(candidate)) is not None:
            return known_name
    is_own = copy.organization.lower() in _PUBLISHERS
    return f"{copy.organization}/{copy.stem}" if is_own else None


def published_name(model: str) -> str | None:
    """The Hub id of a model of the table by its name without an organization; None where the table has none."""
    names = [name for entry in published_models() for name in entry.names]
    return next((name for name in names if name.rpartition("/")[2].lower() == model.lower()), None)


def published_config(name: str) -> ModelConfig | None:
    """The config of a Hub id; None where the table does not have it."""
    entry = published_entry(name)
    return None if entry is None else entry_config(entry, where=name)


# TOML has no null: some config.json write one where there is no window, or no vector that queries are made of.
_NULLS: Mapping[str, Mapping[str, None]] = MappingProxyType(
    {
        "mistral": {"sliding_window": None},
        "mixtral": {"sliding_window": None},
        "deepseek_v2": {"q_lora_rank": None},
    }
)


def entry_config(entry: Published, *, where: str) -> ModelConfig:
    """The facts of an entry; those of a mixture of experts have `experts`."""
    settings = {**_NULLS.get(entry.kind, {}), **entry.config}
    return config_from_hf({"model_type": entry.kind, **settings}, where=where)


def similar_names(name: str) -> list[str]:
    """Up to three names of the table that resemble this one."""
    names_by_model = {
        published_name.rpartition("/")[2].lower(): published_name
        for entry in published_models()
        for published_name in entry.names
    }
    model = name.rpartition("/")[2].lower()
    similar_models = closest(model, names_by_model, count=3, cutoff=0.6)
    return [names_by_model[similar_model] for similar_model in similar_models]
