"""A model of a run's widths with one or two layers: as the run builds it, and the same weights in float32 on the CPU.

B batch, T time.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import final

import torch
from torch import Tensor

from bloomery.check.comparison import SEED
from bloomery.check.rounding import device_roundoff
from bloomery.data.batch import Batch
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import layers
from bloomery.facts.limits import SCALES_BLOCK, WEIGHTS_BLOCK
from bloomery.infer.forward import matmul_dtype
from bloomery.model.adapters.lora import adapted, adapted_stacks, note_base
from bloomery.model.adapters.settings import modules_to_save, target_modules
from bloomery.model.attention.triton_attention import arch_of
from bloomery.model.decoder import Decoder
from bloomery.model.experts import Router
from bloomery.model.io.parameters import put, stream
from bloomery.model.io.quantized import NF4_LEVELS, Buffers, dynamic_levels
from bloomery.model.io.weights import quantized_weights
from bloomery.plan.types import DataPlan, RunPlan
from bloomery.recipe.objectives import Pretrain
from bloomery.recipe.schema import Adapter, Lora, Quantize
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.objective import Objective
from bloomery.train.state import build_state
from bloomery.train.step import ModelAndOptimizer

NUM_LAYERS = 2
# Parameters in the layers; where two have more, one has to do: the CPU computes it in float32.
LARGEST = 2**28
# No multiple of a tile of any kernel, and longer than most tiles. Three documents, of which none is a multiple either.
DOCUMENT_LENGTHS = (61, 80, 32)
LENGTH = sum(DOCUMENT_LENGTHS)
WINDOW = 61  # of layers whose window is shorter than the run's sequences: it is shorter than these sequences, too
# Of a larger one as many, and the rest modulo 128: kernels divide by such numbers.
VOCABULARY = 4096
NARROW = 2048  # a wider model takes one sequence
MASKED_SHARE = 0.2  # of the labels, as in fine-tuning
# Relative to what they are next to, so that every part counts: gains other than 1, biases other than 0, and an adapter
# that has learned something.
GAIN_DEVIATION = 0.2
BIAS_DEVIATION = 0.1
ADAPTER_SHARE = 0.3
EMBEDDINGS = ("model.embed_tokens.weight", "model.embed_positions.weight")


def small_plan(plan: RunPlan) -> RunPlan:
    """The run's widths, heads, precision, attention, optimizer, adapter, quantization and compilation, on one device.

    Next-token loss of one micro-batch, without dropout. An optimizer that is fused into backward updates after it: its
    arithmetic is the same, and its gradients can be looked at.
    """
    full_config = plan.model.config
    config = small_config(full_config, plan.data.sequence_length)
    length = min(LENGTH, plan.data.sequence_length)
    if config.positions == "learned":
        length = min(length, config.max_positions)
    sequences = 2 if config.hidden_size <= NARROW else 1
    num_tokens = sequences * length
    model = plan.model.model_copy(
        update={
            "config": config,
            "source": None,
            "new_ids": (),
            # Two chunks at least, of which the last one is not full.
            "score_chunk": min(plan.model.score_chunk, num_tokens // 2 + 16),
        }
    )
    train = plan.train.model_copy(
        update={
            "tokens_per_step": num_tokens,
            "micro_batch_size": sequences,
            "accumulation": 1,
            "empty_sequences": 0,
            "neftune_alpha": None,
            "ema_decay": None,
            "replicate": 1,
            "shard": 1,
            "pipeline": 1,
            "context": 1,
            "pipeline_layers": (),
            # Parts are looked at one by one, on the device: weights that stream are the same numbers there.
            "stream": "off",
            "stream_micro_batches": 1,
            "seed": SEED,
        }
    )
    return plan.model_copy(
        update={
            "model": model,
            "train": train,
            "data": plan.data.model_copy(update={"sequence_length": length}),
            "optimizer": plan.optimizer.model_copy(update={"fused_backward": False}),
            "adapter": small_adapter(plan.adapter, full_config),
            "objective": Pretrain(),
            "rewards": (),
            "rollout": None,
            "parallel": None,
        }
    )


def small_config(config: ModelConfig, sequence_length: int) -> ModelConfig:
    """The first layer of each kind: with and without a window, rotated and not, of each of its sizes."""
    # A layer that uses the keys of another computes nothing else than that one.
    kinds = {
        layer.number: replace(layer.kind, lends_keys=False)
        for layer in layers(config)
        if layer.keys_of is None
    }
    first_of_kinds = {kind: number for number, kind in reversed(kinds.items())}
    ordered = dict.fromkeys([*reversed(first_of_kinds.values()), *kinds])
    chosen_layers = sorted([*ordered][:NUM_LAYERS])
    largest_layer = max(layer.total_parameters for layer in layers(config))
    if NUM_LAYERS * largest_layer > LARGEST:
        chosen_layers = chosen_layers[:1]

    def window(number: int) -> int | None:
        size = layers(config)[number].window
        return WINDOW if size is not None and size < sequence_length else size

    vocab_size = config.vocab_size
    if vocab_size > VOCABULARY + 128:
        vocab_size = VOCABULARY + vocab_size % 128
    return replace(
        config,
        num_layers=len(chosen_layers),
        vocab_size=vocab_size,
        sliding_window=tuple(map(window, chosen_layers)) if config.sliding_window else (),
        rotary_layers=tuple(config.rotary_layers[layer] for layer in chosen_layers)
        if config.rotary_layers
        else (),
        layer_sizes=tuple(config.layer_sizes[layer] for layer in chosen_layers)
        if config.layer_sizes
        else (),
        num_kv_shared_layers=0,
        mixers=tuple(config.mixers[layer] for layer in chosen_layers) if config.mixers else (),
        head="tokens",
        embedding_dropout=0.0,
        residual_dropout=0.0,
        attention_dropout=0.0,
    )


def small_adapter(adapter: Adapter, config: ModelConfig) -> Adapter:
    """The adapter without dropout. Its modules by their last names: a pattern may mean layers that are not here."""
    if not isinstance(adapter, Lora):
        return adapter
    saved_modules = modules_to_save(config, adapter.modules_to_save)
    return adapter.model_copy(
        update={
            "dropout": 0.0,
            "rank_pattern": {},  # of layers that may not be here
            "alpha_pattern": {},
            "target_modules": _last_names(target_modules(config, adapter.target_modules)),
            "modules_to_save": _last_names(saved_modules),
        }
    )


def _last_names(modules: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(module.rpartition(".")[2] for module in modules))


def small_batch(data: DataPlan, *, sequences: int, vocab_size: int) -> Batch:
    """Random tokens in the layout: packed documents, padding at the end of a row, or one text."""
    length = data.sequence_length
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(vocab_size, (sequences, length + 1), generator=generator)
    trained_on = torch.rand(sequences, length, generator=generator) >= MASKED_SHARE

    # Documents of every row in another order. `fixed` has none; `padded` has one, and padding after it.
    documents = torch.zeros(sequences, length, dtype=torch.int64)
    if data.layout == "packed" and length == LENGTH:
        for row in range(sequences):
            lengths = torch.tensor([*DOCUMENT_LENGTHS[row:], *DOCUMENT_LENGTHS[:row]])
            documents[row] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    elif data.layout == "packed":
        documents[:, length // 3 :] = 1
    elif data.layout == "padded":
        documents[:, -(length // 8) :] = -1
    number_T = torch.arange(length)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(is_first, number_T, 0).cummax(1).values
    ends = torch.roll(is_first, -1, 1)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=(trained_on & ~ends & (documents >= 0)).float(),
        positions=number_T - starts,
        documents=documents,
    )


@final
@dataclass(frozen=True)
class Side:
    """One of the two: the model, its optimizer and the plan that both were built from."""

    plan: RunPlan
    model_and_optimizer: ModelAndOptimizer

    @property
    def model(self) -> Decoder:
        return self.model_and_optimizer.model

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.plan.train.device)

    def roundoff(self, *, in_attention: bool = False) -> float:
        """Of matmuls in the plan's precision on this device."""
        dtype = matmul_dtype(self.plan.train.precision)
        arch = arch_of(self.device)
        return device_roundoff(dtype, self.device, arch=arch, in_attention=in_attention)

    @cached_property
    def objective(self) -> Objective:
        return build_objective(self.plan)


