"""Loading a model for evaluation, generation and export: memory check, quantization and precision of its run."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from torch import Tensor, nn

from bloomery.core.device import (
    accelerator_type,
    free_and_total_bytes,
    is_accelerator,
    multiplies_bfloat16,
    properties_of,
)
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import is_never_trained, layers
from bloomery.facts.limits import DEQUANTIZE_SCRATCH_BYTES, Dequantizer, storage_bytes
from bloomery.facts.pictures import could_see
from bloomery.hardware.dequantizers import dequantizer
from bloomery.hardware.detect import memory_bytes
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import Profile, build_profile
from bloomery.infer.decoding_kernel import decoding_problem
from bloomery.infer.forward import autocast_forward, prepare_weights
from bloomery.infer.model_folder import ModelFiles
from bloomery.model.adapters.settings import is_adapter_folder, read_settings
from bloomery.model.configs import headers_of, stated_config, untied_note
from bloomery.model.decoder import Decoder
from bloomery.model.experts import ExpertMLPs
from bloomery.model.io.weights import load_decoder, quantize_model, quantized_weights
from bloomery.model.vision import tower_dtype
from bloomery.plan.choices import NOT_RUN, decodes_with_kernel
from bloomery.recipe.schema import Quantize

CONTEXT = 4096  # tokens of the KV cache in the memory check, at most
MIN_CONTEXT = 512  # tokens: a server with less is of no use
CACHE_SHARE_OF_CPU = 0.5
CACHE_SHARE_OF_GPU = 0.9
WORKSPACE = 256 * 2**20  # bytes of a forward in addition to weights and KV cache
OnText = Callable[[str], None]


@final
@dataclass(frozen=True)
class Use:
    """Where and how a model is used. `device`: a type of `core.device`.

    `quantize`: None: as in the run that trained it. `bfloat16`: supported in hardware. `machine`: with its probes.
    """

    device: str
    quantize: Literal["none", "nf4", "int8"] | None = None
    bfloat16: bool = False
    machine: Machine | None = None

    @staticmethod
    def local() -> "Use":
        """This machine's GPU if available, else its CPU."""
        device = accelerator_type()
        if device is None:
            return Use("cpu")
        return Use(device, bfloat16=multiplies_bfloat16(device))

    @staticmethod
    def of(
        profile: Profile, quantize: str | None, *, machine: Machine, requested_device: str
    ) -> "Use":
        """The device that training would use. Raises UserError for a requested one that cannot be used."""
        has_gpu = profile.accelerator is not None
        reason = profile.device.reason
        if has_gpu and accelerator_type() != profile.device.value:
            has_gpu = False
            reason = "this PyTorch cannot use it (torch.accelerator.is_available() is False)"
        if not has_gpu and requested_device not in ("auto", "cpu"):
            raise UserError(
                f"device {requested_device} cannot be used: {reason}",
                where="--devices",
                fix="run `bloomery doctor --probe`, or pass --devices cpu",
            )
        kind = cast(Literal["none", "nf4", "int8"] | None, quantize)
        device = profile.device.value if has_gpu else "cpu"
        return Use(device, kind, profile.dtype.value == "bfloat16", machine)

    @property
    def name(self) -> str:
        return properties_of(self.device).name

    def free_bytes(self) -> int:
        device_memory = free_and_total_bytes(self.device)
        return self.host_free_bytes if device_memory is None else device_memory[0]

    @property
    def cache_share(self) -> float:
        """The share of the memory next to the weights that a cache takes whose size the user has not set."""
        return CACHE_SHARE_OF_GPU if is_accelerator(self.device) else CACHE_SHARE_OF_CPU

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
    decodes: bool = False,
    tower: int = 0,
) -> Decoder:
    """The decoder, quantized and in the precision of its run.

    `dtype`: for a model without a run, or whose precision the device lacks; None: as stored. `on_load` receives what is
    loaded, its memory, and why results may differ from the run's. Raises UserError before allocating when it does not
    fit. `cached`: the slots of the KV cache, and the tokens of each at most. `decodes`: new tokens go to a kernel for
    decoding, where the GPU has one. `tower`: parameters of a vision tower that is loaded after that.
    """
    return _load(files, use, dtype, on_load, cached, decodes=decodes, tower=tower)[0]


def load_fitting(
    files: ModelFiles,
    use: Use,
    *,
    slots: int,
    parts: int = 1,
    tower: int = 0,
    on_load: OnText = lambda _: None,
) -> tuple[Decoder, int]:
    """As `load_used`, to decode, with the tokens of each slot that fit into memory: the model's context, or less, with
    a line.

    `parts`: the KV caches of how many models share the free memory.
    """
    return _load(files, use, None, on_load, (slots, None), parts, decodes=True, tower=tower)


