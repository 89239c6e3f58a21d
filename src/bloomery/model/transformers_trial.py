"""What a tiny random model of an architecture shows about transformers' layers of the large one.

B batch, T time, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bloomery.facts.config import DocumentWay, ModelConfig
from bloomery.model.cache import Cache
from bloomery.model.tiny_configs import tiny_config
from bloomery.model.transformers_backend import TransformersBackbone, layer_list, saved_tensors
from bloomery.model.transformers_files import refuse_lossy_files
from bloomery.model.transformers_model import Unlike, built_config

NUM_TOKENS = 27
FIRST_DOCUMENT = 11  # longer than a tiny window, as the second one is
# Rounding of float32, as a share of the largest number: between two orders of evaluation, and within one.
OTHER_ORDER = 1e-5
SAME_ORDER = 1e-7


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Facts of an architecture: fields of `config.TransformersBackend`, and the cap of its logits."""

    factor: float
    softcap: float | None
    documents: DocumentWay
    documents_reason: str
    cache: Literal["own", "none"]


@lru_cache(maxsize=16)
def trial(raw_config: str, attention: str, config: ModelConfig) -> Trial:
    """Runs the tiny model. Raises Unlike where logits are more than a matrix of hidden states, scaled and capped.

    `config`: of the large model, with any `transformers_backend`.
    """
    # The caller may be building a model on the meta device.
    try:
        with torch.no_grad(), torch.device("cpu"):
            return _tried(tiny_backbone(raw_config, attention, config))
    except Unlike:
        raise
    except Exception as error:  # whatever a class raises when a size does not fit
        return _untried(built_config(raw_config), " ".join(str(error).split())[-120:])


def _tried(backbone: TransformersBackbone) -> Trial:
    num_tokens = backbone.embed_tokens.num_embeddings
    tokens_BT = torch.randint(3, num_tokens, (2, NUM_TOKENS), generator=_stream(1))
    factor, softcap = _head_of(backbone, tokens_BT)
    with backbone.whole() as reference:
        refuse_lossy_files(reference, saved_tensors(reference))
    refuse_later_tokens(backbone, tokens_BT)
    documents, reason = _documents_of(backbone, tokens_BT)
    return Trial(
        factor=factor,
        softcap=softcap,
        documents=documents,
        documents_reason=reason,
        cache="own" if _continues(backbone, tokens_BT) else "none",
    )