@final
@dataclass(frozen=True)
class ModelPair:
    """`tested`: as the run computes it, on its device. `exact`: float32 on the CPU, with `math` attention, uncompiled,
    from plain weights. Both have the same numbers as weights, and the same batch.
    """

    tested: Side
    exact: Side
    batch: Batch

    def sides(self) -> tuple[Side, Side]:
        return self.tested, self.exact


def exact_plan(plan: RunPlan) -> RunPlan:
    """The plan of `ModelPair.exact`."""
    train = {
        "device": "cpu",
        "precision": "float32",
        "compile": False,
        "activation_checkpointing": "none",
        "offload_activations": False,
    }
    optimizer = {
        "fused": False,
        "offload": False,
        "state_dtype": "float32",
        "stochastic_rounding": False,
    }
    adapter = plan.adapter
    if isinstance(adapter, Lora):
        adapter = adapter.model_copy(update={"dtype": "float32"})
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"attention": "math", "scores": "torch"}),
            "adapter": adapter,
            "train": plan.train.model_copy(update=train),
            "optimizer": plan.optimizer.model_copy(update=optimizer),
            "quantize": Quantize(),
            "quantized_by": "torch",
        }
    )


def build_pair(plan: RunPlan) -> ModelPair:
    """Builds both models of a `small_plan` with the run's own code. Raises what building a run raises."""
    tested = Side(plan, trained_part(plan))
    disturb_weights(tested.model)
    plan_on_cpu = exact_plan(plan)
    exact = Side(plan_on_cpu, trained_part(plan_on_cpu))
    copy_weights(tested.model, exact.model)
    for side in (tested, exact):
        take_turns(side.model)
    batch = small_batch(
        plan.data,
        sequences=plan.train.micro_batch_size,
        vocab_size=plan.model.config.vocab_size,
    )
    return ModelPair(tested, exact, batch)


