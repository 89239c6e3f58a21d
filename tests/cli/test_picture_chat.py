"""`chat` and `generate` with pictures, as a person types them, answer as transformers does."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import bloomery
from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.data.chat.render import chat_format
from bloomery.data.examples import PICTURE, Message
from bloomery.infer.generate import continued, load_model
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import find_model
from bloomery.infer.picture_prompts import Eyes, open_eyes, picture_source
from bloomery.infer.sampling import Sampling
from bloomery.model import compiled_step
from models_for_tests import make_model
from pictures_for_tests import answer_of_transformers, png, save_base

GREEDY = ["--max-new-tokens", "6", "--temperature", "0", "--top-p", "1"]
IMAGE = {"type": "image"}


def typed(*words: object, lines: str | None = None) -> Result:
    return CliRunner().invoke(
        cli, [str(word) for word in words], input=lines, standalone_mode=False
    )


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    save_base("qwen3_vl", folder / "model", weights=True, seed=1)  # whose answers are long
    (folder / "red one.png").write_bytes(png(40, 60, "red"))
    (folder / "blue.png").write_bytes(png(90, 50, "blue"))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[str]:
    """To a picture and a question, and to two pictures and a question after that."""
    first = [{"role": "user", "content": [IMAGE, text("Color?")]}]
    pictures = [(folder / name).read_bytes() for name in ("red one.png", "blue.png")]
    answer = answer_of_transformers(folder / "model", first, pictures[:1], 6)
    turns = [
        *first,
        {"role": "assistant", "content": [text(answer)]},
        {"role": "user", "content": [IMAGE, IMAGE, text("And now?")]},
    ]
    again = answer_of_transformers(
        folder / "model", turns, [pictures[0], pictures[1], pictures[0]], 6
    )
    return [answer, again]


def test_a_chat_has_the_pictures_of_its_turns(folder, answers, monkeypatch):
    monkeypatch.chdir(folder)
    dropped = str(folder / "red one.png").replace(" ", "\\ ")  # as terminals write a dropped file
    lines = [
        f"/image {folder / 'blue.png'}",
        "/image off",
        f"/image '{folder / 'red one.png'}'",
        "Color?",
        f"/image {folder / 'blue.png'}",
        f"/image {dropped}",
        "And now?",
        f"/save {folder / 'talk.jsonl'}",
    ]
    chat = typed("chat", folder / "model", *GREEDY, lines="\n".join(lines) + "\n")
    assert chat.return_value == 0, chat.stderr
    # White space at the ends of replies is not printed, nor are control characters.
    assert chat.stdout == "".join(harmless(answer).strip() + "\n" for answer in answers)
    assert "(2 images with the next message)" in chat.stderr and "(no images)" in chat.stderr
    # The file is a dataset beside its pictures.
    turns = json.loads((folder / "talk.jsonl").read_text())["messages"]
    assert turns[0]["content"] == [{**IMAGE, "image": "red one.png"}, text("Color?")]
    rows = typed("generate", folder / "model", "--data", "talk.jsonl", *GREEDY, "--json")
    (result,) = json.loads(rows.stdout)["results"]
    assert result == {
        "row": "talk.jsonl:1",
        "prompt": "<image><image>And now?",
        "answer": answers[1],
        "text": answers[1],
    }


def test_generate_puts_images_before_each_prompt(folder, answers):
    words = ["generate", folder / "model", "--image", folder / "red one.png", *GREEDY]
    one = typed(*words, "--prompt", "Color?")
    assert one.stdout == f"Color?\n{answers[0]}\n"
    (folder / "prompts.txt").write_text("Color?\nWhat?\n")
    several = typed(*words, "--prompts", folder / "prompts.txt", "--jsonl")
    results = [json.loads(line) for line in several.stdout.splitlines()]
    assert results[0] == {"prompt": "Color?", "text": answers[0]} and len(results) == 2


def test_a_script_asks_with_images(folder, answers):
    model = bloomery.load(folder / "model", device="cpu")
    asked = {"max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0}
    assert model.chat("Color?", images=[folder / "red one.png"], **asked) == answers[0]
    assert model.chat("Color?", **asked) != answers[0]
    with pytest.raises(UserError, match="cannot be read"):
        model.chat("Color?", images=["none.png"])


def test_rows_of_several_formats_are_answered_in_order(folder, answers, monkeypatch):
    monkeypatch.chdir(folder)
    part = {**IMAGE, "image": "red one.png"}
    rows = [
        {"messages": [{"role": "user", "content": [part, text("Color?")]}]},
        {"messages": [{"role": "user", "content": "Text alone?"}]},
        {"messages": [{"role": "user", "content": "Color?"}], "images": ["red one.png"]},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generated = typed("generate", folder / "model", "--data", "prompts.jsonl", *GREEDY, "--jsonl")
    results = [json.loads(line) for line in generated.stdout.splitlines()]
    assert [result["row"] for result in results] == [f"prompts.jsonl:{n}" for n in (1, 2, 3)]
    assert results[0] == {
        "row": "prompts.jsonl:1",
        "prompt": "<image>Color?",
        "text": answers[0],
    }
    assert results[2]["text"] == answers[0] != results[1]["text"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--data", "talk.jsonl", "--prompt", "a"], "--data has its own prompts"),
        (["--prompt", "a", "--image", "none.png"], "file cannot be read"),
        (["--prompt", "a", "--image", "https://a.b/c.png"], "the image is on the network"),
        (["--prompt", "a", "--image", "bad.png"], "the file is damaged"),
        (["--prompt", "a", "--image", "talk.txt"], "the file is none of JPEG"),
        (["--data", "bad.jsonl"], "is damaged"),
        (["--data", "talk.txt"], "neither conversations nor prompts"),
    ],
)
def test_what_cannot_be_read_is_said(folder, monkeypatch, words, problem):
    monkeypatch.chdir(folder)
    (folder / "bad.png").write_bytes(png()[:-30])
    (folder / "talk.txt").write_text("words")
    row = {"messages": [{"role": "user", "content": [{**IMAGE, "image": "bad.png"}]}]}
    (folder / "bad.jsonl").write_text(json.dumps(row))
    refused = typed("generate", "model", *words).exception
    assert problem in refused.problem and refused.fix
    if words[0] == "--data" and "bad" in words[1]:
        assert "bad.jsonl:1" in refused.where


@pytest.mark.parametrize("options", [[], ["--top-scores", "2"]])
def test_no_dataset_has_answers_to_pictures(folder, tmp_path, monkeypatch, options):
    """Said before anything is decoded: the tower is not loaded for them."""
    monkeypatch.chdir(folder)
    turns = [{"role": "user", "content": [{**IMAGE, "image": "red one.png"}, text("Color?")]}]
    (folder / "seen.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    words = ["generate", "model", "--data", "seen.jsonl", "--out", tmp_path / "answers.jsonl"]
    refused = typed(*words, *GREEDY, *options).exception
    assert isinstance(refused, UserError), refused
    assert "answers to pictures as a dataset" in refused.problem
    assert refused.where == "seen.jsonl:1"


def test_a_picture_that_is_refused_leaves_the_chat_as_it_was(folder):
    (folder / "bad.png").write_bytes(png()[:-30])
    lines = f"/image {folder / 'bad.png'}\n/image\nhello\n"
    chat = typed("chat", folder / "model", *GREEDY, lines=lines)
    assert "the file is damaged" in chat.stderr and "(no images)" in chat.stderr
    assert chat.stdout.endswith("\n")


def test_a_model_that_reads_text_says_so(folder, tmp_path):
    model = make_model(tmp_path)
    picture = folder / "blue.png"
    chat = typed("chat", model, lines=f"/image {picture}\n")
    assert "this model reads text, and no images" in chat.stderr and "/image" not in chat.stdout
    refused = typed("generate", model, "--prompt", "a", "--image", picture).exception
    assert "reads text, and no pictures" in refused.problem
    assert typed("generate", model, "--prompt", "a", "--max-new-tokens", "1").exit_code == 0


def test_a_tower_that_is_loaded_late_sees_the_same(tmp_path, monkeypatch):
    """Beside a compiled step, which a model has before anybody names a picture."""
    save_base("gemma3", tmp_path / "model", weights=True)
    (tmp_path / "red.png").write_bytes(png(40, 60, "red"))
    files = find_model(tmp_path / "model")
    sampling = Sampling(max_new_tokens=6, temperature=0.0)

    def answer(decoder, tokenizer, encoder, reference: str) -> str:
        with chat_format(tokenizer, None, encoder) as form:
            ids = form.encode([Message("user", PICTURE + "Color?", pictures=(reference,))])
            return "".join(continued(decoder, tokenizer, ids, sampling))

    decoder = load_used(files, Use("cpu"), decodes=True)
    monkeypatch.setattr(compiled_step, "LEAST", 0)
    late, tokenizer = load_model(tmp_path / "model", use=Use("cpu"))
    expected = answer(decoder, tokenizer, open_eyes(decoder, files), str(tmp_path / "red.png"))
    source = picture_source(files)
    assert source is not None and late.vision is None
    text_before = "".join(continued(late, tokenizer, tokenizer.encode("ab"), sampling))
    eyes = Eyes(late, files, source)
    assert answer(late, tokenizer, eyes.encoder, eyes.reference(tmp_path / "red.png")) == expected
    assert text_before == "".join(continued(late, tokenizer, tokenizer.encode("ab"), sampling))
