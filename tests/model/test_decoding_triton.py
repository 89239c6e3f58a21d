"""Triton's kernel for decoding over a KV cache, in Triton's interpreter, and compiled for GPUs that are not here."""

import pytest
from test_attention_triton import ALLOWED_ROUNDINGS, ROUNDING, assert_fits, compiled_rows
from triton_here import in_interpreter


def assert_right(case: dict) -> None:
    rounding = ROUNDING[case["dtype"]] * ALLOWED_ROUNDINGS[case["dtype"]]
    assert case["error"] <= max(case["math"], rounding), case
    assert case["same_shape"], case
    assert case["repeats"], case


def test_the_kernel_is_as_exact_as_math_attention():
    # Small ones, which between them have each precision and every option.
    cases = in_interpreter("triton_decoding.py", 3, 5, 62, 72, 190, 201)
    assert len({case["dtype"] for case in cases}) == 3 and len(cases) == 6
    assert {case["softcap"] for case in cases} == {None, 4.0}
    assert max(max(case["counts"]) for case in cases) > 256  # several programs share a text
    for case in cases:
        assert_right(case)


@pytest.mark.soak
def test_two_hundred_random_cases():
    for case in in_interpreter("triton_decoding.py", *range(209)):
        assert_right(case)


def test_texts_are_those_of_sdpa():
    """With windows and soft-capping, for slots of one length and of several."""
    (calls,) = in_interpreter("triton_generation.py")
    assert min(calls.values()) > 20


@pytest.mark.parametrize("arch", ["gfx1030", "gfx906"])
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(arch):
    for row in compiled_rows("--arch", arch, "--width", "64", "128", "--kernel", "decode"):
        assert_fits(row)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ["gfx906", "gfx908", "gfx1012", "gfx1030"])
def test_the_kernel_compiles_without_spills(arch):
    widths = ["64", "128"] if arch == "gfx906" else ["64", "128", "256"]  # gfx906 spills 25 at 256
    rows = compiled_rows("--arch", arch, "--kernel", "decode", "--width", *widths)
    assert len(rows) == len(widths)
    for row in rows:
        assert_fits(row)