def take_turns(model: Decoder) -> None:
    """In place: experts are chosen in turn. By their scores, two nearly equal ones would be chosen by rounding, and the
    two models would compute different things; the weights are still those of the scores.
    """
    for module in model.modules():
        if isinstance(module, Router):
            in_turn = partial(_in_turn, per_token=module.facts.per_token)
            module.chosen = in_turn  # type: ignore[method-assign]  # the choice of this model alone


def _in_turn(scores_NE: Tensor, per_token: int) -> Tensor:
    tokens, count = scores_NE.shape
    turns = torch.arange(tokens * per_token, device=scores_NE.device)
    return (turns % count).view(tokens, per_token)


def trained_part(plan: RunPlan) -> ModelAndOptimizer:
    """Without the schedule of a method of PEFT, such as AdaLoRA's, which changes ranks between two equal steps."""
    model_and_optimizer = build_state(plan).model_and_optimizer
    model_and_optimizer.peft_adapter = None
    return model_and_optimizer


@torch.no_grad()
def disturb_weights(model: Decoder) -> None:
    """Gives embeddings, gains, biases and adapters values as after some training, in place.

    With gains of 1, biases and LoRA matrices of 0 a device that leaves them out would compute the same. With embeddings
    of a fresh model, which are small next to what the first layer adds, all tokens would look alike to the second one,
    and its gradients would be differences of nearly equal numbers.
    """
    config = model.config
    offset = 1.0 if config.norm.endswith("unit_offset") else 0.0
    # Factors of what a fresh model has: the residual stream begins with numbers of size 1, and logits stay as they are.
    embedding_scale = 1.0 / config.initializer_range
    if config.scale_embeddings:
        embedding_scale /= config.hidden_size**0.5
    embedding_scale /= config.embedding_multiplier
    logit_scale = 1.0 / embedding_scale if config.tie_embeddings else 1.0
    for name, parameter in model.named_parameters():
        if name in EMBEDDINGS:
            parameter.mul_(embedding_scale)
        elif name == "model.embed_tokens_per_layer.weight":
            parameter.div_(config.initializer_range * config.per_layer_input_size**0.5)
        elif name.endswith("norm.weight"):
            gains = (parameter.float().cpu() + offset) * (
                1 + GAIN_DEVIATION * noise(name, parameter)
            )
            gains *= logit_scale if name == "model.norm.weight" else 1.0
            put(gains - offset, parameter)
        elif name.endswith(".bias") or not parameter.any():
            put(BIAS_DEVIATION * noise(name, parameter), parameter)
        elif parameter.ndim == 1:
            put(parameter.float().cpu() * (1 + GAIN_DEVIATION * noise(name, parameter)), parameter)
    for name, module in adapted(model):
        # B A x with x of size 1 is to be a share of what W x is, about 1: A x has the size sqrt(1 / 3).
        if not module.pissa:
            deviation = ADAPTER_SHARE / (module.scale * (module.rank / 3) ** 0.5)
            put(noise(f"{name}.lora_B", module.lora_B) * deviation, module.lora_B)
    for name, stack in adapted_stacks(model):
        deviation = ADAPTER_SHARE / (stack.scale * (stack.rank / 3) ** 0.5)
        put(noise(f"{name}.lora_B", stack.lora_B) * deviation, stack.lora_B)


