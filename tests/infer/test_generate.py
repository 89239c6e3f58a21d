"""Continuing a text: whole characters, stop texts, the command line, and which folder a MODEL is."""

import json
import random
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

import preloaded
from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.decode import sample_tokens
from bloomery.infer.generate import beginning, generate, load_model
from bloomery.infer.grammar import JsonGrammars
from bloomery.infer.model_folder import model_folder
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling
from bloomery.infer.text import Stops, TextStream
from bloomery.model.io.weights import load_decoder
from models_for_tests import TEXT, make_model, make_run, make_tokenizer

HOT = Sampling(max_new_tokens=60, temperature=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("text", [*TEXT[:2], "🙂", "é" * 30, "", "\ufffd broken \ufffd", "a\u0301"])
def test_streaming_gives_the_same_text_in_whole_characters(text: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    stream = TextStream(tokenizer, [tokenizer.bos_id])
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_random_tokens_equals_decoding_them_where_they_are_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for seed in range(20):
        choose = random.Random(seed)
        text = "".join(choose.choice(["ü", "東", "🙂", "ab", " ", "\n"]) for _ in range(10))
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, [])
        assert "".join(stream.push(token) for token in ids) + stream.flush() == tokenizer.decode(
            ids
        )


def test_generate_is_sampling_after_bos(folder: Path) -> None:
    decoder, tokenizer = load_model(folder)
    ids = [tokenizer.bos_id, *tokenizer.encode("def f")]
    drawn = sample_tokens(
        decoder, ids, Sampling(max_new_tokens=30, temperature=0.0, stop_ids=(tokenizer.eos_id,))
    )
    expected = tokenizer.decode(ids + list(drawn))[len(tokenizer.decode(ids)) :]
    assert (
        "".join(generate(decoder, tokenizer, "def f", Sampling(max_new_tokens=30, temperature=0.0)))
        == expected
    )


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["ab", "cd", "ef"], [], "abcdef"),
        (["ab", "cd", "ef"], ["bcd"], "a"),
        (["ab", "c", "x"], ["bcd"], "abcx"),
        (["a", "a", "a", "b"], ["aab"], "a"),
        (["hello\n", "\n", "rest"], ["\n\n"], "hello"),
        (["hello"], ["lo", "el"], "h"),
        (["ab"], [""], "ab"),
        (["ab", "b"], ["bbb"], "abb"),
    ],
)
def test_stop_texts_are_never_shown(pieces: list[str], stops: list[str], shown: str) -> None:
    watch = Stops(stops)
    told = ""
    for piece in pieces:
        told += watch.push(piece)
        if watch.stopped:
            break
    assert told + ("" if watch.stopped else watch.flush()) == shown


def test_generate_stops_before_a_stop_text(folder: Path) -> None:
    decoder, tokenizer = load_model(folder)
    whole = "".join(generate(decoder, tokenizer, "def", HOT))
    stop = whole[10:13]
    assert "".join(generate(decoder, tokenizer, "def", HOT, [stop])) == whole[: whole.index(stop)]


def test_a_prompt_that_fills_the_context(folder: Path) -> None:
    decoder, tokenizer = load_model(folder)
    with pytest.raises(UserError, match="128"):
        generate(decoder, tokenizer, "東" * 200, HOT)
    assert "".join(generate(decoder, tokenizer, "\x00" * 120, HOT)), "what room there is, is used"


