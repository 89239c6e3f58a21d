"""`bloomery doctor --fix N`: run the pip command of a finding, or pin torch in this environment."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import click

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.hardware.doctor.symptoms import PIN, Finding
from bloomery.hardware.machine import Machine

PINNED = ("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "torchvision", "torchaudio")
WRONG_TORCH = ("wrong-build", "wheel-unfit", "arch-not-in-wheel", "device-package-missing", "no-torch", "torch-too-old")


def apply_fix(number: int, findings: Sequence[Finding], machine: Machine, *, ask: Callable[[str], bool]) -> None:
    """Apply the fix of finding `number` after asking. Raises UserError if only the user can."""
    if not 1 <= number <= len(findings):
        problem = f"no finding has number {number}; findings: " + (f"1 to {len(findings)}" if findings else "none")
        raise UserError(problem, where="--fix", fix="bloomery doctor", code=2)
    finding = findings[number - 1]
    if not finding.run:
        manual = "\n       ".join(finding.fix)
        raise UserError("no automatic fix for this finding", where=f"{number}: {finding.what}", fix=manual)
    if finding.run != PIN:
        _install(finding.run, ask)
        return
    wrong = next((other for other in findings if other.id in WRONG_TORCH), None)
    if wrong is not None:
        fix = "\n       ".join(wrong.fix)
        raise UserError("the wrong PyTorch is installed: it is not pinned", where=wrong.what, fix=fix)
    local = machine.software.torch if machine.software.torch and "+" in machine.software.torch else None
    if _pin(local, lambda commands: _agreed(commands, ask)):
        click.echo("done       pip can no longer replace this PyTorch")


def _install(command: str, ask: Callable[[str], bool]) -> None:
    """In this environment, never in the system Python. An existing pin is renewed for the new build."""
    if sys.prefix == sys.base_prefix:
        fix = f"python3 -m venv .venv && . .venv/bin/activate && {command}"
        raise UserError("pip does not run in the system Python", where=sys.prefix, fix=fix)
    settings, _, words = command.partition("pip install ")
    if _agreed([command], ask, f"in {sys.prefix}; downloads several GB"):
        environment = dict(setting.split("=", 1) for setting in shlex.split(settings))
        _run([sys.executable, "-m", "pip", "install", *shlex.split(words)], shown=command, environment=environment)
        if settings:  # pip ignored the old pin
            _pin(None, lambda _: True)
        click.echo("done       verify with: bloomery doctor --probe")


def _agreed(commands: Sequence[str], ask: Callable[[str], bool], remark: str = "") -> bool:
    """Whether the user agrees to run these. Raises UserError if stdin is not a terminal."""
    click.echo("\n           ".join(["run        " + commands[0], *commands[1:], *([remark] if remark else [])]))
    if not sys.stdin.isatty():
        problem = "cannot ask for confirmation: stdin is not a terminal"
        raise UserError(problem, where="--fix", fix="\n       ".join(commands))
    if not (agreed := ask("Run it?")):
        click.echo("canceled   nothing changed")
    return agreed


def _run(command: Sequence[str], *, shown: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """`environment`: variables added to those of this process. Raises UserError if the command fails."""
    if code := subprocess.run(command, env={**os.environ, **environment}, check=False).returncode:
        raise UserError(f"pip failed: exit code {code}", where="see the output above", fix=shown)


def _pin(torch: str | None, agreed: Callable[[Sequence[str]], bool]) -> bool:
    """Pins the installed versions, as `make setup` does: a constraints file in the folder of the environment, set in
    its pip configuration. `torch`: its full version, with the build. `agreed` gets the shell commands that do the same.

    Raises UserError if pip already uses a constraints file of the user or fails, OSError if the file cannot be written.
    """
    versions = {}
    for name in PINNED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions |= {"torch": torch} if torch else {}
    pins = [f"{name}=={version}" for name, version in versions.items()]
    file, pip = Path(sys.prefix) / "torch-pin.txt", [sys.executable, "-m", "pip", "config"]
    words = [*pip, "get", "install.constraint"]
    current = os.environ.get("PIP_CONSTRAINT")
    current = current or subprocess.run(words, capture_output=True, text=True, check=False).stdout
    others = [one for one in current.split() if one not in (os.devnull, str(file), file.as_uri())]
    if others:
        fix = "\n       ".join(["add to this file:", *pins])
        raise UserError("this environment already has a pip constraints file", where=others[0], fix=fix)
    command = [*pip, "--site", "set", "install.constraint", file.as_uri()]
    if not agreed([f"printf '%s\\n' {shlex.join(pins)} > {shlex.quote(str(file))}", shlex.join(command)]):
        return False
    write_durably(file, "".join(f"{line}\n" for line in pins))
    _run(command, shown=shlex.join(command))
    return True
