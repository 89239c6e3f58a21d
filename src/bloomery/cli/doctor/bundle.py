"""`bloomery doctor --bundle FILE`: machine, findings and end of the last log, without names and secrets."""

import getpass
import json
import os
import platform
import re
from collections.abc import Sequence
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
FIXED_KEYS = frozenset(
    ("vendor", "arch", "build", "level", "id", "outcome", "kind", "origin")
)  # their values are fixed words
NAMES_IN_SLURM = re.compile("NODELIST|HOST|USER|ACCOUNT|SUBMIT_DIR|JOB_NAME|PARTITION")


def write_bundle(file: Path, machine: Machine, findings: Sequence[dict[str, Any]]) -> int:
    """The number of bytes written. Raises UserError if the file cannot be written."""
    runs = all_runs()
    log = runs[-1] / "log.txt" if runs else None
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log is not None and log.is_file() else []
    content = {
        "bloomery": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": plain(anonymous(machine).model_dump(mode="json", exclude_defaults=True)),
        "findings": plain(list(findings)),
        "last_run_log": [without_addresses(line) for line in tail],
    }
    text = json.dumps(_redacted(content), indent=1, ensure_ascii=False) + "\n"
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


def anonymous_document(machine: Machine) -> dict[str, Any]:
    """A machine as in machine.json, without names and secrets."""
    document: dict[str, Any] = _redacted(plain(anonymous(machine)))
    return document


def _redacted(value: Any, key: str = "") -> Any:
    """A document with its texts redacted, except under FIXED_KEYS: a host can be named "amd", a user "torch"."""
    if isinstance(value, dict):
        return {name: _redacted(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_redacted(one, key) for one in value]
    return without_names(value) if isinstance(value, str) and key not in FIXED_KEYS else value


def anonymous(machine: Machine) -> Machine:
    """Without the names of users, groups, hosts and the IDs of GPUs; equal names stay equal."""
    groups: dict[str, str] = {}
    host = machine.host
    access = host.access.model_copy(
        update={
            "groups": tuple(_group(name, groups) for name in host.access.groups),
            "listed_groups": tuple(_group(name, groups) for name in host.access.listed_groups),
            "kfd_group": _group(host.access.kfd_group, groups) if host.access.kfd_group else "",
        }
    )
    slurm = {name: value for name, value in host.around.slurm.items() if not NAMES_IN_SLURM.search(name)}
    around = host.around.model_copy(update={"slurm": slurm})
    chips: dict[str, str] = {}
    devices = tuple(
        device.model_copy(
            update={
                "unique_id": chips.setdefault(device.unique_id, f"chip-{len(chips)}") if device.unique_id else "",
                "hive_id": chips.setdefault(device.hive_id, f"chip-{len(chips)}") if device.hive_id else "",
            }
        )
        for device in machine.accelerators
    )
    host = host.model_copy(update={"access": access, "around": around})
    environment = {name: without_addresses(value) for name, value in machine.software.environment.items()}
    software = machine.software.model_copy(update={"environment": environment})
    return machine.model_copy(update={"accelerators": devices, "host": host, "software": software})


def _group(name: str, aliases: dict[str, str]) -> str:
    return name if name in COMMON_GROUPS else aliases.setdefault(name, f"group{len(aliases) + 1}")


def without_addresses(text: str) -> str:
    """Without network addresses, except 127.0.0.1."""
    return ADDRESS.sub("[address]", text)


def without_names(text: str) -> str:
    """Without the home folder, user name, host name and secrets."""
    home = str(Path.home())
    text = text.replace(home, "~") if home != "/" else text
    text = re.sub(r"(/home/|/Users/)[\w.-]+", r"\1user", text)
    for names, instead in ((_users(), "user"), (_hosts(), "host")):
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2 and name not in COMMON_NAMES:
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return redact_secrets(text)


def _users() -> set[str]:
    variables = ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
    names = {os.environ.get(name, "") for name in variables}
    try:
        return names | {getpass.getuser()}
    except (KeyError, OSError):  # a user ID without a name, as in containers
        return names


def _hosts() -> set[str]:
    variables = ("HOSTNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_JOB_NODELIST", "MASTER_ADDR")
    names = {platform.node(), *(os.environ.get(name, "") for name in variables)}
    return names | {name.partition(".")[0] for name in names}
