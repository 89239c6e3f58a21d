import base64
import json
import math
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from quantized_oracle import SHAPES, digest, weight_of
from torch import Tensor

from bloomery.facts.limits import WEIGHTS_BLOCK, storage_bytes
from bloomery.model.io.quantized import (
    NF4_LEVELS,
    dequantize_int8,
    dequantize_nf4,
    dequantize_scales,
    dynamic_levels,
    quantize_int8,
    quantize_nf4,
    quantize_scales,
)

ORACLE = json.loads((Path(__file__).parent / "quantised_by_bitsandbytes.json").read_text())["cases"]
CPU = torch.device("cpu")


def recorded(text: str, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def read(codes: Tensor, scales: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    result = torch.empty(count, dtype=dtype)
    dequantize_nf4(codes, scales, result)
    return result


@pytest.mark.parametrize("case", SHAPES)
def test_nf4_is_what_bitsandbytes_stores_and_reads(case):
    weight, theirs = weight_of(*SHAPES[case]), ORACLE[case]
    codes, scales = quantize_nf4(weight.flatten())
    assert digest(codes) == theirs["codes"] and digest(scales) == theirs["scales"]
    assert digest(read(codes, scales, weight.numel(), weight.dtype)) == theirs["read"]


@pytest.mark.parametrize("case", SHAPES)
def test_what_bitsandbytes_quantised_twice_reads_the_same(case):
    weight, theirs = weight_of(*SHAPES[case]), ORACLE[case]
    codes, _ = quantize_nf4(weight.flatten())
    outer = torch.cat(
        [recorded(theirs["outer"], torch.float32), recorded(theirs["mean"], torch.float32)]
    )
    scales = dequantize_scales(recorded(theirs["double_scales"]), outer)
    assert digest(read(codes, scales, weight.numel(), weight.dtype)) == theirs["double_read"]


@pytest.mark.parametrize("case", SHAPES)
def test_scales_are_quantised_as_bitsandbytes_does(case):
    theirs = ORACLE[case]
    _, scales = quantize_nf4(weight_of(*SHAPES[case]).flatten())
    codes, outer = quantize_scales(scales)
    # float64 sums
    torch.testing.assert_close(
        outer[-1:], recorded(theirs["mean"], torch.float32), rtol=2e-7, atol=0
    )
    if torch.equal(outer[-1:], recorded(theirs["mean"], torch.float32)):
        assert digest(codes) == theirs["exact_scales"]
    read_here = dequantize_scales(codes, outer)
    other = torch.cat(
        [recorded(theirs["outer"], torch.float32), recorded(theirs["mean"], torch.float32)]
    )
    read_there = dequantize_scales(recorded(theirs["double_scales"]), other)
    assert (
        float((read_here - scales).square().mean())
        <= 1.001 * float((read_there - scales).square().mean()) + 1e-16
    )


def test_the_levels_follow_from_the_normal_distribution():
    offset = 0.9677083  # between 1 - 1/30 and 1 - 1/32: bitsandbytes' create_normal_map
    quantile = NormalDist().inv_cdf
    up = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    down = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted(level / max(up) for level in (*up, 0.0, *down))
    assert pytest.approx(expected, abs=1e-6) == NF4_LEVELS


def test_dynamic_levels_are_256_in_order():
    levels = dynamic_levels(CPU)
    assert len(levels) == len(levels.unique()) == 256 and levels[-1] == 1.0 and 0.0 in levels
    assert torch.equal(levels, levels.sort().values)
    # the middle of the last of 64 parts of [0.1, 1]
    assert float(levels[0]) == pytest.approx(-(1 - 0.9 / 128))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_errors_on_normal_values():
    torch.manual_seed(0)
    exact = 0.02 * torch.randn(256 * 256)
    codes, scales = quantize_nf4(exact)
    once = relative_error(read(codes, scales, len(exact), torch.float32), exact)
    twice = dequantize_scales(*quantize_scales(scales))
    assert 0.085 < once < 0.1  # the probe of bitsandbytes in hardware/ expects the same 9%
    assert relative_error(read(codes, twice, len(exact), torch.float32), exact) < 1.01 * once
    found = torch.empty_like(exact)
    dequantize_int8(*quantize_int8(exact), found)
    by_row = exact.view(256, 256)
    step = by_row.abs().amax(1, keepdim=True) / 127
    of_rows = relative_error((by_row / step).round() * step, by_row)
    # why int8 has a scale for each 64 weights
    assert relative_error(found, exact) < 0.0065 < of_rows


def test_int8_by_hand():
    values = torch.tensor([1.27, -1.27, 0.0149, 0.635, 0.0])
    codes, scales = quantize_int8(values)
    assert codes.tolist() == [127, -127, 1, 63 if codes[3] == 63 else 64, 0]
    assert float(scales) == pytest.approx(0.01)


def test_zeros_stay_zeros():
    codes, scales = quantize_nf4(torch.zeros(WEIGHTS_BLOCK))
    assert torch.equal(
        read(codes, scales, WEIGHTS_BLOCK, torch.float32), torch.zeros(WEIGHTS_BLOCK)
    )


@pytest.mark.parametrize(
    ("base", "double", "each"),
    [
        ("nf4", True, 0.5 + 1 / 64 + 4 / 64 / 256),
        ("nf4", False, 0.5 + 4 / 64),
        ("int8", True, 1 + 4 / 64),
    ],
)
def test_bytes_of_a_large_matrix(base, double, each):
    """4.127 bits of a weight with double quantisation: arXiv:2305.14314, section 3."""
    shape = (4096, 11008)
    assert storage_bytes(shape, base, double) / math.prod(shape) == pytest.approx(each, rel=1e-5)
