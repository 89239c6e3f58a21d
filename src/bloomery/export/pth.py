"""A folder as Meta publishes Llama (params.json, consolidated.NN.pth, tokenizer.model) in Hugging Face format.

The .pth files are pickles, opened by a child process that can do nothing else (`pth_worker`): it sends names and
shapes, which are checked here, and then the bytes of one tensor at a time.
"""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bloomery.core.child import Child, Message, Silence
from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.units import MIB
from bloomery.data.tokenizer.sentencepiece import MODEL_FILE
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.export.gguf_format import CONTROL, NORMAL
from bloomery.export.gguf_import import tokenizer_of
from bloomery.export.layouts import DTYPES, Exported, draft_of, exported
from bloomery.export.verify import SPELLED
from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, parameter_shapes
from bloomery.model.families import config_from_hf
from bloomery.model.io.stored import read_object
from bloomery.model.io.weights import write_json, write_model_piecewise

PARAMS, WORKER = "params.json", "bloomery.export.pth_worker"
SECONDS = 600.0  # to open the files, and to send a tensor
AGAIN = "download the folder again, from a source that you trust"
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
BY_COLUMNS = ("attention.wo", "feed_forward.w2")  # of these each file holds columns, of norms all; of the rest rows
KINDS = ("float32", "bfloat16", "float16")
TOKENS_FILE, LONGEST = 32 * MIB, 1024  # bytes of Llama 3's tokenizer.model, ten times its size, and of a token
_NAMES = ("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1")
_FIRST = (*_NAMES, "reserved_special_token_2", "reserved_special_token_3", "start_header_id", "end_header_id",
          "reserved_special_token_4", "eot_id", *(f"reserved_special_token_{n}" for n in range(5, 251)))  # fmt: skip
_LATER = (*_NAMES, "finetune_right_pad_id", "reserved_special_token_2", "start_header_id", "end_header_id", "eom_id",
          "eot_id", "python_tag", *(f"reserved_special_token_{n}" for n in range(3, 248)))  # fmt: skip
SPECIAL = {False: [f"<|{name}|>" for name in _FIRST], True: [f"<|{name}|>" for name in _LATER]}  # 3, and since 3.1
Listing = dict[str, tuple[str, Shape]]


def import_meta(folder: Path, out: Path, *, trusted: bool = False, dtype: str | None = None) -> Exported:
    """Writes the new folder `out`, completely or not at all. `dtype`: None keeps the one of the files.

    `trusted`: the user asked for pickles to be opened. The child holds all files in memory. Raises UserError.
    """
    files = sorted(folder.glob("consolidated.*.pth"))
    if not files:
        fix = "name a GGUF file, or a folder with params.json and consolidated.00.pth"
        raise UserError("no consolidated.00.pth is in this folder", where=str(folder), fix=fix)
    if not trusted:
        raise UserError(
            f"{files[0].name} is a pickle: opening it can run code of its author", where=str(folder), code=2,
            fix="use the safetensors version of the model, or add --unsafe-pickle: a process without files, network "
            "and environment opens it",
        )  # fmt: skip
    params = read_object(folder / PARAMS, fix=AGAIN) if (folder / PARAMS).is_file() else None
    if params is None:
        raise UserError(f"{PARAMS} is missing", where=str(folder), fix="put it next to the .pth files")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UserError("tokenizer.model is missing", where=str(folder), fix="put it next to the .pth files")
    as_text = not (folder / "tokenizer.json").is_file() and (folder / MODEL_FILE).open("rb").read(1) != b"\n"
    later = params.get("use_scaled_rope") is True
    tokenizer = tiktoken_of(folder / MODEL_FILE, later=later) if as_text else load_tokenizer(folder)
    job = {"paths": [str(path.resolve()) for path in files]}
    package = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}  # all of the environment
    with Child(WORKER, job, environment=package) as child:
        listings, locked = _listings(child, child.next(SECONDS), files)
        config = _config(params, listings, folder, tokenizer.bos_id, tokenizer.eos_id)
        if tokenizer.vocab_size > config.vocab_size:
            problem = f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model {config.vocab_size:,}"
            raise UserError(problem, where=str(folder), fix=AGAIN)
        joined = {name: _joined(name, shape, listings, folder) for name, shape in parameter_shapes(config).items()}
        kept = dtype or listings[0]["tok_embeddings.weight"][0]

        def produce(name: str) -> Tensor:
            stored, axis = joined[name]
            parts = [
                _tensor(child, number, stored, listing[stored], files)
                for number, listing in enumerate(listings[: None if axis is not None else 1])
            ]
            whole = parts[0] if axis is None else torch.cat(parts, axis)
            if stored.endswith((".wq.weight", ".wk.weight")):  # Meta rotates pairs of neighbors, transformers halves
                whole = whole.view(-1, config.head_dim // 2, 2, whole.shape[1]).transpose(1, 2).reshape(whole.shape)
            return whole.to(DTYPES[kept])

        with draft_of(out) as draft:
            write_model_piecewise(produce, config, DTYPES[kept], draft)
            tokenizer.save(draft)
            ends = [tokenizer.eos_id, *filter(None, map(tokenizer.id_of, ("<|eom_id|>", "<|eot_id|>")))]
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0],
                   "pad_token_id": tokenizer.pad_id}  # fmt: skip
            write_json(draft / "generation_config.json", {key: each for key, each in ids.items() if each is not None})
    walls = "files, network and environment" if locked else "environment; this kernel has no filter for the rest"
    about = f"context {config.max_positions:,}, RoPE theta {config.rope_theta:g}"
    proofs = [f"{len(files)} pickle files, opened in a process without {walls}",
              f"{len(joined)} parameters as {kept}, {about}"]  # fmt: skip
    return exported(out, proofs)


