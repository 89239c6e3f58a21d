"""Skip, rewind, stop."""

import pytest

from bloomery.core.errors import UserError
from bloomery.train.nonfinite import NonFinite

ROWS = range(80, 96)


def judge(policy: NonFinite, *finite: bool) -> list[str]:
    return [policy.decide(good, step=11, sequences=ROWS) for good in finite]


def test_three_bad_steps_are_skipped_and_a_good_one_forgives_them() -> None:
    policy = NonFinite()
    assert judge(policy, True, False, False, False, True) == [
        "step",
        "skip",
        "skip",
        "skip",
        "step",
    ]
    assert judge(policy, False, False, False) == ["skip"] * 3


def test_the_fourth_bad_step_rewinds_and_the_third_rewind_is_the_end() -> None:
    policy = NonFinite()
    assert judge(policy, *[False] * 4) == ["skip"] * 3 + ["rewind"]
    assert judge(policy, *[False] * 4) == ["skip"] * 3 + ["rewind"]
    assert judge(policy, *[False] * 3) == ["skip"] * 3
    with pytest.raises(UserError, match="step 11, sequences 80 to 95") as caught:
        judge(policy, False)
    assert "learning_rate" in caught.value.fix


def test_a_resumed_run_judges_as_the_undisturbed_one() -> None:
    policy = NonFinite()
    judge(policy, *[False] * 6)
    resumed = NonFinite()
    resumed.load(policy.state())
    assert judge(resumed, False, False) == judge(policy, False, False) == ["skip", "rewind"]
