"""`bloomery demo chat` on a tiny base: both ways of training, the comparison, the reports"""

import html
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import preloaded
from bloomery.cli import cli, demo
from bloomery.cli import demo_chat as demo_chat
from bloomery.cli.demo import free_folders
from bloomery.cli.demo_chat import is_function
from bloomery.monitor.events import EventLog, RunEnded
from models_for_tests import make_run

LORA = """
extends: demo-chat-lora
data: {path: talk.jsonl, sequence_length: 128, validation: 30%}
train: {max_steps: 3, tokens_per_step: 256, micro_batch_size: 2, compile: false}
"""
FULL = "extends: lora.yaml\nadapter: {kind: none}\n"


@pytest.mark.parametrize(
    ("text", "ended", "good"),
    [
        ("def f(x):\n    return x", True, True),
        ("@property\ndef f(self):\n    return 1", True, True),
        ("async def f():\n    pass", True, True),
        ("def f(x):\n    return x", False, False),
        ("def f(x:", True, False),
        ("x = 1", True, False),
        ("def f():\n    '\0'", True, False),
        ("", True, False),
    ],
)
def test_an_answer_in_form_is_a_function_that_ends_and_is_python(text, ended, good):
    assert is_function(text, ended) is good


def test_a_finished_first_demo_is_found_and_a_killed_one_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert demo_chat.find_base() is None
    run = make_run(tmp_path / "runs/demo", 1)
    assert demo_chat.find_base() is None
    with EventLog(run / "events.jsonl") as emit:
        emit(RunEnded(step=1, status="done"))
    assert demo_chat.find_base() == run / "export" / "hf"
    assert (run / "export/hf/config.json").is_file()
    make_run(tmp_path / "runs/demo-chat-lora", 1)
    assert demo_chat.find_base() == run / "export" / "hf"
    free = free_folders(*demo_chat.RECIPES.values())
    assert [folder.name for folder in free] == ["demo-chat-lora-2", "demo-chat-full-2"]


def test_the_demo_from_base_to_reports(tmp_path, monkeypatch):
    """Two trainings in processes of their own, so it takes longer than others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": preloaded.Popen})
    )
    monkeypatch.setattr(demo_chat, "NUM_PROMPTS", 4)
    monkeypatch.setattr(demo_chat, "MAX_TOKENS", 40)
    run = make_run(tmp_path / "runs/demo", 1)
    with EventLog(run / "events.jsonl") as emit:
        emit(RunEnded(step=1, status="done"))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"f {n}"},
                {"role": "assistant", "content": f"def f{n}(x): x"},
            ]
        }
        for n in range(40)
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lora.yaml").write_text(LORA)
    (tmp_path / "full.yaml").write_text(FULL)
    monkeypatch.setattr(demo_chat, "RECIPES", {"lora": "lora.yaml", "full": "full.yaml"})
    told = CliRunner().invoke(cli, ["demo", "chat", "--json", "--run-dir", "out"])
    assert told.exit_code == 0, told.output + str(told.exception)
    result = json.loads(told.stdout)
    base, lora, full = result["models"]
    assert (base["name"], lora["name"], full["name"]) == ("base", "lora", "full")
    assert base["trainable"] is None and 0 < lora["trainable"] < full["trainable"]
    assert base["loss"] != lora["loss"] != full["loss"] and all(
        m["memory_gib"] > 0 for m in (lora, full)
    )
    assert "LoRA, rank 16" in told.stderr and "full fine-tuning" in told.stderr
    assert max(map(len, told.stderr.splitlines())) <= 100
    pages = [html.unescape(Path(report).read_text()) for report in result["reports"]]
    assert all("Responses before and after training" in page for page in pages)
    assert Path(result["gguf"]).read_bytes()[:4] == b"GGUF"
