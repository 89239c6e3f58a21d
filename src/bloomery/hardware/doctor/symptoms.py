"""What the doctor can say: findings.toml of what its rules see, symptoms.toml of what a line of a log means.

A rule is a function from a machine to findings; a symptom is recognised by its patterns and what is known of a machine.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import best_device, fitting_builds, install

Level = Literal["blocks", "slows", "note"]
Stream = Literal["stderr", "exception", "dmesg", "any"]
LONGEST_TEXT = 2_000_000  # of a log the end counts
LONGEST_LINE = 2_000  # no message is longer; patterns never see more of a line
PCI_VENDORS = {0x1002: "amd", 0x10DE: "nvidia"}
PROBE = "bloomery doctor --probe"
NUMBER = "{number}"  # in `fix`: the number that the finding gets in the list
PIN = "pin torch"


class Entry(BaseModel, frozen=True, extra="forbid"):
    """A part of a table: an unknown key is a typing error."""


class Row(Entry):
    """One [[finding]] table; the head of findings.toml says what its fields mean."""

    id: str
    level: Level
    what: str
    evidence: str
    fix: tuple[str, ...] = ()
    verify: str = "bloomery doctor"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that stops or slows training or is worth knowing.

    `fix`: lines for a shell, what they do after two blanks and a #. `run`: what `doctor --fix` may do itself, after
    asking: a `pip install ...` as it stands in `fix`, or PIN.
    """

    id: str
    level: Level
    what: str
    evidence: str
    fix: tuple[str, ...]
    verify: str = "bloomery doctor"
    run: str = ""


Rule = Callable[[Machine], Iterator[Finding]]


@cache
def findings() -> dict[str, Row]:
    """The table of findings by their ids, checked."""
    text = resources.files("bloomery.hardware.doctor").joinpath("findings.toml").read_text(encoding="utf-8")
    return {row.id: row for row in (Row.model_validate(each) for each in tomllib.loads(text)["finding"])}


def found(
    id: str,
    *,
    level: Level | None = None,
    fix: Sequence[str] = (),
    verify: str = "",
    run: str = "",
    **facts: Any,
) -> Finding:
    """The finding of that table with the facts in its sentences; what is given stands in place of the table's own."""
    row = findings()[id]
    known = {"number": NUMBER} | facts
    return Finding(
        id=id,
        level=level or row.level,
        what=row.what.format_map(known),
        evidence=row.evidence.format_map(known),
        fix=tuple(fix) or tuple(step.format_map(known) for step in row.fix),
        verify=verify or row.verify.format_map(known),
        run=run,
    )


def install_steps(machine: Machine, *, anew: bool = True) -> tuple[str, ...]:
    """What a cluster loads before, then `install` with the reason where it leaves the GPU idle."""
    device = best_device(machine)
    build = fitting_builds(machine, device)[0]
    remark = f"  # for the CPU: {build.reason}" if build.cpu and device is not None else ""
    return (*build.before, install(machine, anew=anew) + remark)


def to_install(id: str, machine: Machine, **facts: Any) -> Finding:
    """A finding that another PyTorch mends; `--fix` installs none that leaves the GPU idle."""
    device = best_device(machine)
    idle = device is not None and fitting_builds(machine, device)[0].cpu
    return found(id, fix=install_steps(machine), run="" if idle else install(machine), **facts)


class Facts(Entry):
    """What is known of a machine, as far as symptoms ask for it; None: not asked."""

    vendor: Literal["amd", "nvidia"] | None = None
    arch: str | None = None  # a regular expression
    build: Literal["cpu", "cuda", "rocm"] | None = None
    wsl: bool | None = None
    container: bool | None = None
    slurm: bool | None = None
    override: bool | None = None  # HSA_OVERRIDE_GFX_VERSION is set
    igpu: bool | None = None  # AMD processor graphics are device 0
    gpus: int | None = None  # at least so many


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class Symptom(Entry):
    """One [[symptom]] table; the head of symptoms.toml says what its fields mean."""

    id: Annotated[str, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
    title: str
    level: Level
    stream: Stream
    patterns: Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], Field(min_length=1)]
    requires: Facts = Facts()
    likely: Facts = Facts()
    cause: str
    fix: Annotated[tuple[str, ...], Field(min_length=1)]
    verify: str
    cites: Annotated[tuple[str, ...], Field(min_length=1)]
    log: str
    log_from: str


class Symptoms(Entry):
    symptom: tuple[Symptom, ...]


