"""What others published, asked of the planner as if it were ahead: the bars, and the page that shows every answer."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "retrodiction"))

import ask  # noqa: E402
import fitted  # noqa: E402

import report  # noqa: E402


@pytest.fixture(scope="module")
def found():
    return ask.answers()


@pytest.fixture(scope="module")
def blind(found):
    return report.blind(found)


def test_four_of_five_speeds_lie_inside_and_half_are_near(found):
    speeds = report.of(found, "speed")
    assert len(speeds) >= 30
    assert report.inside(speeds) >= report.INSIDE
    assert report.missed(speeds) <= report.ERROR["speed"]


def test_so_they_do_of_a_source_that_had_no_part_in_the_constants(blind):
    assert len(blind) >= 20
    assert report.inside(blind) >= report.INSIDE
    assert report.missed(blind) <= report.ERROR["speed"]


def test_four_of_five_peaks_lie_inside_and_half_are_near(found):
    peaks = report.of(found, "memory")
    assert len(peaks) >= 15
    assert report.inside(peaks) >= report.INSIDE
    assert report.missed(peaks) <= report.ERROR["memory"]


def test_intervals_are_narrow_enough_to_be_of_use(found):
    assert report.width(report.of(found, "speed")) <= 2.0
    assert report.width(report.of(found, "memory")) <= 1.5 + 1e-9


@pytest.mark.parametrize("arch", sorted({arch for _, arch, _ in fitted.rows()}))
def test_the_table_holds_what_the_rule_gives(arch):
    found = {name: (typical, held) for name, typical, held, _ in fitted.fitted()}
    typical, held = found[arch]
    assert held == pytest.approx(typical, abs=0.0051)


def test_the_rule_is_a_median_of_medians():
    shares = fitted.by_source("sm_90")
    middle = sorted(sorted(each)[len(each) // 2] for each in shares.values())
    assert middle[0] <= fitted.typical_share("sm_90") <= middle[-1]
    assert set(fitted.by_source("sm_90", without="pytorch/ao")) == set(shares) - {"pytorch/ao"}


def test_every_published_row_is_on_the_page_and_the_page_is_current(found, blind, monkeypatch):
    monkeypatch.setattr(report, "answers", lambda: found)
    monkeypatch.setattr(report, "blind", lambda _: blind)
    text = report.PAGE.read_text(encoding="utf-8")
    assert all(f"`{row['id']}`" in text for row in ask.table()["row"])
    assert text == report.page(), "run benchmarks/retrodiction/report.py"
