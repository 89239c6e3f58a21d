"""`bloomery recipes import`: a YAML file of Axolotl, LLaMA-Factory or TRL as a recipe.

Every key, however deep, is mapped or listed with a reason, and the recipe loads.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.recipe.aliases import (
    ROLLOUTS,
    Alias,
    accepted,
    dataset_aliases,
    known_keys,
    leaves,
    look_up,
    plain,
)
from bloomery.recipe.load import mistakes_in
from bloomery.recipe.yaml import MAX_BYTES, read_yaml

_SIGNS = {  # keys that only this program has
    "Axolotl": {
        "base_model",
        "datasets",
        "sequence_len",
        "micro_batch_size",
        "num_epochs",
        "val_set_size",
    },
    "LLaMA-Factory": {
        "model_name_or_path",
        "stage",
        "finetuning_type",
        "cutoff_len",
        "template",
        "dataset",
    },
    "TRL": {
        "model_name_or_path",
        "dataset_name",
        "use_peft",
        "max_length",
        "dataset_text_field",
        "num_generations",
        "reward_funcs",
        "max_completion_length",
    },
}
# Keys that only GRPOConfig and RLOOConfig of TRL have, and losses of GRPO.
_ROLLOUT_KEYS = {
    "generation_batch_size",
    "num_generations",
    "num_generations_eval",
    "normalize_advantages",
    "reward_clip_range",
    "reward_funcs",
    "reward_weights",
    "scale_rewards",
    "steps_per_generation",
}
# Keys that only PPOConfig of TRL has.
_PPO_KEYS = {
    "cliprange",
    "cliprange_value",
    "kl_coef",
    "kl_estimator",
    "missing_eos_penalty",
    "num_ppo_epochs",
    "response_length",
    "vf_coef",
    "whiten_rewards",
}
_ROLLOUT_LOSSES = {"grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"}
_PROMPT_TOKENS = 512  # TRL has no limit for prompts
_DEFAULTS = {  # where they differ from those of a recipe
    "Axolotl": (
        "data.packing=false",
        "data.validation=0%",
        "optimizer.weight_decay=0",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.warmup=3%",
    ),
    "LLaMA-Factory": (
        "data.packing=false",
        "data.validation=0%",
        "optimizer.learning_rate=5e-05",
        "optimizer.weight_decay=0",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.schedule=linear",
        "optimizer.warmup=0 steps",
        "train.epochs=3",
    ),
    "TRL": (
        "data.packing=false",
        "data.validation=0%",
        "data.sequence_length=1024",
        "optimizer.weight_decay=0",
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.schedule=linear",
        "optimizer.warmup=0 steps",
        "train.epochs=3",
        "train.micro_batch_size=8",
        "train.activation_checkpointing=full",
    ),
}
_CONTEXT = ("model.rope_scaling.", "model.rope_theta", "model.max_positions")
# the first that is set wins
_LENGTHS = ("train.max_steps", "train.max_tokens", "train.max_time", "train.epochs")


@dataclass
class _Draft:
    """`values`: YAML text and origin by recipe key; `left`: reasons by the other key; `empty`: keys without a value."""

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)

    def add(self, alias: Alias) -> None:
        if not alias.edits or alias.guess:
            self.left[alias.name] = (
                re.sub(r"^leave it out(: )?", "", alias.reason) or "no such setting"
            )
        for edit in () if alias.guess else alias.edits:
            key, equals, value = edit.partition("=")
            comment = alias.name + (f": {alias.reason}" if alias.reason else "")
            if not equals:
                self.left[alias.name] = f"set {key} yourself" + (
                    f": {alias.reason}" if alias.reason else ""
                )
            elif key not in self.values:
                self.values[key] = (value, comment)
            elif self.values[key][0] == value:
                self.values[key] = (value, f"{self.values[key][1]}, {alias.name}")
            else:
                self.left[alias.name] = (
                    f"{key} is {self.values[key][0]} already, from {self.values[key][1]}"
                )


def import_recipe(path: Path) -> tuple[str, str]:
    """The recipe as YAML and the program whose file it was. Raises UserError (code 2)."""
    text = read_input(path, MAX_BYTES, code=2).decode("utf-8-sig", errors="replace")
    document = read_yaml(text, source=path.name, folder=path.parent)
    if document.mistakes:
        mistake = document.mistakes[0]
        raise UserError(mistake.problem, where=mistake.place, fix=mistake.fix, code=2)
    data = document.data if isinstance(document.data, dict) else {}

    # The program is the one with most keys that it alone has.
    counts = {program: len(signs & data.keys()) for program, signs in _SIGNS.items()}
    program = max(counts, key=lambda name: counts[name])
    if counts[program] < 2:
        fix = "give a training file of Axolotl (base_model, datasets), LLaMA-Factory (model_name_or_path, dataset) or "
        fix += "TRL (model_name_or_path, dataset_name)"
        raise UserError(
            f"not a file of Axolotl, LLaMA-Factory or TRL: {path.name}",
            where=str(path),
            fix=fix,
            code=2,
        )

    draft = _Draft()
    table = ROLLOUTS if program == "TRL" and _trains_on_completions(data) else program
    for alias in _aliases(data, (), table, draft.empty):
        draft.add(alias)
    _complete(draft, data, program)
    return _text(draft, path.name, program), program


def _aliases(
    data: Mapping[str, Any],
    path: tuple[str, ...],
    program: str,
    empty: list[str],
    outer: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Alias]:
    """An answer for each key of the file, however deep: the whole file is accounted for.

    `outer`: keys outside of this section that its keys are read with.
    """
    for key, value in data.items():
        inner = (*path, str(key))
        if value in (None, "", [], {}):
            empty.append(".".join(inner))
            continue
        if not path and key in _DATASETS and isinstance(value, list | dict):
            yield from dataset_aliases(str(key), value)
            continue
        if inner == ("overrides_of_model_config",) and isinstance(value, dict):
            yield from _config_aliases(value, inner, program, empty)
            continue
        if inner == ("trl",) and isinstance(value, dict):
            yield from _aliases(value, inner, program, empty, outer=data)
            continue
        alias = look_up(inner, value, {**outer, **data}, program=program)
        if alias is None and isinstance(value, dict):
            yield from _aliases(value, inner, program, empty)
            continue
        alias = alias or Alias(".".join(inner))
        yield alias

        # The keys inside a value that is answered as a whole are a part of that answer.
        recipe_keys = ", ".join(edit.partition("=")[0] for edit in alias.edits)
        reason = f"part of {recipe_keys}" if recipe_keys else alias.reason
        items = value if isinstance(value, list) else [value]
        for number, item in enumerate(items):
            place = (*inner[:-1], f"{inner[-1]}[{number}]") if isinstance(value, list) else inner
            for leaf_path, _ in leaves(item if isinstance(item, dict) else {}, place):
                yield Alias(".".join(leaf_path), reason=reason)


_DATASETS = ("datasets", "pretraining_dataset")


def _config_aliases(
    data: Mapping[str, Any], path: tuple[str, ...], program: str, empty: list[str]
) -> Iterator[Alias]:
    """Overrides of the model's config: RoPE and the context can be changed, nothing else."""
    rope = {
        key: data[key]
        for key in ("rope_scaling", "rope_theta", "max_position_embeddings")
        if key in data
    }
    for alias in _aliases(rope, (), program, empty):
        yield replace(alias, name=".".join((*path, alias.name)))
    others = {key: value for key, value in data.items() if key not in rope}
    for leaf_path, _ in leaves(others, path):
        yield Alias(".".join(leaf_path), reason="not supported: the model's own config is used")


