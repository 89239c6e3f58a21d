"""How often greedy decoding agrees with float32's: `python benchmarks/decode_agreement.py MODEL [--prompts 200]`.

Each prompt is the first sentence of a function of the standard library. The reference is transformers' `generate` in
float32. Prints, for transformers in bfloat16 and Bloomery in float32, bfloat16 and int8: prompts whose text is the same
to the end, tokens before the first difference, and, over the reference's own texts, KL(float32 || side) per token and
the perplexity.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.cache import FEW, Cache
from bloomery.model.compiled_step import compile_step
from bloomery.model.decoding import Sampling, sample_tokens
from bloomery.model.io.weights import load_decoder, quantize_model
from bloomery.recipe.schema import Quantize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    tokenizer = load_tokenizer(asked.model)
    prompts = [tokenizer.encode(text)[:64] for text in sentences(asked.prompts)]
    greedy = GenerationConfig(max_new_tokens=asked.tokens, min_new_tokens=asked.tokens, do_sample=False, pad_token_id=0)
    cold = Sampling(max_new_tokens=asked.tokens, temperature=0.0, min_new_tokens=asked.tokens,
                    stop_ids=(tokenizer.eos_id,) if tokenizer.eos_id is not None else ())  # fmt: skip
    exact = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    half = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)

    def theirs(model, ids):
        return model.generate(torch.tensor([ids]), generation_config=greedy)[0, len(ids) :].tolist()

    reference = [theirs(exact, ids) for ids in prompts]
    print(f"{asked.model}, {len(prompts)} prompts, {asked.tokens} tokens each, against transformers in float32")
    with torch.no_grad():
        wanted = [exact(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
                  for ids, new in zip(prompts, reference, strict=True)]  # fmt: skip
        report("transformers float32", reference, reference, wanted, wanted)
        report("transformers bfloat16", [theirs(half, ids) for ids in prompts], reference,
               [half(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
                for ids, new in zip(prompts, reference, strict=True)], wanted)  # fmt: skip
    for word in ("float32", "bfloat16", "int8"):
        dtype = torch.float32 if word == "float32" else torch.bfloat16
        ours = load_decoder(asked.model, dtype=dtype).requires_grad_(False).eval()
        if word == "int8":
            quantize_model(ours, Quantize(kind="int8"))
        compile_step(ours, print)
        found = [list(sample_tokens(ours, ids, cold)) for ids in prompts]
        logits = [scored(ours, ids, new) for ids, new in zip(prompts, reference, strict=True)]
        report(f"bloomery {word}", found, reference, logits, wanted)


def scored(decoder, ids: list[int], new: list[int]) -> torch.Tensor:
    """Log-probabilities before each new token, by the step that decodes."""
    cache, whole, parts = Cache(decoder.config, len(ids) + len(new)), [*ids, *new], []
    for first in range(0, len(whole), FEW):
        parts.append(decoder.step([whole[first : first + FEW]], 0, cache, every=True))
    return torch.cat(parts)[len(ids) - 1 : -1].log_softmax(-1)


def report(name: str, found: list[list[int]], reference: list[list[int]], logits: list, wanted: list) -> None:
    same = sum(one == other for one, other in zip(found, reference, strict=True))
    before = sum(next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
                 for one, other in zip(found, reference, strict=True)) / len(found)  # fmt: skip
    ours, theirs = torch.cat(logits), torch.cat(wanted)
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    labels = torch.tensor([token for new in reference for token in new])
    loss = float(-ours.gather(1, labels[:, None]).mean())
    print(f"{name:24} same text {same:4} of {len(found)}   {before:5.1f} tokens before a difference   "
          f"KL {kl:.2e}   perplexity {torch.tensor(loss).exp():.4f}")  # fmt: skip


def sentences(count: int) -> list[str]:
    """First sentences of docstrings of the standard library, in the order of its files."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and len(text := (ast.get_docstring(node) or "").split("\n\n")[0]) > 40:
                found.append(" ".join(text.split()))
    return found[:: max(1, len(found) // count)][:count]


if __name__ == "__main__":
    main()
