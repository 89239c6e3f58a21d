"""One run that is killed and goes on over other devices: stages, one device, shards in stages, and so on.

Oracle: the run of one device that nothing disturbed.
"""

import json
import random
import shutil
import signal
from dataclasses import dataclass

import pytest
from runs_of_bloomery import (
    Bloomery,
    assert_bitwise_equal,
    losses,
    ranks_of,
)

from bloomery.monitor.events import EvalDone, RunEnded, Sampled, last_per_step

# Without dropout, whose masks depend on the data-parallel ranks, and with a learning rate that does not depend on the
# number of steps. Samples are greedy.
MODEL = (
    "model.num_layers=4",
    "model.dropout=0.0",
    "model.tie_embeddings=false",
    "train.micro_batch_size=1",
    "optimizer.schedule=constant",
    "checkpoint.every=2 steps",
    "eval.every=4 steps",
    'sample.prompts=["the"]',
    "sample.temperature=0",
    "sample.max_new_tokens=8",
)


@dataclass(frozen=True)
class Layout:
    """How a part of the run is laid out, as users ask for it. `sums`: over ranks, so that last bits differ."""

    devices: int
    pipeline: int = 1
    shard: int = 1
    context: int = 1
    schedule: str = "1f1b"
    sums: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return (
            "-d",
            ",".join(["cpu"] * self.devices),
            f"parallel.pipeline={self.pipeline}",
            f"parallel.shard={self.shard}",
            f"parallel.context={self.context}",
            f"parallel.pipeline_schedule={self.schedule}",
        )


TWO_STAGES = Layout(2, pipeline=2)
ONE_DEVICE = Layout(1)
SHARDS_IN_STAGES = Layout(4, pipeline=2, shard=2, sums=True)
FOUR_STAGES = Layout(4, pipeline=4)
SHARDS = Layout(2, shard=2, sums=True)
SHARED_SEQUENCES = Layout(2, context=2, sums=True)
INTERLEAVED = Layout(2, pipeline=2, schedule="interleaved")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def kill_in(bloomery: Bloomery, step: int, rank: int, *words: str) -> None:
    """Begin or resume the run; the rank dies before it takes that step, and no process is left."""
    deaths = bloomery.folder / "runs/deaths.json"
    deaths.write_text(json.dumps([[{"rank": rank}, step, signal.SIGKILL]]))
    told = bloomery.here(*words)
    deaths.write_text("[]")
    assert told.returncode == 1, told.stderr
    assert "training process killed from outside" in told.stderr, told.stderr
    assert ranks_of(bloomery.run_dir) == []


def words_of(bloomery: Bloomery, layout: Layout, max_steps: int) -> tuple[str, ...]:
    steps = f"train.max_steps={max_steps}"
    if bloomery.run_dir.exists():
        return ("resume", "one", *layout.words, steps)
    return ("train", "tiny.yaml", "--run-dir", "runs/one", *MODEL, steps, *layout.words)


def assert_same_run(bloomery: Bloomery, undisturbed: Bloomery, *, exact_steps: int) -> None:
    """Each step once, its losses, evaluations and samples; `exact_steps`: from the first, those with equal bits."""
    own_losses = losses(bloomery.run_dir)
    expected = losses(undisturbed.run_dir)
    assert own_losses[:exact_steps] == expected[:exact_steps]
    assert own_losses == pytest.approx(expected, rel=0, abs=1e-5)
    evaluations, samples = (
        [last_per_step(run.events(), kind) for run in (bloomery, undisturbed)]
        for kind in (EvalDone, Sampled)
    )
    own_scores, expected_scores = ([event.loss for event in events] for events in evaluations)
    assert own_scores == pytest.approx(expected_scores, rel=0, abs=1e-5)
    own_texts, expected_texts = (
        [(event.step, event.prompt, event.completion) for event in events] for events in samples
    )
    assert own_texts and own_texts == expected_texts
    ended = [event for event in bloomery.events() if isinstance(event, RunEnded)]
    assert ended[-1].status == "done"


@pytest.fixture
def bloomery(dying_workshop) -> Bloomery:
    (dying_workshop / "runs/deaths.json").write_text("[]")
    return Bloomery(dying_workshop)


def copied(bloomery: Bloomery, name: str) -> Bloomery:
    """The same workshop and run in another folder beside it."""
    folder = bloomery.folder.parent / f"{bloomery.folder.name}-{name}"
    shutil.copytree(bloomery.folder, folder)
    return Bloomery(folder)


def done(bloomery: Bloomery, layout: Layout, max_steps: int) -> Bloomery:
    told = bloomery.here(*words_of(bloomery, layout, max_steps))
    assert told.returncode == 0, told.stderr
    return bloomery


def test_a_killed_run_goes_on_over_stages_one_device_and_shards_in_stages(bloomery) -> None:
    undisturbed = done(copied(bloomery, "undisturbed"), ONE_DEVICE, 12)
    kill_in(bloomery, 4, 1, *words_of(bloomery, TWO_STAGES, 12))
    kill_in(bloomery, 8, 0, *words_of(bloomery, ONE_DEVICE, 12))
    done(bloomery, SHARDS_IN_STAGES, 12)
    assert_same_run(bloomery, undisturbed, exact_steps=6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_a_run_goes_through_every_layout_with_two_kills_in_each(bloomery, seed) -> None:
    """A copy of the run that is not killed in that layout has the same bits."""
    layouts = [
        TWO_STAGES,
        ONE_DEVICE,
        SHARDS_IN_STAGES,
        FOUR_STAGES,
        SHARED_SEQUENCES,
        SHARDS,
        INTERLEAVED,
    ]
    steps_each = 8
    draw = random.Random(seed)
    undisturbed = done(copied(bloomery, "undisturbed"), ONE_DEVICE, steps_each * len(layouts))
    for index, layout in enumerate(layouts):
        end = steps_each * (index + 1)
        calm = copied(bloomery, f"calm-{index}")
        for step in sorted(draw.sample(range(end - steps_each + 2, end), 2)):
            rank = draw.randrange(layout.devices)
            kill_in(bloomery, step, rank, *words_of(bloomery, layout, end))
        for run in (bloomery, calm):
            done(run, layout, end)
        assert_bitwise_equal(bloomery.run_dir, calm.run_dir, step=end)
    assert_same_run(bloomery, undisturbed, exact_steps=2 * steps_each)