@dataclass(frozen=True, kw_only=True)
class Match:
    """A symptom that was recognised. `line`: where; `fix`: commands, with what they do after two blanks and a #."""

    id: str
    level: Level
    what: str
    cause: str
    line: str
    fix: tuple[str, ...]
    verify: str
    cites: tuple[str, ...]
    score: float


@cache
def symptoms() -> tuple[Symptom, ...]:
    """The table, checked."""
    text = resources.files("bloomery.hardware.doctor").joinpath("symptoms.toml").read_text(encoding="utf-8")
    return Symptoms.model_validate(tomllib.loads(text)).symptom


def match(text: str, *, machine: Machine | None = None, stream: Stream | None = None) -> tuple[Match, ...]:
    """The symptoms that `text` shows, the best first. A `machine` that contradicts a symptom excludes it.

    Score: one for every pattern that is found, and for how much of a line it explains; a half for every fact of the
    machine that makes it likelier.
    """
    lines = [line[:LONGEST_LINE] for line in text[-LONGEST_TEXT:].splitlines()]
    joined = "\n".join(lines)
    found = [_match(symptom, joined, machine) for symptom in symptoms() if _heard_in(symptom, stream)]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.score))


def _heard_in(symptom: Symptom, stream: Stream | None) -> bool:
    """The kernel's log is another place than a program's output; an exception is printed on stderr, too."""
    if stream is None or "any" in (stream, symptom.stream):
        return True
    return (stream == "dmesg") == (symptom.stream == "dmesg")


def _match(symptom: Symptom, text: str, machine: Machine | None) -> Match | None:
    hits = [hit for pattern in symptom.patterns if (hit := re.search(pattern, text, re.MULTILINE))]
    if not hits or (machine is not None and not agree(symptom.requires, machine)):
        return None
    supported = _supporting(symptom.likely, machine) if machine is not None else 0
    first = min(hits, key=lambda hit: hit.start())
    return Match(
        id=symptom.id,
        level=symptom.level,
        what=symptom.title,
        cause=symptom.cause,
        line=_line_around(text, first.start()),
        fix=tuple(filled(step, machine) for step in symptom.fix),
        verify=symptom.verify,
        cites=symptom.cites,
        score=sum(1 + min(len(hit[0]), 100) / 100 for hit in hits) + supported / 2,
    )


def _line_around(text: str, position: int) -> str:
    begin = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[begin : end if end >= 0 else len(text)].strip()


def agree(facts: Facts, machine: Machine) -> bool:
    """Whether nothing that is known of `machine` contradicts `facts`."""
    return all(_holds(name, wanted, machine) is not False for name, wanted in _asked(facts))


def _supporting(facts: Facts, machine: Machine) -> int:
    return sum(_holds(name, wanted, machine) is True for name, wanted in _asked(facts))


def _asked(facts: Facts) -> list[tuple[str, object]]:
    return [(name, value) for name, value in facts if value is not None]


def _holds(name: str, wanted: object, machine: Machine) -> bool | None:
    """None: the machine's record does not say."""
    around, software = machine.host.around, machine.software
    amd = [device for device in machine.accelerators if device.vendor == "amd"]
    if name == "vendor":
        found = vendors(machine)
        return wanted in found if found else None
    if name == "arch":
        chips = [device.arch for device in machine.accelerators]
        return any(re.fullmatch(str(wanted), chip) for chip in chips) if chips else None
    if name == "build":
        return software.build == wanted if software.build else None
    if name == "gpus":
        return isinstance(wanted, int) and len(machine.accelerators) >= wanted
    known = {
        "wsl": around.wsl,
        "container": bool(around.container),
        "slurm": bool(around.slurm),
        "override": "HSA_OVERRIDE_GFX_VERSION" in software.environment,
        "igpu": len(amd) > 1 and amd[0].integrated,
    }
    return known[name] == wanted


def vendors(machine: Machine) -> frozenset[str]:
    """The makers of the GPUs that are here, whether or not a driver has them."""
    listed = {device.vendor for device in machine.accelerators}
    return frozenset(listed | {PCI_VENDORS[one.vendor] for one in machine.host.displays if one.vendor in PCI_VENDORS})


def filled(step: str, machine: Machine | None) -> str:
    """`{install}` becomes the command that installs the fitting PyTorch, or asks for it where no GPU is known."""
    if step != "{install}":
        return step
    if machine is None or not machine.accelerators:
        return "bloomery doctor  # names the PyTorch that fits this machine"
    return install(machine) + "  # the build that has this chip's kernels"
