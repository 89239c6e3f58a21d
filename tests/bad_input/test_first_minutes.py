"""What a person types in the first minutes, before the manual is read."""

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import assert_clear, here, write_workshop

from bloomery.cli import cli
from bloomery.cli.common import _sentence
from bloomery.core.run_folder import find_run
from bloomery.hardware.detect import detect
from bloomery.plan.made import made_recipe
from bloomery.recipe.load import load_recipe, load_text
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

    @pytest.mark.parametrize(
        "typed", ["d", "demo", "demo-2026", "runs/demo", "runs/demo-20261122-100000/"]
    )
    def test_the_beginning_of_a_name_is_enough(self, typed):
        assert find_run(typed).name == "demo-20261122-100000"

    def test_a_beginning_that_two_runs_share_names_both(self):
        assert_clear(
            here("resume", "go"), code=2, mentions=["2 runs start with 'go'", "go-20261122-110000"]
        )
        assert find_run("go-20261122-11").name == "go-20261122-110000"

    def test_a_whole_name_is_that_run_although_others_begin_with_it(self, workshop):
        (workshop / "runs" / "go").mkdir()
        (workshop / "runs" / "go" / "recipe.yaml").write_text("")
        assert find_run("go").name == "go"


def test_recipes_alone_lists_them():
    alone, listed = here("recipes"), here("recipes", "list")
    assert alone.code == 0 and alone.out == listed.out and "go-coder-125m" in alone.out


def test_a_gpu_without_quotes_is_shown_with_them(workshop):
    assert_clear(
        here("plan", "demo", "--gpu", "RTX", "4070"),
        code=2,
        mentions=["not an override", '--gpu "RTX 4070"'],
    )


