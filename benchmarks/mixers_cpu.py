"""Models other than dense transformers, on a CPU: `python benchmarks/mixers_cpu.py FAMILY train|decode`.

qwen3.5 and lfm2 have no attention in most layers; qwen3-moe is a mixture of 32 experts, of which a token meets 4.
Random weights of about 100M parameters; the sides alternate in one process on the same tokens, and the least of each
side counts, by the clock and in seconds of all threads. A training step is one sequence of 1,024 tokens (2,048 of the
mixture), all of them scored, forward, backward and fused AdamW; memory is what tensors hold at once; `--products`
prints the shares of matmuls and of attention in it. Decoding is greedy, of one text. Transformers takes sdpa, and has
neither flash-linear-attention nor causal-conv1d on a CPU; its experts are those of `--experts`. Both sides compute in
`--precision`: in bfloat16 (autocast in training) where the CPU multiplies it, else in float32, which is the quicker
there. Both keep the memory that a step frees, as a training run of ours on a CPU does: page faults of fresh memory
would cost transformers more.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory_tracker import held_bytes, peak_bytes
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Lfm2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from bloomery.core.allocator import keep_freed_memory
from bloomery.hardware.detect import detect
from bloomery.infer.decode import sample_tokens
from bloomery.infer.sampling import Sampling
from bloomery.model.compiled_step import compile_step
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import load_decoder

LENGTHS = {"qwen3.5": 1024, "lfm2": 1024, "qwen3-moe": 2048}
# Parts of the names of operators that neither side can do without.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
ATTENTION = ("bloomery_compiled_def", "bloomery::compiled_backward", "_scaled_dot_product")
CONFIGS = {
    "qwen3.5": lambda: Qwen3_5TextConfig(
        vocab_size=65536,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 4,
        tie_word_embeddings=True,
    ),
    "lfm2": lambda: Lfm2Config(
        vocab_size=65536,
        hidden_size=640,
        intermediate_size=1664,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=14,
        num_attention_heads=10,
        num_key_value_heads=5,
        layer_types=["full_attention" if n in (2, 5, 8, 10, 12) else "conv" for n in range(14)],
        tie_word_embeddings=True,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        vocab_size=16384,
        hidden_size=512,
        moe_intermediate_size=256,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}
EXPERTS = ("eager", "batched_mm", "grouped_mm")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What both sides compute. `experts`: transformers' implementations, of a mixture."""

    family: str
    dtype: torch.dtype
    is_compiled: bool
    experts: tuple[str, ...]


Sides = dict[str, Callable[[], None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=CONFIGS)
    parser.add_argument("work", choices=["train", "decode"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="our blocks by torch.compile")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default=best_precision())
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=["grouped_mm"])
    parser.add_argument("--products", action="store_true", help="shares of matmuls and attention")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    asked = Asked(
        family=options.family,
        dtype=getattr(torch, options.precision),
        is_compiled=options.compile,
        experts=tuple(options.experts) if options.family == "qwen3-moe" else (),
    )
    with tempfile.TemporaryDirectory() as folder:
        theirs = AutoModelForCausalLM.from_config(CONFIGS[asked.family]())
        theirs.save_pretrained(folder)
        size = sum(parameter.numel() for parameter in theirs.parameters())
        print(
            f"{asked.family}, {size / 1e6:.0f}M parameters, {options.work}, {options.precision},"
            f" {options.threads} threads"
        )
        del theirs
        prepare = train if options.work == "train" else decode
        sides = prepare(Path(folder), asked)
    least = measured(sides, options.rounds)
    peaks = {}
    if options.work == "train":
        peaks = {name: peak_bytes(run) for name, run in sides.items()}
    for name, (wall, cpu) in least.items():
        peak = f", {peaks[name] / 2**20:,.0f} MiB above what it holds" if peaks else ""
        products = shares(sides[name]) if options.products else ""
        print(f"{name:24} {wall:8.3f} s, {cpu:8.3f} s of all threads{products}{peak}")
    ours = least["bloomery"]
    for name, peer in least.items():
        if name == "bloomery":
            continue
        print(
            f"ratio to {name} {peer[0] / ours[0]:.2f} by the clock,"
            f" {peer[1] / ours[1]:.2f} in seconds of threads"
        )
        if peaks:
            print(f"memory {peaks['bloomery'] / peaks[name]:.2f} of {name}'s")
    print(f"load {os.getloadavg()[0]:.1f}, {held_bytes() / 2**20:,.0f} MiB held by both")