def tiny_backbone(raw_config: str, attention: str, config: ModelConfig) -> TransformersBackbone:
    """A backbone of tiny random layers on the CPU, float32, in evaluation mode. Raises what transformers raises."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        reference = build(
            tiny_config(built_config(raw_config)),
            attn_implementation=attention,
            dtype=torch.float32,
        ).eval()
        draw_weights(reference)
    assert config.transformers_backend is not None
    tiny = replace(config, num_layers=len(layer_list(reference, None)))
    return TransformersBackbone(tiny, "mask", reference=reference)


@torch.no_grad()
def draw_weights(reference: nn.Module) -> None:
    """In place: matrices that keep the size of what they multiply, and noise on all else, as some begin at zero."""
    for name, parameter in reference.named_parameters():
        if parameter.ndim > 1:
            inputs = parameter[0].numel()
            is_embedding = parameter.shape[0] > inputs and "embed" in name
            std = 1.0 if is_embedding else inputs**-0.5
            parameter.normal_(0.0, std, generator=_stream(2))
        else:
            noise = torch.empty_like(parameter).normal_(0.0, 0.1, generator=_stream(3))
            parameter.add_(noise)


def _stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _untried(config: Any, problem: str) -> Trial:
    """What is right for any model; the head by the keys that configs have for it, which loading checks."""
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Trial(
        factor=float(scale) / float(divisor),
        softcap=getattr(config, "final_logit_softcapping", None),
        documents="rows",
        documents_reason=f"no tiny model of it could be tried ({problem})",
        cache="none",
    )


def _head_of(backbone: TransformersBackbone, tokens_BT: Tensor) -> tuple[float, float | None]:
    """Factor and cap of what the output matrix gives. Raises Unlike for anything else."""
    products: list[Tensor] = []
    hook = backbone.head.register_forward_hook(lambda _, __, output: products.append(output))
    with backbone.whole() as reference:
        logits_BTV = reference(input_ids=tokens_BT, use_cache=False).logits.float()
    hook.remove()
    if len(products) != 1 or products[0].shape != logits_BTV.shape:
        raise Unlike("its logits are more than one matrix of its last hidden states")
    product_BTV = products[0].float()

    # logits = factor * product, or cap * tanh(factor * product / cap) with a cap that its config states.
    caps = {
        value
        for key, value in backbone.reference.config.to_dict().items()
        if isinstance(value, int | float) and value and "cap" in key
    }
    candidates: list[float | None] = [None, *caps]
    for softcap in candidates:
        linear_BTV = logits_BTV
        if softcap is not None:
            linear_BTV = torch.atanh((logits_BTV.double() / softcap).clamp(-1, 1)) * softcap
        factor = float((linear_BTV * product_BTV).sum() / product_BTV.square().sum())
        expected_BTV = factor * product_BTV
        if softcap is not None:
            expected_BTV = softcap * torch.tanh(expected_BTV / softcap)
        if _difference(expected_BTV, logits_BTV) <= OTHER_ORDER:
            if backbone.head.bias is not None and abs(factor - 1) > OTHER_ORDER:
                raise Unlike("its logits are scaled after a bias")
            return (1.0 if abs(factor - 1) <= OTHER_ORDER else factor), softcap
    raise Unlike("its logits are more than one matrix of its last hidden states")


def refuse_later_tokens(backbone: TransformersBackbone, tokens_BT: Tensor) -> None:
    """Raises Unlike where tokens see later ones. A beginning has the same numbers whatever follows it."""
    beginning_BT = tokens_BT[:, :FIRST_DOCUMENT]
    whole = backbone(tokens_BT, None, None, None)[:, :FIRST_DOCUMENT]
    error = _difference(whole, backbone(beginning_BT, None, None, None))
    is_causal = getattr(backbone.reference.config, "is_causal", True)
    if not error <= 10 * OTHER_ORDER or is_causal is False:
        raise Unlike("its tokens see later ones, so that it cannot be trained to predict them")


def _documents_of(backbone: TransformersBackbone, tokens_BT: Tensor) -> tuple[DocumentWay, str]:
    """The first way that keeps two documents of a row apart, and why none but rows of their own does."""
    ways: tuple[DocumentWay, ...] = ("positions", "masks", "mask")
    reason = ""
    for way in ways:
        backbone.documents = way
        try:
            problem = documents_problem(
                lambda tokens_BT, documents_BT: backbone(tokens_BT, None, documents_BT, None),
                lambda tokens_BT: backbone(tokens_BT, None, None, None),
                tokens_BT,
            )
        except Exception as error:  # an architecture refuses masks in its own words
            problem = f"it takes no mask of documents: {str(error).partition(chr(10))[0][:80]}"
        if problem is None:
            return way, ""
        reason = reason or problem
    return "rows", reason


def documents_problem(
    packed: Callable[[Tensor, Tensor], Tensor],
    alone: Callable[[Tensor], Tensor],
    tokens_BT: Tensor,
    *,
    rounding: float = OTHER_ORDER,
) -> str | None:
    """How two documents of a row mix, if they do. `packed` and `alone`: numbers of each token, of rows with documents
    and of rows that are one.

    Other tokens in the first document may not change a number of the second, at the rounding of one order of
    evaluation, in which masked tokens weigh exactly 0. And each must have the numbers that it has alone, up to
    `rounding` and that of another order.
    """
    length = tokens_BT.shape[1]
    first = min(FIRST_DOCUMENT, length // 2)
    document_T = torch.arange(length, device=tokens_BT.device).ge(first).long()
    documents_BT = document_T.expand(tokens_BT.shape)
    other_BT = tokens_BT.clone()
    other_BT[:, :first] = tokens_BT[:, :first].flip(1)
    together = packed(tokens_BT, documents_BT).float()
    noise = _difference(packed(tokens_BT, documents_BT).float(), together)
    leak = _difference(packed(other_BT, documents_BT).float()[:, first:], together[:, first:])
    if not leak <= 2 * noise + SAME_ORDER:
        return f"a document changes the one after it, by {leak:.1g} of the largest number"

    # Two orders of evaluation: both rows at once, and each by itself.
    second_BT = tokens_BT[:, first:]
    second = alone(second_BT).float()
    one_by_one = torch.cat([alone(row_T[None]) for row_T in second_BT]).float()
    worst = max(
        _difference(together[:, :first], alone(tokens_BT[:, :first]).float()),
        _difference(together[:, first:], second),
    )
    if not worst <= rounding + 8 * _difference(one_by_one, second):
        return f"a document differs from the same one alone, by {worst:.1g} of the largest number"
    return None


def _continues(backbone: TransformersBackbone, tokens_BT: Tensor) -> bool:
    """Whether transformers' cache continues a text, token by token and several at once."""
    row_BT = tokens_BT[:1]
    exact = backbone(row_BT, None, None, None)
    cache = Cache(backbone.config, NUM_TOKENS)
    ends = (6, 7, 9, 10, NUM_TOKENS)
    start = 0
    try:
        for end in ends:
            part = backbone(row_BT[:, start:end], None, None, cache)
            if not _difference(part, exact[:, start:end]) <= OTHER_ORDER:
                return False
            start = end
    except Exception:  # it has a cache of another kind, or none
        return False
    return True


def _difference(actual: Tensor, exact: Tensor) -> float:
    """The greatest one, as a share of the largest exact value; NaN when a value is none."""
    largest = exact.abs().max().clamp_min(1e-30)
    return float((actual - exact).abs().max() / largest)
