"""Quantized checkpoints: which tensors of a folder are one matrix, by the rule of its format. No torch.

A matrix that lies in several tensors (codes, scales, zero points) becomes one StoredTensor with a Packing; `unpacking`
turns it into numbers. Only headers are read here, and two small tensors of some formats that state a shape.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes

if TYPE_CHECKING:
    from bloomery.model.io.stored import StoredTensor

Tensors = dict[str, "StoredTensor"]
ORIGINAL = "use the unquantized model, which its model card names"
FLOAT8 = ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
# Of one number, by the dtypes that safetensors names.
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2} | (
    dict.fromkeys((*FLOAT8, "F8_E8M0", "I8", "U8", "BOOL"), 1)
)
INT8_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it
QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")
# What other programs store and is read nowhere but there, by `quant_method`; with the way out.
UNREAD = {
    "aqlm": "codebooks of AQLM",
    "bitnet": "ternary weights of BitNet",
    "eetq": "weights of EETQ",
    "exl2": "weights of ExLlamaV2",
    "exl3": "weights of ExLlamaV3",
    "fouroversix": "weights of Four Over Six",
    "fp_quant": "rotated weights of FP-Quant",
    "higgs": "weights of HIGGS",
    "hqq": "weights of HQQ",
    "mxfp8": "MXFP8",
    "quanto": "weights of Quanto",
    "quark": "weights of AMD Quark",
    "quip": "codebooks of QuIP#",
    "sinq": "weights of SINQ",
    "spqr": "weights of SpQR",
    "torchao": "weights of torchao",
    "vptq": "codebooks of VPTQ",
}
# Scales of activations and of the cache of keys and values, which a server uses and training does not.
OF_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    "_activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)


@dataclass(frozen=True)
class Packing:
    """How a matrix [O, I] lies in its file: value = (code - zero) * scale, with the format's own codes and grids.

    `codes`: "float8", "int8", "fp4" (two in a byte, the first below), "bits" (whole numbers of `bits` in words of 32)
    and "stream" (the same, over the border of words) lie in rows of the matrix; "gptq" and "awq" in columns; "flat" is
    bitsandbytes' 4 bits; "experts" gpt-oss' MXFP4.
    `block`: rows and columns that share a scale. `less`: what is subtracted from a code. `plus`: what is added to a
    stored zero point. `factor`: of all values. `offset`: of nested scales.
    """

    label: str
    codes: str
    parts: tuple[tuple[str, "StoredTensor"], ...]
    bits: int = 8
    block: tuple[int, int] = (1, 1)
    less: int = 0
    plus: int = 0
    factor: float = 1.0
    offset: float = 0.0

    @property
    def by_role(self) -> dict[str, "StoredTensor"]:
        return dict(self.parts)


def quantization_of(config_json: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of quantization that a config.json states, with their method; None without any."""
    for part in (config_json, config_json.get("text_config"), config_json.get("llm_config")):
        if not isinstance(part, dict):
            continue
        settings = part.get("quantization_config", part.get("compression_config"))
        if isinstance(settings, dict) and settings.get("quant_method"):
            return settings
        if isinstance(settings, dict) and (
            settings.get("load_in_4bit") or settings.get("load_in_8bit")
        ):
            return settings | {"quant_method": "bitsandbytes"}
        # mlx-lm writes the same settings under two names, and no method.
        affine = part.get("quantization")
        if isinstance(affine, dict) and "group_size" in affine:
            return affine | {"quant_method": "mlx"}
        if isinstance(settings, dict):
            return settings | {"quant_method": "unnamed"}
    return None


