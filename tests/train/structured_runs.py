"""Prepared folders of conversations, pairs and marked answers, written without a text to prepare."""

import shutil
from pathlib import Path

import numpy as np

from bloomery.data.shards import (
    MANIFEST,
    Manifest,
    SplitProgress,
    SplitWriter,
    read_manifest,
    write_manifest,
)


def write_answers(folder: Path, like: Path, kind: str, *, units: int = 40, seed: int = 0) -> Path:
    """Random prompts; every learned answer is made of low ids, every other one of high ids.

    `like`: a prepared folder, whose tokenizer is taken.
    """
    folder.mkdir()
    source = read_manifest(like)
    for path in like.iterdir():
        if path.is_file() and path.suffix == ".json" and path.name != MANIFEST:
            shutil.copy(path, folder / path.name)
    numbers, records = np.random.default_rng(seed), {}
    for split, count in (("train", units), ("validation", max(4, units // 5))):
        writer = SplitWriter(
            folder, split, source.dtype, source.shard_tokens, SplitProgress(), kind
        )
        writer.begin_part()
        for unit in range(count):
            prompt = numbers.integers(100, 120, int(numbers.integers(2, 5)))
            for side in range(1 if kind == "chat" else 2):
                low = side == 0 if kind != "kto" else (unit + side) % 2 == 0
                answer = numbers.integers(
                    *(20, 40) if low else (200, 220), int(numbers.integers(2, 6))
                )
                ids = np.concatenate([prompt, answer]).astype(source.dtype)
                loss_mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
                mark = np.array([unit % 2 == 0], np.uint8)
                writer.add(ids, np.array([len(ids)], np.uint64), 0, loss_mask, mark)
        records[split] = writer.finish([1.0])
    manifest = Manifest(**source.model_dump() | {"kind": kind, **records})
    write_manifest(folder, manifest)
    return folder
