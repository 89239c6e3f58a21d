"""What is said of a model family, beside its table in `families`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from bloomery.facts.config import Activation, ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts
from bloomery.facts.gguf_graphs import GgufGraph

# What most families call the fields of a ModelConfig in their config.json.
LLAMA_KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "activation": "hidden_act",
        "attention_dropout": "attention_dropout",
    }
)
# What config.json files call the activations. A function that PyTorch has under two names is one activation.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Flags of families that have one key for both.
BIASES = MappingProxyType({"attention_bias": "attention_bias", "output_bias": "attention_bias"})
# Modules whose matrices some families store as one.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class StoredExperts:
    """How files keep the matrices of the experts of a layer: each by itself, or those of all experts in one tensor.

    `modules`: gate_proj, up_proj and down_proj -> their names, where each is stored by itself under
    `prefix`.N. `stacks`: gate_up_proj, down_proj and their biases -> the names of the tensors of all experts,
    [E, outputs, inputs], the rows of gate before those of up; with their `.weight`, where they have one. `transposed`:
    they are [E, inputs, outputs]. `interleaved`: the rows of gate and up take turns, gate first. `module`: what
    has gate_up_proj and down_proj in transformers' memory: PEFT's adapters name them by it.
    """

    prefix: str = "mlp.experts"
    module: str = "mlp.experts"
    modules: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class StoredNames:
    """How a family's files name and arrange its parameters, where they do not have our names.

    `model.io.stored.tensor_locations` is the only reader: of weights, of adapters and of exports.
    """

    # Our name of a module, of a prefix of it, or of a parameter -> theirs. The first entry that fits is taken. Outside
    # layers the name is the whole path ("model.embed_tokens"); inside one, "model.layers.0" and the module in it are
    # renamed apart.
    renamed: Mapping[str, str] = field(default_factory=dict)

    # Our modules of a layer, in the order in which their rows are stacked -> the stored module that holds them all.
    fused: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    # Whether the matrices of layers are stored as [inputs, outputs].
    transposed: bool = False

    # How the matrices of experts are stored; None: under our names, each by itself.
    experts: StoredExperts | None = None

    # The end of a stored module's name -> that of the module in transformers' memory, where it renames what it loads:
    # PEFT's adapters have that name.
    in_memory: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One family, whose models are the decoder with other facts. Only `architecture` and `label` must be given.

    "Facts" are fields of a ModelConfig by name, "keys" those of a config.json. Reading, each step overrides the ones
    before: `facts`, sizes by `keys`, `flags`, the other `keys`, `windows`, rotary positions, `extra`. Writing ends with
    `write`, and what was written is read again: a fact that does not return as it was is refused.
    """

    # The class in transformers, as `architectures` names it: it is written, and by it a file without a `model_type` is
    # recognized.
    architecture: str

    # How people write the family's name.
    label: str

    # Facts that hold for each of its models, and that no config.json of it states.
    facts: Mapping[str, Any] = field(default_factory=dict)

    # Fact -> its key, for sizes, `norm_eps`, `activation` and `attention_dropout`. All are compulsory but three:
    # without their key, or a value of it, `num_kv_heads` is `num_heads`, `head_dim` is hidden_size / num_heads, and
    # `intermediate_size`, where the MLP has no gate, is 4 * hidden_size.
    keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)

    # Fact that is true or false -> its key. Absent means false, unless `defaults` has the key.
    flags: Mapping[str, str] = field(default_factory=dict)

    # Key -> the value that transformers' config class gives it where a file does not have it. It holds for every key
    # that is read, also by the callbacks below; a null that a file states stays null.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    # The value of the activation's key -> ours. Written is our name, or `gelu_tanh`: it must mean the same here.
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)

    # (keys of the file, number of layers) -> the window of each layer, None where one has none; () where none has.
    windows: Callable[[Fields, int], tuple[int | None, ...]] = lambda _fields, _layers: ()

    # (keys of the file, facts so far) -> more facts. It runs last and overrides all others, those of rotary positions
    # too; only `head` and the three token ids are read after it.
    extra: Callable[[Fields, ModelFacts], ModelFacts] = lambda _fields, _facts: {}

    # The config -> keys that state again what `windows` and `extra` read. It runs last and overrides all other keys.
    write: Callable[[ModelConfig], HfKeys] = lambda _config: {}

    # Keys that are written for most families, and that the family's config class would take for something else.
    unwritten: tuple[str, ...] = ()

    # (sizes of a new model, by fact) -> keys that it has beside them, where a size or a default of the config class
    # does not make what the family is known for.
    fresh: Callable[[Mapping[str, Any]], HfKeys] = lambda _sizes: {}

    # Keys that change the mathematics in a way that the decoder does not follow: a model where one is true is refused.
    refused: tuple[str, ...] = ("use_bidirectional_attention",)

    # Keys that change it in a way that transformers' layers follow: a model where one is set has those.
    by_transformers: tuple[str, ...] = ()

    # Keys that transformers' layers of the family do not read, though other programs may: a plan names them.
    ignored: tuple[str, ...] = ()

    # Whether `partial_rotary_factor` counts: a part of each head may rotate.
    reads_rotary_share: bool = False

    # Whether layers with a window rotate by a base of their own (`rope_local_base_freq`).
    has_local_rope: bool = False

    # Whether a null `rope_theta` says that no layer rotates.
    rotates_by_theta: bool = False

    # The stem of transformers' reward model, "Gemma3Text" of Gemma3TextForSequenceClassification; "": that of
    # `architecture`.
    classifier: str = ""

    # How the family's files call gelu by tanh; a key of `activations`.
    gelu_tanh: str = "gelu_pytorch_tanh"

    # Whether its config class has a dropout that is not 0 by default: then `resid_pdrop` and `embd_pdrop` are written
    # also where they are 0.
    states_dropout: bool = False

    # How its files name and arrange the parameters, where they do not have our names.
    stored: StoredNames = field(default_factory=StoredNames)

    # What llama.cpp computes of it; None: its graph is not known here, and a GGUF file is refused.
    gguf: GgufGraph | None = None

    # The same of its models with experts, where that is another graph.
    gguf_mixture: GgufGraph | None = None
