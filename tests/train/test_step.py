import math
from collections import Counter

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.data.batch import Batch
from bloomery.model.native import find_compiler
from bloomery.parallel.apply import apply
from bloomery.train.objectives.build import pretraining
from bloomery.train.objectives.losses import LossParts
from bloomery.train.objectives.objective import Objective
from bloomery.train.state import build_state
from bloomery.train.step import LossScale, ModelAndOptimizer, clip_factor, global_norm, train_step

OBJECTIVE = pretraining(score_chunk=64)


def batch(rows: int, seed: int = 0) -> Batch:
    """Random tokens in two documents a row; about a third of the labels are not learned."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (rows, 33), generator=generator)
    documents = (torch.arange(32) >= 20).long().expand(rows, -1)
    positions = torch.where(documents == 1, torch.arange(32) - 20, torch.arange(32))
    weights = (torch.rand(rows, 32, generator=generator) > 0.3).float()
    return Batch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, positions, documents
    )


def halves(rows: Batch) -> list[Batch]:
    """Two rows and the rest: micro-batches with different numbers of learned labels."""
    tensors = rows.tokens, rows.labels, rows.loss_mask, rows.positions, rows.documents
    return [Batch(*(t[:2] for t in tensors)), Batch(*(t[2:] for t in tensors))]


def model_and_optimizer(config=None, **sections) -> tuple[ModelAndOptimizer, object]:
    plan = tiny_plan(config=config, **sections)
    return build_state(plan).model_and_optimizer, plan.train


def weights(learner: ModelAndOptimizer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def poisoned(value: float) -> Objective:
    """The loss becomes `value` times itself."""
    return Objective(
        OBJECTIVE.head,
        lambda output, inputs: LossParts(
            OBJECTIVE.loss(output, inputs).total * value, inputs.loss_mask.sum()
        ),
    )


def test_accumulation_takes_the_step_of_one_large_batch():
    accumulating_none, plan = model_and_optimizer()
    accumulating, _ = model_and_optimizer()
    large_batch = batch(5)
    single_step = train_step(accumulating_none, [large_batch], OBJECTIVE, plan=plan, lr_scale=1.0)
    accumulated_step = train_step(
        accumulating, halves(large_batch), OBJECTIVE, plan=plan, lr_scale=1.0
    )
    assert single_step.loss == pytest.approx(accumulated_step.loss, rel=1e-6)
    assert single_step.grad_norm == pytest.approx(accumulated_step.grad_norm, rel=1e-5)
    for weight, accumulated_weight in zip(
        weights(accumulating_none), weights(accumulating), strict=True
    ):
        torch.testing.assert_close(weight, accumulated_weight, atol=2e-5, rtol=0)


def test_another_order_of_micro_batches_takes_the_same_step():
    """As a stage of GPipe: every forward first. Dropout masks belong to the micro-batch, whatever ran before."""
    config = tiny_config(residual_dropout=0.2)
    alternating, plan = model_and_optimizer(config)
    pipelined, _ = model_and_optimizer(config)
    forwards_first = plan.model_copy(update={"pipeline_schedule": "gpipe"})
    results = [
        train_step(learner, halves(batch(5)), OBJECTIVE, plan=train_plan, lr_scale=1.0)
        for learner, train_plan in ((alternating, plan), (pipelined, forwards_first))
    ]
    assert results[0] == results[1]
    assert all(
        torch.equal(weight, pipelined_weight)
        for weight, pipelined_weight in zip(weights(alternating), weights(pipelined), strict=True)
    )


def test_loss_is_the_mean_over_learned_labels():
    learner, plan = model_and_optimizer()
    rows = batch(3)
    with torch.no_grad():
        logits = learner.model(
            rows.tokens, positions_BT=rows.positions, documents_BT=rows.documents
        ).head
    label_losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), rows.labels, reduction="none"
    )
    expected = (label_losses * rows.loss_mask).sum() / rows.loss_mask.sum()
    assert train_step(learner, [rows], OBJECTIVE, plan=plan, lr_scale=1.0).loss == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_clipping_is_torchs():
    parameters = [torch.nn.Parameter(torch.zeros(7)), torch.nn.Parameter(torch.zeros(3, 2))]
    for seed, parameter in enumerate(parameters):
        parameter.grad = (
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 3
        )
    our_gradients = [parameter.grad.clone() for parameter in parameters]
    norm = global_norm(dict(enumerate(our_gradients)))
    their_norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(norm, their_norm)
    for gradient, parameter in zip(our_gradients, parameters, strict=True):
        torch.testing.assert_close(gradient * clip_factor(norm.item(), 1.0), parameter.grad)
    assert clip_factor(0.5, 1.0) == clip_factor(9.0, None) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_matrix_on_a_cpu_is_right_to_five_digits(dtype):
    """One float32 sum over it is off in the fourth: squares that are added to it come to less than its last digits."""
    generator = torch.Generator().manual_seed(0)
    gradient = (torch.randn(2**12, 2**12, generator=generator) * 1e-3).to(dtype)
    exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    assert float(global_norm({"embedding": gradient})) == pytest.approx(exact, rel=1e-5)


def test_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16():
    assert global_norm(
        {"weight": torch.full((3,), 1.0, dtype=torch.bfloat16)}
    ).item() == pytest.approx(math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-pure", "float16"])
def test_what_is_not_finite_never_reaches_weights_or_states(value, precision):
    learner, plan = model_and_optimizer(train={"precision": precision})
    train_step(learner, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    weights_before = weights(learner)
    states = learner.optimizer.named_tensors()
    states_before = {name: state.clone() for name, state in states.items()}
    scalars_before = learner.optimizer.scalars()
    result = train_step(
        learner, [batch(2, 1), batch(2, 2)], poisoned(value), plan=plan, lr_scale=1.0
    )
    assert not result.taken
    assert not math.isfinite(result.loss)
    assert all(
        torch.equal(weight, weight_before)
        for weight, weight_before in zip(weights(learner), weights_before, strict=True)
    )
    assert all(
        torch.equal(value, states_before[name])
        for name, value in learner.optimizer.named_tensors().items()
    )
    assert learner.optimizer.scalars() == scalars_before
    assert all(parameter.grad is None for parameter in learner.model.parameters())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-pure", "float16"])
@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_every_precision_learns_a_batch_by_heart(precision, kind):
    learner, plan = model_and_optimizer(
        train={"precision": precision}, optimizer={"kind": kind, "learning_rate": 0.02}
    )
    results = [
        train_step(learner, [batch(4)], OBJECTIVE, plan=plan, lr_scale=1.0) for _ in range(25)
    ]
    assert results[0].loss == pytest.approx(math.log(97), abs=0.5)
    assert results[-1].loss < results[0].loss - 0.5
    weight_dtype = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
    assert {parameter.dtype for parameter in learner.model.parameters()} == {weight_dtype}


def test_float16_overflow_is_skipped_and_halves_the_scale():
    learner, plan = model_and_optimizer(train={"precision": "float16"})
    learner.loss_scale.value = 2.0**40
    weights_before = weights(learner)
    result = train_step(learner, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    assert result.overflowed
    assert math.isfinite(result.loss)
    assert learner.loss_scale.value == 2.0**39
    assert all(
        torch.equal(weight, weight_before)
        for weight, weight_before in zip(weights(learner), weights_before, strict=True)
    )


def test_float16_gradients_do_not_depend_on_the_scale():
    norms = []
    for scale in (1.0, 2.0**10):
        learner, plan = model_and_optimizer(train={"precision": "float16"})
        learner.loss_scale.value = scale
        norms.append(train_step(learner, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_loss_scale_follows_torchs_grad_scaler():
    loss_scale = LossScale()
    grad_scaler = torch.amp.GradScaler("cpu")
    grad_scaler.scale(torch.zeros(()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for step in range(4100):
        is_finite = step not in (3, 4, 3000)
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([1.0 if is_finite else math.inf])
        grad_scaler.unscale_(optimizer)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        loss_scale.update(finite=is_finite)
        assert loss_scale.value == grad_scaler.get_scale(), step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["full", "selective", "every-2"])
@pytest.mark.parametrize("attention", ["mask", "per_document", "compiled", "blockwise"])
def test_activation_checkpointing_changes_no_bit(mode, attention):
    config = tiny_config(residual_dropout=0.2)
    storing, plan = model_and_optimizer(config, model={"attention": attention})
    checkpointing, _ = model_and_optimizer(
        config, model={"attention": attention}, train={"activation_checkpointing": mode}
    )
    assert [name for name, _ in storing.model.named_parameters()] == [
        name for name, _ in checkpointing.model.named_parameters()
    ]
    losses = []
    for learner in (storing, checkpointing):
        torch.manual_seed(1)
        losses.append(
            [
                train_step(learner, [batch(2, seed)], OBJECTIVE, plan=plan, lr_scale=1.0).loss
                for seed in range(3)
            ]
        )
    assert losses[0] == losses[1]
    for weight, checkpointed_weight in zip(weights(storing), weights(checkpointing), strict=True):
        assert torch.equal(weight, checkpointed_weight)


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_checkpointing_repeats_what_its_mode_says():
    calls = {}
    for mode in ("none", "selective", "every-2", "full"):
        learner, plan = model_and_optimizer(
            tiny_config(num_layers=4), train={"activation_checkpointing": mode}
        )
        with Counted() as counter:
            train_step(learner, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
        calls[mode] = counter.calls
    products = {mode: count["mm"] for mode, count in calls.items()}
    assert products["none"] == products["selective"] < products["every-2"] < products["full"]
    activations = {mode: count["silu"] for mode, count in calls.items()}
    assert activations == {"none": 4, "every-2": 6, "selective": 8, "full": 8}


def test_compiled_blocks_are_asked_for_one_by_one(monkeypatch):
    learner, plan = model_and_optimizer(tiny_config(num_layers=3))
    compiled_blocks = []
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compiled_blocks.append((type(self).__name__, options)),
    )
    apply(learner.model, plan.model_copy(update={"compile": True}))
    assert compiled_blocks == [("Block", {"dynamic": False})] * 3


@pytest.mark.cpu_only("compiled attention and scores are a CPU's")
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_step_of_compiled_code_is_one_of_torch() -> None:
    config = tiny_config(tie_embeddings=True)
    step_results = []
    for backends in (
        {"attention": "per_document"},
        {"attention": "compiled", "scores": "compiled"},
    ):
        learner, plan = model_and_optimizer(config, model=backends)
        assert learner.model.model.adds_rows == (backends["attention"] == "compiled")
        step_results.append(
            [
                train_step(learner, [batch(2, seed)], OBJECTIVE, plan=plan, lr_scale=1.0)
                for seed in range(4)
            ]
        )
    for torch_step, compiled_step in zip(*step_results, strict=True):
        assert torch_step.loss == pytest.approx(compiled_step.loss, rel=1e-5)
        assert torch_step.grad_norm == pytest.approx(compiled_step.grad_norm, rel=1e-4)
