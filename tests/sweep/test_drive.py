"""What a sweep does with runs that fail, that are stopped, that its budget does not allow, and that train at once.

Nothing trains here. No GPU has confirmed what is said of several: their places are names.
"""

import os
import signal
import threading
from pathlib import Path

import pytest

from bloomery.cli.sweep import _slots
from bloomery.core.errors import UserError
from bloomery.core.signals import StopRequests
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import Phase
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
    begun = sweep([(1e-3, UserError("out of memory"))])
    end, folder = begun.run(), begun.folder
    assert end.code == 0 and [run.value for run in end.judged] == [1e-4, 1e-2, 1e-1]
    assert [(failure.point.text, failure.reason) for failure in end.failures] == [
        ("optimizer.learning_rate=1e-3", "out of memory")
    ]
    assert folder.read_failure("learning_rate-1e-3") == "out of memory"
    assert folder.read_failure("learning_rate-1e-2") == ""
    sweep.started.clear()
    end = sweep().run()
    assert sweep.started == [1e-3] and len(end.judged) == 4 and not end.failures
    assert folder.read_failure("learning_rate-1e-3") == ""


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


PATIENCE_SECONDS = 60.0


@pytest.fixture
def parallel_sweep(tmp_path, monkeypatch):
    """Builds a sweep on two devices; `train` is what a run does with its learning rate, its device and its watcher."""

    def build(train, rates="1e-4,1e-3,1e-2,1e-1", **settings):
        def start(recipe, *, run_dir: Path, devices, watch, stop_at, **_options):
            run_dir.mkdir(parents=True)
            (run_dir / "recipe.yaml").touch()
            return EndedRun(run_dir, train(recipe.recipe.optimizer.learning_rate, devices, watch))

        def judge(folder, _metric, **_options):
            return Score(7, float(folder.path.name.removeprefix("learning_rate-")), None)

        monkeypatch.setattr(drive, "start", start)
        monkeypatch.setattr(drive, "judge", judge)
        monkeypatch.setattr(drive, "seconds_of", lambda _folder: SECONDS)
        monkeypatch.setattr(drive, "prepared_folder", lambda *_: tmp_path)
        monkeypatch.setattr(drive, "finished_manifest", lambda *_: "it is there")
        words = (f"optimizer.learning_rate={rates}",)
        points = points_of("demo-chat-lora", words, search="grid", runs=None, seed=0)
        folder = sweep_folder("demo-chat-lora", points, {}, tmp_path / "sweep")
        return drive.Sweep(folder, points, Metric(), lambda *_: None, slots=("0", "1"), **settings)

    return build


def test_two_devices_train_two_runs_at_once_and_one_each(parallel_sweep):
    """The first two wait for each other: one after another they would time out."""
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    lock = threading.Lock()
    busy: set[str] = set()
    places: dict[float, str] = {}

    def train(rate, device, _watch):
        with lock:
            assert device not in busy, "two runs on one device"
            busy.add(device)
            places[rate] = device
        if rate in (1e-4, 1e-3):
            together.wait()
        if rate == 1e-4:
            finished.wait(PATIENCE_SECONDS)  # the first run ends last
        if rate == 1e-1:
            finished.set()
        with lock:
            busy.remove(device)
        return 0

    finished = threading.Event()
    end = parallel_sweep(train).run()
    assert end.code == 0 and [run.value for run in end.judged] == [1e-4, 1e-3, 1e-2, 1e-1]
    assert set(places.values()) == {"0", "1"}
    # One device kept the run that ended last, the other had the three others.
    assert [places[rate] == places[1e-4] for rate in (1e-3, 1e-2, 1e-1)] == [False] * 3


def test_a_stop_reaches_every_run_and_a_failure_stops_none(parallel_sweep):
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    asked = []

    def train(rate, _device, watch):
        if rate == 1e-4:
            raise UserError("out of memory")
        requests = StopRequests()
        told = threading.Event()
        requests.listener = told.set
        watch(Phase(name="training", done=0, total=1), requests)
        if both.wait() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(PATIENCE_SECONDS)
        asked.append(rate)
        return 75

    end = parallel_sweep(train).run()
    assert end.code == 75 and sorted(asked) == [1e-3, 1e-2]
    assert [failure.reason for failure in end.failures] == ["out of memory"]
    assert [point.settings["optimizer.learning_rate"] for point in end.left_out] == [
        "1e-3",
        "1e-2",
        "1e-1",
    ]


