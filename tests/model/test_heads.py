"""Scores of labels equal log_softmax, whatever the chunk, the dtype and the upstream gradient."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.memory_tracker import peak_bytes
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from bloomery.model import divergence, heads
from bloomery.model.heads import (
    LabelScores,
    LastLogits,
    Logits,
    ScoreOperators,
    ScoreSettings,
    label_scores,
)

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="torch.compile needs a C++ compiler here"
)


def example(
    dtype: torch.dtype = torch.float64, vocab: int = 13
) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 8, dtype=torch.float64).to(dtype).requires_grad_()
    output = nn.Linear(8, vocab, bias=False).to(dtype)
    return hidden, output, torch.randint(vocab, (2, 9)), (torch.rand(2, 9) < 0.6).float()


def reference(
    hidden: Tensor, output: nn.Linear, labels: Tensor, weights: Tensor, softcap: float | None
) -> Tensor:
    logits = Logits()(hidden, output, softcap).double()
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1) * weights


def gradients(scores: Tensor, hidden: Tensor, output: nn.Linear) -> tuple[Tensor, ...]:
    upstream = torch.randn(
        scores.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return torch.autograd.grad(scores, (hidden, output.weight), upstream.to(scores.dtype))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_scores_and_gradients_are_those_of_log_softmax(chunk: int, softcap: float | None) -> None:
    hidden, output, labels, weights = example()
    scores = LabelScores(labels, weights, ScoreSettings(chunk))(hidden, output, softcap)
    expected = reference(hidden, output, labels, weights, softcap)
    assert_close(scores, expected)
    assert_close(gradients(scores, hidden, output), gradients(expected, hidden, output))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_pass_gradcheck(softcap: float | None) -> None:
    hidden, output, labels, _ = example()
    settings = ScoreSettings(4, softcap=softcap)
    assert gradcheck(
        lambda h, w: label_scores(h, w, labels[0], settings), (hidden[0], output.weight)
    )


def test_rows_without_weight_are_dropped_before_the_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    row_counts = []
    monkeypatch.setattr(
        heads,
        "_log_sums",
        lambda logits, cap: row_counts.append(len(logits)) or torch.logsumexp(logits, 1),
    )
    hidden, output, labels, weights = example()
    weights[0] = 0
    scores = LabelScores(labels, weights, ScoreSettings(3))(hidden, output, None)
    assert sum(row_counts) == weights.sum()
    d_hidden, _ = gradients(scores, hidden, output)
    assert not d_hidden[weights == 0].any()
    assert not scores[weights == 0].any()


def test_labels_without_weight_give_zero_scores_and_gradients() -> None:
    hidden, output, labels, weights = example()
    scores = LabelScores(labels, weights * 0, ScoreSettings(4))(hidden, output, None)
    d_hidden, d_weight = gradients(scores, hidden, output)
    assert not scores.any()
    assert not d_hidden.any()
    assert not d_weight.any()


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, output, labels, weights = example()
    output.requires_grad_(False)
    LabelScores(labels, weights, ScoreSettings(4))(hidden, output, None).sum().backward()
    assert hidden.grad is not None
    assert output.weight.grad is None


def test_tied_weights_sum_both_gradients() -> None:
    _, output, labels, weights = example()
    embedding = nn.Embedding(13, 8, dtype=torch.float64)
    embedding.weight = output.weight

    def gradient(score: object) -> Tensor:
        return torch.autograd.grad(score(embedding(labels), output, None).sum(), output.weight)[0]

    assert_close(
        gradient(LabelScores(labels, weights, ScoreSettings(4))),
        gradient(lambda hidden, layer, cap: reference(hidden, layer, labels, weights, cap)),
    )


@pytest.mark.parametrize("chunk", [5, 1000])
def test_half_precision_weights_give_scores_in_float32(chunk: int) -> None:
    hidden, output, labels, weights = example(torch.bfloat16)
    scores = LabelScores(labels, weights, ScoreSettings(chunk))(hidden, output, 2.0)
    assert scores.dtype == torch.float32
    exact_scores = reference(hidden.double(), output.double(), labels, weights, 2.0)
    assert_close(scores.double(), exact_scores, atol=0.02, rtol=0)


def test_autocast_multiplies_in_half_and_sums_in_float32() -> None:
    hidden, output, labels, weights = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        scores = LabelScores(labels, weights, ScoreSettings(4))(hidden, output, None)
        expected = reference(hidden, output, labels, weights, None)
    assert scores.dtype == torch.float32
    assert_close(scores, expected.float(), atol=1e-5, rtol=0)  # the bf16 logits are the same
    for gradient, expected_gradient in zip(
        gradients(scores, hidden, output), gradients(expected, hidden, output), strict=True
    ):
        assert gradient.dtype == torch.float32
        assert (gradient - expected_gradient).norm() < 0.02 * expected_gradient.norm()


def test_memory_follows_the_chunk() -> None:
    hidden = torch.randn(1024, 16, requires_grad=True)
    weight = torch.randn(4096, 16, requires_grad=True)

    def peak(chunk: int) -> int:
        settings = ScoreSettings(chunk)
        labels = torch.zeros(1024, dtype=torch.int64)
        return peak_bytes(lambda: label_scores(hidden, weight, labels, settings).sum().backward())

    assert peak(32) < peak(1024) / 10


def test_logits_that_fit_one_chunk_are_not_computed_twice() -> None:
    hidden = torch.randn(64, 16, requires_grad=True)
    weight = torch.randn(128, 16, requires_grad=True)

    def flops(chunk: int) -> int:
        settings = ScoreSettings(chunk)
        with FlopCounterMode(display=False) as counter:
            label_scores(
                hidden, weight, torch.zeros(64, dtype=torch.int64), settings
            ).sum().backward()
        return counter.get_total_flops()

    assert flops(16) - flops(64) == 2 * 64 * 16 * 128


def test_kept_logits_serve_one_backward_and_refuse_a_second() -> None:
    hidden, output, labels, weights = example()
    scores = LabelScores(labels, weights, ScoreSettings(1000))(hidden, output, None)
    scores.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_last_logits_are_those_of_the_last_position() -> None:
    hidden, output, _, _ = example()
    assert_close(LastLogits()(hidden, output, 3.0), Logits()(hidden, output, 3.0)[:, -1])


def test_whole_model_compilation_keeps_shapes() -> None:
    hidden, output, labels, weights = example()
    head = LabelScores(labels, weights, ScoreSettings(4))
    compiled = torch.compile(
        lambda hidden: head(hidden, output, None), backend="eager", fullgraph=True, dynamic=False
    )
    assert_close(compiled(hidden), reference(hidden, output, labels, weights, None))


def captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `compiled_once`, without the C++ compiler's half minute: what is captured runs operator by operator."""
    return torch.compile(function, backend="aot_eager", dynamic=False)


