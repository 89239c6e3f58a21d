"""Runs the parts of the check, each in a child process with its own limit, and writes the file after each row.

Imports no torch: what a driver does to a child is a result.
"""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bloomery.bench.gpu_check.parts import Part
from bloomery.bench.gpu_check.results import (
    Card,
    CheckResult,
    PartResult,
    Row,
    outcome_of,
    without_paths,
    write_result,
)
from bloomery.core import __version__
from bloomery.core.child import LONGEST_REASON, Child
from bloomery.core.errors import UserError
from bloomery.core.text import PAGE_COLUMNS, fitted
from bloomery.hardware.detect import detect
from bloomery.hardware.profile import build_profile, local_caches

CHILD = "bloomery.bench.gpu_check.child"
CARD_SECONDS = 120.0  # importing torch and starting a driver, on a slow disk
PRINTED = 12  # lines of a child that did not end well

OnRow = Callable[[str, Row], None]


@final
@dataclass(frozen=True, kw_only=True)
class Check:
    """What was asked. `public`: removes names of users and hosts from a text."""

    parts: tuple[Part, ...]
    limits: dict[str, float]
    tiny: bool
    by: str
    file: Path
    public: Callable[[str], str]


def run_check(
    check: Check,
    *,
    on_part: Callable[[str], None],
    on_row: OnRow,
    on_end: Callable[[PartResult], None] = lambda _: None,
) -> CheckResult:
    """Every part, and its file. Raises UserError where not even the device can be asked, or the file not be written."""
    begin_seconds = time.monotonic()
    environment = _environment()
    result = CheckResult(
        bloomery=__version__,
        day=time.strftime("%Y-%m-%d"),
        by=check.by,
        tiny=check.tiny,
        card=card_of(environment, check.public),
        limit_seconds=round(sum(check.limits.values()), 1),
    )
    earlier_parts: tuple[PartResult, ...] = ()

    def keep(part_result: PartResult) -> CheckResult:
        kept = result.model_copy(
            update={
                "parts": (*earlier_parts, part_result),
                "seconds": round(time.monotonic() - begin_seconds, 1),
            }
        )
        write_result(kept, check.file)
        return kept

    write_result(result, check.file)
    kept_result = result
    for part in check.parts:
        on_part(part.name)
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            runner = _PartRunner(part, check, Path(folder), environment)
            runner.run(on_row=on_row, keep=keep)
            kept_result = keep(runner.result())
        earlier_parts = kept_result.parts
        on_end(earlier_parts[-1])
    return kept_result


@final
class _PartRunner:
    """One child from its start to its end, whatever that is."""

    def __init__(self, part: Part, check: Check, folder: Path, environment: dict[str, str]) -> None:
        self._part = part
        self._check = check
        self._limit = check.limits[part.name]
        self._job = {
            "part": part.name,
            "tiny": check.tiny,
            "folder": str(folder),
            "seconds": self._limit,
        }
        self._environment = environment | part.environment
        self._rows: list[Row] = []
        self._case = ""  # that has begun and has no row yet
        self._ending: dict[str, Any] = {}
        self._begin_seconds = time.monotonic()

    def run(self, *, on_row: OnRow, keep: Callable[[PartResult], CheckResult]) -> None:
        deadline = self._begin_seconds + self._limit
        with Child(CHILD, self._job, environment=self._environment, dying_seconds=5.0) as child:
            while True:
                message = child.next(deadline - time.monotonic())
                if not isinstance(message, dict):
                    self._ending = self._bad_ending(message, child)
                    return
                if "ended" in message:
                    return
                if "begins" in message:
                    self._case = message["begins"]
                    continue
                row = self._public(Row.model_validate(message["row"]))
                self._case = ""
                self._rows.append(row)
                on_row(self._part.name, row)
                keep(self.result())

    def result(self) -> PartResult:
        return PartResult.model_validate(
            {
                "part": self._part.name,
                "outcome": outcome_of(self._rows),
                "seconds": round(time.monotonic() - self._begin_seconds, 1),
                "limit_seconds": round(self._limit, 1),
                "rows": tuple(self._rows),
            }
            | self._ending
        )

    def _bad_ending(self, silence: str, child: Child) -> dict[str, Any]:
        """The fields of a part whose child was silent until its limit, or ended before its last row."""
        during = f" in {self._case}" if self._case else ""
        if silence == "silent":
            message = f"no end within {self._limit:.0f} s{during}"
            outcome = "timeout"
        else:
            outcome = "crashed" if child.code < 0 else "failed"
            message = f"{child.ending()[:LONGEST_REASON]}{during}"
        # Numbers that were wrong before it ended are the worse news.
        if outcome_of(self._rows) == "wrong":
            outcome = "wrong"
        printed = [line for line in child.tail if line.strip()][-PRINTED:]
        return {
            "outcome": outcome,
            "message": self._text(message),
            "printed": tuple(map(self._text, printed)),
        }

    def _public(self, row: Row) -> Row:
        return row.model_copy(
            update={"message": self._text(row.message), "numbers": self._value(row.numbers)}
        )

    def _value(self, value: Any) -> Any:
        """Texts inside of numbers, such as the message of a probe, are cleaned, too."""
        if isinstance(value, dict):
            return {name: self._value(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [self._value(entry) for entry in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        return without_paths(self._check.public(text))


def _environment() -> dict[str, str]:
    """The user's variables, and those of the machine's profile that the user does not set."""
    variables = build_profile(detect()).environment.value
    return {**local_caches(variables), **os.environ}


def card_of(environment: dict[str, str], public: Callable[[str], str]) -> Card:
    """The device that the parts will use. A child asks: a driver that was woken in this process would keep memory.

    Raises UserError where it gives no answer.
    """
    with Child(CHILD, {"part": "card"}, environment=environment, dying_seconds=5.0) as child:
        message = child.next(CARD_SECONDS)
        if not isinstance(message, dict):
            reason = child.ending() if message == "ended" else f"silent for {CARD_SECONDS:.0f} s"
            raise UserError(
                f"PyTorch cannot be asked for its device: {reason}",
                where="--gpu-check",
                fix="bloomery doctor",
            )
    host = detect().host
    return Card.model_validate(
        message["card"]
        | {
            "driver": public(host.driver.versions),
            "cpu": host.cpu_name,
            "python": platform.python_version(),
        }
    )


def plan_lines(
    parts: Sequence[Part], limits: dict[str, float], *, file: Path, tiny: bool
) -> list[str]:
    """What will happen, before it does, in 100 columns."""
    rows = [
        f"  {part.name:<14}{limits[part.name] / 60:>5.1f} min  {part.what(tiny=tiny)}"
        for part in parts
    ]
    total = sum(limits.values()) / 60
    size = "small shapes" if tiny else "real shapes"
    number = f"{len(parts)} parts" if len(parts) > 1 else "1 part"
    lines = [
        f"gpu check  {number}, {size}, on the first GPU (the CPU where there is none); each part is a",
        "           process of its own, which is killed at its limit",
        *rows,
        f"  {'together':<14}{total:>5.1f} min  at most",
        f"writes     {file}: results as they come, no names of users, hosts and folders",
        f"           temporary files in {tempfile.gettempdir()}, deleted after each part",
        "           caches of Bloomery, PyTorch and Triton, which stay",
        "sends      nothing: nothing leaves this machine, and nothing is downloaded",
    ]
    return fitted(lines, PAGE_COLUMNS)
