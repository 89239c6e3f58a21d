"""The command `bloomery serve` under bad requests and many clients: memory, files and threads stay as they were."""

import http.client
import json
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from server_for_tests import running, serve_command
from test_serve import fuzzed

from models_for_tests import make_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import serve_strangers

SMALL = ["--max-body", "20000", "--max-seconds", "60"]


@pytest.fixture
def child(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[psutil.Process, int]]:
    """The command on a port of its own, with small limits or the options of the test."""
    folder = make_model(tmp_path / "tiny")
    with serve_command(folder, *getattr(request, "param", SMALL)) as process:
        try:
            line = next(line for line in process.stderr if line.startswith("serving"))
            yield psutil.Process(process.pid), int(line.split()[1].rstrip("/").rpartition(":")[2])
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            assert process.stderr.read().splitlines()[-1:] == ["stopped"]
        finally:
            process.kill()


def asked(
    port: int, body: bytes, path: str = "/v1/completions", kind: str = "application/json"
) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def malformed(draw: random.Random, port: int) -> None:
    """Bytes that are hardly HTTP, or a request that is left in the middle."""
    good = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    wire = draw.choice(
        [
            draw.randbytes(draw.randrange(1, 3000)),
            head + b"Content-Length: 99999999999999999999\r\n\r\n" + good,
            head + b"Content-Length: -1\r\n\r\n" + good,
            head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + good,
            head
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + 2 * (b"4000\r\n" + b"[" * 0x4000 + b"\r\n"),
            head + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
            head + b"X: y\r\n" * 20_000,
            head + b"Content-Length: %d\r\n\r\n" % len(good) + good[: draw.randrange(len(good))],
            b"GET " + b"/a" * 60_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * 5000,
            b"GET /\x00 HTTP/1.1\r\n\r\n",
        ]
    )
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw, suppress(OSError):
        raw.sendall(wire)
        raw.settimeout(draw.choice((0.0, 0.2)))
        raw.recv(1000)


@pytest.mark.soak
@pytest.mark.parametrize("count", [20, 500])
def test_many_bad_requests_and_clients_leave_no_trace(
    child: tuple[psutil.Process, int], count: int
) -> None:
    process, port = child
    draw, clients = random.Random(count), min(50, count)

    def crowd() -> None:
        ends = list[int]()

        def ask(number: int) -> None:
            ends.append(
                asked(
                    port,
                    json.dumps({"prompt": "def f" * (number % 5 + 1), "max_tokens": 30}).encode(),
                )
            )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert ends == [200] * clients

    def round_of(requests: int) -> None:
        for _ in range(requests):
            path = draw.choice(["/v1/completions", "/v1/chat/completions"])
            assert 200 <= asked(port, fuzzed(draw), path) < 500
            malformed(draw, port)

    crowd()
    round_of(count // 10)
    memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    round_of(count)
    crowd()
    for _ in range(100):  # connections that are kept alive end after 10 seconds
        if process.num_fds() <= files:
            break
        time.sleep(0.2)
    assert process.num_fds() <= files and process.num_threads() <= threads + 2
    assert process.memory_info().rss - memory < 64 * 2**20
    assert not process.children()[1:]  # that of the chat template
    assert asked(port, json.dumps({"prompt": "a", "max_tokens": 1}).encode()) == 200


def test_clients_are_answered_while_strangers_attack(tmp_path: Path) -> None:
    with running({"tiny": make_model(tmp_path / "tiny")}) as server:
        port = int(server.url.rpartition(":")[2])
        sizes = {"silent": 60, "prompts": 2, "letters": 15_000}
        quiet, attacked = serve_strangers.measure(port, rounds=1, seconds=1.0, tokens=4, **sizes)
    assert quiet.failures == attacked.failures == []
    assert len(attacked.seconds) > serve_strangers.CLIENTS and attacked.health


@pytest.mark.soak
@pytest.mark.parametrize("child", [["--max-context", "100"]], indirect=True)
def test_400_silent_connections_and_16_prompts_of_2_mb_double_no_wait(
    child: tuple[psutil.Process, int],
) -> None:
    process, port = child
    before = process.memory_info().rss
    quiet, attacked = serve_strangers.measure(port, rounds=6, seconds=6.0, tokens=32)
    assert quiet.failures == attacked.failures == []
    assert attacked.percentile(95) <= 2 * quiet.percentile(95) and max(attacked.health) < 1.0
    assert process.memory_info().rss - before < 300 * 2**20
