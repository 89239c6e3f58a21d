"""The order of copies beside the work, on streams that write down what they were told; no GPU is needed."""

import pytest
import torch
from plans_for_tests import tiny_config
from test_adamw import PLAN, Some, same, train

from bloomery.model.io.weights import fresh_decoder
from bloomery.parallel import offload, transfers
from bloomery.parallel.apply import checkpoint_block
from bloomery.parallel.offload import offload_activations
from bloomery.parallel.transfers import CopyStream
from bloomery.train.optim import adamw, placement
from bloomery.train.optim import common as optim_pieces
from bloomery.train.optim.build import build_optimizer
from bloomery.train.optim.placement import StatePlacement


class Stream:
    """Runs what it is given at once, as late as its waits allow: never before what it waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.seen = name, 0, {}

    def wait_stream(self, other: "Stream") -> None:
        self.seen[other.name] = other.done

    def wait_event(self, event: tuple["Stream", int]) -> None:
        stream, moment = event
        self.seen[stream.name] = max(moment, self.seen.get(stream.name, 0))

    def record_event(self) -> tuple["Stream", int]:
        self.done += 1
        return self, self.done

    def synchronize(self) -> None:
        WORK.seen[self.name] = self.done

    def __enter__(self) -> None: ...

    def __exit__(self, *failure: object) -> None: ...


WORK = Stream("work")


@pytest.fixture
def streams(monkeypatch):
    made = []

    def fresh(_device):
        made.append(Stream(f"side {len(made)}"))
        return made[-1]

    WORK.seen.clear()
    for module in (transfers, offload, placement):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)
    for module in (offload, transfers):
        monkeypatch.setattr(
            module,
            "pinned_block",
            lambda num_bytes, device: torch.full((num_bytes,), 77, dtype=torch.uint8),
        )
    monkeypatch.setattr(transfers, "new_stream", fresh)
    monkeypatch.setattr(transfers, "current_stream", lambda device: WORK)
    monkeypatch.setattr(transfers, "on_stream", lambda device, stream: stream)
    return made


@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("inside", [False, True])
def test_states_that_visit_are_states_that_stayed(streams, monkeypatch, states, inside):
    monkeypatch.setattr(optim_pieces, "CPU_PIECE", 1024)
    # Tensors of the CPU stand for those of a device, which compiled code does not update.
    monkeypatch.setattr(adamw.ChunkedAdamW, "_compiles", lambda *_: False)
    stayed, visited = Some(), Some()
    plan = PLAN.model_copy(update={"state_dtype": states, "fused_backward": inside})
    away = build_optimizer(visited, plan.model_copy(update={"offload": True}))
    train(visited, away, range(4))
    assert len(streams) == 1
    with monkeypatch.context() as patch:
        patch.setattr(placement, "has_own_memory", lambda device: False)
        here = build_optimizer(stayed, plan.model_copy(update={"offload": True}))
        train(stayed, here, range(4))
    assert same(stayed, visited)
    found, expected = away.named_tensors(), here.named_tensors()
    assert WORK.seen["side 0"] == streams[0].done  # all that was written is there to be read
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    again = build_optimizer(visited, plan.model_copy(update={"offload": True}))
    again.load(expected, here.scalars())
    train(visited, again, range(4, 6))
    train(stayed, here, range(4, 6))
    assert same(stayed, visited)


def test_a_piece_comes_while_the_one_before_is_worked_on(streams):
    home, pieces = (
        StatePlacement(offload=True),
        [[[[torch.full((4,), float(n))], [torch.zeros(2)]]] for n in range(3)],
    )
    came = []
    for (raw,), piece in zip(home.visits(pieces, torch.device("cpu")), pieces, strict=True):
        came.append((raw[0].tolist(), streams[0].done))
        home.send([raw[0] + 1, raw[1]], piece[0])
    # One ahead, and after it what each piece sent back: 2; 2 more and 1 sent; none is left to come.
    assert came == [([0.0] * 4, 2), ([1.0] * 4, 4), ([2.0] * 4, 5)]
    assert [piece[0][0][0].tolist() for piece in pieces] == [[n + 1.0] * 4 for n in range(3)]


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_that_leave_are_those_that_stay(streams, mode):
    found = []
    for away in (False, True):
        model = fresh_decoder(tiny_config(), seed=0)
        for index, block in enumerate(model.model.layers):
            checkpoint_block(block, mode if away else "none", index=index)
        if away:
            offload_activations(model.model, threshold=1)
        model(torch.arange(24).view(2, 12)).head.square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(streams) == 1
    assert streams[0].done >= 2 * 3  # two blocks and the last norm, there and back


def test_of_what_leaves_little_is_under_way(streams):
    copies = CopyStream()
    for number in range(9):
        copies.send([torch.zeros(1)], lambda: None, most_under_way=4)
        assert WORK.seen.get("side 0", 0) == max(0, number + 1 - 4)
    copies.release_sent()
    assert WORK.seen["side 0"] == 9
