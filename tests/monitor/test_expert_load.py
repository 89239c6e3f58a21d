"""The load of experts in events: what readers make of it, also of a file that somebody changed."""

import pytest

from bloomery.monitor.events import EventLog, ExpertLoad, Resumed, read_events
from bloomery.monitor.words import load_text, log_line
from bloomery.report.charts import HEAT, HeatMap, heat_class, heat_map
from bloomery.report.experts import load_map
from bloomery.view.run_view import RunView
from runs_for_tests import step_done


def load(step: int, **ratios: list[float]) -> ExpertLoad:
    return ExpertLoad(
        step=step, ratios={name.removeprefix("l"): row for name, row in ratios.items()}
    )


def test_the_newest_load_is_that_of_a_step_that_stays() -> None:
    view = RunView()
    for event in (step_done(1), load(1, l0=[1.0]), step_done(2), load(2, l0=[2.0])):
        view.add(event)
    assert view.expert_load is not None and view.expert_load.step == 2
    view.add(Resumed(step=1, path="checkpoints/step-00000001"))
    assert view.expert_load is None


@pytest.mark.parametrize(
    "ratios",
    [{}, {"0": []}, {"0": ["<b>"]}, {"../x": [1.0]}, {"0": [-1.0]}, {"0": [None]}],
)
def test_rows_that_make_no_sense_are_left_out(tmp_path, ratios) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as emit:
        emit(ExpertLoad(step=1, ratios=ratios))
    for event in read_events(path):
        assert isinstance(event, ExpertLoad)
        assert event.rows() == []
        log_line(event)


def test_rows_are_in_the_order_of_layers_and_of_one_length() -> None:
    event = load(1, l10=[1.0, 2.0], l9=[0.5, 0.5], l11=[1.0])
    assert event.rows() == [(9, [0.5, 0.5]), (10, [1.0, 2.0])]


def test_a_map_has_a_cell_for_each_expert() -> None:
    rows = [("layer 0", [0.0, 0.1, 0.5, 1.0]), ("layer 3", [1.0, 1.0, 2.0, 9.0])]
    svg = str(heat_map(HeatMap("Load", rows, "expert", "layer"), shape="heat_image"))
    for name in ("dead", "low3", "low2", "fair", "high2", "high3"):
        assert f'class="heat {name}"' in svg
    assert 'd="M3 0h1v1h-1zM0 1h2v1h-2z"' in svg  # the fair ones, neighbors as one
    assert "layer 3: expert 3 9, expert 0 1, 0 at 0" in svg
    assert [heat_class(begin) for begin, _, _ in HEAT] == [name for _, name, _ in HEAT]


def test_a_large_map_stays_small() -> None:
    rows = {
        f"l{layer}": [((layer * 7 + e * 13) % 30) / 10 for e in range(128)] for layer in range(48)
    }
    assert len(heat_map(load_map(load(1, **rows)))) < 150_000


def test_terminals_say_how_uneven_the_load_is() -> None:
    assert load_text({}) == ""
    assert load_text({"router/highest_load": 2.345}) == "up to 2.35 x"
    text = load_text({"router/highest_load": 8.0, "router/dead_experts": 3.0})
    assert text == "up to 8 x, 3 dead"
