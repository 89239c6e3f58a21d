"""What `bloomery doctor --bundle FILE` writes: the machine, the findings, the end of the last log. Nobody's names."""

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
OWN_WORDS = frozenset(("vendor", "arch", "build", "level", "id", "outcome", "kind", "origin"))  # keys of fixed values
PRIVATE_SLURM = re.compile("NODELIST|HOST|USER|ACCOUNT|SUBMIT_DIR|JOB_NAME|PARTITION")


def write_bundle(file: Path, machine: Machine, findings: Sequence[dict[str, Any]]) -> int:
    """Bytes written. Raises UserError when the file cannot be."""
    runs = all_runs()
    log = runs[-1] / "log.txt" if runs else None
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log is not None and log.is_file() else []
    content = {
        "bloomery": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": plain(nameless(machine).model_dump(mode="json", exclude_defaults=True)),
        "findings": plain(list(findings)),
        "last_run_log": [placeless(line) for line in tail],
    }
    text = json.dumps(_private_values(content), indent=1, ensure_ascii=False) + "\n"
    target = expanded(file)
    if target.is_file() and not _bundle(target):
        fix = "name a new file: bloomery doctor --bundle report.json"
        raise UserError("this file is no bundle: it is not overwritten", where=str(file), fix=fix, code=2)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name a file in a folder of yours: bloomery doctor --bundle ~/report.json"
        raise UserError(f"the bundle cannot be written: {error.strerror}", where=str(file), fix=fix) from error
    return len(text.encode())


def _bundle(file: Path) -> bool:
    """Whether an earlier call wrote it, or it is empty."""
    try:
        with file.open("rb") as stream:
            return stream.read(20).lstrip().startswith((b'{\n "bloomery"',)) or not file.stat().st_size
    except OSError:
        return True  # writing says why


def nameless_document(machine: Machine) -> dict[str, Any]:
    """A machine as machine.json holds it, without what a bundle leaves out."""
    found: dict[str, Any] = _private_values(plain(nameless(machine)))
    return found


def _private_values(value: Any, key: str = "") -> Any:
    """A document whose texts are private, but for its own words: a host may be called "amd", a user "torch"."""
    if isinstance(value, dict):
        return {name: _private_values(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_private_values(one, key) for one in value]
    return private(value) if isinstance(value, str) and key not in OWN_WORDS else value


def nameless(machine: Machine) -> Machine:
    """Without names of people, groups, hosts and single chips; what belongs together stays together."""
    groups: dict[str, str] = {}
    host = machine.host
    access = host.access.model_copy(
        update={
            "groups": tuple(_group(name, groups) for name in host.access.groups),
            "listed_groups": tuple(_group(name, groups) for name in host.access.listed_groups),
            "kfd_group": _group(host.access.kfd_group, groups) if host.access.kfd_group else "",
        }
    )
    slurm = {name: value for name, value in host.around.slurm.items() if not PRIVATE_SLURM.search(name)}
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
    environment = {name: placeless(value) for name, value in machine.software.environment.items()}
    software = machine.software.model_copy(update={"environment": environment})
    return machine.model_copy(update={"accelerators": devices, "host": host, "software": software})


def _group(name: str, seen: dict[str, str]) -> str:
    return name if name in COMMON_GROUPS else seen.setdefault(name, f"group{len(seen) + 1}")


def placeless(text: str) -> str:
    """Without addresses of the network; this machine's own, 127.0.0.1, stays."""
    return ADDRESS.sub("[address]", text)


def private(text: str) -> str:
    """Without this user's home, name and host, and without secrets."""
    home = str(Path.home())
    text = text.replace(home, "~") if home != "/" else text
    text = re.sub(r"(/home/|/Users/)[\w.-]+", r"\1user", text)
    for names, instead in ((_users(), "user"), (_hosts(), "host")):
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2 and name not in COMMON_NAMES:
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return redact_secrets(text)


def _users() -> set[str]:
    told = {
        os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
    }
    try:
        return told | {getpass.getuser()}
    except (KeyError, OSError):  # a number without a name, as in containers
        return told


def _hosts() -> set[str]:
    names = ("HOSTNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_JOB_NODELIST", "MASTER_ADDR")
    told = {platform.node(), *(os.environ.get(name, "") for name in names)}
    return told | {name.partition(".")[0] for name in told}
