"""QLoRA through the command line: trained, killed, resumed, exported by a rehearsal; refused where it cannot be."""

import json
from pathlib import Path

import pytest
import torch
from runs_of_bloomery import Bloomery
from safetensors.torch import load_file, save_file

from bloomery.monitor.events import Resumed, Saved, StepDone
from models_for_tests import make_model

RECIPE = """
model: {from: base}
tokenizer: {from: same}
data: {path: text, glob: "*.txt", sequence_length: 32, validation: 0}
adapter: {kind: lora, rank: 4, target_modules: [all-linear]}
quantize: {kind: nf4}
train: {max_steps: 4, tokens_per_step: 128}
"""


@pytest.fixture
def qlora(bloomery: Bloomery) -> Bloomery:
    base = bloomery.folder / "base"
    base.mkdir()
    make_model(base)
    (bloomery.folder / "qlora.yaml").write_text(RECIPE)
    return bloomery


def test_a_rehearsal_trains_kills_resumes_bitwise_and_exports_the_adapter(qlora: Bloomery) -> None:
    """Ten seconds: four processes start torch, which is what is tested."""
    done = qlora.run("train", "qlora.yaml", "--smoke-test", "--run-dir", "runs/one")
    assert done.returncode == 0, done.stderr
    assert "none: no validation set" in done.stdout
    events = qlora.events()
    saved = next(event for event in events if isinstance(event, Saved))
    (resumed,) = [event for event in events if isinstance(event, Resumed)]
    assert resumed.step == saved.step
    repeated = [
        event.loss
        for event in events
        if isinstance(event, StepDone) and event.step == saved.step + 1
    ]
    assert len(repeated) == 2 and repeated[0] == repeated[1]
    assert (qlora.run_dir / "report.html").is_file()
    assert "bitwise identical" in done.stdout and "in PEFT format" in done.stdout
    assert (qlora.run_dir / "export/adapter_model.safetensors").is_file()
    plan = json.loads((qlora.run_dir / "plan.json").read_text())
    assert (
        plan["quantize"] == {"kind": "nf4", "double_quant": True}
        and plan["quantized_by"] == "torch"
    )
    checkpoint = next((qlora.run_dir / "checkpoints").iterdir())
    assert not (checkpoint / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter.kind=none"], "nf4 weights are not trainable"),
        (["quantize.kind=int4"], "none, nf4"),
    ],
)
def test_what_cannot_be_is_one_sentence(qlora: Bloomery, words: list[str], said: str) -> None:
    done = qlora.run("plan", "qlora.yaml", *words)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_weights_that_are_not_finite_are_named_before_a_step(qlora: Bloomery) -> None:
    file: Path = qlora.folder / "base/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][1, 2] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    done = qlora.run("train", "qlora.yaml", "--run-dir", "runs/one")
    assert done.returncode != 0
    assert "model.layers.1.mlp.down_proj.weight holds weights that are not finite" in done.stderr, (
        done.stderr
    )
