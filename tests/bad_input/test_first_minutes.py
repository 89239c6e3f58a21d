"""What a person types in the first minutes, before the manual is read."""

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import assert_clear, here, write_workshop

from bloomery.cli import cli
from bloomery.cli.common import find_run
from bloomery.recipe.load import load_recipe
from models_for_tests import make_model

ROWS = [{"question": f"What is {at} and {at}?", "answer": f"It is {2 * at}."} for at in range(40)]


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    write_workshop(tmp_path)
    Path(tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestRunNames:
    @pytest.fixture(autouse=True)
    def runs(self, workshop):
        for name in ("demo-20261122-100000", "go-20261122-100000", "go-20261122-110000"):
            (workshop / "runs" / name).mkdir(parents=True)
            (workshop / "runs" / name / "recipe.yaml").write_text("")

    @pytest.mark.parametrize("typed", ["d", "demo", "demo-2026", "runs/demo", "runs/demo-20261122-100000/"])
    def test_the_beginning_of_a_name_is_enough(self, typed):
        assert find_run(typed).name == "demo-20261122-100000"

    def test_a_beginning_that_two_runs_share_names_both(self):
        assert_clear(here("resume", "go"), code=2, mentions=["2 runs begin with 'go'", "go-20261122-110000"])
        assert find_run("go-20261122-11").name == "go-20261122-110000"

    def test_a_whole_name_is_that_run_although_others_begin_with_it(self, workshop):
        (workshop / "runs" / "go").mkdir()
        (workshop / "runs" / "go" / "recipe.yaml").write_text("")
        assert find_run("go").name == "go"


def test_recipes_alone_lists_them():
    alone, listed = here("recipes"), here("recipes", "list")
    assert alone.code == 0 and alone.out == listed.out and "go-coder-125m" in alone.out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


class TestPipedPrompts:
    def asked(self, model, *words, piped=""):
        return CliRunner().invoke(cli, ["generate", str(model), "--max-tokens", "3", "--json", *words], input=piped)

    def test_a_pipe_is_one_prompt(self, model):
        result = self.asked(model, piped="def f(x):\n    return\n")
        assert json.loads(result.stdout)["results"][0]["prompt"] == "def f(x):\n    return"

    def test_a_flag_wins_over_a_pipe(self, model):
        assert json.loads(self.asked(model, "--prompt", "a", piped="b").stdout)["results"][0]["prompt"] == "a"

    @pytest.mark.parametrize(
        ("data", "said"), [(b"", "say either"), (b"\xff", "not UTF-8"), (b"a" * 5_000_000, "longer")]
    )
    def test_what_is_no_prompt_is_said(self, model, data, said, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert_clear(here("generate", str(model)), code=2, mentions=[said])


class TestOtherData:
    RECIPE = "extends: {parent}\n"

    def data_of(self, *overrides, recipe="dpo"):
        return load_recipe(recipe, overrides).recipe.data

    def test_another_path_is_read_by_its_own_rows(self, workshop):
        data = self.data_of("data.path=qa.jsonl", recipe="llama2-7b-lora-qa")
        assert (data.glob, data.format, data.columns) == (None, "auto", {}) and data.sequence_length == 1024

    def test_what_is_typed_stays_in_any_order(self):
        for words in (["data.glob=*.txt", "data.path=qa"], ["data.path=qa", "data.glob=*.txt"]):
            assert self.data_of(*words).glob == "*.txt"

    def test_a_recipe_that_extends_one_starts_over_too(self, workshop):
        Path("mine.yaml").write_text("extends: dpo\ndata: {path: pairs.jsonl, format: preference}\n")
        data = self.data_of(recipe="mine.yaml")
        assert (data.glob, data.format) == (None, "preference")
        Path("same.yaml").write_text("extends: dpo\ndata: {sequence_length: 512}\n")
        assert self.data_of(recipe="same.yaml").glob == "data/train_prefs-*.parquet"
