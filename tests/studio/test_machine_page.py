"""The page of the machine, with recorded machines and made-up sensors."""

import asyncio
from pathlib import Path

import pytest
from studio_for_tests import RecordedCommands, make_run, until, with_user

from bloomery.hardware.machine import read_machine
from bloomery.hardware.telemetry import SensorReading

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
MACHINES = Path(__file__).parents[1] / "machines"

pytestmark = pytest.mark.usefixtures("empty_folder")


def with_sensors(monkeypatch: pytest.MonkeyPatch, *readings: SensorReading) -> None:
    monkeypatch.setattr(
        "bloomery.studio.sensors.Sensors.read", lambda self, machine: list(readings)
    )


def test_findings_have_commands_to_copy_and_sensors_their_figures(monkeypatch) -> None:
    machine = read_machine(MACHINES / "rx-6800-driver-blacklisted.json")
    monkeypatch.setattr("bloomery.studio.machine_page.detect", lambda: machine)
    hot = SensorReading(
        device=0, name="<b>bold", temperature=91, critical=100, power=250.4, memory_gib=6.25,
        memory_total_gib=8, throttled="thermal",
    )  # fmt: skip
    with_sensors(monkeypatch, hot, SensorReading(device=1, shared_with=0))

    async def visit(user) -> None:
        from nicegui import ui

        await user.open("/machine")
        await user.should_see("Not ready", retries=30)
        await user.should_see("91 °C of 100 °C", retries=100)  # read after the findings
        for shown in ("6.2 of 8.0 GiB", "measured by GPU 0", "throttled: thermal", "<b>bold"):
            await user.should_see(shown)
        commands = [
            element.text
            for element in user.find(ui.label).elements
            if element.text.startswith("sudo ")
        ]
        assert commands and not any("  # " in command for command in commands)
        # What the browser answers, which has no clipboard for a page of another machine.
        button = next(
            b for b in user.find(ui.button).elements if b.props.get("icon") == "content_copy"
        )
        button.mark("copy")
        user.find("copy").trigger("click", False)
        await user.should_see("this browser refuses")
        user.find("copy").trigger("click", True)
        await user.should_see("copied")

    with_user(visit)


def test_the_gravest_finding_comes_first(monkeypatch) -> None:
    from bloomery.hardware.doctor.symptoms import Finding

    with_sensors(monkeypatch)
    found = [
        Finding(id=level, level=level, what=f"it {level}", evidence="")
        for level in ("note", "slows", "blocks", "note")
    ]
    monkeypatch.setattr("bloomery.studio.machine_page.diagnose", lambda machine: found)

    async def visit(user) -> None:
        await user.open("/machine")
        await user.should_see("it blocks", retries=100)
        titles = sorted(user.find(content="it ").elements, key=lambda element: element.id)
        shown = [title.text for title in titles if title.text.startswith("it ")]
        assert shown == ["it blocks", "it slows", "it note", "it note"]

    with_user(visit)


def test_a_bar_is_a_share_of_the_limit_of_its_sensor() -> None:
    from bloomery.studio.machine_page import gauges_of

    reading = SensorReading(
        device=0, temperature=50, critical=100, memory_gib=2.0, memory_total_gib=8.0, utilization=75,
        power=120.0, clock_mhz=2100,
    )  # fmt: skip
    gauges = {gauge.label: gauge for gauge in gauges_of(reading)}
    shares = {label: gauge.share for label, gauge in gauges.items()}
    assert shares == {
        "Temperature": 0.5,
        "Memory": 0.25,
        "Utilization": 0.75,
        "Power": None,
        "Clock": None,
    }
    assert not gauges["Temperature"].is_high
    (hot,) = gauges_of(SensorReading(device=0, temperature=95, critical=100))
    assert hot.is_high
    (unknown,) = gauges_of(SensorReading(device=0, temperature=95))
    assert (unknown.value, unknown.share, unknown.is_high) == ("95 °C", None, False)
    assert list(gauges_of(SensorReading(device=0))) == []


def test_a_machine_without_an_answering_sensor_says_so(monkeypatch) -> None:
    with_sensors(monkeypatch)

    async def visit(user) -> None:
        await user.open("/machine")
        await user.should_see("no sensor answers", retries=50)

    with_user(visit)


def test_sensors_are_read_once_for_all_pages_and_live(monkeypatch) -> None:
    from bloomery.hardware.detect import detect
    from bloomery.studio.sensors import Sensors

    machine = detect()
    sensors = Sensors()
    first = sensors.read(machine)
    assert [reading.device for reading in first][-1] == -1  # the CPU, from a process of its own
    assert sensors.read(machine) is first
    monkeypatch.setattr("bloomery.studio.sensors.UPDATE_SECONDS", 0.0)
    assert sensors.read(machine) is not first


