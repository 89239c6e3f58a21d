"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, written and filled from.

R rank of a stored pair. A module that files store fused (GPT-2's c_attn, Phi-3's qkv_proj) gets one pair, in which
those of its parts stand side by side: their A below each other, their B on the diagonal. PiSSA's pair and the one that
it began with stand the same way, so that the file is a plain LoRA for the model as it was published.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.model.adapters.base_model import AGAIN, CONFIG, TENSORS
from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.adapters.targets import EMBEDDING, HEAD, Adaptation, linear_modules, shares_head, stored_modules
from bloomery.model.config import ModelConfig
from bloomery.model.families.weight_names import places
from bloomery.model.io.renaming import to_hf_names
from bloomery.model.io.safetensors import Reader
from bloomery.model.io.weight_files import WEIGHTS, Stored, stored_in

TASKS = {"tokens": "CAUSAL_LM", "values": "SEQ_CLS"}
PREFIX, MAGNITUDE = "base_model.model.", "lora_magnitude_vector"


@dataclass(frozen=True)
class Part:
    """One of our modules in a stored pair: its rows of B, and its rows of A, which are B's columns."""

    module: str
    outputs: slice
    ranks: slice


def layout(config: ModelConfig, settings: Adaptation, *, shared: bool = False) -> dict[str, list[Part]]:
    """The parts of each stored pair: side by side, or (`shared`, what others write) with one A for all of them."""
    where, found = places(config), dict[str, list[Part]]()
    for stored, modules in stored_modules(config).items():
        begin, parts = 0, []
        for module in modules:
            if module in settings.pairs:
                place, rank = where[f"{module}.weight"], settings.pairs[module].rank * (2 if settings.pissa else 1)
                parts.append(Part(module, slice(place.first, place.first + place.rows), slice(begin, begin + rank)))
                begin += 0 if shared else rank
        if parts:
            found[stored] = parts
    return found


def write_adapter(
    state: Mapping[str, Tensor], settings: Adaptation, config: ModelConfig, folder: Path, *, base: str
) -> None:
    """`state`: what `adapters.trained_state` gives. `base`: a folder or an id on the Hub. The folder exists."""
    tensors = {PREFIX + name: tensor.cpu() for name, tensor in _stored(state, settings, config)}
    write_named(tensors, adapter_config(settings, config, base=base), folder)


