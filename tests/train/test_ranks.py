"""Two and four ranks train as one does, and take over each other's checkpoints. Oracle: one rank."""

import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import RECIPE, assert_same_tensors
from safetensors.torch import load_file

from bloomery.data.prepare.prepare import prepare
from bloomery.monitor.events import EventLog
from bloomery.parallel.gradients import all_reduce_gradients
from bloomery.parallel.process_group import join
from bloomery.plan.store import write_plan
from bloomery.plan.types import LayoutPlan, ParallelPlan, RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.report.page import planned_and_measured
from bloomery.report.record import read_run_record
from ranks import Ranks, fields, losses, on_ranks, ranks, train

MESHES = {
    "2 copies": (2, 1),
    "2 shards": (1, 2),
    "4 copies": (4, 1),
    "4 shards": (1, 4),
    "2 x 2": (2, 2),
}
EIGHT = {"8 copies": (8, 1), "8 shards": (1, 8), "2 x 4": (2, 4)}
STEPS, HALF = 4, 2


def plan_of(prepared: Path, **sections):
    config = sections.pop("config", None) or tiny_config(vocab_size=300)
    train = {
        "micro_batch_size": 2,
        "accumulation": 2,
        "tokens_per_step": 128,
        "steps": STEPS,
    } | sections.pop("train", {})
    every = {"every_steps": HALF}
    return tiny_plan(prepared, config=config, train=train, eval=every, checkpoint=every, **sections)


