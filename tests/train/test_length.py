"""Wall-time runs on a clock of the test's own: they end in time, their rates never jump, and a killed one repeats."""

import itertools
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from plans_for_tests import tiny_plan

from bloomery.cli.demo import Forecast, Kill, cores_used_by_others, forecast_of, time_text
from bloomery.core.units import Duration
from bloomery.plan.lengths import MEASURED_STEPS
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Wsd
from bloomery.train.length import Costs, Timer, current, due, fitted, measured, with_next_block
from bloomery.train.optim.schedules import fraction_done, planned_lr_scale

# evaluates after each half, saves every 1,000 steps
PLAN = tiny_plan(train={"steps": None, "seconds": 100.0})


@dataclass
class Machine:
    """What work takes, by the seconds that have passed. `first`: what the first step compiles."""

    step: object = 0.1
    evaluation: float = 0.0
    sampling: float = 0.0
    save: float = 0.0
    first: float = 0.0
    noise: float = 0.0
    startup: float = 0.0
    now: float = 0.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.now

    def works(self, seconds) -> None:
        self.now += seconds(self.now) if callable(seconds) else seconds


@dataclass
class Simulated:
    """The loop of a run without a model: what it decided and when it ended."""

    plan: RunPlan
    machine: Machine
    start: int = 0
    before: float = 0.0
    kill_at: int | None = None
    shares: dict[int, float] = field(default_factory=dict)  # of the rate, by step
    saved: dict[int, float] = field(default_factory=dict)  # seconds, by step
    looked: list[int] = field(default_factory=list)
    estimates: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.timer = Timer(self.machine.now, self.machine.clock, self.before)
        self.machine.works(self.machine.startup)
        self.timer.start()
        step = self.start
        self._keep_time(step)
        while self.plan.train.steps is None or step < self.plan.train.steps:
            if step == self.kill_at:
                return
            self.shares[step] = planned_lr_scale(step, self.plan)
            noise = 1 + self.machine.noise * self.machine.dice.uniform(-1, 1)
            self.machine.works(self.machine.first if step == self.start else 0.0)
            begun = self.machine.now
            self.machine.works(self.machine.step)
            self.machine.now = begun + (self.machine.now - begun) * noise
            step += 1
            self.timer.stepped()
            self._between(step)
            self._keep_time(step)
        self._look(step)
        self._save(step)
        self.steps = step

    def _between(self, step: int) -> None:
        if due("evaluation", self.plan, step=step):
            self._look(step)
        if due("checkpoint", self.plan, step=step):
            self._save(step)

    def _look(self, step: int) -> None:
        if self.looked[-1:] != [step]:
            self.looked.append(step)
            with self.timer.aside() as seconds:
                self.machine.works(self.machine.evaluation)
                self.timer.note_evaluation(seconds(), self.plan)
            with self.timer.aside() as seconds:
                self.machine.works(self.machine.sampling)
                self.timer.note_samples(seconds())

    def _save(self, step: int) -> None:
        if step not in self.saved:
            self.saved[step] = self.timer.elapsed
            with self.timer.aside() as seconds:
                self.machine.works(self.machine.save)
                self.timer.note_save(seconds())

    def _keep_time(self, step: int) -> None:
        known = current(self.plan, step=step)
        if known is None:
            if self.timer.costs is None and measured(self.plan, self.timer, step=step) is not None:
                evaluation, sampling = self.machine.evaluation, self.machine.sampling
                evaluation = evaluation(self.machine.now) if callable(evaluation) else evaluation
                self.timer.costs = Costs(
                    0.0, evaluation / 100, 1.3 * sampling, 0.5 * self.machine.save, sequences=100
                )
            known = with_next_block(self.plan, self.timer, step=step)
        self.plan = known
        if known.train.steps is not None:
            self.estimates.append(known.train.steps)

    def steepest(self) -> float:
        shares = [self.shares[step] for step in sorted(self.shares)]
        return max(abs(b - a) for a, b in itertools.pairwise(shares))


def timed(seconds=100.0, *, min_steps=None, optimizer=None, **lengths) -> RunPlan:
    train = {"steps": None, "seconds": seconds, "min_steps": min_steps}
    plan = tiny_plan(train=train, optimizer=optimizer or {}, checkpoint={"every_steps": 1000})
    return plan.model_copy(update={"lengths": plan.lengths.model_copy(update=lengths)})


