"""What `train` says about the dataset of a run before its first step."""

import json
from pathlib import Path

import pytest

from bloomery.monitor.events import Warned, read_events
from bloomery.recipe.load import load_recipe
from bloomery.runs.lifecycle import start


def test_train_names_the_role_of_each_file_and_what_is_too_small(
    paper_workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only `prepare --check` used to say so, and almost everybody runs `train` alone."""
    (paper_workshop / "runs/deaths.json").write_text("[]")
    (paper_workshop / "d").mkdir()
    for name, rows in {"train": range(12), "validation": range(10, 13), "test": range(3)}.items():
        lines = [
            json.dumps({"text": f"row {row} of some words that are long enough"}) for row in rows
        ]
        (paper_workshop / f"d/{name}.jsonl").write_text("\n".join(lines) + "\n")
    overrides = (
        "data.path=d",
        "data.glob=*.jsonl",
        "data.validation=auto",
        "data.sequence_length=64",
    )
    start(load_recipe("tiny.yaml", overrides), run_dir=paper_workshop / "runs/one")
    roles = "files      training: d/train.jsonl; validation: d/validation.jsonl; left out: d/test.jsonl\n"
    assert roles in capsys.readouterr().err
    events = read_events(paper_workshop / "runs/one/events.jsonl")
    reasons = [event.reason for event in events if isinstance(event, Warned)]
    assert (
        "only 10 rows to train on: the model will memorize them; use a few hundred or more"
        in reasons
    )
    assert "d/train.jsonl: 2 rows are also in the validation set; not trained on" in reasons
    assert any("less than one sequence: its loss is noisy" in reason for reason in reasons)
