"""The check of one step on layers that are given inputs, and a device that leaves these out."""

from dataclasses import fields

import pytest
from faulty_devices import plan_of
from plans_for_tests import sharing_config

from bloomery.check.examination import examine
from bloomery.model.decoder import Block

pytestmark = pytest.mark.usefixtures("own_cache")


def plan():
    config = sharing_config()
    return plan_of(config={field.name: getattr(config, field.name) for field in fields(config)})


def test_a_device_that_computes_them_right_has_no_faults() -> None:
    assert examine(plan()).faults == ()


def test_an_input_of_a_layer_that_counts_twice_is_named(monkeypatch) -> None:
    """The first of the two models that are built is the device's."""
    whole = Block.forward
    tested = []

    def forward(block, x_BTD, rotary, layout, cache=None, input_BTP=None, lent=None):
        if not tested:
            tested.append(block)
        if block is tested[0] and input_BTP is not None:
            input_BTP = 2 * input_BTP
        return whole(block, x_BTD, rotary, layout, cache, input_BTP, lent)

    monkeypatch.setattr(Block, "forward", forward)
    assert "layer" in {fault.part for fault in examine(plan()).faults}
