"""The server under clients that mean harm: what they send costs little, and others are answered meanwhile."""

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from server_for_tests import LIMITS, Running, running
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from test_serve import idle, post

from bloomery.cli import cli
from bloomery.serve import connections
from bloomery.serve.app import Guard
from bloomery.serve.limits import Refused
from bloomery.serve.tokenizing import Tokenizing
from models_for_tests import make_chat_model, make_model

LARGE = replace(LIMITS, body_bytes=3 * 2**20)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("strangers") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running({"tiny": folder}, limits=LARGE) as server:
        yield server


def get(server: Running, path: str) -> tuple[int, float]:
    """The status, and the seconds until it came."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status, time.monotonic() - began


def connected(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def closed(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


class TestPrompts:
    @pytest.mark.parametrize("text", ["a" * 2_000_000, "為" * 400_000])
    def test_a_prompt_that_cannot_fit_is_never_tokenized(
        self, server: Running, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        model = server.models[0]
        monkeypatch.setattr(
            model.tokenizer, "encode_prompt", lambda _: pytest.fail("it was tokenized")
        )
        monkeypatch.setattr(model, "encode_chat", lambda *_: pytest.fail("it was rendered"))
        bodies = {TEXT: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
        for path, body in bodies.items():
            status, answer = post(server, path, body)
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
            assert "--max-context" in answer["error"]["message"]

    def test_long_texts_hold_up_neither_short_ones_nor_health(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, release, begun = server.models[0], threading.Event(), threading.Semaphore(0)
        tokenizing = model.tokenizer.encode_prompt

        def slow(text: str) -> list[int]:
            if len(text) > 100:
                begun.release()
                release.wait(30)
            return tokenizing(text)

        monkeypatch.setattr(model, "prompt_bytes", 2**20)
        monkeypatch.setattr(model.tokenizer, "encode_prompt", slow)
        long = {"prompt": "a" * 40_000, "max_tokens": 1}
        answers = list[int]()
        threads = [
            threading.Thread(target=lambda: answers.append(post(server, TEXT, long)[0]))
            for _ in range(6)
        ]
        [thread.start() for thread in threads]
        try:
            assert begun.acquire(timeout=20)
            assert get(server, "/health")[1] < 1.0
            assert post(server, TEXT, {"prompt": "a", "max_tokens": 1})[0] == 200
        finally:
            release.set()
        [thread.join() for thread in threads]
        assert answers == [400] * 6

    def test_a_client_that_goes_away_is_not_tokenized_for(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def leave() -> tuple[int, list[str]]:
            tokenizing, release, ran = Tokenizing(waiting=100), threading.Event(), list[str]()
            held = asyncio.ensure_future(tokenizing.run("grammar", release.wait))
            gone = asyncio.ensure_future(tokenizing.run("grammar", lambda: ran.append("gone")))
            await asyncio.sleep(0)
            gone.cancel()
            last = asyncio.ensure_future(tokenizing.run("grammar", lambda: ran.append("last")))
            await asyncio.sleep(0)
            release.set()
            await asyncio.gather(held, last)
            return tokenizing._pending["grammar"], ran

        assert asyncio.run(leave()) == (0, ["last"])

    def test_the_queue_of_long_texts_is_bounded_and_ends_with_the_server(self) -> None:
        async def fill() -> tuple[int, list[int]]:
            tokenizing, release, released = Tokenizing(waiting=3), threading.Event(), []
            calls = [
                asyncio.ensure_future(
                    tokenizing.run("grammar", lambda: released.append(release.wait(30)))
                )
                for _ in range(4)
            ]
            await asyncio.sleep(0.1)
            full = calls[3].exception()
            tokenizing.close()
            ends = await asyncio.gather(*calls[:3], return_exceptions=True)
            assert not released  # the thread is still in its call
            release.set()
            assert isinstance(full, Refused)
            return full.status, [end.status for end in ends if isinstance(end, Refused)]

        assert asyncio.run(fill()) == (503, [503, 503, 503])

    def test_many_prompts_are_counted_before_one_is_tokenized(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            server.models[0].tokenizer, "encode_prompt", lambda _: pytest.fail("it was tokenized")
        )
        status, answer = post(server, TEXT, {"prompt": ["a"] * 10_000, "max_tokens": 1})
        assert status == 400 and answer["error"]["param"] == "n"


class TestConnections:
    def test_a_head_has_ten_seconds(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert connections.HEAD_SECONDS == 10
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.4)
        with running({"tiny": folder}) as server:
            silent, half, later = connected(server), connected(server), connected(server)
            half.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: ")
            later.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert later.recv(15) == b"HTTP/1.1 200 OK"
            while not closed(later, 0.01):  # the rest of the answer, then nothing
                later.sendall(b"G") if not closed(silent, 0.1) else None
            assert closed(silent, 3) and closed(half, 3)

    def test_silent_connections_keep_nobody_out(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloomery.serve.listen.most_connections", lambda _: 10)
        with running({"tiny": folder}) as server, ExitStack() as stack:
            held = [stack.enter_context(connected(server)) for _ in range(60)]
            for _ in range(5):
                status, seconds = get(server, "/health")
                # One that is behind a silent connection waits until that one is closed.
                assert status == 200 and seconds < connections.HEAD_SECONDS / 2
            assert post(server, TEXT, {"prompt": "a", "max_tokens": 1})[0] == 200
            assert sum(closed(connection, 0.02) for connection in held) >= 50

    def test_requests_are_counted_and_connections_are_not(self) -> None:
        guard = Guard(PlainTextResponse("served"), "a secret token", (), 0)
        client = TestClient(guard)
        assert client.get("/health").text == "served"
        # Who has no token learns that, and not how busy the server is.
        assert client.get("/v1/models").status_code == 401
        busy = client.get("/v1/models", headers={"Authorization": "Bearer a secret token"})
        assert busy.status_code == 503 and int(busy.headers["Retry-After"]) > 0

    def test_files_that_run_out_are_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        handle, loop = connections.quiet_accept(), asyncio.new_event_loop()
        for _ in range(1000):
            handle(loop, {"message": "accept", "exception": OSError(24, "Too many open files")})
        assert capsys.readouterr().err.count("\n") == 1
        logging.disable(logging.CRITICAL)
        handle(loop, {"message": "another", "exception": ValueError()})
        logging.disable(logging.NOTSET)
        loop.close()

    def test_connections_leave_files_for_the_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = [(200, 200)]
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _: limits[-1])
        monkeypatch.setattr(connections.resource, "setrlimit", lambda _, pair: limits.append(pair))
        assert 8 <= connections.most_connections(352) <= 200 - connections.RESERVED_FILES
        limits[:] = [(200, 5000)]
        assert connections.most_connections(352) == 352 and limits[-1][0] > 352

    def test_a_refused_body_ends_its_connection(self, server: Running) -> None:
        head = (
            "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
        )
        cases = (
            (TEXT, "application/json", 413),
            ("/nowhere", "application/json", 404),
            (TEXT, "text/plain", 415),
        )
        for path, kind, status in cases:
            with connected(server) as connection:
                connection.sendall(head.format(path, kind, 2**30).encode())
                sent, answer = 0, b""
                connection.settimeout(10)
                try:
                    while sent < 64 * 2**20:
                        sent += connection.send(b" " * 65536)
                except ConnectionError:
                    pass
                assert sent < 32 * 2**20, "what follows a refusal is still read"
                try:
                    answer = connection.recv(20)
                except ConnectionError:
                    continue  # the rest of the body was in flight
                assert str(status).encode() in answer
        # a client that sends all of it reads the answer
        assert post(server, TEXT, b" " * 3_200_000)[0] == 413


class TestAnswers:
    def test_one_slot_keeps_the_context(self, folder: Path) -> None:
        for slots in (1, 2):
            with running(
                {"tiny": folder}, limits=replace(LIMITS, slots=slots, context=32)
            ) as server:
                asked = {"prompt": "def f", "max_tokens": 100, "min_tokens": 100}
                usage = post(server, TEXT, asked)[1]["usage"]
                assert usage["total_tokens"] == 32

    def test_what_fits_into_free_slots_needs_no_queue(self, folder: Path) -> None:
        with running({"tiny": folder}, limits=replace(LIMITS, slots=4, queue=0)) as server:
            assert post(server, TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})[0] == 200
            assert idle(server)
            assert post(server, TEXT, {"prompt": ["a"] * 4, "max_tokens": 2})[0] == 200
            status, answer = post(server, TEXT, {"prompt": ["a"] * 5, "max_tokens": 2})
            assert status == 400 and "--max-queue" in answer["error"]["message"]

    def test_json_of_completions_is_json(self, tmp_path: Path) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
        with running({"chat": make_chat_model(tmp_path / "chat")}) as server:
            assert set(server.models[0].form.stop_ids) - set(server.models[0].ends)
            for seed in range(12):
                body = {"prompt": "a", "max_tokens": 40, "seed": seed, "response_format": form}
                choice = post(server, TEXT, body)[1]["choices"][0]
                assert choice["finish_reason"] == "stop" and isinstance(
                    json.loads(choice["text"]), bool
                )

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema_that_fails_later_is_the_client_s_fault(
        self, server: Running, stream: bool
    ) -> None:
        schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "a", "max_tokens": 100, "response_format": form, "stream": stream}
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert '"invalid_request_error"' in text and "server_error" not in text
        assert answer.status == 400 or stream

    @pytest.mark.parametrize(
        ("schema", "reason"),
        [
            pytest.param({"const": "a" * 500_000}, "longer than 262,144 bytes", id="long"),
            pytest.param(
                {
                    "type": "string",
                    "allOf": [{"pattern": f"^[ab]*a[ab]{{{count}}}$"} for count in range(80)],
                },
                "takes too long to compile",
                id="minutes",
            ),
            pytest.param(
                {
                    "$defs": {
                        f"d{number}": {
                            "anyOf": [
                                {"type": "array", "items": {"$ref": f"#/$defs/d{number + 1}"}},
                                {
                                    "type": "object",
                                    "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}},
                                },
                            ]
                        }
                        for number in range(1000)
                    }
                    | {"d1000": {"type": "null"}},
                    "$ref": "#/$defs/d0",
                },
                "too complex to compile",
                id="overflow of the stack",
            ),
        ],
    )
    def test_a_schema_that_would_harm_the_server_is_refused(
        self, server: Running, schema: dict[str, Any], reason: str
    ) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "a", "max_tokens": 4, "response_format": form}
        began = time.monotonic()
        status, answer = post(server, TEXT, body)
        assert status == 400 and reason in answer["error"]["message"]
        assert time.monotonic() - began < 10
        assert post(server, TEXT, body) == (status, answer)
        form["json_schema"]["schema"] = {"type": "boolean"}
        assert post(server, TEXT, {**body, "max_tokens": 40})[0] == 200

    @pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/other"])
    def test_models_that_are_not_there(self, server: Running, path: str) -> None:
        assert get(server, path)[0] == 404

    @pytest.mark.parametrize(
        ("body", "parameter", "words"),
        [
            ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
            (
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [{"type": "image_url", "image_url": {"url": "x"}}],
                        }
                    ]
                },
                "messages",
                "tiny reads text alone",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
                "messages.0.content",
                "audio is not supported",
            ),
            ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
            ({"logit_bias": {"a": 5}}, "logit_bias", "token ids"),
            ({"guided_regex": "a+"}, "guided_regex", "not supported"),
            ({"wishes": 5}, "wishes", "unsupported parameter"),
        ],
    )
    def test_refusals_name_the_place_in_the_request(
        self, server: Running, body: dict, parameter: str, words: str
    ) -> None:
        status, answer = post(server, CHAT, {"messages": [{"role": "user", "content": "a"}]} | body)
        assert (status, answer["error"]["param"]) == (400, parameter)
        assert (
            words in answer["error"]["message"] and "constrained" not in answer["error"]["message"]
        )


@pytest.mark.parametrize(
    "words",
    [
        ["--max-seconds", "nan"],
        ["--max-seconds", "inf"],
        ["--temperature", "nan"],
        ["--port", "taken"],
    ],
)
def test_options_are_refused_before_a_model_is_loaded(
    folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bloomery.serve.served.load_served", lambda *_, **__: pytest.fail("it was loaded")
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [port if word == "taken" else word for word in words]
        result = CliRunner().invoke(
            cli, ["serve", str(folder), "-d", "cpu", *words], standalone_mode=False
        )
    assert getattr(result.exception, "code", None) == 2, result.exception
