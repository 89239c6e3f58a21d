"""`train --smoke-test`: three real steps, then save, kill, resume, export and report, in a folder that goes away."""

import json
import re
from pathlib import Path

import pytest
from plans_of_runs import plan_of
from runs_of_bloomery import Bloomery

from bloomery.cli import smoke_test as smoke
from bloomery.cli.smoke_test import (
    Requirements,
    SmokeTest,
    _report_requirements,
    shortened,
    smoke_test,
)
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.infer.model_folder import NOT_SAVED, saved_steps
from bloomery.monitor.events import EvalDone, Resumed, Sampled, Saved, StepDone, Warned, read_events
from bloomery.recipe.load import load_recipe

TITLES = [
    "smoke test",
    "ready",
    "first step",
    "evaluation",
    "sampling",
    "save",
    "step",
    "kill",
    "resume",
    "export",
    "report",
    "disk",
    "ready",
    "next",
]
WORDS = ("train", "tiny.yaml", "sample.prompts=[the, a cat]", "sample.max_new_tokens=4")


def test_a_rehearsal_does_all_that_a_run_does_and_leaves_nothing(bloomery: Bloomery) -> None:
    done = bloomery.run(*WORDS, "--smoke-test")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    # of a small validation set
    titles = [line[:11].strip() for line in lines if not line.startswith("warning")]
    assert sorted(titles) == sorted(TITLES)
    assert titles[:3] == TITLES[:3]
    assert titles[-8:] == TITLES[-8:]
    timed = {line[:11].strip() for line in lines if re.search(r" \d[\d.]* (s|ms|min)$", line)}
    assert {
        "first step",
        "evaluation",
        "sampling",
        "save",
        "step",
        "resume",
        "export",
        "report",
    } <= timed
    assert "bitwise identical" in done.stdout
    assert "4 x" not in done.stdout
    assert lines[-1].endswith(
        "bloomery train tiny.yaml 'sample.prompts=[the, a cat]' sample.max_new_tokens=4"
    )
    assert sorted(path.name for path in bloomery.folder.iterdir()) == [
        "prepared",
        "text",
        "tiny.yaml",
    ]


@pytest.mark.soak
def test_with_run_dir_all_of_it_is_kept_and_can_be_looked_at(bloomery: Bloomery) -> None:
    done = bloomery.run(*WORDS, "--smoke-test", "--run-dir", "runs/one")
    assert done.returncode == 0, done.stderr
    events = bloomery.events()
    kinds = [type(event) for event in events]
    assert {EvalDone, Sampled, Saved, Resumed} <= set(kinds)
    saved = next(event for event in events if isinstance(event, Saved))
    (resumed,) = [event for event in events if isinstance(event, Resumed)]
    assert resumed.step == saved.step
    repeated = [
        event for event in events if isinstance(event, StepDone) and event.step == saved.step + 1
    ]
    assert len(repeated) == 2
    assert repeated[0].loss == repeated[1].loss
    assert saved_steps(bloomery.run_dir / "checkpoints")[0] == saved.step
    assert (bloomery.run_dir / "export/model.safetensors").is_file()
    assert (bloomery.run_dir / "report.html").is_file()
    listed = json.loads(bloomery.run("runs", "--json").stdout)
    assert [run["state"] for run in listed["runs"]] == ["stopped"]


@pytest.mark.soak
def test_without_validation_text_it_ends_as_soon_and_says_that_nothing_was_evaluated(
    bloomery: Bloomery,
) -> None:
    words = (
        *WORDS,
        "data.validation=0",
        "train.max_steps=100000",
        "--smoke-test",
        "--run-dir",
        "runs/one",
    )
    done = bloomery.run(*words)
    assert done.returncode == 0, done.stderr
    said = {line[:11].strip(): line[11:].strip() for line in done.stdout.splitlines()}
    assert said["evaluation"] == "none: no validation set"
    assert re.search(r"2 completions +\d+ (ms|s)$", said["sampling"])
    assert max(event.step for event in bloomery.events()) < 100


def step_done(step: int) -> StepDone:
    return StepDone(
        step=step,
        loss=1,
        learning_rate=1,
        grad_norm=1,
        tokens=1,
        tokens_per_second=1,
        sequences_per_second=1,
        step_seconds=1,
        data_wait_seconds=0,
        memory_gib=0,
    )


