"""Architectures without a native implementation: transformers' layers with the native head, without remote code.

B batch, T time, D width. Blocks are `model.layers`, embeddings `model.embed_tokens`, other modules keep their names, so
that plans, adapters, quantized weights and files treat them like native ones.
"""

import inspect
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig, whole_model
from bloomery.model.cache import Cache

IMPLEMENTATIONS = ("sdpa", "eager")  # of attention, the better first


class Unlike(Exception):
    """Why an architecture does not fit between our embeddings and our head."""


class _MatricesOnMeta(TorchFunctionMode):
    """Matrices are made by torch.empty and then filled; what is computed, as tables of rotations are, is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


def blank_model(raw_config: str, attention: str | None = None) -> tuple[Any, str]:
    """Transformers' model of a config.json without memory for its matrices, and its attention. Raises ValueError."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = json.loads(raw_config)
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    build: Any = AutoModelForCausalLM.from_config
    candidates = IMPLEMENTATIONS if attention is None else (attention,)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _MatricesOnMeta():
        for implementation in candidates[:-1]:
            try:
                model = build(config, attn_implementation=implementation, dtype=torch.float32)
            except ValueError:  # this architecture has no such kernel
                continue
            return model, implementation
        # The reason why not even the last one can be built is the caller's to report.
        model = build(config, attn_implementation=candidates[-1], dtype=torch.float32)
    return model, candidates[-1]


