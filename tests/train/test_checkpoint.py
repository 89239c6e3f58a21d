"""Saving and finding checkpoints: nothing damaged is used, nothing good is lost."""

import errno
import multiprocessing
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.core.errors import UserError
from bloomery.core.files import stamped, unstamped, write_durably
from bloomery.core.held_files import HeldFiles
from bloomery.infer import model_folder
from bloomery.monitor.events import Saved, Warned
from bloomery.plan.store import begin
from bloomery.train.checkpoint import saver as checkpoint
from bloomery.train.checkpoint.saver import Saver, newest_valid, read_part, read_state


def parts(step: int) -> dict[str, dict[str, torch.Tensor]]:
    moments = {"a.exp_avg": torch.full((64, 64), float(step)), "a.step": torch.tensor(float(step))}
    return {
        "optimizer": {**moments, "b": torch.zeros(3, dtype=torch.bfloat16)},
        "rng": {"torch": torch.get_rng_state()},
    }


def save(
    folder: Path, *steps: int, keep: int = 3, best: int | None = None, async_save: bool = False
) -> list[object]:
    events: list[object] = []
    saver = Saver(folder, keep, async_save, emit=events.append)
    for step in steps:
        saver.save(step, parts(step), {"consumed": step * 8}, best=step == best)
    saver.wait()
    return events


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    damages: list[str] = []
    return newest_valid(folder, on_damage=damages.append), damages


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_saved_is_read_back(tmp_path: Path, async_save: bool) -> None:
    events = save(tmp_path / "checkpoints", 10, 20, async_save=async_save)
    folder, damages = newest(tmp_path / "checkpoints")
    assert folder == tmp_path / "checkpoints/step-00000020"
    assert damages == []
    assert read_state(folder) == {"consumed": 160, "step": 20}
    for part, tensors in parts(20).items():
        read_tensors = read_part(folder, part)
        assert read_tensors.keys() == tensors.keys()
        assert all(torch.equal(read_tensors[name], tensor) for name, tensor in tensors.items())
        assert all(read_tensors[name].dtype == tensor.dtype for name, tensor in tensors.items())
    saves = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saves] == [10, 20]
    assert saves[1].bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_asynchronous_save_takes_the_values_of_its_moment(tmp_path: Path) -> None:
    tensor = torch.zeros(1000, 1000)
    saver = Saver(tmp_path, 3, True)
    saver.save(1, {"optimizer": {"a": tensor}}, {})
    tensor.fill_(7.0)
    saver.wait()
    assert read_part(tmp_path / "step-00000001", "optimizer")["a"].sum() == 0


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, best=2)
    assert model_folder.saved_steps(tmp_path) == [2, 4, 5]
    assert model_folder.best_step(tmp_path) == 2


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") == (None, [])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped bit": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize(
    "file", ["optimizer.safetensors", "rng.safetensors", "state.json", "MANIFEST.json"]
)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_noticed_and_the_one_before_used(
    tmp_path: Path, kind: str, file: str
) -> None:
    save(tmp_path, 1, 2)
    DAMAGE[kind](tmp_path / "step-00000002" / file)
    folder, damages = newest(tmp_path)
    assert folder == tmp_path / "step-00000001"
    assert len(damages) == 1
    assert "step-00000002" in damages[0]
    assert file in damages[0]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    """Its files are whole, and its seal is valid: `--step 2` would give the weights of step 1."""
    save(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "step-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    problem = model_folder.damage(tmp_path / "step-00000002")
    assert problem is not None and "step 1" in problem
    folder, damages = newest(tmp_path)
    assert folder == tmp_path / "step-00000001" and len(damages) == 1
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "best-00000003")
    assert model_folder.damage(tmp_path / "best-00000003") is not None
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "mine")
    assert model_folder.damage(tmp_path / "mine") is None


