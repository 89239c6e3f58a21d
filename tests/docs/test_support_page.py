"""The support matrix is current, and its reasons are those that a plan gives."""

import sys

import pytest
from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import support_page

from bloomery.core.errors import UserError
from bloomery.facts.objectives import OBJECTIVES
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.plan.support_matrix import ALL_AXES, FEATURES, refuse_unsupported
from bloomery.recipe.load import load_recipe


def rows() -> dict[str, list[str]]:
    """Cells by the first word of a row, without marks of code."""
    lines = support_page.PAGE.read_text(encoding="utf-8").split("\n## ")[0].splitlines()
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return {first.replace("`", ""): cells for first, *cells in table[1:]}


def test_the_page_is_current() -> None:
    assert support_page.PAGE.read_text(encoding="utf-8") == support_page.page(), (
        "run python scripts/support_page.py"
    )
    assert [name.replace(",", "") for name in rows()] == [
        one.name.replace(",", "") for one in FEATURES
    ]


EDITS = {
    "adapter dora": ("adapter={kind: dora}",),
    "adapter pissa": ("adapter={kind: lora, init: pissa}",),
    "optimizer.fused_backward": ("optimizer.kind=adafactor", "optimizer.fused_backward=true"),
    "train.offload_activations": ("train.offload_activations=true",),
    "objective sft": (),
    "optimizer muon": ("optimizer.kind=muon",),
}


@pytest.mark.parametrize("feature", EDITS)
def test_a_cell_says_what_a_plan_says(feature) -> None:
    recipe = load_recipe("llama2-7b-lora-qa-tiny", EDITS[feature]).recipe
    for axis, cell in zip(ALL_AXES, rows()[feature], strict=False):
        sizes = dict.fromkeys(ALL_AXES, 1) | {axis: 2}
        if cell.startswith(("tested", "not tested")):
            refuse_unsupported(recipe, **sizes)
            continue
        with pytest.raises(UserError, match="not supported over 2 devices") as refused:
            refuse_unsupported(recipe, **sizes)
        assert f"{feature}: {cell}" in refused.value.problem


CHOICES = {
    "optimizer": [(f"optimizer.kind={kind}",) for kind in OPTIMIZERS],
    "objective": [
        (f"objective={{kind: {spec.kind}{', teacher: gpt2' * (spec.extra_forwards > 0)}}}",)
        for spec in OBJECTIVES.values()
    ],
}


@pytest.mark.parametrize(
    ("name", "edits"), [(name, edits) for name, all_ in CHOICES.items() for edits in all_]
)
def test_every_optimizer_and_objective_has_one_row(name, edits) -> None:
    """One without a row would train over several devices untested."""
    recipe = load_recipe("llama2-7b-lora-qa-tiny", [*edits]).recipe
    rows = [row for row in FEATURES if row.name.startswith(f"{name} ") and row.is_used_by(recipe)]
    assert len(rows) == 1
