"""Runs on the simulated device lose what runs on the CPU lose, with every option of a step.

The same kernels compute on both; what differs is who calls them. Autocast has another list for each kind of device, and
optimizers take larger pieces on a GPU. So losses agree to the rounding of the narrowest type on their way.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, prepared_corpus
from structured_runs import write_answers

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.config import Experts
from bloomery.model.configs import read_config
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import EvalDone, StepDone
from bloomery.plan.types import RunPlan, VisionPlan
from bloomery.recipe.objectives import Distill, Kto, OrPo, Preference, Reward, Sft, SimPo
from bloomery.recipe.schema import Lora, NoAdapter, Quantize
from device_for_tests import MEMORY_LIMIT
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row
from ranks import train

# Relative, by the narrowest type in which a step computes: a sixteenth of its spacing at 1; of float32 64 of them,
# which IPO needs, whose loss is a small difference, squared. Alignment alone changes last bits of a CPU's products.
TOLERANCES = {"float32": 2**-17, "float16": 2**-14, "bfloat16": 2**-11}
OFFLOADED = {"kind": "adamw", "fused": False, "offload": True}
ADAPTER = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
NF4 = Quantize(kind="nf4")

MIXTURE = replace(
    CONFIG, family="qwen3_moe", experts=Experts(count=4, per_token=2, width=16, normalize=True)
)

# By name: the sections of the plan.
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "one micro-batch": {"train": {"micro_batch_size": 4, "accumulation": 1}},
    "deterministic": {"train": {"deterministic": True}},
    "full": {"train": {"activation_checkpointing": "full"}},
    "selective": {"train": {"activation_checkpointing": "selective"}},
    "every-2": {"train": {"activation_checkpointing": "every-2"}},
    "full, offloaded": {"train": {"activation_checkpointing": "full", "offload_activations": True}},
    "offloaded": {"train": {"offload_activations": True}},
    "neftune": {"train": {"neftune_alpha": 5.0}},
    "averaged": {"train": {"ema_decay": 0.9}},
    "blockwise": {"model": {"attention": "blockwise"}},
    "math": {"model": {"attention": "math"}},
    "experts": {"config": MIXTURE},
    "padded": {"data": {"layout": "padded"}},
    "adafactor": {"optimizer": {"kind": "adafactor", "fused": False}},
    "adafactor in backward": {
        "optimizer": {"kind": "adafactor", "fused": False, "fused_backward": True},
        "train": {"micro_batch_size": 4, "accumulation": 1, "max_grad_norm": None},
    },
    "states in int8": {"optimizer": {"fused": False, "state_dtype": "int8"}},
    "states away": {"optimizer": OFFLOADED},
    "states away in int8": {"optimizer": {**OFFLOADED, "state_dtype": "int8"}},
    "lora": {"adapter": Lora(**ADAPTER, dropout=0.1)},
    "dora": {"adapter": Lora(**ADAPTER | {"kind": "dora"})},
    "pissa": {"adapter": Lora(**ADAPTER, init="pissa")},
    "nf4": {"adapter": Lora(**ADAPTER), "quantize": NF4},
    "int8": {"adapter": Lora(**ADAPTER), "quantize": Quantize(kind="int8")},
}
HALVES: dict[str, dict[str, Any]] = {
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "bfloat16-pure": {"train": {"precision": "bfloat16-pure"}},
    "float16": {"train": {"precision": "float16"}},
    "rounded at random": {
        "train": {"precision": "bfloat16-pure"},
        "optimizer": {"fused": False, "state_dtype": "bfloat16", "stochastic_rounding": True},
    },
    "bfloat16 states away": {"optimizer": {**OFFLOADED, "state_dtype": "bfloat16"}},
    "muon": {"optimizer": {"kind": "muon", "fused": False}},  # its products are bfloat16
    "nf4, bfloat16": {
        "train": {"precision": "bfloat16"},
        "adapter": Lora(**ADAPTER),
        "quantize": NF4,
    },
}
QUICK = (
    "dropout",
    "experts",
    "adafactor in backward",
    "states away in int8",
    "nf4",
    "float16",
    "muon",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("base")
    load_tokenizer(corpus).save(folder)
    write_model(model_state(fresh_decoder(CONFIG, seed=3)), CONFIG, folder)
    return folder


def losses(plan: RunPlan, folder: Path, device: str) -> dict[str, float]:
    """By step, of the batches of training and of the validation set."""
    changes = {
        "train": {"device": device},
        "data": {"pin_memory": device != "cpu"},
        "memory": {"limit": MEMORY_LIMIT},
    }
    sections = {
        name: getattr(plan, name).model_copy(update=fields) for name, fields in changes.items()
    }
    events = train(plan.model_copy(update=sections), folder)
    return {
        f"{type(event).__name__} {event.step}": event.loss
        for event in events
        if isinstance(event, StepDone | EvalDone) and event.loss is not None
    }


def assert_same_losses(plan: RunPlan, folder: Path, tolerance: float) -> None:
    on_device = losses(plan, folder / "device", "cuda")
    assert len(on_device) >= 5
    assert on_device == pytest.approx(losses(plan, folder / "cpu", "cpu"), rel=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.soak)
        for name in (*OPTIONS, *HALVES)
    ],
)
def test_every_option_of_a_step(corpus: Path, base: Path, tmp_path: Path, name: str) -> None:
    sections = {"config": CONFIG, **(OPTIONS | HALVES)[name]}
    whole = {key: sections.pop(key) for key in ("adapter", "quantize") if key in sections}
    sections["train"] = {"steps": 4, **sections.get("train", {})}
    if whole:
        sections["model"] = {"source": base}
    plan = tiny_plan(corpus, **sections).model_copy(update=whole)
    narrowest = name if name in TOLERANCES else "bfloat16" if name in HALVES else "float32"
    assert_same_losses(plan, tmp_path, TOLERANCES[narrowest])


OBJECTIVES = {
    "sft": ("chat", Sft(kind="sft")),
    "dft": ("chat", Sft(kind="sft", loss="dft")),
    "dpo": ("pairs", Preference(kind="dpo", beta=0.5)),
    "ipo": ("pairs", Preference(kind="ipo", beta=0.5)),
    "simpo": ("pairs", SimPo(kind="simpo")),
    "orpo": ("pairs", OrPo(kind="orpo", beta=0.5)),
    "kto": ("kto", Kto(kind="kto", beta=0.5)),
    "reward": ("pairs", Reward(kind="reward")),
    "distill": ("chat", None),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("dpo", "distill") else pytest.mark.soak)
        for name in OBJECTIVES
    ],
)
def test_every_objective(corpus: Path, base: Path, tmp_path: Path, name: str) -> None:
    kind, objective = OBJECTIVES[name]
    data = write_answers(tmp_path / "answers", corpus, kind)
    head = {"head": "values"} if name == "reward" else {}
    config = CONFIG.__class__(**vars(CONFIG) | head)
    objective = objective or Distill(kind="distill", teacher=str(base))
    plan = tiny_plan(data, config=config, train={"steps": 4})
    plan = plan.model_copy(update={"objective": objective})
    assert_same_losses(plan, tmp_path, TOLERANCES["float32"])


SEEING = {
    "lora": {"adapter": Lora(**ADAPTER)},
    "all is trained": {"adapter": NoAdapter(), "vision": VisionPlan(train="all")},
}


OTHER_TOWERS = [pytest.param(kind, marks=pytest.mark.soak) for kind in ("qwen2_5_vl", "gemma3")]


@pytest.mark.parametrize("kind", ["qwen3_vl", *OTHER_TOWERS])
@pytest.mark.parametrize("name", SEEING)
def test_pictures(tmp_path: Path, kind: str, name: str) -> None:
    rows = [row(RED, TEXT, answer="red"), row(TEXT, answer="none"), row(BLUE, TEXT)] * 4
    prepared = prepared_rows(tmp_path, rows, kind=kind, weights=True)
    base = tmp_path / "base"
    plan = tiny_plan(
        prepared,
        config=read_config(base),
        model={"source": base},
        data={"sequence_length": 256, "layout": "padded"},
        train={"steps": 5, "micro_batch_size": 1, "accumulation": 3, "tokens_per_step": 768},
    )
    assert_same_losses(plan.model_copy(update=SEEING[name]), tmp_path, TOLERANCES["float32"])
