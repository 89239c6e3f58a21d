"""The one kind of constant that published runs set, by a rule; and what the planner says of a source that it never saw.

The constant is an architecture's typical share of the peak that half-precision matrix products reach. Rule: of each row
the share that would make the plan equal the published speed; the median of a source's rows; the median of the sources.
"""

from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

from ask import Asked, asked, parts_of, table

from bloomery.hardware.specs import arch_spec, find_gpu
from bloomery.plan.estimate.speed import total
from bloomery.plan.types import Estimate

Row = dict[str, Any]


def source_of(row: Row) -> str:
    """The repository that published the row: rows of one share machines, programs and people."""
    return row["source"].split(",")[0]


def arch_of(row: Row) -> str:
    return find_gpu(row["gpu"]).arch


def family_of(arch: str) -> tuple[str, ...]:
    """Architectures that have their shares in common."""
    spec = arch_spec(arch)
    return tuple(spec.names) if spec else (arch,)


@cache
def rows() -> tuple[tuple[int, str, str], ...]:
    """Those that the constants are set from: index, architecture, source."""
    return tuple(
        (index, arch_of(row), source_of(row))
        for index, row in enumerate(table()["row"])
        if "speed" in row and _half(row)
    )


def _half(row: Row) -> bool:
    return "train.precision=float32" not in row["recipe"]


def with_share(one: Asked, share: tuple[float, float, float]) -> Asked:
    return replace(one, job=replace(one.job, rate=replace(one.job.rate, share=share)))


def speed_at(one: Asked, share: tuple[float, float, float]) -> Estimate:
    return total(parts_of(with_share(one, share))).inverse(one.rows * one.load.sequence_length)


@cache
def needed_share(index: int) -> float:
    """The share of the peak with which the plan equals the published speed; at most 1."""
    row = table()["row"][index]
    one, low, high = asked(row), 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        slow = speed_at(one, (middle, middle, middle)).value < row["speed"]
        low, high = (middle, high) if slow else (low, middle)
    return high


def by_source(arch: str, *, without: str | None = None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for index, other, source in rows():
        if other in family_of(arch) and source != without:
            found.setdefault(source, []).append(needed_share(index))
    return found


def typical_share(arch: str, *, without: str | None = None) -> float | None:
    """By the rule; None where nobody (else) published anything."""
    shares = by_source(arch, without=without)
    return median(median(each) for each in shares.values()) if shares else None


def blind_speed(row: Row) -> Estimate | None:
    """The plan with the constant set from every other source; None where there is none."""
    if "speed" not in row or not _half(row):
        return None
    typical = typical_share(arch_of(row), without=source_of(row))
    if typical is None:
        return None
    one = asked(row)
    low, middle, high = one.job.rate.share
    return speed_at(one, (low * typical / middle, typical, min(1.0, high * typical / middle)))


def fitted() -> list[tuple[str, float, float, dict[str, list[float]]]]:
    """Architecture, share by the rule, share in the table, and the shares that each source's rows need."""
    found = []
    for arch in dict.fromkeys(arch for _, arch, _ in rows()):
        spec, typical = arch_spec(arch), typical_share(arch)
        assert spec is not None and spec.efficiency is not None and typical is not None
        found.append((arch, typical, spec.efficiency[1], by_source(arch)))
    return found