def test_the_gpus_in_two_lines() -> None:
    from bloomery.studio.sensors import gpu_words

    def gpu(device: int, **figures: float) -> SensorReading:
        return SensorReading(device=device, name="MI300X", **figures)

    assert gpu_words([]) is None
    one = gpu(0, temperature=64.4, critical=100, memory_gib=11.26, memory_total_gib=24)
    assert gpu_words([one]) == ("MI300X", "64 °C · 11.3 of 24 GiB", False)
    hot = gpu(1, temperature=91, critical=100, memory_gib=1, memory_total_gib=24)
    assert gpu_words([one, hot]) == ("2 × MI300X", "64 to 91 °C · 12.3 of 48 GiB", True)
    other = SensorReading(device=2, name="<b>", memory_gib=2)
    assert gpu_words([one, other]) == ("2 GPUs", "64 °C · 13.3 GiB", False)


@pytest.mark.parametrize(
    "has_gpu, reading, shown",
    [
        (False, None, ""),
        (True, SensorReading(device=0, name="RTX 3090", power=9.0), ""),
        (True, SensorReading(device=-1, name="RTX 3090", temperature=50.0, memory_gib=3.0), ""),
        (True, SensorReading(device=0, name="RTX 3090", temperature=51.0), "51 °C"),
    ],
)
def test_the_rail_has_the_gpu_where_its_sensor_answers(
    monkeypatch, has_gpu, reading, shown
) -> None:
    name = "rtx-3090-old-driver" if has_gpu else "laptop-without-a-gpu"
    machine = read_machine(MACHINES / f"{name}.json")
    looks = list[int]()
    monkeypatch.setattr("bloomery.studio.sensors.detect", lambda: looks.append(1) or machine)
    monkeypatch.setattr("bloomery.studio.sensors.FIRST_SECONDS", 0.0)
    with_sensors(monkeypatch, *filter(None, [reading]))

    async def visit(user) -> None:
        from bloomery.studio.sensors import shared_sensors

        shared_sensors.cache_clear()
        await user.open("/models")
        await until(lambda: shared_sensors().is_known)
        if shown:
            await user.should_see(shown, retries=50)
            await user.should_see("RTX 3090")
        else:
            await asyncio.sleep(0.3)
            await user.should_not_see("RTX 3090")
        await user.open("/")
        await asyncio.sleep(0.3)
        assert len(looks) == 1

    with_user(visit)


def test_a_click_runs_what_changes_nothing_and_a_sentence_says_where_to_type_the_rest() -> None:
    from bloomery.hardware.doctor.symptoms import findings
    from bloomery.studio.finding_view import place_of, words_of

    assert words_of("bloomery doctor --docker") == ("doctor", "--docker")
    assert words_of('bloomery plan x --gpu "RX 6700 XT"') == ("plan", "x", "--gpu", "RX 6700 XT")
    for command in (
        "bloomery doctor --fix 1",
        "bloomery runs rm old",
        "bloomery demo; reboot",
        "bloomery doctor --explain $(x)",
        "bloomery train x",
        "nvidia-smi 2>&1 | bloomery doctor --explain -",
        "docker run --group-add 4 ...",
        "bloomery",
        "don't",
    ):
        assert words_of(command) == (), command
    steps = [step for finding in findings().values() for step in finding.fix]
    commands = [step.partition("  # ")[0] for step in steps if not step.startswith("# ")]
    assert len(commands) > 20
    for command in commands:
        assert words_of(command) or place_of(command).startswith("Type it in a terminal") or (
            command.split()[0] in ("export", "unset", "newgrp")
        )
    assert "start studio there again" in place_of("unset HSA_OVERRIDE_GFX_VERSION")
    assert "password" in place_of("sudo reboot")
    assert "Windows" in place_of("wsl.exe --update")


def test_a_fix_of_pip_is_a_button_unless_a_run_trains(monkeypatch) -> None:
    from nicegui import ui

    from bloomery.core.run_folder import RunFolder
    from bloomery.core.run_lock import hold_run_lock
    from bloomery.hardware.doctor.symptoms import Finding

    with_sensors(monkeypatch)
    pip = "pip install torch==2.13.0"
    found = [
        Finding(id="other", level="note", what="something else", evidence="", fix=("sudo reboot",)),
        Finding(id="wheel", level="blocks", what="the wrong wheel", evidence="", fix=(pip,), run=pip),
    ]
    monkeypatch.setattr("bloomery.studio.machine_page.diagnose", lambda machine: found)
    commands = RecordedCommands()
    run = make_run("busy")

    async def asked(user) -> bool:
        """Whether the question can be answered with yes, which it then is."""
        await user.open("/machine")
        await user.should_see("Fix it", retries=100)
        await user.should_see("it asks for your password")
        user.find("Fix it").click()
        await user.should_see("downloads several GB", retries=50)
        agree = max(user.find(ui.button, content="Fix it").elements, key=lambda one: one.id)
        if agree.enabled:
            (dialog,) = (one for one in user.find(ui.dialog).elements if one.value)
            dialog.submit(True)
        return agree.enabled

    async def visit(user) -> None:
        with hold_run_lock(RunFolder(run.absolute())):
            assert not await asked(user)
        assert await asked(user)
        await until(lambda: commands.started)

    with_user(visit, commands)
    assert commands.started == [("doctor", "--fix=2", "--yes")]
