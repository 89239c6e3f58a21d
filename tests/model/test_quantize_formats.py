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


def decoded_tensor(text: str, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def dequantize(codes: Tensor, scales: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(count, dtype=dtype)
    dequantize_nf4(codes, scales, values)
    return values


@pytest.mark.parametrize("case", SHAPES)
def test_nf4_is_what_bitsandbytes_stores_and_reads(case):
    weight = weight_of(*SHAPES[case])
    recorded_case = ORACLE[case]
    codes, scales = quantize_nf4(weight.flatten())
    assert digest(codes) == recorded_case["codes"] and digest(scales) == recorded_case["scales"]
    assert digest(dequantize(codes, scales, weight.numel(), weight.dtype)) == recorded_case["read"]


@pytest.mark.parametrize("case", SHAPES)
def test_scales_that_bitsandbytes_quantised_are_read_the_same(case):
    weight = weight_of(*SHAPES[case])
    recorded_case = ORACLE[case]
    codes, _ = quantize_nf4(weight.flatten())
    outer = torch.cat(
        [
            decoded_tensor(recorded_case["outer"], torch.float32),
            decoded_tensor(recorded_case["mean"], torch.float32),
        ]
    )
    scales = dequantize_scales(decoded_tensor(recorded_case["double_scales"]), outer)
    assert (
        digest(dequantize(codes, scales, weight.numel(), weight.dtype))
        == recorded_case["double_read"]
    )


@pytest.mark.parametrize("case", SHAPES)
def test_scales_are_quantised_as_bitsandbytes_does(case):
    recorded_case = ORACLE[case]
    _, scales = quantize_nf4(weight_of(*SHAPES[case]).flatten())
    our_codes, our_outer = quantize_scales(scales)
    # float64 sums
    torch.testing.assert_close(
        our_outer[-1:], decoded_tensor(recorded_case["mean"], torch.float32), rtol=2e-7, atol=0
    )
    if torch.equal(our_outer[-1:], decoded_tensor(recorded_case["mean"], torch.float32)):
        assert digest(our_codes) == recorded_case["exact_scales"]
    our_scales = dequantize_scales(our_codes, our_outer)
    their_outer = torch.cat(
        [
            decoded_tensor(recorded_case["outer"], torch.float32),
            decoded_tensor(recorded_case["mean"], torch.float32),
        ]
    )
    their_scales = dequantize_scales(decoded_tensor(recorded_case["double_scales"]), their_outer)
    assert (
        float((our_scales - scales).square().mean())
        <= 1.001 * float((their_scales - scales).square().mean()) + 1e-16
    )


def test_the_levels_follow_from_the_normal_distribution():
    offset = 0.9677083  # between 1 - 1/30 and 1 - 1/32: bitsandbytes' create_normal_map
    quantile = NormalDist().inv_cdf
    positive_levels = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative_levels = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted(
        level / max(positive_levels) for level in (*positive_levels, 0.0, *negative_levels)
    )
    assert pytest.approx(expected, abs=1e-6) == NF4_LEVELS


def test_dynamic_levels_are_256_in_order():
    levels = dynamic_levels(CPU)
    assert len(levels) == len(levels.unique()) == 256 and levels[-1] == 1.0 and 0.0 in levels
    assert torch.equal(levels, levels.sort().values)
    # the middle of the last of 64 parts of [0.1, 1]
    assert float(levels[0]) == pytest.approx(-(1 - 0.9 / 128))


def relative_error(values: Tensor, exact: Tensor) -> float:
    return float((values - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_relative_errors_on_normal_values():
    torch.manual_seed(0)
    exact = 0.02 * torch.randn(256 * 256)
    codes, scales = quantize_nf4(exact)
    nf4_error = relative_error(dequantize(codes, scales, len(exact), torch.float32), exact)
    double_scales = dequantize_scales(*quantize_scales(scales))
    assert 0.085 < nf4_error < 0.1  # the probe of bitsandbytes in hardware/ expects the same 9%
    assert (
        relative_error(dequantize(codes, double_scales, len(exact), torch.float32), exact)
        < 1.01 * nf4_error
    )
    int8_values = torch.empty_like(exact)
    dequantize_int8(*quantize_int8(exact), int8_values)
    by_row = exact.view(256, 256)
    step = by_row.abs().amax(1, keepdim=True) / 127
    row_error = relative_error((by_row / step).round() * step, by_row)
    # why int8 has a scale for each 64 weights
    assert relative_error(int8_values, exact) < 0.0065 < row_error


def test_int8_codes_and_scale_are_those_computed_by_hand():
    values = torch.tensor([1.27, -1.27, 0.0149, 0.635, 0.0])
    codes, scales = quantize_int8(values)
    assert codes.tolist() == [127, -127, 1, 63 if codes[3] == 63 else 64, 0]
    assert float(scales) == pytest.approx(0.01)


def test_zeros_stay_zeros():
    codes, scales = quantize_nf4(torch.zeros(WEIGHTS_BLOCK))
    assert torch.equal(
        dequantize(codes, scales, WEIGHTS_BLOCK, torch.float32), torch.zeros(WEIGHTS_BLOCK)
    )


@pytest.mark.parametrize(
    ("base", "double", "bytes_per_weight"),
    [
        ("nf4", True, 0.5 + 1 / 64 + 4 / 64 / 256),
        ("nf4", False, 0.5 + 4 / 64),
        ("int8", True, 1 + 4 / 64),
    ],
)
def test_bytes_of_a_large_matrix(base, double, bytes_per_weight):
    """4.127 bits of a weight with double quantisation: arXiv:2305.14314, section 3."""
    shape = (4096, 11008)
    assert storage_bytes(shape, base, double) / math.prod(shape) == pytest.approx(
        bytes_per_weight, rel=1e-5
    )
