"""What the graphs of llama.cpp compute, and what they call tensors. A family names its graph in `families.FAMILIES`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

# The weights of the chosen experts: their shares of a softmax over all, or of one over the chosen; sigmoids, or those
# divided by their sum.
RouterWeights = Literal["softmax", "softmax_of_chosen", "sigmoid", "normalized_sigmoid"]
SharedExpert = Literal["none", "plain", "gated"]


@dataclass(frozen=True)
class GgufExperts:
    """How a graph of llama.cpp computes a mixture of experts.

    `weights`: those it can compute; `states_weights`: the metadata states which. `states_scale`: it states a number
    that multiplies them. `choice_bias`: whether the router has one, and may lack it. `clamp`: of gate and up, and the
    slope of the sigmoid. `shared`: experts that every token meets; `counts_shared`: in the metadata as so many of the
    others' width; `shared_is_mlp`: they have the names of an MLP. `leading_mlps`: the first layers may have MLPs.
    `width_is_mlp`: `feed_forward_length` is that of an expert. `fused`: gate and up are one tensor. `optional`: the
    graph also computes models without experts.
    """

    weights: tuple[RouterWeights, ...]
    states_weights: bool = False
    states_scale: bool = False
    choice_bias: tuple[bool, ...] = (False,)
    bias: bool = False
    normed_router: bool = False
    clamp: tuple[float | None, float | None] = (None, None)
    shared: tuple[SharedExpert, ...] = ("none",)
    counts_shared: bool = False
    shared_is_mlp: bool = False
    leading_mlps: bool = False
    states_interval: bool = False
    width_is_mlp: bool = False
    fused: bool = False
    optional: bool = False


@dataclass(frozen=True)
class GgufGraph:
    """A graph of llama.cpp. Whatever it is not told to compute differently here, it computes as `PLAIN_GRAPH` says.

    `fixed`: facts of a ModelConfig whose value the graph cannot change, where it is not PLAIN_GRAPH's; `free`: facts
    that its metadata or tensors state. `interleaved`: it rotates neighboring numbers of a head, which changes the
    order of the rows of q and k. `fused`: tensors that hold several parameters. `renamed`: modules
    whose tensors have other names than in most graphs. `keys`: keys of config.json that the metadata states as they
    are, by what it calls them.
    """

    name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ("attention_bias",)
    interleaved: bool = False
    fused: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    full_width: bool = False  # heads x head_dim must be hidden_size
    has_own_head: bool = False  # it reads output.weight also where embeddings are tied
    takes_exact_gelu: bool = False  # computed by tanh, which is named as a difference
    window_layers: int = 0  # layers of the only models that have windows; 0: any may
    window_period: int = 0  # every layer but each n-th has a sliding window; 0: none has
    # the window where a file states none; with one, the graph always has windows
    default_window: int | None = None
    states_no_window: bool = False  # 0 is written where it would assume one
    # layers of the model whose attention is scaled by the width of all heads; 0: no model's
    full_scale_layers: int = 0
    # the soft caps of attention and of logits where a file states none; with them, the graph always caps
    default_softcaps: tuple[float, float] | None = None
    unrotated_period: int = 0  # each n-th layer does not rotate; 0: all do
    # layers with a window rotate by the base of the others, without its scaling
    plain_window_rotation: bool = False
    # the metadata states which layers have a window, how wide heads are with and without one, and the key/value heads
    # and the MLP's width of each layer; frequencies of the others are stretched by a tensor of factors
    states_windows: bool = False
    # SentencePiece's BPE is stated with its merges, as the tokenizer `gemma4`, in place of scores
    states_merges: bool = False
    # layers are delta nets, with attention in each n-th one: the metadata states their sizes and n
    has_delta_nets: bool = False
    # of a delta net, as in `config.DeltaNet`
    delta_projections: str = "together"
    # value heads of a delta net have the order of ggml's repeated keys, in place of the decoder's
    repeats_keys: bool = True
    # each head has keys and values of its own
    own_keys: bool = False
    # YaRN's limits are rounded (truncate) where the model's are not, which is named as a difference
    rounds_yarn: bool = False
    # modules of a layer to which it adds no LoRA, without a word: an adapter of them is merged alone
    unadapted: tuple[str, ...] = ()
    # the mixtures of experts that it computes; None: none
    experts: GgufExperts | None = None


PLAIN_GRAPH: Mapping[str, Any] = MappingProxyType(
    {
        "norm": "rms",
        "norm_bias": True,
        "norm_placement": "before",
        "qk_norm": "none",
        "activation": "silu",
        "gated_mlp": True,
        "positions": "rotary",
        "rotary_share": 1.0,
        "rope_interleave": False,
        "local_rope_theta": None,
        "query_scale": None,
        "rotary_layers": (),
        "mixers": (),
        "attention_scale": None,
        "attention_softcap": None,
        "attention_sinks": False,
        "final_softcap": None,
        "logit_scale": 1.0,
        "scale_embeddings": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "output_bias": False,
        "value_norm": False,
        "keys_are_values": False,
        "num_kv_shared_layers": 0,
        "per_layer_input_size": 0,
        "layer_scalar": False,
        "attention_gate": False,
        "head_gate": False,
        "mlp_bias": False,
        "latent_attention": None,
        "head": "tokens",
    }
)

# The tensors of a layer, and those around the layers, by our modules.
LAYER_TENSORS = MappingProxyType(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "linear_attn.in_proj_ba": "ssm_ba",
        "input_layernorm": "attn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    }
)
# Parameters of a layer that are neither a weight nor a bias of a module.
BARE_TENSORS = MappingProxyType(
    {
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.A_log": "ssm_a",
        "layer_scalar": "layer_output_scale.weight",
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.gate.scale": "ffn_gate_inp.scale",
        "mlp.gate.per_expert_scale": "ffn_down_exps.scale",
    }
)
OUTER_TENSORS = MappingProxyType(
    {
        "model.embed_tokens": "token_embd",
        "model.embed_positions": "position_embd",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
)
