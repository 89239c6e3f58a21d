"""`bloomery demo chat` on a tiny base: training, the comparison, the report"""

import html
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner

import preloaded
from bloomery.cli import cli, demo
from bloomery.cli import demo_chat as demo_chat
from bloomery.cli.demo import free_folder
from bloomery.monitor.events import EventLog, RunEnded
from models_for_tests import make_run

LORA = """
extends: demo-chat-lora
data: {path: talk.jsonl, sequence_length: 128, validation: 30%}
train: {max_steps: 3, tokens_per_step: 256, micro_batch_size: 2, compile: false}
"""


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
    assert free_folder(demo_chat.RECIPE).name == "demo-chat-lora-2"


def test_the_demo_from_base_to_report(tmp_path, monkeypatch):
    """Trains in a process of its own, so it takes longer than others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": preloaded.Popen})
    )
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
    monkeypatch.setattr(demo_chat, "RECIPE", "lora.yaml")
    told = CliRunner().invoke(cli, ["demo", "chat", "--json", "--run-dir", "out"])
    assert told.exit_code == 0, told.output + str(told.exception)
    result = json.loads(told.stdout)
    base, lora = result["models"]
    assert (base["name"], lora["name"]) == ("base", "lora") and base["loss"] != lora["loss"]
    assert "rank 16, base weights frozen" in told.stderr
    assert max(map(len, told.stderr.splitlines())) <= 100
    assert result["folder"] == "out"
    page = html.unescape(Path(result["report"]).read_text())
    assert "Validation loss" in page and f"{lora['loss']:.2f} nats per token" in page
