"""`bloomery recipes import`: a file of another training tool as a recipe.

Every key, however deep, is mapped or listed with a reason, the tool's own defaults are written, and the recipe loads.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.facts.copies import quantized_copy
from bloomery.facts.published import original_of
from bloomery.recipe.aliases import (
    ROLLOUTS,
    Alias,
    accepted,
    dataset_aliases,
    known_keys,
    leaves,
    look_up,
    method_of_axolotl,
    plain,
)
from bloomery.recipe.import_draft import Draft, Setting, ToolFile
from bloomery.recipe.import_files import read_foreign_file
from bloomery.recipe.import_mlx import mlx_lm
from bloomery.recipe.import_rules import axolotl, llama_factory, trl
from bloomery.recipe.import_swift import swift
from bloomery.recipe.import_torchtune import torchtune
from bloomery.recipe.import_trainer import samples
from bloomery.recipe.import_unsloth import unsloth
from bloomery.recipe.load import mistakes_in
from bloomery.recipe.tools import not_recognized, recognized, refuse_other_files, tools
from bloomery.recipe.yaml import read_yaml

_PROMPT_TOKENS = 512  # TRL has no limit for prompts
_CONTEXT = ("model.rope_scaling.", "model.rope_theta", "model.max_positions")
# the first that is set wins
_LENGTHS = ("train.max_steps", "train.max_tokens", "train.max_time", "train.epochs")
_DATASETS = ("datasets", "pretraining_dataset")
_TRAINER_TOOLS = ("LLaMA-Factory", "TRL", "Unsloth", "ms-swift")  # on TrainingArguments
_RULES: Mapping[str, Callable[[Draft], None]] = MappingProxyType(
    {
        "Axolotl": axolotl,
        "LLaMA-Factory": llama_factory,
        "TRL": trl,
        "Unsloth": unsloth,
        "mlx-lm": mlx_lm,
        "ms-swift": swift,
        "torchtune": torchtune,
    }
)


def import_recipe(path: Path) -> tuple[str, str]:
    """The recipe as YAML and the tool whose file it was. Raises UserError (code 2)."""
    reading = read_foreign_file(path)
    file = recognized(reading.keys, path, program=reading.program, unread=reading.unread)
    if file is None:
        raise not_recognized(reading.keys, path)
    refuse_other_files(file, path)
    draft = drafted(file)
    return _text(draft, path.name), file.tool


# The recipe


def drafted(file: ToolFile) -> Draft:
    """What the file becomes: first the keys that decide about others, then the table, then the tool's defaults."""
    parents = ["Transformers"] * (file.tool in _TRAINER_TOOLS) + ["TRL"] * (file.tool == "Unsloth")
    defaults: dict[str, Any] = {}
    conditional: dict[str, Any] = {}
    for name in [*parents, file.tool]:
        entry = tools()[name]
        defaults |= entry["defaults"] | entry.get("commands", {}).get(file.command, {})
        conditional |= entry.get("conditional", {})
    draft = Draft(file, {**defaults, **conditional})
    _RULES[file.tool](draft)

    table = "TRL" if file.tool == "Unsloth" else file.tool
    if samples(draft) and file.tool in ("TRL", "Unsloth", "ms-swift"):
        table = ROLLOUTS
    for alias in _aliases(file.keys, (), table, draft):
        draft.add(alias)
    siblings = {**defaults, **file.keys}
    for name, value in defaults.items():
        if value is None or draft.given(name):
            continue
        answer = look_up((name,), value, siblings, program=table)
        if answer is not None:
            draft.add_default(answer)
    _name_original(draft)
    _complete(draft)
    return draft


def _name_original(draft: Draft) -> None:
    """The model behind the name of a quantized copy, with the quantization that is nearest to the copy's."""
    model = draft.settings.get("model.from")
    copy = None if model is None else quantized_copy(model.text)
    if model is None or copy is None:
        return
    original = original_of(copy)
    if original is None and copy.is_trained:
        reason = f"a copy ({copy.form}), read as it is: a frozen base"
        draft.settings["model.from"] = Setting(model.text, model.names, reason)
        return
    if original is None:
        reason = (
            f"set it: {model.text} is a copy ({copy.form}); name the model that it was made from"
        )
        draft.settings["model.from"] = Setting("MODEL", model.names, reason)
        return
    reason = f"the model of which the file names a copy ({copy.form})"
    if copy.is_trained:
        reason += "; an adapter may also be trained on the copy"
    draft.settings["model.from"] = Setting(original, model.names, reason)
    is_full = draft.value("adapter.kind") in ("", "none")
    if copy.quantize != "none" and not is_full and draft.value("quantize.kind") in ("", "none"):
        draft.settings["quantize.kind"] = Setting(copy.quantize, model.names, "as the copy is")


