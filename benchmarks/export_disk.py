"""Export to GGUF against the disk: `python benchmarks/export_disk.py FOLDER [--layers 16] [--rounds 5]`.

A model of 1B parameters (Llama 3.2's shape, random weights in bfloat16) is written once to FOLDER, which must be on the
disk to be measured. Then two sides alternate: `export --to gguf --type f16` without its check, and a plain sequential
write of as many bytes from memory; both end with fsync. The source is in the page cache. Target: the export writes at
half of the plain rate or more. Also prints the export's peak memory.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.export.gguf import export_gguf
from bloomery.facts.counting import parameter_shapes
from bloomery.facts.hf_config import config_from_hf
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import write_model_piecewise
from bloomery.recipe.schema import TrainTokenizer

SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TARGET = 0.5
PIECE = 2**24  # bytes of a plain write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    model = asked.folder / f"model-{asked.layers}"
    if not model.exists():
        write_model(model, asked.layers)
    out, plain = asked.folder / "export.gguf", asked.folder / "plain.bin"
    rates: dict[str, list[float]] = {"export": [], "plain": []}
    Path("/proc/self/clear_refs").write_text("5")  # the peak below is that of the exports
    before = peak_kib()
    for turn in range(asked.rounds + 1):
        began = time.perf_counter()
        size = export_gguf(find_model(model), out, kind="f16", verify=False).bytes
        middle = time.perf_counter()
        if turn == 0:
            peak = peak_kib()
        out.unlink()
        os.sync()
        start = time.perf_counter()
        write_plain(plain, size)
        end = time.perf_counter()
        plain.unlink()
        os.sync()
        if turn:  # the first round warms up
            rates["export"].append(size / (middle - began))
            rates["plain"].append(size / (end - start))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    shares = [one / other for one, other in zip(rates["export"], rates["plain"], strict=True)]
    for name, each in rates.items():
        print(
            f"{name:8} {medians[name] / 1e6:8,.0f} MB/s   {', '.join(f'{rate / 1e6:,.0f}' for rate in each)}"
        )
    share = statistics.median(shares)
    verdict = "met" if share >= TARGET else "NOT MET"
    print(
        f"{size / 1e9:.2f} GB; the export writes at {share:.2f} of the plain rate "
        f"({min(shares):.2f} to {max(shares):.2f}), target {TARGET}: {verdict}"
    )
    print(
        f"peak memory {peak / 2**20:.2f} GiB, of which {before / 2**20:.2f} GiB before the export"
    )


def peak_kib() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1])


def write_plain(path: Path, size: int) -> None:
    piece = os.urandom(PIECE)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(piece[: min(PIECE, size - start)])
        os.fsync(file.fileno())


def write_model(folder: Path, layers: int) -> None:
    """In transformers' format; the tokenizer is small, the embeddings are not."""
    config = config_from_hf(SHAPE | {"num_hidden_layers": layers})
    shapes, random = parameter_shapes(config), torch.Generator().manual_seed(0)
    draft = folder.with_name(f".tmp-{folder.name}")
    draft.mkdir(parents=True, exist_ok=True)

    def produce(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=torch.bfloat16).normal_(0, 0.02, generator=random)

    write_model_piecewise(produce, config, torch.bfloat16, draft)
    lines = [json.dumps({"number": number, "text": "def f(x): return x"}) for number in range(2000)]
    train_tokenizer(iter(lines), TrainTokenizer(vocab_size=1000), draft)
    draft.rename(folder)


if __name__ == "__main__":
    main()
