"""Every statement of a guide that people come from has a command or a correction here, and the commands exist."""

import json
import re
import shlex

import click
import pytest
from click.testing import CliRunner
from words_of_docs import ROOT, check_command, check_key, quoted, words_of

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.hardware.detect import detect
from bloomery.hardware.profile import build_profile, with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.unsupported import refuse_recipe
from bloomery.plan.unsupported_layouts import refuse_several_devices
from bloomery.recipe.load import load_recipe
from bloomery.runs import lifecycle

UNSUPPORTED = ("parallel.tensor=2",)
GUIDES = {
    "go-coder-guide.md": (59, "go-coder-125m"),
    "worldmodel-rocm-spec.md": (64, "qwen2.5-3b-lora"),
    "frontier-workbook.md": (23, "go-coder-125m"),
    "rocm-overview.md": (20, "llama2-7b-lora-qa"),
    "forgather-examples.md": (36, "llama2-7b-full-24gb"),
}


def rows_of(page: str) -> dict[int, list[str]]:
    """Number -> the cells there, here, correction."""
    text = (ROOT / "docs/guides" / page).read_text(encoding="utf-8")
    rows = [cells_of(line) for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return {int(row[0]): row[1:] for row in rows}


def cells_of(line: str) -> list[str]:
    """The cells of a row; an escaped bar is part of its cell."""
    return [
        cell.strip().replace("\0", "|")
        for cell in line.replace(r"\|", "\0").strip().strip("|").split("|")
    ]


@pytest.mark.parametrize("page", GUIDES)
def test_every_statement_of_the_guide_has_a_row(page: str) -> None:
    assert sorted(rows_of(page)) == list(range(1, GUIDES[page][0] + 1))


@pytest.mark.parametrize("page", GUIDES)
def test_every_row_says_what_is_done_here(page: str) -> None:
    for number, cells in rows_of(page).items():
        try:
            check_row(page, *cells)
        except (AssertionError, UserError) as fault:
            fault.add_note(f"{page}, row {number}")
            raise


def check_row(page: str, there: str, here: str, correction: str) -> None:
    assert there
    assert quoted(here) or correction, "neither a command nor a correction"
    for text in quoted(here):
        if here.startswith("not yet"):
            check_missing(text, GUIDES[page][1])
        else:
            check(text, GUIDES[page][1])


def check_missing(text: str, recipe: str) -> None:
    """The product says so itself: there is no such verb, or the recipe is refused in a sentence."""
    if text.startswith("bloomery "):
        assert words_of(text)[0] not in cli.list_commands(click.Context(cli)), (
            f"{text} has come: give it its row"
        )
        return
    with pytest.raises(UserError, match="a measurement of one device"):
        asked = load_recipe(recipe, shlex.split(text)).recipe
        refuse_recipe(asked)
        refuse_several_devices(asked)


def check(text: str, recipe: str) -> None:
    if text.startswith("bloomery "):
        check_command(words_of(text))
    elif "=" in text:
        load_recipe(recipe, shlex.split(text))
    elif "." in text:
        check_key(text)
    else:
        assert re.match(r"(make \w+|--?\w+|[a-z_.]+)$", text), (
            f"{text!r} is neither a command nor a recipe key"
        )


@pytest.mark.parametrize("edits", UNSUPPORTED)
def test_what_no_page_claims_is_refused_before_a_download(edits, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(lifecycle, "fetch", None)
    with pytest.raises(UserError, match=r"not supported (yet|in this version)") as refused:
        lifecycle.start(load_recipe("qwen2.5-1.5b-lora", [edits]), run_dir=tmp_path / "run")
    assert edits.partition("=")[0] in str(refused.value) and "parallel.shard" in refused.value.fix


@pytest.mark.parametrize("page", ["README.md", "docs/llms.txt", "docs/reference/glossary.md"])
def test_pages_that_list_what_is_not_supported_list_all_of_it(page) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").lower()
    said = ("not supported yet", "tensor parallelism")
    passages = [part for part in re.split(r"\n[\n|]", text) if any(words in part for words in said)]
    assert any("tensor" in part for part in passages)


def test_precisions_that_the_page_names_are_the_ones_chosen() -> None:
    _, _, correction = rows_of("worldmodel-rocm-spec.md")[15]
    assert "`auto` chooses float32" in correction
    here = detect()
    chosen = {
        gpu: build_profile(with_gpu(here, find_gpu(gpu))).dtype.value
        for gpu in ("MI50 32GB", "MI250X")
    }
    assert chosen == {"MI50 32GB": "float32", "MI250X": "bfloat16"}


def test_the_plan_of_the_frontier_workbook_is_the_one_on_its_page(tmp_path):
    page = (ROOT / "docs/guides/frontier-workbook.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "frontier.yaml").write_text(recipe)
    words = [
        "plan",
        str(tmp_path / "frontier.yaml"),
        "--gpu",
        "MI250X",
        "--gpus",
        "8",
        "--nodes",
        "64",
        "--json",
    ]
    told = CliRunner().invoke(cli, words)
    plan = json.loads(told.stdout)
    assert told.exit_code == 0 and plan["fits"] and plan["steps"] == 59_605
    assert plan["tokens"] == pytest.approx(1e12, rel=1e-4)
    days = {name: plan["seconds"][name] / 86_400 for name in ("low", "value", "high")}
    assert days["low"] < 65 < days["high"] and f"{days['value']:.1f} days" in page
    assert f"{plan['memory']['total']['value']:.1f} of" in page
    assert [claim["verdict"] for claim in plan["claims"]] == ["ok", "ok"]


ALL_WEIGHTS = (
    "adapter.kind=none quantize.kind=none train.precision=bfloat16-pure optimizer.kind=adafactor"
)
FIGURES = [
    ("worldmodel-rocm-spec.md", 'qwen2.5-3b-lora --gpu "MI50 32GB"', "20.4"),
    ("go-coder-guide.md", 'go-coder-125m --gpu "RX 6700 XT"', "3.19 10 610,352 20"),
    ("rocm-overview.md", "llama2-7b-lora-qa --gpu MI300X -v", "16.8 6.74 0.25%"),
    ("rocm-overview.md", "llama2-7b-lora-qa adapter.kind=none --gpu MI300X", "50.2 25.1"),
    ("rocm-overview.md", "llama2-70b-lora-8gpu --gpu MI300X -v", "163.6 176.6"),
    ("forgather-examples.md", 'llama2-7b-full-24gb --gpu "RX 7900 XTX" -v', "12.6 19.0 22.1"),
    ("forgather-examples.md", 'llama2-7b-lora --gpu "RTX 4090" --gpus 2 -v', "7,100 5,300 2,900"),
    ("forgather-examples.md", 'llama2-7b-pipeline-2gpu --gpu "RTX 4090"', "16.2 22.1 3,800"),
    (
        "forgather-examples.md",
        "llama2-7b-pipeline-2gpu parallel.pipeline=1 parallel.shard=2"
        ' optimizer.stochastic_rounding=false --gpu "RTX 4090" --gpus 2',
        "4,000 20.1",
    ),
    (
        "forgather-examples.md",
        'llama2-7b-pipeline-2gpu optimizer.kind=adamw optimizer.state_dtype=int8 --gpu "RTX 4090"',
        "22.9",
    ),
    ("forgather-examples.md", 'llama2-30b-pipeline-4gpu --gpu "RTX 4090"', "9.2 22.1"),
    (
        "forgather-examples.md",
        f'llama2-30b-pipeline-4gpu {ALL_WEIGHTS} --gpu "RTX 4090"',
        "37.1",
    ),
    (
        "forgather-examples.md",
        'llama2-30b-pipeline-4gpu quantize.kind=none --gpu "RTX 4090"',
        "20.7",
    ),
    (
        "forgather-examples.md",
        f'llama2-30b-pipeline-6gpu-long {ALL_WEIGHTS} --gpu "RTX 4090"',
        "33.9",
    ),
    ("forgather-examples.md", 'llama2-30b-pipeline-6gpu-long --gpu "RTX 4090" -v', "14.4 15,104"),
]


@pytest.mark.parametrize(
    ("page", "words", "figures"), FIGURES, ids=[words for _, words, _ in FIGURES]
)
def test_figures_of_a_guide_are_those_of_the_plan(page, words, figures) -> None:
    text = (ROOT / "docs/guides" / page).read_text(encoding="utf-8")
    assert f"`bloomery plan {words}`" in text
    told = CliRunner().invoke(cli, ["plan", *shlex.split(words)])
    assert told.exit_code == 0, told.output
    for figure in figures.split():
        found = re.compile(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)")
        assert found.search(text) and found.search(told.output), figure