def test_it_is_killed_after_the_look_whether_or_not_there_was_something_to_evaluate() -> None:
    asked: list[int] = []
    requests = type("Requests", (), {"ask_save": lambda self: asked.append(1)})()
    seen = SmokeTest(plan_of(device="cpu"))
    for event in (step_done(1), Saved(step=1, path="x", bytes=1, seconds=0.0), step_done(2)):
        seen.events.append(event)
        smoke._kill_after_checkpoint(seen, event, requests)
    assert asked == [1]
    seen.events.append(step_done(3))
    with pytest.raises(smoke.KilledOnPurpose):
        smoke._kill_after_checkpoint(seen, seen.events[-1], requests)
    assert sorted(seen.lost_losses) == [2, 3]


def test_a_checkpoint_that_cannot_be_written_ends_the_rehearsal_and_not_the_disk() -> None:
    event = Warned(
        step=1,
        reason=f"the checkpoint of step 1 {NOT_SAVED}: No space left on device (6 GiB are needed)",
    )
    with pytest.raises(
        UserError, match="cannot write the checkpoint: No space left on device"
    ) as caught:
        smoke._kill_after_checkpoint(SmokeTest(plan_of(device="cpu")), event, None)
    assert "--run-dir" in caught.value.fix


def test_what_would_fail_on_day_six_fails_now_and_is_kept(dying_workshop: Path) -> None:
    folder = dying_workshop / "runs"
    (folder / "deaths.json").write_text(json.dumps([[{}, 2, 11]]))
    with pytest.raises(UserError, match="SIGSEGV"):
        smoke_test(load_recipe("tiny.yaml"), folder / "one", devices=None, on_event=lambda *_: None)
    assert list(read_events(folder / "one/events.jsonl"))


def test_a_kill_that_is_not_repeated_bitwise_fails_where_that_is_promised(
    tmp_path: Path, monkeypatch
) -> None:
    seen = SmokeTest(plan_of(device="cpu"), lost_losses={3: 1.0}, repeated_losses={3: 1.0 + 1e-7})
    assert seen.differing == [3]
    assert (
        SmokeTest(
            plan_of(device="cuda"), lost_losses={3: 1.0}, repeated_losses={3: 1.0 + 1e-7}
        ).differing
        == []
    )
    assert SmokeTest(
        plan_of(device="cuda"), lost_losses={3: 1.0}, repeated_losses={3: 1.1}
    ).differing == [3]
    assert SmokeTest(
        plan_of(device="cuda", deterministic=True), lost_losses={3: 1.0}, repeated_losses={3: 1.01}
    ).differing == [3]

    monkeypatch.setattr(smoke, "resume", lambda folder, **_: type("Run", (), {"folder": folder}))
    with pytest.raises(UserError, match="loss of step 3 differs after the resume") as caught:
        smoke._repeat_lost_steps(seen, tmp_path)
    assert "bitwise identical" in caught.value.problem


def test_the_shortened_plan_keeps_the_mathematics() -> None:
    plan = plan_of(steps=195_000)
    short = shortened(plan)
    for section in ("model", "data", "optimizer"):
        assert getattr(short, section) == getattr(plan, section)
    assert short.train == plan.train
    assert shortened(plan_of(steps=3)).train.steps == smoke.UNREACHED_STEPS
    assert shortened(plan_of(steps=None, seconds=60.0)).train.steps is None


@pytest.mark.parametrize(
    ("free", "code", "verdict"), [(7 * GIB, 0, "ready"), (6 * GIB, 1, "not ready")]
)
def test_a_disk_that_is_too_small_is_said(capsys, free: int, code: int, verdict: str) -> None:
    found = Requirements(
        seconds=3600.0 * 24 * 5, checkpoint_bytes=6 * GIB, event_bytes=GIB // 2, free_bytes=free
    )
    assert _report_requirements(found, "tiny.yaml") == code
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith(verdict)
    assert f"6.0 GiB of checkpoints, 512.0 MiB of events; {free / GIB:.1f} GiB free" in out
    assert ("5.0 days" in out) == (code == 0)
