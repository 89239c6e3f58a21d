"""Triton's attention kernels in Triton's interpreter, and compiled for GPUs that are not here.

Oracles: attention in float64, and the error of PyTorch's math attention in the same precision.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_here

from bloomery.hardware.specs import arch_spec
from bloomery.model.attention.blockwise import Options
from bloomery.model.attention.tiles import (
    KERNELS,
    WIDTHS,
    TileShape,
    padded_width,
    tile_candidates,
    tile_shape,
)
from bloomery.model.attention.triton_attention import _stop

ROOT = Path(__file__).parents[2]
# Of numbers of size 1: half of the distance to the next number above 1.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Math attention subtracts the largest score and divides by a sum; the kernels subtract a log-sum-exp, whose rounding
# is that of a number of several units. In half types the rounding of the results is larger than either.
ALLOWED_ROUNDINGS = {"float32": 8.0, "float16": 1.0, "bfloat16": 1.0}


def assert_right(case: dict) -> None:
    rounding = ROUNDING[case["dtype"]] * ALLOWED_ROUNDINGS[case["dtype"]]
    rounding /= (
        1 - case["options"][3]
    )  # dropout: kept shares, and all gradients, are larger by that
    for name, error, of_math in zip("oqkv", case["error"], case["math"], strict=True):
        assert error <= max(of_math, rounding), (name, case)
    assert case["repeats"], case
    if case["kept"] is not None:
        # Dropout: within four standard deviations of a coin that is thrown for each share.
        dropout = case["options"][3]
        expected = case["seen"] * (1 - dropout)
        deviation = (case["seen"] * dropout * (1 - dropout)) ** 0.5
        assert abs(case["kept"] - expected) <= 4 * deviation + 1, case


def test_kernels_are_as_exact_as_math_attention():
    # Small ones, which between them have each precision and every option.
    cases = triton_here.in_interpreter("triton_cases.py", 57, 73, 102, 113, 138)
    assert len({case["dtype"] for case in cases}) == 3 and len(cases) == 5
    for option in ("window", "softcap", "dropout"):
        assert any(case["options"][Options._fields.index(option)] for case in cases)
    assert {case["documents"] for case in cases} == {True, False}
    # Heads are read whole, and in parts.
    assert any(case["part"] < case["shape"][-1] for case in cases)
    for case in cases:
        assert_right(case)


@pytest.mark.soak
def test_every_tile_of_the_table_is_right():
    cases = triton_here.in_interpreter("triton_cases.py", 70, "tiles")
    assert len(cases) == 6
    for case in cases:
        assert_right(case)


@pytest.mark.soak
def test_two_hundred_random_cases():
    for case in triton_here.in_interpreter("triton_cases.py", *range(203)):
        assert_right(case)


def test_layouts_at_the_edges_of_a_launch():
    """Layouts that a launch must not assume: strides, no rows, no tokens; the fake tensors of a compiled block."""
    assert triton_here.in_interpreter("triton_edges.py") == []


# What each failure of tests/model/triton_failures.py is called.
FAILURES = {
    "import": "ModuleNotFoundError",
    "no C compiler": "Failed to find C compiler",
    "cache folder": "NotADirectoryError",
    "compiler": "kernel backward_q failed: CompilationError: arange's range must be a power of 2",
    "resources": "OutOfResources: out of resource: shared memory",
    "no image": "no kernel image is available",
}


def test_a_kernel_that_fails_is_reported_with_tritons_message():
    """Triton's own errors, of the real compiler; running out of memory stays what it is."""
    (results,) = triton_here.script("triton_failures.py")
    failed = {name for name, result in results.items() if result["failed"]}
    assert failed - {name for name, result in results.items() if result["memory"]} == set(FAILURES)
    for name, message in FAILURES.items():
        assert message in results[name]["message"]
    assert results["memory"]["memory"]
    for name in ("nothing", "afterwards"):
        assert results[name]["message"] == ""


def test_the_end_of_each_document_is_found():
    first_BT = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 2, 3, 3, 3]])
    assert _stop(first_BT).tolist() == [[2, 2, 5, 5, 5, 6], [1, 2, 3, 6, 6, 6]]


@pytest.mark.parametrize("arch", ["gfx906", "gfx908", "gfx1030", "gfx1100", "sm_90"])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_every_width_has_a_tile(arch, width):
    assert padded_width(width) in WIDTHS
    for kernel in KERNELS:
        tile = tile_shape(kernel, arch=arch, width=width)
        assert tile.rows >= 16
        assert tile.keys >= 16  # what a dot instruction of Triton takes


def test_an_rx_6700_xt_has_the_tiles_of_its_family():
    assert tile_shape("forward", arch="gfx1031", width=64) == TileShape(64, 16, 8)
    assert tile_shape("forward", arch="gfx1031", width=80) == TileShape(32, 16, 8)
    assert tile_shape("forward", arch="gfx1031", width=256) == TileShape(32, 16, 8)
    assert tile_shape("forward", arch="sm_120", width=64) == TileShape(32, 32, 4)
    assert tile_shape("forward", arch="gfx906", width=256) == TileShape(32, 16, 4)


@pytest.mark.parametrize(
    ("arch", "version", "problem"),
    [
        ("gfx906", "3.7.0", "cannot compile for gfx906, 3.8 can (torch 2.14)"),
        ("gfx906", "3.8.0", None),
        ("gfx1031", "3.8.0", None),
        ("gfx1031", "3.9.0", "those before 3.9 can (torch 2.14)"),
        ("gfx1012", "3.9.1+rocm7.14", "those before 3.9 can"),
        ("gfx908", "3.5.1", None),
        ("sm_61", "3.8.0", "Triton begins at sm_70"),
    ],
)
def test_which_triton_compiles_for_which_gpu(arch, version, problem):
    reason = arch_spec(arch).triton_refusal(version)
    assert bool(reason) == (problem is not None)
    assert problem is None or problem in reason


def compiled_rows(*arguments: str) -> list[dict]:
    process = subprocess.run(
        [sys.executable, ROOT / "scripts" / "triton_tiles.py", *arguments],
        env=triton_here.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def assert_fits(row: dict) -> None:
    """No register goes to memory, the tile fits on the chip, and pairs or tiles are multiplied by one instruction."""
    assert "problem" not in row, row
    assert row["spilled"] == 0, row
    assert row["shared_bytes"] <= 65536, row
    assert row["dot"], row


@pytest.mark.parametrize(("arch", "kernel"), [("gfx1030", "forward"), ("gfx906", "backward_kv")])
def test_a_kernel_compiles_for_a_gpu_that_is_not_here(arch, kernel):
    rows = compiled_rows("--arch", arch, "--width", "64", "--kernel", kernel)
    assert len(rows) == 3
    for row in rows:
        assert_fits(row)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["gfx906", "gfx908", "gfx1012", "gfx1030"])
def test_all_kernels_compile_without_spills(arch):
    rows = compiled_rows("--arch", arch, "--kernel", *KERNELS, "--width", "64", "128", "256")
    num_candidates = sum(
        len(tile_candidates(kernel, arch=arch, width=width))
        for kernel in KERNELS
        for width in (64, 128, 256)
    )
    assert len(rows) == num_candidates >= 10
    for row in rows:
        assert_fits(row)
