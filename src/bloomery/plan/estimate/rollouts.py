"""Bytes and seconds of reinforcement learning in addition to the step: sampling completions, and what is kept of them.

A rollout is sampled, rewarded and then trained on for one step or several; all seconds here are those of one step, so
that a rollout's own are shared out among its steps.
"""

import math
from dataclasses import dataclass

from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import flops_per_token, layers
from bloomery.facts.limits import ROLLOUT_SLOTS
from bloomery.hardware.host_links import HostLink
from bloomery.plan.estimate.memory import CPU_RUNTIME, SPREAD, overhead_bytes
from bloomery.plan.estimate.speed import LAUNCH_SECONDS, Rate
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.estimate.streaming import forward_bytes
from bloomery.plan.types import Estimate, MemoryEstimate
from bloomery.recipe.objectives import Rollouts

# Of the matmul rate of a CPU, the share that decoding reaches: every completion reads the weights for itself, so that
# its numbers do not depend on the others. Measured on two cores with AVX2, models of 1.5 to 42 million parameters: 0.07
# to 0.12 where other programs ran, too.
DECODED_PRODUCTS = (0.06, 0.12, 0.40)
# Seconds of Python between two forwards, and of a token's share of one logit, on one core: 13 to 36 ns measured.
FORWARD_SECONDS = (0.5e-3, 1.5e-3, 4e-3)
SAMPLE_SECONDS = (10e-9, 20e-9, 35e-9)
DECODED_LAUNCHES = 30  # kernels of a layer in one forward without gradients
TRANSFER_RATE = 10e9  # bytes per second of logits from a GPU to the CPU that samples
# Seconds of a reward: a call, and each completion. It is the user's code: known once a rollout is measured.
REWARD_CALL = (0.0, 0.01, 0.2)
REWARD_COMPLETION = (0.0, 1e-4, 2e-3)

# Bytes of a logit while tokens are sampled from it: float32 with two copies, three steps of a float64 distribution.
SAMPLED_LOGIT = 28
FILTERED_LOGIT = 24  # more, where top_k, top_p or min_p sort them
# Bytes of Python's numbers: an id with its place in a tuple, a log-probability with its own.
STORED_ID = 40
STORED_LOGP = 32
# Bytes of a token of a packed micro-batch: five integers, four floats. All micro-batches of a step are packed at once.
PACKED_TOKEN = 56
# With a value head: the numbers of a token that Python stores (advantage, value, return), and bytes of a packed token
# for two of them; every policy has packed advantages.
STORED_TARGETS = 3
PACKED_TARGETS = 8
# Of activations and logits on a CPU, more than of a run without rollouts: malloc keeps what sampling and micro-batches
# of other documents leave between live tensors. Measured 0.4 to 0.8 on three runs: docs/explanation/memory.md
ROLLOUT_FRAGMENTATION = 0.55
LANES = 16  # the compiled step pads the rank of LoRA to so many


@dataclass(frozen=True, kw_only=True)
class RolloutShape:
    """The properties of a rollout that determine its memory and its time, on one rank.

    `step`: the training step, with its micro-batch. `num_prompts`: those that this rank samples completions of;
    `trained_completions`: those that it trains on, which may be others; `all_completions`: of all ranks, which every
    rank keeps. `longest_prompt` in tokens; `prompt_tokens` and `completion_tokens` on average. `steps_per_pass`: each
    trains on a part of the completions. `scored_passes`: forwards over the whole rollout before its first step.
    `whole_copy`: the rank has a part of the weights, and gathers a copy of all of them to sample with.
    """

    step: StepShape
    num_prompts: int
    trained_completions: int
    all_completions: int
    num_generations: int
    num_steps: int
    prompt_tokens: float
    longest_prompt: int
    completion_tokens: Estimate
    max_completion_length: int
    filters: bool
    scored_passes: int
    steps_per_pass: int = 1
    has_values: bool = False  # of a value head: each token has a value, an advantage and a return
    whole_copy: bool = False
    reward_parameters: int = 0  # of reward models, of which each rank has a whole copy

    @property
    def config(self) -> ModelConfig:
        return self.step.config

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.num_generations

    @property
    def slots(self) -> int:
        """Completions that are decoded at once."""
        return min(ROLLOUT_SLOTS, self.num_completions)

    @property
    def slot_tokens(self) -> int:
        """Tokens that a slot has room for."""
        return self.longest_prompt + self.max_completion_length

    def micro_batches(self, completion_tokens: float) -> int:
        """Of a step, with completions of that mean length packed next to each other."""
        tokens = self.prompt_tokens + completion_tokens
        samples_per_sequence = max(1, int(self.step.sequence_length / max(1.0, tokens)))
        samples = self.trained_completions / self.steps_per_pass
        sequences = math.ceil(samples / samples_per_sequence)
        return max(1, math.ceil(sequences / self.step.micro_batch_size))


