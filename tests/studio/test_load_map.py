"""The page of a mixture's run shows the newest load of its experts. Oracle: the events."""

import pytest
from studio_for_tests import make_run, with_user

from bloomery.monitor.events import EventLog, ExpertLoad
from bloomery.report.charts import HEAT
from runs_for_tests import made_up_run, step_done

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")

pytestmark = pytest.mark.usefixtures("empty_folder")
RATIOS = {"1": [0.0, 2.0, 1.0, 1.0], "2": [1.0, 0.5, 0.5, 2.0]}


def test_the_newest_load_is_drawn_and_follows_the_run() -> None:
    events = [*list(made_up_run())[:-1], ExpertLoad(step=40, ratios=RATIOS)]
    folder = make_run("demo", events=events)

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("step 40, relative to an even one", retries=50)
        (chart,) = maps(user)
        cells = {(layer, expert): ratio for expert, _, ratio, layer in data_of(chart)}
        assert cells == {
            (int(layer), expert): ratio
            for layer, ratios in RATIOS.items()
            for expert, ratio in enumerate(ratios)
        }
        with EventLog(folder / "events.jsonl") as emit:
            emit(step_done(41))
            emit(ExpertLoad(step=41, ratios={"1": [1.0] * 4, "2": [1.0] * 4}))
        await user.should_see("step 41, relative to an even one", retries=50)
        assert {cell[2] for cell in data_of(chart)} == {1.0}

    with_user(visit)


def test_a_dense_run_has_no_map() -> None:
    make_run("demo", events=list(made_up_run()))

    async def visit(user) -> None:
        await user.open("/run/demo")
        await user.should_see("Gradient norm", retries=50)
        assert maps(user) == []

    with_user(visit)


def test_every_color_of_the_report_has_one_of_studio() -> None:
    from bloomery.studio.charts import HEAT_COLORS

    assert HEAT_COLORS.keys() == {name for _, name, _ in HEAT}


def maps(user) -> list:
    from nicegui import ui

    charts = user.find(kind=ui.echart).elements
    return [chart for chart in charts if chart.options["series"][0]["type"] == "heatmap"]


def data_of(chart) -> list[list[float]]:
    return chart.options["series"][0]["data"]
