"""An update holds a few pieces beside weights, gradients and states, however large a matrix is, and however many."""

import pytest
import torch
from benchmarks.memory_tracker import peak_bytes
from test_adamw import PLAN
from torch import nn

from bloomery.train.optim import common as optim_pieces
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.common import Gate

PIECE = 2**16
ROUNDED = {"stochastic_rounding": True}
CASES = [
    ({"kind": "adafactor"}, torch.float32, 3.1),
    ({"kind": "adafactor"} | ROUNDED, torch.bfloat16, 4.1),
    ({"state_dtype": "int8"}, torch.float32, 5.1),
    ({"state_dtype": "int8"} | ROUNDED, torch.bfloat16, 5.6),
    ({"state_dtype": "bfloat16"} | ROUNDED, torch.bfloat16, 5.6),
    ({"state_dtype": "float32", "offload": True}, torch.float32, 4.1),
]


@pytest.mark.parametrize(("changes", "dtype", "pieces"), CASES)
@pytest.mark.parametrize("shapes", [[(1024, 1024)], [(128, 128)] * 12])
def test_scratch_is_bounded(monkeypatch, changes, dtype, pieces, shapes):
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", PIECE)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])
    (member,) = build_optimizer(model, PLAN.model_copy(update=changes)).members
    gate = Gate(torch.tensor(1.0), torch.tensor(0.5))
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    member.step(gate=gate)
    assert peak_bytes(lambda: member.step(gate=gate)) < pieces * 4 * PIECE
