"""The server, as OpenAI's own client and as raw sockets see it: the oracle of every text is the model alone."""

import http.client
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from server_for_tests import LIMITS, Running, running, serve_command

from bloomery.core.errors import UserError
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.decode import RunningText, Speculation, sample_tokens
from bloomery.infer.generate import continued, generate
from bloomery.infer.sampling import Sampling
from bloomery.model.adapters.lora import adapt, adapted
from bloomery.model.adapters.peft_files import write_adapter
from bloomery.model.adapters.settings import adaptation
from bloomery.model.io.weights import load_decoder
from bloomery.recipe.schema import Lora
from bloomery.serve.address import token_for
from models_for_tests import make_model

HOT = {"temperature": 1.3, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running({"tiny": folder}) as server:
        yield server


def client_of(server: Running, token: str = "none") -> openai.OpenAI:
    """Without certificates, whose list takes longer to read than an answer."""
    plain = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=token, max_retries=0, timeout=60, http_client=plain
    )


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return client_of(server)


def post(server: Running, path: str, body: bytes | object, **headers: str) -> tuple[int, dict]:
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"} | headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else {}


def idle(server: Running) -> bool:
    for _ in range(500):
        if not server.engine.running and not server.engine.waiting:
            return True
        time.sleep(0.02)
    return False


