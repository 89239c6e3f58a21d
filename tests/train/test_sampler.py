"""Sampling of completions on all ranks: invariance, stops, out of memory. Oracle: one rank with 64 slots."""

import itertools
import resource
import sys
from pathlib import Path

import pytest
import torch
from rollouts_for_tests import assert_same_training, completions, metrics, plan_of, write_recipe

from bloomery.monitor.events import StepDone
from bloomery.train.rl import sampler
from ranks import fields, losses, on_ranks, ranks, train, train_here


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("rl"))


def first_rollout(run_dir: Path) -> list[dict]:
    """What was sampled before any rank has summed gradients in another order."""
    rows = completions(run_dir)["step-00000001.jsonl"]
    names = ("prompt_ids", "completion_ids", "completion", "reward", "logps", "truncated")
    return [{name: row[name] for name in names} for row in rows]


# 64 completions: as many as are sampled at once.
ONE_STEP = ("train.max_steps=1", "objective.num_iterations=2", "train.batch_size=64")


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(plan_of(recipe, *ONE_STEP), folder)
    return first_rollout(folder)


@pytest.mark.parametrize(
    "slots", [8, *(pytest.param(number, marks=pytest.mark.soak) for number in (1, 3))]
)
def test_completions_do_not_depend_on_the_number_of_slots(
    recipe, alone, tmp_path, slots, monkeypatch
):
    sizes = []
    draw = sampler.sample_completions

    def draw_noting(*arguments, slots, **named):
        sizes.append(slots)
        return draw(*arguments, slots=slots, **named)

    monkeypatch.setattr(sampler, "sample_completions", draw_noting)
    monkeypatch.setattr(sampler, "ROLLOUT_SLOTS", slots)
    train(plan_of(recipe, *ONE_STEP), tmp_path)
    assert set(sizes) == {slots}
    assert len(alone) == 64
    assert first_rollout(tmp_path) == alone


def test_completions_do_not_depend_on_the_number_of_threads(recipe, alone, tmp_path):
    threads = torch.get_num_threads()
    train(plan_of(recipe, *ONE_STEP, threads=2), tmp_path)
    torch.set_num_threads(threads)
    assert first_rollout(tmp_path) == alone


