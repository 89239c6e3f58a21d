"""Views of a run that is judged by rewards: its lines, its picture, the time that is left, metrics.json."""

from dataclasses import replace

import pytest

from bloomery.monitor.events import EvalDone, Phase, RunEnded, RunStarted, Saved
from bloomery.monitor.words import progress_text
from bloomery.view.metrics_json import metrics_of
from bloomery.view.planned_figures import PlannedFigures
from bloomery.view.screen import Screen, frame, view_for_screen
from bloomery.view.summary import summary_of
from bloomery.view.terminal import PlainView
from runs_for_tests import step_done

UPDATE = 0.5
ROLLOUT = 4.0
REWARD = 0.25


def rl_run(steps=8, *, per_rollout=1, planned=None, first_rollout=ROLLOUT, eval_every=None):
    """Yields the events of a run with rewards; rollouts take ROLLOUT seconds, the first one `first_rollout`."""
    clock = 0.0
    yield RunStarted(
        schema=2,
        version="0.1.0",
        parameters=1000,
        steps=planned or steps,
        attention="mask",
        device="cpu",
        loss_unit="completion",
        steps_per_rollout=per_rollout,
        time=clock,
    )
    for step in range(1, steps + 1):
        begins = (step - 1) % per_rollout == 0
        rollout = (first_rollout if step == 1 else ROLLOUT) if begins else None
        seconds = UPDATE + ((rollout + REWARD) if rollout else 0.0)
        if begins:
            yield Phase(step=step - 1, name="rollout", done=3, total=16, time=clock + 1)
        clock += seconds
        metrics = {"entropy": 1.5, "clip_ratio/region_mean": 0.0}
        if begins:
            metrics |= {
                "reward": 0.1 * step,
                "completions/mean_length": 12.0,
                "completions/clipped_ratio": 0.25,
            }
        yield step_done(
            step,
            1e-6,
            clock,
            step_seconds=seconds,
            tokens=step * 100,
            metrics=metrics,
            rollout_seconds=rollout,
            reward_seconds=REWARD if rollout else None,
        )
        if eval_every and step % eval_every == 0:
            yield Phase(step=step, name="evaluation", done=1, total=16, time=clock + 0.5)
            clock += 1.0
            yield EvalDone(
                step=step,
                loss=-0.1 * step,
                perplexity=None,
                bits_per_byte=None,
                tokens=200,
                seconds=1.0,
                metrics={"reward": 0.1 * step},
                time=clock,
            )
            yield Saved(step=step, path="x", bytes=1, seconds=0.1, best=True, time=clock)


def printed(events):
    lines = []
    view = PlainView(PlannedFigures(every_steps=2), lines.append)
    for event in events:
        view.write(event)
    view.close()
    return lines


@pytest.mark.parametrize("per_rollout", [1, 3])
def test_one_rollout_tells_the_time_that_is_left(per_rollout):
    """Of 30 steps, after the first: exact where the others take as long."""
    first, *_ = [
        summary_of(list(rl_run(steps, per_rollout=per_rollout, planned=30))).eta_seconds
        for steps in (1, 2)
    ]
    rollouts_left = 30 // per_rollout - 1
    assert first == pytest.approx(29 * UPDATE + rollouts_left * (ROLLOUT + REWARD))


def test_the_time_left_falls_by_what_a_step_takes():
    """In the middle of a rollout its rest costs updates alone."""
    etas = {
        steps: summary_of(list(rl_run(steps, per_rollout=3, planned=12))).eta_seconds
        for steps in range(1, 13)
    }
    assert etas[1] - etas[2] == pytest.approx(UPDATE)
    assert etas[3] - etas[4] == pytest.approx(UPDATE + ROLLOUT + REWARD)
    assert etas[12] == 0


def test_a_slow_first_rollout_and_evaluations_are_told_apart():
    """The first rollout compiles; evaluations lie between steps."""
    eta = summary_of(list(rl_run(10, planned=20, first_rollout=40.0))).eta_seconds
    assert eta == pytest.approx(10 * (UPDATE + ROLLOUT + REWARD))
    evaluated = summary_of(list(rl_run(10, planned=20, eval_every=2))).eta_seconds
    assert evaluated == pytest.approx(eta + 10 * 4 / 9, rel=0.01)  # four evaluations in nine steps


