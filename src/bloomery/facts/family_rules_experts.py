"""Between the keys of mixtures of experts in a config.json and `config.Experts`, both ways."""

from typing import Any

from bloomery.core.errors import UserError
from bloomery.facts.config import Experts, ModelConfig
from bloomery.facts.config_fields import FIX, LARGEST, Fields, HfKeys, ModelFacts

# What files call the number of experts; a config class may write another one than it reads.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LARGEST_COUNT = 2**14


def experts_of(fields: Fields, *, width_key: str, **facts: Any) -> Experts:
    """By the keys that most families share. `facts`: fields of `Experts` that the family states, or its own keys do.

    Raises UserError where a token would meet more experts than there are.
    """
    count = expert_count(fields)
    per_token = fields.size("num_experts_per_tok", LARGEST_COUNT)
    if per_token > count:
        raise UserError(
            f"num_experts_per_tok is {per_token}, and there are {count} experts",
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
    default = next(key for key in COUNTS if key in fields.defaults)
    return fields.size(next(iter(stated), default), LARGEST_COUNT)


def expert_keys(config: ModelConfig, *, count_key: str, width_key: str) -> HfKeys:
    """Undoes `experts_of`."""
    experts = config.experts
    assert experts is not None
    return {
        count_key: experts.count,
        "num_experts_per_tok": experts.per_token,
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
