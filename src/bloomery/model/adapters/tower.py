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
from bloomery.model.adapters.lora import LoraLinear
from bloomery.model.adapters.peft_names import AGAIN, PREFIX
from bloomery.model.adapters.settings import TENSORS, Pair
from bloomery.model.io.parameters import put
from bloomery.model.io.safetensors import TensorReader
from bloomery.model.io.stored import stored_tensors
from bloomery.model.vision import LORA_NAMES, WHOLE, VisionTower

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
