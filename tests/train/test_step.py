import math
from collections import Counter

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.data.batch import Batch
from bloomery.model.native import find_compiler
from bloomery.parallel.apply import apply
from bloomery.train.objectives.build import Objective, pretraining
from bloomery.train.objectives.losses import LossParts
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


def halves(whole: Batch) -> list[Batch]:
    """Two rows and the rest: micro-batches with different numbers of learned labels."""
    tensors = whole.tokens, whole.labels, whole.loss_mask, whole.positions, whole.documents
    return [Batch(*(t[:2] for t in tensors)), Batch(*(t[2:] for t in tensors))]


def model_and_optimizer(config=None, **sections) -> tuple[ModelAndOptimizer, object]:
    plan = tiny_plan(config=config, **sections)
    return build_state(plan).model_and_optimizer, plan.train


def weights(who: ModelAndOptimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in who.model.parameters()]


def poisoned(value: float) -> Objective:
    """The loss becomes `value` times itself."""
    return Objective(
        OBJECTIVE.head,
        lambda out, b: LossParts(OBJECTIVE.loss(out, b).total * value, b.loss_mask.sum()),
    )


def test_accumulation_takes_the_step_of_one_large_batch():
    one, plan = model_and_optimizer()
    two, _ = model_and_optimizer()
    whole = batch(5)
    a = train_step(one, [whole], OBJECTIVE, plan=plan, lr_scale=1.0)
    b = train_step(two, halves(whole), OBJECTIVE, plan=plan, lr_scale=1.0)
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    for p, q in zip(weights(one), weights(two), strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=0)


def test_another_order_of_micro_batches_takes_the_same_step():
    """As a stage of GPipe: every forward first. Dropout masks belong to the micro-batch, whatever ran before."""
    config = tiny_config(residual_dropout=0.2)
    one, plan = model_and_optimizer(config)
    two, _ = model_and_optimizer(config)
    forwards_first = plan.model_copy(update={"pipeline_schedule": "gpipe"})
    results = [
        train_step(who, halves(batch(5)), OBJECTIVE, plan=order, lr_scale=1.0)
        for who, order in ((one, plan), (two, forwards_first))
    ]
    assert results[0] == results[1]
    assert all(torch.equal(p, q) for p, q in zip(weights(one), weights(two), strict=True))


def test_loss_is_the_mean_over_learned_labels():
    who, plan = model_and_optimizer()
    whole = batch(3)
    with torch.no_grad():
        logits = who.model(
            whole.tokens, positions_BT=whole.positions, documents_BT=whole.documents
        ).head
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), whole.labels, reduction="none")
    expected = (each * whole.loss_mask).sum() / whole.loss_mask.sum()
    assert train_step(who, [whole], OBJECTIVE, plan=plan, lr_scale=1.0).loss == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_clipping_is_torchs():
    parameters = [torch.nn.Parameter(torch.zeros(7)), torch.nn.Parameter(torch.zeros(3, 2))]
    for i, parameter in enumerate(parameters):
        parameter.grad = (
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 3
        )
    ours = [p.grad.clone() for p in parameters]
    norm = global_norm(dict(enumerate(ours)))
    theirs = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.testing.assert_close(norm, theirs)
    for gradient, parameter in zip(ours, parameters, strict=True):
        torch.testing.assert_close(gradient * clip_factor(norm.item(), 1.0), parameter.grad)
    assert clip_factor(0.5, 1.0) == clip_factor(9.0, None) == 1.0


def test_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16():
    assert global_norm(
        {"weight": torch.full((3,), 1.0, dtype=torch.bfloat16)}
    ).item() == pytest.approx(math.sqrt(3), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-pure", "float16"])
def test_what_is_not_finite_never_reaches_weights_or_states(value, precision):
    who, plan = model_and_optimizer(train={"precision": precision})
    train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    before, states = weights(who), {k: v.clone() for k, v in who.optimizer.named_tensors().items()}
    scalars = who.optimizer.scalars()
    result = train_step(who, [batch(2, 1), batch(2, 2)], poisoned(value), plan=plan, lr_scale=1.0)
    assert not result.taken
    assert not math.isfinite(result.loss)
    assert all(torch.equal(a, b) for a, b in zip(weights(who), before, strict=True))
    assert all(
        torch.equal(value, states[name]) for name, value in who.optimizer.named_tensors().items()
    )
    assert who.optimizer.scalars() == scalars
    assert all(p.grad is None for p in who.model.parameters())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-pure", "float16"])
@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_every_precision_learns_a_batch_by_heart(precision, kind):
    who, plan = model_and_optimizer(
        train={"precision": precision}, optimizer={"kind": kind, "learning_rate": 0.02}
    )
    results = [train_step(who, [batch(4)], OBJECTIVE, plan=plan, lr_scale=1.0) for _ in range(25)]
    assert results[0].loss == pytest.approx(math.log(97), abs=0.5)
    assert results[-1].loss < results[0].loss - 0.5
    kept = torch.bfloat16 if precision == "bfloat16-pure" else torch.float32
    assert {p.dtype for p in who.model.parameters()} == {kept}


def test_float16_overflow_is_skipped_and_halves_the_scale():
    who, plan = model_and_optimizer(train={"precision": "float16"})
    who.loss_scale.value = 2.0**40
    before = weights(who)
    result = train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
    assert result.overflowed
    assert math.isfinite(result.loss)
    assert who.loss_scale.value == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(weights(who), before, strict=True))


