"""What `bloomery doctor --fix N` runs: a finding's pip command, or those that pin torch in this environment."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import click

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.hardware.doctor.symptoms import PIN, Finding
from bloomery.hardware.machine import Machine

PINNED = ("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "torchvision", "torchaudio")
UNFIT = ("wrong-build", "wheel-unfit", "arch-not-in-wheel", "device-package-missing", "no-torch", "torch-too-old")


def apply_fix(number: int, findings: Sequence[Finding], machine: Machine, *, ask: Callable[[str], bool]) -> None:
    """Mend the finding of that number after asking. Raises UserError where only the user can."""
    if not 1 <= number <= len(findings):
        there = {0: "there is none", 1: "there is one"}.get(len(findings), f"there are {len(findings)}")
        raise UserError(f"there is no finding {number}: {there}", where="--fix", fix="bloomery doctor", code=2)
    finding = findings[number - 1]
    if not finding.run:
        by_hand = "\n       ".join(finding.fix)
        raise UserError("this is yours to mend", where=f"{number}: {finding.what}", fix=by_hand)
    if finding.run != PIN:
        _install(finding.run, ask)
        return
    unfit = next((other for other in findings if other.id in UNFIT), None)
    if unfit is not None:
        fix = "\n       ".join(unfit.fix)
        raise UserError("this PyTorch is not the one to pin", where=unfit.what, fix=fix)
    local = machine.software.torch if machine.software.torch and "+" in machine.software.torch else None
    pin = _pin(local)
    if _agreed(pin.shown, ask):
        pin.set()
        click.echo("done       pip now refuses to replace it")


def _install(command: str, ask: Callable[[str], bool]) -> None:
    """In this environment, never in the system's Python. A pin of the old build becomes one of the new build."""
    if sys.prefix == sys.base_prefix:
        fix = f"python3 -m venv .venv && . .venv/bin/activate, then {command}"
        raise UserError("this Python is the system's: pip is not called in it", where=sys.prefix, fix=fix)
    settings, _, words = command.partition("pip install ")
    if _agreed([command], ask, f"in {sys.prefix}; some gigabytes are downloaded"):
        said = dict(setting.split("=", 1) for setting in shlex.split(settings))
        _run([sys.executable, "-m", "pip", "install", *shlex.split(words)], shown=command, settings=said)
        if settings:  # the pin stood in the way
            _pin(None).set()
        click.echo("done       bloomery doctor --probe proves it")


def _agreed(commands: Sequence[str], ask: Callable[[str], bool], remark: str = "") -> bool:
    """Whether these may be run. Raises UserError when nobody can be asked."""
    click.echo("\n           ".join(["run        " + commands[0], *commands[1:], *([remark] if remark else [])]))
    if not sys.stdin.isatty():
        raise UserError("nobody is there to ask", where="--fix", fix="\n       ".join(commands))
    if not (agreed := ask("Run it?")):
        click.echo("left       as it was")
    return agreed


def _run(command: Sequence[str], *, shown: str, settings: Mapping[str, str] = MappingProxyType({})) -> None:
    """`settings`: variables that the command sees besides this process's. Raises UserError when it fails."""
    if code := subprocess.run(command, env={**os.environ, **settings}, check=False).returncode:
        raise UserError(f"pip ended with {code}", where="the lines above say why", fix=shown)


@dataclass(frozen=True)
class Pin:
    """Constraints of pip in the environment's own folder, named by the environment's own settings of pip."""

    file: Path
    lines: list[str]

    @property
    def _command(self) -> list[str]:
        return [sys.executable, "-m", "pip", "config", "--site", "set", "install.constraint", self.file.as_uri()]

    @property
    def shown(self) -> list[str]:
        """What `set` does, as commands for a shell."""
        write = f"printf '%s\\n' {shlex.join(self.lines)} > {shlex.quote(str(self.file))}"
        return [write, shlex.join(self._command)]

    def set(self) -> None:
        """Raises UserError when pip refuses, OSError when the file cannot be written."""
        write_durably(self.file, "".join(f"{line}\n" for line in self.lines))
        _run(self._command, shown=self.shown[-1])


def _pin(torch: str | None) -> Pin:
    """What is installed, as `make setup` pins it. `torch`: as torch itself says it, with the build.

    Raises UserError where pip already reads constraints of somebody else's.
    """
    versions = {name: version for name in PINNED if (version := _version(name))} | ({"torch": torch} if torch else {})
    pins = [f"{name}=={version}" for name, version in versions.items()]
    file = Path(sys.prefix) / "torch-pin.txt"
    words = [sys.executable, "-m", "pip", "config", "get", "install.constraint"]
    said = os.environ.get("PIP_CONSTRAINT") or subprocess.run(words, capture_output=True, text=True, check=False).stdout
    others = [one for one in said.split() if one not in (os.devnull, str(file), file.as_uri())]
    if others:
        fix = "\n       ".join(["write into it:", *pins])
        raise UserError("pip's constraints of this environment are yours to change", where=others[0], fix=fix)
    return Pin(file, pins)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
