"""The choice of a tile by time, with a clock that needs no GPU: the answers, and where they are kept."""

import json

import pytest
import torch

from bloomery.core.files import cache_folder
from bloomery.model.attention import tiles
from bloomery.model.attention.tile_times import (
    FILE,
    ROUNDS,
    Gpu,
    Workload,
    fastest,
    fastest_tiles,
    launches,
)
from bloomery.model.attention.tiles import (
    KERNELS,
    TileShape,
    tile_candidates,
    tile_shape,
    use_tile,
)

GPU = Gpu("gfx1031", "AMD Radeon RX 6700 XT", "3.8.0", "2.13.0+rocm7.2")
CPU = torch.device("cpu")
WORKLOAD = Workload(4, 2, 64, 40, torch.float16, packed=True)
CANDIDATES = {kernel: tile_candidates(kernel, arch=GPU.arch, width=64) for kernel in KERNELS}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class FakeClock:
    """The last candidate of each kernel is the fastest, except in one round of each; counts its calls."""

    def __init__(self, refused_tiles=()):
        self.refused_tiles = refused_tiles
        self.calls = []

    def __call__(self, launch, tile):
        self.calls.append((launch.kernel, tile))
        if tile in self.refused_tiles:
            raise RuntimeError("out of resource: shared memory, Required: 131072")
        candidates = CANDIDATES[launch.kernel]
        number_of_call = self.calls.count((launch.kernel, tile))
        if number_of_call == 1:
            return 30.0  # compiles
        is_disturbed = number_of_call == 3 and tile == candidates[-1]
        return 1.0 if is_disturbed else 0.010 - 0.001 * candidates.index(tile)


def one_launch():
    return next(launches(WORKLOAD, CPU))


def test_the_least_median_wins_and_tiles_that_cannot_run_are_left_out():
    candidates = CANDIDATES["forward"]
    assert len(candidates) == 3
    clock = FakeClock()
    assert fastest(one_launch(), candidates, clock) == candidates[-1]
    assert len(clock.calls) == 3 * (1 + ROUNDS)
    assert fastest(one_launch(), candidates, FakeClock(candidates[-1:])) == candidates[1]
    assert fastest(one_launch(), candidates, FakeClock(candidates[1:])) == candidates[0]
    # The first step then fails by itself, with the compiler's message.
    assert fastest(one_launch(), candidates, FakeClock(candidates)) == candidates[0]


def test_one_candidate_is_not_timed():
    clock = FakeClock()
    assert fastest(one_launch(), CANDIDATES["forward"][:1], clock) == CANDIDATES["forward"][0]
    assert clock.calls == []


def test_the_fastest_tiles_are_kept_for_the_gpu_and_its_software():
    clock = FakeClock()
    last_candidates = {kernel: CANDIDATES[kernel][-1] for kernel in KERNELS}
    assert fastest_tiles(GPU, WORKLOAD, CPU, clock) == last_candidates
    assert {kernel for kernel, _ in clock.calls} == set(KERNELS)
    num_calls = len(clock.calls)

    # Another length of the same width and dtype has the answer.
    longer_workload = Workload(4, 2, 64, 50, torch.float16, packed=True)
    assert fastest_tiles(GPU, longer_workload, CPU, clock) == last_candidates
    assert len(clock.calls) == num_calls
    other_cases = [
        (Gpu("gfx1031", "AMD Radeon RX 6700 XT", "3.8.1", "2.13.0+rocm7.2"), WORKLOAD),
        (Gpu("gfx1031", "AMD Radeon RX 6750 XT", "3.8.0", "2.13.0+rocm7.2"), WORKLOAD),
        (GPU, Workload(4, 2, 64, 40, torch.float32, packed=True)),
    ]
    for number, (gpu, workload) in enumerate(other_cases, 2):
        assert fastest_tiles(gpu, workload, CPU, clock) == last_candidates
        assert len(clock.calls) == number * num_calls
    assert fastest_tiles(GPU, WORKLOAD, CPU, clock) == last_candidates
    assert len(clock.calls) == (len(other_cases) + 1) * num_calls


@pytest.mark.parametrize("content", ["{", "[]", '{"KEY": [1, 2]}', '{"KEY": [8, 8, 1]}'])
def test_a_damaged_or_older_cache_is_timed_again(content):
    fastest_tiles(GPU, WORKLOAD, CPU, FakeClock())
    path = cache_folder() / FILE
    key = next(iter(json.loads(path.read_text())))
    path.write_text(content.replace("KEY", key))
    clock = FakeClock()
    fastest_tiles(GPU, WORKLOAD, CPU, clock)
    assert clock.calls


def test_without_a_cache_folder_the_table_decides(cache):
    (cache / "bloomery").write_text("not a folder")
    first_candidates = {kernel: CANDIDATES[kernel][0] for kernel in KERNELS}
    reasons = []
    assert fastest_tiles(GPU, WORKLOAD, CPU, FakeClock(), reasons.append) == first_candidates
    assert reasons == [f"their times cannot be kept in {cache / 'bloomery'}"]


def test_a_timing_that_fails_gives_the_first_tiles_and_is_not_kept():
    calls = []

    def clock(launch, tile):
        calls.append(tile)
        if len(calls) > 20:  # while the second kernel is timed
            raise RuntimeError("HIP error: unspecified launch failure")
        return 1.0 / len(calls)

    first_candidates = {kernel: CANDIDATES[kernel][0] for kernel in KERNELS}
    reasons = []
    assert fastest_tiles(GPU, WORKLOAD, CPU, clock, reasons.append) == first_candidates
    assert reasons == ["HIP error: unspecified launch failure"]
    assert not (cache_folder() / FILE).exists()


@pytest.mark.parametrize(
    ("workload", "heads", "heads_per_key", "length"),
    [
        (Workload(8, 4, 64, 512, torch.float16, packed=True), 8, 4, 512),
        (Workload(512, 4, 64, 512, torch.float16, packed=True), 256, 4, 512),
        (Workload(64, 8, 16, 8192, torch.float16, packed=False), 1, 1, 8192),
        (Workload(64, 7, 16, 2**17, torch.float16, packed=False), 1, 1, 8192),
        (Workload(14, 7, 16, 2600, torch.float16, packed=False), 7, 7, 2600),
    ],
)
def test_long_sequences_are_timed_on_few_heads(workload, heads, heads_per_key, length):
    timed_launches = list(launches(workload, CPU))
    assert [launch.kernel for launch in timed_launches] == list(KERNELS)
    assert [launch.programs for launch in timed_launches] == [heads, heads, heads // heads_per_key]
    for launch in timed_launches:
        assert (launch.length, launch.width) == (length, workload.width)
        assert launch.arguments["heads_per_key"] == heads_per_key
        assert launch.arguments["HAS_DOCUMENTS"] == workload.packed


def test_a_launch_reads_the_tile_in_use(monkeypatch):
    monkeypatch.setattr(tiles, "_in_use", {})
    tile = CANDIDATES["forward"][1]
    use_tile("forward", tile, arch="gfx1031", width=80 - 16)
    assert tile_shape("forward", arch="gfx1031", width=64) == tile
    assert tile_shape("forward", arch="gfx1031", width=128) == TileShape(32, 16, 8)
    assert tile_shape("forward", arch="gfx1030", width=64) == CANDIDATES["forward"][0]
    assert tile_shape("backward_q", arch="gfx1031", width=64) == CANDIDATES["backward_q"][0]