def completion_tokens_of(objective: Rollouts, config: ModelConfig, *, fresh: bool) -> Estimate:
    """The mean length of completions, unknown until some are sampled.

    Fresh weights sample every token equally often, also the one that ends a completion. A trained model may end after a
    word or never.
    """
    max_tokens = float(objective.max_completion_length)
    if not fresh:
        return Estimate(value=max_tokens / 2, low=max_tokens / 10, high=max_tokens, origin="table")
    share_of_ends = 1 / config.vocab_size
    mean = (1 - (1 - share_of_ends) ** max_tokens) / share_of_ends
    return Estimate(value=mean, low=mean / 2, high=max_tokens, origin="table")


def sampling_memory(shape: RolloutShape, training: MemoryEstimate) -> MemoryEstimate:
    """The peak while completions are sampled, by part. `training`: of the step, whose weights and states stay."""
    parts = {
        name: size
        for name, size in training.parts.items()
        if name
        in (
            *("weights", "layer buffers", "adapter", "optimizer"),
            *("reference model", "teacher", "vision tower"),
        )
    }
    parts |= sampling_parts(shape) | reward_model_parts(shape)
    if shape.whole_copy:
        parts["whole copy"] = whole_copy_bytes(shape)
    if shape.step.on_gpu:
        parts |= {"fragmentation": overhead_bytes(shape.step, parts)["fragmentation"]}
    # Contexts of the device and of its collectives, which no allocator fragments.
    parts |= {
        name: training.parts[name] for name in ("context", "collectives") if name in training.parts
    }
    if "runtime" in training.parts:
        parts["runtime"] = max(training.parts["runtime"], float(CPU_RUNTIME))
    total = sum(parts.values())
    return training.model_copy(
        update={"parts": parts, "low": total * (1 - SPREAD), "high": total * (1 + SPREAD)}
    )


def whole_copy_bytes(shape: RolloutShape) -> float:
    model = shape.step.model
    return float(model.weight_bytes(shape.step.precision) + model.adapter_bytes)


def sampling_parts(shape: RolloutShape) -> dict[str, float]:
    """Bytes that exist while completions are sampled, and only then."""
    config = shape.config
    step = shape.step
    # Keys and values have the dtype of the embeddings on a CPU, whose compiled code widens them, of matmuls elsewhere.
    value_bytes = step.residual_bytes if not step.on_gpu else step.element_bytes
    cache_bytes = float(
        sum(layer.cached_bytes(shape.slot_tokens, value_bytes) for layer in layers(config))
    )
    logit_bytes = SAMPLED_LOGIT + (FILTERED_LOGIT if shape.filters else 0)
    if step.on_gpu:  # the CPU samples
        logit_bytes = 4 + step.element_bytes
    # A prompt has a cache of its own, as long as a slot; the next one is made before the last is dropped.
    widest = max(layer.intermediate_size for layer in layers(config))
    prompt_bytes = step.element_bytes * shape.longest_prompt * (2 * widest + 4 * config.hidden_size)
    parts = {
        "KV cache": shape.slots * cache_bytes,
        "prompt": 2 * cache_bytes + prompt_bytes,
        "sampling logits": float(logit_bytes * shape.slots * config.vocab_size),
    }
    if not step.on_gpu:
        parts["decoding copies"] = decoding_copies(shape)
        parts["rollout"] = rollout_bytes(shape)
    return parts


