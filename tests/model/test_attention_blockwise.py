"""Blockwise attention: gradients of every feature, dropout, determinism and memory."""

import pytest
import torch
from attention_for_tests import documents_of, inputs, run, with_gradients
from benchmarks.memory_tracker import peak_bytes
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from bloomery.model.attention import blockwise
from bloomery.model.attention.attend import attend, layout_of

PACKED = documents_of([2, 5, -1])
FEATURES = {"window": 3, "softcap": 1.5, "dropout": 0.4}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK", 3)


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("backend", ["blockwise", "per_document"])
@pytest.mark.parametrize("documents", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("features", ["", "window", "softcap", "dropout", "window+softcap+dropout"])
@pytest.mark.parametrize(
    "key_heads", [1, pytest.param(2, marks=pytest.mark.soak)], ids=["shared", "own"]
)
def test_gradients_pass_gradcheck(
    backend: str, documents: torch.Tensor | None, features: str, key_heads: int
) -> None:
    qkv = inputs(8, batch=1, heads=2, key_heads=key_heads, width=2)
    options = {name: FEATURES[name] for name in features.split("+") if name}
    assert gradcheck(lambda *qkv: run(backend, qkv, documents, **options), qkv)


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_a_batch_computed_one_by_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs(40)
    documents = documents_of([3, 37], [20, 11, -9])
    expected = with_gradients("blockwise", qkv, documents, window=7)
    monkeypatch.setattr(blockwise, "CPU_SCORES", 1)
    assert_close(with_gradients("blockwise", qkv, documents, window=7), expected)
    short_qkv = inputs(5, heads=1, key_heads=1, width=2)
    assert gradcheck(lambda *qkv: run("blockwise", qkv, dropout=0.4), short_qkv)


@pytest.mark.usefixtures("small_blocks")
def test_foreign_and_far_blocks_are_skipped() -> None:
    first_BT = torch.tensor([[0] * 5 + [5] * 7, [0] * 3 + [3] * 9])
    task = blockwise.AttentionCall(
        first_BT, blockwise.reach_of(first_BT), None, None, None, 1.0, 0.0
    )
    assert _touched(task) == [[0], [1, 0], [2, 1], [3, 2, 1]]
    assert _touched(blockwise.AttentionCall(None, None, None, 2, None, 1.0, 0.0)) == [
        [0],
        [1, 0],
        [2, 1],
        [3, 2],
    ]


def _touched(task: blockwise.AttentionCall) -> list[list[int]]:
    return [[tile.keys.start // 3 for tile in tiles] for _, tiles in task.query_blocks(12)]


@pytest.mark.parametrize("backend", ["blockwise", "per_document"])
def test_dropout_keeps_the_expectation(backend: str) -> None:
    documents = documents_of([100, 200, 212])
    qkv = tuple(x.detach() for x in inputs(512, batch=1, heads=2, key_heads=1, dtype=torch.float32))
    # the output is then the sum of the kept shares
    qkv_of_ones = (qkv[0], qkv[1], torch.ones_like(qkv[2]))
    mean_share = torch.stack(
        [run(backend, qkv_of_ones, documents, dropout=0.3, seed=seed) for seed in range(40)]
    ).mean()
    assert abs(mean_share.item() - 1) < 0.01
    expected = run(backend, qkv, documents)
    mean_output = torch.stack(
        [run(backend, qkv, documents, dropout=0.1, seed=seed) for seed in range(60)]
    ).mean(0)
    assert (mean_output - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("backend", ["blockwise", "per_document"])
def test_dropout_repeats_with_the_default_generator_alone(backend: str) -> None:
    documents = documents_of([40, 260], [300])
    qkv = inputs(300, dtype=torch.float32)
    results, repeated_results, results_of_another_seed = (
        with_gradients(backend, qkv, documents, dropout=0.2, seed=seed) for seed in (1, 1, 2)
    )
    assert all(
        torch.equal(result, repeated_result)
        for result, repeated_result in zip(results, repeated_results, strict=True)
    )
    assert not torch.equal(results[0], results_of_another_seed[0])
    state = torch.get_rng_state()
    torch.randint(2**62, ())
    torch.set_rng_state(state)
    assert torch.equal(
        run(backend, qkv, documents, dropout=0.2), run(backend, qkv, documents, dropout=0.2)
    )


@pytest.mark.parametrize("backend", ["blockwise", "per_document"])
def test_activation_checkpointing_regenerates_the_same_mask(backend: str) -> None:
    q, k, v = inputs(60)
    layout = layout_of(documents_of([20, 40], [60]), backend=backend)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return attend(
            q, k, v, layout, backend=backend, window=None, softcap=None, scale=0.4, dropout=0.5
        )

    gradients = []
    for forward in (layer, lambda q: checkpoint(layer, q, use_reentrant=False)):
        torch.manual_seed(4)
        gradients.append(torch.autograd.grad(forward(q).square().sum(), q)[0])
    assert torch.equal(*gradients)


@pytest.mark.usefixtures("small_blocks")
def test_dropout_drops_shares_at_its_rate() -> None:
    task = blockwise.AttentionCall(None, None, torch.tensor(9), None, None, 1.0, 0.25)
    masks = [
        task.dropped(blockwise.Tile(n, slice(0), False), torch.empty(3, 99, 33)) for n in range(4)
    ]
    assert all(abs(mask.float().mean().item() - 0.25) < 0.02 for mask in masks)
    assert not torch.equal(masks[0], masks[1])
    assert task.boost == 4 / 3


def test_gradients_use_the_mask_of_the_output() -> None:
    """dv = shares_T @ upstream: with v the identity, the output is the very matrix of kept shares."""
    q, k, _ = inputs(300, batch=1, heads=1, key_heads=1, dtype=torch.float64)
    v = torch.eye(300, dtype=torch.float64)[None, None].requires_grad_()
    q, k = (torch.nn.functional.pad(x.detach(), (0, 292)).requires_grad_() for x in (q, k))
    shares = run("blockwise", (q, k, v), dropout=0.5)
    upstream = torch.randn_like(v)
    (dv,) = torch.autograd.grad(shares, v, upstream)
    assert_close(dv, shares.detach().mT @ upstream)


@pytest.mark.parametrize(
    ("length", "part"), [(3072, 11), pytest.param(8192, 30, marks=pytest.mark.soak)]
)
def test_memory_is_a_small_part_of_that_of_math_attention(length: int, part: int) -> None:
    qkv = inputs(length, batch=1, heads=1, key_heads=1, width=64, dtype=torch.float32)
    documents = documents_of([length // 3, length - length // 3])
    math_bytes = peak_bytes(lambda: with_gradients("math", qkv, None))
    for packed, options in ((None, {}), (documents, {"dropout": 0.1, "softcap": 30.0})):
        blockwise_bytes = peak_bytes(
            lambda packed=packed, options=options: with_gradients(
                "blockwise", qkv, packed, **options
            )
        )
        assert blockwise_bytes < math_bytes / part