def joined(tensors: Tensors, config_json: Mapping[str, Any], folder: Path) -> Tensors:
    """The tensors of a folder, those of a quantized matrix as one. Raises UserError for formats that are not read.

    A folder whose weights are plain keeps them, whatever its config.json says of quantization.
    """
    settings = quantization_of(config_json)
    if settings is None:
        return tensors
    method = str(settings["quant_method"]).lower().replace("_", "-")
    where = str(folder / "config.json")
    if (label := UNREAD.get(str(settings["quant_method"]).lower())) is not None:
        raise UserError(f"{label} are not read", where=where, fix=ORIGINAL)
    join = JOIN.get(method)
    if join is None and not any(is_code(tensor) for tensor in tensors.values()):
        return tensors
    if join is None:
        problem = f"weights that are quantized by {method[:40]!r} are not read"
        raise UserError(problem, where=where, fix=f"{ORIGINAL}; read are {', '.join(JOIN)}")
    kind = _kind_of_numbers(config_json)
    return join(_Format(dict(tensors), settings, kind, where))


def refuse_unsaid(name: str, tensors: Mapping[str, "StoredTensor"], *, where: str) -> None:
    """Raises UserError where a matrix of that name is missing, and parts of a quantized one are there."""
    parts = (f"{name}_packed", f"{name.removesuffix('weight')}qweight", f"{name}_blocks")
    part = next((part for part in parts if part in tensors), None)
    if part is not None:
        raise UserError(
            f"the weights are quantized ({part[:100]}), and config.json does not say how",
            where=where,
            fix="take the config.json of that model, with its quantization_config",
        )


def is_code(tensor: "StoredTensor") -> bool:
    """Whether it is a matrix of codes, and not of numbers or of a buffer's truth values."""
    return len(tensor.shape) > 1 and tensor.kind not in ("F64", "F32", "F16", "BF16", "BOOL")


def _kind_of_numbers(config_json: Mapping[str, Any]) -> str:
    """The dtype that the model computes in, as safetensors calls it: a copy without quantization is stored so."""
    text = config_json.get("text_config")
    parts = [config_json, text if isinstance(text, dict) else {}]
    names = [part.get("dtype") or part.get("torch_dtype") for part in parts]
    kinds = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}
    return next((kinds[name] for name in names if name in kinds), "BF16")


@dataclass(frozen=True)
class _Format:
    """What the rules share: `tensors` by name, of which each rule takes those that it joins."""

    tensors: Tensors
    settings: Mapping[str, Any]
    kind: str
    where: str

    def refuse(self, problem: str, fix: str = ORIGINAL) -> UserError:
        return UserError(problem, where=self.where, fix=fix)

    def size(self, key: str, default: int) -> int:
        value = self.settings.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**24:
            raise self.refuse(
                f"{key} of the quantization is {str(value)[:40]!r}, which is no size",
                "download the model again",
            )
        return value

    def take(self, name: str) -> "StoredTensor":
        """Raises UserError when the tensor is missing."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise self.refuse(f"{name[:120]} is missing", "download the model again")
        return tensor

    def check(self, name: str, tensor: "StoredTensor", *shapes: tuple[int, ...]) -> None:
        """Raises UserError where the tensor has none of these shapes."""
        if tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.refuse(
                f"{name[:120]} is {list(tensor.shape)}, and its codes make it {wanted}",
                "download the model again",
            )

    def put(self, name: str, codes: "StoredTensor", shape: tuple[int, ...], how: Packing) -> None:
        """Raises UserError where the matrix is there as numbers, too."""
        if self.tensors.get(name, codes) is not codes:
            raise self.refuse(f"{name[:120]} is there twice, once quantized", "save it again")
        self.tensors[name] = replace(codes, kind=self.kind, shape=shape, packing=how)

    def without_activations(self) -> Tensors:
        for name in list(self.tensors):
            if name.endswith(OF_ACTIVATIONS):
                del self.tensors[name]
        return self.tensors

    def block(self, name: str, scale: "StoredTensor", shape: tuple[int, ...]) -> tuple[int, int]:
        """How many rows and columns share a scale: from its shape, and the settings where they do not divide."""
        rows, columns = shape
        if math.prod(scale.shape) == 1:
            return rows, columns
        if scale.shape in ((rows,), (rows, 1)):
            return 1, columns
        stated = self.settings.get("weight_block_size") or self.stated_block()
        if stated and len(scale.shape) == 2:
            high, wide = stated
            self.check(name, scale, (-(-rows // high), -(-columns // wide)))
            return int(high), int(wide)
        if len(scale.shape) != 2 or rows % scale.shape[0] or columns % scale.shape[1]:
            raise self.refuse(
                f"{name[:120]} is {list(scale.shape)}, which does not divide {list(shape)}",
                "download the model again",
            )
        return rows // scale.shape[0], columns // scale.shape[1]

    def stated_block(self) -> tuple[int, int] | None:
        """compressed-tensors' blocks, where all groups have one."""
        groups = self.settings.get("config_groups")
        if not isinstance(groups, dict):
            return None
        blocks = {
            tuple(weights["block_structure"])
            for group in groups.values()
            if isinstance(group, dict)
            and isinstance(weights := group.get("weights"), dict)
            and isinstance(weights.get("block_structure"), list)
            and len(weights["block_structure"]) == 2
        }
        return blocks.pop() if len(blocks) == 1 else None