class TestModelFolder:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_run(tmp_path_factory.mktemp("runs") / "tiny", 10, 20, 30, best=20)

    @pytest.mark.parametrize(
        ("step", "name"), [("best", 20), ("last", 30), ("10", 10), ("00010", 10)]
    )
    def test_steps(self, run: Path, step: str, name: int) -> None:
        assert model_folder(run, step).name == f"step-{name:08d}"

    def test_a_folder_is_itself(self, folder: Path, run: Path) -> None:
        assert model_folder(folder) == folder
        checkpoint = run / "checkpoints" / "step-00000010"
        assert model_folder(checkpoint) == checkpoint
        with pytest.raises(UserError, match="--step 10 does not apply"):
            model_folder(folder, "10")

    @pytest.mark.parametrize("step", ["11", "-1", "newest", ""])
    def test_steps_that_are_not_there(self, run: Path, step: str) -> None:
        with pytest.raises(UserError, match="10, 20, 30") as caught:
            model_folder(run, step)
        assert caught.value.code == 2

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no such folder"):
            model_folder(tmp_path / "none")
        with pytest.raises(UserError, match="neither a model nor a run"):
            model_folder(tmp_path)
        with pytest.raises(UserError, match="no checkpoint yet"):
            model_folder(make_run(tmp_path / "run"))

    def test_damage_is_passed_over_loudly(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = make_run(tmp_path / "run", 10, 20)
        (run / "checkpoints" / "step-00000020" / "model.safetensors").write_bytes(b"x")
        assert model_folder(run, "last").name == "step-00000010"
        assert "damaged" in capsys.readouterr().err
        with pytest.raises(UserError, match="damaged"):
            model_folder(run, "20")


class TestCommandLine:
    def bloomery(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return preloaded.run([sys.executable, "-m", "bloomery", *words], text=True, cwd=cwd)

    def test_a_prompt_is_continued_on_stdout(self, folder: Path) -> None:
        words = (
            "generate",
            str(folder),
            "--prompt",
            "def",
            "--max-new-tokens",
            "20",
            "--temperature",
            "0",
        )
        done = self.bloomery(*words, cwd=folder)
        decoder, tokenizer = load_decoder(folder), load_tokenizer(folder)
        expected = "".join(
            generate(decoder, tokenizer, "def", Sampling(max_new_tokens=20, temperature=0.0))
        )
        assert (done.returncode, done.stdout) == (0, "def" + expected + "\n")

    def test_a_run_by_its_name_and_json(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        make_run(tmp_path / "runs" / "tiny", 10)
        (tmp_path / "prompts.txt").write_text("def\n\nclass\n")
        words = (
            "generate",
            "tiny",
            "--prompts",
            "prompts.txt",
            "--json",
            "--max-new-tokens",
            "8",
            "--top-k",
            "5",
            "--top-p",
            "0.9",
            "--min-p",
            "0.01",
            "--repetition-penalty",
            "1.1",
            "--stop",
            "zzz",
            "--seed",
            "4",
            "--step",
            "last",
        )
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert [result["prompt"] for result in json.loads(done.stdout)["results"]] == [
            "def",
            "class",
        ]

    def test_prompts_decode_together_and_speculate_as_each_alone(
        self, folder: Path, tmp_path: Path
    ) -> None:
        prompts = [
            "def f(x):",
            "a",
            "für Größe, naïve café",
            "return x",
            "x",
            "def f(x): def f(x): de",
            "1",
            "+",
            "é",
        ]
        (tmp_path / "prompts.txt").write_text("\n".join(prompts))
        words = (
            "generate",
            str(folder),
            "--max-new-tokens",
            "12",
            "--temperature",
            "0.7",
            "--stop",
            "é",
        )
        alone = [
            CliRunner().invoke(cli, (*words, "--prompt", text), catch_exceptions=False).stdout
            for text in prompts
        ]
        for more in ((), ("--prompt-lookup", "3"), ("--draft", str(folder))):
            done = CliRunner().invoke(
                cli, (*words, "--prompts", str(tmp_path / "prompts.txt"), "--jsonl", *more)
            )
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            assert [line["prompt"] + line["text"] + "\n" for line in lines] == alone
            assert ("accepted" in done.stderr) == bool(more)

    def test_json_of_a_schema(self, folder: Path, tmp_path: Path) -> None:
        fields = {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}}
        schema = {
            "type": "object",
            "properties": fields,
            "required": [*fields],
            "additionalProperties": False,
        }
        path = tmp_path / "schema.json"
        path.write_text(json.dumps(schema))
        words = (
            "generate",
            str(folder),
            "--prompt",
            "def",
            "--max-new-tokens",
            "60",
            "--json",
            "--json-schema",
            str(path),
        )
        for seed in range(4):
            more = "--seed", str(seed), "--prompt-lookup", "4"
            done = CliRunner().invoke(cli, (*words, *more), catch_exceptions=False)
            found = json.loads(json.loads(done.stdout)["results"][0]["text"])
            assert isinstance(found["ok"], bool) and found["kind"] in ("a", "b")
        path.write_text('{"type": "bogus"}')
        done = CliRunner().invoke(cli, words)
        assert isinstance(done.exception, UserError) and "bogus" in done.exception.problem
        grammars = JsonGrammars(load_tokenizer(folder), load_decoder(folder).config.vocab_size, [0])
        with closing(grammars):
            for endless_or_half in ({"$ref": "#"}, {"const": "\ud800"}):
                with pytest.raises(UserError, match="not supported"):
                    grammars.start(endless_or_half)
            # A thousand definitions, each within the one before, overflow the stack of the library.
            within = {
                f"d{number}": {
                    "anyOf": [{"type": "array", "items": {"$ref": below}}, {"$ref": below}]
                }
                for number in range(1000)
                for below in [f"#/$defs/d{number + 1}"]
            }
            with pytest.raises(UserError, match="too complex"):
                grammars.start({"$defs": {**within, "d1000": {}}, "$ref": "#/$defs/d0"})
            assert grammars.start({"type": "boolean"})

    @pytest.mark.parametrize(
        "words",
        [
            ("--prompt", "a", "--draft", "none"),
            ("--prompt", "a", "--draft", ".", "--prompt-lookup", "2"),
            (),
            ("--prompt", "a", "--prompts", "b"),
            ("--prompts", "none.txt"),
            ("--prompt", "a", "--temperature", "-1"),
            ("--prompt", "a", "--top-p", "0"),
        ],
    )
    def test_wrong_words(self, folder: Path, words: tuple[str, ...]) -> None:
        done = self.bloomery("generate", str(folder), *words, cwd=folder)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_turns_that_begin_alike_are_read_once_and_say_the_same(family: str, tmp_path: Path) -> None:
    """Gemma 2 has windows: what they have let go is read again."""
    decoder, _ = load_model(make_model(tmp_path, family))
    past, ids, cold = Past(decoder), [1, 5, 9, 20, 33], Sampling(max_new_tokens=12, temperature=0.0)
    for more in ([7, 8], [40, 41, 42], [3]):
        said = list(sample_tokens(decoder, ids, cold, past))
        assert said == list(sample_tokens(decoder, ids, cold))
        (held,) = past.ids
        assert held == ids + said[: len(held) - len(ids)] and len(held) >= len(ids)
        ids = [*ids, *said, *more]
    if not any(layer.rolls for layer in past.cache.layers):
        assert past.reuse(ids[:10], 50) == ids[9:10]
    assert list(sample_tokens(decoder, [2, *ids[1:]], cold, past)) == list(
        sample_tokens(decoder, [2, *ids[1:]], cold)
    )


def test_a_past_that_was_interrupted_is_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _ = load_model(folder)
    past, cold = Past(decoder), Sampling(max_new_tokens=4, temperature=0.0)
    said = list(sample_tokens(decoder, [1, 5, 9], cold, past))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(decoder, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(sample_tokens(decoder, [1, 5, 9, *said, 6], cold, past))
    assert past.ids == [[]]
    ids = [1, 5, 9, *said, 6]
    assert list(sample_tokens(decoder, ids, cold, past)) == list(sample_tokens(decoder, ids, cold))


def test_from_python(folder: Path, tmp_path: Path) -> None:
    """Functions of `bloomery` that share a name with a package stay functions when that package is imported."""
    import bloomery
    from bloomery.export.layouts import Exported
    from bloomery.plan.types import RunPlan

    assert all(
        callable(getattr(bloomery, name)) for name in set(bloomery.__all__) - {"__version__"}
    )
    cold = Sampling(max_new_tokens=5, temperature=0.0)
    text = bloomery.generate(folder, "def ", max_new_tokens=5, temperature=0.0, device="cpu")
    assert text == "".join(generate(*load_model(folder), "def ", cold))
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n")
    assert bloomery.evaluate(folder, tmp_path / "a.txt", device="cpu").loss > 0
    done = bloomery.export(folder, tmp_path / "out", verify=False, device="cpu")
    assert isinstance(done, Exported) and done.folder == tmp_path / "out" and RunPlan is not None


@pytest.mark.parametrize("adds_bos", [True, False])
def test_greedy_text_is_that_of_transformers(folder: Path, tmp_path: Path, adds_bos: bool) -> None:
    """Whether the tokenizer adds a begin token or, as those of GPT-2, SmolLM2 and Qwen, only has one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shutil.copytree(folder, tmp_path / "model")
    if not adds_bos:
        path = tmp_path / "model" / "tokenizer.json"
        described = {**json.loads(path.read_text()), "post_processor": None}
        path.write_text(json.dumps(described))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    decoder, tokenizer = load_model(tmp_path / "model")
    for prompt in ("def f(x):", "<s>a</s> b", "import"):
        ids = library.encode(prompt)
        if prompt.startswith("<s>") and adds_bos:
            ids = ids[1:]  # no second begin token is added
        assert beginning(tokenizer, prompt) == ids
        with torch.no_grad():
            written = theirs.generate(
                torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=3
            )[0, len(ids) :].tolist()
        sampling = Sampling(max_new_tokens=12, temperature=0.0)
        found = list(sample_tokens(decoder, beginning(tokenizer, prompt), sampling))
        assert found[: len(written)] == written
