"""A recipe as a form and as YAML: each change against the recipe that the text loads to."""

import json
import re
import resource
import signal
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.recipe.aliases import known_keys
from bloomery.recipe.load import dump_recipe, load_recipe, load_text
from bloomery.studio.recipe_form import (
    planned,
    sections_of,
    value_text,
    with_edits,
    with_key,
    without_defaults,
    write_recipe,
)

TEXT = """# mine
extends: go-coder-tiny  # the base
adapter: lora
train: {epochs: 2}
"""

pytestmark = pytest.mark.usefixtures("empty_folder")


def recipe_of(text: str):
    return load_text(text, name="mine", source="recipe").recipe


def test_a_text_extends_a_packaged_recipe_as_a_file_does(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TEXT)
    assert recipe_of(TEXT) == load_recipe(str(tmp_path / "mine.yaml")).recipe
    with pytest.raises(UserError, match="there is no recipe 'absent'"):
        recipe_of("extends: absent")
    (tmp_path / "circle.yaml").write_text("extends: mine.yaml\n")
    (tmp_path / "mine.yaml").write_text("extends: circle.yaml\n")
    with pytest.raises(UserError, match="circle"):
        recipe_of("extends: circle.yaml")


def test_a_field_changes_its_key_and_nothing_else() -> None:
    text = with_key(TEXT, ("train", "micro_batch_size"), "4")
    text = with_key(text, ("optimizer", "betas"), "[0.8, 0.9]")
    before = recipe_of(TEXT)
    after = recipe_of(text)
    assert after.train.micro_batch_size == 4
    assert after.optimizer.betas == (0.8, 0.9)
    assert after.train.epochs == before.train.epochs == 2
    assert after.adapter == before.adapter
    assert "# mine" in text and "# the base" in text

    text = with_key(text, ("train", "micro_batch_size"), "")
    assert recipe_of(with_key(text, ("optimizer", "betas"), "")) == before


def test_a_short_section_becomes_a_section_with_its_kind() -> None:
    recipe = recipe_of(with_key(TEXT, ("adapter", "rank"), "8"))
    assert (recipe.adapter.kind, recipe.adapter.rank) == ("lora", 8)


def test_another_kind_drops_the_keys_of_the_one_before() -> None:
    text = with_key(TEXT, ("adapter", "rank"), "8")
    assert recipe_of(with_key(text, ("adapter", "kind"), "none")).adapter.kind == "none"


def test_a_suggestion_of_a_plan_is_an_edit() -> None:
    recipe = recipe_of(
        with_edits(TEXT, {"train.micro_batch_size": "1", "train.activation_checkpointing": "full"})
    )
    assert recipe.train.micro_batch_size == 1
    assert (
        recipe.train.activation_checkpointing
        == recipe_of(
            "extends: go-coder-tiny\ntrain: {activation_checkpointing: full}"
        ).train.activation_checkpointing
    )


def test_the_form_has_the_keys_of_the_schema_with_their_defaults() -> None:
    result = planned(TEXT, "mine")
    fields = {
        field.key: field for section in sections_of(result.values) for field in section.fields
    }
    keys = {".".join(map(str, key)) for key in known_keys()}
    assert set(fields) <= keys
    for key in (
        "model.from",
        "data.path",
        "train.epochs",
        "adapter.rank",
        "optimizer.learning_rate",
    ):
        assert fields[key].description
    assert set(fields["adapter.kind"].options) == {"none", "lora", "dora", "peft"}
    assert fields["checkpoint.keep"].default == "3"
    # The default of every word-only key is one of its words.
    for field in fields.values():
        assert not field.options or not field.default or field.default in field.options, field


@pytest.mark.parametrize(
    "value", [1, 3.0, 1e20, 0.5, 1e-05, True, None, "auto", "10B tokens", ["a", "b"], {"a": 1}, "*.go", ""]
)
def test_a_value_as_text_is_read_back(value: object) -> None:
    if value == "":
        assert value_text(value) == "''"
        return
    recipe_text = with_key("{}", ("a", "b"), value_text(value))
    from ruamel.yaml import YAML

    assert YAML(typ="safe", pure=True).load(recipe_text) == {"a": {"b": value}}


def test_a_whole_number_has_no_fraction() -> None:
    assert [value_text(value) for value in (3.0, 1.5, -2.0, 0.0)] == ["3", "1.5", "-2", "0"]


