"""Where each parameter of ours stands in a saved checkpoint. One table per way of storing, used in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bloomery.model.config import ModelConfig
from bloomery.model.counting import Shape, parameter_shapes


@dataclass(frozen=True)
class Place:
    """A stored tensor, and the rows of it that are ours; `transposed`: it is stored as [inputs, outputs]."""

    name: str
    transposed: bool = False
    first: int = 0
    rows: int = 0
    of: int = 0

    @property
    def whole(self) -> bool:
        return self.rows == self.of

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of the stored tensor, for a parameter of `shape`."""
        whole = (self.of, *shape[1:])
        return tuple(reversed(whole)) if self.transposed else whole


@dataclass(frozen=True)
class Storage:
    """`renamed`: prefixes of a name; `fused`: the stored module, by the modules of ours that lie in it one by one."""

    renamed: Mapping[str, str]
    fused: Mapping[tuple[str, ...], str]
    transposed: bool = False  # the matrices of its layers


PLAIN = Storage({}, {})
STORAGE: Mapping[str, Storage] = MappingProxyType({
    "phi3": Storage({}, {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "self_attn.qkv_proj",
        ("mlp.gate_proj", "mlp.up_proj"): "mlp.gate_up_proj",
    }),
    "gpt2": Storage(
        {"model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe",
         "model.norm": "transformer.ln_f", "model.layers": "transformer.h", "input_layernorm": "ln_1",
         "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
         "mlp.down_proj": "mlp.c_proj"},
        {("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "attn.c_attn"},
        transposed=True,
    ),
})  # fmt: skip


def places(config: ModelConfig) -> dict[str, Place]:
    """By the name of our parameter, in the order of `parameter_shapes`."""
    if config.foreign is not None:
        return {ours: Place(theirs, rows=shape[0], of=shape[0]) for ours, theirs, shape in config.foreign.parameters}
    storage, shapes = STORAGE.get(config.family, PLAIN), parameter_shapes(config)
    return {name: _place(name, shapes, storage) for name in shapes}


def _place(name: str, shapes: Mapping[str, Shape], storage: Storage) -> Place:
    path, _, kind = name.rpartition(".")  # model.layers.0.mlp.up_proj, weight
    layer, module = _split(path)
    parts, stored = next(((p, s) for p, s in storage.fused.items() if module in p), ((module,), module))
    rows = [shapes[".".join(filter(None, (layer, part, kind)))][0] for part in parts]
    first = sum(rows[: parts.index(module)])
    target = ".".join(filter(None, (_rename(layer, storage), _rename(stored, storage), kind)))
    transposed = storage.transposed and layer != "" and len(shapes[name]) == 2
    return Place(target, transposed, first, shapes[name][0], sum(rows))


def _split(path: str) -> tuple[str, str]:
    """("model.layers.0", "mlp.up_proj"); modules outside the layers have no first part."""
    parts = path.split(".")
    if parts[:2] != ["model", "layers"]:
        return "", path
    return ".".join(parts[:3]), ".".join(parts[3:])


def _rename(path: str, storage: Storage) -> str:
    for ours, theirs in storage.renamed.items():
        if path == ours or path.startswith(ours + "."):
            return theirs + path[len(ours) :]
    return path
