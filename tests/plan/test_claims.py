"""The Go coder guide's beliefs, and claims of any other recipe, judged by arithmetic."""

import pytest
from plan_help import gpu_machine, loaded, machine, reported

from bloomery.plan.advise import roughly, span
from bloomery.plan.types import DatasetFacts
from bloomery.recipe.load import load_recipe


@pytest.fixture(scope="module")
def guide():
    return reported(load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT"))


def verdicts(report):
    return {verdict.claim: (verdict.verdict, verdict.reason) for verdict in report.claims}


def test_the_guide_trains_on_a_third_of_what_it_says(guide):
    assert guide.plan.total_tokens == 195_000 * 16 * 1024 == 3_194_880_000
    verdict, reason = verdicts(guide)["10 B tokens"]
    assert verdict == "wrong"
    assert reason.startswith("195,000 x 16 x 1,024 = 3.19 B; 10 B are 610,352 steps, 14.")


def test_five_tokens_a_second_would_take_twenty_years(guide):
    years = 3_194_880_000 / 5 / 31_557_600
    assert years == pytest.approx(20.2, abs=0.1)
    assert verdicts(guide)["5 tokens/s"] == ("wrong", "3.19 B tokens would take 20 years")


def test_five_to_seven_days_are_right(guide):
    assert guide.plan.seconds.value / 86400 == pytest.approx(4.6, abs=0.1)
    assert verdicts(guide)["5 to 7 days"] == ("ok", "overlaps 3.1 to 6.6 days")


def test_epochs_wait_for_the_text(guide):
    verdict, reason = verdicts(guide)["3 epochs"]
    assert (verdict, reason) == ("unknown", "true for a dataset of 1.06 B tokens; none is prepared")


def test_ten_gigabytes_are_judged_by_the_plans_own_total(guide):
    """10 to 11 GB with 5% to each side are 8.85 to 10.76 GiB."""
    verdict, reason = verdicts(guide)["10 to 11 GB"]
    total = guide.plan.memory.total / 2**30
    assert verdict == ("high" if total < 8.85 else "ok")
    assert reason.startswith(f"{total:.1f} GiB at micro-batch 4")


def test_perplexities_wait_for_the_run(guide):
    assert [verdicts(guide)[claim][0] for claim in verdicts(guide) if "perplexity" in claim] == [
        "unknown"
    ] * 4


def test_the_guide_denies_itself(guide):
    assert any("take 63 years, not 5.0 to 7.0 days" in doubt for doubt in guide.warnings)


def judged(expect, *, dataset=None, **sections):
    return reported(loaded(claims=expect, **sections), machine(), dataset=dataset).claims[0]


CORPUS = DatasetFacts(sequences_per_epoch=400, tokens=51_200, vocab_size=256)


@pytest.mark.parametrize(
    ("expect", "verdict"),
    [
        ({"tokens": "100k"}, "ok"),
        ({"tokens": "90k to 120k"}, "ok"),
        ({"tokens": "1M"}, "wrong"),
        ({"epochs": 2}, "ok"),
        ({"epochs": 3}, "wrong"),
        ({"memory": "1 to 2 TB"}, "high"),
        ({"memory": "1 MB"}, "low"),
        ({"tokens_per_second": "10M"}, "wrong"),
        ({"duration": "2 years"}, "high"),
        ({"perplexity": {"50 steps": 20}}, "unknown"),
        ({"perplexity": {"500 steps": 20}}, "wrong"),
        ({"perplexity": {"50 steps": 1000}}, "wrong"),
    ],
)
def test_each_kind_of_claim(expect, verdict):
    """100 steps of 1,024 tokens are two epochs of 51,200; guessing among 256 tokens has a perplexity of 256."""
    assert judged(expect, dataset=CORPUS).verdict == verdict


def test_claims_about_an_unknown_device_stay_open():
    recipe = loaded(claims={"tokens_per_second": 5, "duration": "8h"})
    report = reported(recipe, machine(flags=()))
    assert report.plan.step_seconds is None
    assert [verdict.verdict for verdict in report.claims] == ["unknown", "unknown"]


def test_times_read_like_a_person_writes_them():
    assert span((5 * 86400, 7 * 86400), trimmed=True) == "5 to 7 days"
    assert span((4.04 * 86400, 8 * 86400)) == "4.0 to 8.0 days"
    assert span((100.0, 9000.0)) == "100 s to 2.5 h"
    assert roughly(20.2 * 31_557_600) == "20 years"
    assert roughly(5233 * 31_557_600) == "5,200 years"
    assert roughly(1.26 * 31_557_600) == "1.3 years"
    assert span((4411 * 31_557_600, 9870 * 31_557_600), trimmed=True) == "4,400 to 9,900 years"