def noise(name: str, parameter: Tensor) -> Tensor:
    """Normal numbers for a parameter, float32 on the CPU."""
    return torch.empty(parameter.shape).normal_(generator=stream(SEED, f"{name}, disturbed"))


@torch.no_grad()
def copy_weights(tested: Decoder, exact: Decoder) -> None:
    """The numbers that the tested model computes with become those of the exact one."""
    exact_tensors: dict[str, Tensor] = {
        **dict(exact.named_parameters()),
        **dict(exact.named_buffers()),
    }
    for name, tensor in (*tested.named_parameters(), *tested.named_buffers()):
        if name in exact_tensors and exact_tensors[name].shape == tensor.shape:
            exact_tensors[name].copy_(tensor)
    for name, weight in quantized_weights(tested):
        exact_tensors[name].copy_(exact_weight(weight.stored).view(weight.shape))
    note_base(exact)


def exact_weight(stored: Buffers) -> Tensor:
    """Dequantized by its definition, in float64 [O, I]: the level of each code times the scale of its block of 64."""
    num_values = stored.outputs * stored.inputs
    codes = stored.codes.cpu()
    if codes.dtype == torch.uint8:
        two_codes = torch.stack([codes >> 4, codes & 15], dim=1).view(-1)[:num_values]
        values = torch.tensor(NF4_LEVELS, dtype=torch.float64)[two_codes.long()]
    else:
        values = codes.double()

    # Scales may be codes themselves: a level times the scale of 256 of them, plus the mean of all.
    if stored.outer.numel():
        outer = stored.outer.cpu().view(torch.float32).double()
        levels = dynamic_levels(torch.device("cpu")).double()[stored.scales.cpu().long()]
        scales = levels * outer[:-1].repeat_interleave(SCALES_BLOCK)[: len(levels)] + outer[-1]
    else:
        scales = stored.scales.cpu().view(torch.float32).double()
    values *= scales.repeat_interleave(WEIGHTS_BLOCK)[:num_values]
    return values.view(stored.outputs, stored.inputs)
