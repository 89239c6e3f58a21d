"""What the pages show of `bloomery plan` is what it prints today."""

import re
import sys

import pytest
from words_of_docs import ROOT

sys.path.append(str(ROOT / "scripts"))

import plan_pages

PAGES = [path.relative_to(ROOT).as_posix() for path in plan_pages.pages()]


def test_the_pages_that_people_buy_by_show_real_output() -> None:
    assert {
        "docs/explanation/planner.md",
        "docs/how-to/plan-a-gpu.md",
        "docs/how-to/amd-mi50.md",
    } <= set(PAGES)


# docs/explanation/memory.md simulates steps for its figures, which takes longer than all other pages together;
# docs/how-to/choose-a-method.md plans four dozen runs.
LONG = ("docs/explanation/memory.md", "docs/how-to/choose-a-method.md")
SHOWN = [pytest.param(page, marks=pytest.mark.soak) if page in LONG else page for page in PAGES]


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_shows_what_is_printed_today(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert plan_pages.refreshed(text) == text, "run scripts/plan_pages.py"


@pytest.mark.parametrize("picture", plan_pages.pictures(), ids=lambda path: path.name)
def test_a_picture_shows_what_is_printed_today(picture) -> None:
    text = picture.read_text(encoding="utf-8")
    assert plan_pages.drawn(text) == text, "run scripts/plan_pages.py"


def test_three_dots_leave_out_what_follows_the_figures() -> None:
    words = 'bloomery plan go-coder-125m --gpu "RX 6700 XT" -v'
    text = f"```\n$ {words}\nold\n...\n```"
    short, whole = plan_pages.refreshed(text), plan_pages.refreshed(f"```\n$ {words}\nold\n```")
    assert "claims " in whole
    assert "claims " not in short
    assert "disk " in short
    assert plan_pages.refreshed(short) == short


def test_the_attention_backend_of_each_gpu_is_the_plans() -> None:
    """The table of docs/how-to/attention.md; GiB that a fallback would need depend on the recipe and are left out."""
    page = (ROOT / "docs/how-to/attention.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|`]+) \| [^|`]+ \| `(\w+)` \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) >= 12
    for gpu, backend, reason in rows:
        plan = plan_pages._planned("qwen2.5-1.5b-lora", gpu, [])
        why = next(choice.reason for choice in plan.choices if choice.key == "train.attention")
        assert (gpu, plan.model.attention, why.partition("; PyTorch's fallback")[0]) == (
            gpu,
            backend,
            reason,
        )
