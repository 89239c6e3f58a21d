"""Parameters: fresh, from a folder, into a folder. Files carry transformers' names and shapes, memory carries ours."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bloomery.facts.config import ModelConfig, StoredConversion
from bloomery.facts.counting import (
    Shape,
    attention_layers,
    expert_parts,
    is_layer_matrix,
    parameter_shapes,
    unstacked_shapes,
)
from bloomery.facts.hf_config import config_to_hf
from bloomery.model.adapters.base_changes import merge_into_base
from bloomery.model.adapters.lora import LoraLinear, adapt_as, is_added, note_base
from bloomery.model.adapters.peft_files import read_trained
from bloomery.model.adapters.peft_methods import open_method
from bloomery.model.adapters.peft_reading import read_adaptation
from bloomery.model.adapters.settings import (
    base_folder,
    is_adapter_folder,
    read_settings,
    refuse_other_base,
)
from bloomery.model.configs import grown, read_config
from bloomery.model.decoder import Decoder
from bloomery.model.experts import ExpertMLPs
from bloomery.model.io.expert_tensors import refuse_unquantizable
from bloomery.model.io.parameters import (
    cast,
    dtype_in,
    first_row,
    full,
    is_linear_map,
    local,
    put,
    stream,
    unstacked,
)
from bloomery.model.io.quantized import QuantizedWeight
from bloomery.model.io.safetensors import (
    Spec,
    TensorReader,
    split_shards,
    to_hf_names,
    write_tensors,
)
from bloomery.model.io.stored import (
    INDEX,
    stored_parameters,
    tensor_locations,
)
from bloomery.model.norms import LayerNorm, RMSNorm
from bloomery.model.quantized_experts import QuantizedExperts
from bloomery.model.transformers_backend import TransformersBackbone, buffer_tensor, loaded_safely
from bloomery.model.transformers_checks import TOLERANCE, check_head
from bloomery.model.transformers_files import made_parameters
from bloomery.model.xielu import XIELU
from bloomery.recipe.schema import Quantize


class QuantizedLinear(nn.Module):
    """A frozen linear map without an adapter."""

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.stored = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.stored(x, self.bias)
        return product


def quantize_model(model: Decoder, quantize: Quantize, *, reader: str = "torch") -> None:
    """In place: the frozen matrices inside the layers, those of experts, too.

    Biases, norms, routers, embeddings and the head stay as they are. On the meta device their
    numbers come later (`QuantizedWeight.fill`), elsewhere from the present weights. Raises
    UserError where a block would belong to two experts.
    """
    refuse_unquantizable(model.config, quantize.kind)
    for path, experts in model.named_modules():
        if isinstance(experts, ExpertMLPs):
            _quantize_experts(experts, path, quantize, reader)
    for path, linear in list(model.named_modules()):
        if (
            not path.startswith("model.layers.")
            or not (isinstance(linear, LoraLinear) or is_linear_map(linear))
            or linear.weight.requires_grad
        ):
            continue
        quantized_weight = _quantized(linear.weight, f"{path}.weight", quantize, reader)
        if isinstance(linear, LoraLinear):
            linear.register_parameter("weight", None)
            linear.stored = quantized_weight
        else:
            parent, _, leaf = path.rpartition(".")
            setattr(
                model.get_submodule(parent), leaf, QuantizedLinear(quantized_weight, linear.bias)
            )

    # A frozen matrix of a layer that stayed in floats would be memory that no plan counts.
    if model.config.transformers_backend is None:
        assert not [
            name
            for name, parameter in model.named_parameters()
            if is_layer_matrix(name, parameter.shape) and not parameter.requires_grad
        ]


def _quantized(weight: Tensor, name: str, quantize: Quantize, reader: str) -> QuantizedWeight:
    result = QuantizedWeight(weight.shape, quantize, reader=reader, device=weight.device)
    if weight.device.type != "meta":
        result.fill([weight.detach().flatten(0, -2)], name=name)
    return result


def _quantize_experts(experts: ExpertMLPs, path: str, quantize: Quantize, reader: str) -> None:
    for stack in ("gate_up_proj", "down_proj"):
        weight = experts.get_parameter(stack)
        if not weight.requires_grad:
            quantized_weight = _quantized(weight, f"{path}.{stack}", quantize, reader)
            experts.register_parameter(stack, None)
            experts.quantized[stack] = QuantizedExperts(quantized_weight)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are floats in a folder of the model: none of an adapter, no codes of a quantized weight."""
    for name, parameter in model.named_parameters():
        if not is_added(name) and ".stored." not in name:
            yield name, parameter


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """By the name that the weight has as a parameter."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            path = name.removesuffix(".stored")
            experts, is_stack, stack = path.rpartition(".quantized.")
            yield f"{experts}.{stack}" if is_stack else f"{path}.weight", module


SHARD_BYTES = 4 * 2**30
# Logits of deviation s cost s^2 / 2 nats over the ln V of knowing nothing: 0.2 at GPT-2's width of 1,024 with gain 1.
LOGIT_DEVIATION = 0.3
VOCABULARY = (
    "model.embed_tokens.weight",
    "model.embed_tokens_per_layer.weight",
    "lm_head.weight",
    "lm_head.bias",
)
RESIDUAL = (
    "self_attn.o_proj.weight",
    "linear_attn.out_proj.weight",
    "conv.out_proj.weight",
    "mlp.down_proj.weight",
    "mlp.shared_expert.down_proj.weight",
    "per_layer_projection.weight",
)
LARGEST_DECAY = 16.0  # of a delta net's head: its A is drawn below it, as in transformers


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    attention: str | None = None,
    base: Path | None = None,
    vocab_size: int = 0,
    arrange: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """The decoder in a folder in Hugging Face format, or an adapter's with its base, in evaluation mode.

    `dtype`: of the parameters; None keeps the one of the file. `base`: of an adapter, where it is not the one that it
    names. `vocab_size`: at least so many tokens. `arrange` is given the adapted decoder on the meta device, before any
    memory is taken: it may quantize it, choose other dtypes, let its weights stream, or refuse. Weights go from the
    file to the device, or the host, piece by piece, in the form that they are kept in. Raises UserError when the folder
    holds no such model.
    """
    # An adapter's folder holds no base: the weights come from another folder, which must be the one
    # it was trained on.
    source = folder
    if is_adapter_folder(folder):
        source = base or base_folder(folder)
        refuse_other_base(folder, source)

    # The headers are compared with the config before any memory is taken: a config may claim any
    # size.
    config = read_config(source)
    tensors = stored_parameters(source, config)

    # LoRA is our own and part of the decoder; PEFT's other methods are put onto the finished
    # decoder below.
    settings = None
    is_other_method = is_adapter_folder(folder) and read_settings(folder)["peft_type"] != "LORA"
    if is_adapter_folder(folder) and not is_other_method:
        settings, config = read_adaptation(folder, config, base=source)
    config = grown(config, vocab_size)

    # The caller arranges the decoder while it is on the meta device, where nothing has a cost yet.
    with torch.device("meta"):
        decoder = Decoder(config, attention=attention)
        cast(decoder, config, dtype or tensors["model.embed_tokens.weight"].dtype)
        if settings is not None:
            adapt_as(decoder, settings)
    if arrange is not None:
        arrange(decoder)
    stream = decoder.weight_stream
    if stream is None:
        give_memory(decoder, device)
    else:
        stream.allocate(source)
        decoder.tie()

    # A values head that the base lacks is drawn here, and the adapter's file then replaces it.
    with nullcontext() if stream is None else stream.filling():
        read_model(decoder, source, seed=0 if settings is not None else None)
    if settings is not None:
        read_trained(decoder, settings, config, folder, shared=True)
        merge_into_base(decoder, settings, config, folder)
        note_base(decoder)
    if is_other_method:
        open_method(decoder, folder)
    if config.transformers_backend is not None:
        # Matrices may be kept in fewer digits than the rest.
        dtypes = {p.dtype for p in decoder.parameters() if p.is_floating_point()}
        check_head(decoder.eval(), max(TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE))
    return decoder.eval()


def fresh_decoder(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str | None = None,
) -> Decoder:
    """A decoder with initialized parameters, in training mode."""
    with torch.device("meta"):
        decoder = Decoder(config, attention=attention)
    cast(decoder, config, dtype)
    give_memory(decoder, device)
    init_weights(decoder, seed)
    return decoder


def give_memory(decoder: Decoder, device: str | torch.device) -> None:
    """To a decoder on the meta device; its content is undefined until it is initialized or read."""
    # As `to_empty`, which on a meta tensor imports all of sympy; torch has not annotated it.
    decoder._apply(lambda old: torch.empty(old.shape, dtype=old.dtype, device=device))  # type: ignore[no-untyped-call]
    decoder.tie()


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """Normal with `initializer_range`, the projections that end a residual branch divided by sqrt(2 layers) (GPT-2).

    Each parameter has a random stream of its own, keyed by seed and name and drawn on the CPU in float32: the values
    depend neither on the device nor on which other parameters exist. Biases start at 0, gains at 1; the last norm's
    gain at what keeps the first logits below a deviation of LOGIT_DEVIATION. Heads of a delta net forget at rates
    between 0 and LARGEST_DECAY. Where scores are not scaled (Gemma 4), the norm of the queries begins as their scale.
    An activation with numbers of its own begins as its module says.
    """
    config = decoder.config
    logit_deviation = config.initializer_range * config.hidden_size**0.5
    last_gain = min(1.0, LOGIT_DEVIATION / (logit_deviation or 1.0))
    unscaled_queries = {
        f"{layer.name}.self_attn.q_norm.weight"
        for layer in attention_layers(config)
        if layer.attention_scale == 1.0
    }
    for name, parameter in base_parameters(decoder):
        if parameter.is_meta:  # another rank draws it
            continue
        owner = decoder.get_submodule(name.rpartition(".")[0])
        if name.endswith((".bias", "_bias")):
            parameter.zero_()
        elif name.endswith(".sinks"):
            put(_drawn(name, parameter.shape, config, seed), parameter)
        elif isinstance(owner, XIELU):
            owner.initialize()
        elif name.endswith(".layer_scalar"):
            parameter.fill_(1.0)
        elif name in unscaled_queries:
            # Where nothing divides the scores, the norm of the queries does.
            parameter.fill_(len(parameter) ** -0.5)
        elif name.endswith(".A_log"):
            rates = torch.empty(parameter.shape).uniform_(generator=stream(seed, name))
            put((rates * LARGEST_DECAY).clamp(min=0.01).log(), parameter)
        elif parameter.ndim == 1:
            offset = 1.0 if isinstance(owner, RMSNorm | LayerNorm) and owner.unit_offset else 0.0
            parameter.fill_((last_gain if name == "model.norm.weight" else 1.0) - offset)
        else:
            for part_name, part in unstacked(name, parameter):
                put(_drawn(part_name, part.shape, config, seed), part)
    for name, weight in quantized_weights(decoder):
        if weight.codes.is_meta:
            continue
        # Of a stack of experts part by part, as its numbers would be drawn as floats.
        parts = expert_parts(name, weight.shape)
        shapes: dict[str, Shape] = {part.name: (part.rows, weight.inputs) for part in parts}
        shapes = shapes or {name: weight.shape}
        drawn = (_drawn(part_name, shape, config, seed) for part_name, shape in shapes.items())
        weight.fill(drawn, name=name)


def _drawn(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    std = config.initializer_range
    is_expert = ".mlp.experts." in name and name.endswith(".down_proj.weight")
    if name.endswith(RESIDUAL) or is_expert:
        std /= (2 * config.num_layers) ** 0.5
    return torch.empty(shape).normal_(0.0, std, generator=stream(seed, name))


def model_state(decoder: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, without copies; a tied head appears once, as the embedding."""
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def write_model(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and model.safetensors (in shards with an index above `shard_bytes`) into an existing folder.

    `state`: parameters by our names, on any device. transformers opens the folder.
    """
    assert parameter_shapes(config).keys() <= state.keys(), "a model is written whole"
    tensors = to_hf_names({name: tensor.detach() for name, tensor in state.items()}, config)
    write_config(config, str(next(iter(tensors.values())).dtype).removeprefix("torch."), folder)
    tensors |= stored_buffers(config)
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}

    def write_shard(file: Path, names: list[str]) -> None:
        save_file({name: tensors[name].cpu() for name in names}, file, metadata={"format": "pt"})

    write_shards(folder, sizes, shard_bytes, write_shard)


def write_model_piecewise(
    produce: Callable[[str], Tensor],
    config: ModelConfig,
    dtype: torch.dtype,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """`write_model` that holds one stored tensor at a time. `produce`: a parameter by our name, in `dtype_in`
    of it."""
    write_config(config, str(dtype).removeprefix("torch."), folder)
    # A stored tensor is made of one parameter, or of several where the family stores them fused.
    locations = tensor_locations(config)
    shapes = unstacked_shapes(config)
    produce_part = parts_of_stacks(produce, config)
    conversions = {
        name: conversion for conversion in _conversions_of(config) for name in conversion.parameters
    }
    parameters_by_stored_name: dict[str, list[str]] = {}
    specs: dict[str, Spec] = {}
    for name, location in locations.items():
        own_dtype = dtype_in(config, name, dtype)
        own_shape = location.stored_shape(shapes[name])
        stored_shapes: tuple[tuple[str, Shape], ...] = ((location.name, own_shape),)
        parameters = [name]
        if (conversion := conversions.get(name)) is not None:
            stored_shapes = conversion.stored
            parameters = list(conversion.parameters)
        for stored_name, stored_shape in stored_shapes:
            listed = parameters_by_stored_name.setdefault(stored_name, [])
            listed += [name for name in parameters if name not in listed]
            specs[stored_name] = (stored_shape, own_dtype)
    buffers = stored_buffers(config)
    specs |= {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.items()}

    made: dict[str, Tensor] = {}  # of the same parameters as the last one, and not written yet

    def stored_tensor(stored_name: str) -> Tensor:
        if stored_name in buffers:
            return buffers[stored_name]
        if stored_name not in made:
            made.clear()
            names = parameters_by_stored_name[stored_name]
            made.update(to_hf_names({name: produce_part(name) for name in names}, config))
        return made.pop(stored_name)

    def write_shard(file: Path, stored_names: list[str]) -> None:
        write_tensors(file, {name: specs[name] for name in stored_names}, stored_tensor)

    sizes = {name: kind.itemsize * math.prod(shape) for name, (shape, kind) in specs.items()}
    write_shards(folder, sizes, shard_bytes, write_shard)


def _conversions_of(config: ModelConfig) -> tuple[StoredConversion, ...]:
    backend = config.transformers_backend
    return () if backend is None else backend.conversions


def parts_of_stacks(
    produce: Callable[[str], Tensor], config: ModelConfig
) -> Callable[[str], Tensor]:
    """Produces a part of a stack of experts by its name, too; the last stack is held for the next one."""
    stack_of_part: dict[str, str] = {}
    if config.transformers_backend is None:
        stack_of_part = {
            part.name: name
            for name, shape in parameter_shapes(config).items()
            for part in expert_parts(name, shape)
        }
    parts_by_stack: dict[str, dict[str, Tensor]] = {}

    def produce_part(name: str) -> Tensor:
        stack = stack_of_part.get(name)
        if stack is None:
            return produce(name)
        if stack not in parts_by_stack:
            parts_by_stack.clear()
            parts_by_stack[stack] = dict(unstacked(stack, produce(stack)))
        return parts_by_stack[stack][name]

    return produce_part


def stored_buffers(config: ModelConfig) -> dict[str, Tensor]:
    """What files keep beside parameters, by the names there."""
    backend = config.transformers_backend
    return {} if backend is None else {b.name: buffer_tensor(b) for b in backend.buffers}


def write_config(config: ModelConfig, dtype: str, folder: Path) -> None:
    """`dtype`: of the weights, as "float32"."""
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    write_json(folder / "config.json", config_to_hf(config) | dtypes)


def write_shards(
    folder: Path,
    sizes: dict[str, int],
    shard_bytes: int,
    write_shard: Callable[[Path, list[str]], None],
) -> None:
    shards = list(split_shards(sizes, shard_bytes))
    if len(shards) == 1:
        write_shard(folder / "model.safetensors", shards[0])
        return

    # Several files need an index, which names the file of each tensor.
    weight_map: dict[str, str] = {}
    for number, tensor_names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file_name, tensor_names)
        for tensor_name in tensor_names:
            weight_map[tensor_name] = file_name
    write_index(folder / INDEX, weight_map, total_bytes=sum(sizes.values()))


def write_index(path: Path, weight_map: Mapping[str, str], *, total_bytes: int) -> None:
    """The file of each tensor, for a model or a part of a checkpoint that is in several."""
    write_json(path, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def read_model(
    decoder: Decoder, folder: Path, *, seed: int | None = None, new: Collection[int] = ()
) -> None:
    """Fills the parameters from the folder's safetensors, tensor by tensor, cast to the dtype that they have.

    Rows of the vocabulary that the folder lacks, and those of `new` tokens, which a padded vocabulary has
    untrained, become the mean of the rows before them: a new token's logit is then the mean of theirs (Hewitt,
    "Initializing New Word Embeddings for Pretrained Language Models", 2021).
    `seed`: a reward model may begin as a language model, and its values head is then drawn. Raises UserError as
    `stored_parameters` does.
    """
    if (
        isinstance(decoder.model, TransformersBackbone)
        and decoder.model.transformers_backend.safe_reason
    ):
        _copy_model(decoder, loaded_safely(decoder.model, folder), new)
        return
    with StoredModel(decoder.config, folder, seed=seed, new=new) as model:
        for name, parameter in base_parameters(decoder):
            if not parameter.is_meta:  # else another rank reads it
                model.fill(name, parameter)
        for name, weight in quantized_weights(decoder):
            if weight.codes.is_meta:
                continue
            if model.is_converted(name):
                weight.fill([model.converted(name).to(weight.device)], name=name)
                continue
            _read_quantized(weight, model, name)


@final
class StoredModel:
    """A folder's tensors as parameters of a config, one at a time; used as a context. `seed` and `new` as `read_model`.

    Raises UserError as `stored_parameters` does.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        *,
        seed: int | None = None,
        new: Collection[int] = (),
    ) -> None:
        backend = "auto" if config.transformers_backend is None else "transformers"
        folder_config = read_config(folder, backend)
        self.config = config
        self.seed = seed
        self.new = new
        self.known = min(config.vocab_size, folder_config.vocab_size)

        # The decoder may have more tokens than the folder: its files are compared with the smaller
        # vocabulary.
        saved_config = folder_config
        if config.transformers_backend is None:
            saved_config = replace(config, vocab_size=self.known)
        # An adapter may have changed one of two weights that the folder ties.
        self.tensors = stored_parameters(
            folder,
            saved_config,
            headless=seed is not None,
            shared_head=folder_config.tie_embeddings,
        )
        self.locations = tensor_locations(config)
        self.reader = TensorReader()
        self._made: dict[str, Tensor] = {}
        self._conversions = {
            name: conversion
            for conversion in _conversions_of(config)
            for name in conversion.parameters
        }

    def __enter__(self) -> Self:
        self.reader.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.reader.__exit__(*raised)

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor) -> None:
        """The stored values are cast to the dtype that the parameter has; of a stack of experts part by part.

        A parameter without data is left to others.
        """
        if parameter.is_meta:
            return
        if self.config.transformers_backend is None:
            for part_name, part in unstacked(name, parameter):
                self._fill_part(part_name, part)
        elif self.is_converted(name):
            put(self.converted(name), parameter)
        else:
            self._fill_part(name, parameter)

    def is_converted(self, name: str) -> bool:
        """Whether transformers makes the parameter of tensors in another form."""
        return name in self._conversions and name not in self.tensors

    def converted(self, name: str) -> Tensor:
        """Such a parameter, on the CPU; those that are made of the same tensors are held for the next call."""
        if name not in self._made:
            backend = self.config.transformers_backend
            conversion = self._conversions[name]
            assert backend is not None
            self._made.clear()
            stored = {name: self.reader.read(self.tensors[name]) for name, _ in conversion.stored}
            self._made.update(made_parameters(backend, conversion, stored))
        return self._made.pop(name)

    def _fill_part(self, name: str, parameter: Tensor) -> None:
        # Only a values head may be missing here: it is drawn from a random stream of its own.
        if name not in self.tensors:
            drawn = torch.empty(parameter.shape)
            drawn.normal_(
                0.0, self.config.initializer_range, generator=stream(self.seed or 0, name)
            )
            put(drawn, parameter)
            return

        # This rank reads its own rows; of a vocabulary, those that the folder has.
        location = self.locations[name]
        start = first_row(parameter)
        local_rows = local(parameter.data)
        if name in VOCABULARY:
            local_rows = local_rows[: max(0, self.known - start)]
        self.reader.fill(
            local_rows,
            self.tensors[name],
            first=start if location.stacked else location.first + start,
            transposed=location.transposed and not location.stacked,
        )
        if name in VOCABULARY:
            fill_new_rows(parameter, self.known, self.new)