BUSY = {
    "alone": Machine(0.1),
    "noisy": Machine(0.1, noise=0.5),
    "another program comes": Machine(lambda now: 0.1 if now < 30 else 0.3),
    "another program goes": Machine(lambda now: 0.4 if now < 50 else 0.1),
    "in and out": Machine(lambda now: 0.3 if now % 20 < 10 else 0.1),
    "busy at first": Machine(lambda now: 1.0 if now < 8 else 0.1),
    "compiles": Machine(0.1, first=20.0),
    "starts slowly": Machine(0.1, startup=10.0),
    "evaluates long": Machine(0.1, evaluation=12.0, sampling=3.0, save=2.0),
    "evaluates longer under load": Machine(0.1, evaluation=lambda now: 4.0 if now < 60 else 9.0),
    "very slow": Machine(4.0),
    "very fast": Machine(0.01),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("warmup", "schedule"),
    [
        ("10 percent", "linear"),
        ("1 percent", "cosine"),
        ("30 steps", Wsd()),
        ("0 steps", "cosine"),
        ("5 seconds", "constant"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", BUSY)
def test_it_ends_in_time_and_no_rate_jumps(name, warmup, schedule):
    machine = BUSY[name]
    machine.now, machine.dice = 0.0, random.Random(0)
    amount, unit = warmup.split()
    plan = timed(
        optimizer={"schedule": schedule, "warmup_steps": 30 if warmup == "30 steps" else 0},
        warmup=Duration(float(amount), unit),
        decay=Duration(20, "percent") if isinstance(schedule, Wsd) else None,
        checkpoint=Duration(25, "percent"),
    )
    evaluation = machine.evaluation if not callable(machine.evaluation) else 9.0
    run = Simulated(plan, machine)
    slowest = 4.0 if name == "very slow" else 0.0
    assert machine.now == pytest.approx(100, abs=5 + slowest / 2 + (3 if evaluation == 9.0 else 0))
    few = name == "very slow"
    assert run.shares[0] <= (1.0 if warmup == "0 steps" else 0.1), (
        "the warmup begins at its beginning"
    )
    assert run.steepest() <= (0.25 if few else 0.1 + 1e-9)
    assert all(0 <= fraction <= 1 for fraction in run.shares.values())
    if schedule in ("cosine", "linear") and not (few and warmup == "30 steps"):  # which has 25
        last = max(run.shares)
        assert run.shares[last] < (0.1 if few else 0.02), "it ends where the schedule ends"
        assert max(run.shares.values()) > (0.7 if few else 0.9)
    halves = [step for step in run.looked if step < run.steps]
    assert len(halves) == 1
    assert fraction_done(halves[0], run.plan.train.blocks) == pytest.approx(
        0.5, abs=0.11 if few else 0.02
    )


def test_a_length_in_steps_and_one_in_time_that_holds_as_many_have_the_same_schedule():
    run = Simulated(
        timed(optimizer={"schedule": "cosine"}, warmup=Duration(10, "percent")), Machine(0.1)
    )
    plan = run.plan
    assert run.steps == pytest.approx(1000, abs=2)
    fixed = tiny_plan(
        train={"steps": run.steps},
        optimizer={"schedule": "cosine", "warmup_steps": run.steps // 10},
    )
    # Before a step is measured, the estimate is 1,000 steps too: the plans agree from the first step on.
    for step in range(run.steps):
        assert planned_lr_scale(step, plan) == pytest.approx(
            planned_lr_scale(step, fixed), abs=0.01
        )


@pytest.mark.parametrize("seed", range(12))
def test_a_killed_run_takes_the_same_rates_again(seed):
    """However busy the machine is the second time, and wherever the kill fell."""
    dice = random.Random(seed)
    plan = timed(
        warmup=Duration(5, "percent"), checkpoint=Duration(dice.choice([1.0, 7.0, 20.0]), "percent")
    )
    kill = dice.randint(5, 900)
    first = Simulated(plan, Machine(0.1, noise=0.3), kill_at=kill)
    saves = [step for step in first.saved if step <= kill]
    step = dice.choice([0, *saves[-3:]])
    slow = Machine(
        dice.choice([0.03, 0.1, 0.5]), noise=0.3, first=3.0, dice=random.Random(seed + 1)
    )
    again = Simulated(first.plan, slow, start=step, before=first.saved.get(step, 0.0))
    repeated = list(range(step, kill))
    assert [again.shares[at] for at in repeated] == [first.shares[at] for at in repeated]
    assert first.saved.get(step, 0.0) + slow.now == pytest.approx(
        100, abs=5 + slow.step * (kill - step)
    )
    shares = first.shares | again.shares
    assert max(abs(shares[at + 1] - shares[at]) for at in range(len(shares) - 1)) < 0.101


def test_what_a_kill_lost_is_not_counted_twice():
    first = Simulated(timed(checkpoint=Duration(20, "percent")), Machine(0.1), kill_at=700)
    step = max(first.saved)
    again = Machine(0.1, first=2.0)
    Simulated(first.plan, again, start=step, before=first.saved[step])
    assert first.saved[step] + again.now == pytest.approx(100, abs=2)


def test_every_block_is_fixed_before_its_first_step():
    run = Simulated(timed(), Machine(0.1, noise=0.4))
    blocks = run.plan.train.blocks
    assert [block.until for block in blocks[:-1]] == [block.step for block in blocks[1:]]
    assert 30 < len(blocks) < 90
    assert all(b.fraction >= a.fraction for a, b in itertools.pairwise(blocks))


@pytest.mark.parametrize("step", [0.1, 0.5, 2.0])
def test_a_least_number_of_steps_takes_longer_where_it_must(step):
    machine = Machine(step)
    run = Simulated(timed(60.0, min_steps=200), machine)
    assert run.steps == max(200, round(60 / step)) or run.steps == pytest.approx(60 / step, abs=2)
    assert machine.now == pytest.approx(max(60, 200 * step), rel=0.03)
    assert run.plan.seconds.value == pytest.approx(machine.now, rel=0.03), (
        "planned once the steps were measured"
    )
    assert run.shares[run.steps - 1] < 0.02


def test_a_longer_time_goes_on_where_the_run_ended():
    """`resume train.max_time=...` of a finished run."""
    short = Simulated(timed(50.0), Machine(0.1))
    train = short.plan.train.model_copy(update={"seconds": 100.0, "steps": None, "blocks": ()})
    machine = Machine(0.1)
    longer = Simulated(
        short.plan.model_copy(update={"train": train}),
        machine,
        start=short.steps,
        before=short.saved[short.steps],
    )
    assert machine.now == pytest.approx(50, abs=2)
    assert longer.steps == pytest.approx(1000, abs=25)
    assert longer.shares[short.steps] == pytest.approx(0.5, abs=0.05)
    assert longer.steepest() < 0.01


@pytest.mark.parametrize("evaluation", [0.0, 2.0, 10.0])
def test_the_longest_run_that_ends_in_time(evaluation):
    costs = Costs(step=0.1, sequence=evaluation / 10, samples=0.0, save=1.0, sequences=10)
    plan = fitted(PLAN, costs, done=10, seconds=100.0)
    assert (plan.train.steps - 10) * 0.1 + 2 * evaluation + 1.0 == pytest.approx(100.0, abs=0.051)


def test_what_was_behind_is_not_counted_again():
    costs = Costs(step=1.0, sequence=0.0, samples=0.0, save=5.0)
    plan = PLAN.model_copy(update={"train": PLAN.train.model_copy(update={"steps": 2500})})
    plan = plan.model_copy(
        update={"checkpoint": plan.checkpoint.model_copy(update={"every_steps": 1000})}
    )
    assert costs.until_the_end(plan, done=1200) == 1300 + 2 * 5


def test_a_length_already_over_takes_no_step_more():
    costs = Costs(step=1.0, sequence=9.0, samples=9.0, save=9.0, sequences=1)
    assert fitted(PLAN, costs, done=10, seconds=-3.0).train.steps == 10


def test_shares_of_the_run_are_resolved():
    plan = fitted(
        PLAN, Costs(step=0.1, sequence=0.0, samples=0.0, save=0.0), done=10, seconds=100.0
    )
    assert plan.train.steps == 1010
    assert plan.eval.every_steps == 505
    assert plan.total_tokens == 1010 * PLAN.train.tokens_per_step


def test_the_typical_step_ignores_the_first_two_and_outliers():
    machine = Machine()
    timer = Timer(0.0, machine.clock)
    timer.start()
    for seconds in [9.0, 9.0, 1.0, 1.0, 1.1, 1.0, 7.0, 1.1, 1.1, 1.0]:
        machine.works(seconds)
        timer.stepped()
    assert timer.steps == MEASURED_STEPS
    assert timer.step_seconds(10.0) == pytest.approx(1.05)


def test_steps_are_timed_without_what_lies_between_them():
    machine = Machine()
    timer = Timer(0.0, machine.clock)
    timer.start()
    for _ in range(30):
        machine.works(1.0)
        timer.stepped()
        with timer.aside() as seconds:
            machine.works(5.0)
            assert seconds() == pytest.approx(5.0)
    assert timer.step_seconds(10.0) == pytest.approx(1.0)
    assert timer.elapsed == pytest.approx(180.0)


def demo_plan(*, steps: int = 100) -> RunPlan:
    return tiny_plan(
        train={"steps": steps},
        checkpoint={"every_steps": steps // 5},
        eval={"every_steps": steps // 5, "sequences": 4},
    )


def test_the_demo_is_planned_from_its_timed_steps_to_its_last_file():
    plan = demo_plan()
    validation = 10 * plan.train.tokens_per_step
    forecast = forecast_of(plan, elapsed=20.0, done=12, step=0.5, start=4.0, validation=validation)
    # as steps without backward
    evaluated = 5 * 4 * plan.data.sequence_length / plan.train.tokens_per_step + 2 * 10
    assert forecast.total == pytest.approx(
        20.0 + (100 - 12 + 10 + evaluated / 3) * 0.5 + (1 + 1.5) * 4.0
    )


def test_the_demo_names_slower_steps_than_those_it_timed():
    forecast = Forecast(step=0.5, start=4.0, total=100.0)
    kill = Kill(step=70, saved=60, before=dict.fromkeys(range(61, 71)), gap_seconds=6.2)
    quiet = time_text(forecast, 103.0, kill, 0.52)
    assert quiet == "time 100 s, took 103 s (+3%), resume 6.2 s"
    busy = time_text(forecast, 160.0, kill, 0.9)
    assert busy.startswith(
        "time 100 s, took 160 s (+60%), resume 6.2 s; steps took 0.90 s, not 0.50"
    )


def test_a_busy_core_is_seen_before_the_demo_begins():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        busy = cores_used_by_others(0.5)
    finally:
        spinning.kill()
        spinning.wait()
    assert busy > 0.2  # of a core: this machine may have more programs than cores
