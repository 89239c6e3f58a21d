"""What `bloomery plan` prints: layout, width, exit codes, JSON."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from plan_help import gpu_machine, loaded, machine, planned, reported

from bloomery.cli.plan import command
from bloomery.hardware.machine import Access, read_machine
from bloomery.hardware.specs import find_gpu
from bloomery.plan.page import headline, page
from bloomery.plan.page_batch import model_line
from bloomery.plan.page_memory import bar
from bloomery.recipe.load import load_recipe
from bloomery.runs.devices import narrowed, planned_devices

MACHINES = Path(__file__).parents[1] / "machines"


def guide_page():
    where = gpu_machine("RX 6700 XT")
    report = reported(load_recipe("go-coder-125m"), where)
    return page(report, where, source="go-coder-125m", commands=["plan", "train"])


def test_a_row_of_the_settings_says_which_gpu_is_hidden():
    loaded_recipe = load_recipe("go-coder-125m")
    machine = read_machine(MACHINES / "rx-7900-xtx-behind-an-igpu.json")
    here, _ = planned_devices(loaded_recipe.recipe, machine, None)
    lines = page(reported(loaded_recipe, here), here, source="x", commands=["plan"])
    text = " ".join(" ".join(lines).split())
    assert "GPU 1 AMD Radeon RX 7900 XTX (gfx1100)" in text
    assert "GPU 0 (AMD Radeon Graphics, gfx1036) is integrated and hidden" in text
    # Named by the user, it hides none.
    here = narrowed(machine, "1")
    lines = page(reported(loaded_recipe, here), here, source="x", commands=["plan"])
    assert not [line for line in lines if "hidden" in line]


def test_the_headline_says_what_decides():
    first = guide_page()[0]
    assert first.startswith("Fits. About 5 days. Trains on 3.19 B tokens, not the claimed 10 B.")
    assert first.endswith("nothing was run")
    assert len(first) == 100


def test_the_page_has_its_parts_in_order():
    labels = [line[:10].strip() for line in guide_page() if line[:10].strip()]
    expected = [
        "GPU",
        "model",
        "batch",
        "memory",
        "sequence",
        "time",
        "disk",
        "saves",
        "claims",
        "warnings",
        "settings",
    ]
    assert labels == ["Fits. Abou", *expected, "Estimated", "next"]


def test_the_figures_of_the_card():
    text = " ".join(" ".join(guide_page()).split())
    plan = planned(load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT"))
    for part in (
        "1 x Radeon RX 6700 XT · gfx1031 · 11.98 GiB · 384 GB/s",
        "26.4 TFLOP/s fp16, no matrix units",
        "GPT-2 architecture, 124.2 M parameters, context 1,024",
        "16,384 tokens = 16 sequences x 1,024 (micro-batch 4, gradient accumulation 4)",
        "195,000 steps",
        f"{plan.memory.total / 2**30:.1f} of 11.0 GiB: fits (limit: 92% of the GPU,",
        "8,000 tokens/s (5,600 to 12,000 = 18 to 38% of peak) · 4.6 days (3.1 to 6.6)",
        "26 kWh at 230 W",
        "2.0 GiB dataset",
        "6.9 GiB checkpoints (1.4 each: 3 kept, the best, one being written)",
        "every 15 min and at each best evaluation · a kill loses at most 15 min",
        "no flash attention for gfx103x; Bloomery's own Triton kernels, not yet run on this card; "
        "PyTorch's fallback needs 2.8 GiB more",
        "MFU 26% of 26.4 TFLOP/s · FLOPs per token: 6 per weight + 12 L d T",
    ):
        assert part in text


def test_several_devices_are_laid_side_by_side():
    where = gpu_machine("MI250X")
    recipe = load_recipe("go-coder-125m", ["train.tokens_per_step=524288"])
    plan = reported(recipe, where, gpus=8, nodes=4)
    lines = page(plan, where, source="go-coder-125m", commands=["plan", "train"])
    assert "Several nodes: start the ranks with srun, torchrun or mpirun." in lines
    one_node = page(
        reported(recipe, where, gpus=8), where, source="go-coder-125m", commands=["plan", "train"]
    )
    assert not any(line.startswith("Several nodes") for line in one_node)
    text = "\n".join(lines)
    for part in (
        "4 nodes of 8 x Instinct MI250X",
        "joined by Infinity Fabric",
        "nodes by Slingshot",
        "replicate (32 copies)",
        "shard (32 shards)",
        "shard in nodes (4 copies x 8 shards)",
        "MFU",
    ):
        assert part in text
    assert sum("> " in line for line in lines) == 2
    assert "bloomery train" not in text
    assert max(map(len, lines)) <= 100


def test_a_step_of_few_sequences_says_how_many_are_padding():
    where = gpu_machine("MI250X")
    plan = reported(load_recipe("go-coder-125m"), where, gpus=8, nodes=4)
    text = "\n".join(page(plan, where, source="x", commands=[]))
    assert {"replicate", "shard"} <= {layout.name for layout in plan.plan.parallel.layouts}
    assert "16 sequences per step do not divide among 32 devices" in text
    assert "16 of 32 that they compute are padding" in text


def test_commands_that_follow_are_about_the_same_recipe_and_card(tmp_path, monkeypatch):
    words = ("go-coder-125m", "train.micro_batch_size=16", "--gpu", "RX 6600")
    said = run(tmp_path, monkeypatch, *words).stdout
    assert (
        'bloomery plan go-coder-125m train.micro_batch_size=16 train.max_tokens=10B --gpu "RX 6600"'
        in said
    )
    assert "bloomery train" not in said  # the card is not here


def test_the_best_product_is_the_second_denominator():
    where = gpu_machine("MI300X")
    text = "\n".join(
        page(reported(load_recipe("go-coder-125m"), where), where, source="x", commands=[])
    )
    assert "of 1,307.4 TFLOP/s" in text
    assert "of 708, the best matmul published" in text


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        (load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT")),
        (load_recipe("go-coder-125m"), machine()),
        (load_recipe("go-coder-tiny"), gpu_machine("MI300X")),  # rows of a million tokens
        (load_recipe("demo"), machine(flags=())),
        (loaded(), gpu_machine("MI300X")),
        (loaded(train={"epochs": 2, "activation_checkpointing": "full"}), machine(free_gib=0.1)),
    ],
)
def test_no_line_is_wider_than_the_page(recipe, where):
    lines = page(reported(recipe, where), where, source=recipe.name, commands=["train"])
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 45


def test_the_words_of_a_claim_and_its_verdict_stay_apart():
    where = gpu_machine("RX 6700 XT")
    recipe = load_recipe("everything")
    text = "\n".join(page(reported(recipe, where), where, source="everything", commands=[]))
    assert re.search(r"2 M to 4 M tokens {2,}unknown", text) and re.search(
        r"100,000 tokens/s {2,}\w", text
    )


def test_a_run_that_does_not_fit_says_so_first():
    plan = reported(loaded(), machine(free_gib=0.1))
    assert headline(plan).startswith("Does not fit: ")


def test_a_range_that_ends_above_the_limit_is_said_in_the_headline():
    """An out-of-memory error halves a micro-batch of several sequences; one sequence is the end of that."""
    report = reported(
        load_recipe("go-coder-125m", ["train.micro_batch_size=16"]), gpu_machine("RX 6700 XT")
    )
    memory = report.plan.memory
    assert memory.high < memory.limit and headline(report).startswith("Fits. ")
    tight = memory.model_copy(update={"limit": (memory.total + memory.high) / 2})
    several = report.plan.model_copy(update={"memory": tight})
    one = several.model_copy(
        update={"train": several.train.model_copy(update={"micro_batch_size": 1})}
    )
    ends = f"up to {memory.high / 2**30:.1f} of {tight.limit / 2**30:.1f} GiB. About"
    assert several.fits
    assert headline(report.model_copy(update={"plan": several})).startswith(f"Fits, barely: {ends}")
    assert headline(report.model_copy(update={"plan": one})).startswith(f"May not fit: {ends}")
    small = one.model_copy(update={"memory": tight.model_copy(update={"limit": memory.total - 1})})
    assert headline(report.model_copy(update={"plan": small})).startswith("Does not fit: ")
    nothing = one.model_copy(update={"memory": tight.model_copy(update={"limit": 46 * 2**20})})
    total = f"{memory.total / 2**30:.1f} GiB"
    assert f"{total} of 46 MiB. " in headline(report.model_copy(update={"plan": nothing}))


def test_the_model_line_has_the_context_of_the_model_not_the_sequence_length():
    plan = planned(load_recipe("qwen2.5-1.5b-lora"), gpu_machine("RTX 4090"))
    assert plan.data.sequence_length == 4096 and "context 32,768, from" in model_line(plan)


def test_a_long_headline_takes_two_lines():
    where = gpu_machine("RX 6600")
    wide = ["model.hidden_size=1280", "model.num_heads=20", "model.num_layers=36"]
    wide.append("parallel.stream=off")
    lines = page(
        reported(load_recipe("go-coder-125m", wide), where), where, source="x", commands=[]
    )
    assert lines[0].endswith("nothing was run")
    assert lines[1] == "Trains on 3.19 B tokens, not the claimed 10 B."
    assert max(map(len, lines)) <= 100


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
        "fits",
        "tokens",
        "steps",
        "epochs",
        "seconds",
        "energy_kwh",
        "cost",
        "step_seconds",
        "tokens_per_second",
        "memory",
        "disk",
        "save",
        "kill",
        "claims",
        "warnings",
        "suggestions",
        "choices",
        "step_parts",
        "mfu",
        "max_length",
        "mesh",
        "rollout",
        "scoring",
            "stream",
        "pictures",
        "notes",
    }
    assert (said["tokens"], said["steps"]) == (3_194_880_000, 195_000)
    assert set(said["seconds"]) == {"value", "low", "high", "from"}
    assert set(said["memory"]) == {"parts", "total", "limit"}
    assert sum(said["memory"]["parts"].values()) == pytest.approx(said["memory"]["total"]["value"])
    assert said["mfu"]["peak"] == pytest.approx(0.26, abs=0.01)
    assert said["mfu"]["achievable"] is None
    assert set(said["claims"][0]) == {"claim", "verdict", "reason"}
    assert set(said["choices"][0]) == {"key", "value", "reason"}


def test_a_run_that_does_not_fit_ends_with_one(tmp_path, monkeypatch):
    big = (
        "model.hidden_size=8192",
        "model.num_heads=64",
        "model.num_layers=48",
        "train.max_steps=10",
    )
    result = run(tmp_path, monkeypatch, "go-coder-125m", *big, "--gpu", "RX 6600", "--json")
    assert result.return_value == 1
    assert json.loads(result.stdout)["fits"] is False


def test_the_json_of_several_devices_names_every_layout(tmp_path, monkeypatch):
    result = run(tmp_path, monkeypatch, "go-coder-125m", "--gpu", "MI300X", "--gpus", "8", "--json")
    mesh = json.loads(result.stdout)["mesh"]
    assert (mesh["gpus"], mesh["nodes"]) == (8, 1)
    assert {layout["name"] for layout in mesh["layouts"]} == {"replicate", "shard", "pipeline"}
    assert [layout["name"] for layout in mesh["layouts"] if layout["chosen"]] == [mesh["chosen"]]


def test_of_several_gpus_the_page_names_the_one_that_trains():
    where = gpu_machine("RX 6700 XT")
    small = find_gpu("RX 6600")
    (card,) = where.accelerators
    several = where.model_copy(
        update={"accelerators": (small, card.model_copy(update={"index": 1}))}
    )

    def rows(machine):
        return "\n".join(
            page(reported(loaded(), machine), machine, source="small", commands=["train"])
        )

    assert "GPU 1 " in rows(several)
    assert "Radeon RX 6700 XT (gfx1031), device 1" in " ".join(rows(several).split())
    assert "GPU 0" not in rows(where)
    closed = where.host.model_copy(update={"access": Access(kfd="hung")})
    assert "/dev/kfd" in rows(where.model_copy(update={"host": closed}))


def test_no_line_is_wider_than_the_page_and_a_long_command_stays_one(tmp_path, monkeypatch):
    """A person copies both lines: the shell reads the words that were typed, and the edit that helps."""
    words = [
        "go-coder-125m",
        "train.micro_batch_size=16",
        "train.activation_checkpointing=none",
        'data.path=my long "folder"',
    ]
    for more in (
        ("--gpu", "RX 6600"),
        ("--gpu", "RX 6600", "train.tokens_per_step=65536"),
        ("--gpu", "all"),
    ):
        said = run(tmp_path, monkeypatch, *words, *more).stdout
        assert max(map(len, said.splitlines())) <= 100
        typed = {word for word in (*words, *more) if "=" in word}
        commands = said[said.index("\nnext ") + 10 :].replace(" \\\n", "").split("\n")
        assert all(
            typed <= set(shlex.split(command)) for command in commands if "bloomery" in command
        )


def test_an_estimate_has_two_digits_that_count(tmp_path, monkeypatch):
    """Steps of text that was only measured by its files, years, and the steps that fit into a time."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words\n" * 400_000)
    said = run(
        tmp_path,
        monkeypatch,
        "go-coder-tiny",
        "data.path=text",
        "data.glob=*.txt",
        "--gpu",
        "RX 6600",
    ).stdout
    assert re.search(r" about [1-9]\d?0* steps", said), said
    timed = run(
        tmp_path, monkeypatch, "go-coder-tiny", "train.max_time=8h", "--gpu", "RX 6600"
    ).stdout
    assert re.search(r"8\.0 h as set: about [1-9]\d?,?0{2,3} steps", timed)
    big = (
        "model.hidden_size=2048",
        "model.num_heads=16",
        "model.num_layers=24",
        "train.max_tokens=900B",
    )
    years = run(tmp_path, monkeypatch, "go-coder-125m", *big, "--gpu", "RX 6600").stdout
    assert "900 B tokens would take 5,700 years" in years and not re.search(
        r"\d\d\.\d years", years
    )
    exact = run(
        tmp_path, monkeypatch, "go-coder-125m", "train.max_steps=5213", "--gpu", "RX 6600"
    ).stdout
    assert "5,213 steps" in exact and "about 5,2" not in exact


def test_the_size_of_a_very_small_model_is_not_rounded_to_nothing():
    small = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "intermediate_size": 32}
    plan = planned(loaded(model=small), machine())
    assert " 0.0 M" not in model_line(plan)
    assert re.search(r"architecture, [1-9][0-9]{0,2},[0-9]{3} parameters", model_line(plan))
