"""Folders with 4-bit or 8-bit weights in the format of compressed-tensors, which transformers and vLLM open.

"pack-quantized": whole numbers of 4 or 8 bits, eight or four in an int32, and one scale for each group of weights of a
row. The linear maps inside the layers are quantized; embeddings, norms, biases and the head keep their dtype. Weights
are rounded to the nearest level, without calibration data.
"""

from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.export.layouts import (
    Exported,
    Piece,
    draft_of,
    exported,
    load_whole,
    opens_elsewhere,
    pieces_of,
    probe_tokens,
    write_rest,
)
from bloomery.export.verify import TEXTS
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.families import config_to_hf
from bloomery.model.io.safetensors import Spec, TensorReader
from bloomery.model.io.stored import STORAGE, find_tensors, places
from bloomery.model.io.weights import give_memory, stored_pieces, write_json, write_stored
from bloomery.model.presets import read_config
from bloomery.train.model_folder import ModelFiles
from bloomery.train.use import Use

BITS = {"int4": 4, "int8": 8}
MOST_TOKENS = 256  # of the text that the original and the quantized model are compared on
# Weights that share a scale: sizes that kernels of vLLM read. Small groups matter for 4 bits.
GROUPS = {"int4": (32,), "int8": (128, 64, 32)}
# Shares of the largest weight of a group that its scale is tried for: clipping it costs less than coarse levels do.
CLIPS = torch.linspace(1.0, 0.7, 13)


def group_size(config: ModelConfig, stored: Mapping[str, tuple[int, ...]], kind: str) -> int:
    """The first of GROUPS that divides the rows of every quantized matrix. Raises UserError where none does."""
    fix = "use --to gguf, or --type bfloat16"
    if config.transformers_backend is not None or (
        config.family in STORAGE and STORAGE[config.family].transposed
    ):
        problem = f"{config.family} models store no linear layers that compressed-tensors reads"
        raise UserError(problem, where="--type", fix=fix, code=2)
    for size in GROUPS[kind]:
        if all(stored[name][1] % size == 0 for name in matrices(stored)):
            return size
    narrowest = min(stored[name][1] for name in matrices(stored))
    problem = f"rows of {narrowest:,} weights have no groups of {GROUPS[kind][-1]}"
    raise UserError(problem, where="--type", fix=fix, code=2)


