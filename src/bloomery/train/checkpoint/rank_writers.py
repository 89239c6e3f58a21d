"""A checkpoint that several ranks write: each owner its tensors, and the first rank everything else.

While training waits, each rank copies the rows that it hands in (`RankWriters.stage`). Then a thread on each rank takes
part in the save, in a process group of its own: the default group belongs to training. The first rank leads: it makes
a draft folder, lets all ranks write their files into it, and renames it, or lets them try again. The others follow its
messages until it sends the end. A rank that cannot write takes part until the end: the others depend on its rows.
"""

import errno
import platform
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bloomery.facts.counting import expert_parts
from bloomery.infer.model_folder import FileEntry
from bloomery.model.io.parameters import is_split, local, unstacked
from bloomery.model.io.safetensors import HF_METADATA, HashedFile, Spec, as_stored
from bloomery.model.io.stored import TensorLocation
from bloomery.model.io.weights import write_index
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.messages import all_gather_json, broadcast_json
from bloomery.parallel.owner_exchange import HostBuffer, Key, bring_to_owners, bytes_on_host
from bloomery.parallel.ownership import HeldTensor, OwnedTensor, assign_owners
from bloomery.train.process import out_of_memory

Parts = Mapping[str, Mapping[str, Tensor]]  # tensors by part and name
ModelWriter = Callable[[Mapping[str, Tensor], Path], None]  # tensors on the CPU, an existing folder
MODEL = "model"  # the part in the format of transformers or PEFT
# Of one message between the threads: an owner may need this long for what came before it. A rank that ends is noticed
# at once.
SAVE_TIMEOUT = timedelta(hours=12)


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise safetensors' I/O errors, which have their errno in the message only, as OSError."""
    try:
        yield
    except SafetensorError as error:
        match = re.search(r"^(.*) \(os error (\d+)\)", str(error))
        if match is None:
            raise
        raise OSError(int(match[2]), match[1].rpartition(": ")[2]) from error


@final
@dataclass(frozen=True)
class PartLayout:
    """How the part MODEL is stored tensor by tensor: where each weight is, and what writes its config.json."""

    locations: Mapping[str, TensorLocation]
    write_config: Callable[[str, Path], None]  # the dtype of the weights, an existing folder


@final
@dataclass(frozen=True)
class RowsOnRanks:
    """What the tensors of the parts are on a rank.

    `is_rows`: whether the plain tensor of that name has some rows of a tensor, and other ranks the rest; those of
    DTensors are known. `is_owned`: whether this stage hands in the tensor of that name; both ends of a pipeline may
    have it. `divided_parts`: those that several ranks may write.
    """

    is_rows: Callable[[str], bool]
    is_owned: Callable[[str], bool]
    divided_parts: Collection[str]


class _Rows(NamedTuple):
    """What a rank holds of a tensor. `is_rows`: these are some of its rows, and other ranks have the rest."""

    rows: Tensor
    is_rows: bool


@final
@dataclass(frozen=True)
class Staged:
    """One checkpoint, ready to be written by all ranks. `bytes_of`: the rows that this rank hands in."""

    ranks: "RankWriters"
    parts: tuple[str, ...]
    owned_tensors: tuple[OwnedTensor, ...]
    bytes_of: Callable[[Key], Tensor]
    is_copied: bool
    write_model: ModelWriter | None
    stored_model: PartLayout | None

    @property
    def bytes(self) -> int:
        """Of the checkpoint."""
        return sum(owned.bytes for owned in self.owned_tensors)

    @property
    def leads(self) -> bool:
        """Whether this rank calls `write` and `end`; the others call `follow`."""
        return self.ranks.mesh.first_rank

    def write(self, draft: Path) -> dict[str, FileEntry]:
        return self.ranks.write(self, draft)

    def end(self, failure: str | None) -> None:
        self.ranks.end(failure)

    def follow(self) -> str | None:
        return self.ranks.follow(self)


