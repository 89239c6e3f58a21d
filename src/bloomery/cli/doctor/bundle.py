"""`bloomery doctor --bundle FILE`: machine, findings and end of the last log, without names and secrets."""

import getpass
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bloomery.cli.common import plain
from bloomery.core.errors import UserError
from bloomery.core.text import expanded, redact_secrets
from bloomery.core.version import __version__
from bloomery.hardware.machine import Machine
from bloomery.runs.names import all_runs

LOG_LINES = 200
COMMON_GROUPS = frozenset(("root", "video", "render", "sudo", "wheel", "docker", "users", "adm", "dialout", "nogroup"))
COMMON_NAMES = frozenset(("root", "localhost", "user", "host", "127"))
ADDRESS = re.compile(
    r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)\b"
    r"|\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b|\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b|\bfe80::[\w:%]+"
)
FIXED_KEYS = frozenset(("vendor", "arch", "build", "level", "id", "outcome", "kind", "origin"))  # values: fixed words
ALIASED_KEYS = frozenset(("groups", "listed_groups", "kfd_group", "unique_id", "hive_id"))
USERS = ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
HOSTS = ("HOSTNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_JOB_NODELIST", "MASTER_ADDR")
NAMES_IN_SLURM = re.compile("NODELIST|HOST|USER|ACCOUNT|SUBMIT_DIR|JOB_NAME|PARTITION")


def write_bundle(file: Path, machine: Machine, findings: Sequence[dict[str, Any]]) -> int:
    """The number of bytes written. Raises UserError if the file cannot be written."""
    runs = all_runs()
    log = runs[-1] / "log.txt" if runs else None
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log is not None and log.is_file() else []
    content = {
        "bloomery": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": anonymous(machine, exclude_defaults=True),
        "findings": _redacted(plain(list(findings)), {}),
        "last_run_log": [without_names(without_addresses(line)) for line in tail],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    target = expanded(file)
    if target.is_file() and not _bundle(target):
        fix = "pass a new file: bloomery doctor --bundle report.json"
        raise UserError("this file is not a bundle: not overwritten", where=str(file), fix=fix, code=2)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "pass a file in a writable folder: bloomery doctor --bundle ~/report.json"
        raise UserError(f"cannot write the bundle: {error.strerror}", where=str(file), fix=fix) from error
    return len(text.encode())


def _bundle(file: Path) -> bool:
    """Whether it is an earlier bundle, or empty."""
    try:
        with file.open("rb") as stream:
            return stream.read(20).lstrip().startswith((b'{\n "bloomery"',)) or not file.stat().st_size
    except OSError:
        return True  # writing it raises the error


def anonymous(machine: Machine, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """A machine as in machine.json, without secrets, names of users, groups and hosts, and the IDs of GPUs. Equal names
    stay equal.
    """
    access, around = machine.host.access, machine.host.around
    slurm = {name: value for name, value in around.slurm.items() if not NAMES_IN_SLURM.search(name)}
    host = machine.host.model_copy(update={"around": around.model_copy(update={"slurm": slurm})})
    groups = dict.fromkeys((*access.groups, *access.listed_groups, access.kfd_group))
    named = (name for name in groups if name and name not in COMMON_GROUPS)
    chips = dict.fromkeys(name for gpu in machine.accelerators for name in (gpu.unique_id, gpu.hive_id) if name)
    aliases = {name: f"group{number}" for number, name in enumerate(named, 1)}
    aliases |= {name: f"chip-{number}" for number, name in enumerate(chips)}
    shown = machine.model_copy(update={"host": host}).model_dump(mode="json", exclude_defaults=exclude_defaults)
    document: dict[str, Any] = _redacted(plain(shown), aliases)
    return document


def _redacted(value: Any, aliases: Mapping[str, str], key: str = "") -> Any:
    """A document with its texts redacted, except under FIXED_KEYS: a host can be named "amd", a user "torch"."""
    if isinstance(value, dict):
        return {name: _redacted(one, aliases, key if key == "environment" else name) for name, one in value.items()}
    if isinstance(value, list):
        return [_redacted(one, aliases, key) for one in value]
    if not isinstance(value, str) or key in FIXED_KEYS:
        return value
    value = aliases.get(value, value) if key in ALIASED_KEYS else value
    return without_names(without_addresses(value) if key == "environment" else value)


def without_addresses(text: str) -> str:
    """Without network addresses, except 127.0.0.1."""
    return ADDRESS.sub("[address]", text)


def without_names(text: str) -> str:
    """Without the home folder, user name, host name and secrets."""
    home = str(Path.home())
    text = text.replace(home, "~") if home != "/" else text
    text = re.sub(r"(/home/|/Users/)[\w.-]+", r"\1user", text)
    users, hosts = ({os.environ.get(name, "") for name in variables} for variables in (USERS, HOSTS))
    with suppress(KeyError, OSError):  # a user ID without a name, as in containers
        users.add(getpass.getuser())
    hosts.add(platform.node())
    for names, instead in ((users, "user"), (hosts | {name.partition(".")[0] for name in hosts}, "host")):
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2 and name not in COMMON_NAMES:
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return redact_secrets(text)