def write_named(tensors: Mapping[str, Tensor], said: Mapping[str, object], folder: Path) -> None:
    """The two files of an adapter: tensors in PEFT's names, on the CPU, and its config."""
    save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _stored(state: Mapping[str, Tensor], settings: Adaptation, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    where = places(config)
    for stored, parts in layout(config, settings).items():
        pairs = [_pair(state, part.module, pissa=settings.pissa) for part in parts]
        B = torch.zeros(where[f"{parts[0].module}.weight"].of, parts[-1].ranks.stop, dtype=pairs[0][1].dtype)
        for part, (_, piece) in zip(parts, pairs, strict=True):
            B[part.outputs, part.ranks] = piece.cpu()
        yield f"{stored}.lora_A.weight", torch.cat([A for A, _ in pairs]).contiguous()
        yield f"{stored}.lora_B.weight", B
        if settings.dora:
            yield f"{stored}.{MAGNITUDE}", torch.cat([state[f"{p.module}.lora_magnitude"] for p in parts])
    whole = {name: state[name] for name in where if name.rpartition(".")[0] in settings.whole}
    stored_whole = to_hf_names(whole, config)
    yield from stored_whole.items()
    if shares_head(config) and EMBEDDING in settings.whole:  # PEFT trains a copy of each, and reads both
        yield f"{HEAD}.weight", stored_whole[where[f"{EMBEDDING}.weight"].name].clone()


def _pair(state: Mapping[str, Tensor], module: str, *, pissa: bool) -> tuple[Tensor, Tensor]:
    A, B = state[f"{module}.lora_A"], state[f"{module}.lora_B"]
    if not pissa:
        return A, B
    return torch.cat((A, state[f"{module}.first_A"])), torch.cat((B, -state[f"{module}.first_B"]), 1)


def adapter_config(settings: Adaptation, config: ModelConfig, *, base: str) -> dict[str, object]:
    """PEFT's LoraConfig for what `write_adapter` writes."""
    pairs = {stored: parts[-1].ranks.stop for stored, parts in layout(config, settings).items()}
    scales = {stored: settings.pairs[parts[0].module].scale for stored, parts in layout(config, settings).items()}
    size = math.sqrt if settings.rslora else float
    alphas = {name: _plain(scales[name] * size(rank)) for name, rank in pairs.items()}
    rank, alpha = _commonest(pairs.values()), _commonest(alphas.values())
    return {
        "peft_type": "LORA", "task_type": TASKS[config.head], "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": alpha, "lora_dropout": settings.dropout, "bias": "none",
        "use_rslora": settings.rslora, "use_dora": settings.dora, "init_lora_weights": True,
        "fan_in_fan_out": _transposed(config), "target_modules": _shortened(set(pairs), config),
        "modules_to_save": _whole_modules(settings, config) or None,
        "rank_pattern": {name: r for name, r in pairs.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
    }  # fmt: skip


def _commonest(values: Any) -> Any:
    return Counter(values).most_common(1)[0][0]


def _plain(alpha: float) -> float | int:
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def _transposed(config: ModelConfig) -> bool:
    where = places(config)
    return any(where[f"{name}.weight"].transposed for name in linear_modules(config))


def _shortened(targets: set[str], config: ModelConfig) -> list[str]:
    """Last names where they mean every module of that name, else full names."""
    known = {places(config)[f"{name}.weight"].name.removesuffix(".weight") for name in linear_modules(config)}
    short: dict[str, None] = {}
    for name in (name for name in stored_modules(config) if name in targets):
        leaf = name.rpartition(".")[2]
        alike = {other for other in known if other.rpartition(".")[2] == leaf}
        short[leaf if alike <= targets else name] = None
    return list(short)


def _whole_modules(settings: Adaptation, config: ModelConfig) -> list[str]:
    """Full names: PEFT takes every module whose name ends with the one that is given."""
    names = [stored for stored, modules in stored_modules(config).items() if modules[0] in settings.whole]
    return names + ([HEAD] if shares_head(config) and EMBEDDING in settings.whole else [])


@torch.no_grad()
def read_trained(
    model: nn.Module, settings: Adaptation, config: ModelConfig, folder: Path, *, shared: bool = False
) -> None:
    """Fills what training changes: from a folder that `write_adapter` wrote for the same settings, or a `shared` one.

    Raises UserError when something is missing.
    """
    tensors = stored_in(folder, TENSORS)
    tensors |= {name.removesuffix(".weight"): each for name, each in tensors.items() if MAGNITUDE in name}
    with Reader() as reader:
        for stored, parts in layout(config, settings, shared=shared).items():
            named = {kind: _found(tensors, f"{stored}.{kind}", folder) for kind in _kinds(settings)}
            held = {kind: reader.read(each, 0, each.shape[0]) for kind, each in named.items()}
            for part in parts:
                _fill(model.get_submodule(part.module), part, held)
        where = places(config)
        for name in (name for name in where if name.rpartition(".")[0] in settings.whole):
            place = where[name]
            each = _found(tensors, place.name, folder)
            reader.fill(model.get_parameter(name).data, each, first=place.first, transposed=place.transposed)


def adapter_tensors(folder: Path) -> dict[str, Stored]:
    """What adapter_model.safetensors of another program holds, all of its values finite: an adapter is small, and one
    of NaN makes every answer noise. Raises UserError.
    """
    if not (folder / TENSORS).is_file() and (folder / "adapter_model.bin").is_file():
        raise UserError(
            "adapter_model.bin is a pickle: opening it could run anything", where=str(folder),
            remedy="ask its author for safetensors, or save it again with PEFT's save_pretrained",
        )  # fmt: skip
    found = stored_in(folder, TENSORS)
    with Reader() as reader:
        for name, stored in found.items():
            flat = replace(stored, shape=(math.prod(stored.shape),))
            pieces = reader.pieces(flat, 0, *flat.shape, device=torch.device("cpu")) if stored.kind in WEIGHTS else ()
            if not all(bool(piece.isfinite().all()) for _, piece in pieces):
                problem = f"{name[:120]} of the adapter holds values that are not finite (NaN or infinity)"
                remedy = f"{AGAIN}; of a run, name an earlier checkpoint with --step"
                raise UserError(problem, where=str(folder / TENSORS), remedy=remedy)
    return found


def _kinds(settings: Adaptation) -> list[str]:
    return ["lora_A.weight", "lora_B.weight"] + ([MAGNITUDE] if settings.dora else [])


def _found(tensors: Mapping[str, Stored], name: str, folder: Path) -> Stored:
    if PREFIX + name not in tensors:
        raise UserError(
            f"the adapter lacks {name}", where=str(folder / TENSORS), remedy="save or download the adapter again"
        )
    return tensors[PREFIX + name]


def _fill(module: nn.Module, part: Part, held: Mapping[str, Tensor]) -> None:
    assert isinstance(module, LoraLinear)
    A, B = held["lora_A.weight"][part.ranks], held["lora_B.weight"][part.outputs, part.ranks]
    module.lora_A.copy_(A[: module.rank])
    module.lora_B.copy_(B[:, : module.rank])
    if module.pissa:
        module.first_A.copy_(A[module.rank :])
        module.first_B.copy_(-B[:, module.rank :])
    if module.dora:
        module.lora_magnitude.copy_(held[MAGNITUDE][part.outputs])
