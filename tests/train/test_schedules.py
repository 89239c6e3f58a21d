import math

import pytest
import torch
import transformers

from bloomery.train.optim.schedules import lr_scale_at

STEPS, WARMUP = 50, 7


def reference(make):
    """What transformers' scheduler gives before each step, 0 for the first."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, WARMUP, STEPS)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        ("cosine", transformers.get_cosine_schedule_with_warmup),
        ("linear", transformers.get_linear_schedule_with_warmup),
    ],
)
def test_shapes_match_transformers_after_a_warmup_that_wastes_no_step(shape, make):
    theirs = reference(make)
    ours = [
        lr_scale_at(step, steps=STEPS, warmup_steps=WARMUP, shape=shape) for step in range(STEPS)
    ]
    assert ours[:WARMUP] == pytest.approx([*theirs[1:WARMUP], 1.0])
    assert ours[WARMUP:] == pytest.approx(theirs[WARMUP:])


def test_wsd_is_flat_then_falls_linearly_to_its_floor():
    wsd = {"steps": 100, "warmup_steps": 10, "shape": "wsd", "min_lr_ratio": 0.1, "decay_steps": 20}
    shares = [lr_scale_at(step, **wsd) for step in range(101)]
    assert shares[9:81] == [1.0] * 72
    assert shares[90] == pytest.approx(0.55)
    assert shares[100] == pytest.approx(0.1)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_floor_is_where_training_ends(shape):
    assert lr_scale_at(
        STEPS, steps=STEPS, warmup_steps=WARMUP, shape=shape, min_lr_ratio=0.2
    ) == pytest.approx(0.2)


def test_constant_and_unknown_lengths_hold_the_peak():
    assert lr_scale_at(40, steps=STEPS, warmup_steps=WARMUP, shape="constant") == 1.0
    assert lr_scale_at(40, steps=None, warmup_steps=WARMUP, shape="cosine") == 1.0
    assert lr_scale_at(3, steps=None, warmup_steps=10, shape="cosine") == pytest.approx(0.4)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_a_run_of_nothing_but_warmup_stays_finite(shape):
    shares = [
        lr_scale_at(step, steps=5, warmup_steps=5, shape=shape, decay_steps=9) for step in range(7)
    ]
    assert all(math.isfinite(share) and 0 <= share <= 1 for share in shares)
