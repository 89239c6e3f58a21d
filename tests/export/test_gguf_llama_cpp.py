"""llama.cpp itself runs the exported files, and our reading of its graph agrees with it.

`BLOOMERY_UPDATE=1 pytest -m soak tests/export/test_gguf_llama_cpp.py`
writes docs/export-parity.md from these measurements.
"""

import os
import random
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_graph_oracle import FileTokenizer, Graph, Parity, compare, log_softmax
from gguf_models import saved_adapter, saved_case, saved_pieces, tokens

from bloomery.export import GGUF_TYPES, K_TYPES
from bloomery.export.gguf import export_gguf, export_gguf_adapter
from bloomery.export.verify import TEXTS
from bloomery.infer.model_folder import find_model
from bloomery.model.io.weights import load_decoder

pytest.importorskip(
    "llama_cpp", reason="not installed: pip install llama-cpp-python builds it in ten minutes"
)
from llama_cpp_oracle import Oracle

pytestmark = pytest.mark.soak
PAGE = Path(__file__).parents[2] / "docs" / "export-parity.md"
CONTEXT = 128
SIZES = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": CONTEXT}
GPT2 = {"n_embd": 64, "n_positions": CONTEXT}
GEMMA = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
FAMILIES = {
    "Llama 3": ("llama3-gqa-tied", SIZES),
    "Llama 2": ("llama2", SIZES),
    "Mistral": ("mistral-head-dim", SIZES),
    "Qwen 2": ("qwen2", SIZES),
    "Qwen 3": ("qwen3", SIZES),
    "Gemma": ("gemma", SIZES | {"head_dim": 16}),
    "Gemma 2": ("gemma2", GEMMA),
    "Gemma 3": ("gemma3", GEMMA),
    "Phi-3": ("phi3", SIZES),
    "GPT-2": ("gpt2", GPT2),
    "GPT-2, exact GELU": ("gpt2-erf-wide", GPT2 | {"n_inner": 96}),
    "OLMo 2": ("olmo2", SIZES),
    "SmolLM3": ("smollm3", SIZES),
}
# Of the largest logit, in float32: ggml takes GELU from a table in float16, and SiLU from an exact function
MOST = {"Gemma": 3e-3, "Gemma 2": 3e-3, "Gemma 3": 3e-3, "GPT-2": 3e-3, "GPT-2, exact GELU": 3e-3}


def measured(
    folder: Path, out: Path, kind: str, context: int
) -> tuple[Parity, float, float, float]:
    """Of a model folder: the oracle against PyTorch; llama.cpp against the oracle (the largest difference, of the
    largest logit), and against PyTorch (KL divergence, share of equal best tokens).
    """
    done = export_gguf(find_model(folder), out, kind=kind, verify=False)
    graph, decoder = Graph(done.folder), load_decoder(folder, dtype=torch.float32)
    probe = [token % decoder.config.vocab_size for token in tokens(48)]
    with torch.no_grad():
        original = decoder(torch.tensor([probe])).head[0].numpy()
    parity = compare(graph, decoder, probe[:32], greedy=kind == "f32")
    graph.reset()
    graph.context = context
    ours, oracle = graph.forward(probe), Oracle(done.folder, context)
    theirs = oracle.logits(probe)
    words = FileTokenizer(graph.facts)
    assert [words.encode(text) for text in TEXTS] == [oracle.tokens(text) for text in TEXTS]
    if kind == "f32":  # greedy text, in llama.cpp too
        text = probe[:8]
        for _ in range(24):
            text.append(int(oracle.logits(text)[-1].argmax()))
        graph.reset()
        best = graph.forward(text)
        gaps = best[7:-1].max(-1) - best[np.arange(7, len(text) - 1), text[8:]]
        assert gaps.max() <= 3e-3 * np.abs(best).max()
    first, second = log_softmax(original), log_softmax(theirs)
    kl = float((np.exp(first) * (first - second)).sum(-1).mean())
    same = float((original.argmax(-1) == theirs.argmax(-1)).mean())
    return parity, float(np.abs(ours - theirs).max() / np.abs(theirs).max()), kl, same


