"""Which tool a file belongs to, by its keys, and whether it is one that trains (signs: tools.toml)."""

import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bloomery.core.errors import UserError
from bloomery.recipe.import_draft import ToolFile


@cache
def tools() -> dict[str, Any]:
    """tools.toml: signs and defaults by tool."""
    return tomllib.loads(Path(__file__).with_name("tools.toml").read_text(encoding="utf-8"))


# What kind of file it is


def recognized(
    keys: Mapping[str, Any],
    path: Path,
    *,
    program: str = "",
    unread: Mapping[str, str] = MappingProxyType({}),
) -> ToolFile | None:
    """The tool whose keys these are: that of a command line or script, else the one with most of its signs; None for
    none. `program`: its name and command as the file has them.
    """
    name, _, command = program.partition(" ")
    tool = _TOOLS_OF_PROGRAMS.get(name) or _tool_of(keys)
    if not tool:
        return None
    if tool not in ("TRL", "Unsloth"):
        return ToolFile(tool, keys, command, unread=unread)

    # Which trainer: that of the command, else the one that has these keys; `beta` alone may be that of several.
    words = set(re.split(r"[_\W]+", command.lower()))
    of_program = next((known for known in tools()["TRL"]["commands"] if known in words), "")
    of_keys = command_of_trl(keys)
    named = of_program or of_keys or _named_in(path) or ("dpo" if "beta" in keys else "")
    return ToolFile(tool, keys, named or "sft", not (of_program or of_keys), unread)


_TOOLS_OF_PROGRAMS = {
    "axolotl": "Axolotl",
    "llamafactory": "LLaMA-Factory",
    "mlx_lm": "mlx-lm",
    "swift": "ms-swift",
    "trl": "TRL",
    "tune": "torchtune",
    "unsloth": "Unsloth",
}


def _tool_of(keys: Mapping[str, Any]) -> str:
    """The tool with most of its signs among the keys; "" for none."""
    sections = [value for value in keys.values() if isinstance(value, dict)]
    if any("_component_" in section for section in sections):
        return "torchtune"
    candidates = {
        tool: entry
        for tool, entry in tools().items()
        if any(isinstance(keys.get(name), str) for name in entry.get("needs", ()))
    }

    def most(*kinds: str) -> str:
        counts = {
            tool: sum(len(keys.keys() & set(entry.get(kind, ()))) for kind in kinds)
            for tool, entry in candidates.items()
        }
        tool = max(counts, key=lambda name: counts[name], default="")
        return tool if tool and counts[tool] >= 2 else ""

    return most("signs") or most("signs", "shared")


# Keys that only one trainer of TRL has, the surest first.
_COMMAND_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ppo": frozenset(
            {
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
        ),
        "rloo": frozenset({"normalize_advantages", "reward_clip_range", "rloo_k"}),
        "grpo": frozenset(
            {
                "generation_batch_size",
                "num_generations",
                "num_generations_eval",
                "reward_funcs",
                "reward_weights",
                "scale_rewards",
                "steps_per_generation",
                "epsilon_high",
                "vllm_importance_sampling_mode",
            }
        ),
        "kto": frozenset({"desirable_weight", "undesirable_weight"}),
        "cpo": frozenset({"cpo_alpha", "simpo_gamma"}),
        "gkd": frozenset({"lmbda", "teacher_model_name_or_path", "seq_kd"}),
        "reward": frozenset({"center_rewards_coefficient"}),
        "dpo": frozenset(
            {
                "f_divergence_type",
                "precompute_ref_log_probs",
                "ref_model_init_kwargs",
                "reference_free",
                "rpo_alpha",
                "ld_alpha",
                "loss_weights",
                "use_weighting",
                "discopop_tau",
            }
        ),
        "sft": frozenset(
            {
                "assistant_only_loss",
                "completion_only_loss",
                "dataset_text_field",
                "packing",
                "packing_strategy",
                "eval_packing",
                "padding_free",
                "neftune_noise_alpha",
                "shuffle_dataset",
                "dataset_kwargs",
            }
        ),
    }
)
_LOSSES_OF_COMMANDS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"), "grpo")
    | dict.fromkeys(("nll", "dft", "chunked_nll"), "sft")
    | dict.fromkeys(("simpo", "alphapo"), "cpo")
    | dict.fromkeys(("kto", "apo_zero_unpaired"), "kto")
    | dict.fromkeys(
        (
            "sigmoid",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_unpaired",
            "aot_pair",
            "discopop",
            "apo_zero",
            "apo_down",
            "sigmoid_norm",
            "sft",
        ),
        "dpo",
    )
)


