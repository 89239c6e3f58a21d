"""How long studio takes to show long runs, and the memory that it needs for them, in a headless Chromium.

    python benchmarks/studio_long_runs.py [--runs 200] [--steps 100000]

The list of the runs; the pages of five of them, until the whole run is drawn; of five others, by a click in the list,
POINTED_SECONDS after the mouse came to it; 20 of them compared. Figures of five are medians. The runs are one file of
events under many names, each read by itself.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bloomery.core.units import MIB
from bloomery.monitor.events import EvalDone, Event, EventLog, RunEnded, RunStarted, Saved, StepDone

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from studio_cost import TOKEN, cpu_seconds, studio, with_children, write_result

from browser import Browser

RESULTS = Path(__file__).parent / "results" / "studio_long_runs.json"
BARS = {"list_seconds": 2.0, "run_seconds": 1.0, "memory_mib": 300.0}
COMPARED = 20
OPENED = 5
LOOKED_SECONDS = 1.0  # at the list, before the mouse moves
POINTED_SECONDS = 0.2
STEP_SECONDS = 0.05


def events_of(steps: int) -> Iterator[Event]:
    """A run with a noisy loss, an evaluation and a checkpoint every thousand steps."""
    noise = random.Random(0)
    yield RunStarted(
        schema=2,
        version="0.1.0",
        parameters=10**6,
        steps=steps,
        attention="sdpa",
        device="cpu",
        time=0.0,
    )
    for step in range(1, steps + 1):
        now = step * STEP_SECONDS
        yield StepDone(
            step=step,
            time=now,
            loss=2 + 5 * math.exp(-step / 5000) + noise.random() / 5,
            learning_rate=1e-3 * (1 - step / steps),
            grad_norm=noise.random(),
            tokens=step * 8192,
            tokens_per_second=160_000 + 1000 * noise.random(),
            sequences_per_second=16.0,
            step_seconds=STEP_SECONDS + noise.random() / 100,
            data_wait_seconds=0.001,
            memory_gib=0.5 + noise.random() / 100,
        )
        if step % 1000 == 0:
            yield EvalDone(
                step=step,
                time=now,
                loss=2.2,
                perplexity=9.0,
                bits_per_byte=1.0,
                tokens=1000,
                seconds=0.1,
            )
            yield Saved(step=step, time=now, path=f"step-{step:08d}", bytes=2**20, seconds=0.3)
    yield RunEnded(step=steps, time=steps * STEP_SECONDS, status="done")


def make_runs(folder: Path, count: int, steps: int) -> list[str]:
    """Their names."""
    names = [f"run-{number:03d}" for number in range(count)]
    for name in names:
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text("model: {preset: go-coder-tiny}\n")
        if name == names[0]:
            with EventLog(run / "events.jsonl") as log:
                for event in events_of(steps):
                    log(event)
        else:
            (run / "events.jsonl").hardlink_to(folder / "runs" / names[0] / "events.jsonl")
    return names


class Studio:
    """The open browser, and the cost of studio so far: all measurements by name."""

    def __init__(self, browser: Browser, url: str, pid: int) -> None:
        self.browser = browser
        self.url = url
        self.pid = pid
        self.measured: dict[str, list[float]] = defaultdict(list)

    def begin(self) -> None:
        self.began = time.monotonic()
        self.cpu_began = cpu_seconds(self.pid)

    def open(self, path: str) -> None:
        self.begin()
        self.browser.open(self.url + path)

    def until(self, name: str, expression: str) -> None:
        """Notes the seconds and the CPU seconds since the page was asked for, and the memory at that moment."""
        self.browser.until(expression, 600)
        self.measured[f"{name}_seconds"].append(round(time.monotonic() - self.began, 2))
        cpu = cpu_seconds(self.pid) - self.cpu_began
        self.measured[f"{name}_cpu_seconds"].append(round(cpu, 2))
        # What processes share, such as the interpreter, is counted once: the proportional set size.
        proportional = sum(one.memory_full_info().pss for one in with_children([self.pid]))
        self.measured["memory_mib"].append(round(proportional / MIB))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="studio-long-runs-") as place:
        folder = Path(place)
        names = make_runs(folder, asked.runs, asked.steps)
        with studio(folder) as (pid, url), Browser(folder / "profile") as browser:
            browser.look(width=1400)
            browser.open(f"{url}models?token={TOKEN}")  # a page that shows no run
            browser.until("!document.querySelector('.q-table__linear-progress')")
            open_page = Studio(browser, url, pid)
            open_page.open("")
            open_page.until("list", f"document.querySelectorAll('tbody tr').length >= {len(names)}")
            whole = f"document.body.innerText.includes('{asked.steps:,} of {asked.steps:,}')"
            drawn = f"document.querySelectorAll('canvas').length >= 5 && {whole}"
            for name in names[-OPENED:]:
                open_page.open(f"run/{name}")
                open_page.until("run", drawn)
            for name in names[-2 * OPENED : -OPENED]:
                browser.open(url)
                link = f"document.querySelector('a[data-focus=\"/run/{name}\"]')"
                browser.until(f"!!{link}")
                time.sleep(LOOKED_SECONDS)
                place = browser.point(link)
                time.sleep(POINTED_SECONDS)
                open_page.begin()
                browser.press_mouse(*place)
                open_page.until("clicked_run", drawn)
            open_page.open(f"compare?runs={'%2F'.join(names[:COMPARED])}")
            open_page.until("compare_first_chart", "document.querySelectorAll('canvas').length > 0")
            open_page.until("compare", "!document.body.innerText.includes(': reading')")
    measured = open_page.measured
    figures = {name: statistics.median(values) for name, values in measured.items()}
    figures["memory_mib"] = max(measured["memory_mib"])
    missed = [name for name, bar in BARS.items() if figures[name] > bar]
    report = {
        "runs": asked.runs,
        "steps": asked.steps,
        "compared": COMPARED,
        **figures,
        "run_seconds_of_each": measured["run_seconds"],
        "bars": BARS,
        "missed": missed,
        "cores": os.cpu_count(),
        "load_before": load,
    }
    write_result(asked.out, report)
    print(json.dumps(figures, indent=1))
    print(f"NOT MET: {', '.join(missed)}" if missed else "met: the list, a run and the memory")


if __name__ == "__main__":
    main()
