"""What an adapter's file has of the parts of a multimodal model that read pictures: LoRA on them, and modules that are
trained in full. Names are those of transformers' whole model.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.pictures import Vision, vision_of
from bloomery.model.adapters.lora import LoraLinear, adapt_tower
from bloomery.model.adapters.peft_names import AGAIN, PREFIX
from bloomery.model.adapters.peft_reading import PAIR, TowerChanges, tower_changes
from bloomery.model.adapters.settings import TENSORS, Adaptation, Pair, right_base
from bloomery.model.configs import stated_config
from bloomery.model.io.parameters import is_linear_map, put
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import stored_tensors, vision_tensors
from bloomery.model.vision import LORA_NAMES, WHOLE, VisionTower, load_tower, names_in_files

LISTS = (nn.ModuleList, nn.ModuleDict)  # PEFT copies no module without a forward


@dataclass(frozen=True)
class InsideWhole:
    """Where PEFT finds an adapter's modules in a multimodal model.

    `language_model`: the name of that part. Of what reads pictures, `pairs`: those of LoRA by module, `trained`: the
    parameters that are trained in full, `modules_to_save`: the modules that have them.
    """

    language_model: str
    pairs: Mapping[str, Pair]
    trained: tuple[str, ...]
    modules_to_save: tuple[str, ...]

    def name_of(self, name: str) -> str:
        """Of a part of the language model: "model.layers" is "model.language_model.layers"."""
        if not name.startswith(WHOLE):
            return name
        return f"{WHOLE}{self.language_model}.{name.removeprefix(WHOLE)}"

    def tensors_of_tower(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By PEFT's names without their prefix; `state`: the result of `lora.trained_state`."""
        matrices = {
            f"{module}{name}.weight": state[f"{module}{name}"].contiguous()
            for module in self.pairs
            for name in LORA_NAMES
        }
        return matrices | {name: state[name].contiguous() for name in self.trained}

    def config(self, settings_json: Mapping[str, object]) -> dict[str, object]:
        """PEFT's config for a multimodal base, of one for its language model. Targets are a pattern: last names alone
        would name the tower's, too.
        """
        changed = dict(settings_json)
        targets = cast(list[str], settings_json["target_modules"])
        ends = "|".join(re.escape(target.removeprefix(WHOLE)) for target in targets)
        patterns = [rf"model\.{re.escape(self.language_model)}\.(?:.*\.)?(?:{ends})"]
        patterns += dict.fromkeys(map(_pattern, self.pairs))
        changed["target_modules"] = "|".join(patterns)
        for key in ("modules_to_save", "target_parameters"):
            names = cast(list[str] | None, settings_json.get(key))
            if names:
                changed[key] = [self.name_of(name) for name in names]
        if self.modules_to_save:
            saved = cast(list[str] | None, changed["modules_to_save"]) or []
            changed["modules_to_save"] = [*saved, *self.modules_to_save]

        # The numbers of the config are the language model's most frequent ones.
        ranks = {module: pair.rank for module, pair in self.pairs.items()}
        root = 0.5 if settings_json["use_rslora"] else 1.0
        alphas = {module: pair.scale * pair.rank**root for module, pair in self.pairs.items()}
        of_tower = {"rank_pattern": ("r", ranks), "alpha_pattern": ("lora_alpha", alphas)}
        for key, (common, numbers) in of_tower.items():
            pattern = cast(dict[str, object], settings_json[key])
            changed[key] = {self.name_of(name): value for name, value in pattern.items()} | {
                module: number
                for module, number in numbers.items()
                if number != settings_json[common]
            }
        return changed


