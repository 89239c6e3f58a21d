"""Tiny checkpoints in the formats of other quantizers, written from their published layouts, number by number.

Each writer packs integer codes that are drawn at random, and returns the value of each weight as its definition gives
it, in float64: value = (code - zero) * scale. Nothing here is shared with the code under test.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
GROUP = 16
Packed = tuple[
    dict[str, Tensor], Tensor
]  # tensors by what follows the module's name, values [O, I]
Pack = Callable[[int, int, torch.Generator], Packed]


def draw(high: int, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=random)


def drawn_scales(shape: tuple[int, ...], random: torch.Generator, dtype=torch.float32) -> Tensor:
    return (0.002 + 0.004 * torch.rand(shape, generator=random)).to(dtype)


def to_bytes(words: list[int]) -> list[int]:
    """Unsigned words of 32 bits as int32 has them."""
    return [word - 2**32 if word >= 2**31 else word for word in words]


def bit_stream(codes: list[int], bits: int) -> list[int]:
    """Codes as one long number from the lowest bit on, in words of 32 bits."""
    number = sum(code << (bits * index) for index, code in enumerate(codes))
    return to_bytes([number >> 32 * word & 0xFFFFFFFF for word in range(len(codes) * bits // 32)])


def pack_fp8(
    dtype: torch.dtype,
    block: tuple[int, int],
    name: str = "weight_scale_inv",
    scale_dtype=torch.float32,
) -> Pack:
    def pack(outputs: int, inputs: int, random: torch.Generator) -> Packed:
        codes = torch.randn(outputs, inputs, generator=random).to(dtype)
        high, wide = min(block[0], outputs), min(block[1], inputs)
        grid = drawn_scales((-(-outputs // high), -(-inputs // wide)), random, scale_dtype)
        values = codes.double().clone()
        for row in range(outputs):
            for column in range(inputs):
                values[row, column] *= float(grid[row // high, column // wide])
        if block[0] > 2**20:
            grid = grid.reshape(())
        return {"weight": codes, name: grid, "input_scale": torch.tensor(3.0)}, values

    return pack


def pack_gptq(bits: int, *, version: int = 1, ordered: bool = False) -> Pack:
    def pack(outputs: int, inputs: int, random: torch.Generator) -> Packed:
        groups = inputs // GROUP
        codes = draw(2**bits, (inputs, outputs), random)
        zeros = draw(2**bits - 1, (groups, outputs), random) + 1  # 1 .. 2^bits - 1
        scales = drawn_scales((groups, outputs), random, torch.float16)
        of_input = torch.arange(inputs) // GROUP
        if ordered:
            of_input = of_input[torch.randperm(inputs, generator=random)]
        values = torch.empty(outputs, inputs, dtype=torch.float64)
        for i in range(inputs):
            group = of_input[i]
            values[:, i] = (codes[i] - zeros[group]).double() * scales[group].double()
        stored_zeros = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": torch.tensor(
                [bit_stream(column.tolist(), bits) for column in codes.t()]
            ).t(),
            "qzeros": torch.tensor([bit_stream(row.tolist(), bits) for row in stored_zeros]),
            "scales": scales,
            "g_idx": of_input,
        }
        return {
            key: tensor if key == "scales" else tensor.to(torch.int32)
            for key, tensor in tensors.items()
        }, values

    return pack


def pack_awq(outputs: int, inputs: int, random: torch.Generator) -> Packed:
    order = [
        0,
        2,
        4,
        6,
        1,
        3,
        5,
        7,
    ]  # of the columns in a word, from its lowest bits on (AutoAWQ, `pack_order`)
    codes = draw(16, (inputs, outputs), random)
    zeros = draw(16, (inputs // GROUP, outputs), random)
    scales = drawn_scales((inputs // GROUP, outputs), random, torch.float16)

    def words(matrix: Tensor) -> Tensor:
        rows = matrix.view(len(matrix), -1, 8)[:, :, order].tolist()
        words = [[bit_stream(eight, 4)[0] for eight in row] for row in rows]
        return torch.tensor(words, dtype=torch.int32)

    values = torch.empty(outputs, inputs, dtype=torch.float64)
    for i in range(inputs):
        values[:, i] = (codes[i] - zeros[i // GROUP]).double() * scales[i // GROUP].double()
    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, values


def pack_ints(bits: int, *, zero_points: bool = False, ordered: bool = False) -> Pack:
    """compressed-tensors' pack-quantized: signed codes with the offset 2^(bits - 1); zero points along the outputs."""

    def pack(outputs: int, inputs: int, random: torch.Generator) -> Packed:
        half, groups = 2 ** (bits - 1), inputs // GROUP
        codes = draw(2**bits, (outputs, inputs), random) - half
        zeros = draw(2**bits, (outputs, groups), random) - half
        scales = drawn_scales((outputs, groups), random, torch.bfloat16)
        of_input = torch.arange(inputs) // GROUP
        if ordered:
            of_input = of_input[torch.randperm(inputs, generator=random)]
        values = codes.double()
        for i in range(inputs):
            less = zeros[:, of_input[i]].double() if zero_points else 0.0
            values[:, i] = (values[:, i] - less) * scales[:, of_input[i]].double()
        rows = [bit_stream([code + half for code in row], bits) for row in codes.tolist()]
        tensors = {
            "weight_packed": torch.tensor(rows, dtype=torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if zero_points:
            columns = [
                bit_stream([zero + half for zero in row], bits) for row in zeros.t().tolist()
            ]
            tensors["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).t()
        if ordered:
            tensors["weight_g_idx"] = of_input.to(torch.int32)
        return tensors, values

    return pack


def pack_int8(outputs: int, inputs: int, random: torch.Generator) -> Packed:
    codes = (draw(255, (outputs, inputs), random) - 127).to(torch.int8)
    scales = drawn_scales((outputs, 1), random)
    zeros = (draw(9, (outputs, 1), random) - 4).to(torch.int8)
    values = (codes.double() - zeros.double()) * scales.double()
    return {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}, values


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-level for level in FP4]


def pack_nvfp4(*, divides: bool) -> Pack:
    """Scales of 16 in FP8: divided by a global scale (compressed-tensors) or multiplied by a second one (ModelOpt)."""

    def pack(outputs: int, inputs: int, random: torch.Generator) -> Packed:
        codes = draw(16, (outputs, inputs), random)
        scales = (1 + 9 * torch.rand(outputs, inputs // 16, generator=random)).to(
            torch.float8_e4m3fn
        )
        whole = 512.0 if divides else 1 / 512
        values = torch.empty(outputs, inputs, dtype=torch.float64)
        for row in range(outputs):
            for column in range(inputs):
                scale = float(scales[row, column // 16]) / 512
                values[row, column] = FP4[codes[row, column]] * scale
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        names = (
            ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
        )
        whole_scale = torch.tensor([whole]) if divides else torch.tensor(whole)
        return {names[0]: packed, "weight_scale": scales, names[1]: whole_scale}, values

    return pack


def levels_of(kind: str) -> Tensor:
    """bitsandbytes' 16 levels: NF4, or FP4 with its own order of bits."""
    if kind == "fp4":
        positive = [0.0, 0.005208333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
        return torch.tensor(positive + [-level for level in positive])
    normal = torch.distributions.Normal(0.0, 1.0)
    ends = 0.9677083  # create_normal_map's offset
    positive = normal.icdf(torch.linspace(ends, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(ends, 0.5, 8)[:-1])
    levels = torch.cat([positive, torch.zeros(1), negative]).sort().values
    return levels / levels.max()


def pack_4bit(kind: str, *, nested: bool, storage: torch.dtype = torch.uint8) -> Pack:
    def pack(outputs: int, inputs: int, random: torch.Generator) -> Packed:
        count, block, outer_block = outputs * inputs, 64, 16
        codes = draw(16, (count,), random)
        levels = levels_of(kind)
        # Each block has its largest level, as quantizing makes it.
        codes[::block] = int(levels.argmax())
        scales = drawn_scales((count // block,), random)
        state = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        tensors = {"weight.absmax": scales}
        if nested:
            outer_levels = torch.linspace(-1, 1, 256)
            outer = drawn_scales((-(-len(scales) // outer_block),), random)
            bytes_ = draw(256, (len(scales),), random).to(torch.uint8)
            offset = 0.0078125
            scales = torch.tensor(
                [
                    float(outer_levels[int(byte)]) * float(outer[index // outer_block]) + offset
                    for index, byte in enumerate(bytes_)
                ],
                dtype=torch.float64,
            )
            state |= {
                "nested_blocksize": outer_block,
                "nested_dtype": "float32",
                "nested_offset": offset,
            }
            tensors = {
                "weight.absmax": bytes_,
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": outer_levels,
            }
        values = torch.tensor(
            [
                float(levels[code]) * float(scales[index // block])
                for index, code in enumerate(codes.tolist())
            ],
            dtype=torch.float64,
        )
        packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).view(storage).view(-1, 1)
        tensors |= {
            "weight": packed,
            "weight.quant_map": levels,
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return tensors, values.view(outputs, inputs)

    return pack


def pack_8bit(outputs: int, inputs: int, random: torch.Generator) -> Packed:
    codes = (draw(255, (outputs, inputs), random) - 127).to(torch.int8)
    largest = 0.2 + torch.rand(outputs, generator=random)
    values = codes.double() * largest.double()[:, None] / 127
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values


def pack_mlx(bits: int) -> Pack:
    def pack(outputs: int, inputs: int, random: torch.Generator) -> Packed:
        group = 32
        codes = draw(2**bits, (outputs, inputs), random)
        scales = drawn_scales((outputs, inputs // group), random, torch.bfloat16)
        biases = -8 * scales
        values = codes.double() * scales.double().repeat_interleave(group, 1)
        values += biases.double().repeat_interleave(group, 1)
        words = torch.tensor([bit_stream(row, bits) for row in codes.tolist()], dtype=torch.int32)
        return {"weight": words.view(torch.uint32), "scales": scales, "biases": biases}, values

    return pack


def groups(**weights: object) -> dict:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
TENSOR = (2**30, 2**30)
CT = {"quant_method": "compressed-tensors"}
GPTQ = {"quant_method": "gptq", "group_size": GROUP}
BNB = {"quant_method": "bitsandbytes"}
# Name -> (its quantization_config, how a matrix is packed, what the note says of it).
FORMATS: dict[str, tuple[dict, Pack, str]] = {
    "fp8-blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]},
        pack_fp8(E4M3, (24, 40)),
        "FP8 (e4m3), a scale per 24 x 40",
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "weight_block_size": None},
        pack_fp8(E4M3, TENSOR, scale_dtype=torch.bfloat16),
        "a scale per tensor",
    ),
    "fp8-fnuz": ({"quant_method": "fp8"}, pack_fp8(FNUZ, TENSOR), "FP8 (e4m3 FNUZ)"),
    "fp8-e5m2": ({"quant_method": "fp8"}, pack_fp8(torch.float8_e5m2, TENSOR), "FP8 (e5m2)"),
    "fp8-exponents": (
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
        pack_fp8(E4M3, (32, 32), scale_dtype=torch.float8_e8m0fnu),
        "a scale per 32 x 32",
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        pack_fp8(E4M3, (1, 2**30), "weight_scale"),
        "a scale per row",
    ),
    "ct-float": (
        CT | {"format": "float-quantized"} | groups(num_bits=8, type="float"),
        pack_fp8(E4M3, (1, 2**30), "weight_scale", torch.bfloat16),
        "a scale per row",
    ),
    "ct-int8": (
        CT | {"format": "int-quantized"} | groups(num_bits=8, type="int"),
        pack_int8,
        "int8, a scale per row",
    ),
    "ct-packed-4": (
        CT | {"format": "pack-quantized"} | groups(num_bits=4, group_size=GROUP),
        pack_ints(4),
        "int4 (compressed-tensors), a scale per 16",
    ),
    "ct-packed-4-zeros": (
        CT | {"format": "pack-quantized"} | groups(num_bits=4, symmetric=False),
        pack_ints(4, zero_points=True, ordered=True),
        "int4",
    ),
    "ct-packed-3-zeros": (
        CT | {"format": "pack-quantized"} | groups(num_bits=3, symmetric=False),
        pack_ints(3, zero_points=True),
        "int3",
    ),
    "ct-packed-8": (CT | {"format": "pack-quantized"} | groups(num_bits=8), pack_ints(8), "int8"),
    "ct-nvfp4": (
        CT | {"format": "nvfp4-pack-quantized"} | groups(num_bits=4, type="float"),
        pack_nvfp4(divides=True),
        "NVFP4, a scale per 16",
    ),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        pack_nvfp4(divides=False),
        "NVFP4",
    ),
    "gptq-2": (GPTQ | {"bits": 2}, pack_gptq(2), "GPTQ, 2 bits"),
    "gptq-3": (GPTQ | {"bits": 3}, pack_gptq(3), "GPTQ, 3 bits"),
    "gptq-4-ordered": (
        GPTQ | {"bits": 4, "desc_act": True},
        pack_gptq(4, ordered=True),
        "GPTQ, 4 bits, a scale per 16",
    ),
    "gptq-4-v2": (
        GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"},
        pack_gptq(4, version=2),
        "GPTQ, 4 bits",
    ),
    "gptq-8": (GPTQ | {"bits": 8}, pack_gptq(8), "GPTQ, 8 bits"),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        pack_awq,
        "AWQ, 4 bits, a scale per 16",
    ),
    "bnb-nf4": (
        BNB | {"load_in_4bit": True},
        pack_4bit("nf4", nested=True),
        "nf4 (bitsandbytes), a scale per 64, nested",
    ),
    "bnb-nf4-plain": (
        BNB | {"load_in_4bit": True},
        pack_4bit("nf4", nested=False, storage=torch.bfloat16),
        "nf4 (bitsandbytes), a scale per 64",
    ),
    "bnb-fp4": (BNB | {"load_in_4bit": True}, pack_4bit("fp4", nested=True), "fp4 (bitsandbytes)"),
    "bnb-int8": (BNB | {"load_in_8bit": True}, pack_8bit, "int8 (bitsandbytes)"),
    "mlx-4": ({"group_size": 32, "bits": 4}, pack_mlx(4), "int4 (MLX), a scale per 32"),
    "mlx-6": ({"group_size": 32, "bits": 6}, pack_mlx(6), "int6 (MLX)"),
}


def write_packed(folder: Path, name: str, **sizes: int) -> transformers.LlamaForCausalLM:
    """A tiny Llama in that format in the folder; returns transformers' model with the values that its codes have."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SIZES | sizes))
    return pack_model(transformers.LlamaForCausalLM(config).float(), folder, name)


def pack_model(
    model: transformers.PreTrainedModel, folder: Path, name: str, *, prefix: str = ""
) -> transformers.PreTrainedModel:
    """`write_packed` of a model. `prefix`: in front of "model." in the files, as a multimodal model has it."""
    model.save_pretrained(folder)
    settings, pack, _ = FORMATS[name]
    random = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for path, module in model.named_modules():
        if ".layers." not in path or not isinstance(module, torch.nn.Linear):
            continue
        del tensors[f"{path}.weight"]
        packed, values = pack(*module.weight.shape, random)
        tensors |= {f"{path}.{key}": tensor.contiguous() for key, tensor in packed.items()}
        module.weight.data = values.float()
    tensors = {prefix + key: tensor for key, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization" if name.startswith("mlx") else "quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return model.eval()