def tiktoken_of(path: Path, *, later: bool) -> Tokenizer:
    """Of Llama 3's tokenizer.model: a line for each token, its bytes in base64 and its rank. `later`: since 3.1.

    tiktoken joins the two neighbors whose joined bytes rank first, whatever they are made of: every way in which two
    tokens make a third is a merge, in the order of the third. Raises UserError.
    """
    fix = f"{AGAIN}, or put the tokenizer.json and tokenizer_config.json of the Hugging Face version next to it"
    try:
        lines = read_input(path, TOKENS_FILE).split(b"\n")
        pairs = [line.split(b" ") for line in lines if line]
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:
        problem = "tokenizer.model is neither a SentencePiece model nor lines of tokens and ranks"
        raise UserError(problem, where=str(path), fix=fix) from error
    whole = list(tokens.values()) == list(range(len(pairs)))
    if not whole or any(bytes([each]) not in tokens for each in range(256)) or max(map(len, tokens)) > LONGEST:
        raise UserError("its tokens do not have the ranks 0, 1, 2 and so on", where=str(path), fix=fix)
    ordered = ["".join(SPELLED[each] for each in token) for token in tokens]
    merges = list[tuple[int, int]]()
    for token in tokens:
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges += sorted((tokens[left], tokens[right]) for left, right in halves if left in tokens and right in tokens)
    special = SPECIAL[later]
    facts: dict[str, Any] = {
        "model": "gpt2", "pre": "llama-bpe", "tokens": [*ordered, *special],
        "token_type": [NORMAL] * len(ordered) + [CONTROL] * len(special),
        "merges": [f"{ordered[left]} {ordered[right]}" for left, right in merges],
        "bos_token_id": len(ordered), "eos_token_id": len(ordered) + 1, "add_bos_token": True,
    }  # fmt: skip
    if later:
        facts["padding_token_id"] = len(ordered) + special.index("<|finetune_right_pad_id|>")
    return tokenizer_of({f"tokenizer.ggml.{key}": each for key, each in facts.items()}, path)


def _listings(child: Child, answer: Message | Silence, files: Sequence[Path]) -> tuple[list[Listing], bool]:
    """The tensors of each file, within what a file of its size can hold. Raises UserError."""
    if isinstance(answer, str) or "error" in answer:
        where = files[0 if isinstance(answer, str) else answer["file"]]
        reason = child.ending() if answer == "ended" else "no answer" if isinstance(answer, str) else answer["error"]
        if "GLOBAL" in reason or "Unsupported global" in reason:
            reason = "it calls a function that makes no tensor, as a pickle that runs code does"
        elif "alloc" in reason:
            reason = "it claims more memory than a file of its size needs"
        elif "Unpickl" in reason:
            reason = "it is damaged, or was not written by torch.save"
        reason = reason.partition("\n")[0][:200]
        raise UserError(f"the pickle was not opened: {reason}", where=str(where), fix=AGAIN)
    listings = []
    for path, listing in zip(files, answer["tensors"], strict=True):
        found = {name: (str(kind), tuple(map(int, shape))) for name, (kind, shape) in listing.items() if kind in KINDS}
        claimed = sum(getattr(torch, kind).itemsize * math.prod(shape) for kind, shape in found.values())
        if claimed > path.stat().st_size:
            problem = f"its tensors claim {claimed:,} bytes, more than the file has"
            raise UserError(problem, where=str(path), fix=AGAIN)
        listings.append(found)
    return listings, bool(answer["locked"])


