"""What training's process is given to know before torch is imported: never over the user's own settings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from plans_of_runs import plan_of

from bloomery.hardware.machine import Machine, read_machine
from bloomery.launch.local import MASKS, _environment
from bloomery.launch.run_folder import RunFolder

MACHINES = Path(__file__).parents[1] / "machines"
NAME = "PYTORCH_ALLOC_CONF"


@pytest.fixture
def rx_6700_xt(monkeypatch) -> Machine:
    for name in (*MASKS, NAME, "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return read_machine(MACHINES / "rx-6700-xt.json")


def given(machine: Machine, tmp_path: Path, **train) -> tuple[dict[str, str], list[str]]:
    """What is set, and what was warned of."""
    told: list[str] = []
    flow = SimpleNamespace(
        folder=RunFolder(tmp_path), book=SimpleNamespace(emit=lambda event: told.append(event.because))
    )
    return _environment(flow, plan_of(device="cuda", **train), machine), told  # type: ignore[arg-type]


def with_setting(machine: Machine, monkeypatch, name: str, value: str) -> Machine:
    monkeypatch.setenv(name, value)
    environment = dict(machine.software.environment) | {name: value}
    return machine.model_copy(update={"software": machine.software.model_copy(update={"environment": environment})})


def test_the_profile_is_set_where_the_user_has_said_nothing(rx_6700_xt: Machine, tmp_path: Path) -> None:
    environment, told = given(rx_6700_xt, tmp_path, threads=3)
    assert "garbage_collection_threshold" in environment[NAME]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HIP_VISIBLE_DEVICES"] == "0"
    assert told == []


def test_the_users_own_setting_stays_and_is_warned_of(rx_6700_xt: Machine, tmp_path: Path, monkeypatch) -> None:
    machine = with_setting(rx_6700_xt, monkeypatch, NAME, "expandable_segments:True")
    environment, told = given(machine, tmp_path)
    assert NAME not in environment
    (said,) = told
    assert said.startswith(f"your setting {NAME}=expandable_segments:True stays; this machine would get ")


def test_a_mask_of_the_users_own_is_not_masked_again(rx_6700_xt: Machine, tmp_path: Path, monkeypatch) -> None:
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
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment
    assert any("train.deterministic needs it" in said for said in told)
