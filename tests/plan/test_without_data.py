"""A plan needs neither a dataset nor the Hub: shapes are in a table, and a dataset is assumed."""

import json

import pytest
from click.testing import CliRunner

from bloomery import cli, hub
from bloomery.cli.plan import command
from bloomery.core.errors import UserError
from bloomery.facts.published import published_models
from bloomery.plan.made import ASSUMED, made_recipe


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch):
    """An empty cache, an empty folder, and no network."""

    def refuse(*_arguments, **_settings):
        raise AssertionError("a plan of a known model asks the Hub for nothing")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "download", refuse)


def planned(*words):
    return CliRunner().invoke(command, words)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("entry", published_models(), ids=lambda entry: entry.names[0])
def test_every_model_of_the_table_is_planned(entry):
    result = planned("--model", entry.names[0], "--gpu", "MI300X", "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    plan = json.loads(result.stdout)
    assert plan["steps"] is None and plan["seconds"] is None
    assert plan["tokens_per_second"]["value"] > 0
    assert 0 < plan["mfu"]["peak"] < 1
    assert plan["memory"]["total"]["value"] > 0


def test_the_page_says_what_is_assumed_and_what_is_unknown():
    result = planned("--model", "google/gemma-3-12b-it", "--gpu", "5090")
    assert "steps unknown until a dataset is here" in result.output
    assert "per million tokens" in result.output
    assert "conversations in packed sequences of 1,024 tokens are assumed" in result.output
    assert "bloomery train" not in result.stdout


def test_a_dataset_of_the_hub_is_planned_before_it_is_downloaded():
    words = (
        "--model",
        "unsloth/Llama-3.2-3B-Instruct",
        "--data",
        "hub:tatsu-lab/alpaca",
        "--gpu",
        "4090",
    )
    result = planned(*words, "--json")
    assert json.loads(result.stdout)["fits"] and json.loads(result.stdout)["steps"] is None


def test_a_file_that_does_not_exist_is_still_an_error():
    with pytest.raises(UserError, match=r"not exist|no such"):
        command.main(
            ["--model", "Qwen/Qwen3-8B", "--data", "chats.jsonl", "--gpu", "4090"],
            standalone_mode=False,
        )


def test_an_imported_axolotl_file_is_planned(tmp_path):
    from bloomery.cli.recipes import recipes_command

    text = """base_model: NousResearch/Meta-Llama-3.1-8B-Instruct
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 8
num_epochs: 1
learning_rate: 0.0002
"""
    (tmp_path / "axolotl.yml").write_text(text)
    made = CliRunner().invoke(recipes_command, ["import", "axolotl.yml", "--out", "ax.yaml"])
    assert made.exit_code == 0, made.output
    result = planned("ax.yaml", "--gpu", "4090", "--json")
    assert json.loads(result.stdout)["memory"]["total"]["value"] > 15


def test_a_mixture_of_experts_is_planned_to_be_trained():
    result = planned("--model", "openai/gpt-oss-20b", "--gpu", "MI300X")
    assert result.stdout.startswith("Fits: ")
    assert "20.91 B parameters, 4.19 B active per token (4 of 32 experts)" in " ".join(
        result.stdout.split()
    )
    assert "`train` downloads it" in result.output


def test_experts_need_the_memory_of_all_and_the_time_of_a_few():
    """Against a dense model of as many parameters: as much memory for weights, and at least three times its speed."""
    experts, dense = (
        json.loads(
            planned("--model", name, "--gpu", "MI300X", "train.micro_batch_size=1", "--json").stdout
        )
        for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B")
    )
    weights = [plan["memory"]["parts"]["weights"] for plan in (experts, dense)]
    assert weights[0] == pytest.approx(weights[1] * 30_532_122_624 / 32_762_123_264, rel=0.01)
    assert experts["tokens_per_second"]["value"] > 3 * dense["tokens_per_second"]["value"]


def test_an_unknown_model_gets_its_neighbors(monkeypatch):
    def unreachable(*_arguments, **_settings):
        raise UserError("cannot reach the Hub", where="org/Qwen3-8b-it", fix="check the connection")

    monkeypatch.setattr(hub, "download", unreachable)
    with pytest.raises(UserError) as error:
        command.main(["--model", "org/Qwen3-8b-it", "--gpu", "4090"], standalone_mode=False)
    assert "Qwen/Qwen3-8B" in error.value.fix


def test_an_assumed_dataset_is_a_file_that_is_not_there(tmp_path):
    assert not (tmp_path / ASSUMED).exists()
    assert ASSUMED in made_recipe("Qwen/Qwen3-8B", None).text


def test_a_plan_without_a_dataset_answers_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    cli._run(["plan", "--model", "Qwen/Qwen3-8B", "--gpu", "RTX 4090"], debug=False)
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith("Fits")
    assert "assumed-conversations" not in captured.err
