import pytest
import torch
from torch import nn

from bloomery.train.optim import adafactor as optim_adafactor
from bloomery.train.optim import common as optim_pieces
from bloomery.train.optim.adafactor import Adafactor, fused_square_sums
from bloomery.train.optim.common import Gate, Rounding

SHAPES = [(24, 40), (40, 24), (24, 40), (7,), (7,), (1, 5), (3, 4, 6), (24, 40)]


def parameters(dtype=torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter((torch.randn(shape, generator=generator) * 0.3).to(dtype)) for shape in shapes
    ]


def give(some: list[nn.Parameter], step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in some:
        rows = (
            torch.rand((parameter.shape[0],) + (1,) * (parameter.ndim - 1), generator=generator) * 3
        )
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * rows * size).to(
            parameter.dtype
        )


def ours(
    some: list[nn.Parameter], *, lr: float = 0.05, decay: float = 0.1, stochastic: bool = False
) -> Adafactor:
    names = {p: str(i) for i, p in enumerate(some)}
    groups: list = [{"params": some}]
    return Adafactor(groups, lr=lr, weight_decay=decay, rounding=Rounding(names, 3, stochastic))


@pytest.mark.parametrize("piece", [2**17, 100])  # all at once, and a few rows of a matrix at a time
@pytest.mark.parametrize("lr", [0.01, 0.9])  # below and above the relative step of the first steps
@pytest.mark.parametrize("gpu", [False, True])
def test_equals_torchs_in_float32(monkeypatch, piece, lr, gpu):
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", piece)
    if gpu:
        monkeypatch.setattr(optim_adafactor, "_square_sums", fused_square_sums)
    mine, theirs = parameters(), parameters()
    one, other = ours(mine, lr=lr), torch.optim.Adafactor(theirs, lr=lr, weight_decay=0.1)
    for step in range(12):
        give(mine, step)
        give(theirs, step)
        one.step()
        other.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    for a, b in zip(mine, theirs, strict=True):
        for slot in ("row_var", "col_var", "variance"):
            if slot in other.state[b]:
                torch.testing.assert_close(
                    one.state[a][slot], other.state[b][slot], atol=1e-6, rtol=1e-5
                )


def test_rows_that_never_had_a_gradient_stay_and_small_gradients_are_not_damped():
    (weight,) = some = parameters(shapes=[(6, 8)])
    before = weight.detach().clone()
    optimizer = ours(some, decay=0.0)
    for step in range(3):
        give(some, step, size=1e-9)  # their squares are far below float32's epsilon
        weight.grad[4:] = 0
        optimizer.step()
    assert torch.equal(weight[4:], before[4:])
    moved = (weight - before)[:4].square().mean().sqrt()
    assert moved > 0.02 * before.square().mean().sqrt()


def test_a_gradient_of_nothing_but_zeros_changes_nothing():
    some = parameters(shapes=[(4, 4), (5,)])
    before = [p.detach().clone() for p in some]
    optimizer = ours(some, decay=0.0)
    for parameter in some:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(some, before, strict=True))


def test_bfloat16_weights_follow_float32_ones_only_when_rounded_at_random():
    """Steps of a tenth of the distance between neighbours: to the nearest, nothing would ever move."""
    target = torch.full((64, 64), 1.05)
    ends = {}
    for stochastic in (False, True):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = ours([weight], lr=8e-4, decay=0.0, stochastic=stochastic)
        for _ in range(40):
            weight.grad = (weight.detach() - target).to(torch.bfloat16)
            optimizer.step()
        ends[stochastic] = weight.detach().float().mean().item()
    assert ends[False] == 1.0
    exact = nn.Parameter(torch.ones(64, 64))
    optimizer = ours([exact], lr=8e-4, decay=0.0)
    for _ in range(40):
        exact.grad = exact.detach() - target
        optimizer.step()
    assert ends[True] == pytest.approx(exact.mean().item(), abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_gate_keeps_every_bit_and_an_open_one_scales(dtype):
    some, same = parameters(dtype), parameters(dtype)
    optimizer, plain = ours(some, stochastic=True), ours(same, stochastic=True)
    shut = Gate(torch.tensor(0.0), torch.tensor(1.0))
    before = [p.detach().clone() for p in some]
    for value in (float("nan"), float("inf"), 3.0):  # the first time there are no moments yet
        for parameter in some:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(gate=shut)
        assert all(torch.equal(p, b) for p, b in zip(some, before, strict=True))
    for state in optimizer.state.values():
        assert all(bool((value == 0).all()) for slot, value in state.items() if slot != "step")
        state["step"].zero_()
    for step in range(2):
        give(some, step, size=2.0)
        give(same, step)
        optimizer.step(gate=Gate(torch.tensor(1.0), torch.tensor(0.5)))
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(some, same, strict=True))
