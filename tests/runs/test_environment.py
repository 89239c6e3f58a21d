"""What training's process is given to know before torch is imported: never over the user's own settings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from plans_of_runs import plan_of

from bloomery.bench import measuring
from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.hardware.doctor.diagnose import diagnose
from bloomery.hardware.machine import MASKS, Machine, read_machine
from bloomery.hardware.profile import build_profile
from bloomery.recipe.load import load_recipe
from bloomery.runs.devices import chosen_devices, device_count, narrowed, same_devices
from bloomery.runs.flow import training_environment

MACHINES = Path(__file__).parents[1] / "machines"
NAME = "PYTORCH_ALLOC_CONF"


@pytest.fixture
def rx_6700_xt(monkeypatch) -> Machine:
    for name in (
        *MASKS,
        NAME,
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_NUM_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)
    return read_machine(MACHINES / "rx-6700-xt.json")


def given(machine: Machine, tmp_path: Path, **train) -> tuple[dict[str, str], list[str]]:
    """What is set, and what was warned of."""
    told: list[str] = []
    book = SimpleNamespace(emit=lambda event: told.append(event.reason), line=lambda text: None)
    flow = SimpleNamespace(folder=RunFolder(tmp_path), hub=book)
    return training_environment(flow, plan_of(device="cuda", **train), machine), told  # type: ignore[arg-type]  # what it uses of a flow


def with_setting(machine: Machine, monkeypatch, name: str, value: str) -> Machine:
    monkeypatch.setenv(name, value)
    environment = dict(machine.software.environment) | {name: value}
    return machine.model_copy(
        update={"software": machine.software.model_copy(update={"environment": environment})}
    )


def test_the_profile_is_set_where_the_user_has_said_nothing(
    rx_6700_xt: Machine, tmp_path: Path
) -> None:
    environment, told = given(rx_6700_xt, tmp_path, threads=3)
    assert "garbage_collection_threshold" in environment[NAME]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert told == []


def test_the_users_own_setting_stays_and_is_warned_of(
    rx_6700_xt: Machine, tmp_path: Path, monkeypatch
) -> None:
    machine = with_setting(rx_6700_xt, monkeypatch, NAME, "expandable_segments:True")
    environment, told = given(machine, tmp_path)
    assert environment[NAME] == "expandable_segments:True"
    (said,) = told
    assert said.startswith(f"{NAME}=expandable_segments:True is set; Bloomery would set ")


def two_unlike(machine: Machine) -> Machine:
    """A smaller card before the RX 6700 XT."""
    (card,) = machine.accelerators
    small = card.model_copy(
        update={"name": "AMD Radeon RX 6600", "arch": "gfx1032", "memory_bytes": 8 * 2**30}
    )
    return machine.model_copy(
        update={"accelerators": (small, card.model_copy(update={"index": 1}))}
    )


def test_the_card_of_the_plan_is_the_one_that_training_sees(
    rx_6700_xt: Machine, tmp_path: Path
) -> None:
    machine = two_unlike(rx_6700_xt)
    assert build_profile(machine).accelerator == machine.accelerators[1]
    assert given(machine, tmp_path)[0]["HIP_VISIBLE_DEVICES"] == "1"
    for index in "01":
        asked = narrowed(machine, index)
        assert given(asked, tmp_path)[0]["HIP_VISIBLE_DEVICES"] == index
        # `resume`
        assert given(same_devices(machine, asked), tmp_path)[0]["HIP_VISIBLE_DEVICES"] == index


@pytest.mark.parametrize("num_discrete", [1, 2])
def test_an_integrated_gpu_stays_hidden_after_a_resume_and_trains_where_it_is_named(
    rx_6700_xt: Machine, tmp_path: Path, num_discrete: int
) -> None:
    (card,) = rx_6700_xt.accelerators
    integrated = card.model_copy(
        update={"name": "AMD Radeon Graphics", "arch": "gfx1036", "integrated": True}
    )
    cards = [card.model_copy(update={"index": index}) for index in range(1, 1 + num_discrete)]
    machine = rx_6700_xt.model_copy(update={"accelerators": (integrated, *cards)})
    mask = ",".join(str(card.index) for card in cards)

    def trains_on(narrow: Machine) -> tuple[str, bool]:
        says_hidden = "-d 0 trains on it" in build_profile(narrow).device.reason
        return given(narrow, tmp_path)[0]["HIP_VISIBLE_DEVICES"], says_hidden

    recipe = load_recipe("demo").recipe
    fresh, count = device_count(recipe, *chosen_devices(machine, None), user_named=False)
    assert count == num_discrete
    assert trains_on(fresh) == (mask, True)
    assert trains_on(same_devices(machine, fresh)) == (mask, True)
    assert [found.id for found in diagnose(fresh)].count("integrated-gpu-hidden") == 1  # its file

    # Named: on the discrete GPU nothing is hidden by default, on the integrated one it trains.
    assert trains_on(narrowed(machine, "1")) == ("1", False)
    named = narrowed(machine, "0")
    assert build_profile(named).accelerator.integrated
    assert trains_on(named) == ("0", False)
    assert trains_on(same_devices(machine, named)) == ("0", False)

    # Switched off in the BIOS since: nothing is hidden.
    without = machine.model_copy(update={"accelerators": tuple(cards)})
    assert same_devices(without, fresh).hidden_integrated == ()


def test_a_device_that_the_users_mask_keeps_from_training_is_refused(
    rx_6700_xt: Machine, monkeypatch
) -> None:
    machine = with_setting(two_unlike(rx_6700_xt), monkeypatch, "HIP_VISIBLE_DEVICES", "0,1")
    assert narrowed(machine, "0").accelerators[0].index == 0
    with pytest.raises(UserError, match="cannot use device 1") as refusal:
        narrowed(machine, "1")
    assert "unset HIP_VISIBLE_DEVICES" in refusal.value.fix


@pytest.mark.parametrize("deterministic", [False, True])
def test_bench_measures_in_the_environment_in_which_training_runs(
    rx_6700_xt: Machine, tmp_path: Path, monkeypatch, deterministic: bool
) -> None:
    machine, seen = two_unlike(rx_6700_xt), []

    class Child:
        code = 1

        def __init__(self, module: str, job: object, *, environment: dict[str, str]) -> None:
            seen.append(environment)

        def __enter__(self) -> "Child":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def next(self, seconds: float) -> str:
            return "ended"

        def ending(self) -> str:
            return ""

    monkeypatch.setattr(measuring, "Child", Child)
    plan = plan_of(device="cuda", deterministic=deterministic, threads=5)
    plan = plan.model_copy(update={"environment": build_profile(machine).environment.value})
    measuring.measure_plan(plan, (), seconds=1.0, on_phase=lambda phase: None)
    assert seen == [given(machine, tmp_path, deterministic=deterministic, threads=5)[0]]
    assert seen[0]["OMP_NUM_THREADS"] == "5"
    assert ("CUBLAS_WORKSPACE_CONFIG" in seen[0]) == deterministic


def test_a_mask_of_the_users_own_is_not_masked_again(
    rx_6700_xt: Machine, tmp_path: Path, monkeypatch
) -> None:
    machine = with_setting(rx_6700_xt, monkeypatch, "ROCR_VISIBLE_DEVICES", "1")
    assert "HIP_VISIBLE_DEVICES" not in given(machine, tmp_path)[0]


def test_what_determinism_needs_is_said_when_it_is_set_otherwise(
    rx_6700_xt: Machine, tmp_path: Path, monkeypatch
) -> None:
    environment, told = given(rx_6700_xt, tmp_path, deterministic=True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert told == []
    machine = with_setting(rx_6700_xt, monkeypatch, "CUBLAS_WORKSPACE_CONFIG", ":0:0")
    environment, told = given(machine, tmp_path, deterministic=True)
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    assert any(
        "CUBLAS_WORKSPACE_CONFIG=:0:0" in said and "train.deterministic" in said for said in told
    )
