"""The check before the first step of a run, from the flag to the error that all ranks raise."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from faulty_devices import (
    FAULTS,
    Sides,
    other_bits,
    plan_of,
)
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import RECIPE, Run

from bloomery.check import run_start, verdict
from bloomery.check.run_start import WrongNumbers, check_step_of_ranks
from bloomery.cli import train as train_command
from bloomery.hardware.machine import read_machine
from bloomery.monitor.events import Phase, StepChecked, Warned
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.runs import flow, lifecycle
from bloomery.train.failures import Unsound
from ranks import on_ranks, ranks

pytestmark = pytest.mark.usefixtures("own_cache")

soak = pytest.mark.soak
MACHINES = Path(__file__).parents[1] / "machines"


@pytest.mark.usefixtures("checks_the_cpu")
def test_a_run_is_checked_once(prepared, tmp_path, monkeypatch):
    plan = tiny_plan(prepared, config=tiny_config(vocab_size=300), train={"steps": 1})
    (checked,) = Run(plan, tmp_path / "first").of(StepChecked)
    assert checked.problem == "" and not checked.from_cache and checked.seconds > 0
    assert checked.torch == torch.__version__

    monkeypatch.setattr(verdict, "examine", lambda _plan: pytest.fail("checked again"))
    second = Run(plan, tmp_path / "second")
    (checked_again,) = second.of(StepChecked)
    assert checked_again.from_cache
    assert "check" not in [phase.name for phase in second.of(Phase)]


@pytest.mark.usefixtures("checks_the_cpu")
def test_the_check_changes_no_bit_of_a_run(prepared, tmp_path, monkeypatch):
    plan = tiny_plan(
        prepared, config=tiny_config(vocab_size=300, residual_dropout=0.1), train={"steps": 2}
    )
    checked = Run(plan, tmp_path / "checked")
    monkeypatch.setattr(run_start, "is_checked", lambda *_: False)
    unchecked = Run(plan, tmp_path / "unchecked")
    assert unchecked.of(StepChecked) == []
    assert checked.losses() == unchecked.losses()


@pytest.mark.usefixtures("checks_the_cpu")
def test_a_run_on_a_wrong_device_does_not_begin(prepared, tmp_path, sides):
    FAULTS["wrong rotation"][0](sides)
    plan = tiny_plan(prepared, config=tiny_config(vocab_size=300), train={"steps": 1})
    with pytest.raises(WrongNumbers, match="wrong results in rotary positions"):
        Run(plan, tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.usefixtures("checks_the_cpu")
def test_wrong_attention_has_a_fallback(tmp_path, sides):
    FAULTS["swapped heads"][0](sides)
    with pytest.raises(Unsound):
        check_step_of_ranks(plan_of(), tmp_path, lambda _event: None)


@pytest.mark.usefixtures("checks_the_cpu")
def test_a_check_that_is_switched_off_does_nothing(tmp_path, sides):
    FAULTS["wrong rotation"][0](sides)
    events = []
    check_step_of_ranks(plan_of(), tmp_path, events.append, check_step=False)
    assert events == []


@pytest.mark.usefixtures("checks_the_cpu")
def test_different_bits_warn_and_end_a_deterministic_run(tmp_path, sides):
    other_bits(sides)
    events = []
    check_step_of_ranks(plan_of(train={"precision": "bfloat16"}), tmp_path, events.append)
    (warning,) = [event for event in events if isinstance(event, Warned)]
    assert "different bits when it computes attention twice" in warning.reason
    deterministic = plan_of(train={"precision": "bfloat16", "deterministic": True})
    with pytest.raises(WrongNumbers, match="different bits"):
        check_step_of_ranks(deterministic, tmp_path, events.append)


def on_two_ranks(plan_json: str, folder: str) -> list[str]:
    """As two ranks whose second one has a wrong device: the sentences of their errors."""
    plan = RunPlan.model_validate_json(plan_json)
    mesh = replace(join(plan.train), hosts=("n1", "n2"))
    events: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/{mesh.rank}")
        patch.setattr(run_start, "is_checked", lambda *_: True)
        if mesh.rank == 1:
            FAULTS["wrong rotation"][0](Sides(patch))
        with pytest.raises(WrongNumbers) as caught:
            check_step_of_ranks(plan, Path(folder), events.append, mesh)
        # What rank 0 says counts: the others were started without the flag.
        check_step_of_ranks(plan, Path(folder), events.append, mesh, check_step=mesh.rank != 0)
    assert caught.value.fix.endswith("start the ranks on other hosts than n2")
    return [caught.value.problem, caught.value.where.partition(",")[0], caught.value.host]


@soak
def test_all_ranks_refuse_alike(tmp_path):
    plan = on_ranks(plan_of(), replicate=2)
    first, second = ranks(2).call(on_two_ranks, plan.model_dump_json(), str(tmp_path))
    assert first == second
    assert "rotary positions" in first[0] and first[1:] == ["rank 1 on n2", "n2"]


@pytest.mark.parametrize("words", [("train", "tiny.yaml"), ("resume", "run")])
def test_the_flag_reaches_the_training_process(words, monkeypatch, tmp_path):
    """From the command line to the arguments of the child."""
    asked = []
    monkeypatch.setattr(lifecycle, "run_to_end", lambda flow, _work: asked.append(flow.check_step))
    monkeypatch.setattr(train_command, "conclude", lambda _run: 0)
    if words[0] == "train":
        monkeypatch.chdir(tmp_path)
        Path("text").mkdir()
        Path("text/a.py").write_text("x = 1\n" * 1000)
        Path("tiny.yaml").write_text(RECIPE)
        result = CliRunner().invoke(train_command.command, [words[1], "--no-check"])
        assert result.exit_code == 0, result.output
        assert asked == [False]
        return
    monkeypatch.setattr(train_command, "find_run", lambda _name: tmp_path)
    monkeypatch.setattr(
        lifecycle, "resume", lambda _folder, **settings: asked.append(settings["check_step"])
    )
    monkeypatch.setattr(train_command, "conclude", lambda _run: 0)
    CliRunner().invoke(train_command.resume_command, [words[1], "--no-check"])
    assert asked == [False]


def test_a_flow_without_the_check_says_so_to_its_child(monkeypatch):
    arguments = []

    class Flow:
        check_step = False
        stop_at = None
        folder = SimpleNamespace(fallback=Path("/nonexistent/fallback"))

        def stage(self, _stage, given, _environment, _plan):
            arguments.extend(given)
            return SimpleNamespace(code=0)

    monkeypatch.setattr(flow, "training_environment", lambda *_: {})
    machine = read_machine(MACHINES / "laptop-without-a-gpu.json")
    flow.train_stage(Flow(), plan_of(), machine, resumed=True)
    assert arguments == ["--resumed", "--no-check"]


@pytest.mark.cpu_only("a GPU is compared with it")
def test_a_cpu_is_not_compared_with_itself(tmp_path):
    events = []
    check_step_of_ranks(plan_of(), tmp_path, events.append)
    assert events == []