def decoding_copies(shape: RolloutShape) -> float:
    """Bytes that the compiled step of a CPU copies: LoRA matrices in float32, an int8 head of int8 weights, norms."""
    step = shape.step
    rank = max((rank for _, rank in step.mode.target_modules), default=0)
    padded_share = -(-rank // LANES) * LANES / rank if rank else 0.0
    adapter_values = sum(math.prod(shape) for shape in step.model.adapter.values())
    head_bytes = 0.0
    if step.mode.quantize_kind == "int8":
        head_bytes = step.config.vocab_size * step.config.hidden_size * 1.07
    return 4.0 * padded_share * adapter_values + head_bytes


def rollout_bytes(shape: RolloutShape) -> float:
    """Bytes of the rollout that is trained on: ids, log-probabilities as sampled and under the old model, as Python has
    them. On a CPU they share its memory.
    """
    numbers = 2 if shape.scored_passes else 1
    if shape.has_values:
        numbers += STORED_TARGETS
    completion_bytes = shape.completion_tokens.value * (STORED_ID + numbers * STORED_LOGP)
    return shape.all_completions * (shape.prompt_tokens * STORED_ID + completion_bytes)


def packed_bytes(shape: RolloutShape) -> float:
    """Bytes of all micro-batches of a step; a rank that has a part of each sequence keeps all of it for the loss."""
    micro_batches = shape.micro_batches(shape.completion_tokens.value)
    token_bytes = PACKED_TOKEN + (PACKED_TARGETS if shape.has_values else 0)
    context = shape.step.context
    kept_tokens = shape.step.tokens_per_micro_batch * (1 if context == 1 else 1 + context)
    return float(token_bytes * micro_batches * kept_tokens)


def reward_model_parts(shape: RolloutShape) -> dict[str, float]:
    """Bytes of the weights of reward models, in the dtype of matmuls; their forwards need less than a step's."""
    if not shape.reward_parameters:
        return {}
    return {"reward models": float(shape.reward_parameters * shape.step.element_bytes)}


def with_stored_rollout(shape: RolloutShape, training: MemoryEstimate) -> MemoryEstimate:
    """The step's memory with reward models, and with the rollout that it trains on, which a GPU does not hold."""
    parts = training.parts | reward_model_parts(shape)
    if not shape.step.on_gpu:
        parts["rollout"] = rollout_bytes(shape) + packed_bytes(shape)
        freed_bytes = ROLLOUT_FRAGMENTATION * (parts["activations"] + parts["logits"])
        parts["fragmentation"] = parts.get("fragmentation", 0.0) + freed_bytes
    kept_bytes = sum(parts.values()) - training.total
    return training.model_copy(
        update={
            "parts": parts,
            "low": training.low + kept_bytes * (1 - SPREAD),
            "high": training.high + kept_bytes * (1 + SPREAD),
        }
    )


def generation_seconds(
    shape: RolloutShape, rate: Rate, link: HostLink | None = None
) -> Estimate | None:
    """Of one step: the rollout's sampling, divided by its steps. `rate`: of this rank. `link`: over which weights
    stream; None where it is unknown how long they take.
    """
    if shape.step.stream != "off" and link is None:
        return None
    low, typical, high = (
        _sampling_seconds(shape, rate, tokens, pace)
        + (_copy_seconds(shape, link, tokens, pace) if link else 0.0)
        for tokens, pace in (
            (shape.completion_tokens.low, 0),
            (shape.completion_tokens.value, 1),
            (shape.completion_tokens.high, 2),
        )
    )
    return Estimate(value=typical, low=low, high=high, origin="table").scaled(1 / shape.num_steps)


def _forwards(shape: RolloutShape, tokens: float) -> float:
    """The last completions run alone: there are at least as many forwards as the longest one has tokens."""
    longest = min(2 * tokens, float(shape.max_completion_length))
    return max(longest, shape.num_completions * tokens / shape.slots)


def _copy_seconds(shape: RolloutShape, link: HostLink, tokens: float, pace: int) -> float:
    """Of streamed weights, which a forward of few tokens cannot hide: in each of them, and once for each prompt."""
    if shape.step.stream == "off":
        return 0.0
    copied = _forwards(shape, tokens) * forward_bytes(shape.step, shape.slots)
    copied += shape.num_prompts * forward_bytes(shape.step, max(1, round(shape.prompt_tokens)))
    spread = (link.spread, 1.0, 1 / link.spread)[pace]
    return copied / (link.to_device_gbs * 1e9 * spread)


def _sampling_seconds(shape: RolloutShape, rate: Rate, tokens: float, pace: int) -> float:
    """`tokens` of each completion on average; `pace`: 0 the fastest that is likely, 2 the slowest."""
    step = shape.step
    config = shape.config
    sampled_tokens = shape.num_completions * tokens
    forwards = _forwards(shape, tokens)
    token_flops = flops_per_token(config, shape.slot_tokens // 2, backward=False)
    product_share = rate.share[2 - pace]
    prompt_seconds = (
        shape.num_prompts * shape.prompt_tokens * token_flops / (rate.peak * product_share)
    )
    choosing = SAMPLE_SECONDS[pace] * sampled_tokens * config.vocab_size
    forward_seconds = FORWARD_SECONDS[pace] * forwards
    if not step.on_gpu:
        decoded_rate = rate.peak * DECODED_PRODUCTS[2 - pace]
        return (
            prompt_seconds
            + sampled_tokens * token_flops / decoded_rate
            + choosing
            + forward_seconds
        )

    # A forward of few tokens reads every weight, and waits for the launches of its kernels.
    model = step.model
    read_bytes = model.weight_bytes(step.precision) + model.adapter_bytes
    if step.mixed and not step.mode.frozen:  # autocast copies them
        read_bytes *= 2
    read_bytes += sampling_parts(shape)["KV cache"] / 2
    bandwidth = (rate.bandwidth or math.inf) * rate.bandwidth_share[2 - pace]
    launching = DECODED_LAUNCHES * config.num_layers * LAUNCH_SECONDS
    reading = max(launching, read_bytes / bandwidth)
    copying = 4.0 * shape.slots * config.vocab_size / TRANSFER_RATE
    prompt_seconds += shape.num_prompts * launching
    return prompt_seconds + forwards * (reading + copying) + forward_seconds + choosing


def reward_seconds(shape: RolloutShape, num_completions: int) -> Estimate:
    """Of one step. `num_completions`: of all ranks, the first of which calls the rewards."""
    low, typical, high = (
        call_seconds + num_completions * completion_seconds
        for call_seconds, completion_seconds in zip(REWARD_CALL, REWARD_COMPLETION, strict=True)
    )
    return Estimate(value=typical, low=low, high=high, origin="table").scaled(1 / shape.num_steps)
