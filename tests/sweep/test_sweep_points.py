"""Which runs a sweep has, and what their folders are called."""

import pytest

from bloomery.core.errors import UserError
from bloomery.sweep.points import points_of, rungs_of
from bloomery.sweep.store import sweep_folder

RATES = "optimizer.learning_rate=1e-3,3e-3"
RANKS = "adapter.rank=4,8"


def points(*overrides, search="grid", runs=None, seed=0):
    return points_of("demo-chat-lora", overrides, search=search, runs=runs, seed=seed)


def test_a_grid_has_all_combinations_and_a_single_value_is_set_in_each():
    grid = points(RATES, RANKS, "train.max_steps=7")
    assert [point.values for point in grid] == [
        {"optimizer.learning_rate": rate, "adapter.rank": rank}
        for rate in (1e-3, 3e-3)
        for rank in (4, 8)
    ]
    for point in grid:
        recipe = point.recipe.recipe
        assert recipe.optimizer.learning_rate == point.values["optimizer.learning_rate"]
        assert recipe.adapter.rank == point.values["adapter.rank"]
        assert recipe.train.length.amount == 7


def test_commas_in_brackets_belong_to_a_list():
    few, all_linear = points("adapter.target_modules=[q_proj,v_proj],[all-linear]")
    assert few.recipe.recipe.adapter.target_modules == ["q_proj", "v_proj"]
    assert all_linear.recipe.recipe.adapter.target_modules == ["all-linear"]
    assert few.name != all_linear.name


def test_a_list_without_brackets_is_refused_with_the_way_to_write_it():
    with pytest.raises(UserError) as caught:
        points("adapter.target_modules=q_proj,v_proj")
    assert caught.value.code == 2
    assert "=[a,b],[c]" in caught.value.fix and "q_proj" in caught.value.where


def test_a_mistake_in_one_combination_names_its_run():
    with pytest.raises(UserError) as caught:
        points(RATES, "adapter.rank=4,many")
    assert caught.value.code == 2 and "adapter.rank=many" in caught.value.where


def test_names_differ_where_settings_do():
    texts = ["[q_proj,v_proj]", "[q_proj, k_proj]", "[q_proj/v_proj]"]
    named = points("adapter.target_modules=" + ",".join(texts))
    assert len({point.name for point in named}) == 3
    assert points(RATES)[0].name == "learning_rate-1e-3"


def test_random_draws_different_combinations_and_more_begin_with_the_same():
    axes = ("optimizer.learning_rate=1e-3,2e-3,3e-3,4e-3", "adapter.rank=2,4,8,16")
    five = points(*axes, search="random", runs=5)
    assert len({point.name for point in five}) == 5
    assert points(*axes, search="random", runs=9)[:5] == five
    assert points(*axes, search="random", runs=5, seed=1) != five


@pytest.mark.parametrize("overrides", [(), ("adapter.rank=4",), ("adapter.rank=",), (RANKS, RANKS)])
def test_what_compares_nothing_is_refused(overrides):
    with pytest.raises(UserError) as caught:
        points(*overrides)
    assert caught.value.code == 2 and caught.value.fix


def test_the_same_command_and_one_with_more_values_find_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def folder(*overrides, path=None):
        return sweep_folder("demo-chat-lora", points(*overrides), {}, path).path

    first = folder(RATES)
    assert first.parent == tmp_path / "runs"
    assert folder(RATES) == folder("optimizer.learning_rate=1e-2,1e-3") == first
    assert folder(RATES, "train.max_steps=7") != first
    assert folder(RANKS) != first
    with pytest.raises(UserError, match="another recipe or other settings"):
        folder(RANKS, path=first)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        folder(RANKS, path=tmp_path / "mine")


@pytest.mark.parametrize(
    ("steps", "runs", "rungs"),
    [(360, 9, [40, 120, 360]), (100, 12, [11, 33, 100]), (100, 2, [100]), (2, 27, [2])],
)
def test_rungs_by_hand(steps, runs, rungs):
    assert rungs_of(steps, runs) == rungs
