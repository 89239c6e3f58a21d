"""A GGUF file as a folder in Hugging Face format, with float weights.

The header is read here, within bounds that follow from the length of the file: a file cannot make the reader wait, take
memory or leave its own bytes. Only then does the gguf package see tensors, to dequantize them.
"""

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.core.files import open_input
from bloomery.data.tokenizer.sentencepiece import bpe_of_pieces
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer
from bloomery.export.gguf_format import (
    ALIGNMENT,
    ARCHITECTURES,
    CONTROL,
    NO_ROPE_EVERY,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    gguf_library,
    layout,
    splits,
)
from bloomery.export.layouts import DTYPES, Exported, draft_of
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_shapes
from bloomery.model.families import FAMILIES, config_from_hf
from bloomery.model.io.weights import write_json, write_model_piecewise
from bloomery.model.rope import frequencies

Array = np.ndarray[Any, Any]
Json = dict[str, Any]
_AGAIN = "download the file again, from a source that you trust"
# bytes of a value, by its type
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
MOST_KEYS = 4096
MOST_TENSORS = 2**17
# of all arrays together: a Python object each; Gemma's 262,144 tokens take 1.3 million
MOST_ENTRIES = 2**22
MOST_HEADER = 2**26  # bytes of strings and numbers that are kept
LONGEST_NAME = 256
# `general.file_type`, and the type of the same size that no tensor of such a file has: read as that one, its bytes are
# other numbers, and nothing else in the file tells.
_FOREIGN_TYPE = {1: "BF16", 32: "F16", 2: "IQ4_NL", 25: "Q4_0"}


