"""Pipelines train as one rank does with the same micro-batches. Oracle: one rank.

Where no sum over ranks is involved everything has the same bits: losses, norms, evaluations, samples, checkpoints. The
gradient of a tied matrix is a sum over both ends, those of copies and shards are sums over the ranks of a stage.
"""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from safetensors.torch import load_file
from structured_runs import write_answers
from test_ranks_features import gradients_in, train_noting_gradients

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.model.native import find_compiler
from bloomery.plan import stages
from bloomery.plan.estimate.mesh import MeshSplit
from bloomery.plan.estimate.speed import Rate
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepShape
from bloomery.recipe.objectives import Kto, Preference, Reward, Sft, SimPo
from bloomery.recipe.schema import Lora, Quantize
from bloomery.train.diagnostics.stragglers import SLOW_STEPS
from ranks import fields, losses, on_ranks, ranks, train

STEPS = 4
LORA = {
    "kind": "lora",
    "rank": 4,
    "alpha": 8.0,
    "target_modules": ["q_proj", "down_proj"],
}
DROPOUT = {"embedding_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1}
LEARNED = {
    "family": "gpt2",
    "positions": "learned",
    "norm": "layer",
    "qk_norm": "none",
    "gated_mlp": False,
    "activation": "gelu_tanh",
    "attention_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "num_kv_heads": 2,
    "tie_embeddings": True,
}
# A row of a matrix is whole int8 blocks.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    """A change of the plan, and over which ranks it is trained.

    `config`: of the model; `sections`: of the plan, by name; others are the plan's own fields. `sums`: whether sums
    over ranks are involved, so that last bits differ.
    """

    data: str = "text"
    config: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=lambda: {"pipeline": 2})
    sums: bool = False
    near: float = 1e-5  # of losses, where there are sums
    layers: tuple[int, ...] = ()  # of each group, where they are not even


def lora(**changes) -> dict[str, Any]:
    return {"adapter": Lora(**LORA | changes)}


def training(**changes) -> dict[str, Any]:
    return {"train": changes}


TIED = {"tie_embeddings": True}
FOUR = {"pipeline": 4}
INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "chunks": 2}
COPIES = {"pipeline": 2, "replicate": 2}
SHARDS = {"pipeline": 2, "shard": 2}
DPO = {"objective": Preference(kind="dpo", beta=0.5)}
KTO = {"objective": Kto(kind="kto", beta=0.5)}
SLOW = {"optimizer": {"learning_rate": 0.003}}
COMPILED = {"model": {"attention": "compiled", "scores": "compiled"}}
# These run in `make test`, all others in `make soak`.
QUICK = {
    "1f1b": Case(),
    "interleaved": Case(mesh=INTERLEAVED),
    "tied": Case(config=TIED, sums=True),
    "lora, dpo, checkpointing": Case(
        "pairs",
        sections=training(activation_checkpointing="full"),
        fields=lora(dropout=0.1) | DPO,
    ),
    "qlora, kto": Case(
        "kto", sections=SLOW, fields=lora() | KTO | {"quantize": Quantize(kind="nf4")}
    ),
    "float16": Case(sections=training(precision="float16") | SLOW),
    "compiled code": Case(sections=COMPILED),
}
SOAK = {
    "dropout": Case(config=LEARNED | DROPOUT | {"tie_embeddings": False}),
    "modules to save, tied": Case(
        config=TIED, fields=lora(modules_to_save=["embed_tokens", "norms"]), sums=True
    ),
    "average": Case(config=TIED, sections=training(ema_decay=0.3), sums=True),
    "frozen first stage, kto, one micro-batch": Case(
        "kto",
        sections=SLOW | training(micro_batch_size=8, accumulation=1),
        fields=lora(target_modules=["*.layers.3.*"], dropout=0.2) | KTO,
    ),
    "compiled code, tied": Case(config=TIED, sections=COMPILED, sums=True),
    "compiled code, copies": Case(mesh=COPIES, sections=COMPILED, sums=True),
    "compiled code, shards": Case(mesh=SHARDS, sections=COMPILED, sums=True),
    "compiled code, interleaved, lora": Case(mesh=INTERLEAVED, sections=COMPILED, fields=lora()),
    "gpipe": Case(mesh={"pipeline": 2, "schedule": "gpipe"}),
    "four stages": Case(mesh=FOUR),
    "four stages, tied": Case(config=TIED, mesh=FOUR, sums=True),
    "four stages, gpipe": Case(mesh=FOUR | {"schedule": "gpipe"}),
    "four stages, interleaved": Case(
        config={"num_layers": 8}, mesh=FOUR | {"schedule": "interleaved", "chunks": 2}
    ),
    "interleaved, tied": Case(config=TIED, mesh=INTERLEAVED, sums=True),
    "interleaved, three groups each": Case(
        config={"num_layers": 6}, mesh=INTERLEAVED | {"chunks": 3}
    ),
    "uneven": Case(layers=(1, 3)),
    "uneven, interleaved": Case(config={"num_layers": 7}, mesh=INTERLEAVED, layers=(1, 3, 2, 1)),
    "copies": Case(mesh=COPIES, sums=True),
    "copies, tied": Case(config=TIED, mesh=COPIES, sums=True),
    "copies, interleaved, lora": Case(
        mesh=COPIES | {"schedule": "interleaved", "chunks": 2}, fields=lora(), sums=True
    ),
    "shards": Case(mesh=SHARDS, sums=True),
    "shards, tied": Case(config=TIED, mesh=SHARDS, sums=True),
    "shards, interleaved": Case(mesh=SHARDS | {"schedule": "interleaved", "chunks": 2}, sums=True),
    "shards, lora, dpo": Case("pairs", mesh=SHARDS, fields=lora() | DPO, sums=True),
    "shards, qlora": Case(
        mesh=SHARDS, fields=lora() | {"quantize": Quantize(kind="nf4")}, sums=True
    ),
    "shards, modules to save, tied": Case(
        config=TIED, mesh=SHARDS, fields=lora(modules_to_save=["embed_tokens"]), sums=True
    ),
    "shards, kto": Case("kto", mesh=SHARDS, sections=SLOW, fields=KTO, sums=True),
    "copies, kto, lora": Case("kto", mesh=COPIES, sections=SLOW, fields=lora() | KTO, sums=True),
    "shards, average, adafactor": Case(
        mesh=SHARDS,
        sections=training(ema_decay=0.3) | {"optimizer": {"kind": "adafactor"}},
        sums=True,
    ),
    "learned positions": Case(config=LEARNED, sums=True),
    "windows, two frequencies": Case(
        config={"sliding_window": (8, None, 8, 8), "local_rope_theta": 100.0}
    ),
    "scaled embeddings, softcap": Case(
        config={
            "family": "gemma2",
            "norm": "rms_unit_offset",
            "qk_norm": "none",
            "norm_placement": "both",
            "activation": "gelu_tanh",
            "scale_embeddings": True,
            "final_softcap": 20.0,
            "tie_embeddings": True,
        },
        sums=True,
    ),
    "lora": Case(fields=lora(target_modules=["all-linear"])),
    "lora, tied": Case(config=TIED, fields=lora()),
    "frozen first stage": Case(fields=lora(target_modules=["*.layers.3.*"])),
    "frozen last stage": Case(fields=lora(target_modules=["*.layers.0.*"])),
    "frozen middle stages, tied": Case(
        config=TIED, mesh=FOUR, fields=lora(target_modules=["*.layers.0.*", "*.layers.3.*"])
    ),
    "frozen first stage, interleaved, checkpointing": Case(
        mesh=INTERLEAVED,
        sections=training(activation_checkpointing="full"),
        fields=lora(target_modules=["*.layers.3.*"]),
    ),
    "frozen first stage, float16, average": Case(
        sections=training(precision="float16", ema_decay=0.3) | SLOW,
        fields=lora(target_modules=["*.layers.3.*"]),
    ),
    "frozen first stage, bfloat16 states": Case(
        config=WIDE,
        sections={"optimizer": {"state_dtype": "bfloat16"}},
        fields=lora(target_modules=["*.layers.3.*"]),
    ),
    "frozen first stage, adafactor": Case(
        config=WIDE,
        sections={"optimizer": {"kind": "adafactor"}},
        fields=lora(target_modules=["*.layers.3.*"]),
    ),
    "frozen first stage, muon": Case(
        config=WIDE,
        sections={"optimizer": {"kind": "muon", "muon_learning_rate": 0.002}},
        fields=lora(target_modules=["*.layers.3.*"]),
    ),
    "frozen first stage, shards": Case(
        mesh=SHARDS, fields=lora(target_modules=["*.layers.3.*"]), sums=True
    ),
    "frozen first stage, copies": Case(
        mesh=COPIES, fields=lora(target_modules=["*.layers.3.*"]), sums=True
    ),
    "qlora, int8": Case(fields=lora() | {"quantize": Quantize(kind="int8")}),
    "dora": Case(fields=lora(kind="dora")),
    "pissa": Case(fields=lora(init="pissa")),
    "modules to save": Case(fields=lora(modules_to_save=["embed_tokens", "lm_head", "norms"])),
    "sft": Case("chat", fields={"objective": Sft(kind="sft")}),
    "dpo": Case("pairs", fields=DPO),
    "dpo, interleaved": Case("pairs", mesh=INTERLEAVED, fields=DPO | lora()),
    "ipo, lora": Case("pairs", fields={"objective": Preference(kind="ipo", beta=0.5)} | lora()),
    "simpo": Case("pairs", fields={"objective": SimPo(kind="simpo")}),
    "kto": Case("kto", sections=SLOW, fields=KTO),
    "kto, one micro-batch": Case(
        "kto",
        sections=SLOW | training(micro_batch_size=8, accumulation=1),
        fields=KTO | lora(),
    ),
    "reward": Case("pairs", config={"head": "values"}, fields={"objective": Reward(kind="reward")}),
    "reward, lora, tied": Case(
        "pairs",
        config={"head": "values"} | TIED,
        fields={"objective": Reward(kind="reward")} | lora(),
    ),
    "bfloat16": Case(sections=training(precision="bfloat16") | SLOW),
    "bfloat16, lora": Case(sections=training(precision="bfloat16") | SLOW, fields=lora()),
    "bfloat16-pure": Case(sections=training(precision="bfloat16-pure") | SLOW),
    "bfloat16-pure, tied, rounded stochastically": Case(
        config=TIED | WIDE,
        sections=training(precision="bfloat16-pure")
        | {"optimizer": {"learning_rate": 0.003, "stochastic_rounding": True}},
        sums=True,
        near=1e-3,
    ),
    "float16, lora, checkpointing": Case(
        sections=training(precision="float16", activation_checkpointing="selective") | SLOW,
        fields=lora(),
    ),
    "float16, tied": Case(
        config=TIED, sections=training(precision="float16") | SLOW, sums=True, near=1e-3
    ),
    "checkpointing, selective": Case(sections=training(activation_checkpointing="selective")),
    "checkpointing, every second layer, dropout": Case(
        config={"residual_dropout": 0.1}, sections=training(activation_checkpointing="every-2")
    ),
    "checkpointing, dropout, interleaved": Case(
        config=LEARNED | DROPOUT | {"tie_embeddings": False},
        mesh=INTERLEAVED,
        sections=training(activation_checkpointing="full"),
    ),
    "neftune": Case(sections=training(neftune_alpha=5.0)),
    "neftune, lora dropout, four stages": Case(
        sections=training(neftune_alpha=5.0), fields=lora(dropout=0.2), mesh=FOUR
    ),
    "kto, dropout": Case("kto", config=DROPOUT, sections=SLOW, fields=KTO),
    "muon": Case(
        config=WIDE, sections={"optimizer": {"kind": "muon", "muon_learning_rate": 0.002}}
    ),
    "adafactor": Case(config=WIDE, sections={"optimizer": {"kind": "adafactor"}}),
    "adafactor, tied": Case(
        config=WIDE | TIED, sections={"optimizer": {"kind": "adafactor"}}, sums=True
    ),
    "int8 states": Case(config=WIDE, sections={"optimizer": {"state_dtype": "int8"}}),
    "bfloat16 states": Case(config=WIDE, sections={"optimizer": {"state_dtype": "bfloat16"}}),
    "one micro-batch": Case(sections=training(micro_batch_size=8, accumulation=1)),
    "fewer micro-batches than stages": Case(
        mesh=FOUR, sections=training(micro_batch_size=4, accumulation=2)
    ),
    "deterministic": Case(sections=training(deterministic=True)),
    "packed, large micro-batches": Case(sections=training(micro_batch_size=4, accumulation=2)),
}
CASES = [
    *(pytest.param(case, id=name) for name, case in QUICK.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.soak) for name, case in SOAK.items()),
]


@pytest.fixture(scope="session")
def datasets(prepared, tmp_path_factory) -> dict[str, Path]:
    """Prepared folders by kind."""
    folders = {"text": prepared}
    for kind in ("chat", "pairs", "kto"):
        folders[kind] = write_answers(tmp_path_factory.mktemp(kind) / "prepared", prepared, kind)
    return folders


@pytest.fixture(scope="session")
def base_of(prepared, tmp_path_factory):
    """A folder with fresh weights of a config, for an adapter."""

    @cache
    def written(config) -> Path:
        folder = tmp_path_factory.mktemp("base")
        write_model(model_state(fresh_decoder(config, seed=3)), config, folder)
        load_tokenizer(prepared).save(folder)
        return folder

    return written


@pytest.fixture(scope="session")
def plan_of(datasets, base_of):
    """Eight sequences per step; a validation and samples in the middle and at the end."""

    def of(case: Case, steps: int = STEPS):
        config = tiny_config(
            **{"vocab_size": 512, "num_layers": 4, "tie_embeddings": False} | case.config
        )
        train = {"micro_batch_size": 1, "accumulation": 8} | case.sections.get("train", {})
        samples = () if config.head == "values" else ("def",)
        sections = case.sections | {
            "train": train | {"steps": steps, "tokens_per_step": 256},
            "checkpoint": {"every_steps": steps},
            "eval": {"every_steps": max(1, steps // 2)},
            "sample": {"prompts": samples, "max_new_tokens": 8},
        }
        if "adapter" in case.fields:
            sections["model"] = {"source": base_of(config)}
        plan = tiny_plan(datasets[case.data], config=config, **sections)
        return plan.model_copy(update=case.fields)

    return of


def over_ranks(plan, case: Case):
    several = on_ranks(plan, **case.mesh)
    if not case.layers:
        return several
    return several.model_copy(
        update={"train": several.train.model_copy(update={"pipeline_layers": case.layers})}
    )


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_trains_as_one_rank(plan_of, tmp_path, case) -> None:
    plan = plan_of(case)
    if plan.model.scores == "compiled" and find_compiler() is None:
        pytest.skip("no C++ compiler")
    several = over_ranks(plan, case)
    folders = tmp_path / "one", tmp_path / "many"
    for folder in folders:
        folder.mkdir()
    one = train_noting_gradients(plan.model_dump_json(), str(folders[0]))
    arguments = (several.model_dump_json(), str(folders[1]))
    many = ranks(several.train.ranks).call(train_noting_gradients, *arguments)[0]

    # The first step: each gradient, relative to its largest value.
    gradients_of_one, gradients_of_many = map(gradients_in, folders)
    assert gradients_of_one and gradients_of_one.keys() == gradients_of_many.keys()
    for name, gradient in gradients_of_one.items():
        error = (gradients_of_many[name] - gradient).abs().max()
        if case.sums and plan.train.precision != "bfloat16-pure":
            assert error <= 1e-6 * gradient.abs().max(), name
        elif case.sums:
            # Two gradients of each of 8 micro-batches are added in bfloat16, each rounded to 8 bits.
            assert error <= 16 * 2**-9 * gradient.abs().max(), name
        else:
            assert error == 0, name

    # All steps, evaluations and samples.
    assert losses(many).keys() == set(range(1, STEPS + 1))
    if case.sums:
        assert losses(many) == pytest.approx(losses(one), rel=0, abs=case.near)
        scores = [[event["loss"] for event in fields(run, "EvalDone")] for run in (one, many)]
        assert scores[0] and scores[1] == pytest.approx(scores[0], rel=0, abs=case.near)
        return
    for kind in ("StepDone", "EvalDone", "Sampled", "StepHealth", "RunStarted", "Warned"):
        assert comparable(many, kind) == comparable(one, kind), kind
    assert_same_checkpoints(*folders, step=STEPS)


def test_the_cut_for_unequal_devices_trains_as_one_rank(plan_of, tmp_path) -> None:
    """Two ranks on a stand-in for a GPU and one of a third of its speed."""
    case = Case(config={"num_layers": 8})
    plan = plan_of(case)
    step = StepShape(
        model=TrainedModel.of(plan, plan.model.config),
        sequence_length=plan.data.sequence_length,
        micro_batch_size=plan.train.micro_batch_size,
        precision=plan.train.precision,
        optimizer=plan.optimizer.kind,
        attention=plan.model.attention,
        checkpointing="none",
        compiled=False,
        score_chunk=plan.model.score_chunk,
        context_bytes=0.0,
        on_gpu=False,
    )
    devices = [
        stages.Device(name, Rate(peak=peak, share=(1.0, 1.0, 1.0)), limit=1e12)
        for name, peak in (("fast", 3e9), ("slow", 1e9))
    ]
    split = MeshSplit(pipeline=2)
    layers = stages.cut_layers(step, split, devices, vendor=None, micro_batches=8).layers
    assert sum(layers) == 8 and layers[0] >= 6
    test_a_pipeline_trains_as_one_rank(plan_of, tmp_path, replace(case, layers=layers))


def test_an_uneven_cut_is_named_once_and_is_no_straggler(plan_of, tmp_path) -> None:
    case = Case(
        config={"num_layers": 8},
        layers=(1, 7),
        sections=training(micro_batch_size=4, accumulation=2),
    )
    plan = plan_of(case, steps=SLOW_STEPS + 10)
    events = train(over_ranks(plan, case), tmp_path)
    warnings = [event["reason"] for event in fields(events, "Warned")]
    named = [reason for reason in warnings if "others wait" in reason]
    assert len(named) == 1, named
    assert named[0].startswith(
        "the cut into stages is uneven: stage 2 of 2 (layers 1 to 7) computes"
    )


OF_A_MACHINE = {
    "seconds", "time", "step_seconds", "tokens_per_second", "sequences_per_second", "memory_gib",
    "data_wait_seconds", "communication_seconds", "core_wait_seconds", "world_size", "mesh",
    "build_seconds", "graphs",
}  # fmt: skip


def comparable(events: list[Any], kind: str) -> list[dict[str, Any]]:
    """The events of a kind, without figures of the machine."""
    return [
        {name: value for name, value in event.items() if name not in OF_A_MACHINE}
        for event in fields(events, kind)
    ]


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {
        f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def assert_same_checkpoints(one: Path, many: Path, *, step: int) -> None:
    """Tensor for tensor, number for number, in the same files."""
    tensors, others = tensors_of(one, step), tensors_of(many, step)
    assert tensors and tensors.keys() == others.keys()
    unequal = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    assert unequal == []
    assert all(tensors[name].dtype == others[name].dtype for name in tensors)
    checkpoints = [folder / "checkpoints" / f"step-{step:08d}" for folder in (one, many)]
    names = [sorted(file.name for file in checkpoint.iterdir()) for checkpoint in checkpoints]
    assert names[0] == names[1]
    states = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in checkpoints]
    for state in states:
        state["progress"].pop("seconds")
    assert states[0] == states[1]
