"""Every feature that the support matrix calls tested trains on two ranks as on one. Oracle: one rank.

A feature that is off on the ranks is noticed: by the losses, or by what the first step ran.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans_for_tests import sharing_config, tiny_config, tiny_plan
from safetensors.torch import load_file, save_file
from structured_runs import write_answers

from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.configs import read_config
from bloomery.model.document_rows import FIXED_SHARES
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.plan.support_matrix import AXES, FEATURES
from bloomery.recipe.load import load_recipe
from bloomery.recipe.objectives import (
    Distill,
    Grpo,
    Kto,
    OnPolicyDistill,
    Ppo,
    Preference,
    Reward,
    Sft,
    SimPo,
)
from bloomery.recipe.rewards import VerifierReward
from bloomery.recipe.schema import Lora, Peft, Quantize
from foreign_models import saved_model
from ranks import fields, losses, on_ranks, ranks, seconds_of, train_here

CONFIG = tiny_config(vocab_size=512)
# Each of two ranks that share sequences takes a key/value head.
TWO_KEY_HEADS = {"num_heads": 4, "num_kv_heads": 2}
# a row is whole int8 blocks
WIDE = tiny_config(vocab_size=512, hidden_size=64, intermediate_size=128, head_dim=32)
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
IA3 = {
    "method": "ia3",
    "target_modules": ["k_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
ADALORA = {
    "method": "adalora",
    "init_r": 6,
    "target_r": 2,
    "tinit": 1,
    "tfinal": 1,
    "deltaT": 1,
    "total_step": 5,
}
STEPS, SOME, FEW, GRADIENTS = 20, 8, 4, "gradients.safetensors"
HALF = 1e-3
# By feature: (kind of data, changes of the plan, tolerance of the losses); a feature may have several. States in int8
# or bfloat16, and Muon's iteration in bfloat16, turn a last bit of a gradient into a last bit of half precision.
CASES: dict[str, list[tuple[str, dict[str, Any], float]]] = {
    "objective pretrain": [("text", {}, 1e-5)],
    "keys of another layer, inputs of each layer": [("text", {"config": sharing_config()}, 1e-5)],
    "objective sft": [("chat", {"objective": Sft(kind="sft")}, 1e-5)],
    "objective dpo, ipo, simpo, orpo": [
        ("pairs", {"objective": Preference(kind="dpo", beta=0.5)}, 1e-5),
        ("pairs", {"objective": Preference(kind="dpo", beta=0.5), "adapter": Lora(**LORA)}, 1e-5),
        ("pairs", {"objective": SimPo(kind="simpo")}, 1e-5),
    ],
    "objective kto": [
        (
            "kto",
            {"objective": Kto(kind="kto", beta=0.5), "optimizer": {"learning_rate": 0.003}},
            1e-5,
        ),
        ("kto", {"objective": Kto(kind="kto", beta=0.5), "adapter": Lora(**LORA)}, 1e-5),
    ],
    "objective reward": [("pairs", {"objective": Reward(kind="reward"), "head": "values"}, 1e-5)],
    "objective distill": [("text", {"objective": "distill"}, 1e-5)],
    "objective on_policy_distill": [("prompts", {"objective": "on_policy_distill"}, 1e-5)],
    "objective grpo, rloo, ppo": [
        (
            "prompts",
            {
                "config": WIDE,
                "objective": Grpo(kind="grpo", num_generations=2, max_completion_length=8),
                "rewards": (VerifierReward(verifier="length", max_characters=6),),
            },
            1e-5,
        ),
        (
            "prompts",
            {
                "objective": Grpo(
                    kind="grpo",
                    num_generations=2,
                    max_completion_length=8,
                    num_iterations=2,
                    beta=0.05,
                    loss_type="grpo",
                    entropy_coef=0.1,
                ),
                "rewards": (VerifierReward(verifier="length", max_characters=6),),
                "adapter": Lora(**LORA),
            },
            1e-5,
        ),
        (
            "prompts",
            {
                "objective": Grpo(kind="grpo", num_generations=2, max_completion_length=8),
                "rewards": (VerifierReward(verifier="length", max_characters=6),),
                "adapter": Lora(**LORA),
                "quantize": Quantize(kind="nf4"),
            },
            1e-5,
        ),
        (
            "prompts",
            {
                "config": WIDE,
                "objective": Grpo(
                    kind="grpo",
                    num_generations=2,
                    max_completion_length=8,
                    num_iterations=2,
                    beta=0.5,
                    reference="device",
                ),
                "rewards": (VerifierReward(verifier="length", max_characters=6),),
            },
            1e-5,
        ),
        (
            "prompts",
            {
                "objective": Ppo(kind="ppo", max_completion_length=8, num_iterations=2),
                "rewards": (VerifierReward(verifier="length", max_characters=6),),
                "adapter": Lora(**LORA),
            },
            1e-5,
        ),
    ],
    "objective.teacher, grpo, rloo": [
        (
            "prompts",
            {
                "objective": "grpo with a teacher",
                "rewards": (VerifierReward(verifier="length", max_characters=6),),
            },
            1e-5,
        )
    ],
    "adapter lora": [
        ("text", {"adapter": Lora(**LORA)}, 1e-5),
        ("text", {"adapter": Lora(**LORA | {"modules_to_save": ["norms"]})}, 1e-5),
    ],
    "adapter dora": [("text", {"adapter": Lora(**LORA | {"kind": "dora"})}, 1e-5)],
    "adapter pissa": [("text", {"adapter": Lora(**LORA | {"init": "pissa"})}, 1e-5)],
    "PEFT methods": [
        ("text", {"adapter": Peft(kind="peft", **IA3)}, 1e-5),
        ("text", {"adapter": Peft(kind="peft", **ADALORA)}, 1e-5),
    ],
    "quantize nf4, int8": [
        ("text", {"adapter": Lora(**LORA), "quantize": Quantize(kind=kind)}, 1e-5)
        for kind in ("nf4", "int8")
    ],
    "train.precision bfloat16": [
        ("text", {"train": {"precision": "bfloat16"}}, HALF),
        ("text", {"train": {"precision": "bfloat16"}, "adapter": Lora(**LORA)}, HALF),
    ],
    "train.precision bfloat16-pure": [("text", {"train": {"precision": "bfloat16-pure"}}, HALF)],
    "train.precision float16": [("text", {"train": {"precision": "float16"}}, HALF)],
    "train.activation_checkpointing": [
        ("text", {"train": {"activation_checkpointing": mode}}, 1e-5)
        for mode in ("full", "selective")
    ],
    "parallel.scoring_devices": [
        ("text", {"objective": "distill", "train": {"scoring_devices": 1}}, 1e-5),
    ],
    "parallel.stream": [
        (
            "text",
            {
                "train": {"stream": "layers", "activation_checkpointing": "full"},
                "adapter": Lora(**LORA),
            },
            1e-5,
        )
    ],
    # After 14 steps a single process is 3.1e-5 from the same one uncompiled: rounding, of a step with a high loss.
    "train.compile": [("text", {"train": {"compile": True}}, 5e-5)],
    "optimizer adamw": [("text", {"config": WIDE}, 1e-5)],
    "optimizer muon": [
        ("text", {"config": WIDE, "optimizer": {"kind": "muon", "muon_learning_rate": 0.002}}, HALF)
    ],
    "optimizer adafactor": [("text", {"config": WIDE, "optimizer": {"kind": "adafactor"}}, 1e-5)],
    "optimizer.state_dtype int8, bfloat16": [
        ("text", {"config": WIDE, "optimizer": {"state_dtype": dtype}}, HALF)
        for dtype in ("int8", "bfloat16")
    ],
    # Without effect on a CPU, so that the matrix says "not tested": they train.
    "optimizer.paged, offload": [("text", {"config": WIDE, "optimizer": {"offload": True}}, 1e-5)],
    "optimizer.stochastic_rounding, adamw": [
        (
            "text",
            {
                "config": WIDE,
                "optimizer": {"stochastic_rounding": True},
                "train": {"precision": "bfloat16-pure"},
            },
            HALF,
        )
    ],
    "optimizer.stochastic_rounding, adafactor": [
        (
            "text",
            {
                "optimizer": {"kind": "adafactor", "stochastic_rounding": True},
                "train": {"precision": "bfloat16-pure"},
            },
            HALF,
        )
    ],
    "train.offload_activations": [("text", {"train": {"offload_activations": True}}, 1e-5)],
    "train.ema_decay": [("text", {"train": {"ema_decay": 0.3}}, 1e-5)],
    # BLOOM's documents are rows of their own, in as many forwards on each rank.
    "layers of transformers": [
        ("text", {"foreign": "phi"}, 1e-5),
        ("text", {"foreign": "bloom"}, 1e-5),
        ("text", {"foreign": "phi", "loaded_by_transformers": True}, 1e-5),
    ],
}
# What must run on every rank where losses alone would not show that a feature is off: see `train_noting_gradients`.
RUNS: dict[str, Callable[[dict[str, Any], dict[str, Any]], bool]] = {
    "train.precision bfloat16": lambda facts, _: facts["products"] == ["torch.bfloat16"],
    "train.precision bfloat16-pure": lambda facts, _: facts["products"] == ["torch.bfloat16"],
    "train.precision float16": lambda facts, _: facts["products"] == ["torch.float16"],
    "train.activation_checkpointing": lambda facts, _: facts["forwards"] == 2,
    "parallel.stream": lambda facts, _: facts["streams"],
    "train.compile": lambda facts, _: facts["compiled"],
    "optimizer.state_dtype int8, bfloat16": lambda facts, changes: (
        changes["optimizer"]["state_dtype"] in str(facts["states"])
    ),
}
REFUSED = {one.name for one in FEATURES if all(one.reason(axis) for axis in AXES)}


def mesh_name(mesh: dict[str, int]) -> str:
    return " x ".join(f"{size} {axis}" for axis, size in mesh.items())


# `make test` takes eight steps for these and four for all others, `make soak` twenty for all.
LONGER = (
    "objective pretrain",
    "objective sft",
    "objective dpo, ipo, simpo, orpo",
    "adapter lora",
    "optimizer adamw",
)
MESHES: tuple[dict[str, int], ...] = (
    {"replicate": 2},
    {"shard": 2},
    {"pipeline": 2},
    {"replicate": 2, "context": 2},
    {"replicate": 4},
    {"shard": 4},
    {"pipeline": 2, "replicate": 2},
    {"pipeline": 2, "shard": 2},
    {"shard": 2, "context": 2},
    {"shard": 2, "replicate": 2, "context": 2},
)


def world_of(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "context")


CELLS = [
    pytest.param(
        feature,
        mesh,
        steps,
        *case,
        id=f"{feature.name}-{mesh_name(mesh)}-{steps} steps-{number}",
        marks=[]
        if feature.name != "train.compile"
        and world_of(mesh) == 2
        and mesh != {"shard": 2, "context": 2}
        and (steps, number) == (quick, 0)
        else [pytest.mark.soak],
    )
    for feature in FEATURES
    for mesh in MESHES
    if not any(feature.reason(axis) for axis in mesh)
    for number, case in enumerate(CASES.get(feature.name, []))
    for quick in [SOME if feature.name in LONGER else FEW]
    for steps in sorted({STEPS, quick} if world_of(mesh) == 2 else {STEPS})
]


def write_prompts(folder: Path) -> Path:
    """A prepared dataset of short prompts."""
    rows = [{"prompt": f"def f{number}(x): return"} for number in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    edits = [
        f"data.path={folder / 'prompts.jsonl'}",
        "data.builtin=null",
        "data.sequence_length=48",
        "objective={kind: grpo, num_generations: 4, max_completion_length: 8}",
        "rewards=[{verifier: length, max_characters: 6}]",
        "tokenizer.train.vocab_size=300",
        "sample.prompts=[]",
    ]
    prepare(load_recipe("demo", edits), folder / "prepared")
    return folder / "prepared"


@pytest.fixture(scope="session")
def folders(prepared, tmp_path_factory) -> dict[str, Path]:
    made = {
        "text": prepared,
        "base": tmp_path_factory.mktemp("base"),
        "teacher": tmp_path_factory.mktemp("teacher"),
        "base, shared": tmp_path_factory.mktemp("base"),
        "teacher, shared": tmp_path_factory.mktemp("teacher"),
    }
    for kind in ("chat", "pairs", "kto"):
        made[kind] = write_answers(tmp_path_factory.mktemp(kind) / "prepared", prepared, kind)
    shared = replace(CONFIG, **TWO_KEY_HEADS)
    for name, config, seed in (
        ("base", CONFIG, 3),
        ("teacher", CONFIG, 7),
        ("base, shared", shared, 3),
        ("teacher, shared", shared, 7),
    ):
        write_model(model_state(fresh_decoder(config, seed=seed)), config, made[name])
        load_tokenizer(prepared).save(made[name])
    made["prompts"] = write_prompts(tmp_path_factory.mktemp("prompts"))
    # Their tokenizer is another one.
    for name, config in (("teacher of prompts", CONFIG), ("teacher of prompts, shared", shared)):
        made[name] = tmp_path_factory.mktemp("teacher")
        write_model(model_state(fresh_decoder(config, seed=7)), config, made[name])
        load_tokenizer(made["prompts"]).save(made[name])
    for kind in ("phi", "bloom"):
        made[kind] = tmp_path_factory.mktemp(kind)
        saved_model(kind, made[kind], vocab_size=300)
    return made


def train_noting_gradients(plan_json: str, folder: str) -> list[Any]:
    """On every rank: the events of a run; in `folder`, the whole gradients of its first step and what ran in it."""
    import torch
    from torch._dynamo.utils import counters

    from bloomery.model.io.parameters import full
    from bloomery.train import loop

    # The process has compiled for other cases, and after eight graphs of a function PyTorch runs it uncompiled.
    torch._dynamo.reset()
    plain = loop.train_step

    def first_step(own, *arguments, **named):
        loop.train_step, update = plain, own.optimizer.step

        def noting(lr_scale: float, *, gradient_factor: float = 1.0) -> None:
            parameters = own.model.named_parameters()
            found = {
                name: full(p.grad).float().contiguous()
                for name, p in parameters
                if p.grad is not None
            }
            found = {
                name: found[name]
                for name in found
                if not own.stage_parameters or own.stage_parameters.owns(name, own.mesh)
            }
            if own.mesh.first_data_rank:
                save_file(found, Path(folder) / f"stage-{own.mesh.stage}-{GRADIENTS}")
            del own.optimizer.step
            update(lr_scale, gradient_factor=gradient_factor)

        own.optimizer.step = noting
        products, graphs = list[str](), counters["stats"]["unique_graphs"]
        linear = next(
            part
            for name, part in own.model.named_modules()
            if ".layers." in name and isinstance(part, torch.nn.Linear)
        )
        hook = (
            None
            if named["plan"].compile
            else linear.register_forward_hook(
                lambda module, inputs, output: products.append(str(output.dtype))
            )
        )
        result = plain(own, *arguments, **named)
        if hook is not None:
            hook.remove()
        states: dict[str, set[str]] = {}
        for name, value in own.optimizer.named_tensors().items():
            states.setdefault(name.rpartition(".")[2], set()).add(str(value.dtype))
        facts = {
            "products": sorted(set(products)),
            "forwards": len(products) / len(arguments[0]),
            "states": {slot: sorted(dtypes) for slot, dtypes in sorted(states.items())},
            "compiled": counters["stats"]["unique_graphs"] > graphs,
            "streams": own.model.weight_stream is not None,
        }
        (Path(folder) / f"facts-{own.mesh.rank}.json").write_text(json.dumps(facts))
        return result

    loop.train_step = first_step
    try:
        return train_here(plan_json, folder, None, None)
    finally:
        loop.train_step = plain


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The run of one rank, once per plan: its events and its folder."""
    known: dict[str, tuple[list[Any], Path]] = {}

    def of(plan) -> tuple[list[Any], Path]:
        key = plan.model_dump_json()
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[key] = train_noting_gradients(key, str(folder)), folder
        return known[key]

    return of


