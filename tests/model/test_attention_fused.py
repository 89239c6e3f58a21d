"""What the GPU's kernels are told, checked where no GPU is."""

import pytest
import torch
from attention_for_tests import documents_of, inputs, run
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

from bloomery.model.attention import attend as fused_attention
from bloomery.model.attention.attend import block_mask, document_offsets, layout_of

PACKED = documents_of([100, 150, -50], [140, 1, 159])


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize("documents", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("length", [256, 300])
def test_block_mask_equals_torchs(
    documents: torch.Tensor | None, window: int | None, length: int
) -> None:
    first_BT = (
        None if documents is None else layout_of(documents[:, :length], backend="flex").first_BT
    )
    our_mask = block_mask(first_BT, length, window, torch.device("cpu"))
    batch = 1 if first_BT is None else 2
    their_mask = create_block_mask(our_mask.mask_mod, batch, 1, length, length, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(our_mask, name), getattr(their_mask, name)), name
    assert torch.equal(our_mask.to_dense(), their_mask.to_dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("documents", [None, PACKED], ids=["whole", "packed"])
def test_flex_attention_agrees_with_math(
    documents, options, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the same function, uncompiled
    monkeypatch.setattr(fused_attention, "_compiled_flex", lambda: flex_attention)
    qkv = tuple(x.detach() for x in inputs(300, dtype=torch.float32))
    assert_close(
        run("flex", qkv, documents, **options),
        run("math", qkv, documents, **options),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.soak
def test_compiled_flex_attention_agrees_with_math() -> None:
    qkv = tuple(x.detach() for x in inputs(300, width=16, dtype=torch.float32))
    assert_close(run("flex", qkv, PACKED), run("math", qkv, PACKED), atol=1e-5, rtol=1e-5)


def test_offsets_end_with_empty_documents() -> None:
    first_BT = layout_of(documents_of([2, 3], [1, 4]), backend="blockwise").first_BT
    assert document_offsets(first_BT).tolist() == [0, 2, 5, 6, 10]
    first_BT = layout_of(documents_of([2, 3, 1, 1, 1], [8]), backend="varlen").first_BT
    assert document_offsets(first_BT).tolist() == [0, 2, 5, 6, 7, 8, 16, 16, 16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "backend",
    ["varlen", pytest.param("flex", marks=pytest.mark.cpu_only("a GPU compiles it with Triton"))],
)
def test_fused_kernels_agree_with_math(backend: str) -> None:
    qkv = tuple(
        x.detach().cuda().requires_grad_() for x in inputs(300, width=64, dtype=torch.bfloat16)
    )
    output, exact_output = (run(name, qkv, PACKED.cuda()) for name in (backend, "math"))
    assert (output - exact_output).norm() < 0.01 * exact_output.norm()
    upstream = torch.randn_like(exact_output)
    for gradient, exact_gradient in zip(
        *(torch.autograd.grad(result, qkv, upstream) for result in (output, exact_output)),
        strict=True,
    ):
        assert (gradient - exact_gradient).norm() < 0.02 * exact_gradient.norm()
