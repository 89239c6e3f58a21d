"""Checkpoints: tensors in safetensors, the rest in JSON, in folders that transformers opens. No pickle.

`checkpoints/step-00001000/` is a checkpoint to resume from:
  the model and the tokenizer in Hugging Face format, or an adapter in PEFT's: the part MODEL
  <part>.safetensors for every other part, such as `optimizer` (`train.state` and `checkpointed_model` name them)
  state.json: everything that is no tensor
  MANIFEST.json: the hash of every file above, written last (`model_folder.seal`)

`checkpoints/best-00000500/` has the model, tokenizer, state.json and manifest alone. It is written where an evaluation
is the best so far between two checkpoints, and is used but never resumed from. `best.json` names the best step.

On several ranks each writes the tensors that it owns (`rank_writers`): a large part is then in several files,
<part>-0000k-of-0000N.safetensors with the index <part>.safetensors.index.json, as transformers has it for models.
"""

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.files import flush_to_disk, read_input, read_whole, size_of
from bloomery.core.units import format_bytes
from bloomery.infer.model_folder import (
    NOT_SAVED,
    FileEntry,
    Lineage,
    best_step,
    best_weight_steps,
    damage,
    newest_valid,
    note_best,
    previous_of,
    put_in_place,
    remove_folder,
    remove_unread,
    saved_steps,
    seal,
    seal_of,
    step_folder,
    weights_folder,
)
from bloomery.model.io.safetensors import StoredPart
from bloomery.monitor.events import Emit, Event, Saved, Warned
from bloomery.plan.store import RunIdentity, read_identity
from bloomery.train.checkpoint.rank_writers import (
    MODEL,
    ModelWriter,
    PartLayout,
    Parts,
    RankWriters,
    Staged,
    system_errors,
)
from bloomery.train.process import out_of_memory

__all__ = ["MODEL", "ModelWriter", "Parts", "Saver", "newest_valid", "read_part", "read_state"]

# those that `Tokenizer.save` writes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, over quota, over the file size limit
SLACK = 2**20  # bytes for headers, JSON and file system metadata


@final
@dataclass(frozen=True)
class _Tensors:
    """The tensors of a checkpoint that one rank writes alone."""

    parts: Parts
    write_model: ModelWriter | None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts.values() for tensor in part.values())

    def write(self, draft: Path) -> None:
        """The model in the format of transformers or PEFT, every other part as safetensors. Raises OSError."""
        for name, tensors in self.parts.items():
            with system_errors():
                if name == MODEL:
                    assert self.write_model is not None, "a model part needs a writer"
                    self.write_model(tensors, draft)
                else:
                    save_file(dict(tensors), draft / f"{name}.safetensors")


@dataclass(frozen=True)
class _Snapshot:
    """One checkpoint to write: training that continues does not change it.

    `began`: when training stopped for it, and `stall_seconds` for how long, of `time.monotonic`.
    """

    step: int
    content: _Tensors | Staged
    state: dict[str, Any]
    best: bool
    weights_only: bool
    lineage: Lineage
    began: float
    stall_seconds: float | None  # None: until it is written


@dataclass(frozen=True)
class _Pruned:
    """Old checkpoints that were deleted, and those that stay while they are being read."""

    deleted: tuple[Path, ...]
    being_read: tuple[Path, ...]