def measured(sides: Sides, rounds: int) -> dict[str, tuple[float, float]]:
    """The least seconds of each side, by the clock and of all threads; the first round warms up."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            run()
            if turn:
                seconds[name].append((time.perf_counter() - began, time.process_time() - began_cpu))
    return {
        name: (min(wall for wall, _ in times), min(cpu for _, cpu in times))
        for name, times in seconds.items()
    }


def shares(run: Callable[[], None]) -> str:
    """Of matmuls and of attention in the time of all operators."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    seconds = {event.key: event.self_cpu_time_total for event in record.key_averages()}
    matmuls, attention = (
        sum(time for key, time in seconds.items() if any(part in key for part in parts))
        for parts in (PRODUCTS, ATTENTION)
    )
    every = sum(seconds.values())
    return f", {matmuls / every:.0%} matmuls and {attention / every:.0%} attention"


def best_precision() -> str:
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(detect().host.cpu_flags) else "float32"


def train(folder: Path, asked: Asked) -> Sides:
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    ours = load_decoder(folder, attention="compiled")
    ours.model.adds_rows = True
    if asked.is_compiled:
        for block in ours.model.layers:
            block.compile(dynamic=False)
    length = LENGTHS[asked.family]
    ids = torch.randint(
        0, ours.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
    )
    labels = ids.roll(-1, 1)
    loss_mask = torch.ones_like(ids)
    loss_mask[:, -1] = 0
    settings = ScoreSettings(length, compiled=False, native=True, into_grad=True)
    documents = torch.zeros_like(ids)

    def forward_of_theirs() -> torch.Tensor:
        loss: torch.Tensor = theirs(ids, labels=ids).loss
        return loss

    def forward_of_ours() -> torch.Tensor:
        scores = ours(
            ids, documents_BT=documents, head=LabelScores(labels, loss_mask, settings)
        ).head
        return -scores.sum() / loss_mask.sum()

    step_of_theirs = step_of(theirs, forward_of_theirs, asked.dtype)
    step_of_ours = step_of(ours, forward_of_ours, asked.dtype)
    return {"bloomery": step_of_ours, **sides_of_theirs(theirs, step_of_theirs, asked)}


def sides_of_theirs(model: Any, run: Callable[[], None], asked: Asked) -> Sides:
    """Transformers' side; of a mixture one with each implementation of experts, on the same weights."""

    def with_experts(implementation: str) -> None:
        model.set_experts_implementation(implementation)
        run()

    if not asked.experts:
        return {"transformers": run}
    return {f"transformers {name}": partial(with_experts, name) for name in asked.experts}


def step_of(
    model: Any, forward: Callable[[], torch.Tensor], dtype: torch.dtype
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decode(folder: Path, asked: Asked) -> Sides:
    tokens = 48
    prompt = list(range(100, 132))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=asked.dtype, attn_implementation="sdpa"
    ).eval()
    ours = load_decoder(folder, dtype=asked.dtype).requires_grad_(False).eval()
    compile_step(ours, print)
    greedy = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    cold = Sampling(max_new_tokens=tokens, temperature=0.0)

    def run_ours() -> None:
        assert len(list(sample_tokens(ours, prompt, cold))) == tokens

    def run_theirs() -> None:
        theirs.generate(torch.tensor([prompt]), generation_config=greedy)

    return {"bloomery": run_ours, **sides_of_theirs(theirs, run_theirs, asked)}


if __name__ == "__main__":
    main()
