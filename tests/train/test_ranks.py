"""Two and four ranks train as one does, and take over each other's checkpoints. Oracle: one rank."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import RECIPE, assert_same_tensors
from safetensors.torch import load_file

from bloomery.data.prepare.prepare import prepare
from bloomery.monitor.events import EventLog
from bloomery.plan.store import write_plan
from bloomery.plan.types import LayoutPlan, ParallelPlan
from bloomery.recipe.load import load_recipe
from bloomery.report.page import compared
from bloomery.report.record import read_record
from ranks import fields, losses, on_ranks, train

MESHES = {"2 copies": (2, 1), "2 shards": (1, 2), "4 copies": (4, 1), "4 shards": (1, 4), "2 x 2": (2, 2)}
EIGHT = {"8 copies": (8, 1), "8 shards": (1, 8), "2 x 4": (2, 4)}


def plan_of(prepared: Path, **sections):
    config = sections.pop("config", None) or tiny_config(vocab_size=300, num_layers=3)
    train = {"micro_batch_size": 2, "accumulation": 2, "tokens_per_step": 128, "steps": 6} | sections.pop("train", {})
    return tiny_plan(prepared, config=config, train=train, **sections)


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("replicate", "shard"),
    [*(pytest.param(*mesh, id=name) for name, mesh in MESHES.items()),
     *(pytest.param(*mesh, id=name, marks=pytest.mark.soak) for name, mesh in EIGHT.items())],
)  # fmt: skip
def test_losses_and_weights_are_those_of_one_rank(prepared, tmp_path, replicate, shard) -> None:
    plan = plan_of(prepared, train={"accumulation": 4, "tokens_per_step": 256} if replicate * shard == 8 else {})
    alone = train(plan, tmp_path / "one")
    several = train(on_ranks(plan, replicate=replicate, shard=shard), tmp_path / "several")
    assert losses(several).keys() == losses(alone).keys() == set(range(1, 7))
    assert losses(several) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    norms = [{e["step"]: e["grad_norm"] for e in fields(run, "StepDone")} for run in (alone, several)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    scored = [[e["loss"] for e in fields(run, "EvalDone")] for run in (alone, several)]
    assert scored[1] == pytest.approx(scored[0], abs=1e-5)
    one, other = (tensors(tmp_path / name, 6) for name in ("one", "several"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()), msg=name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_embedding_apart_from_the_head_is_a_unit_of_its_own(prepared, tmp_path, precision) -> None:
    config = tiny_config(vocab_size=300, num_layers=2, tie_embeddings=False)
    plan = plan_of(prepared, config=config, train={"precision": precision, "steps": 4})
    alone, two = train(plan, tmp_path / "one"), train(on_ranks(plan, shard=2), tmp_path / "two")
    assert losses(two) == pytest.approx(losses(alone), rel=0, abs=1e-5 if precision == "float32" else 1e-3)


WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # int8 blocks of 256 lie on one rank each
OPTIMIZERS = {
    "muon": {"kind": "muon"},
    "adafactor": {"kind": "adafactor"},
    "int8 states": {"state_dtype": "int8"},
    "bfloat16 states": {"state_dtype": "bfloat16"},
    "offload": {"offload": True},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("replicate", "shard"), [(2, 1), (1, 2), pytest.param(1, 4, marks=pytest.mark.soak)],
    ids=["copies", "shards", "4 shards"],
)  # fmt: skip
@pytest.mark.parametrize("changes", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_takes_the_steps_of_one_rank(prepared, tmp_path, changes, replicate, shard) -> None:
    plan = plan_of(prepared, config=tiny_config(vocab_size=512, **WIDE), optimizer={"warmup_steps": 0} | changes)
    alone = train(plan, tmp_path / "one")
    several = train(on_ranks(plan, replicate=replicate, shard=shard), tmp_path / "several", stop_after=3)
    near = 5e-4 if changes.get("kind") == "muon" else 1e-5  # Newton-Schulz runs in bfloat16
    assert losses(several) == pytest.approx({s: v for s, v in losses(alone).items() if s <= 3}, rel=0, abs=near)
    checkpoint = tmp_path / "several" / "checkpoints" / "step-00000003"
    # Stopped before its evaluation, a step is saved again by the run that evaluates it: with what it has read.
    stored = tensors(tmp_path / "several", 3)
    train(plan, tmp_path / "copy", resume_from=checkpoint, stop_after=0)  # one rank reads all of it
    assert_same_tensors(tensors(tmp_path / "copy", 3), stored)
    if shard == 2:
        again = on_ranks(plan, shard=4)
        train(again, tmp_path / "four", resume_from=checkpoint, stop_after=0)
        assert_same_tensors(tensors(tmp_path / "four", 3), stored)


def test_stochastic_rounding_draws_the_same_bits_for_any_number_of_shards(prepared, tmp_path) -> None:
    config, halves = tiny_config(vocab_size=300, **WIDE), {"stochastic_rounding": True}
    plan = plan_of(prepared, config=config, optimizer=halves, train={"precision": "bfloat16-pure"})
    one = train(plan, tmp_path / "one", stop_after=1)
    two = train(on_ranks(plan, shard=2), tmp_path / "two", stop_after=1)
    assert losses(two) == pytest.approx(losses(one), abs=1e-3)
    before, after = (tensors(tmp_path / name, 1) for name in ("one", "two"))
    differ = {name: float((before[name] != after[name]).float().mean()) for name in before}
    # Gradients differ in their last bits; other random numbers would change half of the weights.
    assert max(share for name, share in differ.items() if name.startswith("model/")) < 0.1


@pytest.mark.parametrize(("replicate", "shard"), [(2, 1), (1, 2)], ids=["copies", "shards"])
def test_a_stopped_run_on_the_same_mesh_resumes_to_the_same_bits(prepared, tmp_path, replicate, shard) -> None:
    config = tiny_config(vocab_size=300, num_layers=2, residual_dropout=0.1)
    plan = on_ranks(plan_of(prepared, config=config), replicate=replicate, shard=shard)
    whole = train(plan, tmp_path / "whole")
    first = train(plan, tmp_path / "halves", stop_after=3)
    checkpoint = tmp_path / "halves" / "checkpoints" / "step-00000003"
    second = train(plan, tmp_path / "halves", resume_from=checkpoint)
    assert losses(first) | losses(second) == losses(whole)
    assert_same_tensors(tensors(tmp_path / "halves", 6), tensors(tmp_path / "whole", 6))


RESHARDS = [("1", "2c"), ("1", "2s"), ("2c", "1"), ("2s", "1"), ("2s", "4s"), ("4s", "2s"), ("4c", "2s"), ("2s", "4c"),
            ("1", "4s")]  # fmt: skip


def sizes(mesh: str) -> dict[str, int]:
    return {"shard" if mesh.endswith("s") else "replicate": int(mesh[0])}


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory) -> dict[int, float]:
    """The losses of one rank, never stopped."""
    return losses(train(plan_of(prepared), tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run over a mesh, stopped after three steps."""

    @cache
    def run(mesh: str) -> Path:
        folder = tmp_path_factory.mktemp(mesh)
        train(on_ranks(plan_of(prepared), **sizes(mesh)), folder, stop_after=3)
        return folder

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("before", "after"), RESHARDS, ids="-".join)
def test_a_checkpoint_resumes_on_another_mesh(prepared, stopped, whole, tmp_path, before, after) -> None:
    plan, checkpoint = plan_of(prepared), stopped(before) / "checkpoints" / "step-00000003"
    again = on_ranks(plan, **sizes(after)).model_copy(update={"checkpoint": plan.checkpoint})
    # What the other mesh holds after reading is what was stored: it saves the same bits before any step.
    train(again, tmp_path / "copy", resume_from=checkpoint, stop_after=0)
    assert_same_tensors(tensors(tmp_path / "copy", 3), tensors(stopped(before), 3))
    rest = train(again, tmp_path / "rest", resume_from=checkpoint)
    assert losses(rest) == pytest.approx({step: loss for step, loss in whole.items() if step > 3}, rel=0, abs=1e-5)


