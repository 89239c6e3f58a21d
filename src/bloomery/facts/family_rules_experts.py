"""Between the keys of mixtures of experts in a config.json and `config.Experts`, both ways."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bloomery.core.errors import UserError
from bloomery.facts.config import Experts, LatentAttention, ModelConfig
from bloomery.facts.config_fields import FIX, LARGEST, Fields, HfKeys, ModelFacts
from bloomery.facts.family_rules import (
    first_window,
    qwen3_5_mixers,
    windows_by_type,
    windows_everywhere,
    write_qwen3_5,
)

# What files call the number of experts; a config class may write another one than it reads.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LARGEST_COUNT = 2**14


def experts_of(
    fields: Fields, *, width_key: str, per_token_key: str = "num_experts_per_tok", **facts: Any
) -> Experts:
    """By the keys that most families share. `facts`: fields of `Experts` that the family states, or its own keys do.

    Raises UserError where a token would meet more experts than there are.
    """
    count = expert_count(fields)
    per_token = fields.size(per_token_key, LARGEST_COUNT)
    if per_token > count:
        raise UserError(
            f"{per_token_key} is {per_token}, and there are {count} experts",
            where=fields.where,
            fix=FIX,
        )
    stated = {
        "width": fields.size(width_key, LARGEST["intermediate_size"]),
        "balance": fields.number("router_aux_loss_coef", high=1e3, default=0.0),
    }
    return Experts(count=count, per_token=per_token, **(stated | facts))


def expert_count(fields: Fields) -> int:
    """Raises UserError where a file has two numbers under two names."""
    stated = {key: fields.values[key] for key in COUNTS if key in fields.values}
    if len(set(map(str, stated.values()))) > 1:
        listed = " and ".join(f"{key} {str(value)[:20]}" for key, value in stated.items())
        raise UserError(
            f"two numbers of experts: {listed}", where=fields.where, fix="leave one of them out"
        )
    default = next((key for key in COUNTS if key in fields.defaults), COUNTS[0])
    return fields.size(next(iter(stated), default), LARGEST_COUNT)


def expert_keys(
    config: ModelConfig,
    *,
    count_key: str,
    width_key: str,
    per_token_key: str = "num_experts_per_tok",
) -> HfKeys:
    """Undoes `experts_of`."""
    experts = config.experts
    assert experts is not None
    return {
        count_key: experts.count,
        per_token_key: experts.per_token,
        width_key: experts.width,
        "router_aux_loss_coef": experts.balance,
    }


def qwen_experts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Qwen's models, in which some layers may have an MLP."""
    return {
        "experts": experts_of(
            fields,
            width_key="moe_intermediate_size",
            normalize=fields.flag("norm_topk_prob"),
            layers=_layers_of_qwen(fields, facts["num_layers"]),
        )
    }


def _layers_of_qwen(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    step = fields.size("decoder_sparse_step", 2**12, default=1)
    plain = fields.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(number) is int for number in plain):
        raise fields.refuse("mlp_only_layers", "a list of layers")
    has_experts = tuple((n + 1) % step == 0 and n not in plain for n in range(num_layers))
    return () if all(has_experts) else has_experts


