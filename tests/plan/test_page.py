"""What `bloomery plan` prints: layout, width, exit codes, JSON."""

import json

import pytest
from click.testing import CliRunner
from plan_help import gpu_machine, loaded, machine

from bloomery.cli.plan import command
from bloomery.plan.page import bar, headline, page
from bloomery.plan.resolve import resolve
from bloomery.recipe.load import load_recipe


def guide_page():
    where = gpu_machine("RX 6700 XT")
    return page(resolve(load_recipe("go-coder-125m"), where), where, source="go-coder-125m", verbs=["plan", "train"])


def test_the_headline_says_what_decides():
    first = guide_page()[0]
    assert first.startswith("It fits and takes about 6 days. It trains on 3.19 billion tokens, not 10.")
    assert first.endswith("nothing was run")
    assert len(first) == 100


def test_the_page_has_its_parts_in_order():
    labels = [line[:10].strip() for line in guide_page() if line[:10].strip()]
    assert labels[:11] == [
        "It fits an", "gpu", "model", "step", "memory", "time", "disk", "claims", "of the", "recipe", "beware",
    ]  # fmt: skip


def test_the_figures_of_the_card():
    text = "\n".join(guide_page())
    for part in (
        "Radeon RX 6700 XT · gfx1031 · 11.98 GiB · 384 GB/s · 26.4 TFLOP/s fp16, no matrix units",
        "GPT-2 shape, 124.2 M parameters, context 1,024",
        "16 x 1,024 = 16,384 tokens: micro-batch 16, no accumulation · 195,000 steps",
        "8.8 of 11.0 GiB: fits (limit: 92% of the card,",
        "6,200 tokens/s (4,600 to 9,300 = 15 to 30% of peak) · 6.0 days (4.0 to 8.0)",
        "33 kWh at 230 W",
        "2.0 GiB of shards · 6.9 GiB of checkpoints (1.4 each: 3 kept, the best, one being written)",
        "no fused kernel for gfx103x; PyTorch's fallback would add 11.3 GiB",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        (load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT")),
        (load_recipe("go-coder-125m"), machine()),
        (load_recipe("demo"), machine(flags=())),
        (loaded(), gpu_machine("MI300X")),
        (loaded(train={"length": "2 epochs", "activation_checkpointing": "full"}), machine(free_gib=0.1)),
    ],
)
def test_no_line_is_wider_than_the_page(recipe, where):
    lines = page(resolve(recipe, where), where, source=recipe.name, verbs=["train"])
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 40


def test_a_run_that_does_not_fit_says_so_first():
    plan = resolve(loaded(), machine(free_gib=0.1))
    assert headline(plan).startswith("It does not fit: ")


def test_bars_are_drawn_in_eighths():
    assert bar(1.0, 1.0) == "█" * 16
    assert bar(0.53, 1.0) == "█" * 8 + "▌"
    assert bar(0.0, 1.0) == ""


def run(tmp_path, monkeypatch, *words):
    monkeypatch.chdir(tmp_path)
    return CliRunner().invoke(command, list(words), standalone_mode=False)


def test_json_is_the_contract(tmp_path, monkeypatch):
    result = run(tmp_path, monkeypatch, "go-coder-125m", "--gpu", "RX 6700 XT", "--json")
    said = json.loads(result.stdout)
    assert result.return_value == 0
    assert set(said) == {
        "fits", "tokens", "steps", "seconds", "step_seconds", "tokens_per_second", "memory", "disk", "energy_kwh",
        "claims", "contradictions", "remedies", "choices",
    }  # fmt: skip
    assert (said["tokens"], said["steps"]) == (3_194_880_000, 195_000)
    assert set(said["seconds"]) == {"value", "low", "high", "from"}
    assert set(said["memory"]) == {"parts", "total", "limit"}
    assert said["memory"]["parts"]["activations"] == pytest.approx(4.78, abs=0.02)
    assert set(said["claims"][0]) == {"claim", "verdict", "because"}
    assert set(said["choices"][0]) == {"key", "value", "because"}


def test_a_run_that_does_not_fit_ends_with_one(tmp_path, monkeypatch):
    big = ("model.hidden_size=8192", "model.num_heads=64", "model.num_layers=48", "train.length=10 steps")
    result = run(tmp_path, monkeypatch, "go-coder-125m", *big, "--gpu", "RX 6600", "--json")
    assert result.return_value == 1
    assert json.loads(result.stdout)["fits"] is False
