"""`bloomery generate --data PATH --out FILE`: rows that training reads, and files that a killed command continues."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rollouts_for_tests import plan_of, write_recipe

from bloomery.cli import main
from bloomery.core.errors import UserError
from bloomery.data.examples import Example, Message
from bloomery.data.sources.documents import ReadStats, open_dataset, read_documents
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.answer_files import answer_file, shard_of, training_row
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe.schema import Source

ROWS = 40
TEMPLATE = """{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that writes, and prompts."""
    folder = write_recipe(tmp_path_factory.mktemp("answers"))
    teacher = folder / "teacher"
    teacher.mkdir()
    load_tokenizer(folder / "prepared").save(teacher)
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    config = replace(plan_of(folder).model.config, initializer_range=0.2)
    write_model(model_state(fresh_decoder(config, seed=7)), config, teacher)
    rows = [{"prompt": f"def f{number}(x): return"} for number in range(ROWS)]
    (folder / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(folder, out, *options: str) -> list[str]:
    return [
        *("generate", str(folder / "teacher"), "--data", str(folder / "ask.jsonl")),
        *("--out", str(out), "--max-new-tokens", "12", "-d", "cpu", *options),
    ]


def answered(folder, out, *options: str) -> list[dict]:
    try:
        main(command(folder, out, *options))
    except SystemExit as end:
        assert not end.code
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder):
    out = folder / "whole.jsonl"
    answered(folder, out)
    return out


def test_training_reads_the_rows(folder, whole):
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f"def f{n}(x): return" for n in range(ROWS)]
    assert len({row["completion"] for row in rows}) > 1
    dataset = open_dataset(Source(path=str(whole)), "sft")
    documents = list(read_documents(dataset, on_error="stop", stats=ReadStats()))
    assert [document.example.responses[0] for document in documents] == [
        row["completion"] for row in rows
    ]


@pytest.mark.parametrize("num_bytes", [0, 700, 1500])
def test_a_file_that_was_cut_becomes_the_whole_one(folder, whole, tmp_path, num_bytes):
    out = tmp_path / "cut.jsonl"
    settings = whole.with_name("whole.jsonl.settings.json").read_bytes()
    out.with_name("cut.jsonl.settings.json").write_bytes(settings)
    out.write_bytes(whole.read_bytes()[:num_bytes])
    answered(folder, out)
    assert out.read_bytes() == whole.read_bytes()


def test_a_killed_command_is_continued(folder, whole, tmp_path):
    out = tmp_path / "killed.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", *command(folder, out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if out.exists() and out.stat().st_size:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait(60)
    answered(folder, out)
    assert out.read_bytes() == whole.read_bytes()


def test_parts_are_all_rows(folder, whole, tmp_path):
    lines = whole.read_text().splitlines()
    for part in range(3):
        out = tmp_path / f"part-{part}.jsonl"
        answered(folder, out, "--shard", f"{part}/3")
        assert out.read_text().splitlines() == lines[part::3]


def test_other_settings_do_not_continue_a_file(folder, whole, capsys):
    before = whole.read_bytes()
    with pytest.raises(SystemExit):
        main(command(folder, whole, "--seed", "5"))
    assert "begun with other settings: seed" in capsys.readouterr().err
    assert whole.read_bytes() == before


def test_a_file_of_others_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with (
        pytest.raises(UserError, match="no `bloomery generate --out` began it"),
        answer_file(tmp_path / "mine.jsonl", {}),
    ):
        pass


def test_messages_and_tools_stay():
    turns = (Message("system", "Be short."), Message("user", "Hi"))
    row = training_row(Example("a:1", "prompt", turns, (), tools=({"type": "function"},)), "Hello")
    assert row == {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
        ],
        "tools": [{"type": "function"}],
    }


@pytest.mark.parametrize("text", ["4/4", "1", "-1/2", "a/b", "1/0"])
def test_parts_that_are_none(text):
    with pytest.raises(UserError, match="no part of a dataset"):
        shard_of(text)
