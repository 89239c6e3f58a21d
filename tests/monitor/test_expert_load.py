"""The load of experts in events: what readers make of it, also of a file that somebody changed."""

from dataclasses import replace

import pytest

from bloomery.monitor import diagnosis
from bloomery.monitor.events import EventLog, ExpertLoad, Resumed, read_events
from bloomery.monitor.history import Diagnosis, PlanFacts, history_of
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


MIXTURE = PlanFacts(router_loss=0.001, tokens_per_step=8192, vocab_size=1000)


def said_of(
    loads: list[list[float]], facts: PlanFacts = MIXTURE, every: int = 5
) -> list[Diagnosis]:
    """What is said of a run with these loads of layer 3, beside an even layer 1."""
    events = []
    for number, ratios in enumerate(loads, 1):
        events += [step_done(number * every), load(number * every, l1=[1.0] * 8, l3=ratios)]
    return [
        d for d in diagnosis.why_not_learning(history_of(events), facts) if d.cause == "experts"
    ]


DEAD = [2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 2.0, 1.0]
SEEN = [1.0] * 8


def test_experts_without_tokens_are_named_with_their_cure() -> None:
    (said,) = said_of([SEEN] * 10 + [DEAD] * 20)
    assert said.problem.startswith("2 experts are dead")
    assert "20 of the last 96 steps" in said.evidence and "2 of 8 in layer 3" in said.evidence
    assert "router.loss=0.01 (now 0.001)" in said.fix
    assert "router.loss=0.01:" in said_of([DEAD] * 20, replace(MIXTURE, router_loss=0.0))[0].fix
    with_bias = replace(MIXTURE, router_loss=0.0, router_bias_update=0.001)
    assert "router.bias_update=0.01 (now 0.001)" in said_of([DEAD] * 20, with_bias)[0].fix


@pytest.mark.parametrize(
    ("loads", "facts", "every"),
    [
        ([DEAD] * 19 + [SEEN], MIXTURE, 5),  # each had tokens
        ([DEAD] * 9, MIXTURE, 50),  # too few
        ([DEAD] * 20, MIXTURE, 1),  # for too few steps
        ([DEAD] * 20, replace(MIXTURE, tokens_per_step=50), 5),  # by chance
        ([DEAD] * 20, replace(MIXTURE, router_loss=None), 5),  # a frozen router
        ([[1.0] * 7] * 10 + [DEAD] * 10, MIXTURE, 5),  # another model's
    ],
)
def test_nothing_is_said_of_experts_that_may_live(loads, facts, every) -> None:
    assert said_of(loads, facts, every) == []
