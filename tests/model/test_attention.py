"""Every backend computes what the plainest one computes."""

from unittest import mock

import pytest
import torch
from attention_for_tests import documents_of, inputs, run, with_gradients
from torch import Tensor
from torch.testing import assert_close

from bloomery.facts.attention import BACKENDS, missing_feature
from bloomery.model.attention import per_document
from bloomery.model.attention.attend import attend, causal_mask, layout_of
from bloomery.model.native import find_compiler

PACKED = documents_of([5, 200, 60, -35], [300])
HAS_COMPILER = find_compiler() is not None
COMPILED = pytest.param(
    "compiled", marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
)
ON_CPU = [
    name
    for name, facts in BACKENDS.items()
    if facts.runs_on("cpu") and name != "math" and (HAS_COMPILER or name != "compiled")
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ON_CPU)
def test_backends_agree_with_math(
    backend: str, packed: bool, window: int | None, softcap: float | None
) -> None:
    refusal = missing_feature(
        backend,
        device_type="cpu",
        packed=packed,
        window=window is not None,
        softcap=softcap is not None,
        dropout=False,
    )
    if refusal is not None:
        pytest.skip(refusal)
    documents = PACKED if packed else None
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        qkv = inputs(300, dtype=dtype)
        results = with_gradients(backend, qkv, documents, window=window, softcap=softcap)
        expected = with_gradients("math", qkv, documents, window=window, softcap=softcap)
        assert_close(results, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ON_CPU)
def test_half_types_stay_near_the_exact_result(backend: str) -> None:
    documents = None if backend == "sdpa" else PACKED
    qkv = inputs(300, dtype=torch.bfloat16)
    exact_results = with_gradients(
        "math", tuple(x.detach().double().requires_grad_() for x in qkv), documents
    )
    for result, exact_result in zip(
        with_gradients(backend, qkv, documents), exact_results, strict=True
    ):
        assert result.dtype == torch.bfloat16
        assert (result.double() - exact_result).norm() < 0.01 * exact_result.norm()


@pytest.mark.parametrize("backend", ON_CPU)
def test_autocast_decides_the_dtype(backend: str) -> None:
    q, k, v = inputs(64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = run(backend, (q, k, v.bfloat16()))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_one_graph_serves_every_length() -> None:
    """A length that torch has made a symbol, as it does at the second one that a compiled function sees."""
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    options = {"window": None, "softcap": None, "scale": 0.4, "dropout": 0.0}
    for length in (6, 9):
        qkv = inputs(length)
        assert_close(
            compiled(*qkv, layout_of(None, backend="sdpa"), backend="sdpa", **options),
            run("math", qkv),
        )


def test_documents_do_not_see_each_other() -> None:
    q, k, v = inputs(12, batch=1)
    documents = documents_of([5, 7])
    separate_outputs = [
        run("math", (q[:, :, tokens], k[:, :, tokens], v[:, :, tokens]))
        for tokens in (slice(0, 5), slice(5, 12))
    ]
    for backend in ("mask", "math", "per_document", "blockwise"):
        assert_close(run(backend, (q, k, v), documents), torch.cat(separate_outputs, 2))


@pytest.mark.parametrize("backend", ["mask", "math", "per_document", COMPILED, "blockwise"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"softcap": 2.0}, {"dropout": 0.5}], ids=str
)
def test_padding_is_never_nan(backend: str, options: dict[str, float]) -> None:
    if backend == "mask" and "softcap" in options:
        pytest.skip("no soft-cap")
    for documents in (documents_of([-20]), documents_of([1, -19]), documents_of([19, -1])):
        results = with_gradients(backend, inputs(20, batch=1), documents, **options)
        assert all(x.isfinite().all() for x in results)


def test_queries_are_the_last_positions_of_a_cache() -> None:
    q, k, v = inputs(30)
    for window in (None, 4):
        full_output = run("math", (q, k, v), window=window)
        for backend in ("sdpa", "mask", "math"):
            for num_queries in (1, 7):
                assert_close(
                    run(backend, (q[:, :, -num_queries:], k, v), window=window),
                    full_output[:, :, -num_queries:],
                )


def test_a_window_counts_the_query_itself() -> None:
    mask = causal_mask(2, 4, window=2, device=torch.device("cpu"))
    assert mask.tolist() == [[False, True, True, False], [False, False, True, True]]


def test_sdpa_refuses_documents() -> None:
    with pytest.raises(AssertionError, match="keep documents apart"):
        layout_of(PACKED, backend="sdpa")


@pytest.mark.parametrize("backend", ["per_document", COMPILED, "blockwise"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_compiled_blocks_hold_the_operators_and_never_recompile(
    backend: str, dropout: float
) -> None:
    def block(x: torch.Tensor, layout: object) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (x * 2, x, x + 1))
        output = attend(
            q, k, v, layout, backend=backend, window=None, softcap=None, scale=0.3, dropout=dropout
        )
        return output.transpose(1, 2).flatten(2)

    graphs = []

    def record_graph(graph: torch.fx.GraphModule, _examples: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=record_graph, fullgraph=True, dynamic=False)
    x = torch.randn(1, 60, 32, requires_grad=True)
    for lengths in ([60], [10, 50], [1, 2, 3, 24, 30]):
        layout = layout_of(documents_of(lengths), backend=backend)
        torch.manual_seed(3)
        compiled_output = compiled(x, layout)
        torch.manual_seed(3)
        expected = block(x, layout)
        assert torch.equal(compiled_output, expected)
        assert torch.equal(
            *(
                torch.autograd.grad(output.square().sum(), x)[0]
                for output in (compiled_output, expected)
            )
        )
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["per_document", COMPILED, "blockwise"])
def test_operators_are_well_formed(backend: str) -> None:
    """torch's own check of schema, fake implementation and autograd registration."""
    documents = documents_of([4, 6], [10])
    layout = layout_of(documents, backend=backend)
    arguments = (*inputs(10), layout.first_BT, layout.reach, torch.tensor(5), 4, 2.0, 0.3, 0.5)
    operator = getattr(torch.ops.bloomery, backend).default
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(operator, arguments, test_utils=checks)


def test_documents_of_many_lengths_share_few_kernels() -> None:
    """torch keeps compiled bfloat16 kernels for every length that it has met, megabytes each."""
    kernel_lengths: set[int] = set()
    flash = per_document._flash

    def record_length(q: Tensor, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        kernel_lengths.add(q.shape[2])
        return flash(q, *arguments, **options)

    with mock.patch.object(per_document, "_flash", record_length):
        for first_length in range(1, 257):
            run(
                "per_document",
                inputs(257, batch=1, dtype=torch.bfloat16),
                documents_of([first_length, 257 - first_length]),
            )
    assert kernel_lengths == {64, 128, 192, 256}