@final
class RankWriters:
    """The part of one rank in the saves of a run. All ranks call the same methods of it in the same order."""

    def __init__(self, mesh: Mesh, rows: RowsOnRanks) -> None:
        """A collective: every rank joins the group of the threads."""
        self.mesh = mesh
        self._rows = rows
        self._group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self._buffer = HostBuffer(mesh.device)
        # What this rank held at the last save, and the owners that followed from that.
        self._held: list[HeldTensor] | None = None
        self._owned_tensors: tuple[OwnedTensor, ...] = ()
        self._had_stored_model = False

    @torch.no_grad()  # what a DTensor then gives as its rows costs no operation of autograd
    def stage(
        self,
        parts: Parts,
        write_model: ModelWriter | None,
        stored_model: PartLayout | None,
        *,
        copy: bool,
    ) -> Staged | None:
        """Copy the rows that this rank hands in; without `copy` training must wait until they are written.

        None where a rank has no memory for its copy.
        """
        held = {
            (part, held_name): rows
            for part, tensors_of_part in parts.items()
            for name, tensor in tensors_of_part.items()
            if self._rows.is_owned(name)
            for held_name, rows in self._rows_of(
                name, tensor, is_stored=part == MODEL and stored_model is not None
            )
        }
        owned_tensors = self._owners_of(held, stored_model)
        live_rows = {
            (owned.part, piece.name): held[owned.part, piece.name].rows
            for owned in owned_tensors
            for piece in owned.pieces
            if piece.rank == self.mesh.rank
        }
        if not copy:
            return Staged(
                self,
                tuple(parts),
                owned_tensors,
                lambda key: bytes_on_host(live_rows[key]),
                False,
                write_model,
                stored_model,
            )
        copies = None
        try:
            copies = self._buffer.copy(live_rows)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        if self.mesh.any_rank(copies is None) or copies is None:
            return None
        return Staged(
            self,
            tuple(parts),
            owned_tensors,
            copies.__getitem__,
            True,
            write_model,
            stored_model,
        )

    def _rows_of(
        self, name: str, tensor: Tensor, *, is_stored: bool
    ) -> Iterator[tuple[str, "_Rows"]]:
        """What this rank holds of a tensor; of a stack of experts that goes into the files of a model, of each part."""
        is_rows = is_split(tensor) or (self.mesh.holders > 1 and self._rows.is_rows(name))
        parts = expert_parts(name, tensor.shape) if is_stored else ()
        if not parts:
            yield name, _Rows(local(tensor), is_rows)
            return
        parts_here = dict(unstacked(name, tensor))
        for part in parts:
            # Another rank has the experts that are not here: of theirs, this one has no rows.
            nothing = local(tensor).new_empty(0, *tensor.shape[2:])
            yield part.name, _Rows(parts_here.get(part.name, nothing), is_rows)

    def _owners_of(
        self, held: Mapping[Key, "_Rows"], stored_model: PartLayout | None
    ) -> tuple[OwnedTensor, ...]:
        """The owner of each tensor; a collective where something changed since the last save."""
        mesh = self.mesh
        held_tensors = [
            HeldTensor(
                part,
                name,
                str(held_rows.rows.dtype).removeprefix("torch."),
                tuple(held_rows.rows.shape),
                held_rows.is_rows,
            )
            for (part, name), held_rows in held.items()
        ]
        has_stored_model = stored_model is not None
        is_known = held_tensors == self._held and has_stored_model == self._had_stored_model
        if not mesh.any_rank(not is_known):
            return self._owned_tensors

        # One rank of each stage describes all that the stage has; of the others only the numbers of rows may differ.
        description = (
            [list(asdict(held).values()) for held in held_tensors] if mesh.first_data_rank else None
        )
        gathered = mesh.all_gather_json([description, [held.rows for held in held_tensors]])
        held_by_stage = [
            [
                HeldTensor(part, name, dtype, tuple(shape), is_rows)
                for part, name, dtype, shape, is_rows in gathered[stage * mesh.data_world][0]
            ]
            for stage in range(mesh.stages)
        ]
        rows_by_rank = [rows for _, rows in gathered]
        locations_by_part = {} if stored_model is None else {MODEL: stored_model.locations}
        divided_parts = set(self._rows.divided_parts)
        if stored_model is None:
            divided_parts.discard(MODEL)  # PEFT opens one file
        self._owned_tensors = assign_owners(
            held_by_stage,
            rows_by_rank,
            mesh,
            locations_by_part=locations_by_part,
            divided_parts=divided_parts,
        )
        self._held = held_tensors
        self._had_stored_model = has_stored_model
        return self._owned_tensors

    # From here on in the writing thread, where there is one.

    def write(self, staged: Staged, draft: Path) -> dict[str, FileEntry]:
        """On the first rank: all ranks write their files into `draft`. Returns those that are hashed already.

        Raises OSError when a rank could not write; none writes any more then.
        """
        broadcast_json(str(draft), self._group)
        written = self._write_files(staged, draft)
        if isinstance(written, OSError):
            raise written

        # What belongs to no rank alone: the config, parts without a tensor (the states of an optimizer whose updates
        # were all skipped), and the index of each part that is in several files.
        if staged.stored_model is not None:
            bytes_of_dtype = Counter[str]()
            for owned in staged.owned_tensors:
                if owned.part == MODEL:
                    bytes_of_dtype[owned.dtype] += owned.bytes
            ((dtype, _),) = bytes_of_dtype.most_common(1)
            staged.stored_model.write_config(dtype, draft)
        for part in set(staged.parts) - {owned.part for owned in staged.owned_tensors}:
            with system_errors():
                save_file({}, draft / f"{part}.safetensors")
        for part, tensors in groupby(staged.owned_tensors, key=lambda owned: owned.part):
            tensors_of_part = list(tensors)
            weight_map = {owned.name: owned.file for owned in tensors_of_part}
            if len(set(weight_map.values())) > 1:
                total_bytes = sum(owned.bytes for owned in tensors_of_part)
                index = draft / f"{part}.safetensors.index.json"
                write_index(index, weight_map, total_bytes=total_bytes)
        return written

    def end(self, failure: str | None) -> None:
        """On the first rank: the save is over; `failure`: why there is no checkpoint."""
        broadcast_json([failure], self._group)

    def follow(self, staged: Staged) -> str | None:
        """On the other ranks: write what the first one asks for; returns why there is no checkpoint."""
        while isinstance(message := broadcast_json(None, self._group), str):
            # Where a rank has an error, all have it, and the first one decides what follows.
            self._write_files(staged, Path(message))
        failure: str | None = message[0]
        return failure

    def _write_files(self, staged: Staged, draft: Path) -> dict[str, FileEntry] | OSError:
        """Every rank writes the tensors that it owns. The result is the same on all ranks."""
        # A folder that a host cannot see is found before a byte is sent.
        own_tensors = [owned for owned in staged.owned_tensors if owned.owner == self.mesh.rank]
        files = _OwnFiles(own_tensors, draft, staged)
        if own_tensors:
            files.attempt(lambda: _refuse_missing(draft))
        error, _ = self._agree(files.error, {})
        if error is not None:
            return error

        # A rank whose disk is full goes on receiving, or the others would wait for it.
        with files:
            for owned, tensor in bring_to_owners(
                staged.owned_tensors,
                staged.bytes_of,
                self._group,
                sends_ahead=staged.is_copied,
            ):
                files.write(owned, tensor)
            files.finish()
        error, entries_by_rank = self._agree(files.error, files.entries)
        if error is not None:
            return error
        return {
            name: FileEntry(digest, size)
            for entries in entries_by_rank
            for name, (digest, size) in entries.items()
        }

    def _agree(
        self, error: OSError | None, entries: Mapping[str, tuple[str, int]]
    ) -> tuple[OSError | None, list[dict[str, tuple[str, int]]]]:
        """The error of the first rank that has one, with rank and host; and the entries of every rank."""
        problem = None
        if error is not None:
            problem = [error.errno or errno.EIO, error.strerror or str(error), platform.node()]
        gathered = all_gather_json([problem, dict(entries)], self._group)
        shared_error = None
        for rank, (problem_of_rank, _) in reversed(list(enumerate(gathered))):
            if problem_of_rank is not None:
                number, text, host = problem_of_rank
                shared_error = OSError(number, f"{text} (rank {rank} on {host})")
        return shared_error, [entries_of_rank for _, entries_of_rank in gathered]


