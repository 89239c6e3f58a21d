"""What studio costs a run that trains, and itself: a page of the run open, against no studio.

    python benchmarks/studio_cost.py [--rounds 6] [--seconds 11]

One run trains all the time, on one thread, with about 20 steps per second. In each round it trains alone, with studio
and a page that is held open by a client that draws nothing, and with studio and the page in a headless Chromium; the
order turns around from round to round. The first two are the pair: how much slower the run is, and the share of a core
that studio takes. Drawing is the browser's work, on whatever machine it is, and is told apart.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode

import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from bloomery.monitor.events import StepDone, Tail

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Browser

RESULTS = Path(__file__).parent / "results" / "studio_cost.json"
STUDIO_BAR = 0.05  # of a core
RUN_BAR = 0.01  # of the run's speed
STEPS_PER_SECOND = 20
SETTLE_SECONDS = 3.0  # after the page is there
SEQUENCE = 256
TOKEN = "a-token-of-the-benchmark"
RECIPE = """
model: {{family: llama, hidden_size: 128, intermediate_size: 384, num_layers: 2, num_heads: 2, num_kv_heads: 2,
  max_positions: 256, tie_embeddings: true}}
tokenizer: {{train: {{kind: bpe, vocab_size: 2048}}}}
data: {{builtin: stdlib-code, validation: 5%, sequence_length: 256, prepared: {prepared}}}
optimizer: {{kind: adamw, learning_rate: 1e-3, schedule: constant, warmup: 10 steps}}
train: {{max_steps: {steps}, tokens_per_step: {tokens}, micro_batch_size: {sequences}, compile: false}}
checkpoint: {{every: 1000000 steps}}
eval: {{every: none}}
logging: {{trackers: []}}
"""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Segment:
    """`seconds` of the run: its steps per second, and the share of a core that studio and the browser took."""

    kind: str
    seconds: float
    steps_per_second: float
    studio: float = 0.0
    browser: float = 0.0
    page_bytes_per_second: float = 0.0


@contextmanager
def silent_page(url: str, path: str) -> Iterator[list[int]]:
    """A page of studio in no browser: it holds the connection and answers pings. Yields the sizes of what it reads."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers)) as answer:
        page = answer.read().decode()
    # The query of a JavaScript object, not JSON.
    (text,) = re.findall(r"query: ({.*}),", page)
    (client,) = re.findall(r"client_id\W+([\w-]+)", text)
    (first,) = re.findall(r"next_message_id\W+(\d+)", text)
    query = {
        "client_id": client,
        "next_message_id": first,
        "implicit_handshake": "true",
        "tab_id": "benchmark",
        "document_id": "benchmark",
        "EIO": "4",
        "transport": "websocket",
    }
    address = f"{url.replace('http://', 'ws://')}_nicegui_ws/socket.io/?{urlencode(query)}"
    sizes = list[int]()

    def read() -> None:
        following = int(first)
        told_at = time.monotonic()
        with suppress(ConnectionClosed):
            for message in socket:
                sizes.append(len(message))
                if message == "2":  # a ping
                    socket.send("3")
                    continue
                # The number of a message, so that studio forgets what has been read.
                numbers = re.findall(r'"_id":(\d+)', message if isinstance(message, str) else "")
                following = max([following, *(int(number) + 1 for number in numbers)])
                if time.monotonic() - told_at > 3:
                    told_at = time.monotonic()
                    told = {"client_id": client, "next_message_id": following}
                    socket.send(f"42{json.dumps(['ack', told])}")

    with connect(address, additional_headers=headers, max_size=None) as socket:
        socket.send("40")  # Socket.IO over Engine.IO: open the connection of the page
        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield sizes
        finally:
            socket.close()
            reading.join()


def cpu_seconds(pid: int) -> float:
    """Of a process and those that it has started and that still run."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@contextmanager
def training(folder: Path, name: str, tokens: int, steps: int) -> Iterator[Path]:
    """A run that trains on one thread; yields its events."""
    recipe = folder / f"{name}.yaml"
    sequences = tokens // SEQUENCE
    prepared = folder / "prepared"
    recipe.write_text(
        RECIPE.format(prepared=prepared, steps=steps, tokens=tokens, sequences=sequences)
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", "train", str(recipe), "--run-dir", f"runs/{name}"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"{name}.err").open("wb"),
        env={**os.environ, **ONE_THREAD},
    )
    try:
        yield folder / "runs" / name / "events.jsonl"
    finally:
        process.terminate()
        process.wait()


def steps_of(tail: Tail, count: int, seconds: float = 600) -> list[StepDone]:
    """The next `count` steps of a run, as they are written."""
    steps = list[StepDone]()
    end = time.monotonic() + seconds
    while len(steps) < count:
        assert time.monotonic() < end, "the run does not train: look at its .err file"
        time.sleep(0.05)
        steps += [event for event in tail.read() if isinstance(event, StepDone)]
    return steps


def tokens_per_step(folder: Path) -> int:
    """With which a step takes 1 / STEPS_PER_SECOND, from a first run of 4 sequences per step."""
    with training(folder, "first", 4 * SEQUENCE, 60) as events:
        steps = steps_of(Tail(events), 60)
    seconds = statistics.median(step.step_seconds for step in steps[20:])
    return max(1, round(4 / (seconds * STEPS_PER_SECOND))) * SEQUENCE


@contextmanager
def studio(folder: Path) -> Iterator[tuple[int, str]]:
    """`bloomery studio`: its process, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", "studio", "--port=0", "--no-open"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BLOOMERY_STUDIO_TOKEN": TOKEN},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"(http://\S+/)\?token=", line):
                break
        yield process.pid, found[1]
    finally:
        process.terminate()
        process.communicate()


