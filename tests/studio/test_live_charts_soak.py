"""Charts of a run that trains, in a headless Chromium: only the points that have changed travel."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from studio_for_tests import TOKEN, make_run, studio_process

from bloomery.monitor.events import EventLog, Resumed, Warned, read_events
from bloomery.view.curves import MOST_BUCKETS
from bloomery.view.run_view import RunView
from browser import PROGRAM, Browser
from runs_for_tests import step_done

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(find_spec("nicegui") is None, reason="the extra `studio` is not installed"),
]
# The place of the chart with this title.
BOX = """(title => [...document.querySelectorAll('.nicegui-echart')]
  .find(one => one.getAttribute('aria-label') === title + ' over step'))"""
CHART = f"(title => getElement(Number({BOX}(title).id.slice(1))).chart)"
# The points that the browser has of its first curve.
POINTS = f"(title => {CHART}(title).getOption().series[0].data)"


def test_the_browser_has_the_points_of_the_run_as_it_trains_and_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run("live", events=[step_done(step, loss=step % 7) for step in range(1, 5)])
    with (
        studio_process(tmp_path) as url,
        Browser(tmp_path / "profile") as browser,
        EventLog(folder / "events.jsonl") as log,
    ):
        browser.look(width=1400)
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}run/live")
        browser.until("document.querySelectorAll('canvas').length >= 5")
        step = 4
        # Some steps, many, those after which the buckets are twice as wide, and those that a resume repeats.
        for count in (1, 40, MOST_BUCKETS, 3, 200):
            for _ in range(count):
                step += 1
                log(step_done(step, loss=float(step * 37 % 101), grad_norm=step % 13))
            browser.until(f"document.body.innerText.includes('{step:,}')")
            same_as_file(browser, folder)
            if count == 3:
                step -= 100
                log(Resumed(step=step, path="checkpoints/step-00000001"))
        assert browser.problems == []


def test_a_mark_on_a_curve_has_the_words_of_its_event_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    warned = Warned(step=30, reason="<b>slow</b>")
    make_run("marked", events=[*(step_done(step) for step in range(1, 51)), warned])
    with studio_process(tmp_path) as url, Browser(tmp_path / "profile") as browser:
        browser.look(width=1400)
        browser.open(f"{url}?token={TOKEN}")
        browser.open(f"{url}run/marked")
        browser.until("document.querySelectorAll('canvas').length >= 5")
        for title in ("Loss", "Memory"):
            browser.value(
                "(chart => { const point = chart.getOption().series[0].data.find(one => one[0] === 30);"
                " const [x, y] = chart.convertToPixel('grid', point);"
                f" chart.dispatchAction({{type: 'showTip', x, y}}); }})({CHART}({title!r}))"
            )
            browser.until(f"{BOX}({title!r}).innerText.includes('step 30: <b>slow</b>')")
        assert browser.problems == []


def same_as_file(browser: Browser, folder: Path) -> None:
    view = RunView()
    for event in read_events(folder / "events.jsonl"):
        view.add(event)
    for title, name in (("Loss", "loss"), ("Gradient norm", "gradient norm")):
        points = view.curves.points(name).tolist()
        browser.until(f"{POINTS}({title!r}).length === {len(points)}")
        assert browser.value(f"{POINTS}({title!r})") == points