def plan_of(
    folders: dict[str, Path], data: str, changes: dict[str, Any], steps: int, *, shares: bool
):
    changes = dict(changes)
    sections = {name: changes.pop(name) for name in ("train", "optimizer") if name in changes}
    sections["train"] = {"steps": steps} | sections.get("train", {})
    sections |= {"checkpoint": {"every_steps": steps}, "eval": {"every_steps": steps // 2}}
    # at 0.01 the rounding of half precision grows tenfold within three steps
    if "precision" in sections["train"]:
        sections["optimizer"] = {"learning_rate": 0.003} | sections.get("optimizer", {})
        # the loss of few tokens is mostly rounding
        sections["train"] |= {"accumulation": 8, "tokens_per_step": 512}
    config, foreign = changes.pop("config", CONFIG), changes.pop("foreign", None)
    if head := changes.pop("head", None):
        config = tiny_config(vocab_size=512, head=head)
    if foreign is not None:
        config = read_config(folders[foreign], "transformers")
        if changes.pop("loaded_by_transformers", False):
            backend = replace(config.transformers_backend, safe_reason="a test asks for it")
            config = replace(config, transformers_backend=backend)
    if shares:
        config = replace(config, **TWO_KEY_HEADS)
    suffix = ", shared" if shares else ""
    if changes.get("objective") == "distill":
        changes["objective"] = Distill(
            kind="distill", teacher=str(folders[f"teacher{suffix}"]), kd_ratio=0.5
        )
    if changes.get("objective") == "on_policy_distill":
        changes["objective"] = OnPolicyDistill(
            kind="on_policy_distill",
            teacher=str(folders[f"teacher of prompts{suffix}"]),
            max_completion_length=8,
        )
    if changes.get("objective") == "grpo with a teacher":
        changes["objective"] = Grpo(
            kind="grpo",
            teacher=str(folders[f"teacher of prompts{suffix}"]),
            num_generations=2,
            max_completion_length=8,
        )
    if "adapter" in changes or foreign is not None:
        sections["model"] = {"source": folders[foreign or f"base{suffix}"]}
    return tiny_plan(folders[data], config=config, **sections).model_copy(update=changes)


def gradients_in(folder: Path) -> dict[str, Any]:
    """Of all stages."""
    gradients: dict[str, Any] = {}
    for file in sorted(folder.glob(f"stage-*-{GRADIENTS}")):
        gradients |= load_file(file)
    return gradients


def test_every_cell_is_refused_or_has_a_case() -> None:
    assert CASES.keys() | REFUSED == {one.name for one in FEATURES}
    assert all(bool(one.reason("shard")) >= bool(one.reason("replicate")) for one in FEATURES)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("feature", "mesh", "steps", "data", "changes", "near"), CELLS)
def test_ranks_train_as_one_does(
    folders, alone, tmp_path, feature, mesh, steps, data, changes, near
) -> None:
    plan = plan_of(folders, data, changes, steps, shares="context" in mesh)
    one, place = alone(plan)
    several = on_ranks(plan, **mesh)
    world = several.train.ranks
    words = (several.model_dump_json(), str(tmp_path))
    many = ranks(world).call(train_noting_gradients, *words, seconds=seconds_of(several))[0]
    facts = [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in range(world)]
    alone = json.loads((place / "facts-0.json").read_text())
    if plan.model.config.transformers_backend and "shard" in mesh:
        # Documents as rows of their own take a fixed number of forwards on ranks that share weights.
        is_rows = plan.model.config.transformers_backend.documents == "rows"
        assert facts[0]["forwards"] == (len(FIXED_SHARES) if is_rows else 1)
        alone["forwards"] = facts[0]["forwards"]
    assert facts == [alone] * world
    assert RUNS.get(feature.name, lambda facts, changes: True)(facts[0], changes), facts[0]
    assert losses(many).keys() == set(range(1, steps + 1))
    assert losses(many) == pytest.approx(losses(one), rel=0, abs=near)
    norms = [next(event["grad_norm"] for event in fields(run, "StepDone")) for run in (one, many)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if near < 1e-3 else 0.05)
    scored = [[event["loss"] for event in fields(run, "EvalDone")] for run in (one, many)]
    assert scored[1] == pytest.approx(scored[0], abs=near)
    near = 1e-5 if plan.train.precision == "float32" else 0.05
    of_one, of_many = gradients_in(place), gradients_in(tmp_path)
    assert of_one and of_one.keys() == of_many.keys()
    for name, gradient in of_one.items():
        error = float(
            (of_many[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30)
        )
        assert error < near, name
