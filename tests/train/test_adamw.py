import copy

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from torch import nn

from bloomery.check.small_model import build_pair, small_plan
from bloomery.check.whole_step import exact_step, step_on_device
from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.facts.limits import INT8_BLOCK, INT8_SMALLEST
from bloomery.plan.types import OptimizerPlan
from bloomery.train.objectives.build import pretraining
from bloomery.train.optim import common as optim_pieces
from bloomery.train.optim.adamw import FloatMoment, Int8Moment
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.common import Gate, Rounding, Span
from bloomery.train.state import build_state
from bloomery.train.step import train_step

PLAN = OptimizerPlan(
    kind="adamw",
    learning_rate=0.01,
    muon_learning_rate=0.01,
    momentum=0.95,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    fused=False,
    schedule="constant",
    min_lr_ratio=0.0,
    warmup_steps=0,
    decay_steps=0,
)
LEAN = [
    {"state_dtype": "int8"},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "int8", "stochastic_rounding": True},
    {"state_dtype": "float32", "stochastic_rounding": True, "offload": True},
]


class Some(nn.Module):
    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "wide": (40, 130),
            "tall": (70, 64),
            "again": (40, 130),
            "tiny": (3, 5),
            "bias": (40,),
        }
        for name, shape in shapes.items():
            setattr(
                self, name, nn.Parameter((torch.randn(shape, generator=generator) * 0.3).to(dtype))
            )


def give(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        spread = torch.exp(torch.randn(parameter.shape, generator=generator) * 2)
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * spread).to(
            parameter.dtype
        )


def train(model: nn.Module, optimizer, steps) -> None:
    for step in steps:
        give(model, step)
        optimizer.step(1.0)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("piece", [2**17, 1024])