def parts(reference: Any, num_layers: int) -> dict[str, nn.Module]:
    """The modules of transformers' model from tokens to the last hidden states, by native names.

    Raises Unlike for an unsupported structure.
    """
    base = reference.base_model
    embedding = reference.get_input_embeddings()
    output = reference.get_output_embeddings()
    layer_lists = (
        module
        for module in base.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    layers = next(layer_lists, None)
    if layers is None or embedding is None or output is None or base is reference:
        raise Unlike(
            f"it has no list of {num_layers} layers between an embedding and an output matrix"
        )

    native_names = {id(embedding): "embed_tokens", id(layers): "layers"}
    modules = {"embed_tokens": embedding, "layers": layers}
    modules |= dict(_children(base, native_names))

    # A parameter outside of these modules would be neither trained nor saved.
    covered = {
        id(parameter) for module in (*modules.values(), output) for parameter in module.parameters()
    }
    for name, parameter in reference.named_parameters():
        if id(parameter) not in covered:
            raise Unlike(f"{name} is in none of its modules")
    return modules


def _children(module: nn.Module, native_names: dict[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """Children, and in place of one around the layers or the embedding that one's children."""
    for name, child in module.named_children():
        if id(child) in native_names:
            yield native_names[id(child)], child
        elif any(id(inner) in native_names for inner in child.modules()):
            yield from _children(child, native_names)
        else:
            yield name, child


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
            builds.append(dict(model.named_buffers()))
    first, second = builds
    for name, value in first.items():
        if value.is_meta or not torch.equal(value, second[name]):
            raise Unlike(f"{name} does not follow from config.json")
    return first


@final
class TransformersBackbone(nn.Module):
    """Everything below the head. `backend`: "sdpa" where each row is one document, else documents are kept apart."""

    embed_tokens: nn.Embedding
    layers: nn.ModuleList

    def __init__(self, config: ModelConfig, backend: str) -> None:
        super().__init__()
        assert config.transformers_backend is not None
        self.config = config
        self.backend = backend
        # A model of transformers is never cut into stages.
        self.stage = whole_model(config)
        self.link = None
        self.group = None
        self.transformers_backend = config.transformers_backend
        reference, _ = blank_model(
            self.transformers_backend.raw_config, self.transformers_backend.attention
        )
        # In a tuple, where nn.Module does not see it: only its parts are modules of ours.
        self._reference = (reference.to("meta"),)
        for name, module in parts(reference, config.num_layers).items():
            self.add_module(name, module)
        forward_parameters = inspect.signature(reference.base_model.forward).parameters
        self._takes_positions = "position_ids" in forward_parameters

    @property
    def reference(self) -> Any:
        """Transformers' model, which is made of the same modules and has the output matrix, too."""
        return self._reference[0]

    def train(self, mode: bool = True) -> "TransformersBackbone":
        """Reaches the modules around our parts, too."""
        self.reference.train(mode)
        return super().train(mode)

    def restore(self) -> None:
        """Computes what files do not hold; where transformers loads the model, it does."""
        device = self.embed_tokens.weight.device
        if device.type == "meta" or self.transformers_backend.safe_reason:
            return
        self.set_buffers(
            computed_buffers(
                self.transformers_backend.raw_config, self.transformers_backend.attention
            ),
            device,
        )

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
        """The last hidden states [B, T, D]."""
        del borders  # its masks are made of the documents
        embedded_BTD = self.embed_tokens(tokens_BT)
        inputs: dict[str, Any] = {"inputs_embeds": embedded_BTD, "use_cache": cache is not None}
        if self._takes_positions:
            first = 0 if cache is None else cache.length
            position_T = torch.arange(first, first + tokens_BT.shape[1], device=tokens_BT.device)
            inputs["position_ids"] = (
                position_T.expand(tokens_BT.shape) if positions_BT is None else positions_BT
            )
        if documents_BT is not None:
            mask = self._document_mask(documents_BT, embedded_BTD.dtype)
            if mask is not None:
                inputs["attention_mask"] = mask

        # The cache keeps transformers' own object for the only row that is read.
        if cache is not None:
            from transformers import DynamicCache

            (row,) = cache.rows
            cache.pasts[row] = cache.pasts[row] or DynamicCache()
            inputs["past_key_values"] = cache.pasts[row]
        last_BTD: Tensor = self.reference.base_model(**inputs).last_hidden_state
        if cache is not None:
            cache.advance(tokens_BT.shape[1])

        factor = self.transformers_backend.factor
        return last_BTD if factor == 1.0 else last_BTD * factor

    def _document_mask(self, documents_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, T, T], earlier positions of the same document: True for sdpa, which masks by itself.

        "eager" adds the mask to its scores; there it is None where each row is one document.
        """
        if self.transformers_backend.attention == "sdpa":
            return _same_document(documents_BT)
        if not bool(documents_BT.amax() > 0):
            return None
        seen_B1TT = _same_document(documents_BT)
        zeros_B1TT = torch.zeros_like(seen_B1TT, dtype=dtype)
        return zeros_B1TT.masked_fill(~seen_B1TT, torch.finfo(dtype).min)


def _same_document(documents_BT: Tensor) -> Tensor:
    return (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()[:, None]


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
    """`parameters` and `matrices` of `config.TransformersBackend`. Raises Unlike."""
    named_parts = _named_parts(reference, num_layers)

    # A file must hold each parameter as it is computed with, or weights could not be read and written.
    saved_names = _saved_names(reference)
    output_matrix(reference)
    listed = set[int]()
    parameters = []
    for prefix, module in named_parts:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in listed:
                continue
            listed.add(id(parameter))
            if id(parameter) not in saved_names:
                raise Unlike(
                    f"files keep {prefix}.{name} in another shape than transformers computes with"
                )
            stored_name = saved_names[id(parameter)]
            parameters.append((f"{prefix}.{name}", stored_name, tuple(parameter.shape)))

    # Layers may differ in which linear maps they have, and in their sizes: each map is named once, as it first comes.
    matrices: dict[str, tuple[str, int, int, bool]] = {}
    for layer in parts(reference, num_layers)["layers"].children():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                has_bias = module.bias is not None
                matrices.setdefault(name, (name, module.out_features, module.in_features, has_bias))
    for name, _, shape in parameters:
        if ".layers." in name and len(shape) > 2:
            raise Unlike(
                f"{name} has three dimensions: experts and convolutions are not counted here"
            )
    return {"parameters": tuple(parameters), "matrices": tuple(matrices.values())}


def output_matrix(reference: Any) -> nn.Linear:
    """The matrix that makes logits. Raises Unlike where it is none."""
    output = reference.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise Unlike("its output is not one matrix")
    return output


def _saved_names(reference: Any) -> dict[int, str]:
    """By the identity of a parameter, the name that transformers saves it under."""
    parameters = dict(reference.named_parameters())
    parameter_names = {name for name, _ in reference.named_parameters(remove_duplicate=False)}
    for name in reference.state_dict():
        if name not in parameter_names:
            raise Unlike(f"files keep {name}, which is no parameter")
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 a model computes with the names of its files
        saved = parameters
    else:
        saved = revert_weight_conversion(reference, parameters)
    return {id(parameter): name for name, parameter in saved.items()}
