"""What the rewards of a run were when it last trained: a resume tells which of them changed. Does not import torch."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input, read_whole, write_durably
from bloomery.hub import cached_model
from bloomery.infer.model_folder import MANIFEST, model_folder
from bloomery.recipe.rewards import AnyReward, ModelReward, PythonReward, reward_name

FILE = "rewards.json"


def changed_rewards(
    run_dir: Path, rewards: Sequence[AnyReward], tools: Sequence[str] = ()
) -> list[str]:
    """A sentence for each reward whose file or model is not the one of before; notes those of now in `run_dir`.

    `tools`: FILE:NAME of tools and of the environment, of which the same is said.
    """
    identities = {
        place.rpartition(":")[2]: _file_identity(Path(place.rpartition(":")[0])) for place in tools
    }
    for reward in rewards:
        if isinstance(reward, PythonReward):
            identities[reward_name(reward)] = _file_identity(Path(reward.python.rpartition(":")[0]))
        elif isinstance(reward, ModelReward):
            identities[reward_name(reward)] = _model_identity(reward.model)
    tool_names = {place.rpartition(":")[2] for place in tools}
    path = run_dir / FILE
    before = _noted(path)
    if identities != before:
        write_durably(path, json.dumps(identities, indent=2) + "\n")
    return [
        f"the {'tool' if name in tool_names else 'reward'} {name} changed since this run last trained: later steps are"
        " trained with the new one"
        for name, identity in identities.items()
        if before.get(name, identity) != identity
    ]


def _noted(path: Path) -> dict[str, Any]:
    """Those of before; of a file that holds none, none. Raises UserError for a pipe, a link or a folder."""
    try:
        content = json.loads(read_whole(path))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _file_identity(file: Path) -> str:
    try:
        return hashlib.sha256(read_input(file)).hexdigest()
    except UserError:
        return "missing"


def _model_identity(name: str) -> str:
    """The checkpoint and its hashes; of a folder without them, sizes and times of its weights."""
    folder = cached_model(name)
    if folder is None:
        return "missing"
    try:
        weights = model_folder(folder)
    except UserError:
        return "missing"
    if (weights / MANIFEST).is_file():
        return f"{weights.name} {_file_identity(weights / MANIFEST)}"
    stats = [(path.name, path.stat()) for path in sorted(weights.glob("*.safetensors"))]
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)
