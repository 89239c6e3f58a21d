"""Loading a model for evaluation, generation and export: memory check, quantization and precision of its run."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from torch import nn

from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.hardware.detect import memory_bytes
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile
from bloomery.model.adapters.settings import is_adapter_folder, read_settings
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.io.weights import load_decoder, quantize_model, quantized_weights
from bloomery.model.limits import PIECE_BYTES, Dequantizer, dequantizer, storage_bytes
from bloomery.recipe.schema import Quantize
from bloomery.train.forward import autocast_forward, prepare_weights
from bloomery.train.model_folder import ModelFiles

CONTEXT = 4096  # tokens of the KV cache in the memory check, at most
LEAST_CONTEXT = 512  # tokens: a server with less serves nobody
# of the memory beside the weights, for a cache whose size nobody asked for
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.9}
WORKSPACE = 256 * 2**20  # bytes of a forward in addition to weights and KV cache
OnText = Callable[[str], None]


@final
@dataclass(frozen=True)
class Use:
    """`device`: "cpu" or "cuda". `quantize`: None: as in the run that trained the model.

    `bfloat16`: supported in hardware. `machine`: with its stored probes.
    """

    device: str
    quantize: Literal["none", "nf4", "int8"] | None = None
    bfloat16: bool = False
    machine: Machine | None = None

    @staticmethod
    def local() -> "Use":
        """The GPU if available."""
        gpu = torch.cuda.is_available()
        return Use(
            "cuda" if gpu else "cpu",
            bfloat16=gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        )

    @staticmethod
    def of(profile: Profile, quantize: str | None, *, machine: Machine, asked: str) -> "Use":
        """The device that training would use. Raises UserError for a requested one that cannot be used."""
        gpu = profile.accelerator is not None
        reason = profile.device.reason
        if gpu and not torch.cuda.is_available():
            gpu = False
            reason = "this PyTorch cannot use it (torch.cuda.is_available() is False)"
        if not gpu and asked not in ("auto", "cpu"):
            fix = "run `bloomery doctor --probe`, or pass --devices cpu"
            raise UserError(f"device {asked} cannot be used: {reason}", where="--devices", fix=fix)
        kind = cast(Literal["none", "nf4", "int8"] | None, quantize)
        return Use("cuda" if gpu else "cpu", kind, profile.dtype.value == "bfloat16", machine)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0) if self.device == "cuda" else "CPU"

    def free_bytes(self) -> int:
        if self.device == "cuda":
            return torch.cuda.mem_get_info()[0]
        return self.host_free_bytes

    @property
    def host_free_bytes(self) -> int:
        return self.machine.host.memory_free_bytes if self.machine else memory_bytes()[1]


def load_used(
    files: ModelFiles,
    use: Use,
    *,
    dtype: torch.dtype | None = None,
    on_load: OnText = lambda _: None,
    cached: tuple[int, int] = (1, CONTEXT),
) -> Decoder:
    """The decoder, quantized and in the precision of its run.

    `dtype`: for a model without a run, or whose precision the device lacks; None: as stored. `on_load` receives what is
    loaded, its memory, and why results may differ from the run's. Raises UserError before allocating when it does not
    fit. `cached`: the slots of the KV cache, and the tokens of each at most.
    """
    return _load(files, use, dtype, on_load, cached)[0]


def load_fitting(
    files: ModelFiles, use: Use, *, slots: int, parts: int = 1, on_load: OnText = lambda _: None
) -> tuple[Decoder, int]:
    """As `load_used`, with the tokens of each slot that fit into memory: the model's context, or less, with a line.

    `parts`: the KV caches of how many models share the free memory.
    """
    return _load(files, use, None, on_load, (slots, None), parts)


def _load(
    files: ModelFiles,
    use: Use,
    dtype: torch.dtype | None,
    on_load: OnText,
    cached: tuple[int, int | None],
    parts: int = 1,
) -> tuple[Decoder, int]:
    trained = files.trained
    kept = trained.quantize if trained is not None else Quantize()
    quantize = (
        kept if use.quantize is None or use.quantize == kept.kind else Quantize(kind=use.quantize)
    )
    method = (
        is_adapter_folder(files.weights) and read_settings(files.weights)["peft_type"] != "LORA"
    )
    if method and quantize.kind != "none":
        problem = "not supported: a quantized base under a PEFT method other than LoRA"
        raise UserError(problem, where="--quantize", fix="leave out --quantize", code=2)
    # The run's precision; None without a run or where the device lacks it. A CPU run's precision works on a CPU.
    precision = None if trained is None else trained.precision
    if trained is not None and precision != "float32" and not use.device == trained.device == "cpu":
        able = use.device == "cuda" if precision == "float16" else use.bfloat16
        precision = precision if able else None
    reader: Dequantizer = "torch"
    if quantize.kind != "none" and use.device != "cpu" and use.machine is not None:
        reader = dequantizer(use.machine, quantize.kind, device=use.device, compiled=False).value
    if trained is not None and quantize.kind != trained.quantize.kind:
        bases = {"none": "weights that are not quantized"}
        then, now = (
            bases.get(base, f"{base} weights") for base in (trained.quantize.kind, quantize.kind)
        )
        on_load(f"the run trained over {then}, this base has {now}: results differ from the run's")
    if trained is not None and precision is None:
        on_load(
            f"the run used {trained.precision}, which {use.name} lacks: results differ by rounding"
        )

    context = 0

    def arrange(decoder: Decoder) -> None:
        """Freezes, quantizes and casts as training did. Raises UserError where the memory is too small."""
        _freeze(decoder, whole=files.base is None)
        if quantize.kind != "none":
            quantize_model(decoder, quantize, reader=reader)
        if precision is not None:
            prepare_weights(decoder, precision)
        nonlocal context
        slots, tokens = cached
        context = _fitting_context(decoder, use, slots * parts) if tokens is None else tokens
        _refuse_full(decoder, quantize, use, str(files.weights), on_load, (slots, context))
        if tokens is None and context < (longest := decoder.config.max_positions):
            on_load(
                f"context: {context:,} of the model's {longest:,} tokens: its KV cache for {slots} requests fits in "
                f"{CACHE_SHARE[use.device] / parts:.0%} of the free memory (--max-requests, --max-context)"
            )

    decoder = load_decoder(
        files.weights,
        dtype=dtype,
        device=use.device,
        base=files.base,
        arrange=arrange,
    )
    autocast_forward(decoder, precision or "float32")
    return decoder, context


def _freeze(decoder: Decoder, *, whole: bool) -> None:
    """Freeze as training did; of a full model the matrices of layers and head, so that they take the matmul dtype."""
    if not whole and all(parameter.requires_grad for parameter in decoder.parameters()):
        decoder.requires_grad_(False)  # a PEFT method is added once the base is read
    for name, module in decoder.named_modules() if whole else ():
        if isinstance(module, nn.Linear) and name != "score":
            tied = module.weight is decoder.model.embed_tokens.weight
            module.requires_grad_(tied)


def _refuse_full(
    decoder: Decoder,
    quantize: Quantize,
    use: Use,
    where: str,
    on_load: OnText,
    cached: tuple[int, int],
) -> None:
    """Report the memory needed. Raises UserError with a command when it exceeds the free memory."""
    weights = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    config = decoder.config
    item = decoder.model.embed_tokens.weight.itemsize
    # KV cache, the largest matrix dequantized, and a forward's workspace.
    slots, context = cached
    cache = slots * _cache_bytes(config, min(config.max_positions, context), item)
    needed = weights + cache + _working_bytes(decoder, item)
    free = use.free_bytes()
    kind = f"{quantize.kind} base" if quantize.kind != "none" else "weights"
    if needed <= free:
        total = f"{format_bytes(weights)}, {format_bytes(needed)} with KV cache and workspace"
        on_load(f"{kind}: {total}; {use.name} has {format_bytes(free)} free")
        return
    smaller = _smaller(decoder, quantize, use, needed, free)
    if slots > 1 and needed - cache + cache // slots <= free:
        smaller = "decode fewer requests at once (--max-requests), or shorter ones (--max-context)"
    raise UserError(
        f"the model does not fit: it needs {format_bytes(needed)}, {use.name} has {format_bytes(free)} free",
        where=where,
        fix=smaller,
    )


def _cache_bytes(config: ModelConfig, tokens: int, item: int) -> int:
    """Keys and values of one text of so many tokens; a layer with a window keeps no more."""
    kept = sum(min(tokens, config.window(layer) or tokens) for layer in range(config.num_layers))
    return 2 * config.num_kv_heads * config.head_dim * item * kept


def _working_bytes(decoder: Decoder, item: int) -> int:
    """The largest matrix dequantized, and a forward's workspace."""
    largest = max((each.outputs * each.inputs for _, each in quantized_weights(decoder)), default=0)
    return largest * (item + PIECE_BYTES) + WORKSPACE


