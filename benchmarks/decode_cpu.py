"""Decoding on a CPU: `python benchmarks/decode_cpu.py MODEL [--tokens 48] [--rounds 5] [--threads N]`.

Greedy, the same prompt on every side, which alternate in one process: Bloomery with one text and with eight together,
in bfloat16, float32 and with int8 weights; transformers' `generate` in bfloat16 and in float32. Prints medians, ratios
to transformers' faster precision, the bytes of weights that each reads per second, and what a plain copy reaches.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bloomery.infer.decode import RunningBatch, sample_tokens
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling
from bloomery.model.compiled_step import compile_step
from bloomery.model.io.weights import load_decoder, quantize_model
from bloomery.recipe.schema import Quantize

TEXTS = 8  # decoded together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    sides, sizes = sides_of(asked.model, asked.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(asked.rounds + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    reads = statistics.median(copy_rate() for _ in range(5))
    peers = [name for name in sides if name.startswith("transformers")]
    best = min(statistics.median(seconds[name]) for name in peers)
    print(
        f"{asked.model}, {asked.threads} threads, {asked.tokens} new tokens, median of {asked.rounds} rounds"
    )
    for name, (texts, size) in sizes.items():
        median = statistics.median(seconds[name])
        rate, spread = (
            texts * asked.tokens / median,
            (max(seconds[name]) - min(seconds[name])) / median,
        )
        gb = size * asked.tokens / median / 1e9
        print(
            f"{name:28} {1e3 * median / asked.tokens:7.1f} ms a step  {rate:7.1f} tokens/s  "
            f"{best * texts / median:5.2f}x  {gb:5.1f} GB/s of weights  spread {spread:.0%}"
        )
    print(f"{'a plain copy':28} {'':42} {reads / 1e9:13.1f} GB/s read")


def sides_of(
    model: Path, tokens: int
) -> tuple[dict[str, Callable[[], None]], dict[str, tuple[int, int]]]:
    """What is timed, by name; and how many texts each decodes and the bytes of its weights."""
    prompt = list(range(100, 132))
    cold = Sampling(max_new_tokens=tokens, temperature=0.0)
    sides: dict[str, Callable[[], None]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for word in ("bfloat16", "int8", "float32"):
        dtype = torch.float32 if word == "float32" else torch.bfloat16
        ours = load_decoder(model, dtype=dtype).requires_grad_(False)
        theirs = (
            None if word == "int8" else AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        )
        size = sum(parameter.nbytes for parameter in ours.parameters())
        # a byte, and a float32 for 64 of them; the embeddings are the output layer's
        if word == "int8":
            size = sum(parameter.numel() for parameter in ours.parameters()) * 68 // 64
            quantize_model(ours, Quantize(kind="int8"))
        compile_step(ours, print)
        greedy = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        row = torch.tensor([prompt])

        def alone(ours=ours):
            assert len(list(sample_tokens(ours, prompt, cold))) == tokens

        def together(ours=ours):
            batch = RunningBatch(Past(ours, TEXTS, len(prompt) + tokens))
            texts = [batch.add([*prompt[:-1], 200 + at], cold) for at in range(TEXTS)]
            while batch.texts:
                batch.step()
            assert all(len(text.new) == tokens for text in texts)

        def peer(theirs=theirs, greedy=greedy, row=row):
            assert theirs.generate(row, generation_config=greedy).shape[1] == len(prompt) + tokens

        for name, run, texts in (
            (f"bloomery {word}", alone, 1),
            (f"bloomery {word}, {TEXTS} texts", together, TEXTS),
            (f"transformers {word}", peer, 1),
        ):
            if theirs is not None or run is not peer:
                sides[name], sizes[name] = run, (texts, size)
    return sides, sizes


def copy_rate() -> float:
    """Bytes read per second by a copy that no cache holds."""
    source = torch.ones(2**26)
    into = torch.zeros_like(source)  # its pages are there
    began = time.perf_counter()
    into.copy_(source)
    return source.nbytes / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
