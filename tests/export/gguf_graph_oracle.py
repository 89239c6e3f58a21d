"""An oracle for GGUF files: what llama.cpp computes from one, in numpy, compared with the PyTorch model.

Written after llama.cpp's sources (llama-graph.cpp, models/*.cpp, llama-vocab.cpp, ops.cpp) and without the decoder: a
wrong name, order of rows or key of the metadata shows as other logits. Activations are float32 here; llama.cpp rounds
them to the type of a quantized matrix, so that its own logits differ a little more.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.gguf_format import (
    CONTROL,
    PRE_TOKENIZERS,
    UNKNOWN,
    USER_DEFINED,
    composes,
    gguf_library,
    gguf_tensors,
    splits,
)
from bloomery.export.gguf_import import dequantized_tensor
from bloomery.export.layouts import load_in_float32
from bloomery.export.verify import TEXTS
from bloomery.infer.load import Use
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.adapters.peft_methods import has_method, merge_methods
from bloomery.model.decoder import Decoder

Array = np.ndarray[Any, Any]
Json = dict[str, Any]
GREEDY = 64  # tokens
SAME_WEIGHTS = 1e-4  # of the largest logit: the same weights in two programs, in float32
ERF = 2e-2  # the same where the graph has another GELU than the model
# The mean KL divergence, in nats per token, above which a file of that type is not the model.
MOST_KL = {"f32": 1e-5, "f16": 1e-2, "bf16": 5e-2, "q8_0": 1e-1}


@dataclass(frozen=True)
class Parity:
    """`difference`: the largest of a logit, with the weights of the file in both programs; `scale`: the largest logit.

    `kl`: mean divergence in nats of the file's distribution from the original's; `top1`: share of equal best tokens;
    `greedy`: how many of the `asked` tokens are equal, None where the text was not continued.
    """

    difference: float
    scale: float
    kl: float
    top1: float
    greedy: int | None
    asked: int


# The graph

# what its rotary positions turn together; others turn halves of a head
NEIGHBORS = ("llama", "smollm3", "granite", "mistral3")
GELU = ("gemma", "gemma2", "gemma3", "gpt2")
PERIODS = {"gemma2": 2, "gemma3": 6, "olmo2": 4}
# The tensors of a layer, which llama.cpp counts: one more or less is an error there
LAYERS = {
    "llama": "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
    "qwen2": "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
    "qwen3": "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_norm ffn_gate ffn_up ffn_down",
    "gemma": "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
    "gemma2": "attn_norm attn_q attn_k attn_v attn_output post_attention_norm ffn_norm ffn_gate ffn_up ffn_down "
    "post_ffw_norm",
    "gemma3": "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm post_attention_norm ffn_norm "
    "ffn_gate ffn_up ffn_down post_ffw_norm",
    "phi3": "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down",
    "gpt2": "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down",
    "olmo2": "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm post_attention_norm ffn_gate ffn_up "
    "ffn_down post_ffw_norm",
    "granite": "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
    "mistral3": "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
    "lfm2": "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_norm ffn_gate ffn_up ffn_down",
    "smollm3": "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
}


# those of a layer of LFM2 without attention
CONVOLUTION = "attn_norm shortconv.in_proj shortconv.conv shortconv.out_proj ffn_norm ffn_gate ffn_up ffn_down"


@final
class Graph:
    """A file as llama.cpp reads it. `forward` adds tokens to its cache."""

    def __init__(self, path: Path) -> None:
        library = gguf_library()
        self.path = path
        self._library = library
        reader = library.GGUFReader(path)
        self.facts: Json = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.arch: str = self.facts["general.architecture"]
        self.layers, self.width = self._key("block_count"), self._key("embedding_length")
        self.heads = self._key("attention.head_count")
        by_layer = self._key("attention.head_count_kv", self.heads)
        self.kv_heads_by_layer = (
            by_layer if isinstance(by_layer, list) else [by_layer] * self.layers
        )
        self.kv_heads = max(self.kv_heads_by_layer)
        self.head_dim = self._key("attention.key_length", self.width // self.heads)
        self._values: dict[str, Array] = {}
        self._kept = sum(math.prod(tensor.shape) for tensor in reader.tensors) * 4 < 2**30
        self._check_names()
        # llama.cpp's -c, which chooses among LongRoPE's factors
        self.context = int(self._key("context_length"))
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        empty = np.zeros((self.kv_heads, 0, self.head_dim), dtype=np.float32)
        self.cache = [(empty, empty) for _ in range(self.layers)]
        self.past = [np.zeros((0, self.width), dtype=np.float32) for _ in range(self.layers)]
        self.length = 0

    @property
    def last_norm(self) -> str:
        return "token_embd_norm" if self.arch == "lfm2" else "output_norm"

    def _key(self, name: str, default: Any = None) -> Any:
        value = self.facts.get(f"{self.arch}.{name}", default)
        assert value is not None, f"{self.arch}.{name} is missing"
        return value

    def _check_names(self) -> None:
        inside = {
            f"blk.{layer}.{name}.weight"
            for layer in range(self.layers)
            for name in (
                LAYERS[self.arch] if self.kv_heads_by_layer[layer] else CONVOLUTION
            ).split()
        }
        outer = {"token_embd.weight", f"{self.last_norm}.weight"} | (
            {"position_embd.weight"} if self.arch == "gpt2" else set()
        )
        weights = {
            name
            for name in self.tensors
            if name.endswith(".weight") and not name.startswith("rope_")
        }
        missing = (inside | outer) - weights
        assert not missing, f"{min(missing)} is missing in the file"
        surplus = weights - inside - outer - {"output.weight"}
        assert not surplus, f"{min(surplus)} has no place in the file"

    def value(self, name: str) -> Array | None:
        """A tensor in float32, or None where the file has none."""
        if name in self._values:
            return self._values[name]
        if name not in self.tensors:
            return None
        tensor = self.tensors[name]
        values: Array = self._library.quants.dequantize(tensor.data, tensor.tensor_type).astype(
            np.float32, copy=False
        )
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if self._kept:
            self._values[name] = values
        return values

    def _linear(self, x: Array, name: str) -> Array:
        weight = self.value(f"{name}.weight")
        bias = self.value(f"{name}.bias")
        assert weight is not None
        product: Array = x @ weight.T
        return product if bias is None else product + bias

    def _norm(self, x: Array, name: str) -> Array:
        weight = self.value(f"{name}.weight")
        bias = self.value(f"{name}.bias")
        if weight is None:  # OLMo 2 has none before a block
            return x
        if self.arch == "gpt2":
            centered = x - x.mean(-1, keepdims=True)
            eps = self._key("attention.layer_norm_epsilon")
            x = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + np.float32(eps))
        else:
            eps = self._key("attention.layer_norm_rms_epsilon")
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(eps))
        return x * weight if bias is None else x * weight + bias

    def _angles(self, positions: Array, layer: int) -> tuple[Array, Array]:
        """cos and sin [T, width / 2] of `ggml_rope_ext`."""
        width = self._key("rope.dimension_count", self.head_dim)
        base = float(self._key("rope.freq_base", 10000.0))
        kind = self.facts.get(f"{self.arch}.rope.scaling.type", "none")
        stretch = float(self._key("rope.scaling.factor", 1.0)) if kind != "none" else 1.0
        if self._windowed(layer):
            default = 10000.0 if self.arch == "gemma3" else base
            base = float(self._key("rope.freq_base_swa", default))
            stretch = 1.0 if self.arch == "gemma3" else stretch
            kind = "none" if self.arch == "olmo2" else kind
            stretch = 1.0 if self.arch == "olmo2" else stretch
        frequencies = base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        original = int(
            self._key("rope.scaling.original_context_length", self._key("context_length"))
        )
        long = "long" if self.context > original else "short"
        for name in ("rope_freqs.weight", f"rope_factors_{long}.weight"):
            if (factors := self.value(name)) is not None:
                frequencies = frequencies / factors
        scale = float(self._key("rope.scaling.attn_factor", 1.0))
        if self.arch == "olmo2" and self._windowed(layer):
            scale = 1.0
        if kind == "yarn":
            turns = (
                self._key("rope.scaling.yarn_beta_fast", 32.0),
                self._key("rope.scaling.yarn_beta_slow", 1.0),
            )
            ends = [
                width * math.log(original / (each * 2 * math.pi)) / (2 * math.log(base))
                for each in turns
            ]
            low = max(0, math.floor(ends[0]))
            high = min(width - 1, math.ceil(ends[1]))
            mix = 1 - np.clip((np.arange(width // 2) - low) / max(0.001, high - low), 0, 1)
            frequencies = frequencies / stretch * (1 - mix) + frequencies * mix
            scale *= 1.0 + 0.1 * math.log(stretch)
        else:
            frequencies = frequencies / stretch
        angles = positions[:, None] * frequencies
        return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(
            np.float32
        )

    def _turn(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotates [H, T, D]."""
        width = 2 * cos.shape[-1]
        turned = x.copy()
        neighbors = self.arch in NEIGHBORS
        first = np.s_[..., 0:width:2] if neighbors else np.s_[..., 0 : width // 2 : 1]
        second = np.s_[..., 1:width:2] if neighbors else np.s_[..., width // 2 : width : 1]
        turned[first] = x[first] * cos - x[second] * sin
        turned[second] = x[first] * sin + x[second] * cos
        return turned

    def _windowed(self, layer: int) -> bool:
        period = PERIODS.get(self.arch, 0)
        return bool(
            period and self._key("attention.sliding_window", 0) and layer % period < period - 1
        )

    def _attention(self, x: Array, layer: int, positions: Array) -> Array:
        block = f"blk.{layer}"
        count = len(x)
        if f"{block}.attn_qkv.weight" in self.tensors:
            sizes = np.cumsum([self.heads * self.head_dim, self.kv_heads * self.head_dim])
            q, k, v = np.split(self._linear(x, f"{block}.attn_qkv"), sizes, axis=-1)
        else:
            q, k, v = (self._linear(x, f"{block}.attn_{name}") for name in "qkv")

        def by_head(values: Array, heads: int, norm: str) -> Array:
            gain = self.value(f"{block}.{norm}.weight") if norm else None
            # of all heads together
            if gain is not None and gain.size == values.shape[-1] != self.head_dim:
                values = self._norm(values, f"{block}.{norm}")
                gain = None
            values = values.reshape(count, heads, self.head_dim).swapaxes(0, 1)
            return values if gain is None else self._norm(values, f"{block}.{norm}")

        q = by_head(q, self.heads, "attn_q_norm")
        k = by_head(k, self.kv_heads, "attn_k_norm")
        v = by_head(v, self.kv_heads, "")
        if self.arch != "gpt2" and not (self.arch == "smollm3" and (layer + 1) % 4 == 0):
            cos, sin = self._angles(positions, layer)
            q = self._turn(q, cos, sin)
            k = self._turn(k, cos, sin)
        if growth := self.facts.get(f"{self.arch}.attention.temperature_scale"):
            original = self._key("rope.scaling.original_context_length")
            q = q * (1 + growth * np.log(1 + positions // original))[:, None].astype(np.float32)
        k, v = (
            np.concatenate(pair, axis=1) for pair in zip(self.cache[layer], (k, v), strict=True)
        )
        self.cache[layer] = k, v
        large = (self.arch, self.layers) in (("gemma2", 46), ("gemma3", 62))
        scale = (self.width // self.heads if large else self.head_dim) ** -0.5
        scale = float(self._key("attention.scale", scale))
        k, v = (np.repeat(each, self.heads // self.kv_heads, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) * np.float32(scale)
        if self.arch == "gemma2":
            cap = np.float32(self._key("attn_logit_softcapping", 50.0))
            scores = cap * np.tanh(scores / cap)
        past = positions[:, None] - np.arange(k.shape[1])[None]
        hidden = (past < 0) | (
            past >= self._key("attention.sliding_window") if self._windowed(layer) else False
        )
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        return self._linear(mixed.swapaxes(0, 1).reshape(count, -1), f"{block}.attn_output")

    def _convolution(self, x: Array, layer: int) -> Array:
        """The gate before it, the taps of each number, the gate after it; the last inputs stay for later tokens."""
        block = f"blk.{layer}.shortconv"
        before, after, inner = np.split(self._linear(x, f"{block}.in_proj"), 3, axis=-1)
        taps = self.value(f"{block}.conv.weight")
        assert taps is not None
        kernel = int(self._key("shortconv.l_cache"))
        assert taps.shape == (self.width, kernel)
        seen = np.concatenate((self.past[layer], before * inner))
        self.past[layer] = seen[-(kernel - 1) :]
        padded = np.concatenate((np.zeros((kernel - 1, self.width), dtype=np.float32), seen))
        mixed = sum(padded[tap : tap + len(seen)] * taps[:, tap] for tap in range(kernel))
        return self._linear(after * mixed[-len(x) :], f"{block}.out_proj")

    def _mlp(self, x: Array, layer: int) -> Array:
        block = f"blk.{layer}"
        up = self._linear(x, f"{block}.ffn_up")
        if self.arch == "phi3":
            gate, up = np.split(up, 2, axis=-1)
        elif self.arch == "gpt2":
            return self._linear(_gelu(up), f"{block}.ffn_down")
        else:
            gate = self._linear(x, f"{block}.ffn_gate")
        active = _gelu(gate) if self.arch in GELU else gate / (1 + np.exp(-gate))
        return self._linear(active * up, f"{block}.ffn_down")

    def forward(self, tokens: Sequence[int]) -> Array:
        """Logits [T, V] of the tokens, which follow those of earlier calls."""
        positions = np.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        embedding = self.value("token_embd.weight")
        assert embedding is not None
        x = embedding[list(tokens)]
        if self.arch.startswith("gemma"):
            x = x * np.float32(math.sqrt(self.width))
        x = x * np.float32(self._key("embedding_scale", 1.0))
        if (places := self.value("position_embd.weight")) is not None:
            x = x + places[positions]
        added = np.float32(self._key("residual_scale", 1.0))
        for layer in range(self.layers):
            normed = self._norm(x, f"blk.{layer}.attn_norm")
            if self.kv_heads_by_layer[layer]:
                mixed = self._attention(normed, layer, positions)
            else:
                mixed = self._convolution(normed, layer)
            x = x + added * self._norm(mixed, f"blk.{layer}.post_attention_norm")
            mixed = self._mlp(self._norm(x, f"blk.{layer}.ffn_norm"), layer)
            x = x + added * self._norm(mixed, f"blk.{layer}.post_ffw_norm")
        head = self.value("output.weight")
        logits: Array = self._norm(x, self.last_norm) @ (embedding if head is None else head).T
        if self.arch == "granite":
            logits = logits / np.float32(self._key("logit_scale"))
        if cap := self.facts.get(
            f"{self.arch}.final_logit_softcapping", 30.0 if self.arch == "gemma2" else 0.0
        ):
            logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
        return logits


def _gelu(x: Array) -> Array:
    """GGML_GELU: by tanh."""
    inner = np.float32(math.sqrt(2 / math.pi)) * x * (1 + np.float32(0.044715) * x * x)
    gelu: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return gelu


# The tokenizer

_PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PLAIN)
# The character that GPT-2 writes a byte as
SPELLED = tuple(chr(byte if byte in _PLAIN else 256 + _OTHERS.index(byte)) for byte in range(256))


@final
class FileTokenizer:
    """The tokenizer of a file as llama.cpp reads it, with special tokens in a text."""

    def __init__(self, facts: Json) -> None:
        self.model = facts["tokenizer.ggml.model"]
        self.facts = facts
        self.tokens: list[str] = facts["tokenizer.ggml.tokens"]
        self.types: list[int] = facts["tokenizer.ggml.token_type"]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.ranks = {
            tuple(merge.split(" ")): rank
            for rank, merge in enumerate(facts.get("tokenizer.ggml.merges", []))
        }
        special = (CONTROL, USER_DEFINED, UNKNOWN)
        named = [
            token
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in special and token
        ]
        self.special = sorted(named, key=lambda token: -len(token))
        phi = re.search("phi-?3", facts.get("general.name", "").lower()) is not None
        self.stripping = set(named) - {"<unk>", "<s>", "<|endoftext|>"} if phi else set[str]()

    @cached_property
    def _words(self) -> Any:
        from tokenizers import Tokenizer as Library

        steps = splits(PRE_TOKENIZERS[self.facts["tokenizer.ggml.pre"]][0])
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        return Library.from_str(
            json.dumps({"version": "1.0", "model": empty, "pre_tokenizer": steps})
        ).pre_tokenizer

    def encode(self, text: str) -> list[int]:
        fragments: list[str | int] = [text] if text else []
        for token in self.special:
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int) or token not in fragment:
                    cut.append(fragment)
                    continue
                for number, part in enumerate(fragment.split(token)):
                    if number:
                        cut.append(self.ids[token])
                        part = part.lstrip(" \t\n\r\v\f") if token in self.stripping else part
                    cut += [part] if part else []
            fragments = cut
        found = list[int]()
        after_special = True
        for fragment in fragments:
            if isinstance(fragment, int):
                found.append(fragment)
            elif self.model == "gpt2":
                found += self._byte_level(fragment)
            else:
                prefix = (
                    " "
                    if after_special and self.facts.get("tokenizer.ggml.add_space_prefix", True)
                    else ""
                )
                found += self._sentencepiece((prefix + fragment).replace(" ", "▁"))
            after_special = isinstance(fragment, int)
        return found

    def _byte_level(self, text: str) -> Iterator[int]:
        whole = PRE_TOKENIZERS[self.facts["tokenizer.ggml.pre"]][1]
        for _, (first, last) in self._words.pre_tokenize_str(text):
            word = "".join(SPELLED[byte] for byte in text[first:last].encode())
            if whole and word in self.ids:
                yield self.ids[word]
                continue
            symbols = list(word)
            while len(symbols) > 1:
                pairs = [self.ranks.get(pair, math.inf) for pair in pairwise(symbols)]
                best = min(pairs)
                if best == math.inf:
                    break
                at = pairs.index(best)
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            for symbol in symbols:
                yield from (
                    [self.ids[symbol]]
                    if symbol in self.ids
                    else [self.ids[c] for c in symbol if c in self.ids]
                )

    def _sentencepiece(self, text: str) -> Iterator[int]:
        scores = self.facts["tokenizer.ggml.scores"]
        symbols = list(text)
        while len(symbols) > 1:
            joined = [self.ids.get(a + b) for a, b in pairwise(symbols)]
            known = [-math.inf if index is None else scores[index] for index in joined]
            best = max(known)
            if best == -math.inf:
                break
            at = known.index(best)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            if symbol in self.ids:
                yield self.ids[symbol]
            else:
                yield from (self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode())


# The comparison


def check_gguf(path: Path, files: ModelFiles, *, kind: str) -> Parity:
    """Asserts that llama.cpp's graph of the file computes what the model computes, from the same tokens."""
    graph = Graph(path)
    file_tokenizer = FileTokenizer(graph.facts)
    tokenizer = load_tokenizer(files.tokenizer)
    for text in TEXTS[:-1] if composes(tokenizer.description) else TEXTS:
        (expected_ids, _) = tokenizer.encode_places([text])[0]
        assert file_tokenizer.encode(text) == expected_ids, text
    decoder = load_in_float32(files.weights, Use("cpu"), base=files.base)
    prompt = file_tokenizer.encode(TEXTS[3])[:32] or [0]
    parity = compare(graph, decoder, prompt, greedy=kind == "f32")
    bound = ERF if decoder.config.activation == "gelu" else SAME_WEIGHTS
    assert parity.difference <= bound * parity.scale, parity
    if bound == SAME_WEIGHTS:
        assert parity.kl <= MOST_KL.get(kind, math.inf), parity
        assert parity.greedy in (None, parity.asked), parity
    return parity


@torch.no_grad()
def fill_from_file(decoder: Decoder, tensors: Mapping[str, Any]) -> None:
    """Replaces the parameters of a decoder by those of a file, dequantized."""
    parameters = dict(decoder.named_parameters())
    for piece in gguf_tensors(decoder.config):
        whole = piece.apply(dequantized_tensor(tensors[piece.name]), undo=True)
        for part, rows in zip(
            piece.parts, whole.split([len(parameters[name]) for name in piece.parts]), strict=True
        ):
            parameters[part].copy_(rows.reshape_as(parameters[part]))


def compare(graph: Graph, decoder: Decoder, prompt: Sequence[int], *, greedy: bool) -> Parity:
    """The file against the model that it was made from, whose weights are then replaced by those of the file.

    With `greedy`, the file continues the prompt, and the model must choose the same tokens.
    """
    config = decoder.config
    windows = (
        []
        if PERIODS.get(graph.arch)
        else [each for each in config.sliding_window if each is not None]
    )
    # llama.cpp ignores these windows: compared is what both can see
    limit = min([config.max_positions, *windows])
    prompt = prompt[: max(1, limit - GREEDY // 2)][: limit - 1]
    room = min(GREEDY, limit - len(prompt))
    graph.context = len(prompt) + room
    graph.reset()
    parts = [graph.forward(prompt)]
    tokens = list(prompt)
    for _ in range(room if greedy else 0):
        tokens.append(int(parts[-1][-1].argmax()))
        parts.append(graph.forward(tokens[-1:]))
    if not greedy:  # any tokens show a difference
        more = [int(each) for each in np.random.default_rng(0).integers(0, config.vocab_size, room)]
        tokens += more
        parts.append(graph.forward(more))
    theirs = np.concatenate(parts)
    device = decoder.model.embed_tokens.weight.device
    with torch.no_grad():
        original = decoder(torch.tensor([tokens], device=device)).head[0].float().cpu().numpy()
        if has_method(decoder):
            merge_methods(decoder)
        fill_from_file(decoder, graph.tensors)
        with adapters_disabled(decoder):  # which the file has merged
            same = decoder(torch.tensor([tokens], device=device)).head[0].float().cpu().numpy()
    difference = float(np.abs(theirs - same).max())
    scale = float(np.abs(same).max())
    first = log_softmax(original)
    second = log_softmax(theirs)
    kl = float((np.exp(first) * (first - second)).sum(-1).mean())
    top1 = float((original.argmax(-1) == theirs.argmax(-1)).mean())
    equal = None
    if greedy:
        steps = np.arange(len(prompt) - 1, len(tokens) - 1)
        chosen = original[steps, tokens[len(prompt) :]]
        # a tie may break either way
        wrong = original[steps].max(-1) - chosen > 2 * SAME_WEIGHTS * scale
        equal = int(wrong.argmax()) if wrong.any() else len(steps)
    return Parity(difference, scale, max(kl, 0.0), top1, equal, room)


def log_softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    result: Array = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result
