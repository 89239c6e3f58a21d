"""`--gpu all`: every card of the table, each with its own plan."""

import json
import re
import time

import pytest
from click.testing import CliRunner
from plan_help import machine

from bloomery.cli.plan import command
from bloomery.core.errors import UserError
from bloomery.hardware.specs import find_gpu, gpu_table
from bloomery.plan import compared_gpus
from bloomery.plan.compared_gpus import HEAD, compare_gpus, gpus_page
from bloomery.recipe.load import load_recipe


@pytest.fixture(scope="module")
def timed():
    """Of the whole table: the rows, and the processor seconds that they took."""
    loaded, here = load_recipe("go-coder-125m"), machine()
    began = time.process_time()
    return compare_gpus(loaded, here), time.process_time() - began


@pytest.fixture(scope="module")
def found(timed):
    return timed[0]


@pytest.fixture
def every_eighth(monkeypatch):
    """Where what is shown of a card is shown of each."""
    some = list(compared_gpus.devices())[::8]
    monkeypatch.setattr(compared_gpus, "devices", lambda: iter(some))


def test_every_card_with_its_own_memory_is_there(found):
    assert len(found) == sum(len(spec.memory_gib) for spec in gpu_table().gpu)
    assert sorted(card.memory_gib for card in found if card.name == "Instinct MI50") == [16, 32]


def test_the_fastest_comes_first_and_what_does_not_fit_last(every_eighth):
    big = ["model.hidden_size=2048", "model.num_heads=16", "model.num_layers=24"]
    big.append("parallel.stream=off")
    rows = compare_gpus(load_recipe("go-coder-125m", big), machine())
    fits = [card.fits for card in rows]
    assert fits == sorted(fits, reverse=True)
    assert True in fits
    assert False in fits
    rates = [card.rate[0] for card in rows if card.fits and card.rate]
    assert rates == sorted(rates, reverse=True)


def test_a_gpu_whose_weights_stream_is_marked(monkeypatch):
    both = [find_gpu("RTX 4060"), find_gpu("MI300X")]
    recipe = load_recipe(
        "go-coder-125m", ["model.hidden_size=2048", "model.num_heads=16", "model.num_layers=24"]
    )
    rows = compare_gpus(recipe, machine(), gpu_models=both, host_memory=64 * 2**30)
    assert {card.name: card.document()["stream"] for card in rows} == {
        "GeForce RTX 4060": "layers",
        "Instinct MI300X": "off",
    }
    lines = gpus_page(rows, recipe, gpus=1, nodes=1, source="x")
    assert [line[:8] for line in lines if "bf16*" in line] == ["RTX 4060"]
    assert any(line.startswith("* ") and "host" in line for line in lines)


def test_the_page_has_a_line_a_card(found):
    lines = gpus_page(found, load_recipe("go-coder-125m"), gpus=1, nodes=1, source="go-coder-125m")
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("RX 6700 XT ") for line in lines) == 1


def test_the_command_prints_it_and_its_json(tmp_path, monkeypatch, every_eighth):
    monkeypatch.chdir(tmp_path)
    plain = CliRunner().invoke(command, ["go-coder-125m", "--gpu", "all"], standalone_mode=False)
    assert plain.return_value == 0
    said = CliRunner().invoke(
        command, ["go-coder-125m", "--gpu", "all", "--json"], standalone_mode=False
    )
    rows = json.loads(said.stdout)
    assert {"gpu", "fits", "needs_gib", "tokens_per_second", "days", "energy_kwh"} <= set(rows[0])


def test_several_named_cards_stand_in_one_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "go-coder-125m",
        "--gpu",
        "4090",
        "--gpu",
        "rx 7900 xtx",
        "--gpu",
        "T4",
        "--gpu",
        "RTX 4090",
    ]
    # The fastest first: with dropout the Triton kernels serve one of them, and blockwise the others.
    shown = CliRunner().invoke(command, words, standalone_mode=False).stdout.splitlines()
    assert shown[0].startswith("go-coder-125m: fits 3 of 3 GPUs.")
    assert [line[:26].rstrip() for line in shown[3:6]] == ["RX 7900 XTX", "RTX 4090", "T4"]
    assert shown[-1] == 'next      bloomery plan go-coder-125m --gpu "Radeon RX 7900 XTX"'
    rows = json.loads(CliRunner().invoke(command, [*words, "--json"], standalone_mode=False).stdout)
    assert [row["gpu"] for row in rows] == ["Radeon RX 7900 XTX", "GeForce RTX 4090", "Tesla T4"]
    assert rows[0]["peaks"] == "estimated"


def test_processor_graphics_beside_cards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["go-coder-125m", "--gpu", "Strix Halo 64GB", "--gpu", "GTX 1060"]
    shown = CliRunner().invoke(command, words, standalone_mode=False).stdout.splitlines()
    assert shown[3].split()[:3] == ["Radeon", "8060S", "32"]
    assert shown[-1].endswith('--gpu "Radeon 8060S 64GB"')


def test_one_unknown_name_of_several_is_an_error():
    said = CliRunner().invoke(
        command, ["go-coder-125m", "--gpu", "4090", "--gpu", "M60"], standalone_mode=False
    )
    assert "unknown GPU: 'M60'" in str(said.exception)


def test_every_short_name_can_be_typed():
    for spec in gpu_table().gpu:
        if spec.memory_gib:
            size = f" {spec.memory_gib[-1]}GB" if len(spec.memory_gib) > 1 else ""
            assert find_gpu(spec.short_name + size).name == spec.name
            assert len(spec.short_name) <= 26


def test_the_whole_table_takes_less_than_two_seconds_of_a_processor(timed):
    assert timed[1] < 2


def test_every_card_at_once_is_not_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(
        command, ["go-coder-125m", "--gpu", "all", "--simulate"], standalone_mode=False
    )
    assert isinstance(said.exception, UserError)
    assert said.exception.code == 2


def test_several_of_each_are_asked_for_again(found):
    lines = gpus_page(found, load_recipe("go-coder-125m"), gpus=8, nodes=2, source="go-coder-125m")
    assert lines[-1].endswith('" --gpus 8 --nodes 2')


def test_a_recipe_that_is_wrong_everywhere_is_one_error():
    with pytest.raises(UserError, match="positions"):
        compare_gpus(load_recipe("go-coder-125m", ["data.sequence_length=2048"]), machine())


def test_thousands_of_years_keep_their_column(every_eighth):
    slow = load_recipe("go-coder-125m", ["train.max_tokens=900000B"])
    lines = gpus_page(compare_gpus(slow, machine()), slow, gpus=1, nodes=1, source="go-coder-125m")
    years = [line for line in lines if " years" in line]
    assert any(re.search(r" \d,\d00 years", line) for line in years)
    assert {line.index(" years") for line in years} == {len(HEAD) - 8 - len(" years")}