class TestOpenAI:
    def test_a_completion_is_that_of_generate(self, client: openai.OpenAI, server: Running) -> None:
        model = server.models[0]
        for settings in ({"temperature": 0.0}, HOT | {"seed": 7}):
            done = client.completions.create(
                model="tiny", prompt="def f", max_tokens=30, **settings
            )
            sampling = Sampling(max_new_tokens=30, **settings)
            assert done.choices[0].text == "".join(
                generate(model.decoder, model.tokenizer, "def f", sampling)
            )
            assert done.usage.prompt_tokens == len(model.tokenizer.encode_prompt("def f"))
            assert (
                done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
            )

    def test_a_reply_is_that_of_chat_streamed_or_not(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        turns = [{"role": "system", "content": "b"}, {"role": "user", "content": "für"}]
        settings = {"max_tokens": 20, "seed": 3, **HOT}
        whole = client.chat.completions.create(model="tiny", messages=turns, **settings)
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=turns,
                stream=True,
                stream_options={"include_usage": True},
                **settings,
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        model = server.models[0]
        with chat_format(model.tokenizer, "chatml") as form:
            ids = form.encode([Message("system", "b"), Message("user", "für")])
            sampling = Sampling(max_new_tokens=20, seed=3, stop_ids=form.stop_ids, **HOT)
            expected = "".join(
                continued(model.decoder, model.tokenizer, ids, sampling, form.stop_strings)
            )
        assert text == whole.choices[0].message.content == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage

    def test_stop_texts_and_limits_give_their_reasons(self, client: openai.OpenAI) -> None:
        free = client.completions.create(
            model="tiny", prompt="def", max_tokens=30, temperature=0.0
        ).choices[0]
        assert free.finish_reason == "length"
        stop = free.text[5:8]
        cut = client.completions.create(
            model="tiny", prompt="def", max_tokens=30, temperature=0.0, stop=stop
        )
        assert cut.choices[0].text == free.text[: free.text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"

    @pytest.mark.parametrize("max_tokens", [30, 3])
    def test_a_stop_text_ends_a_request_whose_step_guessed_beyond_it(
        self, client: openai.OpenAI, server: Running, max_tokens: int
    ) -> None:
        """The last update of the step may be the end by length, which the request no longer has."""
        batch = server.models[0].batch
        free = client.completions.create(model="tiny", prompt="def", max_tokens=30, temperature=0.0)
        ids = server.models[0].tokenizer.encode_prompt("def")
        cold = Sampling(max_new_tokens=30, temperature=0.0)
        expected = list(sample_tokens(server.models[0].decoder, ids, cold))
        stop = server.models[0].tokenizer.decode(expected[:2])

        def guess(text: RunningText, limit: int) -> list[int]:
            return expected[len(text.new) : len(text.new) + limit]

        batch.speculation = Speculation(guess)
        try:
            cut = client.completions.create(
                model="tiny", prompt="def", max_tokens=max_tokens, temperature=0.0, stop=stop
            )
        finally:
            batch.speculation = None
        free_text = free.choices[0].text
        assert cut.choices[0].text == free_text[: free_text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        assert server.models[0].batch is batch  # an error in a step would have replaced it

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_grammar_whose_tokens_are_all_banned_ends_no_other_request(
        self, client: openai.OpenAI, server: Running, temperature: float
    ) -> None:
        schema = {
            "type": "object",
            "properties": {"ok": {"enum": ["aaaaaaaaaaaaaaaa"]}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        form = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
        asked = {"model": "tiny", "prompt": "Once", "max_tokens": 90, "seed": 3}
        alone, texts = client.completions.create(**asked).choices[0].text, list[str]()
        other = threading.Thread(
            target=lambda: texts.append(client.completions.create(**asked).choices[0].text)
        )
        other.start()
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 90,
            "temperature": temperature,
            "response_format": form,
            "no_repeat_ngram_size": 1,
        }
        status, answer = post(server, "/v1/chat/completions", body)
        other.join()
        assert status == 200
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"ok": "a" * 16}
        assert texts == [alone]

    def test_json_follows_the_schema(self, client: openai.OpenAI, server: Running) -> None:
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        asked = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 60,
            "n": 3,
        }
        form = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }
        for choice in client.chat.completions.create(response_format=form, **asked).choices:
            assert isinstance(json.loads(choice.message.content)["ok"], bool)
        form["json_schema"]["schema"] = {"type": "bogus"}
        with pytest.raises(openai.BadRequestError, match="bogus"):
            client.chat.completions.create(response_format=form, **asked)
        assert (
            post(server, "/v1/completions", {"prompt": "a", "response_format": {"type": "xml"}})[0]
            == 400
        )

    def test_settings_that_a_request_leaves_out_are_the_server_s(self, folder: Path) -> None:
        with running({"tiny": folder}, defaults={"temperature": 0.0, "seed": 5}) as server:
            asked = {"model": "tiny", "prompt": "def", "max_tokens": 12}
            texts = {
                client_of(server).completions.create(**asked).choices[0].text for _ in range(3)
            }
            cold = client_of(server).completions.create(**asked, temperature=0.0).choices[0].text
            hot = (
                client_of(server)
                .completions.create(**asked, temperature=2.0, seed=1)
                .choices[0]
                .text
            )
            assert texts == {cold} and hot != cold

    def test_choices_have_their_own_seeds(self, client: openai.OpenAI) -> None:
        asked = {"model": "tiny", "prompt": ["def", "für"], "max_tokens": 12, **HOT}
        three = client.completions.create(n=3, seed=4, **asked).choices
        assert [choice.index for choice in three] == list(range(6))
        single = [client.completions.create(seed=4 + at, **asked).choices for at in range(3)]
        assert [choice.text for choice in three[:3]] == [each[0].text for each in single]
        assert len({choice.text for choice in three[:3]}) == 3

    def test_log_probabilities_are_those_of_the_decoder(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        done = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            max_tokens=8,
            temperature=0.0,
            logprobs=True,
            top_logprobs=3,
            extra_body={"repetition_penalty": 1.3},
        )
        model, content = server.models[0], done.choices[0].logprobs.content
        ids = model.encode_chat([Message("user", "a")])
        new = list(
            sample_tokens(
                model.decoder,
                ids,
                Sampling(max_new_tokens=8, temperature=0, repetition_penalty=1.3),
            )
        )
        with torch.no_grad():
            expected = (
                model.decoder(torch.tensor([ids + new])).head[0, len(ids) - 1 : -1].log_softmax(-1)
            )
        for at, each in enumerate(content):
            assert each.logprob == pytest.approx(float(expected[at, new[at]]), abs=1e-4)
            likeliest = expected[at].topk(3).values.tolist()
            assert [top.logprob for top in each.top_logprobs] == pytest.approx(likeliest, abs=1e-4)
        plain = (
            client.completions.create(
                model="tiny",
                prompt="a",
                max_tokens=4,
                logprobs=2,
                seed=1,
                temperature=0.0,
                extra_body={"min_tokens": 4},
            )
            .choices[0]
            .logprobs
        )
        assert len(plain.tokens) == len(plain.token_logprobs) == len(plain.top_logprobs) == 4

    def test_echo_reports_the_prompt_as_the_decoder_scores_it(
        self, client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloomery.serve.served.PIECE", 5)  # in several forwards
        model = server.models[0]
        prompts = [model.tokenizer.encode("def f(x): für"), model.tokenizer.encode("a b")]
        asked = {"model": "tiny", "prompt": prompts, "temperature": 0.0, "echo": True}
        done = client.completions.create(**asked, logprobs=2, max_tokens=3)
        alone = client.completions.create(**asked | {"echo": False}, max_tokens=3)
        for ids, choice, new in zip(prompts, done.choices, alone.choices, strict=True):
            with torch.no_grad():
                logprobs = model.decoder(torch.tensor([ids])).head[0].log_softmax(-1)
            expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
            found = choice.logprobs
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
            for at in range(1, len(ids)):
                likeliest = sorted(found.top_logprobs[at].values(), reverse=True)
                best = logprobs[at - 1].topk(2).values.tolist()
                assert likeliest[:2] == pytest.approx(best, abs=1e-4)
                assert found.token_logprobs[at] in found.top_logprobs[at].values()
            assert choice.text == model.tokenizer.decode(ids) + new.text
            assert len(found.tokens) == len(found.text_offset) == len(ids) + 3
            assert found.text_offset[len(ids)] == len(model.tokenizer.decode(ids))
        none = client.completions.create(**asked, logprobs=2, max_tokens=0)
        for choice, longer in zip(none.choices, done.choices, strict=True):
            size = len(choice.logprobs.tokens)
            assert choice.logprobs.token_logprobs == longer.logprobs.token_logprobs[:size]
        assert none.usage.completion_tokens == 0

    def test_an_echo_of_a_text_is_the_text(self, client: openai.OpenAI) -> None:
        asked = {"model": "tiny", "prompt": "für f", "max_tokens": 4, "temperature": 0.0}
        new = client.completions.create(**asked).choices[0].text
        done = client.completions.create(**asked, echo=True, logprobs=0).choices[0]
        assert done.text == "für f" + new
        pieces = [done.text[offset:] for offset in done.logprobs.text_offset]
        assert all(
            piece.startswith(token)
            for token, piece in zip(done.logprobs.tokens, pieces, strict=True)
            if not token.startswith(("bytes:", "<"))
        )
        chunks = client.completions.create(**asked, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == done.text

    def test_best_of_returns_the_likeliest(self, client: openai.OpenAI) -> None:
        asked = {"model": "tiny", "prompt": ["def", "a"], "max_tokens": 6, "seed": 4, **HOT}
        drawn = client.completions.create(n=4, logprobs=0, **asked).choices
        best = client.completions.create(n=2, best_of=4, **asked).choices
        for prompt in range(2):
            of_prompt = sorted(
                drawn[4 * prompt : 4 * prompt + 4],
                key=lambda choice: (
                    -sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
                ),
            )
            texts = [choice.text for choice in best[2 * prompt : 2 * prompt + 2]]
            assert texts == [choice.text for choice in of_prompt[:2]]

    def test_completions_have_sixteen_tokens_unless_more_are_asked_for(
        self, client: openai.OpenAI
    ) -> None:
        asked = {"model": "tiny", "prompt": "a", "extra_body": {"min_tokens": 20}}
        assert client.completions.create(**asked).usage.completion_tokens == 16

    def test_bytes_of_tokens_are_those_of_the_text(self, client: openai.OpenAI) -> None:
        turns = [{"role": "user", "content": "a"}]
        asked = {"model": "tiny", "messages": turns, "max_tokens": 60, "logprobs": True}
        split = 0
        for seed in range(4):
            choice = client.chat.completions.create(seed=seed, **asked).choices[0]
            spelled = [bytes(token.bytes) for token in choice.logprobs.content]
            assert b"".join(spelled).decode(errors="replace") == choice.message.content
            split += sum("\ufffd" in token.decode(errors="replace") for token in spelled)
        assert split, "no token is a part of a character"

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"suffix": "a"}, "suffix"),
            ({"best_of": 1, "n": 2}, "best_of"),
            ({"best_of": 2, "stream": True}, "best_of"),
            ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
            ({"echo": True, "logprobs": 20, "prompt": [[5] * 100]}, "at most 1,000"),
        ],
    )
    def test_completions_that_are_refused(
        self, server: Running, body: dict, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bloomery.serve.app.MOST_SCORES", 1000)
        status, answer = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1} | body)
        assert status == 400 and words in answer["error"]["message"], answer

    def test_models_health_and_metrics(self, client: openai.OpenAI, server: Running) -> None:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        host = server.url.removeprefix("http://")
        for path, word in (
            ("/health", b'"ok"'),
            ("/metrics", b"bloomery_generated_tokens_total "),
            ("/", b"<html"),
        ):
            connection = http.client.HTTPConnection(host)
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200 and word in answer.read()
            connection.close()

    @pytest.mark.parametrize(
        ("settings", "status", "parameter"),
        [
            ({"model": "other"}, 404, "model"),
            ({"temperature": -1}, 400, "temperature"),
            ({"n": 99}, 400, "n"),
            ({"max_tokens": 101}, 400, "max_tokens"),
            ({"prompt": "x " * 200}, 400, "prompt"),
            ({"prompt": [9999]}, 400, "prompt"),
            ({"stop": ["a"] * 17}, 400, "stop"),
            ({"extra_body": {"tools": []}}, 400, "tools"),
            ({"prompt": []}, 400, "prompt"),
        ],
    )
    def test_what_is_refused_names_its_parameter(
        self, client: openai.OpenAI, settings: dict, status: int, parameter: str | None
    ) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(
                **{"model": "tiny", "prompt": "a", "max_tokens": 2} | settings
            )
        assert caught.value.status_code == status
        assert caught.value.body["param"] == parameter and caught.value.body["message"]


