"""Memory that ranks of a host share. Ranks are played by one process, which has all their mappings."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bloomery.core.errors import UserError
from bloomery.parallel import shared_memory
from bloomery.parallel.shared_memory import NAME, host_leaders, shared_bytes

CPU = torch.device("cpu")


class Played:
    """The mesh of one of two ranks. `answers`: what each rank gives to the gathers, of which this one's is replaced."""

    def __init__(self, rank: int, *answers: list[Any]) -> None:
        self.rank = rank
        self.answers = list(answers)
        self.given = list[Any]()
        self.num_barriers = 0

    def all_gather_json(self, content: Any) -> list[Any]:
        self.given.append(content)
        answer = self.answers.pop(0)
        answer[self.rank] = content
        return answer

    def barrier(self) -> None:
        self.num_barriers += 1


def here() -> Any:
    alone = Played(0, [None])
    host_leaders(alone)  # type: ignore[arg-type]
    return alone.given[0]


def lines_of_maps() -> int:
    return Path("/proc/self/maps").read_text().count(NAME)


def test_ranks_of_a_host_see_each_others_bytes_until_the_last_tensor_is_gone() -> None:
    place = here()
    file = os.memfd_create(NAME)
    os.ftruncate(file, 4096)
    played = [place, place], [[os.getpid(), file], None]
    follower_B, fills = shared_bytes(4096, Played(1, *played), CPU)  # type: ignore[arg-type]
    other_B, _ = shared_bytes(4096, Played(1, *([place, place], [[os.getpid(), file], None])), CPU)  # type: ignore[arg-type]
    os.close(file)
    assert not fills
    view = follower_B[64:128].view(torch.float32)
    view.fill_(2.5)
    assert other_B[64:128].view(torch.float32).tolist() == [2.5] * 16
    assert other_B[:64].count_nonzero() == 0
    del follower_B, other_B
    gc.collect()
    assert lines_of_maps() == 1  # a view of a part keeps all
    del view
    gc.collect()
    assert lines_of_maps() == 0


def test_a_leader_fills_what_it_made_and_leaves_no_open_file() -> None:
    place = here()
    leader = Played(0, [place, place], [None, [1, -1]])
    bytes_B, fills = shared_bytes(4096, leader, CPU)  # type: ignore[arg-type]
    assert fills and leader.num_barriers == 1
    assert bytes_B.count_nonzero() == 0
    _, (process, file) = leader.given
    assert process == os.getpid()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_rank_in_another_container_leads_by_itself() -> None:
    place = here()
    elsewhere = [place[0], "pid:[1]", place[2]]
    assert host_leaders(Played(2, [place, elsewhere, None])) == [0, 1, 0]  # type: ignore[arg-type]


def test_memory_that_cannot_be_opened_is_named() -> None:
    place = here()
    file_that_is_none = [os.getpid(), 9999]
    with pytest.raises(UserError) as raised:
        shared_bytes(4096, Played(1, [place, place], [file_that_is_none, None]), CPU)  # type: ignore[arg-type]
    assert raised.value.where == f"/proc/{os.getpid()}/fd/9999"


def test_it_is_pinned_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device's runtime, which must let go before the memory is unmapped."""
    ended = list[int]()

    def pin(device: torch.device, address: int, num_bytes: int) -> Any:
        assert (device, num_bytes) == (CPU, 4096)
        return lambda: ended.append(lines_of_maps())

    monkeypatch.setattr(shared_memory, "pin_host_memory", pin)
    place = here()
    bytes_B, _ = shared_bytes(4096, Played(0, [place, place], [None, [1, -1]]), CPU)  # type: ignore[arg-type]
    view = bytes_B[:8]
    del bytes_B
    gc.collect()
    assert ended == []
    del view
    gc.collect()
    assert ended == [1]
    assert lines_of_maps() == 0
