"""Pictures a second of a core, and bytes kept: `bloomery prepare` beside `datasets.map` with the same image processor.

    python benchmarks/prepare_pictures.py [--pictures 60] [--rounds 3]

Both sides read the same rows and JPEG files (640x480, 1280x720 and 1920x1080 in turn, noise on a blurred pattern) for
the image processor of Qwen3-VL, at most 1,280 tokens a picture. `datasets.map` decodes with pillow, runs transformers'
processor and writes float32 patches to Arrow, in batches of 8, as its guides say. The sides alternate. What counts is
processor time of a side's processes, of which that of six pictures is taken off: imports and starting, the median of
all rounds.

The loader's part is measured, too: decoding and patches of a stored file, against reading stored patches from the page
cache. A disk adds its own time to the second.
"""

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = ((640, 480), (1280, 720), (1920, 1080))
FEW = 6
LIMITS = {"shortest_edge": 65_536, "longest_edge": 1280 * 32 * 32}
RESULTS = Path(__file__).parent / "results" / "prepare_pictures.json"
RECIPE = """
objective: {kind: sft}
model: {from: base}
data: {path: ROWS, sequence_length: 4096, validation: 0.0, num_proc: 1}
"""


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG of about the bytes that a photograph of its size has."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth).astype(np.int16) + rng.integers(-12, 12, (height, width, 3))
    stream = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def write_rows(folder: Path, count: int) -> int:
    """Rows and files; returns the bytes of the files."""
    folder.mkdir()
    rows = list[str]()
    size = 0
    for number in range(count):
        content = photograph(*SIZES[number % len(SIZES)], seed=number)
        size += len(content)
        (folder / f"{number}.jpg").write_bytes(content)
        parts = [{"type": "image", "image": f"{number}.jpg"}, {"type": "text", "text": "What?"}]
        turns = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": f"Picture {number}."},
        ]
        rows.append(json.dumps({"messages": turns}) + "\n")
    (folder / "train.jsonl").write_text("".join(rows))
    return size


def write_model(folder: Path) -> None:
    """A tiny Qwen3-VL with the published limits of its image processor."""
    import shutil

    from bloomery.random_models import folder_of

    shutil.copytree(folder_of("random:qwen3-vl"), folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    for name in ("min_pixels", "max_pixels"):
        settings.pop(name, None)
    path.write_text(json.dumps(settings | {"size": LIMITS, "patch_size": 16}))


def ours(root: Path, rows: Path, out: Path) -> None:
    from bloomery.data.prepare.prepare import prepare
    from bloomery.recipe.load import load_recipe

    recipe = root / f"{rows.name}.yaml"
    recipe.write_text(RECIPE.replace("ROWS", rows.name))
    prepare(load_recipe(recipe), out)


def theirs(root: Path, rows: Path, out: Path) -> None:
    import datasets
    from PIL import Image
    from transformers import AutoImageProcessor

    datasets.disable_progress_bars()
    images = AutoImageProcessor.from_pretrained(root / "base", backend="pil")

    def patches(batch: dict) -> dict:
        made = {"pixel_values": [], "image_grid_thw": []}
        for turns in batch["messages"]:
            path = rows / turns[0]["content"][0]["image"]
            one = images(Image.open(path).convert("RGB"), return_tensors="np")
            made["pixel_values"].append(one["pixel_values"])
            made["image_grid_thw"].append(one["image_grid_thw"][0])
        return made

    table = datasets.load_dataset(
        "json", data_files=str(rows / "train.jsonl"), split="train", cache_dir=str(out / "cache")
    )
    table = table.map(patches, batched=True, batch_size=8, writer_batch_size=8)
    table.save_to_disk(str(out / "saved"))


def processor_seconds(root: Path, side: str, rows: Path, out: Path) -> float:
    """Of a process of its own and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--side", side, str(root), str(rows), str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def loader_seconds(prepared: Path) -> dict[str, dict[str, float]]:
    """By size of a picture: processor seconds to make its patches again, to read stored ones, and their bytes."""
    from bloomery.data.pictures.encoder import saved_vision
    from bloomery.data.pictures.processor import PictureProcessor

    source = saved_vision(prepared)
    assert source is not None
    processor = PictureProcessor(prepared, source.vision)
    measured = {}
    for width, height in SIZES:
        content = photograph(width, height, 0)
        made = processor.process([content]).inputs
        patches = prepared.parent / "patches.bin"
        made["pixel_values"].numpy().tofile(patches)
        seconds = {"made again": list[float](), "read": list[float]()}
        for _ in range(7):
            start = time.process_time()
            processor.process([content])
            seconds["made again"].append(time.process_time() - start)
            start = time.process_time()
            np.fromfile(patches, np.float32)
            seconds["read"].append(time.process_time() - start)
        measured[f"{width}x{height}"] = {
            name: statistics.median(found) for name, found in seconds.items()
        } | {
            "patches_bytes": patches.stat().st_size,
            "file_bytes": len(content),
            "tokens": made["pixel_values"].shape[0] // 4,
        }
        patches.unlink()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        side, *paths = options.side
        {"ours": ours, "theirs": theirs}[side](*map(Path, paths))
        return

    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        os.environ[name] = "1"
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_model(root / "base")
        write_rows(root / "few", FEW)
        file_bytes = write_rows(root / "many", options.pictures)
        starting = {"ours": list[float](), "theirs": list[float]()}
        seconds = {"ours": list[float](), "theirs": list[float]()}
        kept = dict[str, int]()
        for turn in range(options.rounds):
            for side in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
                few, many = root / f"few-{side}-{turn}", root / f"many-{side}-{turn}"
                starting[side].append(processor_seconds(root, side, root / "few", few))
                seconds[side].append(processor_seconds(root, side, root / "many", many))
                kept[side] = bytes_in(many if side == "ours" else many / "saved")
                print(
                    f"  {side:<8}{starting[side][-1]:8.1f} s {seconds[side][-1]:8.1f} s", flush=True
                )
        loader = loader_seconds(root / "many-ours-0")

    rates = {
        side: [
            (options.pictures - FEW) / (of_round - statistics.median(starting[side]))
            for of_round in seconds[side]
        ]
        for side in seconds
    }
    result = {
        "pictures": options.pictures,
        "sizes": SIZES,
        "seconds_of_few": starting,
        "seconds": seconds,
        "pictures_per_second_of_a_core": rates,
        "ratio": statistics.median(rates["ours"]) / statistics.median(rates["theirs"]),
        "bytes_of_files": file_bytes,
        "bytes_kept": kept,
        "loader": loader,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