def _fitting_context(decoder: Decoder, use: Use, slots: int) -> int:
    """The tokens of each slot: the model's context, or the largest that leaves memory to other programs."""
    config = decoder.config
    item = decoder.model.embed_tokens.weight.itemsize
    weights = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    room = (use.free_bytes() - weights - _working_bytes(decoder, item)) * CACHE_SHARE[use.device]
    if slots * _cache_bytes(config, config.max_positions, item) <= room:
        return config.max_positions
    least = min(LEAST_CONTEXT, config.max_positions)
    sizes = range(least, config.max_positions, least)
    fitting = bisect_right(
        sizes, room, key=lambda tokens: slots * _cache_bytes(config, tokens, item)
    )
    return sizes[max(0, fitting - 1)] if len(sizes) else least


def _smaller(decoder: Decoder, quantize: Quantize, use: Use, needed: int, free: int) -> str:
    """The command that fits, if any."""
    inside = (
        [
            module.weight
            for name, module in decoder.named_modules()
            if name.startswith("model.layers.")
            and isinstance(module, nn.Linear)
            and module.weight is not None
        ]
        if quantize.kind == "none"
        else []
    )
    for base in ("int8", "nf4"):
        saved = sum(
            weight.nbytes - storage_bytes(tuple(weight.shape), base, True) for weight in inside
        )
        if inside and needed - saved <= free:
            return f"pass --quantize {base}, which needs {format_bytes(needed - saved)}"
    if use.device == "cuda" and needed <= use.host_free_bytes:
        return "end other processes on this GPU, or pass --devices cpu"
    return "end other processes, or use a smaller model"