def _load(
    files: ModelFiles,
    use: Use,
    dtype: torch.dtype | None,
    on_load: OnText,
    cached: tuple[int, int | None],
    parts: int = 1,
    *,
    decodes: bool,
    tower: int,
) -> tuple[Decoder, int]:
    # Quantization: as requested, else as the run trained.
    trained = files.trained
    quantize = trained.quantize if trained is not None else Quantize()
    if use.quantize is not None and use.quantize != quantize.kind:
        quantize = Quantize(kind=use.quantize)
    is_peft_method = (
        is_adapter_folder(files.weights) and read_settings(files.weights)["peft_type"] != "LORA"
    )
    if is_peft_method and quantize.kind != "none":
        problem = "not supported: a quantized base under a PEFT method other than LoRA"
        raise UserError(problem, where="--quantize", fix="leave out --quantize", code=2)
    reader: Dequantizer = "torch"
    if quantize.kind != "none" and use.device != "cpu" and use.machine is not None:
        reader = dequantizer(use.machine, quantize.kind, device=use.device, compiled=False).value
    precision = _precision_of_run(files, use)

    # Results that differ from the run's are explained before they appear.
    if trained is not None and quantize.kind != trained.quantize.kind:
        descriptions = {"none": "weights that are not quantized"}
        run_base, this_base = (
            descriptions.get(kind, f"{kind} weights")
            for kind in (trained.quantize.kind, quantize.kind)
        )
        on_load(
            f"the run trained over {run_base}, this base has {this_base}:"
            " results differ from the run's"
        )
    if trained is not None and precision is None:
        on_load(
            f"the run used {trained.precision}, which {use.name} lacks: results differ by rounding"
        )

    # Files of other programs may be read in another way than their names or config.json say.
    whole = files.base or files.weights
    for note in headers_of(whole, sees=could_see(stated_config(whole))).notes:
        on_load(f"weights: {note}")

    # The memory is checked once the decoder has its shapes, before its weights are read.
    context = 0

    def arrange(decoder: Decoder) -> None:
        """Freezes, quantizes and casts as training did. Raises UserError where the memory is too small."""
        _freeze(decoder, is_full_model=files.base is None)
        if quantize.kind != "none":
            quantize_model(decoder, quantize, reader=reader)
        if precision is not None:
            prepare_weights(decoder, precision)
        nonlocal context
        slots, tokens = cached
        weight_bytes = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
        weight_bytes += tower * tower_dtype(decoder.model.embed_tokens.weight.dtype).itemsize
        context = tokens or _fitting_context(decoder, use, slots * parts, weight_bytes)
        _refuse_full(
            decoder, quantize, use, str(files.weights), on_load, (slots, context), weight_bytes
        )
        if tokens is None and context < (longest := decoder.config.max_positions):
            on_load(
                f"context: {context:,} of the model's {longest:,} tokens: its KV cache for {slots} requests fits in "
                f"{use.cache_share / parts:.0%} of the free memory (--max-requests, --max-context)"
            )

    decoder = load_decoder(
        files.weights,
        dtype=dtype,
        device=use.device,
        base=files.base,
        arrange=arrange,
    )
    if (untied := untied_note(files.base, decoder.config)) is not None:
        on_load(f"adapter: {untied}")
    autocast_forward(decoder, precision or "float32")
    if decodes:
        _use_decoding_kernel(decoder, use, precision, on_load)
    return decoder, context


def _use_decoding_kernel(
    decoder: Decoder, use: Use, precision: str | None, on_load: OnText
) -> None:
    """Decodes with Triton's kernel where training would take those kernels on this GPU, and where it is right."""
    if use.device == "cpu" or use.machine is None:
        return
    weight_dtype = decoder.model.embed_tokens.weight.dtype
    is_used = decodes_with_kernel(
        decoder.config,
        build_profile(use.machine),
        precision=precision or str(weight_dtype).removeprefix("torch."),
        torch=torch.__version__,
    )
    if not is_used:
        return
    problem = decoding_problem(decoder)
    if problem is None:
        on_load(
            f"decoding: Bloomery's Triton kernel, {NOT_RUN}; its logits were compared with SDPA"
        )
    else:
        on_load(f"decoding: PyTorch's SDPA, as the Triton kernel cannot be used: {problem}")


def _precision_of_run(files: ModelFiles, use: Use) -> str | None:
    """The precision of the run that trained the model; None without a run, and where the device lacks it."""
    trained = files.trained
    if trained is None:
        return None
    # The precision of a run on a CPU works on every CPU.
    if trained.precision == "float32" or use.device == trained.device == "cpu":
        return trained.precision
    is_supported = use.bfloat16
    if trained.precision == "float16":
        is_supported = is_accelerator(use.device)
    return trained.precision if is_supported else None