def _aliases(
    data: Mapping[str, Any],
    path: tuple[str, ...],
    program: str,
    draft: Draft,
    outer: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Alias]:
    """An answer for each key of the file, however deep: the whole file is accounted for.

    `outer`: keys outside of this section that its keys are read with.
    """
    for key, value in data.items():
        inner = (*path, str(key))
        name = ".".join(inner)
        if value in (None, "", [], {}):
            draft.empty.append(name)
            continue
        if name in draft.answered:
            yield from _inside(value, inner, draft)
            continue
        if not path and key in _DATASETS and isinstance(value, list | dict):
            yield from dataset_aliases(str(key), value, method=method_of_axolotl(data))
            continue
        if inner == ("overrides_of_model_config",) and isinstance(value, dict):
            yield from _config_aliases(value, inner, program, draft)
            continue
        if inner == ("trl",) and isinstance(value, dict):
            yield from _aliases(value, inner, program, draft, outer=data)
            continue
        if isinstance(value, dict) and any(key.startswith(f"{name}.") for key in draft.answered):
            yield from _aliases(value, inner, program, draft)
            continue
        alias = look_up(inner, value, {**outer, **data}, program=program)
        if alias is None and isinstance(value, dict):
            yield from _aliases(value, inner, program, draft)
            continue
        alias = alias or Alias(name)
        yield alias

        # The keys inside a value that is answered as a whole are a part of that answer.
        recipe_keys = ", ".join(edit.partition("=")[0] for edit in alias.edits)
        reason = f"part of {recipe_keys}" if recipe_keys else alias.reason
        for leaf_name in _leaf_names(value, inner):
            yield Alias(leaf_name, reason=reason)


def _inside(value: Any, path: tuple[str, ...], draft: Draft) -> Iterator[Alias]:
    """The keys inside a value that a rule has answered as a whole."""
    name = ".".join(path)
    of_name = [key for key, setting in draft.settings.items() if name in setting.names]
    for leaf_name in _leaf_names(value, path):
        if leaf_name in draft.answered or leaf_name in draft.left:
            continue
        if any(leaf_name in setting.names for setting in draft.settings.values()):
            continue
        reason = f"part of {', '.join(of_name)}" if of_name else f"part of {name}"
        yield Alias(leaf_name, reason=reason)


def _leaf_names(value: Any, path: tuple[str, ...]) -> Iterator[str]:
    """The names of the keys inside a value, those in a list with their number."""
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        place = (*path[:-1], f"{path[-1]}[{number}]") if isinstance(value, list) else path
        for leaf_path, _ in leaves(item if isinstance(item, dict) else {}, place):
            yield ".".join(leaf_path)


def _config_aliases(
    data: Mapping[str, Any], path: tuple[str, ...], program: str, draft: Draft
) -> Iterator[Alias]:
    """Overrides of the model's config: RoPE and the context can be changed, nothing else."""
    rope = {
        key: data[key]
        for key in ("rope_scaling", "rope_theta", "max_position_embeddings")
        if key in data
    }
    for alias in _aliases(rope, (), program, draft):
        yield replace(alias, name=".".join((*path, alias.name)))
    others = {key: value for key, value in data.items() if key not in rope}
    for leaf_path, _ in leaves(others, path):
        yield Alias(".".join(leaf_path), reason="not supported: the model's own config is used")


def _complete(draft: Draft) -> None:
    """The keys that a recipe needs and the other tool implies."""
    settings = draft.settings
    data = draft.file.keys

    # A recipe has one length.
    lengths = [key for key in _LENGTHS if key in settings]
    for key in lengths[1:]:
        draft.drop(key, f"{lengths[0]} sets the length")

    # Settings of LoRA mean an adapter, unless the file says full fine-tuning.
    adapter_keys = [key for key in settings if key.startswith("adapter.") and key != "adapter.kind"]
    if any(settings[key].names for key in adapter_keys):
        draft.set_default("adapter.kind", "lora", reason="settings of LoRA are given")
    draft.set_default("adapter.kind", "none", reason="no adapter is named")
    adapter_kind = draft.value("adapter.kind")
    if adapter_kind == "none":
        for key in adapter_keys:
            draft.drop(key, "no adapter is trained")
        for key in ("quantize.kind", "quantize.double_quant"):
            if key in settings:
                draft.drop(key, "only frozen weights are quantized, and no adapter is trained")
    else:
        for key in [key for key in settings if key.startswith(_CONTEXT)]:
            reason = "not supported with an adapter: change config.json of the base model"
            draft.drop(key, reason)

    # The objective, where the file names none that is supported.
    refused = next((name for name in ("rl", "stage") if name in draft.left), None)
    reason = ""
    if refused is not None:
        reason = f"{refused}={plain(data.get(refused))} is not supported: choose another"
    is_text = draft.value("data.format") == "text"
    draft.set_default("objective.kind", "pretrain" if is_text else "sft", reason=reason)
    if samples(draft):
        _complete_rollouts(draft)

    _ask_for_needed(draft)
    _append_revision(draft)

    # An optimizer that is not supported, and a model of another revision.
    if "optimizer.kind" not in settings:
        name = next((name for name in ("optim", "optimizer") if draft.given(name)), "")
        shown = draft.word(name) or plain(draft.get(name)) if name else ""
        reason = f"set it: {name}={shown} is not supported" if name else ""
        draft.set_default("optimizer.kind", "adamw", reason=reason)

    # Keys that do not fit the kinds of this recipe.
    kinds = [f"{key}={draft.value(key)}" for key in settings if key.endswith(".kind")]
    for key in [key for key in settings if not accepted(f"{key}={draft.value(key)}", *kinds)]:
        draft.drop(key, f"{key} does not fit {draft.value('objective.kind')}")
    _settle(draft)


