"""The simulation as its callers see it, and its tracker beside torch's own."""

import math
import subprocess
import sys

import pytest
import torch
from plan_help import gpu_machine, machine
from steps_for_tests import counted, simulated, small_plan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bloomery.core.errors import UserError
from bloomery.facts.counting import parameter_shapes
from bloomery.facts.limits import storage_bytes
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.simulate import run
from bloomery.simulate.run import parts_with_pictures, simulate, simulation_notes
from bloomery.simulate.step import simulated_step
from bloomery.simulate.tracker import MemoryTracker


@pytest.mark.soak
def test_a_child_simulates_and_says_what_stands_in():
    lines = []
    plan = small_plan(attention="sdpa", precision="bfloat16", device="cuda")
    found = simulate(plan, gpu_machine("MI300X"), progress=lines.append)
    assert found.peak == simulated(plan)
    assert found.parts["weights"] == 4 * sum(p.numel() for p in _parameters(plan))
    assert [line.rpartition(": ")[2] for line in lines][-2:] == [
        "the first of two steps",
        "the second of two steps",
    ]
    assert "FlashAttention-2" in found.notes[0]


def _parameters(plan):
    from bloomery.model.decoder import Decoder

    return Decoder(plan.model.config).parameters()


def test_nothing_stands_in_on_a_cpu():
    assert simulation_notes(small_plan(), fused=False, split=ONE_DEVICE) == []


def test_pictures_are_added_from_the_plan():
    plan = small_plan()
    sizes = {"vision tower": 3e6, "pictures": 5e6}
    memory = plan.memory.model_copy(update={"parts": plan.memory.parts | sizes})
    seen = plan.model_copy(update={"memory": memory})
    assert parts_with_pictures(seen) == sizes
    (note,) = simulation_notes(seen, fused=False, split=ONE_DEVICE)
    assert "counted from shapes" in note
    assert parts_with_pictures(plan) == {}


def test_several_devices_say_how_they_were_cut():
    assert (
        "in 2 copies"
        in simulation_notes(small_plan(), fused=False, split=MeshSplit(replicate=2, shard=4))[0]
    )
    assert (
        "one of 8 whole copies"
        in simulation_notes(small_plan(), fused=False, split=MeshSplit(replicate=8))[0]
    )


def test_whoever_simulates_needs_no_torch_of_its_own():
    code = "import sys, bloomery.simulate.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_torch_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda _name: None)
    with pytest.raises(UserError) as caught:
        simulate(small_plan(), machine())
    assert "bloomery doctor" in caught.value.fix


def test_it_ends_when_its_time_is_over():
    with pytest.raises(UserError, match="time limit") as caught:
        simulate(small_plan(), machine(), seconds=0.2)
    assert "model.num_layers" in caught.value.fix


def test_a_failure_names_the_last_line(monkeypatch):
    monkeypatch.setattr(run, "CHILD", "bloomery.simulate.nothing")
    with pytest.raises(UserError, match=r"No module named bloomery\.simulate\.nothing"):
        simulate(small_plan(), machine())


@pytest.mark.soak
def test_shards_hold_less():
    plan = small_plan(attention="varlen", precision="bfloat16", device="cuda", rows=1)
    assert simulated(plan, split=MeshSplit(shard=8)) < 0.7 * simulated(plan)


@pytest.mark.soak
def test_compiled_blocks_read_a_quantised_base():
    """Their graphs take its bits as inputs; the base of four layers is smaller by what the plan says."""
    lora = {"kind": "lora", "rank": 4, "target_modules": ["all-linear"]}
    settings = {
        "adapter": lora,
        "precision": "bfloat16",
        "device": "cuda",
        "attention": "varlen",
        "compile": True,
    }
    floats, bits = (
        simulated_step(small_plan(base=base, **settings), fused=True).parts
        for base in ("none", "nf4")
    )
    inside = [
        s
        for n, s in parameter_shapes(small_plan().model.config).items()
        if ".layers." in n and len(s) == 2
    ]
    saved = sum(2 * math.prod(shape) - storage_bytes(shape, "nf4", True) for shape in inside)
    assert floats["weights"] - bits["weights"] == saved


def test_the_tracker_counts_what_torchs_counts():
    with FakeTensorMode():
        layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=False)
        x = torch.empty(128, 64)
        theirs, ours = MemTracker(), MemoryTracker()
        theirs.track_external(layers, optimizer, x)
        ours.call("weights", layers.parameters())
        ours.call("inputs", [x])
        for _ in range(2):
            theirs.reset_mod_stats()
            with theirs, ours:
                layers(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        (snapshot,) = theirs.get_tracker_snapshot("peak").values()
    assert sum(ours.peak.values()) == snapshot["Total"]


@pytest.mark.parametrize("dropout", [0.1, pytest.param(0.0, marks=pytest.mark.soak)])
def test_selective_checkpointing_is_a_part_of_compiled_blocks(dropout):
    settings = {"precision": "bfloat16", "device": "cuda", "attention": "varlen", "compile": True}
    shape = {"family": "gpt2", "dropout": dropout} if dropout else {}
    plans = {
        mode: small_plan(**settings, **shape, activation_checkpointing=mode)
        for mode in ("none", "selective")
    }
    peaks = {mode: simulated(plan) for mode, plan in plans.items()}
    assert peaks["selective"] < peaks["none"]
    assert counted(plans["selective"]) == pytest.approx(peaks["selective"], rel=0.08)


def test_replicas_of_shards_sum_gradients_once_per_step():
    """Bytes by hand. Norms are whole on every rank, and not in the collectives of shards."""
    replicas, shards, micro_batches = 4, 2, 3
    plan = small_plan(micro_batches=micro_batches)
    step = simulated_step(plan, fused=False, split=MeshSplit(replicate=replicas, shard=shards))

    config = plan.model.config
    sizes = {
        name: math.prod(shape)
        for name, shape in parameter_shapes(config).items()
        if "norm" not in name
    }
    total = sum(sizes.values())
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    last_norm = config.hidden_size  # it is in the unit of the head
    # Two layers: the first is gathered for forward and backward, the last, embeddings and head once.
    gathered = total + in_layers / 2 + last_norm
    reduced = total + last_norm
    assert step.sent["shard"] == 4 * micro_batches * (gathered + reduced) * (shards - 1) / shards
    assert step.sent["replicate"] == 2 * 4 * reduced / shards * (replicas - 1) / replicas
