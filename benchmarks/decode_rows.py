"""Texts decoded together on a CPU with AMX: `python benchmarks/decode_rows.py [--model FOLDER] [--threads N]`.

The compiled step with AMX's tiles, and the same with vectors, in turns in one process: a step of N texts, the batch
decoder that serves, and the completions of rollouts with LoRA. bfloat16 weights in the shape of SmolLM2-135M, random
without `--model`. Prints the least of the rounds, by processor time and by the clock; with several threads,
processor time has what they wait for each other in it. Adds to the runs in `--out`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from turns import machine

from bloomery.facts.config import ModelConfig
from bloomery.infer.completions import Completion, sample_completions
from bloomery.infer.decode import RunningBatch
from bloomery.infer.past import Past
from bloomery.infer.sampling import Sampling
from bloomery.model.adapters.lora import adapt, init_adapters
from bloomery.model.cache import Cache
from bloomery.model.compiled_step import CompiledStep, use_tiles
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import fresh_decoder, load_decoder
from bloomery.recipe.schema import Lora

HERE = Path(__file__).parent
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tie_embeddings=True,
)
PAST = 64  # tokens of each text before the steps that are measured
PROMPT = 32
NEW_TOKENS = 32
STEPS = 6  # of a round
SIDES = {"tiles": True, "vectors": False}


def decoder_of(folder: Path | None) -> Decoder:
    if folder is None:
        decoder = fresh_decoder(SMOLLM2, seed=1, dtype=torch.bfloat16)
    else:
        decoder = load_decoder(folder, dtype=torch.bfloat16)
    return decoder.requires_grad_(False).eval()


def prompt_of(number: int) -> list[int]:
    return [(7 * place + 31 * number) % 4000 + 100 for place in range(PROMPT)]


def steps_of(decoder: Decoder, num_texts: int) -> Callable[[], int]:
    """Some steps of texts that have a past; gives the number of tokens."""
    step = decoder.step
    assert step is not None
    cache = Cache(decoder.config, PAST + STEPS, num_texts)
    for start in range(0, PAST, PROMPT):
        step([prompt_of(start + number) for number in range(num_texts)], 0, cache)

    def run() -> int:
        for number in range(STEPS):
            step([[100 + number + text] for text in range(num_texts)], 0, cache)
        for slot in range(num_texts):
            cache.cut(PAST, slot)
        return STEPS * num_texts

    return run


def serving(decoder: Decoder, num_texts: int) -> Callable[[], int]:
    """Prompts and new tokens of as many requests as there are slots."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)

    def run() -> int:
        batch = RunningBatch(Past(decoder, num_texts, PROMPT + NEW_TOKENS))
        texts = [batch.add(prompt_of(number), sampling) for number in range(num_texts)]
        while batch.texts:
            batch.step()
        return sum(len(text.new) for text in texts)

    return run


def rollouts(decoder: Decoder, num_texts: int) -> Callable[[], int]:
    """Eight completions of each prompt."""
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
    prompts = [prompt_of(number) for number in range(max(1, num_texts // 8))]

    def uniforms(texts: list[Completion]) -> torch.Tensor:
        numbers = [(37 * text.prompt + 17 * text.number + 7 * len(text.ids)) % 97 for text in texts]
        return torch.tensor(numbers, dtype=torch.float64) / 97

    def run() -> int:
        completions = sample_completions(decoder, prompts, 8, sampling, uniforms, slots=num_texts)
        return sum(len(completion.ids) for completion in completions)

    return run


def measured(run: Callable[[], int], rounds: int) -> dict[str, dict[str, float]]:
    """Of each side the least seconds of a round by both clocks, and its tokens; the first round warms up."""
    least: dict[str, dict[str, float]] = {}
    for turn in range(rounds + 1):
        for side, has_tiles in SIDES.items():
            use_tiles(wanted=has_tiles)
            began = time.perf_counter()
            cpu_began = time.process_time()
            tokens = run()
            cpu_seconds = time.process_time() - cpu_began
            seconds = time.perf_counter() - began
            if turn:
                known = least.setdefault(side, {"seconds": seconds, "cpu_seconds": cpu_seconds})
                known["seconds"] = min(known["seconds"], seconds)
                known["cpu_seconds"] = min(known["cpu_seconds"], cpu_seconds)
                known["tokens"] = tokens
    use_tiles(wanted=True)
    return least


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder with weights; random without")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--together", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "decode_rows.json")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    asked = parse()
    torch.set_num_threads(asked.threads)
    decoder = decoder_of(asked.model)
    decoder.step = CompiledStep(decoder)
    if not use_tiles(wanted=True):
        raise SystemExit("this CPU has no AMX: there is nothing to compare")
    report: dict[str, object] = {
        "machine": machine() | {"threads": asked.threads},
        "weights": "random" if asked.model is None else asked.model.name,
        "rounds": asked.rounds,
    }

    def compare(name: str, texts: int, run: Callable[[], int], steps: int | None) -> None:
        sides = measured(run, asked.rounds)
        report.setdefault(name, {})[texts] = sides  # type: ignore[attr-defined]
        cells = []
        for side, least in sides.items():
            for clock in ("cpu_seconds", "seconds"):
                figure = (
                    f"{least['tokens'] / least[clock]:8.0f} tokens/s"
                    if steps is None
                    else f"{1e3 * least[clock] / steps:7.1f} ms"
                )
                cells.append(f"{side} {figure} ({'processor' if 'cpu' in clock else 'clock'})")
        print(f"{name:<9}{texts:4} texts   {'   '.join(cells)}", flush=True)

    for texts in asked.texts:
        compare("step", texts, steps_of(decoder, texts), STEPS)
    for texts in asked.together:
        compare("serving", texts, serving(decoder, texts), None)
    decoder.step = None
    adapt(decoder, Lora(kind="lora", rank=16, target_modules=["all-linear"]))
    init_adapters(decoder, seed=0)
    decoder.step = CompiledStep(decoder.eval())
    for texts in asked.together:
        compare("rollouts", texts, rollouts(decoder, texts), None)

    report["machine"]["load_after"] = machine()["load"]  # type: ignore[index]
    reports = json.loads(asked.out.read_text()) if asked.out.exists() else []
    asked.out.write_text(json.dumps([*reports, report], indent=1) + "\n")


if __name__ == "__main__":
    main()
