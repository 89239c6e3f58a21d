"""What the system refuses to a child is a sentence, not the text of an exception."""

import errno
import json
import os
from pathlib import Path

import pytest
from plans_of_runs import plan_of

from bloomery.core.errors import UserError
from bloomery.core.files import write_durably
from bloomery.core.run_folder import RunFolder
from bloomery.launch import worker
from bloomery.plan.store import read_plan
from bloomery.runs import resume_plan as fallbacks


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EFBIG, "ulimit -f"),
        (errno.EACCES, "permissions"),
        (errno.EIO, "dmesg"),
        (errno.ENOSPC, "free disk space"),
    ],
)
def test_an_error_of_the_system_is_reported_with_its_remedy(
    number: int, said: str, tmp_path, monkeypatch
) -> None:
    def fail(*_):
        raise OSError(number, os.strerror(number), str(tmp_path / "train-00000.bin"))

    monkeypatch.setattr(worker, "die_with_parent", lambda _: None)
    monkeypatch.setattr(worker, "_prepare", fail)
    reader, writer = os.pipe()
    words = [
        "prepare",
        str(tmp_path),
        "--parent",
        str(os.getpid()),
        "--report",
        str(writer),
        "--data",
        str(tmp_path),
    ]
    assert worker.main(words) == worker.FAILED
    report = json.loads(os.read(reader, 10_000))
    os.close(reader)
    os.close(writer)
    assert said in report["fix"] and report["where"].endswith("train-00000.bin")


def test_an_error_that_only_a_bug_explains_keeps_its_traceback(tmp_path, monkeypatch) -> None:
    def fail(*_):
        raise OSError("odd")

    monkeypatch.setattr(worker, "die_with_parent", lambda _: None)
    monkeypatch.setattr(worker, "_prepare", fail)
    words = [
        "prepare",
        str(tmp_path),
        "--parent",
        str(os.getpid()),
        "--report",
        "1",
        "--data",
        str(tmp_path),
    ]
    with pytest.raises(OSError, match="odd"):
        worker.main(words)


@pytest.mark.parametrize(
    "change",
    [
        ("optimizer", "learning_rate", float("nan")),
        ("optimizer", "learning_rate", -1.0),
        ("train", "micro_batch_size", 0),
        ("train", "accumulation", -1),
        ("eval", "every_steps", 0),
        ("checkpoint", "every_steps", 0),
    ],
)
def test_a_plan_with_a_senseless_number_is_one_sentence(change, tmp_path: Path) -> None:
    section, key, value = change
    plan = json.loads(plan_of().model_dump_json())
    plan[section][key] = value
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match=rf"the plan cannot be read: {section}\.{key}"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "content", ["[]", "[" * 100_000 + "]" * 100_000, "{}", '{"plan": 3, "action": 1}', "\0"]
)
def test_a_safer_plan_that_is_none_is_passed_over_once(content: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_durably(folder.fallback, content)
    assert fallbacks.take_fallback(folder) is None
    assert not folder.fallback.exists()