def test_float16_gradients_do_not_depend_on_the_scale():
    norms = []
    for scale in (1.0, 2.0**10):
        who, plan = model_and_optimizer(train={"precision": "float16"})
        who.loss_scale.value = scale
        norms.append(train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_loss_scale_follows_torchs_grad_scaler():
    ours = LossScale()
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.zeros(()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for step in range(4100):
        finite = step not in (3, 4, 3000)
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([1.0 if finite else math.inf])
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite=finite)
        assert ours.value == theirs.get_scale(), step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["full", "selective", "every-2"])
@pytest.mark.parametrize("attention", ["mask", "per_document", "compiled", "blockwise"])
def test_activation_checkpointing_changes_no_bit(mode, attention):
    config = tiny_config(residual_dropout=0.2)
    plain, plan = model_and_optimizer(config, model={"attention": attention})
    saving, _ = model_and_optimizer(
        config, model={"attention": attention}, train={"activation_checkpointing": mode}
    )
    assert [n for n, _ in plain.model.named_parameters()] == [
        n for n, _ in saving.model.named_parameters()
    ]
    losses = []
    for who in (plain, saving):
        torch.manual_seed(1)
        losses.append(
            [
                train_step(who, [batch(2, i)], OBJECTIVE, plan=plan, lr_scale=1.0).loss
                for i in range(3)
            ]
        )
    assert losses[0] == losses[1]
    for p, q in zip(weights(plain), weights(saving), strict=True):
        assert torch.equal(p, q)


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
        who, plan = model_and_optimizer(
            tiny_config(num_layers=4), train={"activation_checkpointing": mode}
        )
        with Counted() as counted:
            train_step(who, [batch(2)], OBJECTIVE, plan=plan, lr_scale=1.0)
        calls[mode] = counted.calls
    products = {mode: count["mm"] for mode, count in calls.items()}
    assert products["none"] == products["selective"] < products["every-2"] < products["full"]
    activations = {mode: count["silu"] for mode, count in calls.items()}
    assert activations == {"none": 4, "every-2": 6, "selective": 8, "full": 8}


def test_compiled_blocks_are_asked_for_one_by_one(monkeypatch):
    who, plan = model_and_optimizer(tiny_config(num_layers=3))
    asked = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **how: asked.append((type(self).__name__, how))
    )
    apply(who.model, plan.model_copy(update={"compile": True}))
    assert asked == [("Block", {"dynamic": False})] * 3


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_a_step_of_compiled_code_is_one_of_torch() -> None:
    config, losses = tiny_config(tie_embeddings=True), []
    for chosen in ({"attention": "per_document"}, {"attention": "compiled", "scores": "compiled"}):
        one, plan = model_and_optimizer(config, model=chosen)
        assert one.model.model.adds_rows == (chosen["attention"] == "compiled")
        losses.append(
            [train_step(one, [batch(2, i)], OBJECTIVE, plan=plan, lr_scale=1.0) for i in range(4)]
        )
    for ours, theirs in zip(*losses, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


def test_an_auxiliary_loss_counts_micro_batches_and_is_not_reported():
    plain, plan = model_and_optimizer()
    routed, _ = model_and_optimizer()
    parts = halves(batch(5))

    def with_squares(model, _inputs, output):
        return output._replace(auxiliary=sum(p.square().sum() for p in model.parameters()))

    routed.model.register_forward_hook(with_squares)
    gradients = {}

    def watched(who, name):
        step = who.optimizer.step

        def kept(scale):
            gradients[name] = [p.grad.clone() for p in who.model.parameters()]
            step(scale)

        who.optimizer.step = kept

    watched(plain, "plain")
    watched(routed, "routed")
    before = weights(plain)
    clipless = plan.model_copy(update={"max_grad_norm": None})
    expected = train_step(plain, parts, OBJECTIVE, plan=clipless, lr_scale=1.0)
    result = train_step(routed, parts, OBJECTIVE, plan=clipless, lr_scale=1.0)
    assert result.loss == expected.loss
    for weight, own, other in zip(before, gradients["plain"], gradients["routed"], strict=True):
        torch.testing.assert_close(other, own + 2 * weight, atol=1e-5, rtol=1e-5)