def _float8(form: _Format) -> Tensors:
    """DeepSeek's and transformers' FP8, fbgemm's and the naive formats: codes of 8 bits and their scales."""
    stated = str(form.settings.get("fmt") or form.settings.get("dtype") or "").lower()
    for name in sorted(form.tensors):
        codes = form.tensors.get(name)
        if codes is None or codes.kind not in (*FLOAT8, "I8") or len(codes.shape) != 2:
            continue
        scale_name = next((f"{name}{end}" for end in SCALES if f"{name}{end}" in form.tensors), "")
        if not scale_name:
            raise form.refuse(f"{name[:120]} is stored as {codes.kind} without a scale")
        # FNUZ bytes of MI300 and OCP bytes of all others are other numbers: the header says which these are.
        if (
            codes.kind in FLOAT8
            and stated.endswith("fnuz") != codes.kind.endswith("FNUZ")
            and stated
        ):
            problem = f"{name[:100]} is stored as {codes.kind}, and config.json says {stated[:20]}"
            raise form.refuse(problem)
        scale = form.take(scale_name)
        block = form.block(scale_name, scale, codes.shape)
        parts = [("codes", codes), ("scales", scale)]
        zeros = form.tensors.pop(f"{name}_zero_point", None)
        if zeros is not None:
            form.check(f"{name}_zero_point", zeros, scale.shape)
            parts.append(("zeros", zeros))
        is_whole = codes.kind == "I8"
        label = f"{'int8' if is_whole else FLOAT8_LABELS[codes.kind]}, {_grid(block, codes.shape)}"
        how = Packing(label, "int8" if is_whole else "float8", tuple(parts), block=block)
        form.tensors.pop(f"{name}_shape", None)
        form.put(name, codes, codes.shape, how)
    return form.without_activations()


SCALES = ("_scale_inv", "_scale")  # both are multiplied
FLOAT8_LABELS = {
    "F8_E4M3": "FP8 (e4m3)",
    "F8_E4M3FNUZ": "FP8 (e4m3 FNUZ)",
    "F8_E5M2": "FP8 (e5m2)",
    "F8_E5M2FNUZ": "FP8 (e5m2 FNUZ)",
}


def _grid(block: tuple[int, int], shape: tuple[int, ...]) -> str:
    rows, columns = block
    if rows >= shape[0] and columns >= shape[1]:
        return "a scale per tensor"
    if rows == 1 and columns >= shape[1]:
        return "a scale per row"
    return f"a scale per {rows} x {columns}" if rows > 1 else f"a scale per {columns}"


def _mxfp4(form: _Format) -> Tensors:
    """gpt-oss' experts: blocks [E, O, I / 32, 16] and exponents [E, O, I / 32]; the model keeps them as [E, I, O]."""
    for name in sorted(form.tensors):
        if not name.endswith("_blocks"):
            continue
        codes = form.take(name)
        stem = name.removesuffix("_blocks")
        scales = form.take(f"{stem}_scales")
        if len(codes.shape) != 4 or codes.shape[-1] != 16 or codes.kind != "U8":
            raise form.refuse(f"{name[:120]} is {list(codes.shape)}, no blocks of 16 bytes")
        form.check(f"{stem}_scales", scales, codes.shape[:-1])
        experts, outputs, groups, _ = codes.shape
        how = Packing("MXFP4, a scale per 32", "experts", (("codes", codes), ("scales", scales)))
        form.put(stem, codes, (experts, 32 * groups, outputs), how)
    return form.tensors


