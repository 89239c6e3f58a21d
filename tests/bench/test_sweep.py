"""What `--sweep` means."""

import pytest

from bloomery.bench.sweep import MOST_POINTS, points, split
from bloomery.errors import UserError


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
    assert split(text) == parts


def test_all_combinations_in_the_order_of_the_words():
    assert points(["train.micro_batch=4,8", "train.compile=true,false"]) == [
        ("train.micro_batch=4", "train.compile=true"),
        ("train.micro_batch=4", "train.compile=false"),
        ("train.micro_batch=8", "train.compile=true"),
        ("train.micro_batch=8", "train.compile=false"),
    ]


@pytest.mark.parametrize(
    "word", ["train.micro_batch", "micro_batch=4", "train.micro_batch=", "=4", "train.micro_batch=,"]
)
def test_what_is_no_sweep_is_refused(word):
    with pytest.raises(UserError) as caught:
        points([word])
    assert caught.value.code == 2 and caught.value.remedy


def test_a_key_is_swept_once_and_the_whole_stays_payable():
    with pytest.raises(UserError, match="twice"):
        points(["train.micro_batch=4", "train.micro_batch=8"])
    values = ",".join(map(str, range(MOST_POINTS + 1)))
    with pytest.raises(UserError, match=str(MOST_POINTS + 1)):
        points([f"train.seed={values}"])