def test_a_budget_is_of_the_clock_where_two_train_at_once(parallel_sweep):
    """Four runs of 10 s are 20 s on two devices."""
    assert len(parallel_sweep(lambda *_: 0, budget_seconds=20.0).run().judged) == 4


def asynchronous_order(sweep, values):
    """The tasks in their order where one is done at a time: run and rung. `values`: of the runs, at any rung."""
    outcome = drive.Outcome()
    next_task = sweep._next_of_asha(outcome, lambda _point, rung: (40, 120, None)[rung], 3)
    tasks = []
    while (task := next_task()) is not None:
        index = sweep.points.index(task.point)
        tasks.append((index, task.step))
        score = Score(task.step or 360, values[index], None)
        outcome.note(task, score)
        sweep.folder.write_score(
            sweep.folder.score_file(task.point.name, "eval.loss", task.step), score
        )
    return tasks


def test_asynchronous_halving_by_hand(parallel_sweep):
    """Of nine runs with the losses 5 4 6 3 9 1 8 7 2, by `get_job` of Li et al. 2018 with a reduction by three.

    Of three runs the best, 1, is promoted; of four the best one is 3, which is not yet: it is. Of six the best two are
    5 and 3: 5 is promoted. Then three runs are at step 120, of which 5 is the best: it goes to the end. Of nine the
    best three are 5, 8 and 3: 8 is promoted. At step 120 four runs have one place in the highest rung, which 5 has.
    """
    rates = ",".join(f"{number}e-4" for number in range(1, 10))
    sweep = parallel_sweep(lambda *_: 0, rates)
    values = [5.0, 4.0, 6.0, 3.0, 9.0, 1.0, 8.0, 7.0, 2.0]
    begun = [(number, 40) for number in range(9)]
    assert asynchronous_order(sweep, values) == [
        *begun[:3],
        (1, 120),
        (3, 40),
        (3, 120),
        (4, 40),
        (5, 40),
        (5, 120),
        (5, None),
        *begun[6:],
        (8, 120),
    ]
    assert asynchronous_order(sweep, values) == [], "everything is known from the stored scores"


def test_asynchronous_halving_on_two_devices_trains_the_best_run_to_its_end(
    parallel_sweep, monkeypatch
):
    """Whichever runs are faster: the best of all is the best of every rung, so that its promotion cannot fail."""
    monkeypatch.setattr(drive, "saved_steps", lambda _folder: [40, 120])
    rates = ",".join(f"{number}e-4" for number in (5, 2, 7, 1, 9, 3, 8, 4, 6))
    sweep = parallel_sweep(lambda *_: 0, rates)
    end = sweep.halve({point.name: (40, 120, 360) for point in sweep.points})
    assert end.code == 0 and not end.failures and not end.left_out
    assert min(run.value for run in end.judged) == 1e-4
    names = [run.name for run in (*end.judged, *end.dropped)]
    assert sorted(names) == sorted(point.name for point in sweep.points)


GPUS = Path(__file__).parents[1] / "machines"


def test_gpus_that_are_alike_train_a_run_each_where_it_fits_one(monkeypatch):
    """Decided on a recorded machine; no hardware with several GPUs has run it."""
    machine = read_machine(GPUS / "mi300x-node.json")
    monkeypatch.setattr("bloomery.hardware.detect.detect", lambda: machine)
    monkeypatch.setattr("bloomery.runs.lifecycle.detect", lambda: machine)
    rates = "optimizer.learning_rate=1e-4,1e-3"

    def slots(*more, devices=None, per_device=None, recipe="qwen2.5-0.5b-pretrain-tiny"):
        points = points_of(recipe, (rates, *more), search="grid", runs=None, seed=0)
        places, reports = _slots(points, devices, per_device)
        return places, reports[0].plan.train.ranks

    count = len(machine.accelerators)
    assert slots() == ([str(number) for number in range(count)], 1)
    assert slots(devices="1,3") == (["1", "3"], 1)
    assert slots(per_device=False) == ([None], count)
    assert slots("parallel.replicate=2", devices="0,1") == (["0,1"], 2)
    assert slots(devices="0") == (["0"], 1)
    assert slots(devices="cpu,cpu")[0] == ["cpu,cpu"]
    assert slots(devices="cpu,cpu", per_device=True) == (["cpu", "cpu"], 1)
    for words, options in (((), {"devices": "0"}), (("parallel.replicate=2",), {"devices": "0,1"})):
        with pytest.raises(UserError) as caught:
            slots(*words, per_device=True, **options)
        assert caught.value.code == 2 and "--per-device" in caught.value.fix
