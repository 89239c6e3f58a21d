"""Bytes of pageable memory and of files reach the device through few pinned buffers, each filled once it is free."""

from pathlib import Path

import pytest
import simulated
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.parallel.staging import FileBytes, Piece, StagingRing, _Stage

DEVICE = torch.device("cuda")


def random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_many_copies_through_small_buffers_arrive_whole(tmp_path: Path, num_buffers: int) -> None:
    ring = StagingRing(DEVICE, num_buffers=num_buffers, buffer_bytes=1000)
    path = tmp_path / "bytes"
    sources = [random_bytes(count, seed) for seed, count in enumerate((1, 999, 1000, 1001, 7777))]
    path.write_bytes(b"".join(source.numpy().tobytes() for source in sources))
    with path.open("rb", buffering=0) as file:
        first = 0
        copies = []
        for source in sources:
            in_file = FileBytes(file, first, len(source))
            first += len(source)
            for one, start in ((source, 0), (in_file, 0), (source, len(source) // 2)):
                target_B = torch.zeros(len(source) - start, dtype=torch.uint8, device=DEVICE)
                copies.append((ring.copy([Piece(one, start, target_B)]), target_B, source[start:]))
        for copy, target_B, expected_B in copies:
            copy.finish()
            # Work on the device that is queued from now on reads what has arrived.
            assert torch.equal((target_B + 0).cpu(), expected_B)


def test_a_copy_waits_for_the_work_before_it() -> None:
    """The next layer may not arrive while the last kernels read the one that it takes the place of."""
    ring = StagingRing(DEVICE, buffer_bytes=4096)
    target_B = torch.full((4096,), 3, dtype=torch.uint8, device=DEVICE)
    for turn in range(20):
        read = [target_B.clone() for _ in range(4)]
        copy = ring.copy([Piece(torch.full((4096,), turn, dtype=torch.uint8), 0, target_B)])
        copy.finish()
        expected = 3 if turn == 0 else turn - 1
        assert all(bool((one == expected).all()) for one in read)


def test_a_file_that_was_cut_is_said_where_the_copy_is_awaited(tmp_path: Path) -> None:
    ring = StagingRing(DEVICE, buffer_bytes=1000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1500))
    target_B = torch.zeros(2000, dtype=torch.uint8, device=DEVICE)
    with path.open("rb", buffering=0) as file:
        copy = ring.copy([Piece(FileBytes(file, 0, 2000), 0, target_B)])
        with pytest.raises(UserError, match="ends too early"):
            copy.finish()
    again = ring.copy([Piece(torch.ones(2000, dtype=torch.uint8), 0, target_B)])
    again.finish()
    assert bool((target_B == 1).all())


def test_the_simulated_device_notices_a_buffer_that_is_filled_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the tests above could not fail."""
    monkeypatch.setattr(_Stage, "copied", property(lambda _: None, lambda _, __: None))
    ring = StagingRing(DEVICE, num_buffers=2, buffer_bytes=1000)
    target_B = torch.zeros(20_000, dtype=torch.uint8, device=DEVICE)
    simulated.problem_is_error(False)
    try:
        ring.copy([Piece(random_bytes(20_000, 0), 0, target_B)]).finish()
        torch.cuda.synchronize()
        assert "pinned memory was written" in str(simulated.report()["problem"])
    finally:
        simulated.problem_is_error(True)
        simulated.clear()
