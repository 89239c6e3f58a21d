"""The check of a device does not blame it for a mixture of experts."""

import pytest
import torch
from faulty_devices import plan_of

from bloomery.check.examination import examine
from bloomery.facts.config import Experts
from bloomery.model import experts as experts_module

MIXTURE = {
    "family": "qwen3_moe",
    "qk_norm": "head",
    "experts": Experts(count=8, per_token=2, width=48),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_experts_are_not_blamed(precision: str) -> None:
    examination = examine(plan_of(config=MIXTURE, train={"precision": precision}))
    assert examination.faults == ()
    assert examination.unrepeatable == ()


def test_a_wrong_product_of_an_expert_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last expert is multiplied with the weights of the first, on the tested side."""
    right = experts_module.grouped_linear
    calls = []

    def wrong(x, weight_EOI, pairs, *rest, **named):
        calls.append(weight_EOI)
        is_tested = x.dtype == torch.bfloat16
        stack = torch.cat((weight_EOI[:-1], weight_EOI[:1])) if is_tested else weight_EOI
        return right(x, stack, pairs, *rest, **named)

    monkeypatch.setattr(experts_module, "grouped_linear", wrong)
    examination = examine(plan_of(config=MIXTURE, train={"precision": "bfloat16"}))
    assert calls
    assert "experts" in {fault.part for fault in examination.faults}