_REVISIONS = ("model_revision", "revision_of_model", "revision")


def _append_revision(draft: Draft) -> None:
    """A revision other than the main one belongs to the id of a model on the Hub."""
    model = draft.settings["model.from"]
    for name in _REVISIONS:
        revision = draft.get(name) if draft.given(name) else None
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model.text) is not None
        if not isinstance(revision, str) or not is_hub_id:
            continue
        if revision == "main":
            draft.left[name] = "the main revision is the default"
        else:
            draft.settings["model.from"] = Setting(
                f"{model.text}@{revision}", (*model.names, name), model.reason
            )
            draft.left.pop(name, None)
        return


def _settle(draft: Draft) -> None:
    """Moves keys that the schema refuses together to the list of those left, until the recipe loads."""
    while refusal := _refused(draft.settings):
        key, problem = refusal
        draft.drop(key, f"{key} does not fit: {problem}")
        _ask_for_needed(draft)


def _ask_for_needed(draft: Draft) -> None:
    """A model and a dataset, which every recipe needs."""
    if not draft.settings.keys() & {"data.path", "data.sources"}:
        draft.settings["data.path"] = Setting("DATASET", (), "set it: a file, folder or Hub id")
    if "model.from" not in draft.settings:
        draft.settings["model.from"] = Setting("MODEL", (), "set it: a folder or Hub id")


def _refused(settings: Mapping[str, Setting]) -> tuple[str, str] | None:
    """A key that the schema refuses among these settings, and why; None where the recipe loads."""
    data: dict[str, Any] = {}
    for key, setting in settings.items():
        *parents, last = key.split(".")
        section = data
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = read_yaml(setting.text, source="", folder=Path()).data
    for mistake in mistakes_in(data):
        path = [str(part) for part in mistake.path]
        for length in range(len(path), 0, -1):  # the key, else one of the section that lacks a key
            keys = [key for key in settings if key.split(".")[:length] == path[:length]]
            if keys:
                return keys[-1], mistake.problem
        return list(settings)[-1], mistake.problem
    return None


def _complete_rollouts(draft: Draft) -> None:
    """What training on completions needs: rewards or a teacher, and sequences with room for prompt and completion."""
    is_taught = draft.value("objective.kind") == "on_policy_distill"
    has_environment = "environment.python" in draft.settings
    if "rewards" not in draft.settings and not is_taught and not has_environment:
        reason = "set it: your function score(prompts, completions, **columns) of rewards.py"
        draft.settings["rewards"] = Setting('[{python: "rewards.py:score"}]', (), reason)
    if "data.sequence_length" not in draft.settings:
        longest = draft.value("objective.max_completion_length") or "512"
        limit = draft.number("max_prompt_length")
        prompt_tokens = int(limit) if limit is not None and limit >= 1 else _PROMPT_TOKENS
        length = prompt_tokens + (int(longest) if longest.isdigit() else _PROMPT_TOKENS)
        reason = f"prompts of {prompt_tokens} tokens and their completions"
        names = ("max_prompt_length",) if limit else ()
        draft.set("data.sequence_length", length, *names, reason=reason)
        draft.left.pop("max_prompt_length" if limit else "", None)
    draft.set_default("objective.steps_per_generation", 1, reason="a rollout is one step")


def _text(draft: Draft, source: str) -> str:
    """The recipe as YAML in the order of the schema, each key with its origin; then what is left out."""
    schema_order = [".".join(key) for key in known_keys()]
    position = {key: number for number, key in enumerate(schema_order)}
    lines = [
        f"# From {source} ({draft.file.tool}): {len(draft.settings)} keys; those without a counterpart are at the end."
    ]
    open_sections: list[str] = []
    for key in sorted(draft.settings, key=lambda key: position.get(key, len(position))):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append("  " * depth + section + ":")
        open_sections = sections
        value = draft.settings[key].text
        lines.append(
            f"{'  ' * len(sections)}{name}: {value}".ljust(48) + f"  # {draft.comment(key)}"
        )

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
