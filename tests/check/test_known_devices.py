"""What an answer of a check holds for."""

from dataclasses import replace

import pytest
from faulty_devices import (
    ALL_LINEAR,
    CONFIG,
    plan_of,
)
from plans_for_tests import tiny_config, tiny_plan

from bloomery.check.examination import examine
from bloomery.check.known_devices import identity_of, keep_answer, key_of, known_answer
from bloomery.check.small_model import small_plan
from bloomery.recipe.schema import Quantize

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_small_model_has_the_widths_of_the_run():
    config = tiny_config(
        **CONFIG | {"vocab_size": 151_936 + 3, "num_layers": 6},
        sliding_window=(None, 512, None, 512, None, 512),
        rotary_layers=(True,) * 6,
    )
    small = small_plan(tiny_plan(config=config, data={"sequence_length": 1024})).model.config
    assert (small.hidden_size, small.num_heads, small.num_layers) == (64, 4, 2)
    assert small.sliding_window == (None, 61)  # one layer of each kind, and the window matters
    assert small.vocab_size % 128 == (151_936 + 3) % 128


def test_rates_and_lengths_are_no_reason_to_check_again():
    plan = plan_of()
    identity = identity_of(plan.train.device, None)
    key = key_of(plan, identity)
    assert key_of(plan_of(optimizer={"learning_rate": 1e-5}, train={"steps": 9}), identity) == key
    for other in (
        plan_of(train={"precision": "float16"}),
        plan_of(optimizer={"kind": "muon"}),
        plan_of(model={"attention": "blockwise"}),
        plan_of(config={"hidden_size": 128}),
        plan_of(quantize=Quantize(kind="int8"), adapter=ALL_LINEAR),
    ):
        assert key_of(other, identity) != key


def test_an_answer_holds_for_its_device_and_driver():
    plan = plan_of()
    identity = identity_of(plan.train.device, None)
    keep_answer(key_of(plan, identity), identity, examine(plan))
    assert known_answer(key_of(plan, identity)) is not None
    for name in ("driver", "torch", "arch", "device", "unit"):
        other = replace(identity, **{name: "another"})
        assert known_answer(key_of(plan, other)) is None