def _copy_model(decoder: Decoder, values: Mapping[str, Tensor], new: Collection[int]) -> None:
    for name, parameter in base_parameters(decoder):
        # Of a parameter that is spread over ranks, this one's rows.
        start = first_row(parameter)
        local_rows = local(parameter.data)
        known_rows = values[name][start : start + len(local_rows)]
        local_rows[: len(known_rows)] = known_rows.to(local_rows.device)
        if name in VOCABULARY:
            fill_new_rows(parameter, len(values[name]), new)
    for name, weight in quantized_weights(decoder):
        weight.fill([values[name].to(weight.device)], name=name)


def fill_new_rows(parameter: Tensor, num_known: int, new_ids: Collection[int]) -> None:
    """In place: rows from `num_known` on and those of `new_ids` become the mean of the rows before the first of them.

    The mean is float32. A collective where the rows are spread over ranks.
    """
    rows = sorted({*new_ids, *range(num_known, len(parameter))})
    if not rows:
        return
    start = first_row(parameter)
    local_rows = local(parameter.data)
    mean = full(parameter.data)[: rows[0]].mean(0, dtype=torch.float32)
    new_local_rows = [row - start for row in rows if start <= row < start + len(local_rows)]
    local_rows[new_local_rows] = mean.to(local_rows)