def _pattern(module: str) -> str:
    """Of a module and those that differ in the numbers of layers."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in module.split("."))


def inside_whole(tower: VisionTower) -> InsideWhole:
    """For what is trained of a tower now."""
    pairs = {
        WHOLE + name: Pair(module.rank, module.scale)
        for name, module in tower.tower.named_modules()
        if isinstance(module, LoraLinear)
    }
    trained = [name for name in tower.trained if not name.endswith(LORA_NAMES)]
    return InsideWhole(
        tower.language_model, pairs, tuple(trained), tuple(_whole_modules(tower, trained))
    )


def _whole_modules(tower: VisionTower, trained: Iterable[str]) -> list[str]:
    """The largest modules, of those that PEFT can copy, all of whose parameters are trained in full."""
    names = set(trained)
    found: list[str] = []
    for name, module in tower.tower.named_modules():
        parameters = [f"{WHOLE}{name}.{inner}" for inner, _ in module.named_parameters()]
        is_inside = any(f"{WHOLE}{name}.".startswith(f"{outer}.") for outer in found)
        if not name or not parameters or isinstance(module, LISTS) or is_inside:
            continue
        if names.issuperset(parameters):
            found.append(WHOLE + name)
    return found


@torch.no_grad()
def read_tower_adapter(tower: VisionTower, folder: Path) -> None:
    """Fills what is trained of a tower from an adapter's file. Raises UserError when a tensor is missing."""
    stored = stored_tensors(folder / TENSORS)
    with TensorReader() as reader:
        for name, parameter in tower.trained.items():
            in_file = PREFIX + name + (".weight" if name.endswith(LORA_NAMES) else "")
            if in_file not in stored:
                raise UserError(
                    f"the adapter lacks {in_file}", where=str(folder / TENSORS), fix=AGAIN
                )
            put(reader.read(stored[in_file]), parameter)


def open_tower(
    vision: Vision,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    adapter: Path | None = None,
    config: ModelConfig | None = None,
) -> VisionTower:
    """The tower of a folder to be used, with what an adapter changes of it. `config`: of the language model.

    Raises UserError as `load_tower` does, and for an adapter of another tower.
    """
    tower = load_tower(vision, folder, dtype=dtype, device=device)
    changes = None if adapter is None or config is None else tower_changes(adapter, config)
    if changes is not None:
        assert adapter is not None
        _refuse_other_tower(tower, changes, adapter)
        adapt_tower(tower, changes.pairs, Adaptation(pairs={}))
        parameters = {WHOLE + name: p for name, p in tower.tower.named_parameters()}
        with torch.no_grad(), TensorReader() as reader:
            for name, tensor in changes.tensors.items():
                of_pair = PAIR.fullmatch(name)
                parameter = parameters[f"{of_pair[1]}.{of_pair[2]}" if of_pair else name]
                put(reader.read(tensor), parameter)
    tower.requires_grad_(False)
    return tower


def _refuse_other_tower(tower: VisionTower, changes: TowerChanges, folder: Path) -> None:
    parameters = dict(tower.tower.named_parameters())
    modules = dict(tower.tower.named_modules())
    for name, tensor in changes.tensors.items():
        of_pair = PAIR.fullmatch(name)
        if of_pair is None:
            parameter = parameters.get(name.removeprefix(WHOLE))
            fits = parameter is not None and tuple(parameter.shape) == tuple(tensor.shape)
        else:
            module = modules.get(of_pair[1].removeprefix(WHOLE))
            fits = False
            if module is not None and is_linear_map(module):
                rank = changes.pairs[of_pair[1]].rank
                is_A = of_pair[2] == "lora_A"
                shape = (rank, module.in_features) if is_A else (module.out_features, rank)
                fits = shape == tuple(tensor.shape)
        if not fits:
            raise UserError(
                f"the adapter changes {name[:100]!r}, which what reads pictures in this base does not have so",
                where=str(folder / TENSORS),
                fix=right_base(folder),
            )


@torch.no_grad()
def merged_tower(
    base: Path, adapter: Path, config: ModelConfig, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """What an adapter changes of what reads pictures, merged: by the names of the base's files. `dtype`: None rounds
    each to that of the base, once.

    Raises UserError as `open_tower` does.
    """
    vision = vision_of(stated_config(base), where=str(base))
    changes = tower_changes(adapter, config)
    if vision is None or changes is None:
        return {}
    tower = open_tower(
        vision,
        base,
        dtype=torch.float32,
        device=torch.device("cpu"),
        adapter=adapter,
        config=config,
    )
    names = names_in_files(tower, base)
    stored = vision_tensors(base)
    merged = {
        f"{module}.weight": cast(
            LoraLinear, tower.tower.get_submodule(module.removeprefix(WHOLE))
        ).merged_weight()
        for module in changes.pairs
    }
    for name in changes.tensors:
        if not PAIR.fullmatch(name):
            merged[name] = tower.tower.get_parameter(name.removeprefix(WHOLE)).detach()
    return {
        names[name]: each.to(dtype or stored[names[name]].dtype) for name, each in merged.items()
    }
