"""What a sweep does with runs that fail, that are stopped, and that its budget does not allow. Nothing trains here."""

from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.runs.flow import EndedRun
from bloomery.sweep import drive
from bloomery.sweep.points import points_of
from bloomery.sweep.scores import Metric
from bloomery.sweep.store import Score, sweep_folder

OVERRIDES = ("optimizer.learning_rate=1e-4,1e-3,1e-2,1e-1",)
SECONDS = 10.0  # of each run


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Builds a sweep whose runs end with the code or the error that `ends` has for their learning rate."""
    started = []

    def build(ends=(), **settings):
        def start(recipe, *, run_dir: Path, **_options):
            rate = recipe.recipe.optimizer.learning_rate
            started.append(rate)
            end = dict(ends).get(rate, 0)
            if isinstance(end, UserError):
                raise end
            run_dir.mkdir(parents=True)
            (run_dir / "recipe.yaml").touch()
            return EndedRun(run_dir, end)

        def judge(folder, _metric, **_options):
            return Score(7, float(folder.path.name.removeprefix("learning_rate-")), None)

        monkeypatch.setattr(drive, "start", start)
        monkeypatch.setattr(drive, "judge", judge)
        monkeypatch.setattr(drive, "seconds_of", lambda _folder: SECONDS)
        points = points_of("demo-chat-lora", OVERRIDES, search="grid", runs=None, seed=0)
        folder = sweep_folder("demo-chat-lora", points, {}, tmp_path / "sweep")
        return drive.Sweep(folder, points, Metric(), lambda *_: None, **settings)

    build.started = started
    return build


def test_a_run_that_fails_does_not_stop_the_others_and_is_tried_again(sweep):
    end = sweep([(1e-3, UserError("out of memory"))]).run()
    assert end.code == 0 and [run.value for run in end.judged] == [1e-4, 1e-2, 1e-1]
    assert [(failure.point.text, failure.reason) for failure in end.failures] == [
        ("optimizer.learning_rate=1e-3", "out of memory")
    ]
    sweep.started.clear()
    end = sweep().run()
    assert sweep.started == [1e-3] and len(end.judged) == 4 and not end.failures


def test_all_that_fail_are_a_failure(sweep):
    rates = (1e-4, 1e-3, 1e-2, 1e-1)
    assert sweep([(rate, UserError("no")) for rate in rates]).run().code == 1


def test_a_stopped_run_stops_the_sweep_with_its_code(sweep):
    end = sweep([(1e-3, 75)]).run()
    assert end.code == 75 and sweep.started == [1e-4, 1e-3]
    assert [point.text[-4:] for point in end.left_out] == ["1e-3", "1e-2", "1e-1"]


def test_a_budget_leaves_out_what_would_end_after_it_and_a_larger_one_goes_on(sweep):
    end = sweep(budget_seconds=25.0, expected_seconds=3.0).run()
    assert sweep.started == [1e-4, 1e-3]
    assert [point.text[-4:] for point in end.left_out] == ["1e-2", "1e-1"]
    end = sweep(budget_seconds=40.0).run()
    assert sweep.started == [1e-4, 1e-3, 1e-2, 1e-1] and not end.left_out


def test_a_budget_below_the_plan_of_the_first_run_starts_nothing(sweep):
    end = sweep(budget_seconds=2.0, expected_seconds=3.0).run()
    assert not sweep.started and len(end.left_out) == 4 and end.code == 1
