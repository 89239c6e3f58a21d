"""MB of text a second and core: `bloomery prepare` beside `datasets.map` with the same tokenizer.

    python benchmarks/prepare_speed.py [--megabytes 40] [--processes 1] [--repeats 3] [--vocab 50000]

Both sides read the same JSON lines and end with token ids on disk: shards here, an Arrow folder there. The tokenizer is
trained before the clock starts. `datasets.map` runs as its guides say: batched, transformers' fast tokenizer, no
padding, text column removed, the same number of processes, no cache. Sides alternate; the best of the repeats counts,
and every id is compared. The text is the standard library's source, each file with a number of its own at its head, so
that a longer run repeats its words but no document.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from bloomery.data.prepare.prepare import prepare
from bloomery.data.shards import open_split
from bloomery.data.sources.builtin import stdlib_files
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.hardware.detect import detect
from bloomery.recipe.load import LoadedRecipe
from bloomery.recipe.schema import Recipe, TrainTokenizer

RESULTS = Path(__file__).parent / "results" / "prepare_speed.json"


def write_text(path: Path, megabytes: float) -> list[str]:
    """JSON lines of about so many MB of text."""
    sources = [file.path.read_text(encoding="utf-8") for file in stdlib_files()]
    texts, size, turn = list[str](), 0, 0
    while size < megabytes * 1e6:
        texts.append(f"# copy {turn}\n" + sources[turn % len(sources)])
        size += len(texts[-1].encode())
        turn += 1
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def ours(text: Path, tokenizer: Path, folder: Path, processes: int) -> float:
    """Seconds of `prepare`, checksums of sources and shards included."""
    data = {"path": str(text), "validation": 0, "num_proc": processes}
    recipe = {
        "model": {"preset": "go-coder-tiny"},
        "tokenizer": {"from": str(tokenizer)},
        "data": data,
    }
    start = time.perf_counter()
    prepare(LoadedRecipe(Recipe.model_validate(recipe), "speed"), folder)
    return time.perf_counter() - start


def theirs(text: Path, tokenizer: Path, folder: Path, processes: int) -> float:
    """Seconds of load_dataset, map and save_to_disk."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    # "<s>" in a text is letters here too
    fast = AutoTokenizer.from_pretrained(tokenizer, split_special_tokens=True)
    bos, eos = fast.bos_token_id, fast.eos_token_id

    def encode(batch: dict) -> dict:
        ids = fast(batch["text"], add_special_tokens=False, return_attention_mask=False)[
            "input_ids"
        ]
        return {"input_ids": [[bos, *row, eos] for row in ids]}

    start = time.perf_counter()
    rows = datasets.load_dataset(
        "json", data_files=str(text), split="train", cache_dir=str(folder / "cache")
    )
    rows = rows.map(
        encode,
        batched=True,
        remove_columns=["text"],
        num_proc=processes,
        load_from_cache_file=False,
    )
    rows.save_to_disk(str(folder / "out"))
    return time.perf_counter() - start


def same_ids(shards: Path, saved: Path) -> bool:
    """Whether both sides hold the same ids in the same order."""
    import datasets

    split = open_split(shards, "train")
    rows = datasets.load_from_disk(str(saved)).with_format("numpy")
    pairs = ((split.document(index), rows[index]["input_ids"]) for index in range(len(split)))
    return len(rows) == len(split) and all(np.array_equal(here, there) for here, there in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=50_000)
    options = parser.parse_args()
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    # a core is a core: threads inside a process would be uncounted ones
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        texts = write_text(root / "text.jsonl", options.megabytes)
        size = sum(len(text.encode()) for text in texts) / 1e6
        train_tokenizer(
            iter(texts[:600]), TrainTokenizer(vocab_size=options.vocab), root / "tokenizer"
        )
        print(
            f"{size:.1f} MB, {len(texts):,} documents, {options.vocab:,} tokens, {options.processes} process(es)"
        )
        rates = {"bloomery prepare": list[float](), "datasets.map": list[float]()}
        for repeat in range(options.repeats):
            folders = {
                "bloomery prepare": root / f"ours{repeat}",
                "datasets.map": root / f"theirs{repeat}",
            }
            for name, side in (("bloomery prepare", ours), ("datasets.map", theirs)):
                seconds = side(
                    root / "text.jsonl", root / "tokenizer", folders[name], options.processes
                )
                rate = size / seconds / options.processes
                rates[name].append(rate)
                print(f"  {name:<17}{seconds:>7.1f} s {rate:>7.2f} MB/s and core")
            assert same_ids(folders["bloomery prepare"], folders["datasets.map"] / "out"), (
                "the sides disagree"
            )
            for folder in folders.values():
                shutil.rmtree(folder)
    ours_best, theirs_best = (max(found) for found in rates.values())
    print(
        f"best: {ours_best:.2f} beside {theirs_best:.2f} MB/s and core: {ours_best / theirs_best:.1f} times"
    )
    report = {
        "machine": {
            "cpu": detect().host.cpu_name,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        "megabytes": size,
        "documents": len(texts),
        "vocabulary": options.vocab,
        "processes": options.processes,
        "unit": "MB/s and core",
        "rates": rates,
        "ratio of the best": ours_best / theirs_best,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