def test_the_usual_batch_of_packed_rows_is_in_rows() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    Path("chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 40)
    text = "model: {from: HuggingFaceTB/SmolLM2-135M-Instruct}\nobjective: sft\nadapter: lora\n"
    hints = [
        planned(text + data, "mine").usual["train.batch_size"]
        for data in ("data: {path: chats.jsonl}\n", "data: {path: chats.jsonl, packing: false}\n")
    ]
    assert hints == ["usual: 16 to 64 rows; short rows share a sequence", "usual: 16 to 64"]


def test_a_plan_has_lines_and_mistakes_have_their_key() -> None:
    good = planned(TEXT, "mine")
    assert good.problem == ""
    assert good.origins["train.epochs"] == "recipe line 4"
    assert any(line.startswith("memory") for line in good.lines)
    ((key, words),) = good.blockers
    assert key == "data.path" and re.match("no such file or folder: .*/corpus", words)
    assert not good.is_startable
    demo = planned("extends: demo\n", "mine")
    assert demo.notes == () and demo.is_startable
    bad = planned(TEXT.replace("epochs: 2", "epochs: 2, micro_batch_size: many, foo: 1"), "mine")
    assert bad.problem_at("train.micro_batch_size") == "must be auto or a whole number, not 'many'"
    assert bad.problem_at("train.foo") == "no such key"
    assert bad.problem_at("train.epochs") == ""
    unplanned = planned("extends: go-coder-tiny\ntrain: {micro_batch_size: 5}\n", "mine")
    assert unplanned.problem_at("train.micro_batch_size").startswith("micro-batch size does not")
    assert unplanned.problem_at("train.epochs") == ""


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1",
        "",
        "\0",
        "a: &a [*a]",
        "x: !!python/object/apply:os.system ['touch hacked']",
        "a: &a [x, x]\n" + "\n".join(f"b{n}: &b{n} [*a, *a, *a]" for n in range(30)),
        "{" * 300,
        "extends: /etc/passwd",
        "extends: ../../../../etc",
        "model: {from: '<script>alert(1)</script>'}",
        f"model: {{from: {'a' * 300}}}",  # too long for a file
        f"extends: go-coder-tiny\ndata: {{validation: {'a' * 300}}}",
        "extends: go-coder-tiny\ntrain: {max_tokens: 0.0000001}",
    ],
)
def test_a_recipe_that_does_not_parse_is_a_problem_in_words(text: str, tmp_path: Path) -> None:
    result = planned(text, "mine")
    assert result.problem
    assert not (tmp_path / "hacked").exists()


def test_values_with_commas_are_a_list() -> None:
    assert recipe_of(with_key(TEXT, ("optimizer", "betas"), "0.8, 0.9")).optimizer.betas == (
        0.8,
        0.9,
    )
    text = with_key(TEXT, ("adapter", "target_modules"), "q_proj, v_proj")
    assert recipe_of(text).adapter.target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "text, value",
    [
        ("a: [", "1"),
        ("{}", "["),
        ("{}", "]"),
        ("{}", "a: b: c"),
        ("{}", "*a"),
        ("- a", "1"),
        ("train: 3", "1"),
        ("a: 2026-99-99", "1"),
        ("train: [1, 2]", "1"),
        ("train: &t\n  <<: *t\n", "1"),
        ("x: !!python/object/apply:os.system ['touch hacked']", "1"),
        ("{" * 300, "1"),
    ],
)
def test_an_edit_of_text_that_cannot_be_read_changes_nothing(text: str, value: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        with_key(text, ("train", "epochs"), value)


def test_a_full_disk_leaves_no_half_recipe() -> None:
    text = "extends: go-coder-tiny\n" + "# a comment\n" * 1000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write the recipe: File too large") as refusal:
            write_recipe(text, "mine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert refusal.value.where == "mine.yaml"
    assert refusal.value.fix == "raise the limit: ulimit -f unlimited"
    assert list(Path().iterdir()) == []


def test_a_recipe_next_to_a_file_that_is_no_text_and_one_that_no_file_holds() -> None:
    Path("mine.yaml").write_bytes(b"\xff\xfe")
    assert write_recipe(TEXT, "mine") == Path("mine-2.yaml")
    with pytest.raises(UserError, match="no file holds the character"):
        write_recipe("a: '\ud800'", "other")
    assert not Path("other.yaml").exists()


def test_a_recipe_file_is_written_once_and_overwrites_none(tmp_path: Path) -> None:
    assert write_recipe(TEXT, "mine") == write_recipe(TEXT, "mine") == Path("mine.yaml")
    assert write_recipe("model: {}\n", "mine") == Path("mine-2.yaml")
    assert Path("mine.yaml").read_text() == TEXT


def test_a_new_run_from_a_run_has_the_keys_that_were_set(tmp_path: Path) -> None:
    """The recipe of a run is complete; its comments say which keys nobody set."""
    text = (
        "extends: qwen2.5-1.5b-lora-tiny\nadapter: {kind: lora, rank: 4}\ntrain: {max_steps: 7}\n"
    )
    loaded = load_text(text, name="mine", source="recipe")
    complete = dump_recipe(loaded)
    shorter = without_defaults(complete, "mine-20261201")  # a run's folder has a name of its own
    assert load_text(shorter, name="mine", source="recipe").recipe == loaded.recipe
    assert "max_steps: 7" in shorter and "# default" not in shorter
    assert len(shorter.splitlines()) < len(complete.splitlines()) / 2

    # A default that has changed since is no default of that run.
    older = complete.replace('"12.5%"  # default', '"500 steps"  # default').replace(
        "seed: 0  # default", "seed: 1  # default"
    )
    assert older != complete and without_defaults(older, "mine") == older
    assert without_defaults("not: [a recipe", "mine") == "not: [a recipe"


def test_every_key_has_a_label_in_words_of_its_own() -> None:
    from bloomery.studio.settings_form import LABELS, WORDS, label_of_key

    for section in sections_of({}):
        labels = [label_of_key(field.path) for field in section.fields]
        assert len(set(labels)) == len(labels), section.name
        assert not any("_" in label or label[:1].islower() for label in labels)
    assert label_of_key(("train", "micro_batch_size")) == "Micro-batch size"
    assert label_of_key(("model", "num_kv_heads")) == "Number of key-value heads"
    names = " ".join(map(".".join, known_keys()))
    for name in (*LABELS, *WORDS):
        assert name in names, f"no key has {name}"
