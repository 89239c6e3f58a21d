"""What studio costs a run that trains, and itself: a page of the run open, against studio at a halt.

    python benchmarks/studio_cost.py [--pairs 400] [--seconds 2]

One run trains all the time, on one thread, with about 20 steps per second. Studio has a page of it open, held by a
client that draws nothing, and is halted (SIGSTOP) and continued in turn, so that the drift of the machine, several
percent in a minute, is the same on both sides of a pair. Steps scatter by 15% on a quiet machine, and pairs
of 2 seconds by 7%: hundreds of pairs tell 1% apart. Then the same with the page in a headless Chromium, which is
halted, too: drawing is the browser's work, on whatever machine it is, and is told apart.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
SETTLE_SECONDS = 0.5  # after studio was halted or continued
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
class Cost:
    """Of an open page: how much slower the run is in each pair, and the shares of a core."""

    slower: list[float]
    steps_per_second: float
    studio: float
    browser: float = 0.0

    @property
    def interval(self) -> tuple[float, float, float]:
        """The mean of the pairs, and its 95% confidence interval."""
        mean = statistics.fmean(self.slower)
        margin = 1.96 * statistics.stdev(self.slower) / math.sqrt(len(self.slower))
        return mean, mean - margin, mean + margin


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


def write_result(path: Path, report: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


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


def signal_to(processes: list[psutil.Process], signal_number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal_number)


def with_children(pids: Iterable[int]) -> list[psutil.Process]:
    roots = [psutil.Process(pid) for pid in pids]
    return [one for root in roots for one in (root, *root.children(recursive=True))]


def speed_in(events: Path, seconds: float) -> float:
    """Steps per second, for these seconds from SETTLE_SECONDS on."""
    time.sleep(SETTLE_SECONDS)
    tail = Tail(events, start=events.stat().st_size)
    time.sleep(seconds)
    times = [event.time for event in tail.read() if isinstance(event, StepDone)]
    return (len(times) - 1) / (times[-1] - times[0])


def cost(events: Path, pids: dict[str, int], pairs: int, seconds: float) -> Cost:
    """Of these processes for the run."""
    slower = list[float]()
    alone = list[float]()
    shares: dict[str, list[float]] = {name: [] for name in pids}

    def halted() -> float:
        processes = with_children(pids.values())
        signal_to(processes, signal.SIGSTOP)
        try:
            return speed_in(events, seconds)
        finally:
            signal_to(processes, signal.SIGCONT)

    def shown() -> float:
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        began = time.monotonic()
        speed = speed_in(events, seconds)
        took = time.monotonic() - began
        for name, pid in pids.items():
            shares[name].append((cpu_seconds(pid) - before[name]) / took)
        return speed

    for number in range(pairs):
        if number % 2:
            beside, without = shown(), halted()
        else:
            without, beside = halted(), shown()
        slower.append(without / beside - 1)
        alone.append(without)
        print(f"{number + 1} of {pairs}: {slower[-1]:+.2%}", file=sys.stderr)
    means = {name: statistics.fmean(values) for name, values in shares.items()}
    return Cost(slower, statistics.median(alone), **means)


def report_of(one: Cost) -> dict[str, object]:
    mean, low, high = one.interval
    return {
        "steps_per_second": one.steps_per_second,
        "studio_share_of_a_core": one.studio,
        "browser_share_of_a_core": one.browser,
        "run_slower": mean,
        "run_slower_low": low,
        "run_slower_high": high,
        "run_slower_pairs": one.slower,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=400, help="a quarter of them with Chromium")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="studio-cost-") as place:
        folder = Path(place)
        tokens = tokens_per_step(folder)
        with training(folder, "live", tokens, 10**6) as events, studio(folder) as (pid, url):
            steps_of(Tail(events), 100)
            with silent_page(url, "run/live") as sizes:
                time.sleep(SETTLE_SECONDS)
                before = sum(sizes)
                silent = cost(events, {"studio": pid}, asked.pairs, asked.seconds)
                assert sum(sizes) - before > 100 * asked.pairs * asked.seconds, "nothing was sent"
            with Browser(folder / "profile") as browser:
                browser.open(f"{url}?token={TOKEN}")
                browser.open(f"{url}run/live")
                browser.until("document.querySelectorAll('canvas').length >= 5")
                pids = {"studio": pid, "browser": browser._process.pid}
                drawn = cost(events, pids, max(2, asked.pairs // 4), asked.seconds)
    mean, low, high = silent.interval
    is_met = silent.studio <= STUDIO_BAR and mean <= RUN_BAR
    report = {
        **report_of(silent),
        "with_chromium": report_of(drawn),
        "bars": {"studio_share_of_a_core": STUDIO_BAR, "run_slower": RUN_BAR},
        "met": is_met,
        "seconds": asked.seconds,
        "tokens_per_step": tokens,
        "cores": os.cpu_count(),
        "load_before": load,
    }
    write_result(asked.out, report)
    print(
        f"a run of {silent.steps_per_second:.1f} steps per second, {asked.pairs} pairs: studio takes"
        f" {silent.studio:.1%} of a core (at most {STUDIO_BAR:.0%}), the run is {mean:+.2%} slower"
        f" (at most {RUN_BAR:.0%}; 95% of such means: {low:+.2%} to {high:+.2%}): {'met' if is_met else 'NOT MET'}"
    )


if __name__ == "__main__":
    main()
