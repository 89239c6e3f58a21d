"""How often greedy decoding agrees with float32's: `python benchmarks/decode_agreement.py MODEL [--prompts 200]`.

Each prompt is the first sentence of a function of the standard library. The reference is transformers' `generate` in
float32. Compared are transformers in bfloat16 and Bloomery in float32, bfloat16 and int8: prompts whose text is the
same to the end, tokens before the first difference, and, over the reference's own texts, tokens that are the likeliest
of both, KL(float32 || side) per token and the perplexity. Each prompt is written to `results/` when it is done, and one
that is there is not computed again.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.decode import sample_tokens
from bloomery.infer.sampling import Sampling
from bloomery.model.cache import STEP_TOKENS, Cache
from bloomery.model.compiled_step import compile_step
from bloomery.model.io.weights import load_decoder, quantize_model
from bloomery.recipe.schema import Quantize

RESULT = Path(__file__).parent / "results" / "decode_agreement.json"
# new tokens; logits of a text
Side = tuple[Callable[[list[int]], list[int]], Callable[[list[int], list[int]], Tensor]]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    tokenizer = load_tokenizer(asked.model)
    prompts = [tokenizer.encode(text)[:64] for text in sentences(asked.prompts)]
    config = json.loads((asked.model / "config.json").read_text())
    head = {
        "model": f"{config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}",
        "prompts": len(prompts),
        "tokens": asked.tokens,
    }
    found = json.loads(asked.result.read_text()) if asked.result.exists() else {**head, "done": []}
    if {key: found[key] for key in head} != head:
        raise SystemExit(f"{asked.result} is of another model or other prompts: move it away")
    reference, *sides = [
        (f"transformers {word}", theirs(asked.model, getattr(torch, word), asked.tokens))
        for word in ("float32", "bfloat16")
    ]
    cold = Sampling(
        max_new_tokens=asked.tokens,
        temperature=0.0,
        min_new_tokens=asked.tokens,
        stop_ids=(tokenizer.eos_id,) if tokenizer.eos_id is not None else (),
    )
    sides += [
        (f"bloomery {word}", ours(asked.model, word, cold))
        for word in ("float32", "bfloat16", "int8")
    ]
    for at in range(len(found["done"]), len(prompts)):
        ids = prompts[at]
        exact = reference[1][0](ids)
        wanted = reference[1][1](ids, exact)
        found["done"].append({name: compared(ids, exact, wanted, *side) for name, side in sides})
        lines = ",\n".join(json.dumps(each) for each in found["done"])
        asked.result.write_text(f'{json.dumps(head)[:-1]}, "done": [\n{lines}\n]}}\n')
        if (at + 1) % 10 == 0 or at + 1 == len(prompts):
            print(
                f"{asked.model}, {at + 1} prompts, {asked.tokens} tokens each, against transformers in float32"
            )
            for name, _ in sides:
                report(name, [each[name] for each in found["done"]], asked.tokens)


def theirs(folder: Path, dtype: torch.dtype, tokens: int) -> Side:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    greedy = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )

    def new(ids: list[int]) -> list[int]:
        return model.generate(torch.tensor([ids]), generation_config=greedy)[0, len(ids) :].tolist()

    return (
        new,
        lambda ids, more: (
            model(torch.tensor([ids + more])).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
        ),
    )


def ours(folder: Path, word: str, cold: Sampling) -> Side:
    decoder = load_decoder(folder, dtype=torch.float32 if word == "float32" else torch.bfloat16)
    decoder.requires_grad_(False).eval()
    if word == "int8":
        quantize_model(decoder, Quantize(kind="int8"))
    compile_step(decoder, lambda how: print(f"bloomery {word}: {how}"))

    def scored(ids: list[int], new: list[int]) -> Tensor:
        """Log-probabilities before each new token, by the step that decodes."""
        cache, whole, parts = Cache(decoder.config, len(ids) + len(new)), [*ids, *new], []
        for first in range(0, len(whole), STEP_TOKENS):
            parts.append(decoder.step([whole[first : first + STEP_TOKENS]], 0, cache, every=True))
        return torch.cat(parts)[len(ids) - 1 : -1].log_softmax(-1)

    return lambda ids: list(sample_tokens(decoder, ids, cold)), scored


def compared(
    ids: list[int], exact: list[int], wanted: Tensor, new: Callable, scored: Callable
) -> dict[str, float]:
    """Sums over the new tokens of a prompt; `before`: tokens before the first difference."""
    text, logprobs = new(ids), scored(ids, exact)
    return {
        "before": next(
            (at for at, (a, b) in enumerate(zip(text, exact, strict=True)) if a != b), len(exact)
        ),
        "likeliest": int((logprobs.argmax(-1) == wanted.argmax(-1)).sum()),
        "kl": round(float((wanted.exp() * (wanted - logprobs)).sum()), 9),
        "nll": round(float(-logprobs.gather(1, torch.tensor(exact)[:, None]).sum()), 6),
        "exact_nll": round(float(-wanted.gather(1, torch.tensor(exact)[:, None]).sum()), 6),
    }


def report(name: str, found: list[dict[str, float]], tokens: int) -> None:
    same, count = sum(each["before"] == tokens for each in found), len(found) * tokens
    mean = {key: sum(each[key] for each in found) / count for key in found[0]}
    perplexity, exact = (torch.tensor(mean[key]).exp() for key in ("nll", "exact_nll"))
    print(
        f"{name:24} same text {same:4} of {len(found)}   {mean['before'] * tokens:5.1f} tokens before a difference   "
        f"same likeliest token {mean['likeliest']:.2%}   KL {mean['kl']:.2e}   "
        f"perplexity {perplexity:.4f} (float32 {exact:.4f})",
        flush=True,
    )


def sentences(count: int) -> list[str]:
    """First sentences of docstrings of the standard library, in the order of its files."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.FunctionDef)
                and len(text := (ast.get_docstring(node) or "").split("\n\n")[0]) > 40
            ):
                found.append(" ".join(text.split()))
    return found[:: max(1, len(found) // count)][:count]


if __name__ == "__main__":
    main()
