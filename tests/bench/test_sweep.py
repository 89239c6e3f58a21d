"""What `--sweep` means."""

import pytest

from bloomery.bench.measuring import (
    MOST_POINTS,
    other_attention,
    points,
    usual_points,
)
from bloomery.core.errors import UserError
from bloomery.recipe.axes import split_outside_brackets


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8,16", ["8", "16"]),
        ("[q_proj,v_proj],[q_proj]", ["[q_proj,v_proj]", "[q_proj]"]),
        ('"1,024 steps", 5 steps', ['"1,024 steps"', "5 steps"]),
        ("{kind: lora, rank: 4},none", ["{kind: lora, rank: 4}", "none"]),
        ("true", ["true"]),
    ],
)
def test_commas_inside_brackets_and_quotes_stay(text, parts):
    assert split_outside_brackets(text) == parts


def test_all_combinations_in_the_order_of_the_words():
    assert points(["train.micro_batch_size=4,8", "train.compile=true,false"]) == [
        ("train.micro_batch_size=4", "train.compile=true"),
        ("train.micro_batch_size=4", "train.compile=false"),
        ("train.micro_batch_size=8", "train.compile=true"),
        ("train.micro_batch_size=8", "train.compile=false"),
    ]


@pytest.mark.parametrize(
    "word",
    [
        "train.micro_batch_size",
        "micro_batch_size=4",
        "train.micro_batch_size=",
        "=4",
        "train.micro_batch_size=,",
    ],
)
def test_what_is_no_sweep_is_refused(word):
    with pytest.raises(UserError) as caught:
        points([word])
    assert caught.value.code == 2 and caught.value.fix


def test_a_key_is_swept_once_and_the_whole_stays_payable():
    with pytest.raises(UserError, match="twice"):
        points(["train.micro_batch_size=4", "train.micro_batch_size=8"])
    values = ",".join(map(str, range(MOST_POINTS + 1)))
    with pytest.raises(UserError, match=str(MOST_POINTS + 1)):
        points([f"train.seed={values}"])


def test_without_a_sweep_one_thing_at_a_time_is_measured(bench):
    plan, machine = bench().plan(), bench().machine
    found = usual_points(plan, machine, largest=4 * plan.train.micro_batch_size)
    assert found[0] == ()
    assert found[1] == (f"train.micro_batch_size={4 * plan.train.micro_batch_size}",)
    assert all(len(words) == 1 for words in found[1:])
    assert ("train.attention=per_document",) in found
    largest = plan.train.micro_batch_size
    assert usual_points(plan, machine, largest=largest)[1] == (
        "train.activation_checkpointing=full",
    )


@pytest.mark.parametrize(
    ("device", "attention", "length", "precision", "other"),
    [
        ("cpu", "mask", 256, "bfloat16", "per_document"),
        ("cpu", "per_document", 256, "bfloat16", "mask"),
        ("cpu", "per_document", 4096, "bfloat16", "blockwise"),
        ("cuda", "varlen", 1024, "bfloat16", "flex"),
        ("cuda", "flex", 1024, "bfloat16", "varlen"),
        ("cuda", "flex", 1024, "float32", "mask"),
        ("cuda", "blockwise", 1024, "bfloat16", None),
    ],
)
def test_the_other_attention_computes_the_same_here(
    bench, device, attention, length, precision, other
):
    plan = bench().plan()
    train = plan.train.model_copy(update={"device": device, "precision": precision})
    data = plan.data.model_copy(update={"sequence_length": length})
    model = plan.model.model_copy(update={"attention": attention})
    changed = plan.model_copy(
        update={"train": train, "data": data, "model": model, "torch": "2.13.0"}
    )
    assert other_attention(changed) == other