def test_every_one_of_300_random_corruptions_is_noticed(tmp_path: Path) -> None:
    generator = random.Random(5)
    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    files = sorted(folder.iterdir())
    for _ in range(300):
        path = generator.choice(files)
        content = path.read_bytes()
        corrupted = bytearray(content)
        corrupted[generator.randrange(len(corrupted))] ^= 1 << generator.randrange(8)
        path.write_bytes(corrupted)
        assert model_folder.damage(folder) is not None, path
        path.write_bytes(content)
    assert model_folder.damage(folder) is None


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    shutil.copy(
        tmp_path / "step-00000001/optimizer.safetensors",
        tmp_path / "step-00000002/optimizer.safetensors",
    )
    assert newest(tmp_path)[0] == tmp_path / "step-00000001"


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "step-00000001/MANIFEST.json"
    content = unstamped(manifest)
    manifest.write_text(stamped({"format": 99, "files": content["files"]}))
    assert "newer Bloomery" in (model_folder.damage(manifest.parent) or "")


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-00000002/optimizer.safetensors")
    save(tmp_path, 2)
    assert newest(tmp_path) == (tmp_path / "step-00000002", [])


def test_damaged_checkpoints_of_later_steps_are_not_the_newest_to_keep(tmp_path: Path) -> None:
    """The run returned to step 10; its next checkpoint comes before the damaged one, and was once deleted for it."""
    save(tmp_path, 10, 30, keep=1, best=10)
    flip(tmp_path / "step-00000030/optimizer.safetensors")
    events = save(tmp_path, 15, keep=1)
    assert [type(event) for event in events] == [Saved]
    assert newest(tmp_path)[0] == tmp_path / "step-00000015"
    save(tmp_path, 40, keep=1)
    assert model_folder.saved_steps(tmp_path) == [10, 40]


@pytest.mark.parametrize("step", [25, 30])
def test_room_is_never_made_by_deleting_the_only_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    save(tmp_path, 20, 30)
    flip(tmp_path / "step-00000030/optimizer.safetensors")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(UserError, match="free on the disk"):
        save(tmp_path, step)
    assert newest(tmp_path)[0] == tmp_path / "step-00000020"


def test_a_checkpoint_that_reads_back_damaged_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def seal_on_a_bad_disk(folder: Path, lineage: model_folder.Lineage, **settings: Any) -> None:
        model_folder.seal(folder, lineage, **settings)
        flip(folder / "optimizer.safetensors")

    monkeypatch.setattr(checkpoint, "seal", seal_on_a_bad_disk)
    with pytest.raises(UserError, match=r"optimizer.safetensors has changed since it was written;"):
        save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_good_checkpoint_is_not_written_twice(tmp_path: Path) -> None:
    save(tmp_path, 1)
    inode = (tmp_path / "step-00000001").stat().st_ino
    save(tmp_path, 1)
    assert (tmp_path / "step-00000001").stat().st_ino == inode


def test_a_checkpoint_saved_again_follows_the_one_before_it(tmp_path: Path) -> None:
    """As after a stop during its evaluation: the resumed run saves the same step with the result."""
    begin(tmp_path, {"plan.json": "{}"})
    folder = tmp_path / "checkpoints"
    save(folder, 10, 20)
    saver = Saver(folder, 3, False)
    saver.follow(newest(folder)[0])
    saver.save(20, parts(20), {"consumed": 160, "evaluated": True})
    saver.save(30, parts(30), {"consumed": 240})
    saver.wait()
    for path in map(folder.joinpath, ("step-00000010", "step-00000020", "step-00000030")):
        model_folder.refuse_other_run(path)
    assert model_folder.previous_of(folder / "step-00000020")[0] == 10
    shutil.rmtree(folder / "step-00000030")
    assert newest(folder) == (folder / "step-00000020", [])


def test_a_kill_while_the_old_checkpoint_of_a_step_is_deleted_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(path: Path) -> None:
        raise KeyboardInterrupt(path)

    save(tmp_path, 10, keep=1)
    monkeypatch.setattr(model_folder, "remove", kill)
    saver = Saver(tmp_path, 1, False)
    with pytest.raises(KeyboardInterrupt):
        saver.save(10, parts(10), {"consumed": 80, "evaluated": True})
    folder, damages = newest(tmp_path)
    assert folder is not None and read_state(folder)["evaluated"] and damages == []


def test_leftovers_of_killed_saves_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".tmp-7-123").mkdir()
    (tmp_path / ".tmp-7-123/optimizer.safetensors").write_bytes(b"x")
    model_folder.clear_drafts(tmp_path)  # by the first rank, before training
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]