@pytest.mark.parametrize("softcap", [2.0, None])
@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(
    "fuse",
    [captured, pytest.param(heads.compiled_once, marks=[needs_compiler, pytest.mark.soak])],
    ids=["captured", "compiled"],
)
def test_compiled_pointwise_parts_compute_the_same_and_repeat(
    fuse: Callable[..., Any], softcap: float | None, chunk: int
) -> None:
    torch._dynamo.reset()
    hidden, output, labels, weights = example()
    results = []
    for _ in range(2):
        operators = ScoreOperators(fuse=fuse)
        settings = ScoreSettings(chunk, compiled=True, operators=operators)
        scores = LabelScores(labels, weights, settings)(hidden, output, softcap)
        results.append((scores.detach(), *gradients(scores, hidden, output)))
    expected = reference(hidden, output, labels, weights, softcap)
    assert_close(results[0], (expected.detach(), *gradients(expected, hidden, output)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


REPEAT = """
import hashlib, torch
from torch import nn
from bloomery.model.heads import LabelScores, ScoreSettings
torch.manual_seed(0)
digest = hashlib.sha256()
output = nn.Linear(96, 5003, bias=False)
for step in range(6):
    hidden = torch.randn(4, 128, 96, requires_grad=True)
    labels, weights = torch.randint(5003, (4, 128)), (torch.rand(4, 128) < 0.9).float()
    with torch.autocast("cpu", torch.bfloat16):
        settings = ScoreSettings(200 if step % 2 else 512, compiled=True)
        scores = LabelScores(labels, weights, settings)(hidden, output, None)
    (-scores.sum() / weights.sum()).backward()
    for x in (scores, hidden.grad, output.weight.grad):
        digest.update(x.detach().numpy().tobytes())
    with torch.no_grad():
        output.weight -= output.weight.grad
        output.weight.grad = None
print(digest.hexdigest())
"""


@needs_compiler
@pytest.mark.soak
def test_a_compiled_head_is_bitwise_over_restarts_and_fresh_caches(tmp_path: Path) -> None:
    def run(cache: str) -> str:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache)}
        command = [sys.executable, "-c", REPEAT]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert len({run("a"), run("a"), run("b")}) == 1


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tile", [1, 5, 13])
def test_tiles_of_the_vocabulary_change_no_score_and_no_gradient(
    tile: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CPU_TILE", tile)
    hidden, output, labels, weights = example()
    scores = LabelScores(labels, weights, ScoreSettings(4))(hidden, output, softcap)
    expected = reference(hidden, output, labels, weights, softcap)
    assert_close(scores, expected)
    assert_close(gradients(scores, hidden, output), gradients(expected, hidden, output))


@pytest.mark.parametrize("grad_before", [None, 3.0])
def test_a_gradient_that_goes_straight_into_grad_is_added_to_it(
    grad_before: float | None,
) -> None:
    hidden, output, labels, weights = example()
    (gradient,) = torch.autograd.grad(
        LabelScores(labels, weights, ScoreSettings(4))(hidden, output, None).sum(), output.weight
    )
    output.weight.grad = (
        None if grad_before is None else torch.full_like(output.weight, grad_before)
    )
    LabelScores(labels, weights, ScoreSettings(4, into_grad=True))(
        hidden, output, None
    ).sum().backward()
    assert_close(output.weight.grad, gradient + (grad_before or 0.0))


def test_a_tied_weight_gets_both_of_its_gradients() -> None:
    """Once as an embedding, which autograd adds, and once as the output layer, which adds for itself."""
    torch.manual_seed(0)
    output = nn.Linear(8, 13, bias=False).double()
    tokens = torch.randint(13, (2, 9))

    def gradient(into_grad: bool) -> Tensor:
        output.weight.grad = None
        for _ in range(2):  # accumulated
            hidden = torch.nn.functional.embedding(tokens, output.weight).tanh()
            LabelScores(tokens, torch.ones(2, 9), ScoreSettings(4, into_grad=into_grad))(
                hidden, output, None
            ).sum().backward()
        assert output.weight.grad is not None
        return output.weight.grad

    assert_close(gradient(True), gradient(False))


def test_a_large_vocabulary_needs_the_memory_of_a_tile() -> None:
    """All logits would be 32 MB in bfloat16. A tile is 4, beside its passes in float32 and a slice of the weight."""
    hidden = torch.randn(1, 512, 64).bfloat16().requires_grad_()
    output = nn.Linear(64, 32768, bias=False).bfloat16()
    labels = torch.randint(32768, (1, 512))
    weights = torch.ones(1, 512)
    output.weight.grad = torch.zeros_like(output.weight)
    head = LabelScores(labels, weights, ScoreSettings(512, into_grad=True))
    assert peak_bytes(lambda: head(hidden, output, None).sum().backward()) < 22e6


def test_half_precision_on_a_cpu_multiplies_few_shapes_however_many_labels_are_learned() -> None:
    """A CPU keeps kernels for each shape that it ever multiplied in half precision: 700 MB of them after a while."""
    output = nn.Linear(8, 32, bias=False).bfloat16()
    shapes = set()
    for num_learned in range(1, 257, 5):
        hidden = torch.randn(1, 256, 8).bfloat16().requires_grad_()
        labels = torch.randint(32, (1, 256))
        weights = (torch.arange(256) < num_learned).float()[None]
        shape_recorder = {torch.ops.aten.mm: record_shapes(shapes)}
        with FlopCounterMode(display=False, custom_mapping=shape_recorder):
            scores = LabelScores(labels, weights, ScoreSettings(256))(hidden, output, None)
            scores.sum().backward()
        expected = reference(hidden, output, labels, weights, None)
        assert_close(scores.double(), expected, atol=0.05, rtol=0)
        assert hidden.grad is not None and not hidden.grad[0, num_learned:].any()
    assert len(shapes) == 3 * (4 + 3)  # 241, 246 and 251 nearly are the chunk and stay as they are


def record_shapes(shapes: set[tuple[int, ...]]) -> Callable[..., int]:
    def record(left_shape: list[int], right_shape: list[int], *_: object, **__: object) -> int:
        shapes.add((*left_shape, *right_shape))
        return 0

    return record


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_comparison_a_few_rows_at_a_time_has_the_gradients_of_all(monkeypatch, kind, temperature):
    """Oracle: the same formulas over all logits at once, through PyTorch's autograd."""
    monkeypatch.setattr(divergence, "CPU_BLOCK", 2 * 11)
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    output, teacher_output = nn.Linear(4, 11).double(), nn.Linear(5, 11).double()
    teacher_hidden_NS, upstream = numbers(8, 5), numbers(4, 8)
    labels_BT = torch.randint(0, 11, (1, 8), generator=random)
    measure = divergence.DivergenceMeasure(kind, temperature)
    teacher = divergence.Teacher(lambda positions: teacher_hidden_NS[positions], teacher_output)

    def gradients(head: Callable[[Tensor], Tensor]) -> list[Tensor]:
        hidden_BTD = torch.full((1, 8, 4), 0.3, dtype=torch.float64, requires_grad=True)
        hidden_BTD.data.add_(torch.arange(32, dtype=torch.float64).view(1, 8, 4).sin())
        results = head(hidden_BTD)
        inputs = (hidden_BTD, output.weight, output.bias)
        return [results, *torch.autograd.grad(results, inputs, upstream)]

    def in_pieces(hidden_BTD: Tensor) -> Tensor:
        head = divergence.Divergence(labels_BT, torch.ones(1, 8), 3, measure, teacher)
        return head(hidden_BTD, output, None)[:, 0]

    def at_once(hidden_BTD: Tensor) -> Tensor:
        return divergence._scores_and_divergence(
            output(hidden_BTD[0]),
            teacher_output(teacher_hidden_NS),
            labels_BT[0],
            softcap=None,
            teacher_softcap=None,
            measure=measure,
            at_temperature=False,
            entropy=False,
            entropy_gradient=False,
        )

    for ours, theirs in zip(gradients(in_pieces), gradients(at_once), strict=True):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