def test_fewer_documents_than_ranks_train_as_on_one(tmp_path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):  # one to train on, one to validate
        lines = [f"def {name}_{number}():\n    return {number}" for number in range(40)]
        (tmp_path / "text" / f"{name}.py").write_text("\n".join(lines))
    recipe = tmp_path / "two.yaml"
    recipe.write_text(RECIPE.replace("validation: 20%", "validation: 50%"))
    prepare(load_recipe(recipe), tmp_path / "prepared")
    plan = plan_of(tmp_path / "prepared")
    alone, four = train(plan, tmp_path / "one"), train(on_ranks(plan, replicate=4), tmp_path / "four")
    assert losses(four) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    scored = [[event["loss"] for event in fields(run, "EvalDone")] for run in (alone, four)]
    assert scored[0] and scored[1] == pytest.approx(scored[0], abs=1e-5)


def test_the_first_rank_tells_of_all_of_them(prepared, tmp_path) -> None:
    plan = on_ranks(plan_of(prepared), shard=2)
    events = train(plan, tmp_path / "run")
    (started,) = fields(events, "RunStarted")
    assert (started["world_size"], started["mesh"]) == (2, {"shard": 2})
    tokens = {e["step"]: e["loss_tokens"] for e in fields(events, "StepDone")}
    alone = {e["step"]: e["loss_tokens"] for e in fields(train(plan_of(prepared), tmp_path / "one"), "StepDone")}
    assert tokens == alone


AXES = {"copies": (2, 1, ["replicate"]), "shards": (1, 2, ["shard"]),
        "2 x 2": (2, 2, ["replicate", "shard"])}  # fmt: skip


@pytest.mark.parametrize(
    ("replicate", "shard", "names"),
    [pytest.param(*case, id=name, marks=[pytest.mark.soak] if name == "2 x 2" else []) for name, case in AXES.items()],
)
def test_the_report_compares_the_communication_of_each_axis_with_its_plan(
    prepared, tmp_path, replicate, shard, names
) -> None:
    plan = on_ranks(plan_of(prepared), replicate=replicate, shard=shard)
    planned = dict(zip(names, (0.25, 0.125), strict=False))
    layout = LayoutPlan(
        name="by hand", replicate=replicate, shard=shard, pipeline=1, micro_batch_size=1, accumulation=1,
        activation_checkpointing="none", memory=plan.memory, step_seconds=None, communication_seconds=planned,
    )  # fmt: skip
    parallel = ParallelPlan(
        gpus=replicate * shard, nodes=1, link="", network="", layouts=(layout,), chosen=0, reason=""
    )  # fmt: skip
    plan = plan.model_copy(update={"parallel": parallel})
    events = train(plan, tmp_path)
    write_plan(plan, tmp_path / "plan.json")
    with EventLog(tmp_path / "events.jsonl") as emit:
        for event in events:
            emit(event)
    steps = fields(events, "StepDone")
    for step in steps:
        assert list(step["communication_seconds"]) == names
        assert all(0 < seconds < step["step_seconds"] for seconds in step["communication_seconds"].values())
    rows = {title: (planned, measured) for title, planned, measured in compared(read_record(tmp_path))}
    for name in names:
        mean = sum(step["communication_seconds"][name] for step in steps) / len(steps)
        assert rows[f"seconds of communication per step, {name}"] == (planned[name], pytest.approx(mean))
