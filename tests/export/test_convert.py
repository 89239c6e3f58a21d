"""`bloomery convert`: any format into another with changes on the way, against transformers' own resized model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from bloomery import api
from bloomery.cli.models import convert_command
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.configs import read_config
from bloomery.model.io.stored import find_tensors
from models_for_tests import make_model, make_run

ADDED = ("<|im_start|>", "<|im_end|>")
TALK = [{"role": "user", "content": "f(x)?"}, {"role": "assistant", "content": "x + 1"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model")


def converted(source: Path, out: Path, *words: str):
    ended = CliRunner().invoke(convert_command, [str(source), str(out), "--devices", "cpu", *words])
    if ended.exception is not None:
        raise ended.exception
    return ended.stdout


def test_a_model_is_cast_extended_and_grown_as_by_transformers(model, tmp_path):
    out = tmp_path / "out"
    tokens = [word for token in ADDED for word in ("--add-tokens", token)]
    said = converted(
        model,
        out,
        "--dtype",
        "float32",
        "--max-length",
        "512",
        "-t",
        "chatml",
        "--enable-checkpoint",
        *tokens,
    )
    assert str(out) in said
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (model, out)
    )
    old = theirs.config.vocab_size
    theirs.resize_token_embeddings(old + 2, mean_resizing=False)
    for layer in {theirs.get_input_embeddings(), theirs.get_output_embeddings()}:
        with torch.no_grad():
            layer.weight[old:] = layer.weight[:old].mean(0)
    ids = torch.tensor([[5, 17, old, 40, old + 1, 3]])
    assert_close(ours.eval()(ids).logits, theirs.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    assert ours.config.max_position_embeddings == 512
    for each, recomputes in ((ours, True), (theirs, False)):
        assert (
            any(getattr(module, "gradient_checkpointing", False) for module in each.modules())
            == recomputes
        )
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.model_max_length == 512 and tokenizer.convert_tokens_to_ids(list(ADDED)) == [
        old,
        old + 1,
    ]
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert rendered == "<|im_start|>user\nf(x)?<|im_end|>\n<|im_start|>assistant\nx + 1<|im_end|>\n"
    assert tokenizer(rendered, add_special_tokens=False).input_ids.count(old) == 2
    assert load_tokenizer(out).encode(rendered, special=True).count(old + 1) == 2


def test_a_dtype_rounds_each_weight_once(model, tmp_path):
    converted(model, tmp_path / "half", "--dtype", "bf16", "--max-length", "64")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_spare_rows_of_a_padded_vocabulary_are_taken_first(model, tmp_path):
    padded = AutoModelForCausalLM.from_pretrained(model)
    old = padded.config.vocab_size
    padded.resize_token_embeddings(old + 8, mean_resizing=False)
    with torch.no_grad():
        padded.get_input_embeddings().weight[old:] = 1000.0
    shutil.copytree(model, tmp_path / "padded")
    padded.save_pretrained(tmp_path / "padded")
    converted(tmp_path / "padded", tmp_path / "out", "--add-tokens", "<x>")
    rows = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_input_embeddings().weight
    assert len(rows) == old + 8 and load_tokenizer(tmp_path / "out").id_of("<x>") == old
    assert_close(rows[old], rows[:old].mean(0), atol=1e-5, rtol=1e-4)
    assert bool((rows[old + 1 :] == 1000.0).all())


def test_a_run_becomes_gguf_and_a_folder_again(tmp_path):
    pytest.importorskip("gguf")
    run = make_run(tmp_path / "run", 10, 20, best=10)
    file, back = tmp_path / "model.gguf", tmp_path / "back"
    api.convert(run, file, step="10", dtype="float32", add_tokens=["<x>"], device="cpu")
    api.convert(file, back, max_length=100, device="cpu")
    first = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-00000010")
    again = AutoModelForCausalLM.from_pretrained(back)
    ids = torch.tensor([[5, 17, 40]])
    assert_close(again(ids).logits[..., :-1], first(ids).logits, atol=1e-5, rtol=1e-5)
    assert (
        read_config(back).max_positions == 100
        and load_tokenizer(back).id_of("<x>") == first.config.vocab_size
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model.gguf", "run"]


def test_without_changes_the_bytes_of_tensors_stay(model, tmp_path):
    api.convert(model, tmp_path / "out", device="cpu")
    assert find_tensors(tmp_path / "out").keys() == find_tensors(model).keys()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    assert "gradient_checkpointing" not in json.loads(
        (tmp_path / "out" / "config.json").read_text()
    )


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--dtype", "q8_0"], "--dtype"),
        (["-t", "no-such-template"], "--template"),
        (["--to", "gguf", "-t", "no-such-template"], "--template"),
        (["--add-tokens", ""], "--add-tokens"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_nothing(model, tmp_path, words, where):
    with pytest.raises(UserError) as found:
        converted(model, tmp_path / "out", *words)
    assert found.value.where == where and list(tmp_path.iterdir()) == []


def test_learned_positions_are_fixed(tmp_path):
    gpt2 = make_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UserError) as found:
        converted(gpt2, tmp_path / "out", "--max-length", "256")
    assert found.value.where == "--max-length" and not (tmp_path / "out").exists()