def _complete(draft: _Draft, data: Mapping[str, Any], program: str) -> None:
    """The keys that a recipe needs and the other program implies."""
    values = draft.values
    default = f"the default of {program}"

    def leave_out(key: str, reason: str) -> None:
        _, origin = values.pop(key)
        draft.left[origin] = reason

    # A recipe has one length.
    lengths = [key for key in _LENGTHS if key in values]
    for key in lengths[1:]:
        leave_out(key, f"{lengths[0]} sets the length")
    if program == "TRL":
        _complete_trl(values, data)

    # Settings of LoRA mean an adapter, unless the file says full fine-tuning.
    adapter_keys = [key for key in values if key.startswith("adapter.") and key != "adapter.kind"]
    if adapter_keys and "adapter.kind" not in values:
        values["adapter.kind"] = ("lora", "settings of LoRA are given")
    adapter_kind = values.get("adapter.kind", ("none",))[0]
    if adapter_kind == "none":
        for key in adapter_keys:
            leave_out(key, "no adapter is trained")
        if "quantize.kind" in values:
            reason = "only frozen weights are quantized, and no adapter is trained"
            leave_out("quantize.kind", reason)
    else:
        for key in [key for key in values if key.startswith(_CONTEXT)]:
            leave_out(key, "not supported with an adapter: change config.json of the base model")

    # The objective, where the file names none that is supported.
    text_only = "pretraining_dataset" in data or values.get("data.format", ("",))[0] == "text"
    refused = next((name for name in ("rl", "stage") if name in draft.left), None)
    reason = default
    if refused is not None:
        reason = f"{refused}={plain(data.get(refused))} is not supported: choose another"
    values.setdefault("objective.kind", ("pretrain" if text_only else "sft", reason))
    if values["objective.kind"][0] in ("grpo", "rloo", "ppo"):
        _complete_rollouts(values, program)

    # Defaults of the program that differ from those of a recipe.
    if program == "LLaMA-Factory" and adapter_kind in ("lora", "dora"):
        rank, _ = values.setdefault("adapter.rank", ("8", default))
        values.setdefault("adapter.alpha", (str(2 * int(rank)), default))
        values.setdefault("adapter.target_modules", ("[all-linear]", default))
    for edit in _DEFAULTS[program]:
        key, _, value = edit.partition("=")
        if key != "train.epochs" or not lengths:
            values.setdefault(key, (value, default))

    # What every recipe needs.
    if not values.keys() & {"data.path", "data.sources"}:
        values["data.path"] = ("DATASET", "set it: a file, folder or Hub id")
    values.setdefault("model.from", ("MODEL", "set it: a folder or Hub id"))
    if "train.batch_size" not in values and "train.micro_batch_size" in values:
        micro_batch_size, _ = values["train.micro_batch_size"]
        reason = "sequences per step: without gradient accumulation, on one device"
        values["train.batch_size"] = (micro_batch_size, reason)

    # Keys that do not fit the kinds of this recipe.
    kinds = [f"{key}={value}" for key, (value, _) in values.items() if key.endswith(".kind")]
    for key in [key for key in values if not accepted(f"{key}={values[key][0]}", *kinds)]:
        leave_out(key, f"{key} does not fit {values['objective.kind'][0]}")
    _settle(draft)


