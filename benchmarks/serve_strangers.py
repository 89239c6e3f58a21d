"""Serving while strangers attack: `python benchmarks/serve_strangers.py MODEL [--rounds 4] [--seconds 8]`.

Starts `bloomery serve` in a process of its own. Eight clients ask for completions, in turn without and with an attack
of another process: 400 connections that say nothing, and 16 prompts of 2 MB at once, every second. Prints the 50th and
95th percentile of what a client waits, the slowest /health, and the memory of the server.

On a machine whose cores are busy the attackers' own processor time counts, too: 5 ms of the server and as much of the
client for each prompt.
"""

import argparse
import http.client
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENTS, SILENT, PROMPTS, LETTERS = 8, 400, 16, 2_000_000


@dataclass
class Waits:
    """Seconds that clients waited, and what was not answered with 200."""

    seconds: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


def ask(port: int, path: str, body: dict[str, Any] | bytes | None = None) -> tuple[int, float]:
    """The status, and the seconds until the whole answer came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.perf_counter()
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    connection.request(
        "GET" if data is None else "POST", path, data, {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, time.perf_counter() - began


def attack(port: int, silent: int, prompts: int, letters: int, stop: Any) -> None:
    """Until `stop` is set: silent connections, opened again when they are closed, and prompts that cannot fit."""

    body = json.dumps({"prompt": "a" * letters, "max_tokens": 1}).encode()

    def flood() -> None:
        while not stop.is_set():
            with suppress(OSError, http.client.HTTPException):
                ask(port, "/v1/completions", body)
            stop.wait(1.0)

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(prompts)]
    for thread in threads:
        thread.start()
    held = list[socket.socket]()
    while not stop.is_set():
        open_ = list[socket.socket]()
        for connection in held:
            try:
                closed = connection.recv(1) == b""
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            connection.close() if closed else open_.append(connection)
        held = open_
        with suppress(OSError):
            while len(held) < silent and not stop.is_set():
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                connection.setblocking(False)
                held.append(connection)
        stop.wait(0.25)
    for connection in held:
        connection.close()


def clients(port: int, seconds: float, tokens: int, waits: Waits) -> None:
    """Eight clients ask one request after the other, and /health is asked all the while."""
    end = time.perf_counter() + seconds

    def often(call: Callable[[], tuple[int, float]], found: list[float], pause: float) -> None:
        while time.perf_counter() < end:
            try:
                status, took = call()
            except (OSError, http.client.HTTPException) as error:
                waits.failures.append(f"{type(error).__name__}: {error}")
                continue
            found.append(took)
            if status != 200:
                waits.failures.append(str(status))
            time.sleep(pause)

    body = {"prompt": "def main(", "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
    threads = [
        threading.Thread(
            target=often, args=(lambda: ask(port, "/v1/completions", body), waits.seconds, 0.0)
        )
        for _ in range(CLIENTS)
    ]
    threads.append(
        threading.Thread(target=often, args=(lambda: ask(port, "/health"), waits.health, 0.1))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(
    port: int,
    *,
    rounds: int,
    seconds: float,
    tokens: int,
    silent: int = SILENT,
    prompts: int = PROMPTS,
    letters: int = LETTERS,
) -> tuple[Waits, Waits]:
    """What clients wait without and with the attack, in turn, so that a busy machine slows both."""
    quiet, attacked = Waits(), Waits()
    context = multiprocessing.get_context("spawn")
    clients(port, min(seconds, 2.0), tokens, Waits())  # warms up
    for _ in range(rounds):
        clients(port, seconds, tokens, quiet)
        stop = context.Event()
        attackers = context.Process(
            target=attack, args=(port, silent, prompts, letters, stop), daemon=True
        )
        attackers.start()
        time.sleep(1.5)  # it begins in a process of its own
        clients(port, seconds, tokens, attacked)
        stop.set()
        attackers.join(30)
    return quiet, attacked


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--letters", type=int, default=LETTERS)
    parser.add_argument("--context", type=int, default=1024)
    asked = parser.parse_args()
    words = [sys.executable, "-m", "bloomery", "serve", asked.model, "--port", "0", "-d", "cpu"]
    words += ["--max-context", str(asked.context)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if line.startswith("serving"))
            port = int(line.split()[1].rstrip("/").rpartition(":")[2])
            before = peak_mib(server.pid)
            quiet, attacked = measure(
                port,
                rounds=asked.rounds,
                seconds=asked.seconds,
                tokens=asked.tokens,
                letters=asked.letters,
            )
            for name, waits in (("quiet", quiet), ("attacked", attacked)):
                print(
                    f"{name:9} {len(waits.seconds):5} answers, p50 {waits.percentile(50):.3f} s, p95 "
                    f"{waits.percentile(95):.3f} s, /health at most {max(waits.health):.3f} s, failures: "
                    f"{len(waits.failures)} {sorted(set(waits.failures))[:3]}"
                )
            print(
                f"p95 under attack: {attacked.percentile(95) / quiet.percentile(95):.2f} of the quiet one"
            )
            print(f"peak memory: {before} MiB before, {peak_mib(server.pid)} MiB after")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