def checkpoint_of(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{HALF:08d}"


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {
        f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> Callable[..., tuple[list[Any], Path]]:
    """The events and the folder of a whole run over a mesh."""

    @cache
    def run(replicate: int, shard: int, accumulation: int) -> tuple[list[Any], Path]:
        folder = tmp_path_factory.mktemp("trained")
        plan = plan_of(
            prepared, train={"accumulation": accumulation, "tokens_per_step": 64 * accumulation}
        )
        return train(on_ranks(plan, replicate=replicate, shard=shard), folder), folder

    return lambda replicate, shard, accumulation=2: run(replicate, shard, accumulation)


@pytest.mark.parametrize(
    ("replicate", "shard"),
    # Those of four shards are read by two, and train on as one rank did, in a test below.
    [
        pytest.param(*mesh, id=name, marks=[pytest.mark.soak] if max(mesh) > 2 else [])
        for name, mesh in (MESHES | EIGHT).items()
    ],
)
def test_losses_and_weights_are_those_of_one_rank(trained, replicate, shard) -> None:
    accumulation = 4 if replicate * shard == 8 else 2
    (alone, one_folder), (several, folder) = (
        trained(1, 1, accumulation),
        trained(replicate, shard, accumulation),
    )
    assert losses(several).keys() == losses(alone).keys() == set(range(1, STEPS + 1))
    assert losses(several) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    norms = [
        {e["step"]: e["grad_norm"] for e in fields(run, "StepDone")} for run in (alone, several)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    scored = [[e["loss"] for e in fields(run, "EvalDone")] for run in (alone, several)]
    assert scored[1] == pytest.approx(scored[0], abs=1e-5)
    one, other = tensors(one_folder, STEPS), tensors(folder, STEPS)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            other[name], tensor, rtol=0, atol=1e-3 * float(tensor.abs().max()), msg=name
        )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_embedding_apart_from_the_head_is_a_unit_of_its_own(
    prepared, tmp_path, precision
) -> None:
    config = tiny_config(vocab_size=300, num_layers=2, tie_embeddings=False)
    plan = plan_of(prepared, config=config, train={"precision": precision})
    alone, two = train(plan, tmp_path / "one"), train(on_ranks(plan, shard=2), tmp_path / "two")
    assert losses(two) == pytest.approx(
        losses(alone), rel=0, abs=1e-5 if precision == "float32" else 1e-3
    )


def mib_given_back(plan_json: str) -> float:
    """On every rank: what the process no longer holds once 64 tensors of 1 MiB are freed between small ones."""
    from bloomery.train.process import resident_gib

    mesh = join(RunPlan.model_validate_json(plan_json).train)
    torch.ones(2**22)  # freed at once: from here on malloc would keep what is smaller
    freed, kept = zip(*[(torch.ones(2**18), torch.ones(2**8)) for _ in range(64)], strict=True)
    before = resident_gib()
    del freed
    given_back = 1024 * (before - resident_gib()) * bool(kept)
    mesh.any_rank(
        False
    )  # a rank that left while the other still connects would end that connection
    return given_back


def test_a_shard_gives_back_what_fsdp_frees(prepared) -> None:
    """In processes of its own: what others freed there, malloc may hold, and fill instead of asking the system."""
    plan = on_ranks(plan_of(prepared), shard=2)
    with closing(Ranks(2)) as fresh:
        assert min(fresh.call(mib_given_back, plan.model_dump_json())) > 60


def summed(plan_json: str) -> list[list[float]]:
    """Sums over two ranks: of a large gradient that one has transposed, of one that the other lacks, of small ones."""
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    sizes = [(1024, 512), (512, 1024), (3,), (5,)]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.0 + mesh.rank)
    if mesh.rank == 0:
        parameters[0].grad = torch.ones(512, 1024).T
    else:
        parameters[1].grad = parameters[3].grad = None
    all_reduce_gradients(parameters, mesh)
    return [sorted({float(value) for value in parameter.grad.unique()}) for parameter in parameters]


def test_gradients_of_any_size_and_layout_are_summed_alike_on_every_rank(prepared) -> None:
    plan = on_ranks(plan_of(prepared), replicate=2)
    assert ranks(2).call(summed, plan.model_dump_json()) == [[[3.0], [1.0], [3.0], [1.0]]] * 2


# int8 blocks of 256 lie on one rank each
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
OPTIMIZERS = {
    "muon": {"kind": "muon"},
    "adafactor": {"kind": "adafactor"},
    "int8 states": {"state_dtype": "int8"},
    "bfloat16 states": {"state_dtype": "bfloat16"},
    "offload": {"offload": True},
}


@pytest.mark.sampled(3)  # copies and shards in turn
@pytest.mark.parametrize(
    ("replicate", "shard"),
    [(2, 1), (1, 2), pytest.param(1, 4, marks=pytest.mark.soak)],
    ids=["copies", "shards", "4 shards"],
)
@pytest.mark.parametrize("changes", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_takes_the_steps_of_one_rank(
    prepared, tmp_path, changes, replicate, shard
) -> None:
    plan = plan_of(
        prepared,
        config=tiny_config(vocab_size=512, **WIDE),
        optimizer={"warmup_steps": 0} | changes,
    )
    alone = train(plan, tmp_path / "one", stop_after=HALF)
    several = train(
        on_ranks(plan, replicate=replicate, shard=shard), tmp_path / "several", stop_after=HALF
    )
    near = 5e-4 if changes.get("kind") == "muon" else 1e-5  # Newton-Schulz runs in bfloat16
    assert losses(several) == pytest.approx(losses(alone), rel=0, abs=near)
    checkpoint = checkpoint_of(tmp_path / "several")
    # Stopped before its evaluation, a step is saved again by the run that evaluates it: with what it has read.
    stored = tensors(tmp_path / "several", HALF)
    train(plan, tmp_path / "copy", resume_from=checkpoint, stop_after=0)  # one rank reads all of it
    assert_same_tensors(tensors(tmp_path / "copy", HALF), stored)
    if shard == 2:
        again = on_ranks(plan, shard=4)
        train(again, tmp_path / "four", resume_from=checkpoint, stop_after=0)
        assert_same_tensors(tensors(tmp_path / "four", HALF), stored)


def test_stochastic_rounding_draws_the_same_bits_for_any_number_of_shards(
    prepared, tmp_path
) -> None:
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
def test_a_stopped_run_on_the_same_mesh_resumes_to_the_same_bits(
    prepared, tmp_path, replicate, shard
) -> None:
    config = tiny_config(vocab_size=300, num_layers=2, residual_dropout=0.1)
    plan = on_ranks(plan_of(prepared, config=config), replicate=replicate, shard=shard)
    whole = train(plan, tmp_path / "whole")
    first = train(plan, tmp_path / "halves", stop_after=HALF)
    second = train(plan, tmp_path / "halves", resume_from=checkpoint_of(tmp_path / "halves"))
    assert losses(first) | losses(second) == losses(whole)
    assert_same_tensors(tensors(tmp_path / "halves", STEPS), tensors(tmp_path / "whole", STEPS))


RESHARDS = [
    ("1", "2s"),
    ("1", "2c"),
    ("2c", "1"),
    ("4s", "2s"),
    ("2s", "1"),
    ("2s", "4s"),
    ("2s", "4c"),
    ("4c", "2s"),
    ("1", "4s"),
]


def sizes(mesh: str) -> dict[str, int]:
    return {"shard" if mesh.endswith("s") else "replicate": int(mesh[0])}


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run over a mesh, stopped halfway."""

    @cache
    def run(mesh: str) -> Path:
        folder = tmp_path_factory.mktemp(mesh)
        train(on_ranks(plan_of(prepared), **sizes(mesh)), folder, stop_after=HALF)
        return folder

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "after"), RESHARDS, ids="-".join)
def test_a_checkpoint_resumes_on_another_mesh(
    prepared, stopped, trained, tmp_path, before, after
) -> None:
    plan, checkpoint = plan_of(prepared), checkpoint_of(stopped(before))
    again = on_ranks(plan, **sizes(after)).model_copy(update={"checkpoint": plan.checkpoint})
    # What the other mesh holds after reading is what was stored: it saves the same bits before any step.
    train(again, tmp_path / "copy", resume_from=checkpoint, stop_after=0)
    assert_same_tensors(tensors(tmp_path / "copy", HALF), tensors(stopped(before), HALF))
    rest = train(again, tmp_path / "rest", resume_from=checkpoint)
    assert losses(rest) == pytest.approx(
        {step: loss for step, loss in losses(trained(1, 1)[0]).items() if step > HALF},
        rel=0,
        abs=1e-5,
    )


def test_fewer_documents_than_ranks_train_as_on_one(tmp_path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):  # one to train on, one to validate
        lines = [f"def {name}_{number}():\n    return {number}" for number in range(40)]
        (tmp_path / "text" / f"{name}.py").write_text("\n".join(lines))
    recipe = tmp_path / "two.yaml"
    recipe.write_text(RECIPE.replace("validation: 5%", "validation: 50%"))
    prepare(load_recipe(recipe), tmp_path / "prepared")
    plan = plan_of(tmp_path / "prepared")
    alone, four = (
        train(plan, tmp_path / "one"),
        train(on_ranks(plan, replicate=4), tmp_path / "four"),
    )
    assert losses(four) == pytest.approx(losses(alone), rel=0, abs=1e-5)
    scored = [[event["loss"] for event in fields(run, "EvalDone")] for run in (alone, four)]
    assert scored[0] and scored[1] == pytest.approx(scored[0], abs=1e-5)


def test_the_first_rank_tells_of_all_of_them(trained) -> None:
    events, _ = trained(1, 2)
    (started,) = fields(events, "RunStarted")
    assert (started["world_size"], started["mesh"]) == (2, {"shard": 2})
    tokens = {e["step"]: e["loss_tokens"] for e in fields(events, "StepDone")}
    alone = {e["step"]: e["loss_tokens"] for e in fields(trained(1, 1)[0], "StepDone")}
    assert tokens == alone


AXES = {
    "copies": (2, 1, ["replicate"]),
    "shards": (1, 2, ["shard"]),
    "2 x 2": (2, 2, ["replicate", "shard"]),
}


@pytest.mark.parametrize(
    ("replicate", "shard", "names"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.soak] if name == "2 x 2" else [])
        for name, case in AXES.items()
    ],
)
def test_the_report_compares_the_communication_of_each_axis_with_its_plan(
    prepared, trained, tmp_path, replicate, shard, names
) -> None:
    plan = on_ranks(plan_of(prepared), replicate=replicate, shard=shard)
    planned = dict(zip(names, (0.25, 0.125), strict=False))
    layout = LayoutPlan(
        name="by hand",
        replicate=replicate,
        shard=shard,
        pipeline=1,
        micro_batch_size=1,
        accumulation=1,
        activation_checkpointing="none",
        memory=plan.memory,
        step_seconds=None,
        communication_seconds=planned,
    )
    parallel = ParallelPlan(
        gpus=replicate * shard, nodes=1, link="", network="", layouts=(layout,), chosen=0, reason=""
    )
    plan = plan.model_copy(update={"parallel": parallel})
    events, _ = trained(replicate, shard)
    write_plan(plan, tmp_path / "plan.json")
    with EventLog(tmp_path / "events.jsonl") as emit:
        for event in events:
            emit(event)
    steps = fields(events, "StepDone")
    for step in steps:
        assert list(step["communication_seconds"]) == names
        assert all(
            0 < seconds < step["step_seconds"] for seconds in step["communication_seconds"].values()
        )
    rows = {
        title: (planned, measured)
        for title, planned, measured in planned_and_measured(read_run_record(tmp_path))
    }
    for name in names:
        mean = sum(step["communication_seconds"][name] for step in steps) / len(steps)
        assert rows[f"seconds of communication per step, {name}"] == (
            planned[name],
            pytest.approx(mean),
        )


def num_threads_of_groups() -> int:
    """Of this process: those of gloo's groups."""
    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_a_pool_of_tests_keeps_no_group(prepared, tmp_path):
    """Each would wake a thread a hundred times a second until all tests have ended."""
    before = ranks(2).call(num_threads_of_groups)
    train(on_ranks(plan_of(prepared), shard=2), tmp_path, stop_after=1)
    after = ranks(2).call(num_threads_of_groups)
    assert all(number <= earlier for number, earlier in zip(after, before, strict=True))