def _read_quantized(weight: QuantizedWeight, model: StoredModel, name: str) -> None:
    """Piece by piece from the file; of a stack of experts part by part. One without data is left to others."""
    if weight.codes.is_meta:
        return
    parts = expert_parts(name, weight.shape)
    if parts:
        pieces = (
            piece for part in parts for piece in _rows_of(weight, model, part.name, part.rows)
        )
        weight.fill(pieces, name=name)
        return
    tensor = model.tensors[name]
    location = model.locations[name]
    # The rows of a transposed matrix lie across the file: the one case where a full matrix is held.
    if location.transposed:
        matrix = torch.empty(weight.shape, dtype=tensor.dtype, device=weight.device)
        model.reader.fill(matrix, tensor, first=location.first, transposed=True)
        weight.fill([matrix], name=name)
        return
    weight.fill(_rows_of(weight, model, name, weight.rows), name=name)


def _rows_of(weight: QuantizedWeight, model: StoredModel, name: str, rows: int) -> Iterator[Tensor]:
    """The rows of a stored parameter in pieces of whole blocks."""
    location = model.locations[name]
    pieces = model.reader.pieces(
        model.tensors[name],
        0 if location.stacked else location.first,
        rows,
        device=weight.device,
        multiple=weight.rows_at_once,
    )
    for _, piece in pieces:
        yield piece
