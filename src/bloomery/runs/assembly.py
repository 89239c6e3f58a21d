"""The processes of one launch, each as an empty file in the run folder: mistakes that only several of them can see.

Two processes with one rank, or processes that were told different numbers of ranks, would wait for each other.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.runs.folder import host_name, is_run, start_mark, worked_on

BEAT_SECONDS = 2.0
LOST_SECONDS = 15.0  # without a beat: a process of another host is gone
LOOK_SECONDS = 0.5  # between two looks; longer where many ranks would read one folder


@final
@dataclass(frozen=True)
class Member:
    """A process, as the name of its file says. `launch`: the same text for all processes of a launch.

    `refused`: it has seen a mistake, and has ended or is about to.
    """

    rank: int
    world: int
    pid: int
    started: str
    host: str
    launch: str
    refused: bool = False

    @property
    def file_name(self) -> str:
        texts = (
            text.replace("/", "_").replace("~", "_")[:60]
            for text in (self.started, self.host, self.launch)
        )
        return "~".join(
            [str(self.rank), str(self.world), str(self.pid), *texts, str(int(self.refused))]
        )

    @classmethod
    def of(cls, file_name: str) -> "Member | None":
        parts = file_name.split("~")
        if len(parts) != 7 or not all(part.isdecimal() for part in (*parts[:3], parts[6])):
            return None
        rank, world, pid = map(int, parts[:3])
        return cls(rank, world, pid, parts[3], parts[4], parts[5], refused=parts[6] == "1")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _start_of(pid: int) -> str:
    """ "" for a dead process."""
    return (start_mark(pid) or "").rpartition(" ")[2]


@final
class Assembly:
    """This process among those of its launch, until training has begun.

    Files of processes that are gone do not count, so that a job may start again in the same folder.
    """

    def __init__(
        self, run_dir: Path, *, rank: int, world: int, launch: str, variables: tuple[str, str]
    ) -> None:
        """`variables`: the names of those that gave rank and world."""
        self._run_dir = run_dir
        self._path = run_dir / "ranks" / "present"
        self._variables = variables
        own_member = Member(rank, world, os.getpid(), _start_of(os.getpid()), host_name(), launch)
        self._own = Member.of(own_member.file_name) or own_member  # as others read it
        self._arrived: float | None = None  # by the clock of the file server
        self._beat_at = self._looked_at = -LOST_SECONDS
        self._over = False

    def mistake(self) -> UserError | None:
        """The mistake of the launch, once this process is present. Looks seldom, so it may be called often.

        Where it returns one, the others see this process for a while even if it ends.
        """
        time_now = time.monotonic()
        if self._over or not self._be_present(time_now):
            return None
        if time_now - self._looked_at < LOOK_SECONDS * (1 + self._own.world // 32):
            return None
        self._looked_at = time_now
        error = self._error_of(self._members())
        if error is not None:
            refused = replace(self._own, refused=True)
            with suppress(OSError):
                (self._path / self._own.file_name).rename(self._path / refused.file_name)
                (self._path / refused.file_name).touch()
            self._own = refused
        return error

    def absent(self) -> str:
        """The ranks that have not come, in words; "" where all have, or training has begun."""
        if self._over or self._arrived is None:
            return ""
        with suppress(OSError):
            members = [Member.of(path.name) for path in self._path.iterdir()]
            present = {
                member.rank
                for member in members
                if member is not None and member.launch == self._own.launch
            }
            present = {rank for rank in present if rank < self._own.world}
            first_absent = next(
                (rank for rank in range(self._own.world) if rank not in present), None
            )
            if first_absent is not None:
                return f"{self._own.world - len(present):,} of {self._own.world:,} ranks, such as rank {first_absent}"
        return ""

    def end(self) -> None:
        """Training has begun on all ranks, or this process ends: from here on there is no mistake to be found."""
        self._over = True
        if self._arrived is not None and not self._own.refused:
            with suppress(OSError):
                (self._path / self._own.file_name).unlink(missing_ok=True)

    def _be_present(self, time_now: float) -> bool:
        if self._arrived is None and not (is_run(self._run_dir) and worked_on(self._run_dir)):
            return False  # rank 0 creates and locks the folder, and refuses one with other files
        if time_now - self._beat_at > BEAT_SECONDS:
            self._beat_at = time_now
            with suppress(OSError):  # a full disk: training reports that
                self._path.mkdir(parents=True, exist_ok=True)
                file = self._path / self._own.file_name
                file.touch()
                if self._arrived is None:
                    self._arrived = file.stat().st_mtime
                    self._remove_old()
        return self._arrived is not None

    def _remove_old(self) -> None:
        """Files of processes that were killed."""
        assert self._arrived is not None
        for path in self._path.iterdir():
            if self._arrived - path.stat().st_mtime > 4 * LOST_SECONDS:
                path.unlink(missing_ok=True)

    def _members(self) -> list[Member]:
        """The processes of this launch, this one too."""
        try:
            all_members = [Member.of(path.name) for path in self._path.iterdir()]
            own_beat = (self._path / self._own.file_name).stat().st_mtime
        except OSError:
            return []
        members = [
            member
            for member in all_members
            if member is not None and member.launch == self._own.launch
        ]
        ranks = [member.rank for member in members]
        worlds = {member.world for member in members}
        suspicious = [
            member for member in members if len(worlds) > 1 or ranks.count(member.rank) > 1
        ]
        return [member for member in suspicious if self._counts(member, own_beat)]

    def _counts(self, member: Member, own_beat: float) -> bool:
        """Whether the process takes part in this start of the launch."""
        try:
            beat = (self._path / member.file_name).stat().st_mtime
        except OSError:
            return False
        assert self._arrived is not None
        if member.refused:  # since this process is here: not at an earlier start
            return own_beat - beat < LOST_SECONDS and beat > self._arrived
        if member.host != self._own.host:
            return own_beat - beat < LOST_SECONDS
        return _start_of(member.pid) == member.started

    def _error_of(self, members: Sequence[Member]) -> UserError | None:
        rank_variable, world_variable = self._variables
        ordered = sorted(members, key=lambda member: (member.rank, member.host, member.pid))
        for lower, higher in combinations(ordered, 2):
            if lower.rank == higher.rank and (lower.pid, lower.host) != (higher.pid, higher.host):
                return UserError(
                    f"two processes have rank {lower.rank}: {lower} and {higher}",
                    where=f"{rank_variable}={lower.rank}",
                    fix=f"give each process another {rank_variable}, from 0 to {self._own.world - 1}",
                    code=2,
                )
            if lower.world != higher.world:
                return UserError(
                    f"rank {lower.rank} was started as one of {lower.world} ranks, and rank {higher.rank} as one of"
                    f" {higher.world}",
                    where=world_variable,
                    fix=f"set the same {world_variable} for all processes",
                    code=2,
                )
        return None
