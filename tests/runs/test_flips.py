"""One bit flipped in a file that a run reads is noticed, or changes nothing of what the run leaves behind."""

import random
from collections import Counter
from pathlib import Path

import pytest
from flips import RUN, World

KINDS = ("pretrain", "lora", "dpo")
MOMENTS = ("start", "middle", "done")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("flips")
    pretrain = World(folder / "pretrain", "pretrain")
    lora = World(folder / "lora", "lora")
    return {
        "pretrain": pretrain,
        "lora": lora,
        "dpo": World(folder / "dpo", "dpo", lora.folder / RUN / "base"),
    }


# A file of each class, and the moment at which it matters.
CLASSES = [
    ("pretrain", "middle", "prepared/train-00000.bin"),
    ("pretrain", "done", "prepared/validation-00000.bin"),
    ("pretrain", "middle", "prepared/train-documents.bin"),
    ("pretrain", "start", "prepared/tokenizer.json"),
    ("pretrain", "middle", "prepared/manifest.json"),
    ("pretrain", "middle", "runs/one/plan.json"),
    ("pretrain", "start", "runs/one/recipe.yaml"),
    ("pretrain", "middle", "runs/one/machine.json"),
    ("pretrain", "middle", "runs/one/run.json"),
    ("pretrain", "done", "runs/one/checkpoints/step-00000004/model.safetensors"),
    ("pretrain", "done", "runs/one/checkpoints/step-00000004/tokenizer.json"),
    ("pretrain", "done", "runs/one/checkpoints/best.json"),
    ("lora", "start", "runs/one/base/model.safetensors"),
    ("lora", "middle", "runs/one/base/model.safetensors"),
    ("lora", "done", "runs/one/base/config.json"),
    ("dpo", "start", "base/model.safetensors"),
    ("dpo", "start", "base/config.json"),
    ("dpo", "middle", "prepared/sources.jsonl"),
    ("dpo", "middle", "runs/one/reference-train.bin"),
    ("dpo", "middle", "runs/one/reference-validation.json"),
    ("dpo", "middle", "prepared/train-loss-mask-00000.bin"),
    ("dpo", "middle", "prepared/train-first.bin"),
]


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_bit_in_each_class_of_file_is_noticed(worlds, every):
    draw, found = random.Random(1), Counter()
    for kind, moment, name in CLASSES[::every]:
        world = worlds[kind]
        path = world.folder / name
        assert path in world.read(moment), f"{name} is not there"
        result = world.flipped(moment, path, draw.randrange(8 * len(world.moments[moment][path])))
        assert not result.startswith("SILENT"), result
        found[result] += 1
    # what the sources were is read by `prepare` alone; bits of JSON may say the same
    assert found["same"] <= 3, found


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(10))
def test_a_hundred_bits_anywhere(worlds, chunk):
    draw, found, silent = random.Random(f"flips {chunk}"), Counter(), []
    for number in range(100):
        kind, moment = KINDS[number % 3], draw.choice(MOMENTS)
        world = worlds[kind]
        path = draw.choice(world.read(moment))  # each file as often as another, whatever its size
        result = world.flipped(moment, path, draw.randrange(8 * len(world.moments[moment][path])))
        found[result.partition(":")[0]] += 1
        silent += [f"{kind}, {result}"] if result.startswith("SILENT") else []
    print(chunk, dict(found))
    assert silent == []


def test_files_are_where_they_are_expected(worlds):
    """So that a class of files that a run begins to read is not forgotten here."""
    names = {Path(name) for _, _, name in CLASSES}
    every = {
        path.relative_to(world.folder) for world in worlds.values() for path in world.read("done")
    }
    kinds = {(path.parent.parts[:1], path.suffix) for path in names}
    assert {(path.parent.parts[:1], path.suffix) for path in every} <= kinds
