"""A server whose model sees: three APIs give transformers' answer, and hostile pictures cost nobody else anything."""

import io
import os
import signal
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from server_for_tests import LIMITS, Running, running
from test_serve import client_of, idle, post

from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.data.examples import Message
from bloomery.data.pictures.reader import Picture, PictureReader
from bloomery.infer.decode import RunningBatch, TextUpdate
from bloomery.infer.load import Use
from bloomery.serve.served import load_served
from pictures_for_tests import answer_of_transformers, bomb, png, save_base

CHAT = "/v1/chat/completions"
SEEING = replace(LIMITS, context=400, body_bytes=3 * 2**20, pictures=4)
GREEDY = {"temperature": 0.0, "max_tokens": 8}
COLORS = {"red": (40, 60), "blue": (90, 50), "green": (33, 33)}


def url(color: str) -> str:
    return "data:image/png;base64," + b64encode(png(*COLORS[color], color)).decode()


def shown(color: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(color), **more}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CONVERSATION = [
    {"role": "user", "content": [text("Left:"), shown("red", detail="high"), shown("blue")]},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": [shown("green"), text("Say it.")]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "seeing"
    save_base("qwen3_vl", folder, weights=True)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running({"seeing": folder}, limits=SEEING, template=None) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    turns = [
        {
            "role": turn["role"],
            "content": [
                {"type": "image"} if part["type"] == "image_url" else part
                for part in turn["content"]
            ]
            if isinstance(turn["content"], list)
            else [text(turn["content"])],
        }
        for turn in CONVERSATION
    ]
    pictures = [png(*COLORS[color], color) for color in ("red", "blue", "green")]
    return answer_of_transformers(folder, turns, pictures, GREEDY["max_tokens"])


class TestAnswers:
    def test_a_chat_is_that_of_transformers(self, client: openai.OpenAI, expected: str) -> None:
        done = client.chat.completions.create(model="seeing", messages=CONVERSATION, **GREEDY)
        assert done.choices[0].message.content == expected
        chunks = client.chat.completions.create(
            model="seeing", messages=CONVERSATION, stream=True, **GREEDY
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == expected
        other = [*CONVERSATION[:2], {"role": "user", "content": [shown("red"), text("Say it.")]}]
        fewer = client.chat.completions.create(model="seeing", messages=other, **GREEDY)
        # The number of tokens tells that another picture was read.
        assert fewer.usage.prompt_tokens != done.usage.prompt_tokens

    def test_responses_and_messages_answer_alike(
        self, client: openai.OpenAI, server: Running, expected: str
    ) -> None:
        first, answer, last = CONVERSATION
        items = []
        for turn in (first, last):
            parts = [
                {"type": "input_text", "text": part["text"]}
                if part["type"] == "text"
                else {
                    "type": "input_image",
                    "image_url": part["image_url"]["url"],
                    "detail": "auto",
                }
                for part in turn["content"]
            ]
            items.append({"role": "user", "content": parts})
        response = client.responses.create(
            model="seeing",
            input=[items[0], answer, items[1]],
            temperature=0.0,
            max_output_tokens=GREEDY["max_tokens"],
        )
        assert response.output_text == expected
        # The server keeps the pictures of a conversation that goes on.
        more = client.responses.create(
            model="seeing", input="Why?", previous_response_id=response.id, max_output_tokens=2
        )
        assert more.usage.input_tokens > response.usage.input_tokens

        turns = []
        for turn in (first, last):
            blocks = [
                part
                if part["type"] == "text"
                else {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": part["image_url"]["url"].partition(",")[2],
                    },
                }
                for part in turn["content"]
            ]
            turns.append({"role": "user", "content": blocks})
        body = {"model": "seeing", "messages": [turns[0], answer, turns[1]]}
        status, message = post(server, "/v1/messages", body | GREEDY)
        assert (status, message["content"][0]["text"]) == (200, expected)
        status, counted = post(server, "/v1/messages/count_tokens", body)
        assert counted["input_tokens"] == message["usage"]["input_tokens"]

    def test_the_check_of_memory_counts_the_tower(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = list[str]()
        with ExitStack() as stack:
            load = partial(
                load_served, folder, "a", SEEING, stack, use=Use("cpu"), on_load=lines.append
            )
            decoder = load().decoder
            needed = sum(each.nbytes for each in (*decoder.parameters(), *decoder.buffers()))
            needed += sum(each.nbytes for each in decoder.vision.tower.parameters())
            assert f"weights: {format_bytes(needed)}," in lines[0]
            texts_alone = load_served(
                *(folder, "a", replace(SEEING, pictures=0), stack),
                use=Use("cpu"),
                on_load=lines.append,
            )
            assert texts_alone.decoder.vision is None and texts_alone.intake is None
            assert lines[1] != lines[0]
            monkeypatch.setattr(Use, "free_bytes", lambda _: needed)
            with pytest.raises(UserError, match="does not fit"):
                load()

    def test_the_model_says_that_it_sees(self, client: openai.OpenAI) -> None:
        (model,) = client.models.list().data
        assert model.model_extra["input_modalities"] == ["text", "image"]

    def test_text_alone_and_a_spelled_mark_are_answered(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        pad = server.models[0].decoder.vision.vision.image_token_id
        words = "<|image_pad|> \ufffc"
        done = client.chat.completions.create(
            model="seeing", messages=[{"role": "user", "content": words}], max_tokens=2
        )
        ids = server.models[0].encode_chat([Message("user", words)])
        assert pad not in ids and len(ids) == done.usage.prompt_tokens
        beside = [{"role": "user", "content": [text(words), shown("green")]}]
        alone = [{"role": "user", "content": [shown("green")]}]
        sizes = [
            client.chat.completions.create(
                model="seeing", messages=turns, max_tokens=1
            ).usage.prompt_tokens
            for turns in (beside, alone)
        ]
        assert sizes[0] - sizes[1] == len("<|image_pad|> ")  # a token for each byte


def noise(width: int, height: int, form: str, **settings: Any) -> str:
    stream = io.BytesIO()
    picture = Image.effect_noise((width, height), 90).convert("RGB")
    picture.save(stream, form, **settings)
    return f"data:image/{form.lower()};base64," + b64encode(stream.getvalue()).decode()


def asked(*addresses: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


class TestHostile:
    @pytest.mark.parametrize(
        ("addresses", "status", "words"),
        [
            ([url("red")] * 200, 400, "200 images in one request; this server takes at most 4"),
            (["data:image/png;base64," + "A" * 4_000_000], 413, "larger than"),
            (["data:image/png;base64," + "A" * 2_000_000], 400, "image 1 is none of"),
            (["data:image/png;base64," + b64encode(bomb(60_000)).decode()], 400, "pixels"),
            ([url("red"), url("blue")[:-40]], 400, "image 2 is damaged"),
            ([noise(8, 2000, "PNG")], 400, "one side is over 200 times the other"),
            ([url("red"), "https://example.com/a.png"], 400, "image 2 is on the network"),
        ],
        ids=["many", "huge body", "huge", "bomb", "truncated", "long", "network"],
    )
    def test_each_is_refused_alone(
        self, server: Running, addresses: list[str], status: int, words: str
    ) -> None:
        began = time.monotonic()
        answered, body = post(server, CHAT, asked(*addresses))
        assert (answered, words in body["error"]["message"]) == (status, True), body
        assert body["error"]["type"] == "invalid_request_error"
        assert time.monotonic() - began < 5
        assert post(server, CHAT, asked(url("red")))[0] == 200  # the next one is read

    def test_a_prompt_of_pictures_that_does_not_fit_is_refused(self, server: Running) -> None:
        words = text("x " * 185)
        alone = {"messages": [{"role": "user", "content": [words]}], "max_tokens": 1}
        assert post(server, CHAT, alone)[0] == 200
        turns = [{"role": "user", "content": [words, shown("red"), shown("blue")]}]
        status, body = post(server, CHAT, {"messages": turns})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    def test_pictures_that_wait_take_so_many_bytes_at_most(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloomery.serve.engine.MOST_WAITING_BYTES", 1)
        release = threading.Event()
        step = RunningBatch.step

        def held(batch: RunningBatch) -> Iterator[TextUpdate]:
            assert release.wait(60)
            return step(batch)

        monkeypatch.setattr(RunningBatch, "step", held)
        several = {**asked(url("red")), "n": 4}
        statuses = list[int]()
        threads = [
            threading.Thread(target=lambda: statuses.append(post(server, CHAT, several)[0]))
            for _ in range(2)
        ]
        try:
            for thread, count in zip(threads, (4, 8), strict=True):
                thread.start()  # the first takes all slots, and the second waits
                until = time.monotonic() + 50
                while server.engine.waiting + server.engine.running < count:
                    assert time.monotonic() < until
                    time.sleep(0.002)
            status, body = post(server, CHAT, asked(url("red")))
        finally:
            release.set()
        for thread in threads:
            thread.join()
        assert (status, body["error"]["code"]) == (503, "queue_full")
        assert statuses == [200, 200] and idle(server)

    def test_a_slow_picture_holds_up_no_text(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reading, release = threading.Event(), threading.Event()
        read = PictureReader.read

        def slow(reader: PictureReader, reference: str, where: str) -> Picture:
            reading.set()
            assert release.wait(30)
            return read(reader, reference, where)

        monkeypatch.setattr(PictureReader, "read", slow)
        statuses = list[int]()
        threads = [
            threading.Thread(
                target=lambda: statuses.append(post(server, CHAT, asked(url("red")))[0])
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        try:
            assert reading.wait(20)
            words = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            assert post(server, CHAT, words)[0] == 200
        finally:
            release.set()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 3 and idle(server)

    def test_a_picture_that_ends_its_reader_ends_nothing_else(self, server: Running) -> None:
        assert post(server, CHAT, asked(url("red")))[0] == 200
        intake = server.models[0].intake
        assert intake is not None
        reader = intake._reader
        child = reader._child
        assert child is not None
        os.kill(child._process.pid, signal.SIGKILL)
        status, body = post(server, CHAT, asked(url("red")))
        assert status == 400 and "ended the process that decodes it" in body["error"]["message"]
        assert post(server, CHAT, asked(url("red")))[0] == 200
