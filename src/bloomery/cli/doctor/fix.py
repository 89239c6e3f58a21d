"""What `bloomery doctor --fix N` does: pip's constraints of this environment, a line of a shell file, a call of pip."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

import click

from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.hardware.doctor.finding import Finding, Fix
from bloomery.hardware.machine import Machine

PINNED = ("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "torchvision", "torchaudio")
BACKUP = ".before-bloomery"
UNFIT = ("wrong-build", "wheel-unfit", "arch-not-in-wheel", "device-package-missing", "no-torch", "torch-too-old")


def mend(number: int, findings: Sequence[Finding], machine: Machine, *, ask: Callable[[str], bool]) -> None:
    """Mend the finding of that number after asking. Raises UserError where only the user can."""
    if not 1 <= number <= len(findings):
        there = {0: "there is none", 1: "there is one"}.get(len(findings), f"there are {len(findings)}")
        raise UserError(f"there is no finding {number}: {there}", where="--fix", remedy="bloomery doctor", code=2)
    finding = findings[number - 1]
    by_hand = "\n       ".join(finding.mend)
    if not finding.fixes:
        raise UserError("this is yours to mend", where=f"{number}: {finding.what}", remedy=by_hand)
    unfit = next((other for other in findings if other.id in UNFIT), None)
    if finding.fixes[0].kind == "pin" and unfit is not None:
        remedy = "\n       ".join(unfit.mend)
        raise UserError("this PyTorch is not the one to pin", where=unfit.what, remedy=remedy)
    for fix in finding.fixes:
        if fix.kind == "pip":
            _call_pip(fix, ask)
        else:
            _do(fix, machine, ask, by_hand)


def _do(fix: Fix, machine: Machine, ask: Callable[[str], bool], by_hand: str) -> None:
    files = changes(fix, machine)
    for file, text in files.items():
        click.echo(f"change     {file}")
        for line in _difference(file, text):
            click.echo(f"           {line}")
    if not sys.stdin.isatty():
        remedy = f"run it on a terminal, or type: {_typed(fix, files)}" if fix.kind == "unset" else _typed(fix, files)
        raise UserError("nobody is there to ask", where="--fix changes files only when it is allowed to", remedy=remedy)
    if not ask("Change it? A copy of what was there is kept beside it."):
        click.echo("left       as it was")
        return
    for file, text in files.items():
        _write(file, text, by_hand)
    last = "open a new shell, or unset it in this one" if fix.kind == "unset" else "pip now refuses to replace it"
    click.echo(f"done       {last}")


def _call_pip(fix: Fix, ask: Callable[[str], bool]) -> None:
    """In this environment, never in the system's Python. A pin of the old build becomes one of the new build."""
    settings, _, words = fix.command.partition("pip install ")
    command = [sys.executable, "-m", "pip", "install", *shlex.split(words)]
    if sys.prefix == sys.base_prefix:
        remedy = f"python3 -m venv .venv && . .venv/bin/activate, then {fix.command}"
        raise UserError("this Python is the system's: pip is not called in it", where=sys.prefix, remedy=remedy)
    click.echo(f"run        {fix.command}\n           in {sys.prefix}; some gigabytes are downloaded")
    if not sys.stdin.isatty():
        raise UserError("nobody is there to ask", where="--fix", remedy=fix.command)
    if not ask("Run it?"):
        click.echo("left       as it was")
        return
    environment = os.environ | dict(word.split("=", 1) for word in settings.split())
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise UserError(f"pip ended with {code}", where="the lines above say why", remedy=fix.command)
    if settings:  # the pin stood in the way
        for file, text in _pinned(Path(sys.prefix), None).items():
            _write(file, text, "bloomery doctor names the pin's command")
    click.echo("done       bloomery doctor --probe proves it")


def changes(fix: Fix, machine: Machine) -> dict[Path, str]:
    """The files that a fix changes, with what they hold afterwards. Raises UserError when a line is not there."""
    return _without_line(fix) if fix.kind == "unset" else _pinned(Path(sys.prefix), machine)


def _without_line(fix: Fix) -> dict[Path, str]:
    file = expanded(fix.file)
    lines = file.read_text(errors="surrogateescape").splitlines(keepends=True) if file.is_file() else []
    if not 1 <= fix.line <= len(lines) or fix.name not in lines[fix.line - 1]:
        raise UserError(
            f"line {fix.line} no longer sets {fix.name}", where=str(file), remedy=f"grep -n {fix.name} {fix.file}"
        )
    if not _simple(fix, lines):
        remedy = f"change it in an editor: {os.environ.get('EDITOR', 'nano')} +{fix.line} {fix.file}"
        if file.parent.name == "conda-meta":
            remedy = f"conda env config vars unset {fix.name}"
        raise UserError(f"line {fix.line} does more than set {fix.name}", where=fix.file, remedy=remedy)
    lines[fix.line - 1] = _silencer(fix, lines) + lines[fix.line - 1]
    return {file: "".join(lines)}