@pytest.mark.cpu_only(
    "the step that computes rows alike, whatever their number, is compiled for it"
)
@pytest.mark.parametrize(
    "mesh",
    [
        {"replicate": 2},
        {"shard": 2},
        pytest.param({"replicate": 4}, marks=pytest.mark.soak),
        pytest.param({"replicate": 2, "shard": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_completions_do_not_depend_on_the_ranks(recipe, alone, tmp_path, mesh):
    train(on_ranks(plan_of(recipe, *ONE_STEP), **mesh), tmp_path)
    assert first_rollout(tmp_path) == alone


def train_with_slots(plan_json: str, folder: str, slots: int) -> None:
    """One rank of a run that samples so many completions at once."""
    slots_before = sampler.ROLLOUT_SLOTS
    sampler.ROLLOUT_SLOTS = slots
    try:
        train_here(plan_json, folder, None, None)
    finally:
        sampler.ROLLOUT_SLOTS = slots_before


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("slots", [8, 64])
def test_completions_are_the_same_at_any_slots_threads_and_ranks(
    recipe, alone, tmp_path, slots, threads, world
):
    plan = on_ranks(plan_of(recipe, *ONE_STEP, threads=threads), replicate=world)
    words = (plan.model_dump_json(), str(tmp_path), slots)
    num_threads = torch.get_num_threads()
    if world == 1:
        train_with_slots(*words)
        torch.set_num_threads(num_threads)
    else:
        ranks(world).call(train_with_slots, *words)
    assert first_rollout(tmp_path) == alone


# Stops


def train_until(
    plan_json: str, folder: str, step: int, calls: int, resume_from: str | None
) -> list:
    """One rank of a run that is asked to stop at the `calls`th question after a step."""
    from bloomery.parallel.process_group import join
    from bloomery.plan.types import RunPlan
    from bloomery.train.loop import run

    sampler.FORWARDS_PER_CHECK = 2
    plan = RunPlan.model_validate_json(plan_json)
    mesh = join(plan.train)
    events: list = []
    asked_after_step = itertools.count(1)

    def steps_done() -> int:
        return max((event.step for event in events if isinstance(event, StepDone)), default=0)

    def stop() -> bool:
        return mesh.any_rank(steps_done() >= step and next(asked_after_step) >= calls)

    outcome = run(
        plan,
        run_dir=Path(folder),
        emit=events.append,
        stop=stop,
        resume_from=None if resume_from is None else Path(resume_from),
        mesh=mesh,
    )
    return [*events, outcome]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", [{}, {"replicate": 2}, {"shard": 2}], ids=str)
@pytest.mark.parametrize("calls", [3, 5])
def test_a_stop_in_a_rollout_makes_it_again(recipe, tmp_path, mesh, calls):
    """Three prompts: of two ranks one has more to sample, and waits for none."""
    edits = ("train.batch_size=12", "objective.num_iterations=2", "eval.every=none")
    plan = on_ranks(plan_of(recipe, *edits), **mesh)
    whole = train(plan, tmp_path / "whole")
    folder = tmp_path / "stopped"
    folder.mkdir()
    words = (plan.model_dump_json(), str(folder), 2, calls, None)
    world = plan.train.ranks
    if world == 1:
        *first, outcome = train_until(*words)
    else:
        *first, outcome = ranks(world).call(train_until, *words)[0]
    # The second rollout was begun and dropped: the checkpoint has none, and its file is missing.
    assert outcome == "stopped"
    assert losses(first).keys() == {1, 2}
    assert list(completions(folder)) == ["step-00000001.jsonl"]
    checkpoint = folder / "checkpoints" / "step-00000002"
    assert not (checkpoint / "rollout.safetensors").exists()
    rest = train(plan, folder, resume_from=checkpoint)
    assert_same_training(folder, [*first, *rest], tmp_path / "whole", whole)


def test_an_evaluation_of_uneven_ranks_ends(recipe, tmp_path):
    """Each of two ranks samples other numbers of completions of the held-out prompts."""
    plan = plan_of(recipe, "train.max_steps=2", "eval.every=1 steps")
    plan = plan.model_copy(update={"eval": plan.eval.model_copy(update={"sequences": 3})})
    one = train(plan, tmp_path / "one")
    two = train(on_ranks(plan, replicate=2), tmp_path / "two")
    rewards = [
        [event["metrics"]["reward"] for event in fields(events, "EvalDone")]
        for events in (one, two)
    ]
    assert len(rewards[0]) == 2
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-6)


def test_an_evaluation_changes_nothing_of_a_rollout(recipe, tmp_path):
    edits = ("objective.num_iterations=2", "objective.steps_per_generation=2")
    rare = train(plan_of(recipe, *edits), tmp_path / "rare")
    often = train(plan_of(recipe, *edits, "eval.every=1 steps"), tmp_path / "often")
    assert losses(often) == losses(rare)
    assert metrics(often) == metrics(rare)
    assert completions(tmp_path / "often") == completions(tmp_path / "rare")


def test_the_end_of_a_wall_time_run_cuts_a_rollout_short(recipe, tmp_path, monkeypatch):
    from bloomery.train import loop

    plan = plan_of(recipe, "eval.every=none")
    plan = plan.model_copy(
        update={"train": plan.train.model_copy(update={"steps": None, "seconds": 1000.0})}
    )
    events: list = []
    forwards = []
    before_forward = sampler.Agreement.before_forward

    class Clock(loop.Timer):
        """The time is up after the fifth forward of the third rollout."""

        @property
        def elapsed(self) -> float:
            return 2000.0 if len(losses(events)) == 2 and len(forwards) > 5 else 1.0

    def noting(self, num_done):
        forwards.append(num_done)
        before_forward(self, num_done)

    def emit(event):
        events.append(event)
        if isinstance(event, StepDone):
            forwards.clear()

    monkeypatch.setattr(sampler.Agreement, "before_forward", noting)
    outcome = loop.run(
        plan, run_dir=tmp_path, emit=emit, stop=lambda: False, timer=Clock(began=0.0)
    )
    assert outcome == "done"
    assert losses(events).keys() == {1, 2}
    assert len(forwards) == 6
    assert len(completions(tmp_path)) == 2
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


# Out of memory


def test_out_of_memory_in_sampling_takes_fewer_slots(recipe, alone, tmp_path, monkeypatch):
    sizes = []
    draw = sampler.sample_completions

    def draw_few(*arguments, slots, **named):
        sizes.append(slots)
        if slots > 4:
            raise MemoryError("not enough memory: you tried to allocate 8 bytes")
        return draw(*arguments, slots=slots, **named)

    monkeypatch.setattr(sampler, "sample_completions", draw_few)
    events = train(plan_of(recipe, *ONE_STEP), tmp_path)
    assert sizes[:5] == [64, 32, 16, 8, 4]
    assert set(sizes[5:]) == {4}  # the evaluation after it begins with as many
    (recovered,) = fields(events, "Recovered")
    assert "out of memory" in recovered["reason"]
    assert recovered["action"] == "samples 4 at once"
    assert first_rollout(tmp_path) == alone


def test_a_completion_that_does_not_fit_is_named(recipe, tmp_path, monkeypatch):
    from bloomery.train.failures import OutOfMemory

    def draw_none(*arguments, **named):
        raise MemoryError

    monkeypatch.setattr(sampler, "sample_completions", draw_none)
    with pytest.raises(OutOfMemory, match="max_completion_length"):
        train(plan_of(recipe, *ONE_STEP), tmp_path)


@pytest.mark.parametrize(
    "moment", ["update", pytest.param("scores before the first step", marks=pytest.mark.soak)]
)
def test_out_of_memory_in_training_takes_smaller_micro_batches(
    recipe, tmp_path, monkeypatch, moment
):
    """The rollout is kept, or sampled again with the same completions; its metrics are reported once."""
    from bloomery.train import step
    from bloomery.train.rl import policy_scores

    edits = ("train.max_steps=2", "train.micro_batch_size=4", "objective.num_iterations=2")
    whole = train(plan_of(recipe, *edits), tmp_path / "whole")
    module, name = (
        (policy_scores, "forward_all") if moment.startswith("scores") else (step, "compute_losses")
    )
    work = getattr(module, name)

    def short_of_memory(model, batches, *rest, **named):
        if any(len(batch.tokens) == 4 for batch in batches):
            raise MemoryError
        return work(model, batches, *rest, **named)

    monkeypatch.setattr(module, name, short_of_memory)
    events = train(plan_of(recipe, *edits), tmp_path / "short")
    (recovered,) = fields(events, "Recovered")
    assert "out of memory" in recovered["reason"]
    assert "micro-batch" in recovered["action"]
    assert completions(tmp_path / "short").keys() == completions(tmp_path / "whole").keys()
    assert first_rollout(tmp_path / "short") == first_rollout(tmp_path / "whole")
    assert losses(events) == pytest.approx(losses(whole), abs=1e-6)
    assert metrics(events)[1]["reward"] == metrics(whole)[1]["reward"]
    assert "reward" not in metrics(events)[2]


# Non-finite losses


def test_a_rewind_drops_the_rollout_and_its_prompts(recipe, tmp_path, monkeypatch):
    """Steps 3 and 4 are those of the second rollout, whose losses are made NaN."""
    from bloomery.train import step

    compute_losses = step.compute_losses
    done: list = []

    def broken(*arguments, **named):
        all_parts = compute_losses(*arguments, **named)
        if not 2 <= len(done) < 6:  # three steps are skipped, and the fourth rewinds
            return all_parts
        return [parts._replace(total=parts.total * float("nan")) for parts in all_parts]

    monkeypatch.setattr(step, "compute_losses", broken)
    edits = ("objective.num_iterations=4", "checkpoint.every=1 steps", "train.max_steps=8")
    plan = plan_of(recipe, *edits, "eval.every=none")

    from bloomery.train.loop import run

    events: list = []

    def emit(event):
        events.append(event)
        if isinstance(event, StepDone):
            done.append(event.step)

    run(plan, run_dir=tmp_path, emit=emit, stop=lambda: False)
    assert done == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8]
    # Four steps of the first rollout, two of a second that was dropped with its prompts; then others.
    files = completions(tmp_path)
    assert list(files) == [
        "step-00000001.jsonl",
        "step-00000003.jsonl",
        "step-00000005.jsonl",
        "step-00000007.jsonl",
    ]
    prompts = [{tuple(row["prompt_ids"]) for row in rows} for rows in files.values()]
    assert all(not one & other for one, other in itertools.combinations(prompts, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps memory like this")
def test_memory_of_sampling_goes_back_to_the_system():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    # Every sixteenth tensor stays: malloc keeps what is freed between two of them.
    tensors = [torch.ones(2**14) for _ in range(2048)]
    kept = tensors[::16]
    tensors.clear()
    before = resident_bytes()
    sampler.return_sampling_memory()
    freed = before - resident_bytes()
    assert len(kept) == 128
    assert freed > 2**26
