"""Ollama writes the prompts that the chat template writes."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.data.examples import Message
from bloomery.data.tokenizer.templates import builtin_template
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.ollama import Translation, modelfile, translate
from bloomery.infer.model_folder import find_model
from models_for_tests import make_model

CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ else }}{{ end }}"
    '{{ range .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n<|im_start|>assistant\n'
    '{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
)


def write(folder: Path, template: str) -> Path:
    make_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def evaluated(template: str, messages: list[Message]) -> str:
    """The subset of Go's templates that is written here, by Jinja: the actions differ in their spelling alone."""
    import jinja2

    rules = {
        "{{ if .System }}": "{% if system %}",
        "{{ .System }}": "{{ system }}",
        "{{ else }}": "{% else %}",
        '{{ if eq .Role "user" }}': "{% if m.role == 'user' %}",
        "{{ .Content }}": "{{ m.content }}",
        '{{ else if eq .Role "assistant" }}': "{% elif m.role == 'assistant' %}",
    }
    before, loop, after = template.partition("{{ range .Messages }}")
    body, ends, tail = after.rpartition("{{ end }}{{ end }}")
    before = before.replace("{{ end }}", "{% endif %}")
    text = before + "{% for m in messages %}" + body + "{% endif %}{% endfor %}" + tail
    for go, jinja in rules.items():
        text = text.replace(go, jinja)
    assert loop and ends
    system = next((message.content for message in messages if message.role == "system"), "")
    return (
        jinja2.Environment(keep_trailing_newline=True)
        .from_string(text)
        .render(messages=messages, system=system)
    )


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen"])
def test_the_go_template_writes_what_the_chat_template_writes(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model", builtin_template(name))
    text, notes = modelfile("model.gguf", find_model(source), load_tokenizer(source))
    assert not notes
    go = text.split('"""')[1]
    from bloomery.data.chat.render import Renderer

    tokenizer = load_tokenizer(source)
    for messages in (
        [Message("user", "a b")],
        [
            Message("system", "x"),
            Message("user", "1"),
            Message("assistant", "2"),
            Message("user", "3"),
        ],
    ):
        with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
            expected = tokenizer.decode(renderer.prompt(messages))
        assert evaluated(go, messages) == expected.removeprefix("<s>")


def test_a_template_of_another_form_is_named(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
    source = write(tmp_path / "model", template)
    text, notes = modelfile("model.gguf", find_model(source), load_tokenizer(source))
    assert "TEMPLATE" not in text and "no Go form" in notes[0]


def test_chatml_as_go() -> None:
    def render(messages: list[Message]) -> str:
        turns = [
            f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages
        ]
        return "".join(turns) + "<|im_start|>assistant\n"

    made = translate(render)
    assert isinstance(made, Translation) and made.go() == CHATML


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model", builtin_template("chatml"))
    (source / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 20}')
    monkeypatch.chdir(tmp_path)
    words = ["export", "model", "--to", "ollama", "--out", "mine", "--devices", "cpu"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert "ollama create mine -f Modelfile" in done.stderr
    assert {path.name for path in Path("mine").iterdir()} == {"mine.gguf", "Modelfile"}
    lines = Path("mine/Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./mine.gguf"
    assert {"PARAMETER num_ctx 128", "PARAMETER temperature 0.7", "PARAMETER top_k 20"} <= set(
        lines
    )
