"""Mixtures of experts in GGUF files: what llama.cpp's graphs compute of them, the tensors and the metadata.

Names and keys are those of llama.cpp's conversion scripts (`conversion/*.py`), meanings those of `build_moe_ffn` in its
`llama-graph.cpp`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from bloomery.facts.config import Experts, ModelConfig
from bloomery.facts.counting import ExpertPart, Shape, expert_parts
from bloomery.facts.gguf_graphs import GgufExperts, GgufGraph, RouterWeights

# `expert_gating_func`.
_SOFTMAX = 1
_SIGMOID = 2
# Of a RouterWeights: those that sum to 1.
NORMALIZED = ("softmax_of_chosen", "normalized_sigmoid")
ROUTER_TENSOR = "ffn_gate_inp"


def router_weights(experts: Experts) -> RouterWeights:
    """What the weights of the chosen experts are. A softmax over all that is divided by the sum of the chosen ones is
    the softmax of the chosen ones.
    """
    if experts.scores == "sigmoid":
        return "normalized_sigmoid" if experts.normalize else "sigmoid"
    is_of_chosen = experts.softmax_of_chosen or experts.normalize
    return "softmax_of_chosen" if is_of_chosen else "softmax"


def has_leading_mlps(config: ModelConfig, experts: Experts) -> bool:
    """Whether the layers without experts, if any, are the first ones."""
    has_experts = list(experts.layers) or [True] * config.num_layers
    return has_experts == sorted(has_experts)


def expert_problem(config: ModelConfig, graph: GgufGraph) -> str | None:
    """What a graph computes of experts, where the model differs from it; or None."""
    experts = config.experts
    known = graph.experts
    if experts is None or known is None:
        if experts is None and known is not None and not known.optional:
            return "has experts, and the model has none"
        return None if experts is None else "has no experts, and the model does"
    weights = router_weights(experts)
    if weights not in known.weights:
        stated = " or ".join(known.weights)
        return f"weighs experts by {stated.replace('_', ' ')}, and the model by {weights.replace('_', ' ')}"
    if experts.weight_scale != 1.0 and not known.states_scale:
        return (
            f"does not scale the weights of experts, and the model does by {experts.weight_scale:g}"
        )
    if experts.choice_bias not in known.choice_bias:
        return _has("a bias for the choice of experts", model_has=experts.choice_bias)
    if experts.groups > 1 and experts.best_of_group != 2:
        return (
            f"ranks groups of experts by their best two, and the model by {experts.best_of_group}"
        )
    if experts.bias != known.bias:
        return _has("biases of experts and router", model_has=experts.bias)
    if experts.normed_router != known.normed_router:
        return _has("a norm before the router", model_has=experts.normed_router)
    if (experts.clamp, experts.slope if experts.clamp else None) != known.clamp:
        return f"clamps experts as {known.clamp}, and the model as {(experts.clamp, experts.slope)}"
    shared = "none" if not experts.shared_width else "gated" if experts.shared_gate else "plain"
    if shared not in known.shared:
        return f"has shared experts: {' or '.join(known.shared)}, and the model: {shared}"
    if known.counts_shared and experts.shared_width % experts.width:
        return f"counts shared experts of {experts.width}, and the model has one of {experts.shared_width}"
    if experts.layers and not (known.leading_mlps and has_leading_mlps(config, experts)):
        kinds = "after some first layers" if known.leading_mlps else "in all layers"
        return f"has experts {kinds}, and the model in others"
    return None


def _has(what: str, *, model_has: bool) -> str:
    return f"has {'no' if model_has else ''} {what}, and the model {'does' if model_has else 'has none'}".replace(
        "  ", " "
    )


def mlp_width(config: ModelConfig, known: GgufExperts) -> int:
    """`feed_forward_length` of a mixture: that of an expert in graphs that state no other for them."""
    experts = config.experts
    assert experts is not None
    return experts.width if known.width_is_mlp else config.intermediate_size


def describe_experts(writer: Any, config: ModelConfig, known: GgufExperts) -> None:
    """The keys that llama.cpp reads of experts."""
    experts = config.experts
    assert experts is not None
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.width)
    if experts.shared_width and known.counts_shared:
        writer.add_expert_shared_count(experts.shared_width // experts.width)
    elif experts.shared_width and not known.shared_is_mlp:
        writer.add_expert_shared_feed_forward_length(experts.shared_width)
    if known.leading_mlps:
        writer.add_leading_dense_block_count(experts.layers.count(False))
    if known.states_interval:
        writer.add_interleave_moe_layer_step(1)
    if known.states_weights:
        is_sigmoid = experts.scores == "sigmoid"
        writer.add_uint32(f"{writer.arch}.expert_gating_func", _SIGMOID if is_sigmoid else _SOFTMAX)
        writer.add_expert_weights_norm(router_weights(experts) in NORMALIZED)
    if known.states_scale:
        writer.add_expert_weights_scale(experts.weight_scale)
    if experts.groups > 1:
        writer.add_expert_group_count(experts.groups)
        writer.add_expert_group_used_count(experts.groups_per_token)


def stacked_parts(
    name: str, shape: Shape, known: GgufExperts
) -> Iterator[tuple[str, tuple[ExpertPart, ...]]]:
    """The tensors of a file that hold a stack of experts, by their names in a layer: gate and up by themselves, or
    together. A tensor is [experts, rows, inputs]; its parts lie in it in their order.
    """
    parts = expert_parts(name, shape)
    modules = list(dict.fromkeys(_module_of(part) for part in parts))
    kind = parts[0].name.rpartition(".")[2]
    if known.fused:
        label = "_".join(module.removesuffix("_proj") for module in modules)
        yield f"ffn_{label}_exps.{kind}", parts
        return
    for module in modules:
        own_parts = tuple(part for part in parts if _module_of(part) == module)
        yield f"ffn_{module.removesuffix('_proj')}_exps.{kind}", own_parts


def _module_of(part: ExpertPart) -> str:
    return part.name.rsplit(".", 2)[1]


# Reading


def stated_weights(fact: Callable[..., Any], known: GgufExperts) -> RouterWeights:
    """How a file says that experts are weighed, or its graph where it does not."""
    if not known.states_weights:
        return known.weights[0]
    is_normalized = bool(fact("expert_weights_norm", False))
    if fact("expert_gating_func", _SOFTMAX) == _SIGMOID:
        return "normalized_sigmoid" if is_normalized else "sigmoid"
    return "softmax_of_chosen" if is_normalized else "softmax"


def expert_config(
    fact: Callable[..., Any], graph: GgufGraph, *, has_choice_bias: bool
) -> dict[str, Any]:
    """The keys of config.json about experts, in the spellings of all families; where there are none, nothing.

    `fact`: a value of the metadata by its name, and what stands for it where there is none.
    """
    known = graph.experts
    count = fact("expert_count")
    if known is None or not (count or not known.optional):
        return {}
    width = fact("feed_forward_length" if known.width_is_mlp else "expert_feed_forward_length")
    per_token = fact("expert_used_count")
    shared_width = fact("expert_shared_feed_forward_length")
    leading = fact("leading_dense_block_count", 0) if known.leading_mlps else 0
    are_widths = type(shared_width) is int and type(width) is int and width > 0
    clamp, slope = known.clamp
    # What the width of an expert and of a shared one are called where no layer has an MLP.
    widths = {"intermediate_size": width} if known.width_is_mlp else {}
    if known.width_is_mlp and shared_width is not None:
        widths["shared_intermediate_size"] = shared_width
    return {
        **widths,
        "enable_moe_block": True,
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "top_k_experts": per_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared_width,
        "n_shared_experts": fact("expert_shared_count", 0),
        "moe_num_shared_experts": shared_width // width if are_widths else 0,
        "norm_topk_prob": stated_weights(fact, known) in NORMALIZED,
        "routed_scaling_factor": fact("expert_weights_scale", 1.0) if known.states_scale else 1.0,
        "n_group": fact("expert_group_count", 1),
        "topk_group": fact("expert_group_used_count", 1),
        "topk_method": "greedy",
        "first_k_dense_replace": leading,
        "num_dense_layers": leading,
        "moe_layer_start_index": leading,
        "use_expert_bias": has_choice_bias,
        "swiglu_limit": clamp,
        "swiglu_alpha": slope,
    }