def _settle(draft: _Draft) -> None:
    """Moves keys that the schema refuses together to the list of those left, until the recipe loads."""
    while refusal := _refused(draft.values):
        key, problem = refusal
        draft.left[draft.values.pop(key)[1]] = f"{key} does not fit: {problem}"


def _refused(values: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """A key that the schema refuses among these values, and why; None where the recipe loads."""
    data: dict[str, Any] = {}
    for key, (text, _) in values.items():
        *parents, last = key.split(".")
        section = data
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = read_yaml(text, source="", folder=Path()).data
    for mistake in mistakes_in(data):
        path = [str(part) for part in mistake.path]
        for length in range(len(path), 0, -1):  # the key, else one of the section that lacks a key
            keys = [key for key in values if key.split(".")[:length] == path[:length]]
            if keys:
                return keys[-1], mistake.problem
        return list(values)[-1], mistake.problem
    return None


def _trains_on_completions(data: Mapping[str, Any]) -> bool:
    """Whether a file of TRL is one of GRPOConfig, RLOOConfig or PPOConfig."""
    keys = _ROLLOUT_KEYS | _PPO_KEYS
    return bool(keys & data.keys()) or data.get("loss_type") in _ROLLOUT_LOSSES


def _complete_rollouts(values: dict[str, tuple[str, str]], program: str) -> None:
    """What training on completions needs: rewards, and sequences with room for a prompt and a completion."""
    if "rewards" not in values:
        reason = "set it: your function score(prompts, completions, **columns) of rewards.py"
        values["rewards"] = ('[{python: "rewards.py:score"}]', reason)
    if "data.sequence_length" not in values:
        longest = values.get("objective.max_completion_length", ("512",))[0]
        length = _PROMPT_TOKENS + int(longest) if longest.isdigit() else 2 * _PROMPT_TOKENS
        reason = f"prompts of {_PROMPT_TOKENS} tokens and their completions: {program} has no limit"
        values["data.sequence_length"] = (str(length), reason)


def _complete_trl(values: dict[str, tuple[str, str]], data: Mapping[str, Any]) -> None:
    """What the commands and the model arguments of TRL set: its file names neither `sft` nor `dpo` (TRL 1.16)."""
    if _trains_on_completions(data):
        objective = ("grpo", "of `trl grpo`; set rloo for `trl rloo`")
        if {"normalize_advantages", "reward_clip_range"} & data.keys():
            objective = ("rloo", "of `trl rloo`")
        if _PPO_KEYS & data.keys():
            objective = ("ppo", "of PPOTrainer, up to TRL 1.15")
        values.setdefault("objective.kind", objective)
    if "objective.beta" in values:
        values.setdefault("objective.kind", ("dpo", "beta is given; kto and orpo have one, too"))
    kind, _ = values.setdefault(
        "objective.kind", ("sft", "of `trl sft`; set dpo, kto or reward for another command")
    )
    rates = {"sft": "2e-05", "reward": "0.0001", "ppo": "3e-06"}
    learning_rate = rates.get(kind, "1e-06")
    values.setdefault("optimizer.learning_rate", (learning_rate, f"the default of TRL for {kind}"))
    adapter_kind, _ = values.setdefault(
        "adapter.kind", ("none", "the default of TRL: use_peft is not set")
    )
    if adapter_kind == "lora":
        for edit in ("rank=16", "alpha=32", "dropout=0.05", "target_modules=[q_proj, v_proj]"):
            key, _, value = edit.partition("=")
            values.setdefault(f"adapter.{key}", (value, "the default of TRL and PEFT"))


def _text(draft: _Draft, source: str, program: str) -> str:
    """The recipe as YAML in the order of the schema, each key with its origin; then what is left out."""
    schema_order = [".".join(key) for key in known_keys()]
    position = {key: number for number, key in enumerate(schema_order)}
    lines = [
        f"# From {source} ({program}): {len(draft.values)} keys; those without a counterpart are at the end."
    ]
    open_sections: list[str] = []
    for key in sorted(draft.values, key=lambda key: position.get(key, len(position))):
        *sections, name = key.split(".")
        value, comment = draft.values[key]
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append("  " * depth + section + ":")
        open_sections = sections
        lines.append(f"{'  ' * len(sections)}{name}: {value}".ljust(48) + f"  # {comment}")

    if draft.left:
        width = max(map(len, draft.left))
        lines += [
            "",
            "# Without a counterpart:",
            *(f"#   {name:<{width}}  {why}" for name, why in draft.left.items()),
        ]
    if draft.empty:
        lines += ["", f"# Empty in {source}: {', '.join(draft.empty)}"]
    return "\n".join(lines) + "\n"
