"""Shapes of well-known models (table: published.toml), for plans before anything is downloaded. No torch.

A run never reads the table: it reads the folder that was fetched.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from bloomery.core.text import closest
from bloomery.model.config import Experts, ModelConfig
from bloomery.model.families import FAMILIES, config_from_hf

# A mixture of experts is planned as its dense kin with experts in place of each MLP.
DENSE_KIN = {"qwen3_moe": "qwen3", "mixtral": "mistral", "gpt_oss": "llama"}


class Published(NamedTuple):
    """An entry of the table. `parameters` and `active`: the published numbers, as they are written there."""

    names: tuple[str, ...]
    kind: str
    parameters: int | str
    active: str | None
    config: Mapping[str, Any]


@cache
def _table() -> dict[str, Any]:
    text = (resources.files("bloomery.model") / "published.toml").read_text(encoding="utf-8")
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
    """By lower-case name: the Hub does not distinguish them."""
    entries = {name.lower(): entry for entry in published_models() for name in entry.names}
    aliases = {alias.lower(): entries[name.lower()] for alias, name in _table()["aliases"].items()}
    return {**aliases, **entries}


@cache
def _mirrored() -> dict[str, Published]:
    """By the name without its organization, for those that publish copies."""
    return {name.rpartition("/")[2]: entry for name, entry in _entries().items()}


def published_entry(name: str) -> Published | None:
    """The entry of a Hub id, of a mirror of it too, with or without a revision; None where the table has none."""
    plain = name.partition("@")[0].lower()
    organization, _, model = plain.rpartition("/")
    if (entry := _entries().get(plain)) is not None:
        return entry
    mirrors = {mirror.lower() for mirror in _table()["mirrors"]}
    return _mirrored().get(model) if organization in mirrors else None


def published_config(name: str) -> ModelConfig | None:
    """The config of a Hub id; None where the table does not have it."""
    entry = published_entry(name)
    return None if entry is None else entry_config(entry, where=name)


def entry_config(entry: Published, *, where: str) -> ModelConfig:
    """The facts of an entry; those of a mixture of experts have `experts`."""
    # TOML has no null: Mistral's config.json writes one where there is no window.
    null = {"sliding_window": None} if entry.kind in ("mistral", "mixtral") else {}
    keys = {**null, **entry.config}
    if entry.kind in FAMILIES:
        return config_from_hf({"model_type": entry.kind, **keys}, where=where)
    per_token = keys["num_experts_per_tok"]
    of_gpt_oss = entry.kind == "gpt_oss"
    width = keys.get("moe_intermediate_size", keys["intermediate_size"])
    experts = Experts(
        count=keys.get("num_experts") or keys["num_local_experts"],
        per_token=per_token,
        width=width,
        bias=of_gpt_oss,
        sinks=of_gpt_oss,
    )
    # A token passes through `per_token` experts: together they are as wide as one MLP.
    dense = keys | {"model_type": DENSE_KIN[entry.kind], "intermediate_size": per_token * width}
    return replace(config_from_hf(dense, where=where), family=entry.kind, experts=experts)


def similar_names(name: str) -> list[str]:
    """Up to three names of the table that resemble this one."""
    names = {
        published.rpartition("/")[2].lower(): published
        for entry in published_models()
        for published in entry.names
    }
    return [
        names[near] for near in closest(name.rpartition("/")[2].lower(), names, count=3, cutoff=0.6)
    ]
