"""Splits of structured text that a test can see through."""

from pathlib import Path

import numpy as np

from bloomery.data.shards import Manifest, Split, SplitProgress, SplitRecord, SplitWriter

PAD = 9
Text = list[tuple[int, bool]]  # tokens, and whether each is learned


def write_structured(
    folder: Path,
    parts: list[list[Text]],
    kind: str,
    shard_tokens: int = 7,
    marks: list[int] | None = None,
) -> Split:
    """Texts of each source; two after each other belong together unless `kind` is chat."""
    records: dict[str, SplitRecord] = {}
    for name, sources in (("train", parts), ("validation", [])):
        writer = SplitWriter(folder, name, "uint16", shard_tokens, SplitProgress(), kind)
        number = 0
        for texts in sources:
            writer.begin_part()
            for text in texts:
                loss_mask = np.array([flag for _, flag in text], np.uint8)
                mark = np.array([marks[number] if marks else 0], np.uint8)
                ids = np.array([token for token, _ in text], np.uint16)
                writer.add(ids, np.array([len(ids)], np.uint64), 0, loss_mask, mark)
                number += 1
        records[name] = writer.finish([1.0] * len(sources))
    manifest = Manifest(
        recipe="r",
        identity="i",
        tokenizer_hash="t",
        vocab_size=1000,
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=PAD,
        dtype="uint16",
        shard_tokens=shard_tokens,
        sources=(),
        kind=kind,
        **records,
    )
    return Split(folder, manifest, "train")