def test_adapters_of_one_base_are_chosen_by_name_also_in_one_batch(
    folder: Path, tmp_path: Path
) -> None:
    adapters = {}
    for seed, name in enumerate(("poet", "clerk")):
        tuned, lora = (
            load_decoder(folder),
            Lora(kind="lora", rank=4, alpha=64, target_modules=["q_proj", "down_proj"]),
        )
        adapt(tuned, lora)
        torch.manual_seed(seed)
        state = {}
        for path, module in adapted(tuned):
            for leaf in ("lora_A", "lora_B"):
                state[f"{path}.{leaf}"] = torch.nn.init.normal_(
                    getattr(module, leaf).data, 0.0, 0.3
                )
        adapters[name] = tmp_path / name
        adapters[name].mkdir()
        write_adapter(
            state, adaptation(tuned.config, lora), tuned.config, adapters[name], base=str(folder)
        )
    cold = Sampling(max_new_tokens=25, temperature=0.0)
    tokenizer = load_tokenizer(folder)
    alone = {name: load_decoder(path, base=folder) for name, path in adapters.items()} | {
        "tiny": load_decoder(folder)
    }
    expected = {
        name: "".join(generate(decoder, tokenizer, "def f", cold))
        for name, decoder in alone.items()
    }
    assert len(set(expected.values())) == 3
    with running({"tiny": folder}, adapters=adapters) as server:
        client, got = client_of(server), {}

        def ask(name: str) -> None:
            asked = {"model": name, "prompt": "def f", "max_tokens": 25, "temperature": 0.0}
            got[name] = client.completions.create(**asked).choices[0].text

        for _ in range(3):
            threads = [threading.Thread(target=ask, args=(name,)) for name in expected]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert got == expected
        assert [model.id for model in client.models.list()] == ["tiny", "poet", "clerk"]


