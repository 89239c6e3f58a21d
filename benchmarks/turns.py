"""Sides of a comparison that take their steps in turn: processes that wait while another one computes."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

# unless the environment says others
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "passive"}
# steps that are not measured: both sides compile in the first, the Trainer once more in the second
WARM = 2


@dataclass
class Side:
    """A process of its own. `positions`: what a step computes; None: what counts are the labels that it learned from.

    `real_share`: how many of the positions hold a token of the text.
    """

    name: str
    process: subprocess.Popen
    real_share: float
    positions: int | None
    warm: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    watched: dict = field(default_factory=dict)

    def take(self, order: str) -> dict:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(
                f"{self.name} ended with exit code {self.process.wait()}; see {self.name}.log"
            )
        return json.loads(answer)

    def counted(self) -> list[float]:
        """Tokens that count, by round."""
        return [
            step["learned"] if self.positions is None else self.positions * self.real_share
            for step in self.steps
        ]

    def rates(self, clock: Literal["seconds", "cpu_seconds"] = "seconds") -> list[float]:
        """Tokens that count a second, by round."""
        return [
            tokens / step[clock] for tokens, step in zip(self.counted(), self.steps, strict=True)
        ]

    def generation_rates(self) -> list[float]:
        """Tokens a second of sampling, by round, of sides that train on what they sample."""
        return [step["learned"] / step["generation_seconds"] for step in self.steps]

    @property
    def speed(self) -> float:
        """Tokens that count a second: of text, padding left out, or learned ones."""
        return statistics.median(self.rates())

    @property
    def result(self) -> dict:
        return {
            "real_tokens_per_second": self.speed,
            "real_share": self.real_share,
            "seconds": [step["seconds"] for step in self.steps],
            "cpu_seconds": [step["cpu_seconds"] for step in self.steps],
            "warm_seconds": [step["seconds"] for step in self.warm],
            "live_bytes": self.watched["live_bytes"],
            "resident_bytes": max(step["resident_bytes"] for step in self.steps),
            "learned": [step["learned"] for step in self.steps],
            "losses": [step["loss"] for step in (*self.warm, *self.steps, self.watched)],
            "generation_seconds": [step["generation_seconds"] for step in self.steps],
        }


@contextmanager
def started(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    positions: int | None = None,
    real_share: float = 1.0,
):
    """A side that waits for orders; it ends with the block."""
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=THREADS | os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            yield Side(name, process, real_share, positions)
        finally:
            process.communicate()


def compare(sides: list[Side], rounds: int) -> None:
    """Warm steps; then one each in turn, back and forth; then one with memory watched."""
    for side in sides:
        side.warm = [side.take("step") for _ in range(WARM)]
        print(
            f"  {side.name}: warm after {sum(step['seconds'] for step in side.warm):.0f} s",
            flush=True,
        )
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.steps.append(side.take("step"))
        print(
            "  " + ", ".join(f"{side.name} {side.steps[-1]['seconds']:.2f} s" for side in sides),
            flush=True,
        )
    for side in sides:
        side.watched = side.take("watch")


def quicker(one: Side, other: Side, clock: Literal["seconds", "cpu_seconds"] = "seconds") -> float:
    """How many times as many tokens that count a second: the median over rounds.

    `cpu_seconds`: of processor time, which other programs on the machine change little.
    """
    return statistics.median(
        a / b for a, b in zip(one.rates(clock), other.rates(clock), strict=True)
    )


def table(
    sides: Sequence[Side], names: Mapping[str, str] = MappingProxyType({}), *, counted: str
) -> str:
    """A line a side. `names`: what sides are called; `counted`: which of the tokens count."""
    width = 2 + max(len(names.get(side.name, side.name)) for side in sides)
    columns = f"{counted + ' tok/s':>14}{'s/step':>8}{'cpu s':>8}{'tokens':>9}{'live MiB':>10}{'RSS MiB':>9}"
    lines = [f"{'':<{width}}{columns}  losses"]
    for side in sides:
        found = side.result
        losses = " ".join(f"{loss:.3f}" for loss in found["losses"] if loss is not None)
        lines.append(
            f"{names.get(side.name, side.name):<{width}}{side.speed:>14,.0f}{statistics.median(found['seconds']):>8.2f}"
            f"{statistics.median(found['cpu_seconds']):>8.2f}"
            f"{statistics.median(side.counted()):>9,.0f}{found['live_bytes'] / 2**20:>10,.0f}"
            f"{found['resident_bytes'] / 2**20:>9,.0f}  {losses}"
        )
    return "\n".join(lines)


def judged(
    ours: Side, theirs: Side, figure: Literal["speed", "generation", "memory"], bar: float
) -> dict:
    """A bar beside what was measured: memory must not exceed it, speed, compared round by round, must reach it."""
    memory = figure == "memory"
    if memory:
        ratio = ours.watched["live_bytes"] / theirs.watched["live_bytes"]
    elif figure == "generation":
        pairs = zip(ours.generation_rates(), theirs.generation_rates(), strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
    else:
        ratio = quicker(ours, theirs)
    met = ratio <= bar if memory else ratio >= bar
    verdict = {
        "ours": ours.name,
        "theirs": theirs.name,
        "figure": figure,
        "ratio": ratio,
        "bar": bar,
        "met": met,
    }
    if figure != "speed":
        return verdict
    return verdict | {"ratio_of_processor_time": quicker(ours, theirs, "cpu_seconds")}


def told(verdict: dict, names: Mapping[str, str] = MappingProxyType({})) -> str:
    ours, theirs = (names.get(verdict[side], verdict[side]) for side in ("ours", "theirs"))
    sign, outcome = (
        ("<=" if verdict["figure"] == "memory" else ">="),
        "met" if verdict["met"] else "NOT MET",
    )
    by_processor = verdict.get("ratio_of_processor_time")
    behind = "" if by_processor is None else f"; by processor time {by_processor:.2f}"
    found = f"{verdict['figure']} {verdict['ratio']:.2f} ({sign} {verdict['bar']}: {outcome})"
    return f"  {ours} / {theirs}: {found}{behind}"


def machine() -> dict:
    """The processor, and the versions that decide about speed."""
    import peft
    import torch
    import transformers
    import trl

    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "threads": (THREADS | os.environ)["OMP_NUM_THREADS"],
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "trl": trl.__version__,
    }