def command_of_trl(keys: Mapping[str, Any]) -> str:
    """The command whose configuration has these keys; "" where several have them."""
    loss = keys.get("loss_type")
    first_loss = loss[0] if isinstance(loss, list) and loss else loss
    if isinstance(first_loss, str) and first_loss.lower() in _LOSSES_OF_COMMANDS:
        command = _LOSSES_OF_COMMANDS[first_loss.lower()]
        is_cpo = command == "dpo" and keys.keys() & _COMMAND_KEYS["cpo"]
        return "cpo" if is_cpo else command
    for command, names in _COMMAND_KEYS.items():
        if names & keys.keys():
            return command
    return ""


def _named_in(path: Path) -> str:
    """A command that the path of the file names, such as recipes/zephyr/orpo/config.yaml."""
    words = {word for part in (path.parent.name, path.stem) for word in part.lower().split("_")}
    return next((command for command in tools()["TRL"]["commands"] if command in words), "")


# Files of these tools that train nothing: a key or keys, what the file is, and what to type.
_NO_TRAINING = (
    (
        "LLaMA-Factory",
        "export_dir",
        "a file of `llamafactory-cli export`",
        "`bloomery export {model} --to merged --out {export_dir}`",
    ),
    (
        "LLaMA-Factory",
        "infer_backend",
        "a file of `llamafactory-cli chat` or `api`",
        "`bloomery chat {model}`, or `bloomery serve {model}`",
    ),
    (
        "LLaMA-Factory",
        "task",
        "a file of `llamafactory-cli eval`",
        "`bloomery eval {model} --lm-eval TASKS`",
    ),
)
_TRAINING_KEYS = frozenset(
    {
        "dataset",
        "do_train",
        "learning_rate",
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "output_dir",
        "pref_loss",
        "lora_rank",
        "deepspeed",
        "stage",
        "cutoff_len",
    }
)


# Files that no tool trains from by themselves, by a key that they have.
_SETTINGS_OF_OTHERS = (
    (
        "compute_environment",
        "a configuration of Accelerate",
        "not needed: `bloomery train` uses every GPU; `-d 0,1` chooses",
    ),
    (
        "zero_optimization",
        "a configuration of DeepSpeed",
        "not needed: parallel.shard divides a model over GPUs",
    ),
    (
        "dist_config",
        "a file of LLaMA-Factory's version 1",
        "give a file of `llamafactory-cli train` (model_name_or_path, dataset)",
    ),
    (
        "train_dataset",
        "a file of LLaMA-Factory's version 1",
        "give a file of `llamafactory-cli train` (model_name_or_path, dataset)",
    ),
)


def not_recognized(keys: Mapping[str, Any], path: Path) -> UserError:
    """Of a file of no tool: what it is, where its keys name that."""
    for key, what, fix in _SETTINGS_OF_OTHERS:
        if key in keys:
            problem = f"this is no training file: {path.name} is {what}"
            return UserError(problem, where=str(path), fix=fix, code=2)
    if {"models", "method"} <= keys.keys():
        problem = f"this is no training file: {path.name} merges models"
        raise UserError(problem, where=str(path), fix="`bloomery merge --help`", code=2)
    names = sorted((tool for tool in tools() if tool != "Transformers"), key=str.lower)
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    fix = f"give a training file of {listed}: `bloomery recipes import --help` names their formats"
    problem = f"not a file of {listed}: {path.name}"
    return UserError(problem, where=str(path), fix=fix, code=2)


# Sections of a recipe: a file that has one is a recipe with keys of another tool in it.
_SECTIONS = ("model", "data", "train")
_SCRIPTS = (".py", ".ipynb", ".sh", ".bash")


