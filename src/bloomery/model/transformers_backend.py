"""Architectures without a native implementation: transformers' layers with the native head, without remote code.

B batch, T time, D width. Blocks are `model.layers`, embeddings `model.embed_tokens`, other modules keep their names, so
that plans, adapters, quantized weights and files treat them like native ones.
"""

import inspect
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bloomery.core.errors import UserError
from bloomery.model.cache import Cache
from bloomery.model.config import ModelConfig

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder

IMPLEMENTATIONS = ("sdpa", "eager")  # of attention, the better first


class Unlike(Exception):
    """Why an architecture does not fit between our embeddings and our head."""


class _MatricesOnMeta(TorchFunctionMode):
    """Matrices are made by torch.empty and then filled; what is computed, as tables of rotations are, is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        said = dict(kwargs or {})
        if func is torch.empty:
            said["device"] = "meta"
        return func(*args, **said)


def blank_model(raw_config: str, attention: str | None = None) -> tuple[Any, str]:
    """Transformers' model of a config.json without memory for its matrices, and its attention. Raises ValueError."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    said = json.loads(raw_config)
    config = CONFIG_MAPPING[said["model_type"]].from_dict(said)
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _MatricesOnMeta():
        for name in IMPLEMENTATIONS[:-1] if attention is None else ():
            try:
                return build(config, attn_implementation=name, dtype=torch.float32), name
            except ValueError:  # this architecture has no such kernel
                continue
        last = attention or IMPLEMENTATIONS[-1]
        return build(config, attn_implementation=last, dtype=torch.float32), last