def test_a_checkpoint_that_is_a_link_is_read_and_pruned_and_what_it_points_to_stays(
    tmp_path: Path,
) -> None:
    """It used to leave a draft that no later start could clear: the run could not be resumed any more."""
    save(tmp_path / "run", 1, 2)
    (tmp_path / "run/step-00000001").rename(tmp_path / "elsewhere")
    (tmp_path / "run/step-00000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run/.tmp-step-00000000-17-gone").symlink_to(tmp_path / "elsewhere")
    assert model_folder.damage(tmp_path / "run/step-00000001") is None
    model_folder.clear_drafts(tmp_path / "run")
    events = save(tmp_path / "run", 3, 4, keep=2)
    assert [type(event) for event in events] == [Saved, Saved]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]
    assert model_folder.damage(tmp_path / "elsewhere") is None


def test_a_folder_that_cannot_be_read_is_not_one_without_checkpoints(
    tmp_path: Path, monkeypatch
) -> None:
    save(tmp_path, 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # permissions do not bind root
    with pytest.raises(UserError, match="cannot read the checkpoints: Permission denied"):
        newest(tmp_path)


def test_all_files_of_a_checkpoint_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    usual_umask = os.umask(0o027)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(usual_umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "step-00000001").iterdir()} == {
        0o640
    }


