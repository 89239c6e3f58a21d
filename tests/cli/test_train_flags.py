"""The flags of `forgather train`, each printed as the recipe key that it sets."""

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.cli.train import conclude, keys_of
from bloomery.core.errors import UserError
from bloomery.runs.lifecycle import EndedRun

KEYS = {
    ("--max-steps", "7"): "--max-steps -> train.max_steps=7",
    ("--train-epochs", "2"): "--train-epochs -> train.epochs=2",
    ("--model-name", "models/one"): "--model-name -> model.from=models/one",
    (
        "--models-dir",
        "models",
        "--model-name",
        "one",
    ): "--models-dir, --model-name -> model.from=models/one",
    ("--dataset-proj", "texts"): "--dataset-proj -> data.path=texts",
    ("--dataset-config", "*.jsonl"): "--dataset-config -> data.glob=*.jsonl",
    ("--chat-template", "chatml"): "--chat-template -> data.chat.template=chatml",
    (
        "--gradient-checkpointing",
    ): "--gradient-checkpointing -> train.activation_checkpointing=full",
    ("--log-peak-memory",): "--log-peak-memory -> logging.memory=true",
    ("--safe-load",): "--safe-load -> model.load_with=transformers",
}


@pytest.mark.parametrize("words", KEYS, ids=lambda words: words[-1])
def test_each_flag_is_told_as_the_key_that_it_sets(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(cli, ["train", "qwen2.5-1.5b-lora-tiny", "--dry-run", *words])
    assert KEYS[words] in told.stderr


def test_the_command_of_the_forgather_examples_is_taken_as_it_stands():
    flags = {
        "models_dir": "~/models",
        "model_name": "meta-llama--Llama-2-7b-hf",
        "chat_template": "chatml.jinja",
        "log_peak_memory": True,
        "safe_load": True,
        "gradient_checkpointing": True,
        "max_steps": None,
    }
    words = keys_of(flags)
    assert words["--models-dir, --model-name"].endswith("/models/meta-llama--Llama-2-7b-hf")
    assert set(words.values()) >= {
        "data.chat.template=chatml.jinja",
        "train.activation_checkpointing=full",
    }


def test_a_folder_of_models_names_no_model():
    with pytest.raises(UserError, match="requires --model-name"):
        keys_of({"models_dir": "models"})


def test_words_for_a_launcher_are_shown_as_a_command():
    told = CliRunner().invoke(
        cli, ["train", "qwen2.5-1.5b-lora-tiny", "--dry-run", "--", "--nproc-per-node", "2"]
    )
    assert told.exception is None or isinstance(told.exception, SystemExit)
    assert "-m torch.distributed.run --nproc-per-node" in told.output


@pytest.mark.parametrize(
    ("saved", "told"), [([], "starts over"), (["step-00000003"], "checkpoint saved")]
)
def test_a_stopped_run_claims_no_checkpoint_that_it_lacks(saved, told, tmp_path, capsys):
    for name in saved:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert conclude(EndedRun(tmp_path, 75)) == 75
    assert told in capsys.readouterr().err