def test_lines_have_the_reward_before_the_loss():
    lines = printed([*rl_run(4, eval_every=4), RunEnded(step=4, status="done", time=30.0)])
    head = next(line for line in lines if "step" in line and "ETA" in line)
    assert head.split() == ["step", "tokens", "reward", "loss", "val", "reward", "tokens/s", "ETA"]
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[:2] for row in rows] == [["2", "200"], ["4", "400"]]
    assert [row[2] for row in rows] == ["0.150", "0.350"]  # the mean of two rollouts
    assert rows[1][4] == "0.400"


def test_the_line_of_the_start_has_no_loss():
    started, *rest = rl_run(4, eval_every=4)
    before = EvalDone(
        step=0, loss=-0.05, perplexity=None, bits_per_byte=None, tokens=9, seconds=1.0,
        metrics={"reward": 0.05}, time=0.5,
    )  # fmt: skip
    events = [started, before, *rest, RunEnded(step=4, status="done", time=30.0)]
    rows = [line.split() for line in printed(events) if line.strip()[:1].isdigit()]
    assert rows[0][:3] == ["0", "0", "0.050"] and "skipped" not in rows[0]
    # It is no candidate for the best checkpoint.
    assert summary_of([started, replace(before, loss=-9.0), *rest]).best.step == 4


def test_no_line_is_wider_than_the_page():
    """The last row names the best checkpoint and the time that it took: beside it or below it."""
    for memory in (False, True):
        lines = []
        view = PlainView(PlannedFigures(every_steps=2, show_memory=memory), lines.append)
        for event in [*rl_run(12, eval_every=4), RunEnded(step=12, status="done", time=6000.0)]:
            # The last evaluation is worse than that of step 8.
            if isinstance(event, EvalDone) and event.step == 12:
                event = replace(event, loss=-0.1, metrics={"reward": 0.1})
            if not (isinstance(event, Saved) and event.step == 12):
                view.write(event)
        view.close()
        assert any("best: step 8, done in" in line for line in lines)
        assert [line for line in lines if len(line) > 100] == []


def test_progress_of_rollouts_is_quiet_until_one_takes_long():
    lines = [line for line in printed(rl_run(6)) if line.startswith("rollout")]
    assert lines == ["rollout    of step 1: 3 of 16 completions"]
    events = [
        *rl_run(2),
        *(
            Phase(step=2, name="rollout", done=done, total=16, time=9.5 + 20 * done)
            for done in range(10)
        ),
    ]
    lines = [line for line in printed(events) if line.startswith("rollout")]
    assert lines[1] == "rollout    of step 3: 3 of 16 completions"
    assert len(lines) == 4


def test_an_evaluation_does_not_cut_its_line_in_two():
    lines = printed(rl_run(4, eval_every=4))
    assert len([line for line in lines if line.strip().startswith("4 ")]) == 1


def test_the_picture_draws_rewards():
    run = view_for_screen()
    for event in rl_run(20, eval_every=10):
        run.add(event)
    lines = frame(run, PlannedFigures(name="rl"), Screen(100), state="running", now=100.0)
    text = "\n".join(lines)
    assert "reward of completions   o of held-out prompts" in text
    assert "training loss" not in text
    assert "reward     2.0000" in text
    assert "12 tokens, 25% not ended" in text
    assert "val reward 2.0000 at step 20" in text
    share = (ROLLOUT + REWARD) / (ROLLOUT + REWARD + UPDATE)
    assert f"{share:.0%} of step time" in text


def test_the_picture_shows_how_far_a_rollout_is():
    run = view_for_screen()
    for event in rl_run(3):
        run.add(event)
    run.add(Phase(step=3, name="rollout", done=4, total=16, time=20.0))
    head = frame(run, PlannedFigures(name="rl"), Screen(100), state="running", now=20.0)[0]
    assert "rollout 25%" in head
    assert "step 3" in head


def test_metrics_json_has_the_reward():
    figures = metrics_of(summary_of(list(rl_run(3))))
    assert figures["reward"] == pytest.approx(0.3)
    assert 0.1 < figures["smoothed_reward"] < 0.3
    assert metrics_of(summary_of([]))["reward"] is None


def test_the_status_line_has_the_reward():
    step = list(rl_run(2))[-1]
    assert "reward 0.200" in progress_text(step, 10)
    assert "loss" not in progress_text(step, 10)