def _config(
    params: Mapping[str, Any], listings: Sequence[Listing], folder: Path, bos: int | None, eos: int | None
) -> ModelConfig:
    """From params.json and what it leaves to the weights. Raises UserError."""
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if any(len(listing.get(name, ("", ()))[1]) != 2 for listing in listings):
            raise UserError(f"{name} is missing: this is no Llama", where=str(folder), fix=AGAIN)
    rows, columns = listings[0]["tok_embeddings.weight"][1]
    vocab = rows * len(listings) if columns == params.get("dim") else rows  # split by tokens since Llama 3
    scaled = params.get("use_scaled_rope") is True
    theta = params.get("rope_theta", 10000.0)
    earlier = 2048 if params.get("norm_eps") == 1e-6 else 4096  # Llama 1; 2
    code = 16384 if theta == 1000000.0 else earlier  # Code Llama, arXiv:2308.12950
    context = 131072 if scaled else 8192 if theta == 500000.0 else code
    raw = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": params.get("dim"),
        "intermediate_size": listings[0]["layers.0.feed_forward.w1.weight"][1][0] * len(listings),
        "num_hidden_layers": params.get("n_layers"), "num_attention_heads": params.get("n_heads"),
        "num_key_value_heads": params.get("n_kv_heads", params.get("n_heads")), "rms_norm_eps": params.get("norm_eps"),
        "max_position_embeddings": params.get("max_seq_len", context), "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in listings[0], "bos_token_id": bos, "eos_token_id": eos,
    }  # fmt: skip
    if scaled:  # the models of 1B and 3B are stretched by 32
        small = isinstance(params.get("dim"), int) and params["dim"] < 4096
        raw["rope_scaling"] = {
            "rope_type": "llama3", "factor": 32.0 if small else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    return config_from_hf(raw, where=str(folder / PARAMS))


def _joined(name: str, shape: Shape, listings: Sequence[Listing], folder: Path) -> tuple[str, int | None]:
    """The stored name of a parameter and the axis along which the files split it; None: each holds it whole.

    Raises UserError unless the pieces make the shape.
    """
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    stored = f"layers.{match[1]}.{NAMES[match[2]]}.weight" if match else f"{NAMES[name.removesuffix('.weight')]}.weight"
    pieces = [listing.get(stored, ("", ()))[1] for listing in listings]
    axis = None if len(shape) == 1 else int(any(part in stored for part in BY_COLUMNS))
    if stored == "tok_embeddings.weight" and pieces[0][1:] != shape[1:]:
        axis = 1  # before Llama 3
    expected = list(shape)
    if axis is not None:
        expected[axis] //= len(listings)
    if any(piece != tuple(expected) for piece in pieces):
        problem = f"{stored} is {', '.join(str(list(each)) for each in pieces)[:80]}; {PARAMS} makes it {expected}"
        raise UserError(problem, where=str(folder), fix=AGAIN)
    return stored, axis


def _tensor(child: Child, number: int, name: str, spec: tuple[str, Shape], files: Sequence[Path]) -> Tensor:
    answer = child.ask({"file": number, "name": name}, seconds=SECONDS)
    kind, shape = spec
    dtype: torch.dtype = getattr(torch, kind)
    if isinstance(answer, str) or len(answer.get("content", b"")) != dtype.itemsize * math.prod(shape):
        reason = child.ending() if answer == "ended" else "no answer"
        raise UserError(f"{name} was not read: {reason}", where=str(files[number]), fix=AGAIN)
    return torch.frombuffer(bytearray(answer["content"]), dtype=dtype).view(shape)