def test_a_plan_without_its_dataset_suggests_no_training(workshop):
    planned = here("plan", "go-coder-tiny", "data.path=nowhere")
    assert (
        "bloomery train go-coder-tiny" not in planned.out
        and "data.path does not exist" in planned.err
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


class TestPipedPrompts:
    def asked(self, model, *words, piped=""):
        return CliRunner().invoke(
            cli, ["generate", str(model), "--max-new-tokens", "3", "--json", *words], input=piped
        )

    def test_a_pipe_is_one_prompt(self, model):
        result = self.asked(model, piped="def f(x):\n    return\n")
        assert json.loads(result.stdout)["results"][0]["prompt"] == "def f(x):\n    return"

    def test_a_flag_wins_over_a_pipe(self, model):
        assert (
            json.loads(self.asked(model, "--prompt", "a", piped="b").stdout)["results"][0]["prompt"]
            == "a"
        )

    @pytest.mark.parametrize(
        ("data", "said"),
        [(b"", "expected either"), (b"\xff", "not UTF-8"), (b"a" * 5_000_000, "longer")],
    )
    def test_what_is_no_prompt_is_said(self, model, data, said, monkeypatch):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert_clear(here("generate", str(model)), code=2, mentions=[said])


class TestOtherData:
    def data_of(self, *overrides, recipe="qwen2.5-1.5b-dpo-lora"):
        return load_recipe(recipe, overrides).recipe.data

    def test_another_path_is_read_by_its_own_rows(self, workshop):
        data = self.data_of("data.path=qa.jsonl", recipe="llama2-7b-lora-qa")
        assert (data.glob, data.format, data.columns) == (
            None,
            "auto",
            {},
        ) and data.sequence_length == 1024

    def test_what_is_typed_stays_in_any_order(self):
        for words in (["data.glob=*.txt", "data.path=qa"], ["data.path=qa", "data.glob=*.txt"]):
            assert self.data_of(*words).glob == "*.txt"

    def test_a_recipe_that_extends_one_starts_over_too(self, workshop):
        Path("mine.yaml").write_text(
            "extends: qwen2.5-1.5b-dpo-lora\ndata: {path: pairs.jsonl, format: preference}\n"
        )
        data = self.data_of(recipe="mine.yaml")
        assert (data.glob, data.format) == (None, "preference")
        Path("same.yaml").write_text(
            "extends: qwen2.5-1.5b-dpo-lora\ndata: {sequence_length: 512}\n"
        )
        assert self.data_of(recipe="same.yaml").glob == "data/train_prefs-*.parquet"


TALK = [{"role": "user", "content": "What is iron?"}, {"role": "assistant", "content": "A metal."}]
NOT_RECIPES = {
    "conversations": (
        "chats.jsonl",
        [{"messages": TALK}],
        "`bloomery train --model Qwen/Qwen2.5-0.5B-Instruct --data",
    ),
    "questions": (
        "qa.jsonl",
        ROWS,
        "`bloomery train --model Qwen/Qwen2.5-0.5B-Instruct --data qa.jsonl`",
    ),
    "a list of rows": (
        "rows.json",
        ROWS,
        "`bloomery train --model Qwen/Qwen2.5-0.5B-Instruct --data rows.json`",
    ),
    "texts": (
        "texts.jsonl",
        [{"text": "iron"}],
        "`bloomery train go-coder-tiny data.path=texts.jsonl`",
    ),
    "a folder of texts": ("text", None, "`bloomery train go-coder-tiny data.path=text`"),
    "an odd name": ("my chats.jsonl", [{"messages": TALK}], "--data 'my chats.jsonl'`"),
}


@pytest.mark.parametrize("verb", ["train", "plan", "prepare"])
@pytest.mark.parametrize("case", NOT_RECIPES.values(), ids=NOT_RECIPES.keys())
def test_a_dataset_is_no_recipe_and_the_command_is_said(case, verb, workshop):
    name, rows, command = case
    if rows is not None:
        whole = (
            json.dumps(rows)
            if name.endswith(".json")
            else "".join(json.dumps(row) + "\n" for row in rows)
        )
        Path(name).write_text(whole)
    assert_clear(
        here(verb, name),
        code=2,
        mentions=["that is a dataset, not a recipe", f"where: {name}", command],
    )


def test_a_model_is_no_recipe_either(workshop, model):
    command = f"`bloomery train --model {model} --data FILE`"
    assert_clear(
        here("train", str(model)), code=2, mentions=["that is a model, not a recipe", command]
    )


def test_a_recipe_may_be_json(workshop):
    Path("tiny.json").write_text(
        json.dumps({"model": {"preset": "go-coder-tiny"}, "data": {"path": "text"}})
    )
    assert "dataset" not in here("plan", "tiny.json").err
    assert here("plan", "tiny.json", "train.tokens_per_step=1024").code == 0


class TestModelAndData:
    """`--model M --data D` without a recipe."""

    def made(self, model, data="qa.jsonl", *overrides, verb=("plan", "--json")):
        result = here(*verb, "--model", str(model), "--data", data, *overrides)
        assert result.code in (0, 1), result.err
        shown = here("recipes", "show", "--model", str(model), "--data", data, *overrides)
        Path("made.yaml").write_text(shown.out)
        return result, load_recipe(Path("made.yaml"))

    def test_questions_and_answers(self, workshop, model):
        _, loaded = self.made(model)
        recipe = loaded.recipe
        assert (recipe.objective.kind, recipe.adapter.kind) == ("sft", "lora")
        assert recipe.data.columns == {"instruction": "question", "output": "answer"}
        assert recipe.data.chat.template == "chatml"  # the tiny model has none
        assert recipe.data.sequence_length <= 1024 and recipe.train.tokens_per_step == "auto"

    @pytest.mark.parametrize(
        ("row", "kind"),
        [
            ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo"),
            ({"prompt": "a", "completion": "b", "label": True}, "kto"),
            ({"text": "iron is a metal"}, "pretrain"),
            ({"messages": TALK}, "sft"),
        ],
    )
    def test_the_rows_choose_the_objective(self, row, kind, workshop, model):
        Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 200)
        _, loaded = self.made(model, "rows.jsonl")
        assert loaded.recipe.objective.kind == kind
        assert loaded.recipe.adapter.kind == ("none" if kind == "pretrain" else "lora")

    def test_what_is_printed_is_what_is_planned_and_named_again(self, workshop, model):
        result, _ = self.made(model, "qa.jsonl", "train.epochs=2", verb=("plan",))
        told = " ".join(result.out.replace("\\\n", " ").split())
        assert f"bloomery train --model {model} --data qa.jsonl train.epochs=2" in told
        assert "bloomery bench --model" not in told
        first, again = (
            json.loads(self.made(model)[0].out),
            json.loads(here("plan", "--json", "made.yaml").out),
        )
        assert [first[key] for key in ("steps", "tokens")] == [
            again[key] for key in ("steps", "tokens")
        ]
        assert first["memory"]["parts"] == again["memory"]["parts"]

    @pytest.mark.parametrize(
        "overrides",
        [
            (),
            ("train.max_steps=4", "data.sequence_length=128"),
            ("adapter=none", "optimizer.learning_rate=1e-5", "data.validation=10%"),
            ("objective=pretrain", "train.epochs=2", "name=other"),
            ("objective.kind=distill", "objective.teacher=MODEL", "eval.every=4 steps"),
            (
                "data.columns={instruction: question, output: answer}",
                "data.format=alpaca",
                "checkpoint.keep=3",
            ),
            (
                "objective=sft",
                "data.chat.template=chatml",
                "logging.trackers=[tensorboard]",
                "train.seed=7",
            ),
        ],
    )
    def test_the_printed_recipe_trains_what_was_typed(self, overrides, workshop, model):
        """What is printed used to leave out everything but the model and the dataset."""
        overrides = [word.replace("MODEL", str(model)) for word in overrides]
        made = made_recipe(str(model), "qa.jsonl", overrides)
        Path("made.yaml").write_text(made.complete_text)
        typed = load_text(made.text, name="made", source="made", overrides=overrides)
        assert load_recipe(Path("made.yaml")).recipe == typed.recipe
        assert load_recipe(Path("made.yaml"), overrides).recipe == typed.recipe, (
            "typed again, nothing changes"
        )

    def test_pairs_with_another_objective_keep_its_rows(self, workshop, model):
        Path("pairs.jsonl").write_text(
            json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
        )
        for kind, rate in {"simpo": 2e-5, "orpo": 5e-5, "dpo": 5e-5, "kto": 5e-5}.items():
            shown = made_recipe(str(model), "pairs.jsonl", [f"objective={kind}"]).complete_text
            assert f"objective: {{kind: {kind}" in shown and f"learning_rate: {rate}," in shown
        assert (
            "learning_rate: 5e-06,"
            in made_recipe(str(model), "pairs.jsonl", ["adapter=none"]).complete_text
        )

    def test_rows_are_called_pairs_only_where_they_are(self, workshop, model):
        assert (
            "objective: {kind: dpo, beta: 0.1}\n"
            in made_recipe(str(model), "qa.jsonl", ["objective=dpo"]).complete_text
        )
        Path("pairs.jsonl").write_text(
            json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n"
        )
        assert (
            "# each row has a chosen"
            in made_recipe(str(model), "pairs.jsonl", ["objective=dpo"]).complete_text
        )

    def test_a_dataset_with_a_validation_split_uses_it(self, workshop, model):
        Path("d").mkdir()
        for name in ("train", "validation"):
            Path(f"d/{name}.jsonl").write_text(json.dumps({"question": name, "answer": "b"}) + "\n")
        assert "  validation: auto\n" in made_recipe(str(model), "d").complete_text

    def test_it_is_printed_once(self, workshop, model):
        words = ("--model", str(model), "--data", "qa.jsonl", "train.max_steps=3")
        first = here("plan", *words)
        assert "train: {max_steps: 3}" in first.err
        for verb in ("plan", "prepare"):
            again = here(verb, *words)
            assert "model: {" not in again.err
            assert "recipe     generated; to print it: bloomery recipes show --model" in again.err
        assert "train: {max_steps: 3}" in here("recipes", "show", *words).out
        assert "train: {max_steps: 4}" in here("plan", *words[:-1], "train.max_steps=4").err

    def test_an_override_may_come_first(self, workshop, model):
        result = here(
            "plan", "train.max_steps=4", "--json", "--model", str(model), "--data", "qa.jsonl"
        )
        assert json.loads(result.out)["steps"] == 4

    def test_beside_a_recipe_they_are_overrides(self, workshop, model):
        result = here(
            "train",
            "tiny.yaml",
            "data.chat.template=chatml",
            "--dry-run",
            "--model",
            str(model),
            "--data",
            "qa.jsonl",
        )
        assert str(model) in result.out and "made for" not in result.err

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ((), "missing RECIPE"),
            (("--model", "x"), "missing --data"),
            (("--data", "qa.jsonl"), "missing --model"),
            (("--model", "x", "--data", "nothing.jsonl"), "no such file or folder"),
        ],
    )
    def test_what_is_missing_is_said(self, words, said, workshop):
        assert_clear(here("train", *words), code=here("train", *words).code, mentions=[said])

    @pytest.mark.parametrize(
        ("word", "mentions"),
        [
            ("adapter.target_modules=[q_projj]", ["did you mean q_proj? known: q_proj, k_proj"]),
            (
                "objective=grpo",
                ["grpo needs rewards", "rewards=[{verifier: exact_match, column: answer}]"],
            ),
            (
                "objective=dpo",
                [
                    'rows such as {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}',
                    "dataset-formats.md",
                ],
            ),
            (
                "objective=kto",
                ['rows such as {"prompt": "2 + 2?", "completion": "4", "label": true}'],
            ),
        ],
    )
    def test_a_wrong_word_is_answered_with_the_right_ones(self, word, mentions, workshop, model):
        result = here("plan", "--model", str(model), "--data", "qa.jsonl", word)
        assert_clear(result, code=result.code, mentions=mentions)

    def test_a_run_is_no_recipe(self, workshop):
        assert_clear(here("train", "last"), code=2, mentions=["there are no runs here"])
        (workshop / "runs/go-1").mkdir(parents=True)
        (workshop / "runs/go-1/recipe.yaml").write_text("model: {preset: go-coder-tiny}\n")
        for name in ("last", "go-1", "runs/go-1"):
            said = [
                f"`{name}` is a run, not a recipe",
                f"bloomery resume {name}",
                f"recipes copy {name} mine.yaml",
            ]
            assert_clear(here("train", name), code=2, mentions=said)

    def test_the_recipe_of_a_run_can_be_copied(self, workshop):
        (workshop / "runs/go-1").mkdir(parents=True)
        (workshop / "runs/go-1/recipe.yaml").write_text("model: {preset: go-coder-tiny}\n")
        assert here("recipes", "copy", "go-1", "mine.yaml").code == 0
        assert Path("mine.yaml").read_text() == here("recipes", "show", "go").out


def test_without_torch_the_line_that_installs_it_is_said(workshop, monkeypatch):
    here_is = detect()
    bare = here_is.model_copy(
        update={"software": here_is.software.model_copy(update={"torch": None, "build": None})}
    )
    monkeypatch.setattr("bloomery.runs.lifecycle.detect", lambda: bare)
    result = here("train", "tiny.yaml")
    assert_clear(result, mentions=["PyTorch is not installed", "pip install", "torch=="], lines=8)
    assert not Path("runs").exists() and not Path("prepared").exists()
    told = str(_sentence(ModuleNotFoundError("No module named 'torch'", name="torch"), None))
    assert "PyTorch is not installed" in told and "torch==" in told
