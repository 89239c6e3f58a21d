"""Architectures without a native implementation: transformers' layers with the native head, without remote code.

B batch, T time, D width. Blocks are `model.layers`, embeddings `model.embed_tokens`, other modules keep their names, so
that plans, adapters, quantized weights and files treat them like native ones.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from bloomery.core.device import sent
from bloomery.core.errors import UserError
from bloomery.facts.config import (
    DocumentWay,
    ModelConfig,
    StoredBuffer,
    StoredConversion,
    whole_model,
)
from bloomery.model.cache import Cache
from bloomery.model.document_rows import DocumentGroup, document_groups
from bloomery.model.experts import NO_LOADS, RouterLoad
from bloomery.model.forward_input import ForwardInput
from bloomery.model.io.parameters import is_linear_map, is_sharded
from bloomery.model.transformers_files import saved_forms
from bloomery.model.transformers_model import Unlike, blank_model

MOST_NUMBERS = 4096  # of a buffer that files keep


def layer_list(reference: Any, num_layers: int | None) -> nn.ModuleList:
    """Its layers: the first list of as many modules, else the list with the most parameters. Raises Unlike."""
    lists = [
        module
        for module in reference.base_model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    for layers in lists:
        if len(layers) == num_layers:
            return layers
    if not lists:
        raise Unlike("it has no list of layers")
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def parts(reference: Any, num_layers: int) -> dict[str, nn.Module]:
    """The modules of transformers' model but for its output matrix, by native names.

    Raises Unlike for an unsupported structure.
    """
    embedding = reference.get_input_embeddings()
    output = reference.get_output_embeddings()
    if embedding is None or output is None:
        raise Unlike("it has no embedding of tokens, or no output matrix")
    layers = layer_list(reference, num_layers)
    if any(embedding is inner or output is inner for inner in layers.modules()):
        raise Unlike("its embedding or its output matrix is inside a layer")

    native_names = {id(embedding): "embed_tokens", id(layers): "layers"}
    modules: dict[str, nn.Module] = {"embed_tokens": embedding, "layers": layers}
    for path, child in _children(reference, (), {*native_names, id(output)}):
        if child is output:
            continue
        # A module around our parts may have children of the same name as another one.
        name = native_names.get(id(child), path[-1])
        if modules.get(name, child) is not child:
            name = "_".join(path)
        modules[name] = child
    return modules


def _children(
    module: nn.Module, path: tuple[str, ...], native: set[int]
) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """Children, and in place of one around a native part that one's children and its own parameters."""
    for name, child in module.named_children():
        inner_path = (*path, name)
        is_around = any(id(inner) in native for inner in child.modules())
        if id(child) in native or not is_around:
            yield inner_path, child
            continue
        yield from _children(child, inner_path, native)
        if child._parameters:
            yield (*inner_path, f"{name}_parameters"), _OwnParameters(child)