def refuse_file_of_a_tool(keys: Any, label: str, name: str) -> None:
    """Raises UserError where a recipe that does not load is a file of another tool, with the command to convert it."""
    if not isinstance(keys, dict):
        return
    sections = [keys[key] for key in _SECTIONS if key in keys]
    is_recipe = "extends" in keys or any(
        isinstance(section, dict) and "_component_" not in section for section in sections
    )
    path = Path(label)
    file = None if is_recipe else recognized(keys, path)
    if file is None:
        return
    refuse_other_files(file, path)
    problem = f"this is a file of {file.tool}, not a recipe: {path.name}"
    raise UserError(problem, where=label, fix=_import_command(label, name), code=2)


def refuse_script(path: Path) -> None:
    """Raises UserError for a script or a notebook in place of a recipe."""
    if path.suffix in _SCRIPTS:
        problem = f"this is a script, not a recipe: {path.name}"
        fix = _import_command(str(path), path.stem)
        raise UserError(problem, where=str(path), fix=fix, code=2)


def _import_command(label: str, name: str) -> str:
    out = "mine.yaml" if name != "mine" else "recipe.yaml"
    return f"`bloomery recipes import {shlex.quote(label)} --out {out}`, then `bloomery plan {out}`"


# Configs of torchtune and mlx-lm without a training: a key, and what to type.
_OTHER_CONFIGS = (
    (
        "torchtune",
        "tasks",
        "a config of `tune run eleuther_eval`",
        "`bloomery eval MODEL --lm-eval TASKS`",
    ),
    (
        "torchtune",
        "prompt",
        "a config of `tune run generate`",
        "`bloomery generate MODEL --prompt TEXT`",
    ),
    (
        "torchtune",
        "quantizer",
        "a config of `tune run quantize`",
        "`bloomery export MODEL --to gguf --type q4_K_M --out FILE`",
    ),
)


def refuse_other_files(file: ToolFile, path: Path) -> None:
    """Raises UserError for a file that exports, answers or evaluates, with the command for it."""
    keys = file.keys
    for tool, key, what, command in _OTHER_CONFIGS:
        if file.tool == tool and key in keys and not {"dataset", "optimizer"} & keys.keys():
            problem = f"this is no training file: {path.name} is {what}"
            raise UserError(problem, where=str(path), fix=command, code=2)
    if file.tool == "mlx-lm" and keys.get("train") is False and keys.get("test") is True:
        problem = f"this is no training file: {path.name} tests an adapter (train: false)"
        raise UserError(problem, where=str(path), fix="`bloomery eval MODEL --data FILE`", code=2)
    trains = bool(keys.keys() & {"dataset", "tokenized_path"}) and keys.get("do_train") is not False
    base = str(keys.get("model_name_or_path") or "MODEL")
    adapter = str(keys.get("adapter_name_or_path") or "").split(",")[0].strip()
    words = {"model": f"{base}+{adapter}" if adapter else base, **keys}

    def refused(what: str, command: str) -> UserError:
        fix = command.format(**{"export_dir": "DIR", **{k: str(v) for k, v in words.items()}})
        problem = f"this is no training file: {path.name} is {what}"
        return UserError(problem, where=str(path), fix=fix, code=2)

    for tool, key, what, command in _NO_TRAINING:
        if file.tool == tool and key in keys and not trains:
            raise refused(what, command)
    if file.tool == "LLaMA-Factory":
        predicts = keys.get("do_predict") is True and not keys.get("do_train")
        if predicts or (keys.get("do_eval") is True and "do_train" not in keys and not trains):
            what = "a file that predicts or evaluates (do_predict, do_eval)"
            raise refused(
                what, "`bloomery eval {model} --data FILE`, or `bloomery generate {model}`"
            )
        if not keys.keys() & (_TRAINING_KEYS | {"tokenized_path"}):
            what = "a file of `llamafactory-cli chat` or `api`: it names no dataset"
            raise refused(what, "`bloomery chat {model}`, or `bloomery serve {model}`")
