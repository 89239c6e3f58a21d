"""The short lines of `bloomery plan`: what decides, and nothing that a user would miss in them."""

import pytest
from click.testing import CliRunner
from plan_help import gpu_machine, loaded, machine, reported

from bloomery.cli.plan import command
from bloomery.plan.page import page
from bloomery.plan.summary import summary
from bloomery.recipe.load import load_recipe


def lines_of(recipe, where, **sizes):
    report = reported(recipe, where, **sizes)
    return report, summary(report, where, source=recipe.name, commands=["plan", "train"])


def labels(lines):
    return [line[:10].strip() for line in lines[1:] if line[:10].strip()]


def test_a_run_that_fits_has_six_parts():
    report, lines = lines_of(load_recipe("qwen2.5-1.5b-lora"), gpu_machine("RTX 4090"))
    memory = report.plan.memory
    assert report.warnings == ()
    assert labels(lines) == ["GPU", "run", "batch", "time", "Estimated", "next"]
    assert lines[0].startswith(
        f"Fits: {memory.total / 2**30:.1f} of {memory.limit / 2**30:.1f} GiB "
        f"({memory.low / 2**30:.1f} to {memory.high / 2**30:.1f})."
    )
    text = "\n".join(lines)
    assert "sft with LoRA, rank " in text and "in bf16, learning rate " in text
    assert (
        lines[-1]
        .split("      ")[-1 if " -v" in lines[-1].split("      ")[-1] else -2]
        .endswith("-v")
    )
    assert len(lines) <= 12


@pytest.mark.parametrize(
    ("recipe", "where", "sizes"),
    [
        (load_recipe("go-coder-125m"), gpu_machine("RX 6700 XT"), {}),
        (load_recipe("go-coder-125m"), gpu_machine("MI250X"), {"gpus": 8, "nodes": 4}),
        (load_recipe("llama3.1-8b-lora"), gpu_machine("RTX 4070"), {}),
        (loaded(), machine(free_gib=0.1), {}),
    ],
)
def test_every_warning_of_the_long_page_is_in_the_short_one(recipe, where, sizes):
    report, lines = lines_of(recipe, where, **sizes)
    text = " ".join(" ".join(lines).split())
    for warning in report.warnings:
        assert " ".join(warning.split()) in text
    assert max(map(len, lines)) <= 100
    whole = page(report, where, source=recipe.name, commands=["plan", "train"])
    assert len(lines) < len(whole)
    # The commands that follow are the same, and one that prints the rest.
    next_of = [each[each.index("next      ") :] for each in ("\n".join(lines), "\n".join(whole))]
    commands = [line[10:].partition("      ")[0] for line in next_of[1].splitlines()]
    assert all(part in next_of[0] for part in commands)


def test_what_does_not_fit_has_its_parts_and_what_would_help():
    edits = ["model.hidden_size=1280", "model.num_heads=20", "model.num_layers=36"]
    recipe = load_recipe("go-coder-125m", [*edits, "parallel.stream=off"])
    report, lines = lines_of(recipe, gpu_machine("RX 6600"))
    assert lines[0].startswith("Does not fit: ")
    assert {"memory", "suggested"} <= set(labels(lines))
    assert report.suggestions[0].edit in "\n".join(lines)


def test_several_devices_name_their_layout():
    recipe = load_recipe("go-coder-125m", ["train.tokens_per_step=524288"])
    report, lines = lines_of(recipe, gpu_machine("MI250X"), gpus=8, nodes=4)
    layout = report.plan.parallel.layout
    (line,) = [line for line in lines if line.startswith("layout")]
    assert layout.name in line and f"{layout.memory.total / 2**30:.1f} GiB each" in line


def test_verbose_prints_the_long_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["go-coder-125m", "--gpu", "RX 6700 XT"]
    outputs = [
        CliRunner().invoke(command, [*words, *more], standalone_mode=False).stdout
        for more in ([], ["-v"], ["--verbose"], ["--json"], ["--json", "-v"])
    ]
    assert "settings" not in outputs[0] and "settings" in outputs[1]
    assert outputs[1] == outputs[2] and outputs[3] == outputs[4]


def test_no_part_of_a_line_that_is_left_out_stays():
    """What joins the devices takes several lines of the long page, and none of the short one."""
    recipe = load_recipe("frontier-llama3.1-8b")
    where = gpu_machine("MI250X")
    report, lines = lines_of(recipe, where, gpus=8, nodes=64)
    whole = page(report, where, source=recipe.name, commands=["plan"])
    links = whole[[line[10:19] for line in whole].index("joined by") :]
    links = links[: next(at for at, line in enumerate(links) if not line.startswith(" " * 10))]
    assert len(links) > 2
    assert set(links).isdisjoint(lines)
