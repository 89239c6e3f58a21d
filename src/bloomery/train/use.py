"""A model made ready to be used: memory is looked at first, and its base is kept as the run kept it that trained it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from torch import nn

from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.hardware.detect.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.model.adapters.base_model import is_adapter_folder, read_settings
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder, quantize_model, quantized_weights
from bloomery.model.quantization.sizes import PIECE_BYTES, Dequantizer, backend, storage_bytes
from bloomery.recipe.schema import Quantize
from bloomery.train.forward import in_precision, prepare_weights
from bloomery.train.model_folder import ModelFiles

CONTEXT = 4096  # tokens whose keys and values are counted, where a model reads more
WORKSPACE = 256 * 2**20  # bytes: what a forward needs beside weights, keys and values
Tell = Callable[[str], None]


@final
@dataclass(frozen=True)
class Use:
    """`device`: cpu or cuda. `quantize`: None keeps the base as the run did that trained the model.

    `bfloat16`: whether the device multiplies it in hardware. `machine`: the one that probes were remembered of.
    """

    device: str
    quantize: Literal["none", "nf4", "int8"] | None = None
    bfloat16: bool = False
    machine: Machine | None = None

    @staticmethod
    def local() -> "Use":
        """On the GPU where one is."""
        gpu = torch.cuda.is_available()
        return Use("cuda" if gpu else "cpu", bfloat16=gpu and torch.cuda.is_bf16_supported(including_emulation=False))

    @staticmethod
    def of(profile: Profile, quantize: str | None, *, machine: Machine, asked: str) -> "Use":
        """On the device that training would take. Raises UserError for one that was asked for and cannot be used."""
        gpu, reason = profile.accelerator is not None, profile.device.reason
        if gpu and not torch.cuda.is_available():
            gpu, reason = False, "this PyTorch cannot use it (torch.cuda.is_available() is False)"
        if not gpu and asked not in ("auto", "cpu"):
            fix = "`bloomery doctor --probe` says why; or --devices cpu"
            raise UserError(f"device {asked} cannot be used: {reason}", where="--devices", fix=fix)
        kind = cast(Literal["none", "nf4", "int8"] | None, quantize)
        return Use("cuda" if gpu else "cpu", kind, profile.dtype.value == "bfloat16", machine)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0) if self.device == "cuda" else "CPU"

    def free_bytes(self) -> int:
        if self.device == "cuda":
            return torch.cuda.mem_get_info()[0]
        return (self.machine or detect()).host.memory_free_bytes


def load_used(
    found: ModelFiles, use: Use, *, dtype: torch.dtype | None = None, vocab_size: int = 0, tell: Tell = lambda _: None
) -> Decoder:
    """The decoder of what was found, quantized and in the precision in which its run computed.

    `dtype`: of a model that no run here trained, and of one whose precision the device lacks; None: as it is stored.
    `tell` hears what is loaded where, in how much memory, and where figures will differ from the run's own. Raises
    UserError when memory is too small, before any is taken.
    """
    trained = found.trained
    kept = trained.quantize if trained is not None else Quantize()
    quantize = kept if use.quantize is None or use.quantize == kept.kind else Quantize(kind=use.quantize)
    method = is_adapter_folder(found.weights) and read_settings(found.weights)["peft_type"] != "LORA"
    if method and quantize.kind != "none":
        problem = "a method of PEFT's own needs the weights of its base as numbers, not quantized"
        raise UserError(problem, where="--quantize", fix="leave out --quantize", code=2)
    # The run's own precision; None where there was no run, or where the device lacks it: a processor that trained in
    # it can.
    precision = None if trained is None else trained.precision
    if trained is not None and precision != "float32" and not use.device == trained.device == "cpu":
        able = use.device == "cuda" if precision == "float16" else use.bfloat16
        precision = precision if able else None
    reader: Dequantizer = "torch"
    if quantize.kind != "none" and use.device != "cpu" and use.machine is not None:
        reader = backend(use.machine, quantize.kind, device=use.device, compiled=False).value
    if trained is not None and quantize.kind != trained.quantize.kind:
        bases = {"none": "weights that are not quantized"}
        then, now = (bases.get(base, f"{base} weights") for base in (trained.quantize.kind, quantize.kind))
        tell(f"the run trained over {then}, and here the base has {now}: figures differ from the run's own")
    if trained is not None and precision is None:
        tell(f"the run computed in {trained.precision}, which {use.name} lacks: figures differ in their last digits")

    def arrange(decoder: Decoder) -> None:
        _freeze(decoder, whole=found.base is None)
        if quantize.kind != "none":
            quantize_model(decoder, quantize, reader=reader)
        if precision is not None:
            prepare_weights(decoder, precision)
        _refuse_full(decoder, quantize, use, str(found.weights), tell)

    decoder = load_decoder(
        found.weights, dtype=dtype, device=use.device, base=found.base, vocab_size=vocab_size, arrange=arrange
    )
    in_precision(decoder, precision or "float32")
    return decoder


def _freeze(decoder: Decoder, *, whole: bool) -> None:
    """As training froze a base; of a whole model the matrices of layers and head, which products read in few bits."""
    if not whole and all(parameter.requires_grad for parameter in decoder.parameters()):
        decoder.requires_grad_(False)  # a method of PEFT's own comes when the base is read
    for name, module in decoder.named_modules() if whole else ():
        if isinstance(module, nn.Linear) and name != "score":
            tied = module.weight is decoder.model.embed_tokens.weight
            module.requires_grad_(tied)


def _refuse_full(decoder: Decoder, quantize: Quantize, use: Use, where: str, tell: Tell) -> None:
    """Says what will be held. Raises UserError with a command where that is more than is free."""
    weights = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    config, item = decoder.config, decoder.model.embed_tokens.weight.itemsize
    # Keys and values, the largest matrix as floats, and a forward's other tensors.
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item * min(config.max_positions, CONTEXT)
    largest = max((each.outputs * each.inputs for _, each in quantized_weights(decoder)), default=0)
    needed, free = weights + cache + largest * (item + PIECE_BYTES) + WORKSPACE, use.free_bytes()
    kind = f"{quantize.kind} base" if quantize.kind != "none" else "weights"
    said = f"{kind}: {format_bytes(weights)}, {format_bytes(needed)} with room to work; {use.name} has"
    if needed <= free:
        tell(f"{said} {format_bytes(free)} free")
        return
    raise UserError(
        f"{use.name} has {format_bytes(free)} of memory free, and this model needs {format_bytes(needed)}",
        where=where, fix=_smaller(decoder, quantize, use, needed, free),
    )  # fmt: skip


def _smaller(decoder: Decoder, quantize: Quantize, use: Use, needed: int, free: int) -> str:
    """The command that fits, where one does."""
    inside = [
        module.weight for name, module in decoder.named_modules()
        if name.startswith("model.layers.") and isinstance(module, nn.Linear) and module.weight is not None
    ] if quantize.kind == "none" else []  # fmt: skip
    for base in ("int8", "nf4"):
        saved = sum(weight.nbytes - storage_bytes(tuple(weight.shape), base, True) for weight in inside)
        if inside and needed - saved <= free:
            return f"keep the base in fewer bits: --quantize {base}, which needs {format_bytes(needed - saved)}"
    if use.device == "cuda" and needed <= (use.machine or detect()).host.memory_free_bytes:
        return "end what else uses this GPU, or use the processor: --devices cpu"
    return "end what else uses this memory, or take a smaller model"
