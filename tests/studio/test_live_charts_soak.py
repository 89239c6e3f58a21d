"""Charts of a run that trains, in a headless Chromium: only the points that have changed travel."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from studio_for_tests import TOKEN, make_run, studio_process

from bloomery.monitor.events import EventLog, Resumed, read_events
from bloomery.studio.curves import MOST_BUCKETS, RunCurves
from browser import PROGRAM, Browser
from runs_for_tests import step_done

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(find_spec("nicegui") is None, reason="the extra `studio` is not installed"),
]
# The points that the browser has of the first curve of the chart with this title.
POINTS = """(title => {
  const box = [...document.querySelectorAll('.nicegui-echart')]
    .find(one => one.getAttribute('aria-label') === title + ' over step');
  return getElement(Number(box.id.slice(1))).chart.getOption().series[0].data;
})"""


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
            first = step + 1
            for step in range(first, first + count):
                log(step_done(step, loss=float(step * 37 % 101), grad_norm=step % 13))
            browser.until(f"document.body.innerText.includes('{step:,}')")
            same_as_file(browser, folder)
            if count == 3:
                step -= 100
                log(Resumed(step=step, path="checkpoints/step-00000001"))
        assert browser.problems == []


def same_as_file(browser: Browser, folder: Path) -> None:
    curves = RunCurves()
    for event in read_events(folder / "events.jsonl"):
        curves.add(event)
    for title, name in (("Loss", "loss"), ("Gradient norm", "gradient norm")):
        points = curves.points(name)
        browser.until(f"{POINTS}({title!r}).length === {len(points)}")
        assert browser.value(f"{POINTS}({title!r})") == points