@dataclass(frozen=True)
class Block:
    """A tensor of the file as it is stored; `shape`: the fastest dimension first, as in the file."""

    data: Array
    tensor_type: Any
    shape: tuple[int, ...]
    name: str

    def rows(self, start: int, stop: int) -> "Block":
        """Some rows of a matrix, or some numbers of a vector."""
        if len(self.shape) == 1:
            bytes_per_number = len(self.data) // self.shape[0]
            data = self.data[start * bytes_per_number : stop * bytes_per_number]
            return Block(data, self.tensor_type, (len(data) // bytes_per_number,), self.name)
        data = self.data[start:stop]
        return Block(data, self.tensor_type, (*self.shape[:-1], len(data)), self.name)


@final
class _Header:
    """A cursor over the bytes of a file, every step of which is checked."""

    def __init__(self, content: Any, path: Path) -> None:
        self.content = content
        self.path = path
        self.at = 0
        self.kept = 0
        self.entries = 0

    def refuse(self, problem: str) -> UserError:
        return UserError(f"not a valid GGUF file: {problem}", where=str(self.path), fix=_AGAIN)

    def take(self, size: int) -> bytes:
        if size > len(self.content) - self.at:
            raise self.refuse(f"{size:,} bytes are stated at {self.at:,}, and the file ends before")
        self.kept += size
        if self.kept > MOST_HEADER:
            raise self.refuse(f"its header is larger than {MOST_HEADER:,} bytes")
        self.at += size
        piece: bytes = self.content[self.at - size : self.at]
        return piece

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self, longest: int = MOST_HEADER) -> str:
        size = self.number("Q")
        if size > longest:
            raise self.refuse(f"a text of {size:,} bytes is stated at {self.at:,}")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"a text before {self.at:,} is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind in _CODES:
            return self.number(_CODES[kind])
        if kind != _ARRAY:
            raise self.refuse(f"a value has the unknown type {kind}")
        inner = self.number("I")
        count = self.number("Q")
        if inner == _ARRAY:
            raise self.refuse("an array holds arrays")
        least = 8 if inner == _STRING else _SIZES.get(inner)
        if least is None:
            raise self.refuse(f"an array has the unknown type {inner}")
        self.entries += count
        if count * least > len(self.content) - self.at or self.entries > MOST_ENTRIES:
            raise self.refuse(f"an array of {count:,} entries is stated at {self.at:,}")
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return list(struct.unpack(f"<{count}{_CODES[inner]}", self.take(count * least)))


def read_gguf(path: Path) -> tuple[Json, dict[str, Block]]:
    """The metadata and the tensors, which stay in the file until they are used. Raises UserError for a file whose
    header is damaged or made to harm. As in llama.cpp, each tensor begins where the one before it ends; the last one
    ends with the file.
    """
    with open_input(path) as file:
        size = path.stat().st_size
        if size < 24:
            raise UserError("not a valid GGUF file: it is too short", where=str(path), fix=_AGAIN)
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = _Header(content, path)
    if header.take(4) != b"GGUF":
        raise header.refuse("it does not begin with GGUF")
    if (version := header.number("I")) not in (2, 3):
        raise header.refuse(f"its version is {version}, and 2 and 3 are known")
    count = header.number("Q")
    keys = header.number("Q")
    if count > min(MOST_TENSORS, size // 32) or keys > min(MOST_KEYS, size // 13):
        raise header.refuse(f"{count:,} tensors and {keys:,} keys are stated in {size:,} bytes")
    facts: Json = {}
    for _ in range(keys):
        key = header.string(LONGEST_NAME)
        if key in facts:
            raise header.refuse(f"{key} is stated twice")
        facts[key] = header.value()
    stated = [_tensor_info(header) for _ in range(count)]
    alignment = facts.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
        raise header.refuse(f"its alignment is {str(alignment)[:20]}")
    start = -(-header.at // alignment) * alignment
    library = gguf_library()
    tensors = dict[str, Block]()
    known = {int(kind): kind for kind in library.GGMLQuantizationType}
    memory = np.frombuffer(content, dtype=np.uint8)
    # `end`: of the tensors so far
    end = 0
    file_type = facts.get("general.file_type")
    foreign = _FOREIGN_TYPE.get(file_type) if isinstance(file_type, int) else None
    for name, shape, number, offset in stated:
        if number not in known:
            raise header.refuse(f"{name} has the unknown type {number}")
        if name in tensors:
            raise header.refuse(f"{name} is stated twice")
        block, bytes_ = library.GGML_QUANT_SIZES[known[number]]
        numbers = math.prod(shape)
        if not shape or 0 in shape or shape[0] % block:
            raise header.refuse(f"{name} has the shape {list(shape)}")
        if offset != end:
            raise header.refuse(
                f"{name} is stated at {offset:,}; the tensors before it end at {end:,}"
            )
        length = numbers // block * bytes_
        if start + offset + length > size:
            raise header.refuse(f"{name} is outside the file")
        rows = (*reversed(shape[1:]), shape[0] // block * bytes_)
        tensors[name] = Block(
            memory[start + offset :][:length].reshape(rows), known[number], shape, name
        )
        end = offset + -(-length // alignment) * alignment
        if known[number].name == foreign:
            raise header.refuse(
                f"{name} has the type {foreign}, which no tensor of such a file has"
            )
    if tensors and size > start + end:
        raise header.refuse(f"{size - start - end:,} bytes follow the last tensor")
    return facts, tensors


def _tensor_info(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name = header.string(LONGEST_NAME)
    dimensions = header.number("I")
    if dimensions > 4:
        raise header.refuse(f"{name[:80]} has {dimensions:,} dimensions")
    shape = tuple(header.number("Q") for _ in range(dimensions))
    return name, shape, header.number("I"), header.number("Q")


def dequantized(block: Any) -> Tensor:
    """Float32, of a Block or of the gguf package's own tensor. Raises UserError for numbers that are not finite."""
    library = gguf_library()
    data = np.ascontiguousarray(block.data)
    # stored as bytes here, typed there
    if data.dtype == np.uint8 and int(block.tensor_type) in (0, 1):
        data = data.view(np.float32 if int(block.tensor_type) == 0 else np.float16)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused below
            values = library.quants.dequantize(data, block.tensor_type)
    except (
        NotImplementedError,
        ValueError,
    ) as error:  # a type it only names; rows that are no whole blocks
        problem = f"the gguf package cannot dequantize {block.tensor_type.name}"
        raise UserError(
            problem, where="the file", fix="use a file of type f16, q8_0, q4_0 or a K type"
        ) from error
    if not np.isfinite(values).all():
        name = getattr(block, "name", "a tensor")
        raise UserError(f"{name} holds numbers that are not finite", where="the file", fix=_AGAIN)
    shape = [int(size) for size in reversed(block.shape)]
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(shape))


# The config


def config_of(facts: Json, tensors: Mapping[str, Block], path: Path) -> ModelConfig:
    """Raises UserError for an architecture or a value that is not known."""
    arch = facts.get("general.architecture")
    families = {each.name: family for family, each in reversed(list(ARCHITECTURES.items()))}
    if not isinstance(arch, str) or arch not in families:
        problem = f"{str(arch)[:40]!r} is not a supported GGUF architecture"
        raise UserError(problem, where=str(path), fix=f"supported: {', '.join(sorted(families))}")
    family = families[arch]

    def fact(name: str, default: Any = None) -> Any:
        return facts.get(f"{arch}.{name}", default)

    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError("token_embd.weight is missing", where=str(path), fix=_AGAIN)
    heads = fact("attention.head_count")
    width = fact("embedding_length")
    if isinstance(heads, list) or isinstance(fact("feed_forward_length"), list):
        raise UserError(
            "its layers differ in their sizes", where=str(path), fix="choose another model"
        )
    whole = type(heads) is int and type(width) is int and heads > 0
    head_dim = fact("attention.key_length", width // heads if whole else None)
    values = {
        "vocab_size": embedding.shape[-1],
        "hidden_size": width,
        "num_layers": fact("block_count"),
        "intermediate_size": fact("feed_forward_length"),
        "num_heads": heads,
        "head_dim": head_dim,
        "num_kv_heads": fact("attention.head_count_kv", heads),
        "max_positions": fact("context_length"),
        "norm_eps": fact("attention.layer_norm_rms_epsilon", fact("attention.layer_norm_epsilon")),
    }
    if isinstance(values["norm_eps"], float):
        values["norm_eps"] = float(f"{values['norm_eps']:.6g}")  # 1e-05 as float32 is 9.9999997e-06
    keys = FAMILIES[family].keys
    raw: Json = {"model_type": family} | {
        theirs: values[own] for own, theirs in keys.items() if own in values
    }
    raw |= {
        theirs: f"blk.0.{_FLAGS[own]}.bias" in tensors
        for own, theirs in FAMILIES[family].flags.items()
    }
    if family in ("llama", "smollm3", "olmo2", "qwen3"):
        raw["attention_bias"] = "blk.0.attn_q.bias" in tensors
    raw["tie_word_embeddings"] = "output.weight" not in tensors
    raw |= {
        f"{role}_token_id": facts.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    if family == "gemma2":
        raw |= {
            "attn_logit_softcapping": fact("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": fact("final_logit_softcapping", 30.0),
        }
    elif family == "gemma3_text":
        raw["final_logit_softcapping"] = fact("final_logit_softcapping")
        raw["rope_local_base_freq"] = fact("rope.freq_base_swa", 10000.0)
    if ARCHITECTURES[family].window_period:
        raw["sliding_window"] = fact(
            "attention.sliding_window", 4096 if family == "gemma2" else None
        )
        large = fact("block_count") == {"gemma2": 46}.get(family, 62)
        raw["query_pre_attn_scalar"] = width // heads if large and whole else head_dim
    elif family in ("mistral", "phi3"):
        raw["sliding_window"] = None
    if family == "smollm3" and type(fact("block_count")) is int:
        raw["no_rope_layers"] = [
            int((n + 1) % NO_ROPE_EVERY != 0) for n in range(min(fact("block_count"), 2**12))
        ]
    if family != "gpt2":
        raw |= _rope(fact, tensors, head_dim, path)
    return config_from_hf(raw, where=str(path))


_FLAGS = {"attention_bias": "attn_q", "output_bias": "attn_output", "mlp_bias": "ffn_up"}


def _rope(fact: Any, tensors: Mapping[str, Block], head_dim: Any, path: Path) -> Json:
    theta = fact("rope.freq_base", 10000.0)
    context = fact("context_length")
    width = fact("rope.dimension_count", head_dim)
    share = {} if width == head_dim or not head_dim else {"partial_rotary_factor": width / head_dim}
    original = fact("rope.scaling.original_context_length", context)
    kind = fact("rope.scaling.type", "none")
    factor = fact("rope.scaling.factor", 1.0)
    plain = {"rope_type": "default", "rope_theta": theta}
    found: Json = {"rope_theta": theta, "rope_parameters": plain, **share}
    factors = {
        name: [float(x) for x in dequantized(tensors[key])]
        for name, key in (
            ("all", "rope_freqs.weight"),
            ("short", "rope_factors_short.weight"),
            ("long", "rope_factors_long.weight"),
        )
        if key in tensors
    }
    if kind == "linear":
        found["rope_parameters"] = plain | {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        yarn = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fact("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": fact("rope.scaling.yarn_beta_slow", 1.0),
        }
        if (
            (scale := fact("rope.scaling.attn_factor")) is not None
            and isinstance(factor, float)
            and factor > 0
        ):
            yarn["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
        found["rope_parameters"] = plain | yarn
    elif "short" in factors and "long" in factors:
        found["original_max_position_embeddings"] = original
        found["rope_parameters"] = plain | {
            "rope_type": "longrope",
            "short_factor": factors["short"],
            "long_factor": factors["long"],
            "factor": context / original,
            "attention_factor": fact("rope.scaling.attn_factor", 1.0),
        }
    elif "all" in factors and any(abs(each - 1) > 1e-6 for each in factors["all"]):
        found["rope_parameters"] = plain | _llama3(factors["all"], theta, context)
    elif kind not in ("none", "linear", "longrope"):
        raise UserError(
            f"RoPE scaling {str(kind)[:40]!r} is not known",
            where=str(path),
            fix="choose another model",
        )
    return found


def _llama3(factors: list[float], theta: float, context: int) -> Json:
    """Llama 3's settings that give these factors; else LongRoPE's, which state any."""
    for factor in (8.0, 32.0):
        stated = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        sizes = {
            "vocab_size": 8,
            "hidden_size": 2 * len(factors),
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "intermediate_size": 8,
            "rope_theta": theta,
            "max_position_embeddings": context,
        }
        config = config_from_hf({"model_type": "llama", **sizes, "rope_scaling": stated})
        plain, stretched = (
            frequencies(config, theta, each, 0) for each in (None, config.rope_scaling)
        )
        if np.allclose((plain / stretched).numpy(), factors, rtol=1e-4):
            return stated
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "original_max_position_embeddings": context,
        "attention_factor": 1.0,
    }


# The tokenizer


def tokenizer_of(facts: Json, path: Path) -> Tokenizer:
    """Raises UserError for a tokenizer that is not known."""

    def refuse(problem: str) -> UserError:
        return UserError(
            problem, where=str(path), fix="choose a file with a BPE or SentencePiece tokenizer"
        )

    def key(name: str, default: Any = None) -> Any:
        return facts.get(f"tokenizer.ggml.{name}", default)

    kind = key("model")
    tokens = key("tokens")
    types = key("token_type")
    if kind not in ("gpt2", "llama"):
        raise refuse(f"tokenizer {str(kind)[:40]!r} is not known")
    if not _texts(tokens):
        raise refuse("the file has no list of tokens")
    types = [NORMAL] * len(tokens) if types is None else types
    if not isinstance(types, list) or len(types) != len(tokens):
        raise refuse("the file has another number of tokens than of their types")
    pads = [
        t == UNUSED and re.fullmatch(r"\[PAD\d+\]", token) is not None
        for token, t in zip(tokens, types, strict=True)
    ]
    vocab = {token: index for index, token in enumerate(tokens) if not pads[index]}
    if len(vocab) != len(tokens) - sum(pads):
        (twice, _), *_ = Counter(
            token for token, pad in zip(tokens, pads, strict=True) if not pad
        ).most_common(1)
        raise refuse(f"the token {twice[:40]!r} is stated twice")
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    added = [
        {
            "id": index,
            "content": token,
            "special": types[index] != USER_DEFINED,
            "rstrip": strips_after(token, facts),
            **flags,
        }
        for token, index in vocab.items()
        if types[index] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    shared: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        "normalizer": None,
        "pre_tokenizer": None,
    }
    if kind == "gpt2":
        pre = key("pre", "default")
        merges = key("merges")
        if pre not in PRE_TOKENIZERS:
            raise refuse(
                f"pre-tokenizer {str(pre)[:40]!r} is not known; these are: {', '.join(PRE_TOKENIZERS)}"
            )
        if not _texts(merges) or any(merge.count(" ") != 1 for merge in merges):
            raise refuse("the file has no list of merges")
        patterns, whole = PRE_TOKENIZERS[pre]
        steps = splits(patterns)["pretokenizers"]
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        model: Json = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole,
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in merges],
        }
        shared |= {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
            "decoder": level,
            "model": model,
        }
    else:
        scores = key("scores")
        if not isinstance(scores, list) or len(scores) != len(tokens) or UNKNOWN not in types:
            raise refuse("the file has no score for each token, or no unknown token")
        prefixed = bool(key("add_space_prefix", True))
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        first = {"type": "Prepend", "prepend": "▁"}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        decoders = [
            back,
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([strip] if prefixed else []),
        ]
        pieces = list(zip(tokens, scores, types, strict=True))
        shared |= {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([first] if prefixed else []), replaced],
            },
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": bpe_of_pieces(pieces, True),
        }
    config: Json = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = key(f"{name}_token_id")
        if type(index) is int and 0 <= index < len(tokens):
            config[f"{role}_token"] = tokens[index]
    bos = config.get("bos_token")
    if bos is not None and key("add_bos_token", kind == "llama"):
        template = [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        stated = {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}
        shared["post_processor"] = {
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: stated},
        }
    if isinstance(template_text := facts.get("tokenizer.chat_template"), str):
        config["chat_template"] = template_text
    control = {name for name in config.values() if name in vocab}
    return Tokenizer(JsonBackend(shared, str(path), control), config)


def strips_after(token: str, facts: Json) -> bool:
    """Whether white space after a special token is dropped: llama.cpp does so in models that are named Phi-3."""
    phi = re.search("phi-?3", str(facts.get("general.name", "")).lower()) is not None
    return phi and token not in ("<unk>", "<s>", "<|endoftext|>")


def _texts(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], str)


# The folder


def import_gguf(path: Path, out: Path, *, dtype: str | None = None) -> Exported:
    """Writes the new folder `out`, completely or not at all: weights one tensor at a time, config, tokenizer and
    generation settings. `dtype`: None keeps float32, float16 and bfloat16, and takes bfloat16 for quantized weights.
    Raises UserError.
    """
    if path.is_dir():
        inside = next((name.name for name in sorted(path.glob("*.gguf"))), None)
        fix = (
            f"name the file: {path / inside}"
            if inside
            else "use a folder in Hugging Face format as it is"
        )
        raise UserError(
            "the path is a folder, and `import` takes a GGUF file", where=str(path), fix=fix, code=2
        )
    facts, tensors = read_gguf(path)
    if facts.get("general.type", "model") != "model":
        problem = f"the file holds a {str(facts['general.type'])[:40]}, not a model"
        raise UserError(problem, where=str(path), fix="name the GGUF file of a model")
    config = config_of(facts, tensors, path)
    tokenizer = tokenizer_of(facts, path)
    owners = {part: piece for piece in reversed(layout(config)) for part in piece.parts}
    for piece in owners.values():
        shape = tuple(reversed(tensors[piece.name].shape)) if piece.name in tensors else None
        if shape != piece.shape:
            stated = (
                "missing"
                if shape is None
                else f"{list(shape)}; its metadata makes it {list(piece.shape)}"
            )
            raise UserError(f"{piece.name} is {stated}", where=str(path), fix=_AGAIN)
    expected = {piece.name for piece in layout(config)} | {"output.weight"}
    if surplus := {
        name for name in tensors if name not in expected and not name.startswith("rope_")
    }:
        raise UserError(
            f"{min(surplus)[:80]} has no place in the model",
            where=str(path),
            fix="choose another model",
        )
    if tokenizer.vocab_size > config.vocab_size:
        problem = (
            f"the file has {tokenizer.vocab_size:,} tokens and embeddings of {config.vocab_size:,}"
        )
        raise UserError(problem, where=str(path), fix=_AGAIN)
    kinds = {"F32": "float32", "F16": "float16"}
    kept = dtype or kinds.get(tensors["blk.0.ffn_down.weight"].tensor_type.name, "bfloat16")
    last: dict[str, Tensor] = {}
    shapes = parameter_shapes(config)

    def produce(name: str) -> Tensor:
        piece = owners[name]
        if piece.name not in last:
            last.clear()
            last[piece.name] = piece.apply(dequantized(tensors[piece.name]), undo=True)
        parts = last[piece.name].split([shapes[part][0] for part in piece.parts])
        one: Tensor = parts[piece.parts.index(name)].to(DTYPES[kept])
        if not torch.isfinite(one).all():
            problem = f"{piece.name} has numbers beyond the range of {kept}"
            raise UserError(problem, where=str(path), fix="add --type float32")
        return one

    with draft_of(out) as draft:
        write_model_piecewise(produce, config, DTYPES[kept], draft)
        tokenizer.save(draft)
        ends = [facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        ids = list(dict.fromkeys(each for each in ends if type(each) is int))
        settings: Json = {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
            "pad_token_id": config.pad_token_id,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        write_json(draft / "generation_config.json", settings)
    count = Counter(block.tensor_type.name for block in tensors.values())
    found = ", ".join(f"{number} {name}" for name, number in count.most_common())
    proofs = (f"{len(tensors)} tensors ({found}) as {kept}, {tokenizer.vocab_size:,} tokens",)
    return Exported(out, sum(each.stat().st_size for each in out.iterdir()), proofs)
