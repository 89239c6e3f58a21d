"""Whatever the pages and messages tell people to type can be typed; every verb has a page."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from words_of_docs import ROOT, check_command, check_key, commands_in, quoted, words_of

from bloomery.cli import COMMANDS, cli
from bloomery.core.errors import UserError
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Recipe
from bloomery.runs.resume_plan import ALLOWED, refuse_overrides

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.yaml")),
    ROOT / "pyproject.toml",
]
SECTIONS = "|".join(Recipe.model_fields)
FIGURES = {"eval.loss"}  # of a run, by which a sweep ranks: no key
FILES = {path.name for path in (ROOT / "src").rglob("*") if path.is_file()}
# Names that the code puts together from pieces, that other programs write, and that stand for a user's own file.
WRITTEN_IN_PIECES = {
    "reference-train.bin",
    "reference-validation.bin",
    "set-up.log",
    "train-documents.bin",
    "trained.safetensors",
    "train-first.bin",
    "train-kto-labels.bin",
    "train-loss-mask-00000.bin",
    "value_head.safetensors",
    "validation-00000.bin",
}
OF_OTHERS = {"index.html", "mlflow.db", "convert_llama.py", "sftTrainer.py"}
OF_USERS = {
    "held-out.jsonl",
    "test.jsonl",
    "validation.jsonl",
    "a.jsonl",
    "chats-train.jsonl",
    "dev-team.jsonl",
    "test.txt",
    "train.txt",
}


def test_the_commands_on_a_page_exist() -> None:
    pages = {command: page for page in PAGES for command in commands_in(page.read_text())}
    for command, page in pages.items():
        try:
            check_command(words_of(command))
        except (AssertionError, UserError) as fault:
            fault.add_note(f"{page}: {command}")
            raise


def test_pages_have_commands() -> None:
    assert len({command for page in PAGES for command in commands_in(page.read_text())}) > 300


def test_a_recipe_key_on_a_page_exists() -> None:
    texts = {text for page in PAGES for text in quoted(page.read_text())}
    for key in sorted(
        text for text in texts if re.fullmatch(rf"(?:{SECTIONS})(?:\.[a-z_]+)+=?", text)
    ):
        # train.py is no key
        if key not in FILES | FIGURES and not key.endswith((".json", ".safetensors", ".py", ".sh")):
            check_key(key.rstrip("="))


def test_every_verb_has_a_page() -> None:
    index = (ROOT / "docs/index.md").read_text()
    named = {words_of(text)[0] for text in quoted(index) if text.startswith("bloomery ")}
    assert {verb for verb in COMMANDS if cli.get_command(click.Context(cli), verb)} <= named
    for link in re.findall(r"\]\(([\w./-]+\.md)\)", index):
        assert (ROOT / "docs" / link).is_file(), link


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"
        for path in re.findall(r"`((?:tests|src|scripts|benchmarks)/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page}: {path}"


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown's toc makes them, and those that it writes itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | {
        *re.findall(r'<a id="([^"]+)">', text)
    }


def test_links_to_headings_lead_somewhere() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            target = (page.parent / link if link else page).resolve()
            assert target.suffix != ".md" or anchor in anchors_of(target), (
                f"{page}: {link}#{anchor}"
            )


def test_messages_name_verbs_that_exist() -> None:
    for source in SOURCES:
        for verb in re.findall(r"`bloomery ([a-z]+)", source.read_text()):
            assert verb in COMMANDS, f"{source}: bloomery {verb}"


def test_a_file_that_a_page_names_exists_or_is_written() -> None:
    """A file of the repository, a name in the code, or one that a block of the same page shows."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    in_repository = {Path(line).name for line in tracked.splitlines()}
    sources = [
        path for path in (ROOT / "src").rglob("*.*") if path.suffix in (".py", ".toml", ".jinja")
    ]
    code = "\n".join(path.read_text() for path in sources)
    endings = "bin|db|gguf|html|ipynb|jsonl?|log|md|model|py|safetensors|sh|svg|toml|txt|ya?ml"
    missing = []
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE))
        for quote in quoted(text):
            match = re.fullmatch(rf"(?:[\w./<>~-]*/)?([\w.-]+\.(?:{endings}))", quote)
            known = in_repository | WRITTEN_IN_PIECES | OF_OTHERS | OF_USERS
            # what was tried and is gone
            if match is None or match[1] in known or page.parent.name == "decisions":
                continue
            if match[1] not in code and match[1] not in blocks:
                missing.append(f"{page.relative_to(ROOT)}: {quote}")
    assert missing == []


def yaml_blocks() -> Iterator[tuple[Path, str]]:
    """Each block of YAML. One that shows a section several times, as alternatives, gives one text per line."""
    for page in PAGES:
        for block in re.findall(
            r"^```yaml[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            sections = re.findall(r"^(\w+):", block, re.MULTILINE)
            alternatives = len(set(sections)) < len(sections)
            for text in block.splitlines() if alternatives else [block]:
                if re.search(r"^\w+:", text, re.MULTILINE):
                    yield page, text


def test_yaml_on_a_page_loads_as_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "page.yaml"
    failures = []
    for page, block in yaml_blocks():
        needed = {"model": "model: {preset: go-coder-small}", "data": "data: {path: my-folder}"}
        sections = set(re.findall(r"^(\w+):", block, re.MULTILINE))
        added = [
            text
            for name, text in needed.items()
            if name not in sections and "extends" not in sections
        ]
        recipe.write_text("\n".join([block, *added]) + "\n")
        try:
            load_recipe(str(recipe))
        except UserError as error:
            failures.append(f"{page.relative_to(ROOT)}: {error.problem}\n{block}")
    assert failures == []


def test_values_in_the_table_of_a_key_are_accepted() -> None:
    """A table whose first heading is a recipe key lists values of it: each loads."""
    needed = {
        "distill": ["objective.teacher=my-teacher"],
        "on_policy_distill": ["objective.teacher=my-teacher"],
        "objective.divergence": [
            "objective.kind=on_policy_distill",
            "objective.teacher=my-teacher",
        ],
        "objective.reference": ["objective.kind=grpo", "rewards=[{python: 'rewards.py:score'}]"],
    }
    refused = []
    tables = set()
    for page in PAGES:
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines[:-1]):
            heading = re.match(r"\| `([a-z_]+\.[a-z_.]+)` \|", line)
            if heading is None or not lines[number + 1].startswith("|--"):
                continue
            key = heading[1]
            tables.add(key)
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                for value in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                    try:
                        load_recipe(
                            "demo", [f"{key}={value}", *needed.get(value, []), *needed.get(key, [])]
                        )
                    except UserError as error:
                        refused.append(f"{page.relative_to(ROOT)}: {key}={value}: {error.problem}")
    assert refused == []
    assert len(tables) > 8


def test_the_help_of_resume_lists_what_can_be_changed() -> None:
    help_text = cli.get_command(click.Context(cli), "resume").help  # type: ignore[union-attr]  # the command exists
    with pytest.raises(UserError) as refused:
        refuse_overrides(["data.path=other"])
    for key in ALLOWED:
        if not key.startswith("train."):  # "the length"
            shown = f"{key}*" if key.endswith(".") else key
            assert shown in help_text
            assert shown in refused.value.fix