@pytest.mark.parametrize("file", ["MANIFEST.json", "state.json"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_file_without_an_end_is_damage_at_once(tmp_path: Path, file: str, kind: str) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / file
    path.unlink()
    path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    assert file in (model_folder.damage(path.parent) or "")


def test_state_must_be_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Saver(tmp_path, 3, False).save(1, parts(1), {"loss": float("nan")})


def test_a_bug_in_the_writing_thread_reaches_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "seal", lambda *_, **__: 1 / 0)
    saver = Saver(tmp_path, 3, True)
    saver.save(1, parts(1), {})
    with pytest.raises(ZeroDivisionError):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_no_event_is_lost_when_the_loop_polls_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of the files are read for `Saved`, which takes a while: the loop polls meanwhile."""
    events: list[object] = []
    saver = Saver(tmp_path, 3, True, emit=events.append)
    event_begins = threading.Event()
    has_polled = threading.Event()

    def slow_event(**fields: Any) -> Saved:
        event_begins.set()
        assert has_polled.wait(timeout=60)
        return Saved(**fields)

    monkeypatch.setattr(checkpoint, "Saved", slow_event)
    saver.save(1, parts(1), {})
    assert event_begins.wait(timeout=60)
    saver.poll()
    has_polled.set()
    saver.wait()
    assert [type(event) for event in events] == [Saved]


@contextmanager
def file_size_limit(size: int = 8192) -> Iterator[None]:
    """Larger files cannot be written: the errors of a full disk, without filling one. Only for as long as needed, since
    pytest writes files too.
    """
    usual_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual_limits)


def test_a_full_disk_never_ends_the_run(tmp_path: Path) -> None:
    events: list[object] = []
    saver = Saver(tmp_path, 3, True, emit=events.append)
    saver.save(1, parts(1), {})
    saver.drain()
    with file_size_limit():
        saver.save(2, parts(2), {})
        saver.drain()
    assert [type(event) for event in events] == [Saved, Warned]
    assert "step 2 was not saved" in events[1].reason
    assert newest(tmp_path) == (tmp_path / "step-00000001", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    with pytest.raises(UserError, match="newest checkpoint is of step 1"):
        saver.wait()
    saver.save(3, parts(3), {})
    saver.wait()
    assert newest(tmp_path)[0] == tmp_path / "step-00000003"


def test_a_full_disk_is_made_room_on_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2, 3)
    usage = shutil.disk_usage(tmp_path)
    oldest = model_folder.step_folder(tmp_path, 1)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=0 if oldest.exists() else usage.free)
    )
    events = save(tmp_path, 4)
    assert [type(event) for event in events] == [Warned, Saved]
    assert model_folder.saved_steps(tmp_path) == [3, 4]


def hold(folder: Path) -> HeldFiles:
    holds = HeldFiles()
    assert holds.take(folder / "MANIFEST.json")
    return holds


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_that_is_read_is_left_for_a_later_save(
    tmp_path: Path, async_save: bool
) -> None:
    events: list[object] = []
    saver = Saver(tmp_path, 1, async_save, emit=events.append)
    saver.save(1, parts(1), {})
    saver.drain()
    with hold(model_folder.step_folder(tmp_path, 1)):
        for step in (2, 3):
            saver.save(step, parts(step), {})
            saver.drain()
        assert model_folder.saved_steps(tmp_path) == [1, 3]
        assert newest(tmp_path) == (model_folder.step_folder(tmp_path, 3), [])
    saver.save(4, parts(4), {})
    saver.wait()
    assert model_folder.saved_steps(tmp_path) == [4]

    # Said once, with what it takes on the disk.
    (warning,) = [event for event in events if isinstance(event, Warned)]
    assert warning.step == 2
    assert "step-00000001 is being read" in warning.reason
    assert "KiB" in warning.reason


def test_best_weights_that_are_read_are_left_for_a_later_save(tmp_path: Path) -> None:
    events: list[object] = []
    saver = Saver(tmp_path, 1, False, emit=events.append)
    saver.save(1, parts(1), {}, best=True, weights_only=True)
    with hold(model_folder.weights_folder(tmp_path, 1)):
        saver.save(2, parts(2), {}, best=True, weights_only=True)
        assert model_folder.best_weight_steps(tmp_path) == [1, 2]
    saver.save(3, parts(3), {}, best=True, weights_only=True)
    assert model_folder.best_weight_steps(tmp_path) == [3]
    assert ["best-00000001" in event.reason for event in events if isinstance(event, Warned)] == [
        True
    ]


def test_a_full_disk_makes_no_room_by_deleting_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    usage = shutil.disk_usage(tmp_path)
    oldest = model_folder.step_folder(tmp_path, 1)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=0 if oldest.exists() else usage.free)
    )
    events: list[object] = []
    saver = Saver(tmp_path, 3, False, emit=events.append)
    with hold(oldest):
        saver.save(3, parts(3), {})
    assert model_folder.saved_steps(tmp_path) == [1, 2]
    first, second = [event.reason for event in events if isinstance(event, Warned)]
    assert "step-00000001 is being read" in first
    assert "step 3 was not saved" in second

    # The reader has ended: there is room.
    saver.save(3, parts(3), {})
    saver.wait()
    assert model_folder.saved_steps(tmp_path) == [2, 3]


def test_older_checkpoints_that_cannot_be_deleted_are_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(checkpoint, "remove_unread", refuse)
    events = save(tmp_path, 1, 2, keep=1)
    assert [event.step for event in events if isinstance(event, Saved)] == [1, 2]
    (warning,) = [event.reason for event in events if isinstance(event, Warned)]
    assert warning.startswith("older checkpoints cannot be deleted: ")
    assert newest(tmp_path)[0] == model_folder.step_folder(tmp_path, 2)


def test_too_little_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(UserError, match=r"only 10 B are free on the disk \(1\.\d MiB are needed\)"):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save(tmp_path / "file/checkpoints", 1)


def test_write_durably_keeps_the_old_text_when_the_new_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_durably(path, "old")
    with pytest.raises(OSError, match="File too large"), file_size_limit(100):
        write_durably(path, "x" * 1000)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def save_without_end(folder: Path) -> None:
    saver = Saver(folder, 2, True)
    for step in range(1, 100_000):
        saver.save(
            step, {"optimizer": {"a": torch.full((300, 1000), float(step))}}, {"consumed": step}
        )


def test_a_kill_at_any_moment_of_a_save_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    generator = random.Random(3)
    for _ in range(2):
        child = multiprocessing.get_context("fork").Process(
            target=save_without_end, args=(tmp_path,), daemon=True
        )
        child.start()
        while not any(tmp_path.glob("step-*")):
            assert child.is_alive()
            time.sleep(0.01)
        time.sleep(generator.random() * 0.2)
        child.kill()
        child.join()
        folder, damages = newest(tmp_path)
        assert damages == []
        assert folder is not None
        assert (read_part(folder, "optimizer")["a"] == read_state(folder)["step"]).all()
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_a_kill_between_the_renames_of_a_step_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(draft: Path, target: Path) -> Path:
        if draft.name.startswith(".tmp-"):
            raise KeyboardInterrupt(target)
        return rename(draft, target)

    save(tmp_path, 10, keep=1)
    rename = Path.rename
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(Path, "rename", kill)
        Saver(tmp_path, 1, False).save(10, parts(10), {"consumed": 80, "evaluated": True})
    assert newest(tmp_path)[0] is None
    model_folder.clear_drafts(tmp_path)
    folder, damages = newest(tmp_path)
    assert (
        folder == tmp_path / "step-00000010"
        and "evaluated" not in read_state(folder)
        and damages == []
    )