class _OwnParameters(nn.Module):
    """The parameters of a module without those of its children. Both have one dict: a replaced one is seen by both."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = module._parameters


class _HeadReader(nn.Module):
    """In place of the output matrix: keeps the hidden states that it would read, and returns one number of each."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, where nn.Module does not see it
        self.hidden: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Some models cast to the dtype of their head."""
        return self._head[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self._head[0].bias

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        self.hidden = hidden_BTD
        return hidden_BTD[..., :1]


@lru_cache(maxsize=1)
def computed_buffers(raw_config: str, attention: str) -> dict[str, Tensor]:
    """Buffers that files do not store, from the modules' constructors, built twice with different random numbers.

    Raises Unlike where the two differ or a buffer follows from weights.
    """
    builds = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, _ = blank_model(raw_config, attention)
            kept_names = persistent_buffers(model).keys()
            builds.append({n: b for n, b in model.named_buffers() if n not in kept_names})
    first, second = builds
    for name, value in first.items():
        if value.is_meta or not torch.equal(value, second[name]):
            raise Unlike(f"{name} does not follow from config.json")
    return first


@final
class TransformersBackbone(nn.Module):
    """Everything below the head. `backend`: "sdpa" where each row is one document, else documents are kept apart.

    `documents`: how (`facts.config.TransformersBackend`); a check before the first step may choose "rows".
    """

    embed_tokens: nn.Embedding
    layers: nn.ModuleList

    def __init__(self, config: ModelConfig, backend: str, *, reference: Any = None) -> None:
        """`reference`: transformers' model to be made of; else one is made without memory."""
        super().__init__()
        assert config.transformers_backend is not None
        self.config = config
        self.backend = backend
        # A model of transformers is never cut into stages.
        self.stage = whole_model(config)
        self.link = None
        self.group = None
        self.transformers_backend = config.transformers_backend
        self.documents: DocumentWay = self.transformers_backend.documents
        self.documents_reason = self.transformers_backend.documents_reason
        if reference is None:
            blank_reference, _ = blank_model(
                self.transformers_backend.raw_config, self.transformers_backend.attention
            )
            ties = tied_places(blank_reference)
            reference = blank_reference.to("meta")  # which unties what was not on it yet
        else:
            ties = tied_places(reference)
        # In a tuple, where nn.Module does not see it: only its parts are modules of ours.
        self._reference = (reference,)
        self._ties = ties
        self._tie()
        for name, module in parts(reference, config.num_layers).items():
            self.add_module(name, module)
        forward_parameters = inspect.signature(reference.forward).parameters
        self._takes_positions = "position_ids" in forward_parameters or any(
            parameter.kind == parameter.VAR_KEYWORD for parameter in forward_parameters.values()
        )
        self._cache_name = (
            "cache_params" if "cache_params" in forward_parameters else "past_key_values"
        )
        # The decoder has the head: what transformers computes ends with the hidden states that the head reads.
        self._head = (output_matrix(reference),)
        self._reader = (_HeadReader(self.head),)
        reference.set_output_embeddings(self._reader[0])

    @property
    def reference(self) -> Any:
        """Transformers' model, which is made of the same modules; its head keeps what it would read."""
        return self._reference[0]

    @property
    def head(self) -> nn.Linear:
        """The output matrix."""
        return self._head[0]

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Transformers' model with its own head."""
        self.reference.set_output_embeddings(self.head)
        try:
            yield self.reference
        finally:
            self.reference.set_output_embeddings(self._reader[0])

    def train(self, mode: bool = True) -> "TransformersBackbone":
        """Reaches the modules around our parts, too."""
        self.reference.train(mode)
        return super().train(mode)

    def restore(self) -> None:
        """Ties weights as transformers does, and computes what files do not hold; where it loads the model, it does."""
        self._tie()
        device = self.embed_tokens.weight.device
        if device.type == "meta" or self.transformers_backend.safe_reason:
            return
        self.set_buffers(
            computed_buffers(
                self.transformers_backend.raw_config, self.transformers_backend.attention
            ),
            device,
        )
        kept = self.transformers_backend.buffers
        self.set_buffers({buffer.name_in_memory: buffer_tensor(buffer) for buffer in kept}, device)

    def _tie(self) -> None:
        for (owner, leaf), *others in self._ties:
            for other_owner, other_leaf in others:
                other_owner._parameters[other_leaf] = owner._parameters[leaf]

    def set_buffers(self, values: dict[str, Tensor], device: torch.device) -> None:
        for name, value in values.items():
            owner, _, leaf = name.rpartition(".")
            self.reference.get_submodule(owner).register_buffer(
                leaf, value.to(device, copy=True), persistent=False
            )

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        cache: Cache | None,
        borders: object = None,
    ) -> Tensor:
        """The hidden states [B, T, D] that the head reads."""
        del borders, positions_BT  # its masks and positions are made of the documents
        if cache is not None:
            last_BTD = self._continued(tokens_BT, cache)
        elif documents_BT is not None and self.documents == "rows" and self._is_sharded:
            # Ranks that share weights compute equally many forwards, also where a row is one document.
            last_BTD = self._in_rows(tokens_BT, documents_BT)
        elif documents_BT is None or _is_one_document(documents_BT):
            last_BTD = self._hidden(tokens_BT)
        elif self.documents == "rows":
            last_BTD = self._in_rows(tokens_BT, documents_BT)
        else:
            positions_BT = positions_of(documents_BT)
            mask = self._mask(tokens_BT, positions_BT)
            last_BTD = self._hidden(tokens_BT, positions_BT=positions_BT, mask=mask)
        factor = self.transformers_backend.factor
        return last_BTD if factor == 1.0 else last_BTD * factor

    def forward_all(
        self, inputs: Sequence[ForwardInput]
    ) -> list[tuple[Tensor, Mapping[int, RouterLoad]]]:
        """As `Backbone.forward_all`; the layers run inside transformers, so that one input follows the other."""
        results = []
        for one in reversed(inputs):
            if one.begin is not None:
                one.begin()
            with one.around():
                hidden_BTD = self.forward(one.tokens_BT, one.positions_BT, one.documents_BT, None)
            results.append((hidden_BTD, NO_LOADS))
        return results[::-1]

    def _hidden(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        mask: Any = None,
        past: Any = None,
    ) -> Tensor:
        """One forward of transformers' model. Without positions it counts them as its architecture does."""
        inputs: dict[str, Any] = {"use_cache": past is not None}
        if self.reference.get_input_embeddings() is self.embed_tokens:
            inputs["input_ids"] = tokens_BT
        else:  # an adapter has wrapped the embedding
            inputs["inputs_embeds"] = self.embed_tokens(tokens_BT)
        if positions_BT is not None and self._takes_positions:
            inputs["position_ids"] = positions_BT
        if mask is not None:
            inputs["attention_mask"] = mask
        if past is not None:
            inputs[self._cache_name] = past
        self.reference(**inputs)
        reader = self._reader[0]
        hidden_BTD: Tensor | None = reader.hidden
        reader.hidden = None
        assert hidden_BTD is not None, "the head was not called"
        return hidden_BTD

    def _continued(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """Appends to the text of the only row that is read."""
        (row,) = cache.rows
        past = cache.pasts[row] or TextSoFar()
        cache.pasts[row] = past
        old_T = past.tokens.to(tokens_BT.device)
        past.tokens = torch.cat((old_T, tokens_BT[0]))
        if self.transformers_backend.cache == "own" and (past.own is not None or not len(old_T)):
            if past.own is None:
                past.own = new_cache(self.reference)
            last_BTD = self._hidden(tokens_BT, past=past.own)
        else:
            # All of the text, and what transformers keeps of it where its cache was cut.
            if self.transformers_backend.cache == "own":
                past.own = new_cache(self.reference)
            text_BT = past.tokens[None]
            hidden_BTD = self._hidden(text_BT, past=past.own)
            last_BTD = hidden_BTD[:, len(old_T) :]
        cache.advance(tokens_BT.shape[1])
        return last_BTD

    @property
    def _is_sharded(self) -> bool:
        return any(is_sharded(layer) for layer in self.layers)

    def _in_rows(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Each document by itself, several of similar lengths in a forward, padded on the right; padding becomes 0."""
        device = tokens_BT.device
        tokens = tokens_BT.flatten()
        result: Tensor | None = None
        # A micro-batch of padding alone has no document, and is a forward nevertheless.
        groups = document_groups(documents_BT, fixed=self._is_sharded)
        for group in groups or [DocumentGroup(torch.empty(0, 0, dtype=torch.int64))]:
            places_NL = sent(group.places, device)
            is_empty = places_NL.numel() == 0
            row_tokens_NL = tokens[:1, None] if is_empty else tokens[places_NL.clamp_min(0)]
            hidden_NLD = self._hidden(row_tokens_NL)
            if result is None:
                result = hidden_NLD.new_zeros(len(tokens), hidden_NLD.shape[-1])
            if is_empty:  # its backward, too, is awaited by other ranks
                result = result + 0 * hidden_NLD.sum()
                continue
            is_token_NL = places_NL >= 0
            result = result.index_copy(0, places_NL[is_token_NL], hidden_NLD[is_token_NL])
        assert result is not None, "there is a group"
        hidden_BTD: Tensor = result.unflatten(0, tokens_BT.shape)
        return hidden_BTD

    def _mask(self, tokens_BT: Tensor, positions_BT: Tensor) -> Any:
        """What keeps the documents apart beside their positions: None, a mask, or one for each kind of layer."""
        if self.documents == "positions":
            return None
        config = self.reference.base_model.config
        arguments: dict[str, Any] = {
            "config": config,
            # transformers reads its shape, dtype and device
            "inputs_embeds": self.embed_tokens.weight.new_empty(()).expand(*tokens_BT.shape, 1),
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": positions_BT,
        }
        if self.documents == "masks":
            makers = mask_makers()
            kinds = [kind for kind in dict.fromkeys(config.layer_types) if kind in makers]
            return {kind: makers[kind](**arguments) for kind in kinds}
        has_window = getattr(config, "sliding_window", None) is not None
        kind = "sliding_attention" if has_window else "full_attention"
        return mask_makers()[kind](**arguments)


class TextSoFar:
    """A text that transformers' layers have read: its tokens, and transformers' cache where it has one that fits."""

    def __init__(self) -> None:
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.own: Any = None

    def crop(self, count: int) -> None:
        """Forgets the last -count tokens; a cache that cannot be cut is made again when the text goes on."""
        self.tokens = self.tokens[:count]
        layers = getattr(self.own, "layers", [])
        if all(type(layer).__name__ == "DynamicLayer" for layer in layers) and layers:
            self.own.crop(count)
        else:
            self.own = None


def new_cache(reference: Any) -> Any:
    """An empty cache of transformers for this model."""
    from transformers import DynamicCache

    return DynamicCache(config=reference.base_model.config)


def mask_makers() -> dict[str, Callable[..., Any]]:
    """Transformers' function for the mask of each kind of layer."""
    from transformers.masking_utils import (
        create_causal_mask,
        create_chunked_causal_mask,
        create_sliding_window_causal_mask,
    )

    return {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
        "chunked_attention": create_chunked_causal_mask,
    }


def positions_of(documents_BT: Tensor) -> Tensor:
    """[B, T], from 0 at each document's first token; padding counts as a document."""
    number_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    first_BT = torch.where(begins_BT, number_T, 0).cummax(1).values
    return number_T - first_BT


def _is_one_document(documents_BT: Tensor) -> bool:
    """Whether each row is one document from its first token on: padding after it is seen by no token of it."""
    is_more = (documents_BT.amax() > 0) | (documents_BT[:, 0].amin() < 0)
    return not bool(is_more)


def tied_places(reference: Any) -> list[list[tuple[nn.Module, str]]]:
    """Where one parameter stands in several modules: these, by module and name in it."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in reference.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, leaf))
    return [group for group in places.values() if len(group) > 1]


@torch.no_grad()
def loaded_safely(backbone: TransformersBackbone, folder: Path) -> dict[str, Tensor]:
    """Transformers reads the folder by itself, from safetensors alone: its parameters by our names, its buffers set."""
    from transformers import AutoModelForCausalLM

    # From this folder alone: no code of the model's author, no pickle and no download.
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        reference = load(
            str(folder),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation=backbone.transformers_backend.attention,
        )
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"transformers cannot load it: {str(error).splitlines()[0][:200]}"
        raise UserError(
            problem, where=str(folder), fix="save or download the model again"
        ) from error

    # Its buffers are final; its parameters are copied into ours by the caller.
    device = backbone.embed_tokens.weight.device
    backbone.set_buffers(dict(reference.named_buffers()), device)
    return {
        f"{prefix}.{name}": parameter.data
        for prefix, module in _named_parts(reference, backbone.config.num_layers)
        for name, parameter in module.named_parameters()
    }


def _named_parts(reference: Any, num_layers: int) -> list[tuple[str, nn.Module]]:
    """The modules of a whole model, output matrix included, by the names that they have in a decoder."""
    modules = parts(reference, num_layers)
    return [
        *((f"model.{name}", module) for name, module in modules.items()),
        ("lm_head", reference.get_output_embeddings()),
    ]


def transformers_facts(reference: Any, num_layers: int) -> dict[str, Any]:
    """`parameters`, `matrices`, `buffers` and `conversions` of `config.TransformersBackend`. Raises Unlike."""
    named_parts = _named_parts(reference, num_layers)

    # A file must hold each parameter as it is computed with, or in a form that transformers' rules lead to and from.
    tensors = saved_tensors(reference)
    saved = saved_forms(reference, tensors)
    names_in_memory = {
        id(tensors[name]): name for group_names, _ in saved.groups for name in group_names
    }
    buffers = tuple(_stored_buffers(reference, saved.names))
    output_matrix(reference)
    listed = set[int]()
    parameters = []
    for prefix, module in named_parts:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in listed:
                continue
            listed.add(id(parameter))
            stored_name = saved.names.get(id(parameter)) or names_in_memory.get(id(parameter))
            if stored_name is None:
                raise Unlike(f"files hold no {prefix}.{name}")
            parameters.append((f"{prefix}.{name}", stored_name, tuple(parameter.shape)))
    our_names = {stored_name: name for name, stored_name, _ in parameters}
    conversions = tuple(
        StoredConversion(
            parameters=tuple(our_names[name] for name in group_names), stored=stored_shapes
        )
        for group_names, stored_shapes in saved.groups
    )

    # Layers may differ in which linear maps they have, and in their sizes: each map is named once, as it first comes.
    matrices: dict[str, tuple[str, int, int, bool]] = {}
    for layer in parts(reference, num_layers)["layers"].children():
        for name, module in layer.named_modules():
            if is_linear_map(module):
                has_bias = module.bias is not None
                matrices.setdefault(name, (name, module.out_features, module.in_features, has_bias))
    return {
        "parameters": tuple(parameters),
        "matrices": tuple(matrices.values()),
        "buffers": buffers,
        "conversions": conversions,
    }


def _stored_buffers(reference: Any, saved_names: dict[int, str]) -> Iterator[StoredBuffer]:
    """Those that files keep, with the numbers that they begin with. Raises Unlike for many numbers."""
    for name, buffer in persistent_buffers(reference).items():
        stored_name = saved_names.get(id(buffer), "")
        if not stored_name or buffer.numel() > MOST_NUMBERS:
            raise Unlike(f"files keep {name}, {buffer.numel():,} numbers that are no parameter")
        numbers = [0.0] * buffer.numel() if buffer.is_meta else buffer.double().flatten().tolist()
        dtype = str(buffer.dtype).removeprefix("torch.")
        yield StoredBuffer(
            name=stored_name,
            name_in_memory=name,
            dtype=dtype,
            shape=tuple(buffer.shape),
            numbers=tuple(numbers),
        )


def persistent_buffers(reference: Any) -> dict[str, Tensor]:
    """The buffers that files keep, by name."""
    kept_names = reference.state_dict().keys()
    return {name: buffer for name, buffer in reference.named_buffers() if name in kept_names}


def buffer_tensor(buffer: StoredBuffer) -> Tensor:
    """On the CPU."""
    numbers = torch.tensor(buffer.numbers, dtype=torch.float64)
    return numbers.reshape(buffer.shape).to(getattr(torch, buffer.dtype))


def output_matrix(reference: Any) -> nn.Linear:
    """The matrix that makes logits. Raises Unlike where it is none."""
    output = reference.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise Unlike("its output is not one matrix")
    return output


def saved_tensors(reference: Any) -> dict[str, Tensor]:
    """The parameters and buffers that transformers saves, by the names that it has for them in memory."""
    # Of tied weights it saves one, which its model names.
    tied_names = getattr(reference, "all_tied_weights_keys", {})
    parameters = {
        name: parameter
        for name, parameter in reference.named_parameters(remove_duplicate=False)
        if name not in tied_names
    }
    return parameters | persistent_buffers(reference)
