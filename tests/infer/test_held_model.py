"""A model that is read while its run deletes checkpoints: found again, held, or explained."""

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.core.held_files import HeldFiles
from bloomery.export.gguf import export_gguf
from bloomery.export.layouts import draft_of, export
from bloomery.infer.held_model import held_model
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import (
    note_best,
    remove_folder,
    remove_unread,
    restore_best,
    step_folder,
    weights_folder,
)
from models_for_tests import make_model, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", 10, 20, best=10)


@pytest.fixture
def without_locks(monkeypatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize(("step", "name"), [("best", 10), ("last", 20), ("10", 10)])
def test_a_checkpoint_stays_while_it_is_read(run, step, name):
    folder = step_folder(run / "checkpoints", name)
    other_folder = step_folder(run / "checkpoints", 30 - name)
    with held_model(run, step) as files:
        assert files.weights == folder
        assert not remove_unread(folder)
        assert remove_unread(other_folder)
        assert sorted((run / "checkpoints").glob("step-*")) == [folder]
    assert remove_unread(folder)


def test_best_weights_stay_while_they_are_read(run):
    checkpoints = run / "checkpoints"
    shutil.copytree(step_folder(checkpoints, 20), weights_folder(checkpoints, 20))
    shutil.rmtree(step_folder(checkpoints, 20))
    note_best(checkpoints, 20)
    with held_model(run) as files:
        assert files.weights == weights_folder(checkpoints, 20)
        # The run goes back to step 10, and takes the evaluation of step 20 back.
        assert restore_best(checkpoints, step=10, best=10)
        assert files.weights.is_dir()
    assert restore_best(checkpoints, step=10, best=10)
    assert not files.weights.exists()


def test_base_and_adapter_stay_while_they_are_read(tmp_path):
    import peft
    import transformers

    run = make_run(tmp_path / "base", 10)
    base = step_folder(run / "checkpoints", 10)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    for name in (tmp_path / "adapter", Path(f"{run}+{tmp_path / 'adapter'}")):
        with held_model(name) as files:
            assert files.base == base
            assert not remove_unread(base)


def test_a_model_without_a_manifest_is_not_held(tmp_path):
    folder = make_model(tmp_path / "model")
    names = sorted(path.name for path in folder.iterdir())
    with held_model(folder) as files:
        assert files.weights == folder
        assert sorted(path.name for path in folder.iterdir()) == names


class Race:
    """The run acts between the choice of a checkpoint and the lock on it."""

    def __init__(self, monkeypatch, act) -> None:
        self._take = HeldFiles.take
        self._act = act
        monkeypatch.setattr(HeldFiles, "take", lambda holds, path: self._after_act(holds, path))

    def _after_act(self, holds, path) -> bool:
        act, self._act = self._act, lambda: None
        act()
        return self._take(holds, path)


def test_best_is_found_again_where_it_was_deleted_before_the_lock(run, monkeypatch, capsys):
    def save_a_better_one() -> None:
        note_best(run / "checkpoints", 20)
        remove_folder(step_folder(run / "checkpoints", 10))

    Race(monkeypatch, save_a_better_one)
    with held_model(run, "best") as files:
        assert files.weights == step_folder(run / "checkpoints", 20)
        assert not remove_unread(files.weights)
    assert capsys.readouterr().err == ""


def test_last_is_found_again_where_it_was_deleted_before_the_lock(run, monkeypatch, capsys):
    checkpoints = run / "checkpoints"

    def save_a_later_one() -> None:
        shutil.copytree(make_run(run / "later", 30) / "checkpoints", run / "more")
        (run / "more" / "step-00000030").rename(step_folder(checkpoints, 30))
        remove_folder(step_folder(checkpoints, 20))

    Race(monkeypatch, save_a_later_one)
    with held_model(run, "last") as files:
        assert files.weights == step_folder(checkpoints, 30)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a number", "a folder"])
def test_a_named_step_that_was_deleted_before_the_lock_is_an_error(run, monkeypatch, name):
    folder = step_folder(run / "checkpoints", 10)
    Race(monkeypatch, lambda: remove_folder(folder))
    chosen = (run, "10") if name == "a number" else (folder, "best")
    with (
        pytest.raises(UserError, match="step 10 was deleted meanwhile; left: 20"),
        held_model(*chosen),
    ):
        pass


def test_a_best_checkpoint_that_is_missing_for_good_is_a_warning(run, capsys):
    shutil.rmtree(step_folder(run / "checkpoints", 10))
    with held_model(run, "best") as files:
        assert files.weights == step_folder(run / "checkpoints", 20)
    assert "the best checkpoint, of step 10, is missing: using the last" in capsys.readouterr().err


# Where the file system has no locks


@pytest.mark.parametrize("reader", ["hf", "gguf", "load"])
def test_the_error_names_the_deleted_step_and_those_left(run, tmp_path, without_locks, reader):
    out = tmp_path / "out"
    with (
        pytest.raises(UserError, match="step 10 was deleted meanwhile; left: 20") as caught,
        held_model(run, "10") as files,
    ):
        assert remove_unread(files.weights)
        if reader == "hf":
            export(files.weights, out)
        elif reader == "gguf":
            export_gguf(files, out)
        else:
            load_used(files, Use("cpu"))
    assert "checkpoint.keep" in caught.value.fix
    assert not list(tmp_path.glob("*out*"))


def test_a_deletion_in_the_middle_of_an_export(run, tmp_path, monkeypatch, without_locks):
    # The run deletes the checkpoint when the export has its config and begins to read the weights.
    layouts = sys.modules[draft_of.__module__]
    copy_weights = layouts._copy_weights

    def copy_after_deletion(*arguments):
        assert remove_unread(step_folder(run / "checkpoints", 10))
        copy_weights(*arguments)

    monkeypatch.setattr(layouts, "_copy_weights", copy_after_deletion)
    with (
        pytest.raises(UserError, match="step 10 was deleted meanwhile; left: 20"),
        held_model(run, "10") as files,
    ):
        export(files.weights, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_deletion_while_it_is_checked_is_no_damage(run, monkeypatch, without_locks, capsys):
    from bloomery.infer import model_folder

    damage = model_folder.damage

    def damage_after_deletion(folder, **arguments):
        if folder.name == "step-00000010":
            note_best(run / "checkpoints", 20)
            remove_folder(folder)
        return damage(folder, **arguments)

    monkeypatch.setattr(model_folder, "damage", damage_after_deletion)
    with held_model(run) as files:
        assert files.weights == step_folder(run / "checkpoints", 20)
    assert capsys.readouterr().err == ""


def test_a_wrong_command_line_is_not_explained_by_a_deletion(run, without_locks):
    mistake = UserError("no such option", where="--type", fix="leave it out", code=2)
    with pytest.raises(UserError, match="no such option"), held_model(run, "10") as files:
        remove_folder(files.weights)
        raise mistake


def test_an_error_beside_a_checkpoint_that_is_there_stays_as_it_is(run):
    with pytest.raises(KeyError), held_model(run):
        raise KeyError("of its own")


def test_a_checkpoint_that_was_replaced_while_it_was_read_is_an_error(run):
    """After a return to an earlier step: what was read may be of both, though nothing failed."""
    folder = step_folder(run / "checkpoints", 10)
    with pytest.raises(UserError, match="step 10 was replaced meanwhile"), held_model(run, "10"):
        shutil.copytree(folder, folder.with_name("copy"))
        remove_folder(folder)
        folder.with_name("copy").rename(folder)