def _simple(fix: Fix, lines: Sequence[str]) -> bool:
    """Whether the line sets the variable and does nothing else: other commands would be silenced, too."""
    before = lines[fix.line - 2] if fix.line > 1 else ""
    statement = (
        rf"\s*(?:export\s+|setenv\s+|set\s+-\S*x\S*\s+)?{re.escape(fix.name)}(?:=|\s+)"
        r"""(?:"[^"`$]*"|'[^']*'|[^\s;&|`"'$\\]*)\s*;?\s*(?:#.*)?"""
    )
    return not before.rstrip("\n").endswith("\\") and bool(re.fullmatch(statement, lines[fix.line - 1].rstrip("\n")))


def _silencer(fix: Fix, lines: Sequence[str]) -> str:
    """What makes a comment of the line. Within a block `:` goes before it: a shell refuses a block without commands."""
    line = lines[fix.line - 1]
    before = next((one.strip() for one in reversed(lines[: fix.line - 1]) if one.strip()), "")
    block = line[:1] in " \t" or re.search(r"(?:\bthen|\bdo|\belse|[{)(])$", before)
    return ": # " if block else "# "


def _pinned(prefix: Path, machine: Machine | None) -> dict[Path, str]:
    """As `make setup` pins: the environment's pip.conf names a file of constraints, and that names the versions."""
    config = prefix / "pip.conf"
    text = config.read_text(errors="surrogateescape") if config.is_file() else ""
    # pip lets the variable win over its files.
    said = [one for one in os.environ.get("PIP_CONSTRAINT", "").split() if one != os.devnull]
    named = said or _named_constraints(config, text)
    if named:
        constraints, changed = _one_with_torch(named, config), {}
    else:
        constraints = prefix / "torch-pin.txt"
        changed = {config: _with_constraint(text, constraints)}
    old = constraints.read_text(errors="surrogateescape").splitlines() if constraints.is_file() else []
    versions = {name: version for name in PINNED if (version := _version(name))}
    if machine is not None and machine.software.torch and "+" in machine.software.torch:
        versions["torch"] = machine.software.torch  # as torch itself says it: with the build
    kept = [line for line in old if re.split(r"[=<>~! @]", line.strip())[0].lower() not in versions]
    return {constraints: "\n".join([*kept, *(f"{n}=={v}" for n, v in versions.items())]) + "\n", **changed}


def _named_constraints(config: Path, text: str) -> list[str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text or "[install]\n")
    except configparser.Error as error:
        remedy = "python -m pip config debug says which line; `python -m pip config edit` opens it"
        raise UserError("pip itself cannot read this file", where=str(config), remedy=remedy) from error
    return parser.get("install", "constraint", fallback="").split()


def _one_with_torch(named: Sequence[str], config: Path) -> Path:
    """Of the files that pip is told of, the one that names torch, else the first. Raises UserError: all are remote."""
    local = [one for one in named if not one.startswith(("http:", "https:"))]
    files = [Path(unquote(urlparse(one).path) if one.startswith("file:") else one) for one in local]
    if not files:
        remedy = f"whoever keeps {named[0]} must pin torch in it, or take that line out of {config}"
        raise UserError("pip's constraints of this environment lie on a server", where=str(config), remedy=remedy)
    naming = (file for file in files if file.is_file() and re.search(r"^torch\s*(==|@)", _text(file), re.MULTILINE))
    return next(naming, files[0])


def _text(file: Path) -> str:
    return file.read_text(errors="surrogateescape")


def _with_constraint(text: str, constraints: Path) -> str:
    line = f"constraint = {constraints.as_uri()}\n"
    if re.search(r"^\[install\]\s*$", text, re.MULTILINE):
        return re.sub(r"^(\[install\][^\n]*\n?)", lambda found: found[1] + line, text, count=1, flags=re.MULTILINE)
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}[install]\n{line}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _difference(file: Path, text: str) -> list[str]:
    """Lines that go and lines that come."""
    old = file.read_text(errors="surrogateescape").splitlines() if file.is_file() else []
    new = text.splitlines()
    return [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]


def _typed(fix: Fix, files: dict[Path, str]) -> str:
    """What a person types instead."""
    if fix.kind == "unset":
        file = expanded(fix.file)
        silencer = _silencer(fix, file.read_text(errors="surrogateescape").splitlines(keepends=True))
        return f"sed -i.bak '{fix.line}s/^/{silencer}/' {_quoted(fix.file)}"
    constraints = next(iter(files))
    pins = shlex.join(line for line in files[constraints].splitlines() if line)
    lines = [f"printf '%s\\n' {pins} > {shlex.quote(str(constraints))}"]
    if len(files) > 1:
        lines.append(f"python -m pip config --site set install.constraint {constraints.as_uri()}")
    return "\n       ".join(lines)


def _quoted(path: str) -> str:
    """For a shell; a leading ~/ stays outside of the quotes, where it means the home folder."""
    home, rest = ("~/", path[2:]) if path.startswith("~/") else ("", path)
    return home + shlex.quote(rest)


def _write(file: Path, text: str, by_hand: str) -> None:
    """Never half a file, and a copy of what was there stays."""
    try:
        if file.is_file():
            shutil.copy2(file, file.with_name(file.name + BACKUP))
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(text, errors="surrogateescape")
        if file.exists():
            shutil.copymode(file, fresh)
        fresh.replace(file.resolve())  # a dotfile may be a link into a repository
    except OSError as error:
        raise UserError(f"it cannot be written: {error.strerror}", where=str(file), remedy=by_hand) from error
