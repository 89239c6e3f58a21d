"""Turns a YAML file of Axolotl or LLaMA-Factory into a recipe: every key is mapped or listed with a reason."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.recipe.aliases import Alias, accepted, known_keys, look_up
from bloomery.recipe.yaml import MAX_BYTES, read_yaml

_SIGNS = {  # keys that only this program has
    "Axolotl": {"base_model", "datasets", "sequence_len", "micro_batch_size", "num_epochs", "val_set_size"},
    "LLaMA-Factory": {"model_name_or_path", "stage", "finetuning_type", "cutoff_len", "template", "dataset"},
}
_DEFAULTS = {  # where they differ from those of a recipe
    "Axolotl": ("data.packing=false", "data.validation=0%", "optimizer.weight_decay=0", "optimizer.betas=[0.9, 0.999]",
                "optimizer.warmup=3%"),
    "LLaMA-Factory": ("data.packing=false", "data.validation=0%", "optimizer.learning_rate=5e-05",
                      "optimizer.weight_decay=0", "optimizer.betas=[0.9, 0.999]", "optimizer.schedule=linear",
                      "optimizer.warmup=0 steps", "train.epochs=3"),
}  # fmt: skip
_LENGTHS = ("train.max_steps", "train.max_tokens", "train.max_time", "train.epochs")  # the first that is set wins


@dataclass
class _Draft:
    """`values`: YAML text and origin by recipe key; `left`: reasons by the other key; `empty`: keys without a value."""

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)

    def add(self, alias: Alias) -> None:
        if not alias.edits or alias.guess:
            self.left[alias.name] = re.sub(r"^leave it out(: )?", "", alias.reason) or "no such setting"
        for edit in () if alias.guess else alias.edits:
            key, equals, value = edit.partition("=")
            comment = alias.name + (f": {alias.reason}" if alias.reason else "")
            if not equals:
                self.left[alias.name] = f"set {key} yourself" + (f": {alias.reason}" if alias.reason else "")
            elif self.values.setdefault(key, (value, comment))[0] != value:
                self.left[alias.name] = f"{key} is {self.values[key][0]} already, from {self.values[key][1]}"


def import_recipe(path: Path) -> tuple[str, str]:
    """The recipe as YAML and the program whose file it was. Raises UserError (code 2)."""
    text = read_input(path, MAX_BYTES, code=2).decode("utf-8-sig", errors="replace")
    document = read_yaml(text, source=path.name, folder=path.parent)
    if document.mistakes:
        wrong = document.mistakes[0]
        raise UserError(wrong.problem, where=wrong.place, fix=wrong.fix, code=2)
    data = document.data if isinstance(document.data, dict) else {}
    counts = {program: len(signs & data.keys()) for program, signs in _SIGNS.items()}
    program = max(counts, key=lambda name: counts[name])
    if counts[program] < 2:
        fix = "give a training file of Axolotl (base_model, datasets) or of LLaMA-Factory (model_name_or_path, dataset)"
        raise UserError(f"not a file of Axolotl or LLaMA-Factory: {path.name}", where=str(path), fix=fix, code=2)
    draft = _Draft()
    for alias in _aliases(data, (), program, draft.empty):
        draft.add(alias)
    _complete(draft, data, program)
    return _text(draft, path.name, program), program


def _aliases(data: Mapping[str, Any], path: tuple[str, ...], program: str, empty: list[str]) -> Iterator[Alias]:
    for key, value in data.items():
        inner = (*path, str(key))
        if value in (None, "", [], {}):
            empty.append(".".join(inner))
            continue
        alias = look_up(inner, value, data, program=program)
        if alias is None and isinstance(value, dict):
            yield from _aliases(value, inner, program, empty)
        else:
            yield alias or Alias(".".join(inner))


def _complete(draft: _Draft, data: Mapping[str, Any], program: str) -> None:
    """The keys that a recipe needs and the other program implies."""
    values = draft.values
    lengths = [key for key in _LENGTHS if key in values]
    for key in lengths[1:]:
        draft.left[values.pop(key)[1]] = f"{lengths[0]} sets the length"
    if any(key.startswith("adapter.") for key in values) and values.get("adapter.kind", ("none",))[0] == "none":
        if "adapter.kind" in values:  # full fine-tuning with settings for LoRA left in the file
            for key in [key for key in values if key.startswith("adapter.") and key != "adapter.kind"]:
                draft.left[values.pop(key)[1]] = "no adapter is trained"
        else:
            values["adapter.kind"] = ("lora", "settings of LoRA are given")
    if values.get("adapter.kind", ("none",))[0] == "none" and "quantize.kind" in values:
        draft.left[values.pop("quantize.kind")[1]] = "only frozen weights are quantized, and no adapter is trained"
    text_only = "pretraining_dataset" in data or values.get("data.format", ("",))[0] == "text"
    default = f"the default of {program}"
    values.setdefault("objective.kind", ("pretrain" if text_only else "sft", default))
    if program == "LLaMA-Factory" and values.get("adapter.kind", ("",))[0] in ("lora", "dora"):
        rank = values.setdefault("adapter.rank", ("8", default))[0]
        values.setdefault("adapter.alpha", (str(2 * int(rank)), default))
        values.setdefault("adapter.target_modules", ("[all-linear]", default))
    for edit in _DEFAULTS[program]:
        key, _, value = edit.partition("=")
        if key != "train.epochs" or not lengths:
            values.setdefault(key, (value, default))
    if not values.keys() & {"data.path", "data.sources"}:
        values["data.path"] = ("DATASET", "set it: a file, folder or Hub id")
    if "model.from" not in values:
        values["model.from"] = ("MODEL", "set it: a folder or Hub id")
    if "train.batch_size" not in values and (micro := values.get("train.micro_batch_size")):
        values["train.batch_size"] = (micro[0], "sequences per step: without gradient accumulation, on one device")
    kinds = [f"{key}={value}" for key, (value, _) in values.items() if key.endswith(".kind")]
    for key in [key for key in values if not accepted(f"{key}={values[key][0]}", *kinds)]:
        draft.left[values.pop(key)[1]] = f"{key} does not fit {values['objective.kind'][0]}"


def _text(draft: _Draft, source: str, program: str) -> str:
    order = [".".join(key) for key in known_keys()]
    lines = [f"# From {source} ({program}): {len(draft.values)} keys; those without a counterpart are at the end."]
    section = ""
    for key in sorted(draft.values, key=lambda key: order.index(key) if key in order else len(order)):
        head, _, rest = key.rpartition(".")
        value, comment = draft.values[key]
        for depth, part in enumerate(parts := head.split(".") if head else []):
            if section.split(".")[: depth + 1] != parts[: depth + 1]:
                lines.append("  " * depth + part + ":")
        section = head
        lines.append(f"{'  ' * len(parts)}{rest}: {value}".ljust(48) + f"  # {comment}")
    if draft.left:
        width = max(map(len, draft.left))
        lines += ["", "# Without a counterpart:", *(f"#   {name:<{width}}  {why}" for name, why in draft.left.items())]
    if draft.empty:
        lines += ["", f"# Empty in {source}: {', '.join(draft.empty)}"]
    return "\n".join(lines) + "\n"