def _freeze(decoder: Decoder, *, is_full_model: bool) -> None:
    """Freeze as training did; of a full model the matrices of layers and head, so that they take the matmul dtype."""
    if not is_full_model:
        # Without LoRA matrices nothing is frozen yet: a PEFT method is added once the base is read.
        if all(p.requires_grad or is_never_trained(n) for n, p in decoder.named_parameters()):
            decoder.requires_grad_(False)
        return
    for name, module in decoder.named_modules():
        if isinstance(module, ExpertMLPs):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(parameter.ndim < 3)
        if isinstance(module, nn.Linear) and name != "score":
            is_tied = module.weight is decoder.model.embed_tokens.weight
            module.requires_grad_(is_tied)


def _refuse_full(
    decoder: Decoder,
    quantize: Quantize,
    use: Use,
    where: str,
    on_load: OnText,
    cached: tuple[int, int],
    weight_bytes: int,
) -> None:
    """Report the memory needed. Raises UserError with a command when it exceeds the free memory."""
    # Weights, KV cache, the largest matrix dequantized, and a forward's workspace.
    config = decoder.config
    itemsize = decoder.model.embed_tokens.weight.itemsize
    slots, context = cached
    cache_bytes = slots * _cache_bytes(config, min(config.max_positions, context), itemsize)
    needed_bytes = weight_bytes + cache_bytes + _working_bytes(decoder, itemsize)

    free_bytes = use.free_bytes()
    if needed_bytes <= free_bytes:
        kind = f"{quantize.kind} base" if quantize.kind != "none" else "weights"
        on_load(
            f"{kind}: {format_bytes(weight_bytes)}, {format_bytes(needed_bytes)} with KV cache and"
            f" workspace; {use.name} has {format_bytes(free_bytes)} free"
        )
        return

    # What fits instead: of a server fewer requests before another model.
    fix = _fix_of_memory(decoder, quantize, use, needed_bytes, free_bytes)
    if slots > 1 and needed_bytes - cache_bytes + cache_bytes // slots <= free_bytes:
        fix = "decode fewer requests at once (--max-requests), or shorter ones (--max-context)"
    raise UserError(
        f"the model does not fit: it needs {format_bytes(needed_bytes)},"
        f" {use.name} has {format_bytes(free_bytes)} free",
        where=where,
        fix=fix,
    )


def _cache_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """What the layers keep of one text of so many tokens."""
    return sum(layer.cached_bytes(tokens, itemsize) for layer in layers(config))


def _working_bytes(decoder: Decoder, itemsize: int) -> int:
    """The largest matrix dequantized, and a forward's workspace."""
    sizes = (weight.outputs * weight.inputs for _, weight in quantized_weights(decoder))
    return max(sizes, default=0) * (itemsize + DEQUANTIZE_SCRATCH_BYTES) + WORKSPACE


def _fitting_context(decoder: Decoder, use: Use, slots: int, weight_bytes: int) -> int:
    """The tokens of each slot: the model's context, or the largest that leaves memory to other programs."""
    config = decoder.config
    itemsize = decoder.model.embed_tokens.weight.itemsize
    free_bytes = use.free_bytes() - weight_bytes - _working_bytes(decoder, itemsize)
    max_cache_bytes = free_bytes * use.cache_share

    def cache_bytes(tokens: int) -> int:
        return slots * _cache_bytes(config, tokens, itemsize)

    # The whole context, or the largest multiple of the smallest one that fits.
    if cache_bytes(config.max_positions) <= max_cache_bytes:
        return config.max_positions
    min_context = min(MIN_CONTEXT, config.max_positions)
    contexts = range(min_context, config.max_positions, min_context)
    if not contexts:
        return min_context
    num_fitting = bisect_right(contexts, max_cache_bytes, key=cache_bytes)
    return contexts[max(0, num_fitting - 1)]


def _fix_of_memory(
    decoder: Decoder, quantize: Quantize, use: Use, needed_bytes: int, free_bytes: int
) -> str:
    """The command that fits into the memory, if any: quantized layers, or the host's memory."""
    layer_weights = list[Tensor]()
    if quantize.kind == "none":
        layer_weights = [
            module.weight
            for name, module in decoder.named_modules()
            if name.startswith("model.layers.")
            and isinstance(module, nn.Linear)
            and module.weight is not None
        ]
    for kind in ("int8", "nf4"):
        quantized_bytes = needed_bytes
        for weight in layer_weights:
            quantized_bytes -= weight.nbytes - storage_bytes(tuple(weight.shape), kind, True)
        if layer_weights and quantized_bytes <= free_bytes:
            return f"pass --quantize {kind}, which needs {format_bytes(quantized_bytes)}"
    if is_accelerator(use.device) and needed_bytes <= use.host_free_bytes:
        return "end other processes on this GPU, or pass --devices cpu"
    return "end other processes, or use a smaller model"
