"""`runs rm` and `runs clean` delete what is named or unused, show it first, and nothing that a kept run needs."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.core.files import cache_folder
from bloomery.core.run_folder import RunFolder
from bloomery.core.run_lock import hold_run_lock
from bloomery.infer.held_model import held_model
from bloomery.runs.cleaning import deletable, delete
from models_for_tests import make_run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs a and b, each with a prepared dataset; one dataset of no run; drafts of dead and living processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        run = make_run(Path("runs") / name, 10)
        (run / "events.jsonl").touch()
        (run / "plan.json").write_text(
            json.dumps(
                {"data": {"prepared": str(tmp_path / "prepared" / name)}, "model": {"source": None}}
            )
        )
        dataset(name)
    dataset("unused")
    for place in (Path(), Path("prepared"), Path("runs"), Path("runs/a/checkpoints")):
        (place / ".tmp-old-4194303999").mkdir()
        (place / f".tmp-mine-{os.getpid()}").mkdir()
    Path(".tmp-notes").write_text("of another program")
    cache_folder().mkdir(parents=True)
    for name, days in (("attention-old.so", 40), ("attention-new.so", 1)):
        (cache_folder() / name).write_bytes(b"x" * 100)
        os.utime(cache_folder() / name, (time.time() - days * 86400,) * 2)
    return tmp_path


def dataset(name):
    folder = Path("prepared") / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "train-00000.bin").write_bytes(bytes(1000))


def call(*words, **more):
    return CliRunner().invoke(cli, ["runs", *words], catch_exceptions=True, **more)


def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_dry_run_and_a_question_without_an_answer_delete_nothing(here):
    before = left(here)
    for words in (
        ("clean", "--dry-run"),
        ("rm", "a", "--dry-run"),
        ("clean", "--dry-run", "--json"),
    ):
        assert call(*words).exit_code == 0
    for words in (("clean",), ("rm", "a")):
        error = call(*words).exception
        assert isinstance(error, UserError) and "--yes" in error.fix
    assert left(here) == before


def test_clean_deletes_what_no_run_uses(here):
    shown = call("clean", "--dry-run", "--json")
    listed = json.loads(shown.stdout)
    done = call("clean", "--yes", "--json")
    gone = json.loads(done.stdout)
    assert gone["deleted"] == listed["deleted"] and (listed["dry_run"], gone["dry_run"]) == (
        True,
        False,
    )
    kinds = sorted(one["kind"] for one in gone["deleted"])
    assert kinds == ["cache", "draft", "draft", "draft", "draft", "prepared dataset"]
    assert gone["bytes"] == sum(one["bytes"] for one in gone["deleted"]) == 1002 + 100
    assert sorted(path.name for path in Path("prepared").iterdir()) == [
        f".tmp-mine-{os.getpid()}",
        "a",
        "b",
    ]
    assert not list(here.rglob(".tmp-old*")) and len(list(here.rglob(".tmp-mine*"))) == 4
    assert Path(".tmp-notes").exists() and [path.name for path in cache_folder().iterdir()] == [
        "attention-new.so"
    ]
    assert "nothing to delete" in call("clean").output


def test_data_is_kept_where_a_run_cannot_say_what_it_uses(here):
    for name in ("plan.json", "recipe.yaml"):
        (Path("runs/b") / name).write_text("{")
    gone = json.loads(call("clean", "--yes", "--json").stdout)
    assert "prepared dataset" not in {one["kind"] for one in gone["deleted"]}
    assert "b uses" in gone["notes"][0] and Path("prepared/unused").exists()


def test_moved_folders_keep_their_data(here, monkeypatch):
    here.rename(here.with_name("moved"))
    monkeypatch.chdir(here.with_name("moved"))
    call("clean", "--yes")
    assert {"a", "b"} <= {path.name for path in Path("prepared").iterdir()}


def test_a_dataset_in_preparation_is_kept(here):
    from bloomery.data.prepare.prepare import locked as preparing

    with preparing(Path("prepared/unused")):
        call("clean", "--yes")
        assert Path("prepared/unused").exists()
    call("clean", "--yes")
    assert not Path("prepared/unused").exists()


def test_rm_deletes_runs_and_says_what_is_lost(here):
    start = here / "runs/a/checkpoints/step-00000010"
    plan = {"data": {"prepared": str(here / "prepared/b")}, "model": {"source": str(start)}}
    Path("runs/b/plan.json").write_text(json.dumps(plan))
    found = call("rm", "a", "--yes")
    assert found.exit_code == 0 and "1 checkpoint; b started from it" in found.output
    assert not Path("runs/a").exists() and Path("runs/b").exists() and Path("prepared/a").exists()
    assert not [path for path in Path("runs").iterdir() if path.name.startswith(".tmp-a")]
    call("clean", "--yes")
    assert not Path("prepared/a").exists() and Path("prepared/b").exists()


def test_rm_refuses_a_run_in_progress_and_other_folders(here):
    with hold_run_lock(RunFolder(here / "runs/a")):
        error = call("rm", "b", "a", "--yes").exception
        assert isinstance(error, UserError) and "bloomery stop" in error.fix
        assert Path("runs/a").exists() and Path("runs/b").exists(), (
            "all are checked before one is deleted"
        )
    project = here / "project"
    project.mkdir()
    (project / "recipe.yaml").write_text("model: {}")
    (project / "thesis.tex").write_text("x")
    error = call("rm", str(project), "--yes").exception
    assert isinstance(error, UserError) and (project / "thesis.tex").exists()
    assert isinstance(call("rm", "nothing", "--yes").exception, UserError)


def test_runs_are_still_listed(here):
    assert {one["name"] for one in json.loads(call("--json").stdout)["runs"]} == {"a", "b"}


def test_rm_refuses_a_run_of_which_a_checkpoint_is_read(here):
    run = Path("runs/a")
    found_before = [deletable(run)]
    with held_model(run):
        named = call("rm", "b", "a", "--yes").exception
        with pytest.raises(UserError) as later:  # somebody began to read after the question
            list(delete(found_before))
        for error in (named, later.value):
            assert isinstance(error, UserError)
            assert "step-00000010 is being read by another command" in error.problem
        assert (run / "checkpoints/step-00000010/model.safetensors").exists()
        assert Path("runs/b").exists()
    assert call("rm", "a", "--yes").exit_code == 0
    assert not run.exists()