def parts(whole: Any, num_layers: int) -> dict[str, nn.Module]:
    """The modules from tokens to the last hidden states by native names. Raises Unlike for an unsupported structure."""
    base = whole.base_model
    embedding = whole.get_input_embeddings()
    lists = (
        module
        for module in base.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    blocks = next(lists, None)
    if (
        blocks is None
        or embedding is None
        or whole.get_output_embeddings() is None
        or base is whole
    ):
        raise Unlike(
            f"it has no list of {num_layers} layers between an embedding and an output matrix"
        )
    actual = dict(_flat(base, {id(embedding): "embed_tokens", id(blocks): "layers"}))
    actual = {"embed_tokens": embedding, "layers": blocks} | actual
    held = {
        id(p)
        for module in (*actual.values(), whole.get_output_embeddings())
        for p in module.parameters()
    }
    loose = next(
        (name for name, parameter in whole.named_parameters() if id(parameter) not in held), None
    )
    if loose is not None:
        raise Unlike(f"{loose} is in none of its modules")
    return actual


def _flat(module: nn.Module, named: dict[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """Children, and in place of one around the layers or the embedding its own children."""
    for name, child in module.named_children():
        if id(child) in named:
            yield named[id(child)], child
        elif any(id(inner) in named for inner in child.modules()):
            yield from _flat(child, named)
        else:
            yield name, child


@lru_cache(maxsize=1)
def computed_buffers(raw_config: str, attention: str) -> dict[str, Tensor]:
    """Buffers that files do not store, from the modules' constructors, built twice with different random numbers.

    Raises Unlike where the two differ or a buffer follows from weights.
    """
    actual = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            actual.append(dict(blank_model(raw_config, attention)[0].named_buffers()))
    first, second = actual
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
        self.transformers_backend = config.transformers_backend
        whole, _ = blank_model(
            self.transformers_backend.raw_config, self.transformers_backend.attention
        )
        self._whole = (whole.to("meta"),)  # in a tuple, as only its parts are ours
        for name, module in parts(whole, config.num_layers).items():
            self.add_module(name, module)
        self._positions = "position_ids" in inspect.signature(whole.base_model.forward).parameters

    @property
    def whole(self) -> Any:
        """Transformers' model, of the same modules."""
        return self._whole[0]

    def train(self, mode: bool = True) -> "TransformersBackbone":
        """Reaches the modules around our parts, too."""
        self.whole.train(mode)
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
            self.whole.get_submodule(owner).register_buffer(
                leaf, value.to(device, copy=True), persistent=False
            )

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None,
        documents_BT: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        embedded_BTD = self.embed_tokens(tokens_BT)
        said: dict[str, Any] = {"inputs_embeds": embedded_BTD, "use_cache": cache is not None}
        if self._positions:
            first = 0 if cache is None else cache.length
            places = torch.arange(first, first + tokens_BT.shape[1], device=tokens_BT.device)
            said["position_ids"] = (
                places.expand(tokens_BT.shape) if positions_BT is None else positions_BT
            )
        if documents_BT is not None and (
            self.transformers_backend.attention == "sdpa" or bool(documents_BT.amax() > 0)
        ):
            # [B, 1, T, T]: earlier positions of the same document; added to scores where softmax is written out.
            seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()[:, None]
            if self.transformers_backend.attention != "sdpa":
                blank = torch.zeros_like(seen_BTT, dtype=embedded_BTD.dtype)
                seen_BTT = blank.masked_fill(~seen_BTT, torch.finfo(blank.dtype).min)
            said["attention_mask"] = seen_BTT
        if cache is not None:
            from transformers import DynamicCache

            (row,) = cache.rows
            said["past_key_values"] = cache.pasts[row] = cache.pasts[row] or DynamicCache()
        hidden_BTD: Tensor = self.whole.base_model(**said).last_hidden_state
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        return (
            hidden_BTD
            if self.transformers_backend.factor == 1.0
            else hidden_BTD * self.transformers_backend.factor
        )


@torch.no_grad()
def loaded_safely(backbone: TransformersBackbone, folder: Path) -> dict[str, Tensor]:
    """Transformers reads the folder by itself, from safetensors alone: its parameters by our names, its buffers set."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        theirs = load(
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
    backbone.set_buffers(dict(theirs.named_buffers()), backbone.embed_tokens.weight.device)
    actual = {
        f"model.{name}": module
        for name, module in parts(theirs, backbone.config.num_layers).items()
    }
    return {
        f"{part}.{name}": parameter.data
        for part, module in {**actual, "lm_head": theirs.get_output_embeddings()}.items()
        for name, parameter in module.named_parameters()
    }


def transformers_facts(whole: Any, num_layers: int) -> dict[str, Any]:
    """`parameters` and `matrices` of `config.Foreign`. Raises Unlike."""
    actual = parts(whole, num_layers)
    saved = _saved_names(whole)
    seen = set[int]()
    parameters = []
    for part, module in {
        **{f"model.{name}": m for name, m in actual.items()},
        "lm_head": output_of(whole),
    }.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if id(parameter) not in saved:
                raise Unlike(
                    f"files keep {part}.{name} in another shape than transformers computes with"
                )
            parameters.append((f"{part}.{name}", saved[id(parameter)], tuple(parameter.shape)))
    kinds = {
        tuple(
            (name, module.out_features, module.in_features, module.bias is not None)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        )
        for block in actual["layers"].children()
    }
    if len(kinds) > 1:
        raise Unlike("its layers differ from each other")
    if deep := next(
        (name for name, _, shape in parameters if ".layers." in name and len(shape) > 2), None
    ):
        raise Unlike(f"{deep} has three dimensions: experts and convolutions are not counted here")
    return {"parameters": tuple(parameters), "matrices": kinds.pop()}


def output_of(whole: Any) -> nn.Linear:
    """The matrix that makes logits. Raises Unlike where it is none."""
    head = whole.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise Unlike("its output is not one matrix")
    return head


def _saved_names(whole: Any) -> dict[int, str]:
    """By the identity of a parameter, the name that transformers saves it under."""
    kept = dict(whole.named_parameters())
    known = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    persistent = [name for name in whole.state_dict() if name not in known]
    if persistent:
        raise Unlike(f"files keep {persistent[0]}, which is no parameter")
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 a model computes with the names of its files
        return {id(parameter): name for name, parameter in kept.items()}
    return {
        id(parameter): name for name, parameter in revert_weight_conversion(whole, kept).items()
    }


TOKENS = 24
# Greatest difference that rounding explains, as a share of the largest logit.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
OTHER = "choose another model, or one of the families of docs/reference/models.md"


@torch.no_grad()
def check_head(model: "Decoder", limit: float) -> None:
    """Compares logits with those of transformers' own forward. Raises UserError; the model is in evaluation mode."""
    assert isinstance(model.model, TransformersBackbone) and not model.training
    tokens_BT = _trial_tokens(model)
    theirs: Tensor = model.model.whole(input_ids=tokens_BT, use_cache=False).logits
    error = _difference(model(tokens_BT), theirs)
    if not error <= limit:
        problem = f"its logits are more than a matrix of its last hidden states (they differ by {error:.2g})"
        raise UserError(
            problem, where=f"a {model.config.family} model through transformers", fix=OTHER
        )


@torch.no_grad()
def check_rows(model: "Decoder", limit: float, *, packed: bool) -> None:
    """No token may see a later one, nor, in `packed` rows, one of another document. Raises UserError."""
    assert not model.training
    tokens_BT = _trial_tokens(model)
    where = f"a {model.config.family} model through transformers"
    first = tokens_BT[:, : TOKENS // 3]
    second = tokens_BT[:, TOKENS // 3 :]
    error = _difference(model(tokens_BT)[:, : first.shape[1]], model(first))
    if not error <= limit:
        problem = (
            f"its tokens see later ones, so that it cannot be trained to predict them ({error:.2g})"
        )
        raise UserError(problem, where=where, fix=OTHER)
    if not packed:
        return
    numbers = torch.arange(TOKENS)
    device = tokens_BT.device
    documents = numbers.ge(first.shape[1]).long()
    positions = numbers - documents * first.shape[1]
    rows = (
        documents.to(device).expand(tokens_BT.shape),
        positions.to(device).expand(tokens_BT.shape),
    )
    apart = "set data.packing=false: then each row is one document"
    try:
        together = model(tokens_BT, documents_BT=rows[0], positions_BT=rows[1])
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        problem = f"this architecture takes no mask of documents ({str(error).partition(chr(10))[0][:120]})"
        raise UserError(problem, where="data.packing=true", fix=apart) from error
    errors = [
        _difference(a, model(b))
        for a, b in (
            (together[:, : first.shape[1]], first),
            (together[:, first.shape[1] :], second),
        )
    ]
    if not max(errors) <= limit:
        problem = (
            f"no document masking in this architecture ({max(errors):.2g} of the largest logit)"
        )
        raise UserError(problem, where="data.packing=true", fix=apart)


def _trial_tokens(model: "Decoder") -> Tensor:
    draw = torch.Generator().manual_seed(0)
    device = model.model.embed_tokens.weight.device
    return torch.randint(model.config.vocab_size, (2, TOKENS), generator=draw).to(device)


def _difference(actual: Tensor, exact: Tensor) -> float:
    """NaN when a value is none."""
    share = (actual.float() - exact.float()).abs().max() / exact.float().abs().max().clamp_min(
        1e-30
    )
    return float(share)
