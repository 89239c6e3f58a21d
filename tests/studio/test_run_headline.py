"""What decides about a run comes first, and sentences say what the numbers mean."""

import time
from types import SimpleNamespace

import pytest
from studio_for_tests import make_run

from bloomery.monitor.events import EvalDone, RunEnded, RunStarted, Saved
from bloomery.studio.watching import Watching
from runs_for_tests import made_up_run, step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")


def figures_of(events, *, end: RunEnded | None = None) -> dict[str, tuple[str, str, str]]:
    from bloomery.studio.run_headline import headline

    make_run("demo", events=events, end=end)
    run = Watching().run("demo")
    run.update()
    return {figure.label: (figure.value, figure.below, figure.tone) for figure in headline(run)}


def evaluated(step: int, loss: float, reward: float | None = None) -> EvalDone:
    return EvalDone(
        step=step,
        loss=loss,
        perplexity=None,
        bits_per_byte=None,
        tokens=9,
        seconds=1.0,
        metrics={} if reward is None else {"reward": reward},
    )


STEPS = [step_done(step) for step in (1, 2, 3)]
COMPLETIONS = RunStarted(
    schema=2, version="1", parameters=1, steps=3, attention="sdpa", device="cpu", loss_unit="completion"
)  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "value", "below", "tone"),
    [
        ([1.5], "1.500", "at step 1, the first evaluation", ""),
        ([1.5, 1.4], "1.400", "at step 2; falls still: 1.500 one evaluation ago", "good"),
        ([1.5, 1.4, 1.401], "1.400", "at step 2; level since: 1.401 now", ""),
        ([1.4, 1.45, 1.43, 1.5], "1.400", "at step 1; higher since: 1.500 now, 2 evaluations the wrong way", "warn"),
    ],
)  # fmt: skip
def test_the_best_validation_loss_comes_first(losses, value, below, tone) -> None:
    evaluations = [evaluated(step, loss) for step, loss in enumerate(losses, 1)]
    figures = figures_of([*STEPS, *evaluations])
    assert next(iter(figures.items())) == ("Validation loss, best so far", (value, below, tone))


def test_of_rewards_the_highest_of_held_out_prompts_decides() -> None:
    steps = [step_done(step, 1e-7, metrics={"reward": 0.2 * step}) for step in (1, 2, 3)]
    figures = figures_of([COMPLETIONS, *steps, evaluated(1, -0.7, 0.7), evaluated(2, -0.6, 0.6)])
    value, below, tone = figures["Reward of held-out prompts, best so far"]
    assert (value, tone) == ("0.700", "warn")
    assert below == "at step 1; lower since: 0.600 now"
    assert "Training loss, smoothed" not in figures  # near 0, it says nothing


def test_without_an_evaluation_training_leads_and_says_so() -> None:
    figures = figures_of(STEPS)
    label, (value, below, _) = next(iter(figures.items()))
    assert (label, value) == ("Training loss, moving average", "2.000")
    assert "none so far" in below


def test_what_a_kill_would_lose_is_a_sentence_while_it_trains() -> None:
    from bloomery.studio.run_headline import headline

    saved = Saved(
        step=2, path="checkpoints/step-00000002", bytes=1, seconds=0.1, time=time.time() - 360
    )
    make_run("live", events=[*STEPS, saved])
    run = Watching().run("live")
    run.update()
    run.status = "running"
    figure = next(one for one in headline(run) if one.label == "Last checkpoint")
    assert (figure.value, figure.below) == ("6 min ago", "a kill now loses 6 min")


def test_after_its_end_a_run_says_what_is_saved() -> None:
    figures = figures_of(made_up_run(), end=RunEnded(step=40, status="done"))
    assert figures["Last checkpoint"] == ("step 40", "the last step is saved", "muted")
    value, below, _ = figures["Validation loss, best"]
    assert below.startswith("at step 40, the last evaluation; ")
    assert float(value) < float(below.split()[-3])


@pytest.mark.parametrize(
    ("peak", "below", "tone"),
    [
        (8.0, "20% below the plan: 10.0 GiB", "good"),
        (10.1, "as planned: 10.0 GiB", "good"),
        (10.5, "5% above the plan: 10.0 GiB", "warn"),
        (11.2, "12% above the plan: 10.0 GiB", "warn"),
        (13.0, "30% above the plan: 10.0 GiB", "warn"),
    ],
)
def test_memory_above_the_plan_wants_a_look(peak: float, below: str, tone: str) -> None:
    from bloomery.studio.run_headline import _of_memory

    plan = SimpleNamespace(memory=SimpleNamespace(total=10 * 2**30))
    opened = SimpleNamespace(
        summary=SimpleNamespace(peak_gib=peak), reader=SimpleNamespace(plan=plan)
    )
    (figure,) = _of_memory(opened)
    assert (figure.value, figure.below, figure.tone) == (f"{peak:.1f}", below, tone)