def measured(kind: str, events: Path, seconds: float, pids: dict[str, int]) -> Segment:
    """The next `seconds` of the run, while these processes are there."""
    time.sleep(SETTLE_SECONDS)
    tail = Tail(events, start=events.stat().st_size)
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    shares = {name: (cpu_seconds(pid) - before[name]) / took for name, pid in pids.items()}
    times = [event.time for event in tail.read() if isinstance(event, StepDone)]
    speed = (len(times) - 1) / (times[-1] - times[0])
    return Segment(kind, took, speed, **shares)


def segment(kind: str, folder: Path, events: Path, seconds: float) -> Segment:
    if kind == "alone":
        return measured(kind, events, seconds, {})
    with studio(folder) as (pid, url):
        if kind == "page":
            with silent_page(url, f"run/{events.parent.name}") as sizes:
                result = measured(kind, events, seconds, {"studio": pid})
                assert sum(sizes) > 100 * seconds, "the page was not updated"
                return replace(
                    result, page_bytes_per_second=sum(sizes) / (seconds + SETTLE_SECONDS)
                )
        with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
            browser.open(f"{url}?token={TOKEN}")
            browser.open(f"{url}run/{events.parent.name}")
            browser.until("document.querySelectorAll('canvas').length >= 5")
            return measured(kind, events, seconds, {"studio": pid, "browser": browser._process.pid})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=11)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    kinds = ["alone", "page", "chromium"]
    segments = list[Segment]()
    with tempfile.TemporaryDirectory(prefix="studio-cost-") as place:
        folder = Path(place)
        tokens = tokens_per_step(folder)
        with training(folder, "live", tokens, 10**6) as events:
            steps_of(Tail(events), 100)
            for number in range(asked.rounds):
                for kind in kinds[:: -1 if number % 2 else 1]:
                    segments.append(segment(kind, folder, events, asked.seconds))
                    print(segments[-1], file=sys.stderr)

    def of(kind: str) -> list[Segment]:
        return [one for one in segments if one.kind == kind]

    slower = {
        kind: [
            1 - beside.steps_per_second / alone.steps_per_second
            for alone, beside in zip(of("alone"), of(kind), strict=True)
        ]
        for kind in ("page", "chromium")
    }
    studio_share = statistics.median(one.studio for one in of("page"))
    run_cost = statistics.median(slower["page"])
    report = {
        "steps_per_second": statistics.median(one.steps_per_second for one in of("alone")),
        "studio_share_of_a_core": studio_share,
        "studio_shares": [one.studio for one in of("page")],
        "page_bytes_per_second": statistics.median(one.page_bytes_per_second for one in of("page")),
        "run_slower": run_cost,
        "run_slower_pairs": slower["page"],
        "with_chromium": {
            "studio_share_of_a_core": statistics.median(one.studio for one in of("chromium")),
            "browser_share_of_a_core": statistics.median(one.browser for one in of("chromium")),
            "run_slower": statistics.median(slower["chromium"]),
            "run_slower_pairs": slower["chromium"],
        },
        "bars": {"studio_share_of_a_core": STUDIO_BAR, "run_slower": RUN_BAR},
        "met": studio_share <= STUDIO_BAR and run_cost <= RUN_BAR,
        "pairs": asked.rounds,
        "seconds": asked.seconds,
        "tokens_per_step": tokens,
        "cores": os.cpu_count(),
        "load_before": load,
    }
    asked.out.parent.mkdir(exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"a run of {report['steps_per_second']:.1f} steps per second, {asked.rounds} pairs: studio takes"
        f" {studio_share:.1%} of a core (at most {STUDIO_BAR:.0%}), the run is {run_cost:+.2%} slower"
        f" (at most {RUN_BAR:.0%}): {'met' if report['met'] else 'NOT MET'}"
    )


if __name__ == "__main__":
    main()