def row(name: str, kind: str, parity: Parity, own: float, kl: float, same: float) -> str:
    greedy = "" if parity.greedy is None else f"{parity.greedy} of {parity.asked}"
    mine = (
        f"{parity.difference / parity.scale:.0e} | {parity.kl:.1e} | {parity.top1:.0%} | {greedy}"
    )
    return f"| {name} | `{kind}` | {mine} | {own:.0e} | {max(kl, 0):.1e} | {same:.0%} |"


HEAD = """# Export parity

<!-- written by `BLOOMERY_UPDATE=1 pytest -m soak tests/export/test_gguf_llama_cpp.py` -->
llama.cpp is that of llama-cpp-python {version}.

`q4_K_M`, `q5_K_M` and `q6_K` are written by its `llama-quantize`; most matrices of SmolLM2 have 576
columns, which 256 does not divide, and are `q5_0`, `q5_1` or `q8_0`. Ollama and vLLM were not run.

Tiny models with random weights of each family, exported to each type and run three times: in PyTorch, in the oracle
(llama.cpp's graph in numpy) and in llama.cpp on a CPU. Random weights are harder
to quantize than trained ones; the last rows are a real model.

- **logits**: the largest difference between oracle and PyTorch, both with the weights of the file, divided by the
  largest logit.
- **KL**: mean KL divergence from the original model in nats per token.
- **best**: how often the most likely token is equal.
- **greedy**: tokens of the continued text that are equal.
- **llama.cpp**: its largest difference from the oracle, its KL divergence and its best token against PyTorch.
  llama.cpp rounds activations to the type of the weights and takes GELU from a table, so that it differs more.

| model | type | logits | KL | best | greedy | llama.cpp: logits | KL | best |
|---|---|---|---|---|---|---|---|---|
"""
found: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="module", autouse=True)
def page():
    yield
    if os.environ.get("BLOOMERY_UPDATE") and found:
        import llama_cpp

        kept = {}  # what was not measured now
        for line in PAGE.read_text(encoding="utf-8").splitlines():
            cells = line.split(" | ")
            if line.startswith("| ") and len(cells) > 2 and "`" in cells[1]:
                kept[cells[0].removeprefix("| "), cells[1].strip("`")] = line
        lines = list((kept | found).values())
        real = [line for line in lines if line.startswith("| SmolLM2")]
        lines = [line for line in lines if line not in real] + real
        PAGE.write_text(HEAD.format(version=llama_cpp.__version__) + "\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", GGUF_TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_agrees(name: str, kind: str, tmp_path: Path) -> None:
    case, changed = FAMILIES[name]
    folder = saved_case(case, tmp_path / "model", **changed)
    parity, own, kl, same = measured(folder, tmp_path / "out.gguf", kind, CONTEXT)
    found[name, kind] = row(name, kind, parity, own, kl, same)
    assert parity.difference <= (2e-2 if "exact" in name else 1e-4) * parity.scale
    # activations are rounded to the type of the weights, next to q8_0 and q4_0 to 8 bits: of these the KL is the check
    assert (
        own
        <= {"f32": MOST.get(name, 1e-4), "f16": 1e-2, "bf16": 5e-2, "q8_0": 2e-1, "q4_0": 2e-1}[
            kind
        ]
    )
    assert kl <= 2 * parity.kl + {"f32": 1e-4, "f16": 1e-3}.get(kind, 5e-2)


@pytest.mark.parametrize("kind", [*GGUF_TYPES, *K_TYPES])
def test_llama_cpp_agrees_on_a_real_model(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cache = Path(
        os.environ.get("BLOOMERY_REAL_MODEL", Path.home() / ".cache" / "bloomery-real-model")
    )
    if not (cache / "model" / "config.json").is_file():
        pytest.skip(f"no real model in {cache}: python scripts/smollm2.py {cache}")
    needs_quantize(kind)
    parity, own, kl, same = measured(cache / "model", tmp_path / "out.gguf", kind, CONTEXT)
    found["SmolLM2-135M-Instruct", kind] = row("SmolLM2-135M-Instruct", kind, parity, own, kl, same)
    assert parity.difference <= 1e-4 * parity.scale
    assert kl <= 2 * parity.kl + {"f32": 1e-4, "f16": 1e-3}.get(kind, 5e-2)


def needs_quantize(kind: str) -> None:
    if kind in K_TYPES and shutil.which("llama-quantize") is None:
        pytest.skip("llama-quantize is not on the PATH")


WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("kind", K_TYPES)
@pytest.mark.parametrize("case", ["llama3-gqa-tied", "qwen3"])
def test_llama_quantize_writes_what_both_read(case: str, kind: str, tmp_path: Path) -> None:
    """A model whose rows are whole blocks of 256 numbers, so that no matrix gets another type."""
    needs_quantize(kind)
    folder = saved_case(
        case, tmp_path / "model", **SIZES | WIDE | ({"head_dim": 64} if case == "qwen3" else {})
    )
    name = {"qwen3": "Qwen 3, 256 wide"}.get(case, "Llama 3, 256 wide")
    parity, own, kl, same = measured(folder, tmp_path / "out.gguf", kind, CONTEXT)
    found[name, kind] = row(name, kind, parity, own, kl, same)
    types = {
        each.tensor_type.name
        for each in gguf.GGUFReader(tmp_path / "out.gguf").tensors
        if len(each.shape) > 1
    }
    assert {kind.upper()[:4]} <= types <= {"Q4_K", "Q5_K", "Q6_K"}
    assert parity.difference <= 1e-4 * parity.scale
    # 256 activations are rounded with one scale, not 32
    assert own <= 3e-1 and kl <= 2 * parity.kl + 5e-2


PIECES = {  # as Llama 2's, with and without the space before a text, and with tokens of a chat
    "llama-2": {},
    "no prefix": {"add_dummy_prefix": False},
    "chat": {"user_defined_symbols": ["<|im_start|>", "<|im_end|>"], "split_digits": False},
}


@pytest.mark.parametrize("name", PIECES)
def test_llama_cpp_reads_sentencepiece_models_as_they_are(name: str, tmp_path: Path) -> None:
    """The ids of the sentencepiece library, of the file in the oracle, and of llama.cpp's own tokenizer."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder, model, lines = saved_pieces(
        tmp_path / "sp", 1000, changed=SIZES, files="[a-c]*.py", **PIECES[name]
    )
    done = export_gguf(find_model(folder), tmp_path / "out.gguf", kind="f32")
    assert any(proof.startswith("token ids   equal") for proof in done.proofs)
    oracle, ours = Oracle(done.folder, CONTEXT), FileTokenizer(Graph(done.folder).facts)
    library, draw = sentencepiece.SentencePieceProcessor(model_file=str(model)), random.Random(0)
    texts = [text for text in TEXTS if "<" not in text]
    texts += ["\n".join(draw.sample(lines, 8)) for _ in range(50)]
    texts += [
        "".join(
            chr(draw.choice((32, draw.randrange(32, 127), draw.randrange(160, 0x3000))))
            for _ in range(30)
        )
        for _ in range(50)
    ]
    for text in texts:
        if not any(0x80 <= ord(letter) < 0xA0 for letter in text):
            assert oracle.tokens(text) == ours.encode(text) == library.encode(text), text
    special = "<s>a</s> <|im_start|>user\nhi<|im_end|> b"
    assert oracle.tokens(special) == ours.encode(special)


@pytest.mark.parametrize("case", ["llama3-gqa-tied", "gpt2", "phi3"])
def test_llama_cpp_runs_a_lora(case: str, tmp_path: Path) -> None:
    """The adapter next to its base computes what the merged model computes."""
    folder = saved_case(case, tmp_path / "model", **(GPT2 if case == "gpt2" else SIZES))
    targets = {"gpt2": ["c_attn", "c_proj"], "phi3": ["qkv_proj", "gate_up_proj", "o_proj"]}
    saved_adapter(
        folder, tmp_path / "adapter", targets.get(case, ["q_proj", "k_proj", "down_proj"])
    )
    base = export_gguf(find_model(folder), tmp_path / "base.gguf", kind="f32", verify=False).folder
    files = find_model(tmp_path / "adapter")
    lora = export_gguf_adapter(files, tmp_path / "lora.gguf", kind="f32").folder
    merged = export_gguf(files, tmp_path / "merged.gguf", kind="f32").folder
    probe = tokens(24)
    with_lora, plain = (
        Oracle(base, CONTEXT, lora).logits(probe),
        Oracle(base, CONTEXT).logits(probe),
    )
    expected = Graph(merged).forward(probe)
    assert np.abs(plain - expected).max() > 0.1
    assert np.abs(with_lora - expected).max() <= 3e-3 * np.abs(expected).max()
