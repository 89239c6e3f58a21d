"""The doctor's tables: findings.toml for its rules, symptoms.toml for error messages; and how a symptom is matched.

A rule is a function from a machine to findings; a symptom is matched by its patterns and the facts of a machine.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from bloomery.hardware.intel import INTEL_VENDOR, listed_products
from bloomery.hardware.machine import Display, Machine
from bloomery.hardware.profile import best_device, fitting_builds, install
from bloomery.hardware.vendors import VENDORS, Build, Vendor

Level = Literal["blocks", "slows", "note"]
Stream = Literal["stderr", "exception", "dmesg", "any"]
LONGEST_TEXT = 2_000_000  # the end of a log
LONGEST_LINE = 2_000  # patterns are searched in this much of a line
PCI_VENDORS = {facts.pci_vendor: vendor for vendor, facts in VENDORS.items() if facts.pci_vendor}
PROBE = "bloomery doctor --probe"
NUMBER = "{number}"  # in `fix`: replaced by the number of the finding in the list
PIN = "pin torch"


class Entry(BaseModel, frozen=True, extra="forbid"):
    """A table of TOML; unknown keys are errors."""


class Finding(Entry):
    """A problem that blocks or slows training, or a note: a [[finding]] of findings.toml with its {fields} filled in.

    `fix`: shell commands, each with an optional remark after two spaces and "# ". `run`: what `doctor --fix` can run
    after asking: a `pip install ...` that is also in `fix`, or PIN. `headline`: for the first line of the page.
    """

    id: str
    level: Level
    what: str
    evidence: str
    fix: tuple[str, ...] = ()
    verify: str = "bloomery doctor"
    run: str = ""
    headline: str = ""


Rule = Callable[[Machine], Iterator[Finding]]


@cache
def findings() -> dict[str, Finding]:
    """The validated table of findings by id."""
    text = (
        resources.files("bloomery.hardware.doctor")
        .joinpath("findings.toml")
        .read_text(encoding="utf-8")
    )
    return {entry["id"]: Finding.model_validate(entry) for entry in tomllib.loads(text)["finding"]}


def from_table(
    id: str,
    *,
    level: Level | None = None,
    fix: Sequence[str] = (),
    verify: str = "",
    run: str = "",
    **fields: Any,
) -> Finding:
    """The finding of the table with its {fields} filled in; `level`, `fix` and `verify` replace those of the table."""
    row = findings()[id]
    fields |= {"number": NUMBER}
    texts = {
        name: getattr(row, name).format_map(fields)
        for name in ("what", "evidence", "verify", "headline")
    }
    steps = tuple(fix) or tuple(step.format_map(fields) for step in row.fix)
    given = {"level": level or row.level, "verify": verify or texts["verify"], "run": run}
    return row.model_copy(update=texts | given | {"fix": steps})


def install_steps(machine: Machine, *, reinstall: bool = True) -> tuple[str, ...]:
    """The modules that a cluster loads first, then `install`, with the reason if it installs a CPU build."""
    device = best_device(machine)
    build = fitting_builds(machine, device)[0]
    remark = f"  # for the CPU: {build.reason}" if build.cpu and device is not None else ""
    return (*build.before, install(machine, reinstall=reinstall) + remark)


def to_install(id: str, machine: Machine, **fields: Any) -> Finding:
    """A finding fixed by another PyTorch build; `--fix` does not install a CPU build on a machine with a GPU."""
    device = best_device(machine)
    cpu_only = device is not None and fitting_builds(machine, device)[0].cpu
    return from_table(
        id, fix=install_steps(machine), run="" if cpu_only else install(machine), **fields
    )


class MachineFacts(Entry):
    """Facts of a machine that a symptom requires; None: any."""

    vendor: Vendor | None = None
    arch: str | None = None  # a regular expression
    build: Build | None = None
    wsl: bool | None = None
    container: bool | None = None
    slurm: bool | None = None
    override: bool | None = None  # HSA_OVERRIDE_GFX_VERSION is set
    igpu: bool | None = None  # device 0 is an integrated AMD GPU
    gpus: int | None = None  # at least this many


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


class Symptom(Entry):
    """One [[symptom]] table; the head of symptoms.toml describes its fields."""

    id: Annotated[str, Field(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")]
    title: str
    level: Level
    stream: Stream
    patterns: Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], Field(min_length=1)]
    requires: MachineFacts = MachineFacts()
    likely: MachineFacts = MachineFacts()
    cause: str
    fix: Annotated[tuple[str, ...], Field(min_length=1)]
    verify: str
    cites: Annotated[tuple[str, ...], Field(min_length=1)]
    log: str
    log_from: str


@dataclass(frozen=True, kw_only=True)
class Match:
    """A symptom that matched. `line`: the matching line; `fix`: commands, each with an optional "  # " remark."""

    id: str
    level: Level
    what: str
    cause: str
    line: str
    fix: tuple[str, ...]
    verify: str
    cites: tuple[str, ...]
    score: float


def finding_of(symptom: Match) -> Finding:
    """A symptom as `bloomery doctor` shows it."""
    return Finding(
        id=symptom.id,
        level=symptom.level,
        what=f"{symptom.what}: {symptom.cause}",
        evidence=symptom.line[:300],
        fix=symptom.fix,
        verify=symptom.verify,
    )


@cache
def symptoms() -> tuple[Symptom, ...]:
    """The validated table of symptoms."""
    text = (
        resources.files("bloomery.hardware.doctor")
        .joinpath("symptoms.toml")
        .read_text(encoding="utf-8")
    )
    return tuple(Symptom.model_validate(entry) for entry in tomllib.loads(text)["symptom"])


def match(
    text: str, *, machine: Machine | None = None, stream: Stream | None = None
) -> tuple[Match, ...]:
    """The symptoms that match `text`, the best first. A symptom whose requirements `machine` contradicts is left out.

    Score: for each pattern found, 1 plus 0.01 per matched character (at most 1); 0.5 for each fact that makes the
    symptom likelier.
    """
    lines = [line[:LONGEST_LINE] for line in text[-LONGEST_TEXT:].splitlines()]
    joined = "\n".join(lines)
    matches = []
    for symptom in symptoms():
        # The kernel log is separate from a program's output; an exception is printed on stderr as well.
        if not {None, "any"} & {stream, symptom.stream} and (stream == "dmesg") != (
            symptom.stream == "dmesg"
        ):
            continue
        hits = [
            hit for pattern in symptom.patterns if (hit := re.search(pattern, joined, re.MULTILINE))
        ]
        if not hits or (machine is not None and not agree(symptom.requires, machine)):
            continue
        facts = symptom.likely.model_dump(exclude_none=True).items()
        likely = 0 if machine is None else sum(_holds(*fact, machine) is True for fact in facts)
        position = min(hit.start() for hit in hits)
        end = joined.find("\n", position)
        matches.append(
            Match(
                id=symptom.id,
                level=symptom.level,
                what=symptom.title,
                cause=symptom.cause,
                line=joined[
                    joined.rfind("\n", 0, position) + 1 : end if end >= 0 else len(joined)
                ].strip(),
                fix=tuple(filled(step, machine) for step in symptom.fix),
                verify=symptom.verify,
                cites=symptom.cites,
                score=sum(1 + min(len(hit[0]), 100) / 100 for hit in hits) + likely / 2,
            )
        )
    return tuple(sorted(matches, key=lambda candidate: -candidate.score))


def agree(facts: MachineFacts, machine: Machine) -> bool:
    """Whether `machine` contradicts none of the `facts`."""
    return all(
        _holds(*fact, machine) is not False for fact in facts.model_dump(exclude_none=True).items()
    )


def _holds(name: str, required: object, machine: Machine) -> bool | None:
    """None: not recorded for this machine."""
    around = machine.host.around
    software = machine.software
    amd = [device for device in machine.accelerators if device.vendor == "amd"]
    if name == "vendor":
        present = vendors(machine)
        return required in present if present else None
    if name == "arch":
        archs = [device.arch for device in machine.accelerators]
        return any(re.fullmatch(str(required), arch) for arch in archs) if archs else None
    if name == "build":
        return software.build == required if software.build else None
    if name == "gpus":
        return isinstance(required, int) and len(machine.accelerators) >= required
    facts = {
        "wsl": around.wsl,
        "container": bool(around.container),
        "slurm": bool(around.slurm),
        "override": "HSA_OVERRIDE_GFX_VERSION" in software.environment,
        "igpu": len(amd) > 1 and amd[0].integrated,
    }
    return facts[name] == required


def vendors(machine: Machine) -> frozenset[str]:
    """The vendors of the GPUs in this machine, with or without a driver."""
    listed = {device.vendor for device in machine.accelerators}
    return frozenset(
        listed
        | {
            PCI_VENDORS[display.vendor]
            for display in machine.host.displays
            if display.vendor in PCI_VENDORS and is_gpu(display)
        }
    )


def is_gpu(display: Display) -> bool:
    """Whether training could run on it: any of AMD and NVIDIA, of Intel's those that are listed."""
    return display.vendor != INTEL_VENDOR or display.device_id in listed_products()


def filled(step: str, machine: Machine | None) -> str:
    """`{install}` becomes the command that installs the right PyTorch, or `bloomery doctor` without a known GPU."""
    if step != "{install}":
        return step
    if machine is None or not machine.accelerators:
        return "bloomery doctor  # prints the PyTorch that fits this machine"
    return install(machine) + "  # the build with kernels for this GPU"