def _refuse_missing(draft: Path) -> None:
    """Raises OSError where this host does not have the folder that the first rank made."""
    if not draft.is_dir():
        problem = f"{draft.parent} is not the first rank's folder: all hosts must share it"
        raise OSError(errno.ENOENT, problem)


@final
class _OwnFiles:
    """The files of this rank. After the first error nothing more is written. Used as a context."""

    def __init__(self, own_tensors: Sequence[OwnedTensor], draft: Path, staged: Staged) -> None:
        self.error: OSError | None = None
        self._draft = draft
        self._staged = staged
        self._stack = ExitStack()
        self._file: HashedFile | None = None
        self._specs_by_file: dict[str, dict[str, Spec]] = {}
        for owned in own_tensors:
            specs = self._specs_by_file.setdefault(owned.file, {})
            specs[owned.name] = (owned.stored_shape, getattr(torch, owned.dtype))
        # Digest and bytes of each file that is on the disk.
        self.entries: dict[str, tuple[str, int]] = {}
        self._current_name = ""
        self._adapter_tensors: dict[str, Tensor] = {}

    def __enter__(self) -> "_OwnFiles":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def attempt(self, work: Callable[[], None]) -> None:
        """Keep its error for later: the other ranks are in the same save."""
        if self.error is None:
            try:
                work()
            except OSError as error:
                self.error = error

    def write(self, owned: OwnedTensor, tensor: Tensor) -> None:
        """The next tensor, which is only held during the call; those of an adapter are kept for its one file."""
        if owned.part == MODEL and self._staged.stored_model is None:
            self._adapter_tensors[owned.name] = tensor
            return
        self.attempt(lambda: self._write(owned, tensor))

    def _write(self, owned: OwnedTensor, tensor: Tensor) -> None:
        if owned.file != self._current_name:
            self._finish_file()
            path = self._draft / owned.file
            metadata = HF_METADATA if owned.part == MODEL else None
            self._file = self._stack.enter_context(
                HashedFile(path, self._specs_by_file[owned.file], metadata)
            )
            self._current_name = owned.file
        assert self._file is not None
        self._file.write(tensor if owned.location is None else as_stored(tensor, owned.location))

    def finish(self) -> None:
        self.attempt(self._finish_file)
        self.attempt(self._write_adapter)

    def _finish_file(self) -> None:
        if self._file is not None:
            self.entries[self._current_name] = self._file.finish()
            self._file = None
            self._stack.close()

    def _write_adapter(self) -> None:
        if self._adapter_tensors:
            assert self._staged.write_model is not None, "a model part needs a writer"
            with system_errors():
                self._staged.write_model(self._adapter_tensors, self._draft)
