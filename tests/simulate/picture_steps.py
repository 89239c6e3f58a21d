"""One step over a tiny dataset with pictures two ways: planned from sizes, and run and measured."""

import io
import json
from dataclasses import replace
from pathlib import Path

import torch
from memory_tracker import peak_bytes
from PIL import Image
from steps_for_tests import load_of

from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.prepare.prepare import prepare
from bloomery.data.shards import read_manifest
from bloomery.plan.estimate.memory import tensor_bytes
from bloomery.plan.gather import prepared_facts
from bloomery.plan.pictures import step_pictures
from bloomery.plan.resolve import local_facts, resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.train.objectives.build import build_objective
from bloomery.train.state import build_state
from bloomery.train.step import train_step
from pictures_for_tests import save_base
from tiny_composites import CONFIGS

RECIPE = """
objective: {kind: sft}
model: {from: base}
adapter: {kind: lora, rank: 4, target_modules: [q_proj]}
data: {path: rows, sequence_length: 1024, validation: 0.0, num_proc: 1}
train: {precision: PRECISION, attention: per_document, compile: false, micro_batch_size: 1, tokens_per_step: 1024}
"""
WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
WIDE |= {"num_attention_heads": 4}
QWEN = {"hidden_size": 128, "intermediate_size": 512, "depth": 4, "num_heads": 4}


def wide_config(kind: str) -> dict:
    """The tiny model with a tower that weighs more than its language model."""
    config = json.loads(json.dumps(CONFIGS[kind]))
    vision = config["vision_config"]
    if kind == "gemma4_unified":  # has no layers
        vision |= {"mm_embed_dim": 2048, "output_proj_dims": 2048}
        return config
    vision |= QWEN if kind.startswith("qwen") else WIDE
    if "head_dim" in vision:
        vision["head_dim"] = 32
    if kind == "gemma4":
        vision["num_key_value_heads"] = 4
    if kind == "mistral3":
        vision["image_size"] = 448
    if "vision_use_head" not in vision and kind in ("gemma3", "lfm2_vl"):
        vision["vision_use_head"] = False  # as in published models
    return config


def planned_and_measured(
    folder: Path, kind: str, size: tuple[int, int], *edits: str, precision: str = "float32"
) -> tuple[RunPlan, float, float]:
    """The plan, and bytes of a step's tensors: as planned, and as the CPU's allocator hands them out."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    save_base(kind, folder / "base", weights=True)
    _read_large_pictures(folder / "base")
    _write_rows(folder / "rows", size)
    (folder / "recipe.yaml").write_text(RECIPE.replace("PRECISION", precision))
    prepared = folder / "prepared"
    loaded = load_recipe(folder / "recipe.yaml", [f"data.prepared={prepared}", *edits])
    prepare(loaded, prepared)
    dataset = prepared_facts(read_manifest(prepared), loaded.recipe, prepared)
    plan = resolve(loaded, replace(local_facts(loaded), dataset=dataset))
    pictures = step_pictures(loaded.recipe, dataset)
    waiting = replace(pictures, waiting_sequences=plan.train.accumulation)
    step = replace(load_of(plan), pictures=waiting)
    return plan, sum(tensor_bytes(step).values()), _measured(plan)


def _read_large_pictures(folder: Path) -> None:
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    if settings["image_processor_type"].startswith("Qwen"):
        settings |= {"max_pixels": 10**6}
        settings["size"] = {"shortest_edge": 1024, "longest_edge": 10**6}
    elif settings["image_processor_type"].startswith(("Pixtral", "SmolVLM")):
        settings["size"] = {"longest_edge": 448}
    path.write_text(json.dumps(settings))


def _write_rows(folder: Path, size: tuple[int, int]) -> None:
    folder.mkdir(exist_ok=True)
    stream = io.BytesIO()
    Image.new("RGB", size, "red").save(stream, "PNG")
    (folder / "red.png").write_bytes(stream.getvalue())
    question = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "Color?"}]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]
    (folder / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)


def _measured(plan: RunPlan) -> float:
    state = build_state(plan)
    loader = Loader(
        plan.data.prepared,
        sequence_length=plan.data.sequence_length,
        layout=plan.data.layout,
        seed=0,
    )
    sequences = [loader.batch(Cursor(0, number), 1) for number in range(loader.sequences)]
    fullest = max(sequences, key=lambda batch: len(batch.pictures.places))
    batches = [fullest] * plan.train.accumulation
    objective = build_objective(plan)

    def step() -> None:
        train_step(state.model_and_optimizer, batches, objective, plan=plan.train, lr_scale=1.0)

    step()
    step()
    model = state.model_and_optimizer.model
    held = [*model.parameters(), *model.buffers(), *model.vision.tower.parameters()]
    held += [*state.model_and_optimizer.optimizer.named_tensors().values(), *batches[0].tensors()]
    return sum(tensor.nbytes for tensor in held) + peak_bytes(step)
