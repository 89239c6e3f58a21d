"""An update holds a few pieces beside weights, gradients and states, however large a matrix is, and however many."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks.memory_tracker import peak_bytes
from test_adamw import PLAN
from torch import nn

from bloomery.facts.optimizers import OPTIMIZERS, Update
from bloomery.train.optim import common as optim_pieces
from bloomery.train.optim.adamw import ChunkedAdamW
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.common import Gate
from bloomery.train.optim.muon import Muon, orthogonalize_shards

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
    if isinstance(member, ChunkedAdamW):
        member._compiled = False  # compiled code takes no memory
    gate = Gate(torch.tensor(1.0), torch.tensor(0.5))
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    member.step(gate=gate)
    assert peak_bytes(lambda: member.step(gate=gate)) < pieces * 4 * PIECE


@pytest.mark.parametrize(("shape", "stacks"), [((128, 128), 3), ((64, 256), 2.25)])
def test_muon_iterates_in_two_stacks_and_their_gram_matrices(monkeypatch, shape, stacks):
    """The planned bytes. The gradients' directions and the stack they are copied to are not held beside them."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (shape, shape[::-1]) * 8)
    member = Muon(list(model), lr=0.01, momentum=0.9, weight_decay=0.1)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    member.step()
    planned = OPTIMIZERS["muon"].update_bytes(
        Update(
            settings=PLAN,
            on_gpu=False,
            weight_bytes=4,
            values_at_once=0,
            layer_matrices=tuple(tuple(parameter.shape) for parameter in model),
        )
    )
    assert planned == stacks * 4 * sum(parameter.numel() for parameter in model)
    assert peak_bytes(member.step) == pytest.approx(planned, rel=0.02)


def test_nothing_of_the_exchange_is_held_while_shards_iterate():
    """As without shards: two stacks and their Gram matrices, here of the size of a stack."""
    matrices = torch.randn(16, 128, 128)
    mesh = SimpleNamespace(
        holders=1, holder_rank=0, all_to_all_shards=lambda flat, *_: flat.clone()
    )
    shapes = [(128, 128)] * 16

    def update():
        orthogonalize_shards(iter(matrices), shapes, [[128]] * 16, mesh, torch.float32)

    assert peak_bytes(update) == pytest.approx(3 * matrices.nbytes, rel=0.02)