@final
class Saver:
    """Writes the checkpoints of one run; the caller holds the run's lock.

    On several ranks every rank calls the same methods in the same order; events are those of the first.
    `save` returns once the tensors are copied for the writing thread (`async_save`), or once they are written. A
    failed write emits `Warned` and never ends the run; `wait` raises UserError when the last save failed. Events are
    emitted from the caller's thread, in `save`, `poll`, `drain` and `wait`.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        async_save: bool,
        *,
        writer: Callable[[], ModelWriter] | None = None,
        stored_model: PartLayout | None = None,
        ranks: RankWriters | None = None,
        tokenizer: Path | None = None,
        emit: Emit | None = None,
    ) -> None:
        """`writer` is called in each `save` and returns the function that writes the part MODEL as configured then: the
        ranks of an AdaLoRA adapter change while a thread writes it. None where no part is MODEL.

        `ranks`: of a run on several. They write the part MODEL as `stored_model` says; without it the first rank does,
        with `writer`. `tokenizer`: a folder with the tokenizer to copy.
        """
        self.folder = folder
        self.keep = keep
        self.async_save = async_save
        self.tokenizer = tokenizer
        self._writer = writer
        self._stored_model = stored_model
        self._ranks = ranks
        self._emit = emit
        self._thread: threading.Thread | None = None
        # From the writing thread, emitted by the caller's. A queue: a list that `poll` replaces could lose an event.
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._crash: BaseException | None = None
        self._failure: str | None = None  # why the last save failed
        self._identity: RunIdentity | None = None
        self._previous: tuple[int, str] | None = None  # step and seal of the previous checkpoint
        self._reported_folders = set[str]()  # names of old checkpoints that stay for their readers

    def follow(self, checkpoint: Path | None) -> None:
        """The state was restored from this checkpoint, which the next one follows; None: from the start of the run."""
        # The thread that writes would set another previous checkpoint when it is done.
        self.drain()
        if checkpoint is None:
            self._previous = None
        else:
            self._previous = (read_state(checkpoint)["step"], seal_of(checkpoint) or "")

    def save(
        self,
        step: int,
        parts: Parts,
        state: dict[str, Any],
        *,
        best: bool = False,
        weights_only: bool = False,
        began: float | None = None,
    ) -> None:
        """Checkpoint after `step`: tensors by part and name, and `state` as JSON.

        `best`: the validation loss is the lowest so far. `weights_only`: MODEL is the only part, for `best-`, at a step
        that has no checkpoint. `began`: when training stopped for this save, where that was before this call. Waits for
        the previous save. Raises ValueError for a non-finite number in `state`.
        """
        # Everything that training changes is copied before this returns; the state is copied by way of its JSON.
        began = time.monotonic() if began is None else began
        self.drain()
        content = self._copied(step, parts)
        copied_state = json.loads(json.dumps({**state, "step": step}, allow_nan=False))
        snapshot = _Snapshot(
            step,
            content,
            copied_state,
            best,
            weights_only,
            self._lineage(step),
            began,
            time.monotonic() - began if self.async_save else None,
        )

        # Written here, or by a thread while training continues.
        if not self.async_save:
            self._run(snapshot)
            self.poll()
            return
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name=f"save-{step}")
        self._thread.start()

    def _copied(self, step: int, parts: Parts) -> _Tensors | Staged:
        """The tensors on the CPU; with `async_save` in memory of their own, which training does not change."""
        write_model = None if self._writer is None else self._writer()
        if self.async_save:
            content = self._content(parts, write_model, copy=True)
            if content is not None:
                return content
            # From now on training waits for each write, which needs no copy.
            self.async_save = False
            reason = "out of memory for a copy of the training state: checkpoints are now written synchronously"
            self._warn(step, reason)
        content = self._content(parts, write_model, copy=False)
        assert content is not None, "only a copy needs memory"
        return content

    def _content(
        self, parts: Parts, write_model: ModelWriter | None, *, copy: bool
    ) -> _Tensors | Staged | None:
        """None where there is no memory for a copy."""
        if self._ranks is not None:
            return self._ranks.stage(parts, write_model, self._stored_model, copy=copy)
        try:
            host_parts = {name: on_cpu(tensors, copy=copy) for name, tensors in parts.items()}
        except (RuntimeError, MemoryError) as error:
            if not copy or not out_of_memory(error):
                raise
            return None
        return _Tensors(host_parts, write_model)

    def _lineage(self, step: int) -> Lineage:
        """What the manifest of this checkpoint says of its origin; `model_folder.refuse_other_run` reads it."""
        # Where the identity was damaged during the run the last one stays; `bloomery resume` reports the damage.
        with suppress(UserError):
            self._identity = read_identity(self.folder.parent)
        if self._identity is None:
            return Lineage()

        # This step was saved before, and that checkpoint is replaced: the new one cannot follow it, but follows the
        # one that it followed.
        previous = self._previous
        if previous is not None and previous[0] == step:
            previous = previous_of(step_folder(self.folder, step))
        plans = self._identity.plans
        return Lineage(self._identity.run, plans[-1] if plans else "", previous)

    def poll(self) -> None:
        """Emit the events of the writing thread; re-raise its unexpected errors."""
        self._emit_events()
        if self._crash is not None:
            crash = self._crash
            self._crash = None
            raise crash

    def _emit_events(self) -> None:
        while not self._events.empty():
            event = self._events.get()
            if self._emit is not None:
                self._emit(event)

    def drain(self) -> None:
        """Wait for the current write; failures only emit warnings."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def settle(self) -> None:
        """Wait for the current write after an error of training, which is the one to raise whatever comes of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._emit_events()

    def wait(self) -> None:
        """Wait for the last save. Raises UserError when it failed."""
        self.drain()
        if self._failure is None:
            return

        # The run may continue from an older checkpoint: name it.
        older_checkpoint = "there is no older checkpoint"
        try:
            if steps := saved_steps(self.folder):
                older_checkpoint = f"the newest checkpoint is of step {steps[-1]}"
        except UserError as unreadable_folder:
            older_checkpoint = unreadable_folder.problem
        raise UserError(
            f"cannot write the checkpoint: {self._failure}; {older_checkpoint}",
            where=str(self.folder),
            fix="free disk space or fix the folder's permissions, then continue with `bloomery resume`",
        )

    # From here on in the writing thread, where there is one.

    def _run(self, snapshot: _Snapshot) -> None:
        try:
            if isinstance(snapshot.content, Staged) and not snapshot.content.leads:
                self._failure = snapshot.content.follow()
                return
            self._failure = self._write_and_prune(snapshot)
            if isinstance(snapshot.content, Staged):
                snapshot.content.end(self._failure)
        except BaseException as crash:  # raised by poll in the caller's thread
            self._crash = crash

    def _write_and_prune(self, snapshot: _Snapshot) -> str | None:
        """Why the write failed; None on success."""
        # A disk that does not take the checkpoint costs this checkpoint, and training continues.
        try:
            self._commit_with_room(snapshot)
        except OSError as error:
            failure = error.strerror or str(error)
            if error.errno in FULL:
                failure += f" ({format_bytes(snapshot.content.bytes + SLACK)} are needed)"
            # Who asked for this checkpoint recognizes its warning by NOT_SAVED.
            self._warn(
                snapshot.step, f"the checkpoint of step {snapshot.step} {NOT_SAVED}: {failure}"
            )
            return failure

        # Older ones that cannot be deleted are a warning: this checkpoint is on the disk.
        try:
            pruned = self._prune(keep=self.keep, before=snapshot.step + 1)
            self._report_readers(snapshot.step, pruned.being_read)
        except OSError as error:
            reason = f"older checkpoints cannot be deleted: {error.strerror or error}"
            self._warn(snapshot.step, reason)

        target = self._target(snapshot)
        seconds = time.monotonic() - snapshot.began
        self._events.put(
            Saved(
                step=snapshot.step,
                path=str(target),
                bytes=sum(path.stat().st_size for path in target.iterdir()),
                seconds=seconds,
                stall_seconds=seconds if snapshot.stall_seconds is None else snapshot.stall_seconds,
                best=snapshot.best,
                weights_only=snapshot.weights_only,
            )
        )
        return None

    def _commit_with_room(self, snapshot: _Snapshot) -> None:
        """Commit; when the disk is full, once more after older checkpoints were deleted. Raises OSError."""
        try:
            self._commit(snapshot)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # The draft is gone, so that the newest checkpoint is one before this step.
            pruned = self._prune(keep=1, before=snapshot.step)
            self._report_readers(snapshot.step, pruned.being_read)
            if not pruned.deleted:
                raise
            self._warn(
                snapshot.step, "the disk is full: older checkpoints were deleted to make room"
            )
            self._commit(snapshot)

    def _commit(self, snapshot: _Snapshot) -> None:
        """Write a draft, then rename it. Raises OSError after deleting the draft."""
        # A step that is saved twice with the same state is written once: the state counts steps, sequences and seconds
        # of training, so that equal states have equal tensors.
        target = self._target(snapshot)
        is_saved = (
            target.exists() and damage(target) is None and read_state(target) == snapshot.state
        )
        if not is_saved:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f".tmp-{snapshot.step}-{threading.get_native_id()}"
            try:
                self._write_draft(snapshot, draft)
                # The target may hold a damaged checkpoint, or one from before a rewind.
                put_in_place(draft, target)
            finally:
                # After a kill instead of an error, `clear_drafts` deletes it when the run resumes.
                if draft.exists():
                    shutil.rmtree(draft)
            # The files are on the disk already (`seal`); now their folder's name is, too.
            flush_to_disk(self.folder)

        # A checkpoint of this step that the run did not continue from is damaged: these weights are not to be deleted
        # in favor of its own.
        if snapshot.weights_only and step_folder(self.folder, snapshot.step).exists():
            remove_folder(step_folder(self.folder, snapshot.step))

        # Only what is on the disk is noted as the best, and followed by the next checkpoint.
        if snapshot.best:
            note_best(self.folder, snapshot.step)
        if not snapshot.weights_only:
            self._previous = (snapshot.step, seal_of(target) or "")

    def _write_draft(self, snapshot: _Snapshot, draft: Path) -> None:
        """Write and seal every file of the checkpoint. Raises OSError."""
        # A disk that is too small is not filled first.
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < snapshot.content.bytes + SLACK:
            raise OSError(errno.ENOSPC, f"only {format_bytes(free_bytes)} are free on the disk")

        # The tensors, by this rank or by all ranks, then the rest as JSON.
        draft.mkdir()
        written: dict[str, FileEntry] | None = snapshot.content.write(draft)
        (draft / "state.json").write_text(json.dumps(snapshot.state, indent=1), encoding="utf-8")
        if self.tokenizer is not None:
            copy_tokenizer(self.tokenizer, draft)

        # Last, because the manifest has the hash of every other file.
        seal(draft, snapshot.lineage, written=written)
        # Read back before it takes the place of any other; several ranks hash while they write instead.
        problem = damage(draft) if written is None else None
        if problem is not None:
            raise OSError(errno.EIO, problem)

    def _report_readers(self, step: int, folders: Sequence[Path]) -> None:
        """Warns once of each old checkpoint that stays because it is being read."""
        for folder in folders:
            if folder.name not in self._reported_folders:
                self._reported_folders.add(folder.name)
                size = format_bytes(size_of(folder))
                self._warn(
                    step,
                    f"{folder.name} is being read by another command and stays ({size}):"
                    " a save after that command has ended deletes it",
                )

    def _prune(self, *, keep: int, before: int) -> _Pruned:
        """Delete checkpoints that are no longer kept, but for those that are being read.

        Of the steps below `before` the newest `keep` stay, and the best. Each of these also keeps the one that was the
        best when it was saved: a resume from it takes later evaluations back.
        """
        # Without a readable best.json nobody knows which one is the best: nothing is deleted.
        try:
            # A run returns to its newest valid checkpoint. Those of later steps are damaged: as the newest ones they
            # would take the places of those that can be used.
            steps = [step for step in saved_steps(self.folder) if step < before]
            best_steps = {best_step(self.folder)}
            best_steps |= {_best_as_of(step_folder(self.folder, step)) for step in steps[-keep:]}
            weight_steps = best_weight_steps(self.folder)
        except UserError:
            return _Pruned((), ())

        old_folders = [
            step_folder(self.folder, step) for step in steps[:-keep] if step not in best_steps
        ]
        # Weights alone are useless where they are no longer the best, or where the step has a checkpoint by now, which
        # holds the same weights.
        old_folders += [
            weights_folder(self.folder, step)
            for step in weight_steps
            if step not in best_steps or step in steps
        ]
        being_read = [folder for folder in old_folders if not remove_unread(folder)]
        deleted = [folder for folder in old_folders if folder not in being_read]
        return _Pruned(tuple(deleted), tuple(being_read))

    def _target(self, snapshot: _Snapshot) -> Path:
        folder_of = weights_folder if snapshot.weights_only else step_folder
        return folder_of(self.folder, snapshot.step)

    def _warn(self, step: int, reason: str) -> None:
        self._events.put(Warned(step=step, reason=reason))


def _best_as_of(folder: Path) -> int | None:
    """The step that was best when this checkpoint was saved; None where that cannot be read."""
    try:
        best = read_state(folder)["progress"]["best_step"]
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return None
    return best if isinstance(best, int) else None


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def on_cpu(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous; `copy`: never sharing memory with the originals."""
    with torch.no_grad():
        return {
            name: tensor.detach().to("cpu", copy=copy).contiguous()
            for name, tensor in tensors.items()
        }


def stored_part(folder: Path, part: str) -> StoredPart:
    """The tensors of one part other than MODEL, by name, each read when it is asked for."""
    index = folder / f"{part}.safetensors.index.json"
    if not index.exists():
        return StoredPart([folder / f"{part}.safetensors"])
    files = sorted(set(json.loads(read_input(index))["weight_map"].values()))
    return StoredPart(folder / file for file in files)


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """All of them, on the CPU."""
    with stored_part(folder, part) as tensors:
        return dict(tensors)


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint: that of `save`, and `step`."""
    state: dict[str, Any] = json.loads(read_whole(folder / "state.json"))
    return state