def test_with_float32_states_it_is_torchs(monkeypatch, piece):
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", piece)
    mine, theirs = Some(), Some()
    lean = build_optimizer(mine, PLAN.model_copy(update={"offload": True}))
    torchs = build_optimizer(theirs, PLAN)
    assert isinstance(torchs.members[0], torch.optim.AdamW)
    assert not isinstance(lean.members[0], torch.optim.AdamW)
    train(mine, lean, range(8))
    train(theirs, torchs, range(8))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    expected = torchs.named_tensors()
    assert lean.scalars() == torchs.scalars()
    for name, value in lean.named_tensors().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def test_states_take_the_bytes_that_the_plan_counts():
    model = Some()
    numbers = sum(p.numel() for p in model.parameters() if p.numel() >= INT8_SMALLEST)
    for states, each in (("bfloat16", 4.0), ("int8", 2 + 8 / 256)):
        optimizer = build_optimizer(model, PLAN.model_copy(update={"state_dtype": states}))
        train(model, optimizer, range(1))
        large = [
            p
            for name, p in optimizer.named_tensors().items()
            if name.split(".")[0] in ("wide", "tall", "again")
        ]
        # the last block is padded
        assert sum(t.nbytes for t in large) == pytest.approx(numbers * each, rel=0.04)
    assert optimizer.named_tensors()["bias.exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_near_and_what_is_read_again_is_written_the_same(signed):
    generator = torch.Generator().manual_seed(4)
    exact = torch.randn(64, INT8_BLOCK, generator=generator) * torch.logspace(-12, 3, 64)[:, None]
    exact = (exact if signed else exact.square()).flatten()
    exact[:INT8_BLOCK] = 0
    moment = Int8Moment("exp_avg", signed=signed)
    raw = moment.encode(exact, [], 0)
    assert raw[0].dtype == (torch.int8 if signed else torch.uint8)
    read = moment.decode(raw)
    levels = 127 if signed else 255
    top = exact.view(-1, INT8_BLOCK).abs().amax(1, keepdim=True).expand(-1, INT8_BLOCK).flatten()
    share = (exact.abs() / top.clamp(min=1e-38)) ** 0.25
    # Half a level to each side of a fourth power; squares never fall below the first level.
    allowed = ((share + 0.5 / levels) ** 4 - share**4) * 1.001 + (0 if signed else levels**-4)
    assert bool(((read - exact).abs() <= allowed * top + 1e-38).all())
    assert bool((read[:INT8_BLOCK] == 0).all())
    assert signed or bool((read[INT8_BLOCK:] > 0).all())
    again = moment.encode(read.clone(), [], 1)
    assert all(torch.equal(a, b) for a, b in zip(raw, again, strict=True))


def test_an_average_in_bfloat16_does_not_stand_still():
    """1 - beta of a thousandth is less than the distance between bfloat16 numbers."""
    parameter = nn.Parameter(torch.zeros(4096))
    moment = FloatMoment(
        "exp_avg_sq", torch.bfloat16, Rounding({parameter: "p"}, 0, stochastic=False)
    )
    state, span = moment.initial_state(parameter), Span(parameter, 0, 4096)
    state["exp_avg_sq"].fill_(1.0)
    for step in range(400):
        exact = moment.decode(moment.stored_tensors(state, span)) * 0.999
        (written,) = moment.encode(exact, [span], step)
        state["exp_avg_sq"].copy_(written)
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(0.999**400, rel=2e-3)


@pytest.mark.parametrize("changes", LEAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_through_names_and_back_bitwise(changes, dtype):
    plan = PLAN.model_copy(update=changes)
    undisturbed = Some(dtype)
    optimizer = build_optimizer(undisturbed, plan, seed=5)
    train(undisturbed, optimizer, range(3))
    tensors = {name: value.clone() for name, value in optimizer.named_tensors().items()}
    resumed = copy.deepcopy(undisturbed)
    again = build_optimizer(resumed, plan, seed=5)
    again.load(tensors, optimizer.scalars())
    train(undisturbed, optimizer, range(3, 6))
    train(resumed, again, range(3, 6))
    assert same(undisturbed, resumed)
    final = again.named_tensors()
    assert all(torch.equal(value, final[name]) for name, value in optimizer.named_tensors().items())


@pytest.mark.parametrize("changes", LEAN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_gate_keeps_every_bit(changes, dtype):
    model = Some(dtype)
    optimizer = build_optimizer(model, PLAN.model_copy(update=changes))
    train(model, optimizer, range(2))
    before, states = (
        copy.deepcopy(model),
        {k: v.clone() for k, v in optimizer.named_tensors().items()},
    )
    for value in (float("nan"), 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.members[0].step(gate=Gate(torch.tensor(0.0), torch.tensor(float("nan"))))
    assert same(model, before)
    assert all(
        torch.equal(value, states[name]) for name, value in optimizer.named_tensors().items()
    )


def test_bfloat16_weights_move_by_less_than_a_bit_when_rounded_at_random():
    model, still = (Some(torch.bfloat16) for _ in range(2))
    before = copy.deepcopy(model)
    slow = PLAN.model_copy(
        update={"learning_rate": 1e-6, "weight_decay": 0.0, "state_dtype": "bfloat16"}
    )
    train(
        model,
        build_optimizer(model, slow.model_copy(update={"stochastic_rounding": True})),
        range(3),
    )
    train(still, build_optimizer(still, slow), range(3))
    moved = [
        (a != b).float().mean().item()
        for a, b in zip(model.parameters(), before.parameters(), strict=True)
    ]
    stood = [
        (a == b).float().mean().item()
        for a, b in zip(still.parameters(), before.parameters(), strict=True)
    ]
    assert min(stood[:3]) > 0.99
    assert all(0 < share < 0.1 for share in moved[:3])


def test_states_of_another_kind_are_refused():
    model = Some()
    optimizer = build_optimizer(model, PLAN.model_copy(update={"state_dtype": "int8"}))
    train(model, optimizer, range(1))
    other = build_optimizer(model, PLAN.model_copy(update={"state_dtype": "bfloat16"}))
    with pytest.raises(
        UserError, match=r"wide\.exp_avg does not match optimizer\.state_dtype=bfloat16"
    ):
        other.load(optimizer.named_tensors(), optimizer.scalars())


@pytest.mark.parametrize(
    ("steps", "learned"), [(120, 3.0), pytest.param(500, 1.5, marks=pytest.mark.soak)]
)
def test_eight_bit_states_learn_as_float32_ones_do(steps, learned):
    """On text of a Markov chain; every matrix is large enough to be kept in 8 bits."""
    config = tiny_config(
        hidden_size=64, intermediate_size=128, num_layers=1, head_dim=32, num_kv_heads=2
    )
    chain = torch.randint(0, 97, (97, 3), generator=torch.Generator().manual_seed(1))
    last = {}
    for states in ("float32", "int8"):
        optimizer = {
            "state_dtype": states,
            "learning_rate": 3e-3,
            "betas": (0.9, 0.99),
            "offload": True,
        }
        plan = tiny_plan(config=config, optimizer=optimizer)
        state = build_state(plan)
        losses = []
        for step in range(steps):
            tokens = walk(chain, rows=2, seed=step)
            result = train_step(
                state.model_and_optimizer,
                [next_tokens(tokens)],
                pretraining(score_chunk=64),
                plan=plan.train,
                lr_scale=1.0,
            )
            losses.append(result.loss)
        matrices = [
            t
            for name, t in state.model_and_optimizer.optimizer.named_tensors().items()
            if name.endswith("_proj.weight.exp_avg")
        ]
        assert {t.dtype for t in matrices} == {torch.int8 if states == "int8" else torch.float32}
        last[states] = sum(losses[-50:]) / 50
    assert last["float32"] < learned  # from log 97 = 4.6 to near log 3 = 1.1
    assert last["int8"] == pytest.approx(last["float32"], abs=1e-2)


def walk(chain: torch.Tensor, *, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, chain.shape[1], (rows, 33), generator=generator)
    tokens = [torch.randint(0, len(chain), (rows,), generator=generator)]
    for position in range(32):
        tokens.append(chain[tokens[-1], steps[:, position]])
    return torch.stack(tokens, 1)


def next_tokens(tokens: torch.Tensor) -> Batch:
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(32).expand_as(inputs)
    return Batch(inputs, labels, torch.ones(inputs.shape), positions, torch.zeros_like(inputs))


@pytest.mark.parametrize("changes", LEAN, ids=str)
def test_the_check_of_a_step_sees_its_clipped_gradients(changes):
    """Also of an update that scales gradients as it reads them."""
    optimizer = {"fused": False} | changes
    pair = build_pair(small_plan(tiny_plan(optimizer=optimizer, train={"max_grad_norm": 1e-3})))
    numbers = step_on_device(pair)
    exact = exact_step(pair)
    assert numbers.gradients.keys() == exact.gradients.keys()
    for name, gradient in numbers.gradients.items():
        torch.testing.assert_close(gradient, exact.gradients[name], atol=1e-8, rtol=1e-3)