class TestBadInput:
    def test_a_stream_that_is_left_frees_its_slot(
        self, client: openai.OpenAI, server: Running
    ) -> None:
        before = server.engine.counts["requests_canceled"]
        for _ in range(2 * LIMITS.slots):
            asked = {
                "model": "tiny",
                "prompt": "a",
                "max_tokens": 100,
                "extra_body": {"min_tokens": 100},
            }
            stream = client.completions.create(stream=True, **asked)
            next(iter(stream))
            stream.close()
        assert idle(server)
        assert server.engine.counts["requests_canceled"] > before

    def test_a_client_that_goes_away_frees_its_slot(self, server: Running) -> None:
        body = json.dumps({"prompt": "a", "max_tokens": 100, "min_tokens": 100, "n": 16}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        before = server.engine.counts["requests_canceled"]
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not server.engine.running:
                time.sleep(0.005)
        assert idle(server)
        assert server.engine.counts["requests_canceled"] > before

    def test_hosts_types_sizes_and_methods(self, server: Running) -> None:
        asked = {"prompt": "a", "max_tokens": 1}
        assert post(server, "/v1/completions", asked)[0] == 200
        assert post(server, "/v1/completions", asked, Host="evil.example")[0] == 403
        assert post(server, "/v1/completions", asked, **{"Content-Type": "text/plain"})[0] == 415
        assert post(server, "/v1/completions", b'{"prompt": "' + b"a" * 30_000 + b'"}')[0] == 413
        assert post(server, "/v1/models", asked)[0] == 405
        assert post(server, "/v1/moderations", asked)[0] == 404

    def test_the_queue_has_an_end(self, folder: Path) -> None:
        with running({"tiny": folder}, limits=replace(LIMITS, slots=1, queue=0)) as server:
            status, body = post(server, "/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 2})
            assert status == 400 and body["error"]["param"] == "n"
            held = client_of(server).completions.create(
                model="tiny",
                prompt="a",
                max_tokens=100,
                stream=True,
                extra_body={"min_tokens": 100},
            )
            next(iter(held))
            answers = [
                post(server, "/v1/completions", {"prompt": "a", "max_tokens": 90}) for _ in range(2)
            ]
            held.close()
            assert {status for status, _ in answers} <= {200, 503}

    def test_a_request_ends_with_its_time(self, folder: Path) -> None:
        with running({"tiny": folder}, limits=replace(LIMITS, seconds=1e-4)) as server:
            status, body = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 100})
            assert (status, body["error"]["code"]) == (408, "timeout")
            assert idle(server)

    def test_an_error_while_decoding_ends_requests_and_not_the_server(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as broken:  # after the text left the batch
            broken.setattr("bloomery.infer.text.TextStream.flush", lambda _: 1 / 0)
            status, body = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert status == 500 and "ZeroDivisionError" in body["error"]["message"]
        assert idle(server) and server.engine.alive
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200

    def test_a_token_is_asked_for(self, folder: Path) -> None:
        with running({"tiny": folder}, token="quite a secret") as server:
            with pytest.raises(openai.AuthenticationError):
                client_of(server, "another").models.list()
            assert client_of(server, "quite a secret").models.list().data[0].id == "tiny"

    def test_an_open_address_needs_a_token(self) -> None:
        assert token_for("127.0.0.1", {}) is None
        assert token_for("0.0.0.0", {"BLOOMERY_SERVE_TOKEN": "12345678"}) == "12345678"
        for environment in ({}, {"BLOOMERY_SERVE_TOKEN": "short"}):
            with pytest.raises(UserError):
                token_for("0.0.0.0", environment)

    @pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.soak)])
    def test_fuzzed_requests_are_answered_and_leave_nothing(
        self, server: Running, count: int
    ) -> None:
        draw = random.Random(count)
        for _ in range(count):
            path = draw.choice(
                ["/v1/completions", "/v1/chat/completions", "/v1/models/x", "/", "/v1/../etc"]
            )
            status, body = post(server, path, fuzzed(draw))
            assert 200 <= status < 500, (status, body)
            assert status == 200 or not body or body.get("error", {}).get("message")
        assert idle(server) and server.engine.alive
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200

    @pytest.mark.parametrize("clients", [12, pytest.param(50, marks=pytest.mark.soak)])
    def test_many_clients_at_once_get_what_each_gets_alone(
        self, server: Running, clients: int
    ) -> None:
        client, got = client_of(server), {}

        def ask(number: int) -> None:
            asked = {
                "prompt": "def f" + "x" * (number % 7),
                "max_tokens": 5 + number % 20,
                "temperature": 0.0,
            }
            stream = client.completions.create(model="tiny", stream=True, **asked)
            got[number] = "".join(chunk.choices[0].text for chunk in stream)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        model = server.models[0]
        for number in range(clients):
            cold = Sampling(max_new_tokens=5 + number % 20, temperature=0.0)
            prompt = "def f" + "x" * (number % 7)
            assert got[number] == "".join(generate(model.decoder, model.tokenizer, prompt, cold)), (
                number
            )


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**70,
    1e308,
    float("nan"),
    "",
    "a",
    "\ud800",
    "\x00" * 9,
    [],
    {},
    [[]],
    [1, "a"],
    "🙂" * 50,
]
KEYS = [
    "prompt",
    "messages",
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "stream",
    "logprobs",
    "top_logprobs",
    "min_p",
    "user",
    "tools",
    "top_k",
    "stream_options",
    "role",
    "content",
    "\x00",
]