def matrices(stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The stored names of what is quantized."""
    return [name for name, shape in stored.items() if ".layers." in name and len(shape) == 2]


def quantize(weight_OI: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Levels (int8 [O, I], from -2^(bits-1)) and scales [O, I / group] in `dtype`: weight = level * scale.

    Of thirteen scales the one with the least squared error is taken, for each group.
    """
    low = -(2 ** (bits - 1))
    high = 2 ** (bits - 1) - 1
    groups = weight_OI.float().reshape(len(weight_OI), -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    best_error = torch.full_like(largest, torch.inf)
    best_scale = torch.zeros_like(largest)
    for clip in CLIPS.tolist() if bits < 8 else (1.0,):
        scale = (
            (largest * (clip / (high + 0.5))).to(dtype).float().clamp_min(torch.finfo(dtype).tiny)
        )
        error = (
            ((groups / scale).round().clamp(low, high) * scale - groups)
            .square()
            .sum(-1, keepdim=True)
        )
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    levels = (groups / best_scale).round().clamp(low, high).to(torch.int8)
    return levels.reshape(weight_OI.shape), best_scale[..., 0].to(dtype)


def pack(levels_OI: Tensor, bits: int) -> Tensor:
    """int32 [O, I * bits / 32]: levels from 0, the first one in the lowest bits (little-endian)."""
    unsigned: Tensor = (levels_OI.int() + 2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, 0::2] | unsigned[:, 1::2] << 4
    return unsigned.contiguous().view(torch.int32)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undoes `pack`, by shifts of the int32 numbers: int8 [O, I]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    parts: Tensor = ((packed.long() & 0xFFFFFFFF)[..., None] >> shifts & (2**bits - 1)) - 2 ** (
        bits - 1
    )
    return parts.flatten(1).to(torch.int8)


def write_quantized(
    piece: Piece, config: ModelConfig, kind: str, dtype: torch.dtype, folder: Path
) -> str:
    """config.json and safetensors of the quantized model, one matrix at a time; returns a line about them.

    `piece`: a parameter by our name. `dtype`: of scales and of tensors that are not quantized. Raises UserError.
    """
    bits = BITS[kind]
    (shapes, whole) = stored_pieces(piece, config)
    group = group_size(config, shapes, kind)
    chosen = set(matrices(shapes))
    specs: dict[str, Spec] = {}
    for name, shape in shapes.items():
        if name not in chosen:
            specs[name] = shape, dtype
            continue
        rows, columns = shape
        specs[f"{name}_packed"] = (rows, columns * bits // 32), torch.int32
        specs[f"{name}_scale"] = (rows, columns // group), dtype
        specs[f"{name}_shape"] = (2,), torch.int64
    last: dict[str, Tensor] = {}

    def produce(name: str) -> Tensor:
        if name in shapes:
            return whole(name).to(dtype)
        weight, _, part = name.rpartition("_")
        if part == "packed":  # the first of the three that is written
            last.clear()
            levels, scales = quantize(whole(weight), bits, group, dtype)
            last.update(packed=pack(levels, bits), scale=scales, shape=torch.tensor(shapes[weight]))
        return last[part]

    write_stored(specs, produce, folder)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
    }
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }
    kept = str(dtype).removeprefix("torch.")
    about = {"dtype": kept, "torch_dtype": kept, "quantization_config": stated}
    write_json(folder / "config.json", config_to_hf(config) | about)
    size = bits + 8 * dtype.itemsize / group
    return f"{len(chosen)} matrices as {kind} in groups of {group}, {size:.2f} bits per weight"


@torch.no_grad()
def read_quantized(folder: Path, kind: str) -> Decoder:
    """The decoder of a quantized folder, dequantized to float32."""
    config = read_config(folder)
    tensors = find_tensors(folder)
    bits = BITS[kind]
    with torch.device("meta"):
        decoder = Decoder(config)
    give_memory(decoder, "cpu")
    with TensorReader() as reader:

        def read(name: str) -> Tensor:
            return reader.read(tensors[name], 0, tensors[name].shape[0]).detach()

        for name, place in places(config).items():
            if f"{place.name}_packed" in tensors:
                levels = unpack(read(f"{place.name}_packed"), bits)
                scales = read(f"{place.name}_scale").float()
                whole = levels.float() * scales.repeat_interleave(
                    levels.shape[1] // scales.shape[1], 1
                )
            else:
                whole = read(place.name)
            decoder.get_parameter(name).copy_(whole[place.first : place.first + place.rows])
    return decoder.eval()


def export_quantized(
    files: ModelFiles, out: Path, *, kind: str, verify: bool = True, use: Use | None = None
) -> Exported:
    """Writes the new folder `out`, completely or not at all, with the weights as `kind` (int4, int8); adapters merged.

    Verification reads the folder back, measures the divergence from the original over a text, and compares logits with
    transformers where that and compressed-tensors are installed. Raises UserError.
    """
    dtype = next(iter(find_tensors(files.base or files.weights).values())).dtype
    with draft_of(out) as draft, pieces_of(files) as (piece, config):
        proofs = [write_quantized(piece, config, kind, dtype, draft)]
        write_rest(draft, out.name, config, files)
        if verify:
            proofs += _checked(draft, files, kind, use or Use("cpu"))
    return exported(out, proofs)


@torch.no_grad()
def _checked(draft: Path, files: ModelFiles, kind: str, use: Use) -> list[str]:
    """KL divergence and equal best tokens over a text, then the logits in transformers."""
    original = load_whole(files.weights, use, base=files.base)
    config = original.config
    device = original.model.embed_tokens.weight.device
    ids = load_tokenizer(files.tokenizer).encode(" ".join(TEXTS))[
        : min(MOST_TOKENS, config.max_positions)
    ]
    tokens = torch.tensor([ids])
    first = original(tokens.to(device))[0].double().log_softmax(-1).cpu()
    del original  # one model at a time is in memory
    quantized = read_quantized(draft, kind)
    second = quantized(tokens)[0].double().log_softmax(-1)
    if not bool(first.isfinite().all() and second.isfinite().all()):
        fix = "choose an earlier --step"
        raise UserError(
            "the logits of the exported model are not finite", where=str(files.weights), fix=fix
        )
    kl = float((first.exp() * (first - second)).sum(-1).mean())
    top = first.argmax(-1) == second.argmax(-1)
    proofs = [
        f"KL divergence {kl:.1e} nats per token over {len(ids)} tokens, best token equal at {top.double().mean():.1%}"
    ]
    if find_spec("compressed_tensors") is None:
        return [*proofs, "not opened in transformers: compressed-tensors is not installed"]
    with redirect_stderr(StringIO()):  # the library shows its progress
        return [*proofs, *opens_elsewhere(draft, quantized(probe_tokens(config)), config)]
