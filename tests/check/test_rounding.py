"""How far rounding takes a result, and how far a result is from the exact one."""

import pytest
import torch

from bloomery.check.rounding import UNIT_ROUNDOFF, bound_of, device_roundoff, tile_error


def test_bounds_follow_from_the_precision():
    assert bound_of(2.0**-8, roundings=4) == pytest.approx(4 * (2 * 2.0**-8 + 2.0**-24))
    numbers = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for dtype, roundoff in UNIT_ROUNDOFF.items():
        rounded = numbers.double().to(dtype) if dtype != torch.float32 else numbers.double().float()
        error = tile_error(rounded, numbers.double())
        assert error <= roundoff  # one rounding, and its mean square is a third
        assert dtype == torch.float32 or error > roundoff / 4


def test_a_gpu_rounds_more_often_than_its_dtype_says():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert device_roundoff(torch.float32, cpu) == 2.0**-24
    assert device_roundoff(torch.float32, gpu, arch="gfx1030") == 2.0**-22
    assert device_roundoff(torch.float32, gpu, arch="sm_90", in_attention=True) == 2.0**-11
    assert device_roundoff(torch.float16, gpu, arch="gfx90a") == 2.0**-8
    assert device_roundoff(torch.float16, gpu, arch="gfx942") == 2.0**-11


def test_one_wrong_tile_of_a_large_matrix_is_seen():
    exact = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    wrong = exact.clone()
    wrong[1000:1016, 64:80] = exact[:16, :16]
    # A two-hundredth of the whole matrix's norm.
    assert float((wrong - exact).norm() / exact.norm()) < 0.02
    assert tile_error(wrong, exact) > 0.3


def test_a_gradient_that_cancels_is_measured_by_what_cancels():
    rounding = 1e-6 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert tile_error(rounding, torch.zeros(64)) > 1
    assert tile_error(rounding, torch.zeros(64), least_size=1.0) < 1e-5
    assert tile_error(torch.full((64,), torch.nan), torch.ones(64)) == float("inf")
