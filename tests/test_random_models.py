"""`random:NAME`: folders of vision-language models that transformers opens, and a recipe that starts from one."""

import json

import pytest
import torch

import preloaded
from bloomery.core.child import python_module
from bloomery.core.errors import UserError
from bloomery.hub import cached_model, fetch_model
from bloomery.monitor.events import EvalDone, StepDone, read_events
from bloomery.random_models import MODELS, folder_of
from pictures_for_tests import BLUE, RED, TEXT, png, row


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_the_folder_with_every_weight(name):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    assert not (cached_model(f"random:{name}") / "model.safetensors").exists()
    folder = fetch_model(f"random:{name}")
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]] == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.text_config.vocab_size
    assert tokenizer.decode(model.config.image_token_id) == MODELS[name].picture
    assert cached_model(f"random:{name}") == folder  # nothing is made twice


def test_weights_are_the_same_on_every_machine(tmp_path, monkeypatch):
    first = (folder_of("random:smolvlm", weights=True) / "model.safetensors").read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(7)
    second = folder_of("random:smolvlm", weights=True) / "model.safetensors"
    assert second.is_relative_to(tmp_path) and second.read_bytes() == first


def test_an_unknown_name_is_told_the_others():
    with pytest.raises(UserError, match="no random model") as caught:
        cached_model("random:llava")
    assert "random:smolvlm" in caught.value.fix


@pytest.mark.soak
def test_a_twin_trains_on_pictures(tmp_path):
    """On ten own rows in place of its 1,500, which `make soak` has (tests/runs/test_recipe_twins.py)."""
    rows = [row(part, TEXT, answer=answer) for part, answer in ((RED, "red"), (BLUE, "blue"))] * 5
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for color in ("red", "blue"):
        (tmp_path / f"{color}.png").write_bytes(png(color=color))
    changes = ("data.builtin=null", "data.path=rows.jsonl", "data.validation=20%")
    changes += (
        "train.max_steps=6",
        "train.tokens_per_step=1024",
        "train.attention=mask",
        "eval.every=6 steps",
    )
    command = ("train", "smolvlm2-500m-lora-tiny", "--run-dir", "run", *changes)
    done = preloaded.run([*python_module("bloomery", *command)], cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    losses = [event.loss for event in events if isinstance(event, StepDone)]
    assert losses[-1] < losses[0] - 1
    assert any(isinstance(event, EvalDone) for event in events)
