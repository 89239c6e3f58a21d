"""Ranges of settings: what they mean, and where drawn numbers lie."""

import math
import random

import pytest

from bloomery.core.errors import UserError
from bloomery.recipe.yaml import read_yaml
from bloomery.sweep.points import points_of, value_of
from bloomery.sweep.ranges import Range, range_of

DRAWS = 4000


def parsed(key, text):
    found = range_of(key, text, where="here")
    assert found is not None
    return found


def drawn(numbers: Range) -> list[str]:
    source = random.Random(0)
    return [numbers.draw(source) for _ in range(DRAWS)]


def test_a_learning_rate_is_logarithmic_and_other_keys_are_not_unless_asked():
    assert parsed("optimizer.learning_rate", "1e-5..1e-3") == Range(1e-5, 1e-3, "log", False)
    assert parsed("optimizer.learning_rate", "linear:1e-5..1e-3").scale == "linear"
    assert parsed("model.dropout", "0..0.3") == Range(0, 0.3, "linear", False)
    assert parsed("optimizer.weight_decay", "log:1e-3..1e-1").scale == "log"
    assert parsed("adapter.rank", "4..64") == Range(4, 64, "linear", True)
    for text in ("1e-4", "../data", "a..b", "[1..2]", "true"):
        assert range_of("data.path", text, where="here") is None


def test_draws_of_a_logarithm_are_uniform_in_it():
    """Of a uniform logarithm a quarter lies in each quarter of it: 4,000 draws stay within 4 standard deviations."""
    values = [float(text) for text in drawn(Range(1e-5, 1e-1, "log", False))]
    assert min(values) >= 1e-5 and max(values) <= 1e-1
    for quarter in range(4):
        count = sum(quarter <= math.log10(value) + 5 < quarter + 1 for value in values)
        assert abs(count - DRAWS / 4) < 4 * math.sqrt(DRAWS * 3 / 16)


def test_whole_numbers_are_drawn_alike_with_both_ends():
    counts = [drawn(Range(3, 6, "linear", True)).count(str(number)) for number in range(3, 7)]
    assert sum(counts) == DRAWS
    assert all(abs(count - DRAWS / 4) < 4 * math.sqrt(DRAWS * 3 / 16) for count in counts)
    values = [int(text) for text in drawn(Range(4, 64, "log", True))]
    assert min(values) == 4 and max(values) == 64
    assert abs(sum(value < 16 for value in values) - DRAWS / 2) < DRAWS / 20


def test_a_drawn_number_is_short_and_read_as_a_number():
    for text in drawn(Range(1e-5, 1e-3, "log", False))[:200]:
        assert len(text) <= 7 and isinstance(value_of(text), float)
    for text in drawn(Range(-0.5, 20000, "linear", False))[:200]:
        document = read_yaml(f"value: {text}", source="here", folder=None)
        assert isinstance(document.data["value"], float | int)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("optimizer.learning_rate", "1e-3..1e-5"),
        ("optimizer.learning_rate", "0..1e-3"),
        ("optimizer.learning_rate", "1e-5..fast"),
        ("adapter.rank", "8..8"),
        ("adapter.rank", "log:8"),
    ],
)
def test_a_range_that_means_nothing_is_refused_with_what_to_write(key, text):
    with pytest.raises(UserError) as caught:
        range_of(key, text, where="here")
    assert caught.value.code == 2 and key in caught.value.fix


def test_random_and_halving_draw_and_a_grid_refuses():
    words = ("optimizer.learning_rate=1e-4..1e-2", "adapter.rank=4,8", "train.max_steps=7")

    def names(search, runs, seed=0):
        points = points_of("demo-chat-lora", words, search=search, runs=runs, seed=seed)
        for point in points:
            assert 1e-4 <= point.recipe.recipe.optimizer.learning_rate <= 1e-2
            assert set(point.settings) == {"optimizer.learning_rate", "adapter.rank"}
        return [point.name for point in points]

    five = names("random", 5)
    assert len(set(five)) == 5 and names("random", 9)[:5] == five and names("halving", 5) == five
    assert names("random", 5, seed=1) != five and len(names("random", None)) == 10
    with pytest.raises(UserError, match="no end") as caught:
        names("grid", None)
    assert "--search random" in caught.value.fix
    with pytest.raises(UserError, match="a range and other values"):
        points_of(
            "demo-chat-lora",
            ["optimizer.learning_rate=1e-4..1e-2,1e-1"],
            search="random",
            runs=3,
            seed=0,
        )


def test_few_whole_numbers_are_all_drawn_once():
    points = points_of("demo-chat-lora", ["train.seed=1..3"], search="random", runs=9, seed=0)
    assert sorted(point.settings["train.seed"] for point in points) == ["1", "2", "3"]
