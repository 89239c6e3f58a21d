"""`bloomery demo vision` in small: training from random weights, a kill, the resume, right answers and the control."""

import base64
import html
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText

import preloaded
from bloomery.cli import cli, demo, demo_vision
from bloomery.data.pictures.references import OWN_DATA
from bloomery.data.sources.shapes import other_examples
from bloomery.monitor.events import Resumed, StepDone, read_events

SMALL = """
extends: demo-vision
data: {builtin: null, path: rows.jsonl, validation: 20%}
train: {max_steps: 8, tokens_per_step: 256, micro_batch_size: 2}
checkpoint: {every: 2 steps}
eval: {every: 2 steps}
"""


@pytest.mark.soak
def test_the_demo_from_random_weights_to_the_report(tmp_path, monkeypatch):
    """Trains in processes of its own, so it takes longer than others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": preloaded.Popen})
    )
    rows = []
    for example in other_examples(40):
        (question,) = example.prompt
        (reference,) = question.pictures
        part = {"type": "image", "base64": reference.removeprefix(OWN_DATA)}
        content = [part, {"type": "text", "text": question.content[1:]}]
        answer = {"role": "assistant", "content": example.responses[0][0].content}
        rows.append({"messages": [{"role": "user", "content": content}, answer]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "vision.yaml").write_text(SMALL)
    monkeypatch.setattr(demo_vision, "RECIPE", "vision.yaml")
    monkeypatch.setattr(demo_vision, "NUM_REPEATED", 1)
    monkeypatch.setattr(demo_vision, "KILL_AT", 0.5)
    monkeypatch.setattr(demo_vision, "NUM_ASKED", 18)
    printed = CliRunner().invoke(cli, ["demo", "vision", "--json", "--run-dir", "out"])
    assert printed.exit_code == 0, printed.output + str(printed.exception)
    result = json.loads(printed.stdout)

    # Step 5 comes after the checkpoint of step 4, before the kill and again after it.
    assert result["killed_at_step"] == 5
    assert (result["repeated_steps"], result["differing_steps"]) == (1, 0)
    events = list(read_events(Path("out/events.jsonl")))
    assert any(isinstance(event, Resumed) for event in events)
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps.count(5) == 2 and steps[-1] == 8

    assert list(result["accuracies"]) == ["step 0", "step 2", "step 4", "step 6", "step 8"]
    assert result["accuracy"] == result["accuracies"]["step 8"]
    assert 0 <= result["control_accuracy"] <= 1 and result["seconds"] > 0
    lines = printed.stderr.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert "losses and gradients bitwise identical" in printed.stderr
    assert any(line.split()[:1] == ["shuffled"] for line in lines)
    folder = Path("out/export/hf")
    report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)[1]
    assert [*report["missing_keys"], *report["unexpected_keys"]] == []
    assert (folder / "preprocessor_config.json").is_file()
    page = html.unescape(Path(result["report"]).read_text())
    assert "Right answers about new pictures" in page


def test_new_pictures_are_none_of_the_dataset():
    asked = {example.prompt[0].pictures[0] for example in other_examples(demo_vision.NUM_ASKED)}
    assert len(asked) == demo_vision.NUM_ASKED
    assert all(
        base64.b64decode(each.removeprefix(OWN_DATA)).startswith(b"\x89PNG") for each in asked
    )
    from bloomery.data.sources import shapes

    trained = {picture for picture, _, _ in shapes._rows(0, shapes.NUM_PICTURES)}
    assert not asked & trained
