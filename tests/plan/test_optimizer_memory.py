import pytest
from plan_help import loaded, machine, planned, reported

from bloomery.core.errors import UserError
from bloomery.plan.fallback import smaller_micro_batch

FUSED = {"kind": "adafactor", "fused_backward": True}


def said(plan) -> dict[str, str]:
    return {decision.key: f"{decision.value}: {decision.reason}" for decision in plan.choices}


def test_in_backward_a_step_is_one_micro_batch():
    plan = planned(loaded(optimizer=FUSED, train={"tokens_per_step": "auto"}), machine())
    assert plan.train.accumulation == 1
    assert plan.train.tokens_per_step == plan.train.micro_batch_size * plan.data.sequence_length
    assert "one micro-batch" in said(plan)["train.tokens_per_step"]
    train = {"micro_batch_size": 3, "tokens_per_step": "auto"}
    asked = planned(loaded(optimizer=FUSED, train=train), machine())
    assert (asked.train.micro_batch_size, asked.train.accumulation) == (3, 1)
    tokens = 4 * plan.data.sequence_length
    whole = planned(loaded(optimizer=FUSED, train={"tokens_per_step": tokens}), machine())
    assert (whole.train.micro_batch_size, whole.train.accumulation) == (4, 1)
    assert smaller_micro_batch(whole, "memory ran out") is None


def test_accumulation_in_backward_is_refused_with_the_edit_that_helps():
    length = planned(loaded(), machine()).data.sequence_length
    both = {"micro_batch_size": 2, "tokens_per_step": 8 * length}
    with pytest.raises(UserError) as error:
        planned(loaded(optimizer=FUSED, train=both), machine())
    assert f"train.tokens_per_step={2 * length}" in error.value.fix
    planned(loaded(optimizer=FUSED, train=both | {"tokens_per_step": 2 * length}), machine())


@pytest.mark.parametrize(
    "asked",
    [{"kind": "adafactor"}, {"fused_backward": True}, {"state_dtype": "int8"}, {"offload": True}],
)
def test_an_optimizer_of_our_own_is_not_called_torchs_fused_one(asked):
    own, torchs = planned(loaded(optimizer=asked), machine()), planned(loaded(), machine())
    assert (own.optimizer.fused, torchs.optimizer.fused) == (False, True)
    assert "Bloomery's Ada" in said(own)["optimizer.fused"]


@pytest.mark.parametrize(
    "asked", [{"state_dtype": "int8"}, {"fused_backward": True}, {"paged": True}, {"offload": True}]
)
def test_muon_takes_none_of_it(asked):
    with pytest.raises(UserError, match="Muon does not support"):
        planned(loaded(optimizer={"kind": "muon"} | asked), machine())


def test_what_is_done_instead_of_clipping_is_said():
    adafactor = said(planned(loaded(optimizer=FUSED), machine()))["optimizer.fused_backward"]
    assert "Adafactor clips its updates" in adafactor
    adamw = said(
        planned(loaded(optimizer={"fused_backward": True}, train={"max_grad_norm": 0.5}), machine())
    )
    assert "train.max_grad_norm=0.5 limits each gradient alone" in adamw["optimizer.fused_backward"]
    off = said(
        planned(
            loaded(optimizer={"fused_backward": True}, train={"max_grad_norm": None}), machine()
        )
    )
    assert "max_grad_norm" not in off["optimizer.fused_backward"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"optimizer": {"offload": True}}, "optimizer.offload has no effect on a CPU"),
        (
            {"optimizer": {"paged": True, "kind": "adafactor"}},
            "optimizer.paged has no effect with Adafactor",
        ),
        (
            {"optimizer": {"state_dtype": "int8", "kind": "adafactor"}},
            "optimizer.state_dtype=int8 has no effect with Adafactor",
        ),
        (
            {"train": {"offload_activations": True}},
            "train.offload_activations has no effect on a CPU",
        ),
        (
            {"optimizer": {"stochastic_rounding": True}},
            "optimizer.stochastic_rounding has no effect",
        ),
    ],
)
def test_what_changes_nothing_is_said(sections, words):
    report = reported(loaded(**sections), machine())
    assert any(words in text for text in report.warnings)


def test_bfloat16_adapters_are_rounded_at_random_beside_float32_products():
    rounded = {"stochastic_rounding": True}
    half = reported(
        loaded(optimizer=rounded, adapter={"kind": "lora", "dtype": "bfloat16"}), machine()
    )
    assert "optimizer.stochastic_rounding" in said(half.plan)
    assert not any("stochastic" in text for text in half.warnings)
    wide = reported(loaded(optimizer=rounded, adapter={"kind": "lora"}), machine())
    assert any("stochastic_rounding has no effect" in text for text in wide.warnings)