def fuzzed(draw: random.Random) -> bytes:
    """A request that is right up to a few values, or bytes of any kind."""
    body: dict = {"model": "tiny", "max_tokens": 2}
    body |= draw.choice([{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
    for _ in range(draw.randrange(4)):
        body[draw.choice(KEYS)] = draw.choice(VALUES)
    if "messages" in body and draw.random() < 0.3:
        body["messages"] = [
            {draw.choice(KEYS): draw.choice(VALUES)} for _ in range(draw.randrange(3))
        ]
    data = json.dumps(body).encode()
    kind = draw.random()
    if kind < 0.15:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
    if kind < 0.3:
        return data[: draw.randrange(len(data))]
    return b"[" * 5000 if kind < 0.33 else data


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_a_signal_ends_the_command_and_its_answers(folder: Path, number: int) -> None:
    child = serve_command(folder)
    try:
        seen = []
        for line in child.stderr:
            seen.append(line)
            if line.startswith("serving"):
                break
        url = seen[-1].split()[1].rstrip("/")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        stream = client.completions.create(
            model=folder.name,
            prompt="a",
            max_tokens=110,
            stream=True,
            extra_body={"min_tokens": 110},
        )
        next(iter(stream))
        child.send_signal(number)
        code = child.wait(30)
    finally:
        child.kill()
    rest = child.stderr.read()
    assert (code, rest.splitlines()[-1:]) == (0, ["stopped"]), rest