def write_qwen_experts(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    plain = [number for number, has_experts in enumerate(experts.layers) if not has_experts]
    return {
        **expert_keys(config, count_key="num_experts", width_key="moe_intermediate_size"),
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": plain,
    }


def windows_of_qwen3_moe(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """All layers or none: its class reads no `layer_types`."""
    return windows_everywhere(fields, layers) if fields.flag("use_sliding_window") else ()


def write_qwen3_moe(config: ModelConfig) -> HfKeys:
    slides = config.sliding_window != ()
    return {
        "sliding_window": first_window(config),
        "use_sliding_window": slides,
        **write_qwen_experts(config),
    }


def qwen_shared_experts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Qwen's models with an expert that every token meets, behind a gate."""
    experts: Experts = qwen_experts(fields, facts)["experts"]
    return {"experts": replace(experts, **_shared_of_qwen(fields))}


def write_qwen_shared_experts(config: ModelConfig) -> HfKeys:
    return write_qwen_experts(config) | _shared_keys_of_qwen(config)


def _shared_of_qwen(fields: Fields) -> ModelFacts:
    width = fields.size("shared_expert_intermediate_size", LARGEST["intermediate_size"])
    return {"shared_width": width, "shared_gate": True}


def _shared_keys_of_qwen(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    return {"shared_expert_intermediate_size": experts.shared_width}


def windows_of_qwen2_moe(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Each second one of the first layers, where the file does not say which."""
    if not fields.flag("use_sliding_window"):
        return ()
    windowed_layers = fields.number("max_window_layers", default=layers)
    return windows_by_type(fields, layers, lambda n: (n + 1) % 2 == 1 and n < windowed_layers)


def qwen3_next_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Qwen3.5's mixers, whose matrices have the rows of each key head together."""
    mixers = qwen3_5_mixers(fields, facts)
    delta_net = replace(mixers["delta_net"], projections="by_head")
    return {**mixers, "delta_net": delta_net, **qwen_shared_experts(fields, facts)}


def write_qwen3_next(config: ModelConfig) -> HfKeys:
    return write_qwen3_5(config) | write_qwen_shared_experts(config)


def qwen3_5_moe_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Every layer has experts, and their weights always sum to 1."""
    experts = experts_of(
        fields, width_key="moe_intermediate_size", normalize=True, **_shared_of_qwen(fields)
    )
    return {**qwen3_5_mixers(fields, facts), "experts": experts}


def write_qwen3_5_moe(config: ModelConfig) -> HfKeys:
    return {
        **write_qwen3_5(config),
        **expert_keys(config, count_key="num_experts", width_key="moe_intermediate_size"),
        **_shared_keys_of_qwen(config),
    }


def lfm2_experts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Sigmoids with a bias of the choice, and MLPs in the first layers. No loss evens the load."""
    dense = fields.get("num_dense_layers")
    if type(dense) is not int or dense < 0:
        raise fields.refuse("num_dense_layers", "a number of layers")
    experts = experts_of(
        fields,
        width_key="moe_intermediate_size",
        scores="sigmoid",
        normalize=fields.flag("norm_topk_prob"),
        least_sum=1e-6,
        weight_scale=fields.number("routed_scaling_factor"),
        choice_bias=fields.flag("use_expert_bias"),
        layers=_all_but_first(dense, facts["num_layers"]),
    )
    return {"experts": replace(experts, balance=0.0)}


def _all_but_first(dense: int, num_layers: int) -> tuple[bool, ...]:
    return tuple(number >= dense for number in range(num_layers)) if dense else ()


def write_lfm2_experts(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    keys = expert_keys(config, count_key="num_experts", width_key="moe_intermediate_size")
    del keys["router_aux_loss_coef"]
    return keys | {
        "num_dense_layers": experts.layers.count(False),
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.weight_scale,
        "use_expert_bias": experts.choice_bias,
    }


def ernie_experts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """A softmax with a bias of the choice, shared experts without a gate, and a float32 router."""
    num_layers = facts["num_layers"]
    shared = fields.get("moe_num_shared_experts") or 0
    if type(shared) is not int or not 0 <= shared <= LARGEST_COUNT:
        raise fields.refuse("moe_num_shared_experts", "a number of experts")
    first = int(fields.number("moe_layer_start_index"))
    last = int(fields.number("moe_layer_end_index", low=-1))
    interval = fields.size("moe_layer_interval", 2**12)
    last = num_layers - 1 if last == -1 else last
    has_experts = tuple((n + 1) % interval == 0 and first <= n <= last for n in range(num_layers))
    experts = experts_of(
        fields,
        width_key="moe_intermediate_size",
        per_token_key="moe_k"
        if "num_experts_per_tok" not in fields.values
        else "num_experts_per_tok",
        normalize=True,
        least_sum=fields.number("moe_norm_min", high=1.0),
        clamps_sum=True,
        choice_bias=True,
        boxed_choice_bias=True,
        float32_router=True,
        layers=() if all(has_experts) else has_experts,
    )
    # Its attention has no dropout, whatever the config says.
    shared_width = shared * experts.width
    return {"experts": replace(experts, shared_width=shared_width), "attention_dropout": 0.0}


def write_ernie_experts(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    has_experts = experts.layers or (True,) * config.num_layers
    numbers = [n for n, entry in enumerate(has_experts) if entry]
    interval = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return {
        **expert_keys(
            config,
            count_key="moe_num_experts",
            width_key="moe_intermediate_size",
            per_token_key="moe_k",
        ),
        "moe_num_shared_experts": experts.shared_width // experts.width,
        "moe_layer_start_index": numbers[0] if numbers else config.num_layers,
        "moe_layer_end_index": numbers[-1] if numbers else config.num_layers,
        "moe_layer_interval": interval,
        "moe_norm_min": experts.least_sum,
    }


def mixtral_experts(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    return {"experts": experts_of(fields, width_key="intermediate_size", normalize=True)}


def write_mixtral_experts(config: ModelConfig) -> HfKeys:
    keys = expert_keys(config, count_key="num_local_experts", width_key="intermediate_size")
    windows = config.sliding_window
    return keys | {"sliding_window": windows[0] if windows else None}


def olmoe_experts(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    normalize = fields.flag("norm_topk_prob")
    return {"experts": experts_of(fields, width_key="intermediate_size", normalize=normalize)}


def write_olmoe_experts(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    keys = expert_keys(config, count_key="num_experts", width_key="intermediate_size")
    return keys | {"norm_topk_prob": experts.normalize}


def deepseek_experts(fields: Fields, facts: ModelFacts) -> Experts:
    """Sigmoids, a bias for the choice and groups, as in DeepSeek-V3 (arXiv:2412.19437), GLM 4.5 and dots.llm1."""
    width = fields.size("moe_intermediate_size", LARGEST["intermediate_size"])
    shared = fields.size("n_shared_experts", LARGEST_COUNT) if fields.get("n_shared_experts") else 0
    groups = fields.size("n_group", LARGEST_COUNT, default=1)
    return experts_of(
        fields,
        width_key="moe_intermediate_size",
        scores="sigmoid",
        normalize=fields.flag("norm_topk_prob"),
        least_sum=1e-20,
        weight_scale=fields.number("routed_scaling_factor", default=1.0),
        choice_bias=True,
        groups=groups,
        groups_per_token=fields.size("topk_group", LARGEST_COUNT, default=1),
        best_of_group=2 if groups > 1 else 1,
        shared_width=shared * width,
        layers=_layers_after(fields, facts["num_layers"]),
    )


def _layers_after(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Layers with experts: by `mlp_layer_types`, or all but the first ones."""
    kinds = fields.entries("mlp_layer_types", num_layers)
    if kinds is not None:
        if set(kinds) - {"dense", "sparse"}:
            raise fields.refuse("mlp_layer_types", "made of dense and sparse")
        has_experts = tuple(kind == "sparse" for kind in kinds)
    else:
        dense = fields.get("first_k_dense_replace") or 0
        if type(dense) is not int or dense < 0:
            raise fields.refuse("first_k_dense_replace", "a number of layers")
        has_experts = tuple(number >= dense for number in range(num_layers))
    if not any(has_experts):
        raise fields.refuse("first_k_dense_replace", f"below the {num_layers} layers")
    return () if all(has_experts) else has_experts


def write_deepseek_experts(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    layers = experts.layers or (True,) * config.num_layers
    keys = expert_keys(config, count_key="n_routed_experts", width_key="moe_intermediate_size")
    del keys["router_aux_loss_coef"]
    return keys | {
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.weight_scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "n_shared_experts": experts.shared_width // experts.width,
        "first_k_dense_replace": layers.index(True),
        "mlp_layer_types": ["sparse" if has_experts else "dense" for has_experts in layers],
    }


def latent_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Multi-head latent attention. Scores are scaled as in transformers' `yarn_apply_mscale`."""
    largest = LARGEST["head_dim"]
    query_rank = None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank", 2**18)
    latent = LatentAttention(
        query_rank=query_rank,
        rank=fields.size("kv_lora_rank", 2**18),
        plain_width=fields.size("qk_nope_head_dim", largest),
        rotary_width=fields.size("qk_rope_head_dim", largest),
        value_width=fields.size("v_head_dim", largest),
    )
    scale = (latent.plain_width + latent.rotary_width) ** -0.5
    scaling = facts.get("rope_scaling")
    if scaling is not None:
        rope_fields = fields.inside("rope_scaling") or fields.inside("rope_parameters")
        all_dim = None if rope_fields is None else rope_fields.optional_number("mscale_all_dim")
        if all_dim is not None:
            scaling = replace(scaling, mscale_all_dim=all_dim)
            stretch = 0.1 * all_dim * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
            scale = scale * stretch * stretch
    return {
        "latent_attention": latent,
        "head_dim": latent.head_dim,
        "num_kv_heads": facts["num_heads"],
        "attention_scale": scale,
        "rope_scaling": scaling,
    }


def write_latent(config: ModelConfig) -> HfKeys:
    latent = config.latent_attention
    assert latent is not None
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain_width,
        "qk_rope_head_dim": latent.rotary_width,
        "v_head_dim": latent.value_width,
        "head_dim": latent.rotary_width,
    }


def deepseek_v3_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    return latent_facts(fields, facts) | {"experts": deepseek_experts(fields, facts)}


def write_deepseek_v3(config: ModelConfig) -> HfKeys:
    return write_deepseek_experts(config) | write_latent(config)


def fresh_latent(sizes: Mapping[str, Any]) -> HfKeys:
    """A new model has an MLP in its first layer alone; the config class' default is made for 61 layers."""
    return {"first_k_dense_replace": min(1, sizes["num_layers"] - 1)}


def deepseek_v2_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Softmax, and weights that are not divided by their sum, whatever `norm_topk_prob` says, as in transformers."""
    width = fields.size("moe_intermediate_size", LARGEST["intermediate_size"])
    is_grouped = fields.get("topk_method") == "group_limited_greedy"
    if not is_grouped and fields.get("topk_method") != "greedy":
        raise fields.lacks("topk_method", "greedy or group_limited_greedy")
    shared = fields.size("n_shared_experts", LARGEST_COUNT) if fields.get("n_shared_experts") else 0
    groups: ModelFacts = {}
    if is_grouped:
        groups = {
            "groups": fields.size("n_group", LARGEST_COUNT),
            "groups_per_token": fields.size("topk_group", LARGEST_COUNT),
        }
    experts = experts_of(
        fields,
        width_key="moe_intermediate_size",
        weight_scale=fields.number("routed_scaling_factor", default=1.0),
        shared_width=shared * width,
        layers=_layers_after(fields, facts["num_layers"]),
        **groups,
    )
    return latent_facts(fields, facts) | {"experts": experts, "rope_interleave": True}


def write_deepseek_v2(config: ModelConfig) -> HfKeys:
    experts = config.experts
    assert experts is not None
    is_grouped = experts.groups > 1
    method = "group_limited_greedy" if is_grouped else "greedy"
    return write_deepseek_v3(config) | {"topk_method": method}


def glm4_moe_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    return {
        "experts": deepseek_experts(fields, facts),
        "qk_norm": "head" if fields.flag("use_qk_norm") else "none",
    }


def write_glm4_moe(config: ModelConfig) -> HfKeys:
    return write_deepseek_experts(config) | {"use_qk_norm": config.qk_norm == "head"}


def dots1_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    return {"experts": deepseek_experts(fields, facts)}


def minimax_m2_facts(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Sigmoids, a bias for the choice; `rotary_dim` is what published files call the part of a head that rotates."""
    share = facts["rotary_share"]
    rotary_dim = fields.get("rotary_dim")
    is_stated = "partial_rotary_factor" in (fields.get("rope_parameters") or {})
    if rotary_dim is not None and not is_stated:
        share = fields.size("rotary_dim", LARGEST["head_dim"]) / facts["head_dim"]
    experts = experts_of(
        fields,
        width_key="intermediate_size",
        scores="sigmoid",
        normalize=True,
        choice_bias=True,
    )
    return {"experts": experts, "rotary_share": share}


def write_minimax_m2(config: ModelConfig) -> HfKeys:
    return expert_keys(config, count_key="num_local_experts", width_key="intermediate_size")
