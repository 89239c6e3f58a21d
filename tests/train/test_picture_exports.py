"""What runs on pictures write opens as the whole model: adapters in PEFT, merged and full models in transformers."""

import shutil

import pytest
import torch
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.export.gguf import export_gguf
from bloomery.export.layouts import export, export_adapter, export_merged
from bloomery.facts.pictures import vision_of
from bloomery.infer.forward import forward
from bloomery.infer.model_folder import ModelFiles, find_model
from bloomery.model.configs import read_config
from bloomery.model.forward_input import ALL_LOGITS
from bloomery.model.io.stored import vision_tensors
from bloomery.recipe.schema import Lora, NoAdapter
from bloomery.train.state import build_state
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row

ROWS = [row(RED, TEXT, answer="red"), row(BLUE, TEXT, answer="blue")] * 8
ADAPTER = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj"])


@pytest.fixture(params=["smolvlm", "qwen3_vl"])
def run(request, tmp_path):
    """A function that trains a model with an adapter or in full: the run, and a batch with its logits."""

    def train(adapter):
        prepared = prepared_rows(tmp_path, ROWS, kind=request.param, weights=True)
        base = tmp_path / "base"
        plan = tiny_plan(
            prepared,
            config=read_config(base),
            model={"source": base},
            data={"sequence_length": 256, "layout": "padded"},
            train={"steps": 3, "micro_batch_size": 2, "accumulation": 1, "tokens_per_step": 512},
        ).model_copy(update={"adapter": adapter})
        done = Run(plan, tmp_path / "run")
        state = build_state(plan, resume_from=done.checkpoint(3))
        state.model.eval()
        batch = Loader(prepared, sequence_length=256, layout="padded", seed=0).batch(
            Cursor(0, 0), 2
        )
        with torch.no_grad():
            logits = forward(state.model, batch, ALL_LOGITS, precision="float32").head
        return done.checkpoint(3), batch, logits

    return train


def assert_sees(theirs, batch, logits):
    token = vision_of(theirs.config.to_dict()).image_token_id
    kinds = {}
    if theirs.config.model_type == "qwen3_vl":
        kinds = {"mm_token_type_ids": (batch.tokens == token).long()}
    is_real = batch.documents >= 0
    with torch.no_grad():
        made = theirs(
            input_ids=batch.tokens, attention_mask=is_real.long(), **batch.pictures.inputs, **kinds
        ).logits
    assert_close(made[is_real], logits[is_real], atol=1e-4, rtol=1e-4)


def assert_mmproj_is_the_bases(checkpoint, base, tmp_path):
    """The tower was frozen: not a bit of its GGUF file depends on the run."""
    of_base = export_gguf(ModelFiles(base, None, base), tmp_path / "base.gguf", verify=False)
    of_run = export_gguf(find_model(checkpoint), tmp_path / "run.gguf", verify=False)
    assert of_run.folder.read_bytes() != of_base.folder.read_bytes()
    assert of_run.mmproj.read_bytes() == of_base.mmproj.read_bytes()


def opened(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def test_an_adapter_opens_in_peft_on_the_whole_model_and_merges_into_it(run, tmp_path):
    checkpoint, batch, logits = run(ADAPTER)
    base = tmp_path / "base"
    tuned = PeftModel.from_pretrained(opened(base), checkpoint).eval()
    adapted = [name for name, _ in tuned.named_modules() if name.endswith("lora_A.default")]
    assert adapted and not any("vis" in name for name in adapted)
    assert_sees(tuned, batch, logits)

    # With logits that the library computes on the whole model.
    copied = export_adapter(find_model(checkpoint), tmp_path / "copied")
    assert any("loaded in PEFT" in proof for proof in copied.proofs)

    merged = tmp_path / "merged"
    done = export_merged(find_model(checkpoint), merged)
    assert any("vision tower" in proof for proof in done.proofs)
    assert_sees(opened(merged), batch, logits)
    for name, tensor in vision_tensors(merged).items():
        original = vision_tensors(base)[name]
        assert (tensor.kind, tensor.shape) == (original.kind, original.shape)
    assert (merged / "preprocessor_config.json").is_file()
    assert_mmproj_is_the_bases(checkpoint, base, tmp_path)


def test_a_model_that_is_trained_in_full_is_saved_whole(run, tmp_path):
    checkpoint, batch, logits = run(NoAdapter())
    folder = tmp_path / "tuned"
    shutil.copytree(checkpoint, folder)
    assert_sees(opened(folder), batch, logits)
    exported = tmp_path / "exported"
    done = export(checkpoint, exported, keeps_vision=True)
    assert any("vision tower" in proof for proof in done.proofs)
    assert_sees(opened(exported), batch, logits)
    assert_mmproj_is_the_bases(checkpoint, tmp_path / "base", tmp_path)
