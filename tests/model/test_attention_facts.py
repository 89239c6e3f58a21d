"""The table answers without torch, and the choice is always something that honours the recipe."""

import itertools
import subprocess
import sys

import pytest

from bloomery.facts.attention import BackendSupport, choose_backend, missing_feature
from bloomery.hardware.specs import arch_spec


def test_no_torch_is_imported() -> None:
    code = "import sys, bloomery.facts.attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("device", "fused", "length", "packed", "window", "softcap", "dropout", "expected"),
    [
        ("cpu", False, 256, True, None, None, 0.0, "mask"),
        ("cpu", False, 512, True, None, None, 0.1, "mask"),
        ("cpu", False, 1024, True, None, None, 0.0, "per_document"),
        ("cpu", False, 1024, True, None, None, 0.1, "per_document"),
        ("cpu", False, 1024, False, None, None, 0.0, "sdpa"),
        ("cpu", False, 1024, False, 2048, None, 0.0, "sdpa"),
        ("cpu", False, 256, True, None, 50.0, 0.0, "blockwise"),
        ("cuda", True, 1024, False, None, None, 0.1, "sdpa"),
        ("cuda", True, 1024, True, None, None, 0.0, "varlen"),
        ("cuda", True, 1024, True, 512, None, 0.0, "flex"),
        ("cuda", True, 1024, True, None, 50.0, 0.0, "flex"),
        ("cuda", True, 1024, True, None, None, 0.1, "triton"),
        ("cuda", False, 1024, True, None, None, 0.0, "triton"),
        ("cuda", False, 1024, False, None, None, 0.0, "triton"),
    ],
)
def test_the_backend_of_each_device_and_recipe(
    device, fused, length, packed, window, softcap, dropout, expected
) -> None:
    choice = choose_backend(
        device,
        arch_has_fused=fused,
        sequence_length=length,
        packed=packed,
        window=window,
        softcap=softcap,
        dropout=dropout,
    )
    assert choice.value == expected
    assert choice.reason


@pytest.mark.parametrize(("fused", "dropout"), [(False, 0.0), (True, 0.1)])
def test_blockwise_replaces_triton_where_it_is_not_installed(fused, dropout) -> None:
    choice = choose_backend(
        "cuda",
        arch_has_fused=fused,
        sequence_length=1024,
        packed=True,
        window=None,
        softcap=None,
        dropout=dropout,
        absent={"triton": "Triton is not installed"},
    )
    assert choice.value == "blockwise"


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("sm_61", "blockwise"), ("sm_70", "blockwise"), ("sm_75", "flex"), ("sm_80", "varlen")],
)
def test_a_backend_without_a_kernel_for_the_gpu_is_left_out(arch, expected) -> None:
    """FlashAttention-2, the kernel of varlen_attn, begins at sm_80; FlexAttention needs torch.compile."""
    spec = arch_spec(arch)
    choice = choose_backend(
        "cuda",
        arch_has_fused=True,
        sequence_length=1024,
        packed=True,
        window=None,
        softcap=None,
        dropout=0.0,
        absent=spec.absent_attention() | {"triton": "Triton is not installed"},
    )
    assert choice.value == expected


def test_a_choice_always_honours_the_recipe() -> None:
    requests = itertools.product(
        ("cpu", "cuda"),
        (False, True),
        (128, 4096),
        (False, True),
        (None, 64),
        (None, 9.0),
        (0.0, 0.1),
        (False, True),
        ("2.9.1", "2.13.0"),
    )
    for device, fused, length, packed, window, softcap, dropout, float32, torch in requests:
        backend = choose_backend(
            device,
            arch_has_fused=fused,
            sequence_length=length,
            packed=packed,
            window=window,
            softcap=softcap,
            dropout=dropout,
            float32=float32,
            torch=torch,
        ).value
        assert not missing_feature(
            backend,
            device_type=device,
            packed=packed,
            window=window is not None,
            softcap=softcap is not None,
            dropout=dropout > 0,
            float32=float32,
            torch=torch,
        )


def test_refusals_state_the_reason() -> None:
    request = {"packed": True, "window": False, "softcap": False, "dropout": False}
    assert "documents" in str(missing_feature("sdpa", device_type="cpu", **request))
    assert "CPU" in str(missing_feature("varlen", device_type="cpu", **request))
    assert "2.12" in str(
        missing_feature("varlen", device_type="cuda", torch="2.10.0+rocm6.4", **request)
    )
    assert "16-bit" in str(missing_feature("varlen", device_type="cuda", float32=True, **request))
    with pytest.raises(KeyError):
        missing_feature("magic", device_type="cpu", **request)


@pytest.mark.parametrize(
    "incomplete_facts", [{"needs": "cpu"}, {"needs_reason": "it has no kernel"}]
)
def test_a_backend_says_why_it_needs_something_of_a_device(incomplete_facts) -> None:
    with pytest.raises(AssertionError, match="says why in `needs_reason`"):
        BackendSupport(operators=(), **incomplete_facts)