def _compressed(form: _Format) -> Tensors:
    """compressed-tensors: pack-quantized, nvfp4-pack-quantized, and the formats whose codes are 8 bits each."""
    for key, least in (("sparsity_config", "dense"), ("transform_config", "")):
        part = form.settings.get(key)
        if isinstance(part, dict) and part and (not least or part.get("format", least) != least):
            raise form.refuse(f"weights of compressed-tensors with a {key} are not read")
    bits = {
        weights.get("num_bits")
        for group in _mappings(form.settings.get("config_groups"))
        if isinstance(weights := group.get("weights"), dict)
    }
    for name in sorted(form.tensors):
        if not name.endswith("_packed"):
            continue
        stem = name.removesuffix("_packed")
        codes = form.take(name)
        scales = form.take(f"{stem}_scale")
        parts = [("codes", codes), ("scales", scales)]
        if codes.kind == "U8":
            _put_fp4(form, stem, parts)
            continue
        shape = _whole_numbers(form.take(f"{stem}_shape"))
        if codes.kind != "I32" or len(shape) != 2 or len(codes.shape) != 2 or min(shape) < 1:
            raise form.refuse(f"{name[:120]} is no matrix of packed words")
        # Codes fill words of 32 bits from below. Those of 3, 5, 6 or 7 bits run on over the border of words in
        # newer versions, and left the last bits of a word empty before: the number of words says which.
        fitting = [
            (number, layout)
            for number in bits
            if isinstance(number, int) and 1 < number <= 8
            for layout, words in (
                ("stream", -(-shape[1] * number // 32)),
                ("bits", -(-shape[1] // (32 // number))),
            )
            if codes.shape == (shape[0], words)
        ]
        if len({number for number, _ in fitting}) != 1:
            raise form.refuse(
                f"{name[:120]} is {list(codes.shape)}, which is {list(shape)} in none of {sorted(map(str, bits))} bits"
            )
        number, layout = fitting[0]
        groups = 1 if len(scales.shape) < 2 else scales.shape[1]
        zeros = form.tensors.pop(f"{stem}_zero_point", None)
        if zeros is not None:
            dense_words = -(-shape[0] * number // 32)
            num_words = dense_words if layout == "stream" else -(-shape[0] // (32 // number))
            packed_rows = (num_words, groups)
            form.check(f"{stem}_zero_point", zeros, packed_rows, scales.shape)
            packed = zeros.kind == "I32" and zeros.shape == packed_rows
            parts.append(("packed zeros" if packed else "zeros", zeros))
        if (order := form.tensors.pop(f"{stem}_g_idx", None)) is not None:
            form.check(f"{stem}_g_idx", order, (shape[1],))
            parts.append(("order", order))
        block = form.block(f"{stem}_scale", scales, shape)
        label = f"int{number} (compressed-tensors), {_grid(block, shape)}"
        how = Packing(label, layout, tuple(parts), bits=number, block=block, less=2 ** (number - 1))
        form.put(stem, codes, shape, how)
    return _float8(form)


def _put_fp4(form: _Format, stem: str, parts: list[tuple[str, "StoredTensor"]]) -> None:
    """NVFP4 as compressed-tensors has it: the scales of 16 are divided by a scale of the tensor."""
    (_, codes), (_, scales) = parts
    shape = (codes.shape[0], 2 * codes.shape[1])
    block = form.block(f"{stem}_scale", scales, shape)
    if f"{stem}_global_scale" in form.tensors:
        parts.append(("divisor", form.take(f"{stem}_global_scale")))
    label = f"{'NVFP4' if len(parts) > 2 else 'MXFP4'}, {_grid(block, shape)}"
    form.put(stem, codes, shape, Packing(label, "fp4", tuple(parts), bits=4, block=block))


def _modelopt(form: _Format) -> Tensors:
    """NVIDIA Model Optimizer: FP8 with a scale per tensor, or NVFP4, whose scales of 16 have a second one."""
    for name in sorted(form.tensors):
        if not name.endswith("weight_scale_2"):
            continue
        stem = name.removesuffix("_scale_2")
        codes = form.take(stem)
        if codes.kind != "U8" or len(codes.shape) != 2:
            raise form.refuse(f"{stem[:120]} is stored as {codes.kind}, and NVFP4 is U8")
        scales = form.take(f"{stem}_scale")
        shape = (codes.shape[0], 2 * codes.shape[1])
        block = form.block(f"{stem}_scale", scales, shape)
        parts = (("codes", codes), ("scales", scales), ("multiplier", form.take(name)))
        label = f"NVFP4, {_grid(block, shape)}"
        form.put(stem, codes, shape, Packing(label, "fp4", parts, bits=4, block=block))
    return _float8(form)


def _gptq(form: _Format) -> Tensors:
    """GPTQ: codes of a column lie in words of 32 bits, from the first input on; `g_idx` is each input's group.

    Version 1 stores a zero point less one (AutoGPTQ's `pack`).
    """
    bits = form.size("bits", 4)
    if bits not in (2, 3, 4, 8):
        raise form.refuse(f"GPTQ with {bits} bits is not read")
    if form.settings.get("is_marlin_format") or form.settings.get("dynamic"):
        raise form.refuse("GPTQ in Marlin's layout, or with other settings per module, is not read")
    stated = str(form.settings.get("checkpoint_format") or "gptq").lower()
    if stated not in ("gptq", "gptq_v2"):
        raise form.refuse(f"GPTQ stored as {stated[:40]!r} is not read")
    group = form.size("group_size", 128)
    for name in sorted(form.tensors):
        if not name.endswith(".qweight"):
            continue
        stem = name.removesuffix(".qweight")
        codes = form.take(name)
        if codes.kind != "I32" or len(codes.shape) != 2 or 32 * codes.shape[0] % bits:
            raise form.refuse(f"{name[:120]} holds no words of {bits} bits")
        inputs, outputs = 32 * codes.shape[0] // bits, codes.shape[1]
        groups = 1 if group == -1 else -(-inputs // group)
        parts = [("codes", codes), ("scales", form.take(f"{stem}.scales"))]
        parts.append(("zeros", form.take(f"{stem}.qzeros")))
        form.check(f"{stem}.scales", parts[1][1], (groups, outputs))
        form.check(f"{stem}.qzeros", parts[2][1], (groups, -(-outputs * bits // 32)))
        if (order := form.tensors.pop(f"{stem}.g_idx", None)) is not None:
            form.check(f"{stem}.g_idx", order, (inputs,))
            parts.append(("order", order))
        how = Packing(
            f"GPTQ, {bits} bits, {_grid((1, group if group > 0 else inputs), (2, inputs))}",
            "gptq",
            tuple(parts),
            bits=bits,
            block=(1, group if group > 0 else inputs),
            plus=0 if stated == "gptq_v2" else 1,
        )
        form.put(f"{stem}.weight", codes, (outputs, inputs), how)
    return form.tensors


def _awq(form: _Format) -> Tensors:
    """AWQ: eight columns in a word, in the order of its kernel (AutoAWQ's `WQLinear_GEMM`)."""
    version = str(form.settings.get("version") or "gemm").lower()
    bits = form.size("bits", form.size("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise form.refuse(
            f"AWQ of version {version[:20]} with {bits} bits is not read: gemm with 4 is"
        )
    group = form.size("group_size", form.size("q_group_size", 128))
    for name in sorted(form.tensors):
        if not name.endswith(".qweight"):
            continue
        stem = name.removesuffix(".qweight")
        codes = form.take(name)
        if codes.kind != "I32" or len(codes.shape) != 2:
            raise form.refuse(f"{name[:120]} holds no words")
        inputs, outputs = codes.shape[0], 8 * codes.shape[1]
        groups = 1 if group == -1 else -(-inputs // group)
        scales = form.take(f"{stem}.scales")
        zeros = form.take(f"{stem}.qzeros")
        form.check(f"{stem}.scales", scales, (groups, outputs))
        form.check(f"{stem}.qzeros", zeros, (groups, codes.shape[1]))
        block = (1, group if group > 0 else inputs)
        parts = (("codes", codes), ("scales", scales), ("zeros", zeros))
        label = f"AWQ, 4 bits, {_grid(block, (2, inputs))}"
        how = Packing(label, "awq", parts, bits=4, block=block)
        form.put(f"{stem}.weight", codes, (outputs, inputs), how)
    return form.tensors


def _bitsandbytes(form: _Format) -> Tensors:
    """bitsandbytes: 4 bits with a `quant_state`, or 8 bits with a scale per row (`SCB`)."""
    for name in sorted(form.tensors):
        stem, found, kind = name.partition(".quant_state.bitsandbytes__")
        if found:
            _put_4bit(form, stem, kind, _bytes_of(form.take(name)))
        elif name.endswith(".SCB"):
            stem = name.removesuffix(".SCB") + ".weight"
            codes, scales = form.take(stem), form.take(name)
            if codes.kind != "I8" or len(codes.shape) != 2:
                raise form.refuse(f"{stem[:120]} is stored as {codes.kind}, and 8 bits are I8")
            form.check(name, scales, (codes.shape[0],))
            # A layout of an old kernel, "row" in all that were saved since 2023.
            layout = form.tensors.pop(f"{stem}_format", None)
            if layout is not None and any(_bytes_of(layout)):
                raise form.refuse(f"{stem[:120]} is in a layout of a kernel, not in rows")
            parts = (("codes", codes), ("scales", scales))
            how = Packing(
                "int8 (bitsandbytes), a scale per row",
                "int8",
                parts,
                block=(1, codes.shape[1]),
                factor=INT8_STEP,
            )
            form.put(stem, codes, codes.shape, how)
    for name in form.tensors:
        if name.endswith(".absmax"):
            raise form.refuse(f"{name[:120]} has no quant_state", "download the model again")
    return form.tensors


def _put_4bit(form: _Format, stem: str, kind: str, content: bytes) -> None:
    again = "download the model again"
    try:
        state = json.loads(content)
        shape = tuple(int(size) for size in state["shape"])
        block = int(state["blocksize"])
        nested = int(state.get("nested_blocksize", 0))
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError) as error:
        raise form.refuse(f"the quant_state of {stem[:120]} cannot be read", again) from error
    codes = form.take(stem)
    count = math.prod(shape)
    if len(shape) != 2 or min(shape) < 1 or block < 1 or kind not in ("nf4", "fp4"):
        raise form.refuse(f"the quant_state of {stem[:120]} is of no {kind[:10]} matrix", again)
    # The codes are bytes in whatever dtype `bnb_4bit_quant_storage` put them.
    size = math.prod(codes.shape) * BYTES[codes.kind]
    if size != -(-count // 2):
        raise form.refuse(f"{stem[:120]} has {size:,} bytes for {count:,} weights", again)
    scales = form.take(f"{stem}.absmax")
    levels = form.take(f"{stem}.quant_map")
    form.check(f"{stem}.absmax", scales, (-(-count // block),))
    form.check(f"{stem}.quant_map", levels, (16,))
    parts = [("codes", replace(codes, kind="U8", shape=(size,)))]
    parts += [("scales", scales), ("levels", levels)]
    if scales.kind == "U8":
        parts.append(("outer", form.take(f"{stem}.nested_absmax")))
        parts.append(("outer levels", form.take(f"{stem}.nested_quant_map")))
        if nested < 1:
            raise form.refuse(f"the quant_state of {stem[:120]} lacks its nested_blocksize", again)
        form.check(f"{stem}.nested_absmax", parts[-2][1], (-(-scales.shape[0] // nested),))
        form.check(f"{stem}.nested_quant_map", parts[-1][1], (256,))
    label = f"{kind} (bitsandbytes), a scale per {block}" + (", nested" if len(parts) > 3 else "")
    how = Packing(label, "flat", tuple(parts), bits=4, block=(block, nested), offset=offset)
    form.put(stem, codes, shape, how)


def _mlx(form: _Format) -> Tensors:
    """mlx-lm's affine quantization: value = code * scale + bias, codes in words of 32 bits along a row."""
    if str(form.settings.get("mode") or "affine") != "affine":
        raise form.refuse(f"MLX's mode {str(form.settings['mode'])[:20]!r} is not read")
    group = form.size("group_size", 64)
    for name in sorted(form.tensors):
        codes = form.tensors.get(name)
        if codes is None or codes.kind != "U32" or not name.endswith(".weight"):
            continue
        stem = name.removesuffix(".weight")
        scales, biases = form.take(f"{stem}.scales"), form.take(f"{stem}.biases")
        # A module may have bits of its own: the shapes say how many.
        inputs = scales.shape[-1] * group
        bits = 32 * codes.shape[-1] // inputs if len(codes.shape) == 2 and inputs > 0 else 0
        if bits not in (2, 3, 4, 5, 6, 8) or 32 * codes.shape[-1] != inputs * bits:
            raise form.refuse(f"{name[:120]} is {list(codes.shape)}, no groups of {group}")
        shape = (codes.shape[0], inputs)
        form.check(f"{stem}.scales", scales, (shape[0], inputs // group))
        form.check(f"{stem}.biases", biases, scales.shape)
        parts = (("codes", codes), ("scales", scales), ("biases", biases))
        label = f"int{bits} (MLX), a scale per {group}"
        how = Packing(label, "stream", parts, bits=bits, block=(1, group))
        form.put(name, codes, shape, how)
    return form.tensors


JOIN: dict[str, Callable[[_Format], Tensors]] = {
    "fp8": _float8,
    "fbgemm-fp8": _float8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mlx": _mlx,
}


def _mappings(groups: Any) -> list[dict[str, Any]]:
    values = groups.values() if isinstance(groups, dict) else []
    return [group for group in values if isinstance(group, dict)]


def _bytes_of(tensor: "StoredTensor") -> bytes:
    """The content of a small tensor. Raises UserError where it is not small."""
    size = math.prod(tensor.shape) * BYTES[tensor.kind]
    if size > 2**16:
        raise UserError(
            "a tensor that states a shape is larger than 64 KiB",
            where=str(tensor.path),
            fix="download the model again",
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(size)


def _whole_numbers(tensor: "StoredTensor") -> tuple[int, ...]:
    letter = {"I64": "q", "I32": "i"}.get(tensor.kind, "b")
    return struct.unpack(f"<{math.prod(tensor.shape)}{letter}", _bytes_of(tensor))


def packing_notes(tensors: Mapping[str, "StoredTensor"]) -> list[str]:
    """A line on each way in which matrices of the folder are packed, and how they are read."""
    matrices: dict[str, list[StoredTensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        if tensor.packing is not None:
            matrices.setdefault(tensor.packing.label, []).append(tensor)
    return [
        f"{len(group):,} of its matrices are stored as {label}: read by that format's rule, "
        f"{format_bytes(sum(map(stored_bytes, group)))} in the files"
        for label, group in sorted(matrices.items())
    ]


def is_read(config_json: Mapping[str, Any]) -> bool:
    """Whether weights of that config.json are read: those of a known method, or without any."""
    settings = quantization_of(config_json)
    return settings is None or str(settings["quant_method"]).lower().replace("_", "-") in JOIN


def stored_bytes(tensor: "StoredTensor") -> int:
    """Of the tensor in its files, with scales and zero points."""
    if tensor.packing is None:
        return math.prod(tensor.shape) * BYTES[tensor.kind]
    return sum(math.prod(part.shape) * BYTES[part.kind] for _, part in tensor.packing.parts)
