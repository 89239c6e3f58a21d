"""Which code of a run its user has asked for: moved, copied, edited, in another home, and from somebody else."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rollouts_for_tests import RECIPE, write_recipe
from runs_of_bloomery import PATIENCE_SECONDS, Bloomery

from bloomery.core.errors import UserError
from bloomery.monitor.events import Warned
from bloomery.plan.store import begin
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Recipe
from bloomery.runs.consent import note_code, noted_commands, refuse_foreign_rewards, reward_files


def made_run(folder: Path, rewards: Path) -> tuple[Path, Recipe]:
    """A run folder as it begins, whose recipe names a function of this file."""
    text = RECIPE.replace("my_rewards.py", str(rewards))
    (folder / "rl.yaml").write_text(text)
    run = folder / "runs/one"
    run.mkdir(parents=True)
    begin(run, {"recipe.yaml": text})
    return run, load_recipe(folder / "rl.yaml").recipe


def refused(run: Path, recipe: Recipe) -> bool:
    try:
        refuse_foreign_rewards(run, recipe, command="resume")
    except UserError as error:
        assert "--trust-code" in error.fix and "bloomery resume" in error.fix
        return True
    return False


def test_the_notes_of_rewards_are_kept_where_the_run_or_its_file_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def spaces(completions, **_): ...\n")
    run, recipe = made_run(tmp_path, rewards)
    assert refused(run, recipe)
    note_code(run, files=reward_files(recipe))
    assert not refused(run, recipe)

    # Moved, copied, behind a link, and with an edited file in its old place.
    moved = run.rename(tmp_path / "runs/two")
    assert not refused(moved, recipe)
    (tmp_path / "link").symlink_to(moved)
    assert not refused(tmp_path / "link", recipe)
    assert not refused(shutil.copytree(moved, tmp_path / "copy"), recipe)
    rewards.write_text("def spaces(completions, **_): return [0.0] * len(completions)\n")
    assert not refused(moved, recipe)

    # As in another container: the same content in another place.
    rewards.write_text("def spaces(completions, **_): ...\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(rewards, elsewhere)
    _, recipe_elsewhere = made_run(elsewhere, elsewhere / "my_rewards.py")
    assert not refused(moved, recipe_elsewhere)
    (elsewhere / "my_rewards.py").write_text("import os\n")
    assert refused(moved, recipe_elsewhere)


def test_a_run_of_somebody_else_has_no_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def spaces(completions, **_): ...\n")
    run, recipe = made_run(tmp_path, rewards)
    note_code(run, commands=["./hook.sh"], files=reward_files(recipe))
    (tmp_path / "other").mkdir()
    other, _ = made_run(tmp_path / "other", rewards)
    assert refused(other, recipe)
    assert noted_commands(run, ["./hook.sh", "true"]) == {"./hook.sh"}
    assert not noted_commands(other, ["./hook.sh"])


def test_a_file_in_the_runs_own_folder_counts_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is received a second time has the same id and may have other code."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    inside = tmp_path / "runs/one/my_rewards.py"
    run, recipe = made_run(tmp_path, inside)
    inside.write_text("def spaces(completions, **_): ...\n")
    note_code(run, files=reward_files(recipe))
    assert not refused(run, recipe)
    inside.write_text("import os\n")
    assert refused(run, recipe)


EDITS = ("train.max_steps=2", "eval.every=none", "checkpoint.every=1 steps")


def start(bloomery: Bloomery, *words: str, home: str, **variables: str) -> "subprocess.Popen[str]":
    state = str(bloomery.folder / home)
    return bloomery.start(*words, XDG_STATE_HOME=state, **variables)


def test_a_run_with_rewards_resumes_where_it_is_moved_and_where_it_is_trusted(
    tmp_path: Path,
) -> None:
    bloomery = Bloomery(write_recipe(tmp_path))
    longer = ("resume", "two", "train.max_steps=3")
    for home, words, code in (
        ("first", ("train", "rl.yaml", "--run-dir", "runs/one", *EDITS), 0),
        ("second", longer, 1),
        ("first", longer, 0),
        ("second", ("resume", "two", "train.max_steps=4", "--trust-code"), 0),
    ):
        with start(bloomery, *words, home=home) as process:
            _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == code, err
        assert ("--trust-code" in err) == (code == 1)
        if words[0] == "train":
            bloomery.run_dir.rename(tmp_path / "runs/two")


@pytest.mark.soak
def test_a_job_that_is_started_again_in_another_container_resumes_its_run(tmp_path: Path) -> None:
    """Both ranks, as the job starts them each time: the recipe that is passed again names the rewards."""
    bloomery = Bloomery(write_recipe(tmp_path))
    for home in ("first", "second"):
        ranks = []
        for rank in ("0", "1"):
            variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
            variables |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "rl-job"}
            words = ("train", "rl.yaml", "--run-dir", "runs/one", *EDITS)
            ranks.append(start(bloomery, *words, home=home, **variables))
        errors = [rank.communicate(timeout=PATIENCE_SECONDS)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_home_that_cannot_be_written_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    bloomery = Bloomery(write_recipe(tmp_path))
    words = ("train", "rl.yaml", "--run-dir", "runs/one", "train.max_steps=1", "eval.every=none")
    with bloomery.start(*words, XDG_STATE_HOME=str(tmp_path / "file")) as process:
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    (warning,) = [
        event.reason
        for event in bloomery.events()
        if isinstance(event, Warned) and "cannot note" in event.reason
    ]
    assert "Python rewards" in warning and "--trust-code" in warning
    assert os.fspath(tmp_path / "file") in warning
