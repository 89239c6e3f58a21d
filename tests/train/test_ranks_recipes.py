"""The packaged recipes for several GPUs train in miniature on two and four ranks as on one, from their own plan."""

import json
import random
from pathlib import Path

import pytest

from bloomery.core.units import GIB
from bloomery.data.prepare.prepare import prepare
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.plan.gather import gather
from bloomery.plan.pipeline import bubble
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from ranks import fields, losses, train

LLAMA = {
    "family": "llama",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 128,
}
CHATS = {"path": "pairs", "glob": "*.jsonl", "format": "alpaca"}
# By recipe: the shape of its model (heads of keys per head as in the recipe's), its data.
TWINS = {
    "go-coder-125m": (
        {
            "preset": None,
            "family": "gpt2",
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "max_positions": 128,
            "dropout": 0.0,
        },
        {"path": "code", "glob": "*.py"},
    ),
    "llama3.1-8b-full-8gpu": (
        LLAMA | {"num_kv_heads": 1},
        CHATS | {"chat": {"template": "chatml"}},
    ),
    "llama2-70b-lora-8gpu": (LLAMA | {"num_kv_heads": 1}, CHATS),
    "llama2-7b-lora-qa": (
        LLAMA | {"num_kv_heads": 4},
        CHATS | {"columns": {"input": "context", "output": "response"}},
    ),
}
# By recipe, as TWINS: those that set a pipeline. Their twins have two stages.
PIPELINES = {
    "llama2-7b-pipeline-2gpu": (
        LLAMA | {"num_kv_heads": 4},
        CHATS | {"chat": {"template": "chatml"}},
    ),
    "llama2-30b-pipeline-4gpu": (LLAMA | {"num_kv_heads": 4}, CHATS),
    "llama2-30b-pipeline-6gpu-long": (LLAMA | {"num_kv_heads": 1}, CHATS),
}
MESHES = [
    (2, 1),
    (1, 2),
    *(pytest.param(*mesh, marks=pytest.mark.soak) for mesh in ((4, 1), (1, 4), (2, 2))),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Folders `code` and `pairs`, the latter with the names of both datasets for an answer."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    (folder / "code").mkdir()
    (folder / "pairs").mkdir()
    for number in range(30):
        lines = [
            f"def function_{number}_{i}(value):\n    return value * {i} + {number}\n"
            for i in range(8)
        ]
        (folder / "code" / f"{number}.py").write_text("\n".join(lines))
    words = ["we", "saw", "a", "tree", "there", "and", "then", "it", "fell"]
    rows = []
    for number in range(150):
        answer = " ".join(draw.choices(words, k=8))
        question = f"What did we see on day {number}?"
        rows.append({"instruction": question, "output": answer, "context": "", "response": answer})
    (folder / "pairs" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def planned(name: str, texts: Path, folder: Path, gpus: int, **parallel: int) -> RunPlan:
    """The plan of the recipe's twin for so many CPU ranks."""
    model, data = (TWINS | PIPELINES)[name]
    recipe = folder / f"{name}-tiny.yaml"
    sections = {
        "extends": name,
        "model": model,
        "tokenizer": {"train": {"kind": "bpe", "vocab_size": 300}},
        "data": data
        | {"path": str(texts / data["path"]), "sequence_length": 64, "validation": "5%"},
        "train": {"max_steps": 2, "tokens_per_step": 512, "precision": "float32", "compile": False},
        "optimizer": {"learning_rate": 1e-3, "warmup": "1 steps"},
        "checkpoint": {"every": "100%", "async_save": False},
        "eval": {"every": "100%"},
        "sample": {"prompts": []},
        "logging": {"trackers": []},
        "claims": {},
        "parallel": parallel,
    }
    recipe.write_text(json.dumps(sections))  # which is YAML
    loaded = load_recipe(recipe)
    prepared = folder / "prepared"
    if not prepared.is_dir():
        prepare(loaded, prepared)
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=gpus,
        cpu_flags=("avx2",),
        memory_bytes=32 * GIB,
        memory_free_bytes=20 * GIB,
        disk_free_bytes=100 * GIB,
        compiler="/usr/bin/g++",
    )
    computer = Machine(
        accelerators=(), host=host, software=Software(python="3.12.4", torch="2.13.0", build="cpu")
    )
    return resolve(loaded, gather(loaded, computer, prepared=prepared), gpus=gpus)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("replicate", "shard"), MESHES)
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_takes_the_steps_of_one_rank(name, replicate, shard, texts, tmp_path) -> None:
    world = replicate * shard
    plan = planned(name, texts, tmp_path, world, replicate=replicate, shard=shard)
    assert (plan.train.replicate, plan.train.shard) == (replicate, shard)
    assert plan.train.micro_batch_size * plan.train.accumulation * world == 512 // 64
    alone = train(planned(name, texts, tmp_path, 1, replicate=1, shard=1), tmp_path / "one")
    several = train(plan, tmp_path / "several")
    assert losses(several).keys() == {1, 2}
    assert losses(several) == pytest.approx(losses(alone), rel=0, abs=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_has_the_losses_of_one_rank_bit_for_bit(name, texts, tmp_path) -> None:
    plan = planned(name, texts, tmp_path, 2, pipeline=2)
    assert (plan.train.pipeline, plan.train.pipeline_layers) == (2, (1, 1))
    several = train(plan, tmp_path / "several")
    # One rank with the same micro-batches: sums of other ones round differently.
    one_rank = plan.train.model_copy(update={"pipeline": 1, "pipeline_layers": ()})
    alone = train(plan.model_copy(update={"train": one_rank}), tmp_path / "one")
    assert losses(several).keys() == {1, 2}
    assert losses(several) == losses(alone)
    for figure in ("parameters", "trainable"):  # of the whole model, not of a stage
        assert fields(several, "RunStarted")[0][figure] == fields(alone, "RunStarted")[0][figure]


def test_recipes_of_a_pipeline_keep_every_stage_busy_for_most_of_a_step() -> None:
    for name in PIPELINES:
        recipe = load_recipe(name).recipe
        stages = recipe.parallel.pipeline
        micro_batches = recipe.train.tokens_per_step // recipe.data.sequence_length
        assert bubble(stages=stages, micro_batches=micro_batches) < 0.15
        assert f"-{stages}gpu" in name


def test_recipes_for_eight_gpus_split_their_steps_into_eight() -> None:
    for name in (name for name in TWINS if name.endswith("-8gpu")):
        recipe = load_recipe(name).recipe
        assert recipe.train.tokens_per_step % (8 * recipe.data.sequence_length) == 0
        assert (recipe.parallel.replicate, recipe.parallel.shard) == ("auto", "auto")
