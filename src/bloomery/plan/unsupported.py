"""Unsupported settings of a recipe, refused before anything is built, and the matrix of what several devices can do.

The matrix: every feature by every axis of the mesh, tested or refused with a reason. A PEFT method is counted as a
LoRA; PEFT is not imported.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import counted, format_count
from bloomery.data.prepare.kinds import refuse_no_room
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import (
    is_layer_matrix,
    is_of_experts,
    layers,
    parameter_count,
)
from bloomery.facts.limits import Dequantizer, storage_bytes
from bloomery.facts.objectives import OBJECTIVES, ObjectiveSpec
from bloomery.facts.optimizers import OPTIMIZERS, PLAIN_SETTINGS
from bloomery.facts.prompt_templates import template_fields
from bloomery.hardware.profile import Profile
from bloomery.model.adapters.settings import (
    counted_by_kind,
    method_name,
    method_settings,
    refuse_untrained_rows,
)
from bloomery.model.configs import CONTEXT_KEYS
from bloomery.model.io.expert_tensors import refuse_unquantizable, stacks_of_transformers
from bloomery.plan.choices import refuse_transformers_misfits
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.reward_code import (
    refuse_missing_function,
    refuse_missing_name,
    refuse_missing_plugin,
)
from bloomery.plan.routers import refuse_router
from bloomery.plan.stages import refuse_schedule
from bloomery.plan.types import DatasetFacts, EpisodesPlan
from bloomery.plan.vision import refuse_vision_misfits
from bloomery.recipe.episodes import EnvironmentSection
from bloomery.recipe.objectives import (
    Distill,
    GroupRollouts,
    OnPolicyDistill,
    RewardedRollouts,
    Rollouts,
)
from bloomery.recipe.rewards import PluginReward, PythonReward, VerifierReward, reward_name
from bloomery.recipe.schema import Lora, NoAdapter, Peft, Recipe

# So many weights that the average of bits per weight counts scales of scales too.
WEIGHTS_OF_AVERAGE = 2**24


def refuse_method_misfits(recipe: Recipe) -> None:
    """Raises UserError for settings that PEFT methods do not support."""
    adapter = recipe.adapter
    if not isinstance(adapter, Peft):
        return
    where = f"adapter.method={adapter.method}"
    if recipe.objective.spec.values:
        raise UserError(
            "a reward model needs a trainable value head, and PEFT methods freeze it",
            where=where,
            fix="set adapter.kind=lora, which trains the head too",
            code=2,
        )
    if recipe.quantize.kind != "none":
        raise UserError(
            "PEFT methods do not support quantized base weights",
            where=where,
            fix="set quantize.kind=none, or adapter.kind=lora, which supports quantized base weights",
            code=2,
        )
    if recipe.optimizer.fused_backward:
        raise UserError(
            "PEFT methods read all gradients after an update, and a fused backward frees them",
            where=where,
            fix="set optimizer.fused_backward=false",
            code=2,
        )
    if recipe.train.compile is True:
        raise UserError(
            "PEFT layers change during training, and compiled blocks would be recompiled each time",
            where=where,
            fix="set train.compile=false",
            code=2,
        )
    total_steps = (adapter.model_extra or {}).get("total_step")
    is_wall_time = recipe.train.length.unit == "seconds"
    if method_name(adapter.method) == "ADALORA" and is_wall_time and not total_steps:
        raise UserError(
            "AdaLoRA needs the number of steps, which a wall-time length does not have",
            where="train.max_time",
            fix="set train.max_steps=500 instead",
            code=2,
        )


def refuse_settings(recipe: Recipe, config: ModelConfig, *, steps: int | None) -> None:
    """Raises UserError for keys that the model or PEFT refuses. `steps`: of the run, None where estimated."""
    if recipe.train.ema_decay is not None:
        _refuse_average(recipe)
    if recipe.train.neftune_alpha is not None and config.transformers_backend is not None:
        raise UserError(
            "NEFTune is not supported for the transformers implementation: its embeddings are not Bloomery's",
            where="train.neftune_alpha",
            fix="leave it out, or set model.implementation=native",
            code=2,
        )
    refuse_router(recipe, config)
    if isinstance(recipe.adapter, Peft):
        method_settings(recipe.adapter, config, steps=steps)


def _refuse_average(recipe: Recipe) -> None:
    """Raises UserError for settings that an average of the weights does not support."""
    adapter = recipe.adapter
    conflicts = (  # whether the recipe has it, its key, the reason
        (
            isinstance(adapter, Peft),
            "adapter.kind=peft",
            "PEFT's methods change their parameters during training",
        ),
        (
            recipe.train.precision == "bfloat16-pure",
            "train.precision=bfloat16-pure",
            "bfloat16 rounds it away",
        ),
        (
            isinstance(adapter, Lora) and adapter.dtype != "float32",
            "adapter.dtype",
            "bfloat16 rounds it away",
        ),
        (
            recipe.optimizer.offload,
            "optimizer.offload",
            "the average stays on the device, which offloading empties",
        ),
    )
    for is_set, key, reason in conflicts:
        if is_set:
            raise UserError(
                f"no average of the weights with {key}: {reason}",
                where="train.ema_decay",
                fix=f"leave out train.ema_decay, or {key}",
                code=2,
            )


def quantized_choices(
    recipe: Recipe, model: TrainedModel, reader: Choice[Dequantizer]
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: bits per weight, and the implementation that reads them.

    Of a mixture of experts how many of its parameters are quantized. Raises UserError where its experts cannot be.
    """
    quantize = recipe.quantize
    if quantize.kind == "none":
        return
    refuse_unquantizable(model.config, quantize.kind)
    count = WEIGHTS_OF_AVERAGE
    bits = 8 * storage_bytes((count,), quantize.kind, quantize.double_quant) / count
    reason = f"{bits:.4g} bits per weight of the layers; {reader.reason}"
    if model.config.experts is not None:
        shapes = {n: math.prod(s) for n, s in model.frozen.items() if is_layer_matrix(n, s)}
        of_experts = sum(values for name, values in shapes.items() if is_of_experts(name))
        reason = (
            f"{format_count(sum(shapes.values()))} of {format_count(model.weight_count)} parameters, "
            f"{format_count(of_experts)} of them in experts; {reason}"
        )
    yield "quantize.kind", Choice(f"{quantize.kind} base", reason)


def refuse_new_rows(
    recipe: Recipe, config: ModelConfig, *, known_vocabulary: int | None, added: int
) -> None:
    """Raises UserError where an adapter would leave new tokens untrained.

    `known_vocabulary`: tokens of the pretrained model.
    """
    if isinstance(recipe.adapter, NoAdapter) or known_vocabulary is None:
        return
    # In a padded vocabulary (Qwen2.5) new tokens use embeddings that exist and were never trained.
    new = max(config.vocab_size - known_vocabulary, added)
    if isinstance(recipe.adapter, Lora):
        refuse_untrained_rows(config, recipe.adapter, new=new)
    if isinstance(recipe.adapter, Peft) and new:
        raise UserError(
            f"PEFT methods do not train the embeddings of new tokens: {new} tokens",
            where=f"adapter.method={recipe.adapter.method}",
            fix="set adapter.kind=lora adapter.modules_to_save=[embed_tokens, lm_head]",
            code=2,
        )


def adapter_choices(
    recipe: Recipe, model: TrainedModel, *, known_vocabulary: int | None, added: int
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the adapter, its trainable parameters, and the modules that it changes."""
    adapter = recipe.adapter
    if isinstance(adapter, Lora):
        kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
        kind += " (rsLoRA)" if adapter.use_rslora else ""
        kind += " from PiSSA" if adapter.init == "pissa" else ""
        trained = model.trainable_count
        total = parameter_count(model.config)
        reason = f"{format_count(trained)} trainable parameters, {trained / total:.2%} of"
        reason += f" {format_count(total)}"
        ranks = sorted({rank for _, rank in model.mode.target_modules})
        yield "adapter.kind", Choice(f"{kind}, rank {' and '.join(map(str, ranks))}", reason)
        targets = [name for name, _ in model.mode.target_modules]
        by_name = Choice(f"{len(targets):,} target modules", counted_by_kind(targets))
        if stacks := stacks_of_transformers(model.config):
            frozen = f"{format_count(sum(stacks.values()))} parameters of experts stay frozen"
            reason = f"{by_name.reason}; {frozen}: transformers' layers have them as stacks"
            by_name = Choice(by_name.value, reason)
        yield (
            "adapter.target_modules",
            by_name if model.config.experts is None else _targets_by_kind(model),
        )
    if known_vocabulary is not None and (
        new := max(model.config.vocab_size - known_vocabulary, added)
    ):
        value = f"{new:,} new token{'s' if new > 1 else ''}"
        yield "model.vocab_size", Choice(value, "their embeddings start as the mean of the others")
    if isinstance(adapter, Peft):
        _, rank = model.mode.target_modules[0]
        reason = (
            f"PEFT layers in this decoder; memory and time are estimated as a LoRA of rank {rank}"
        )
        yield "adapter.kind", Choice(f"PEFT's {adapter.method}", reason)


# Of a mixture of experts: the kinds of matrices that an adapter may change, by what their names in a layer begin with.
ADAPTED_KINDS = {
    "mlp.experts.": "routed experts",
    "mlp.shared_expert": "shared experts",
    "mlp.": "dense MLPs",
}
MIXERS = "attention"


def _targets_by_kind(model: TrainedModel) -> Choice[str]:
    """How many matrices of each kind have LoRA, each expert's by itself, and its trainable parameters."""
    matrices = Counter[str]()
    parameters = Counter[str]()
    for name, _ in model.mode.target_modules:
        kind = _kind_of(name)
        shape = model.shapes.get(f"{name}.weight", model.shapes.get(name, ()))
        matrices[kind] += math.prod(shape[:-2]) if shape else 0
    for name, shape in model.adapter.items():
        parameters[_kind_of(name)] += math.prod(shape)
    kinds = [
        f"{kind}: {matrices[kind]:,} matrices, {format_count(parameters[kind])} parameters"
        for kind in (MIXERS, *ADAPTED_KINDS.values())
        if matrices[kind]
    ]
    routed = ADAPTED_KINDS["mlp.experts."]
    frozen = [] if matrices[routed] else [f"{routed} stay frozen"]
    if not any(name.endswith("mlp.gate") for name in model.mode.modules_to_save):
        frozen.append("the router stays frozen")
    return Choice(f"{len(model.mode.target_modules):,} target modules", "; ".join(kinds + frozen))


def _kind_of(name: str) -> str:
    inside = name.split(".", 3)[-1]
    return next((kind for start, kind in ADAPTED_KINDS.items() if inside.startswith(start)), MIXERS)


def refuse_recipe(recipe: Recipe) -> None:
    """Raises UserError for keys that contradict each other."""
    refuse_reward_misfits(recipe)
    refuse_optimizer_memory_misfits(recipe)
    refuse_method_misfits(recipe)
    refuse_schedule(recipe.parallel)
    refuse_vision_misfits(recipe)
    if isinstance(recipe.objective, Distill):
        _refuse_distill_misfits(recipe.objective)
    if recipe.quantize.kind != "none" and recipe.adapter.kind == "none":
        raise UserError(
            f"{recipe.quantize.kind} weights are not trainable, and the recipe has no adapter",
            where=f"quantize.kind={recipe.quantize.kind}",
            fix="set adapter.kind=lora, or quantize.kind=none to train every weight",
            code=2,
        )


def _refuse_distill_misfits(objective: Distill) -> None:
    """Raises UserError for a distillation without a teacher or with two, and for scores at another temperature."""
    if (objective.teacher is None) == (objective.teacher_scores is None):
        missing = objective.teacher is None
        raise UserError(
            "distill needs a teacher" if missing else "a teacher and the scores of one",
            where="objective.teacher" if missing else "objective.teacher_scores",
            fix="set objective.teacher, or objective.teacher_scores to a file of its scores"
            if missing
            else "remove objective.teacher, or objective.teacher_scores",
            code=2,
        )
    if objective.teacher_scores is not None and objective.temperature != 1.0:
        raise UserError(
            "the likeliest tokens of a file have their probabilities at temperature 1",
            where=f"objective.temperature={objective.temperature:g}",
            fix="set objective.temperature=1, or objective.teacher in place of objective.teacher_scores",
            code=2,
        )


def _refuse_tool_misfits(recipe: Recipe) -> None:
    """Raises UserError for tools that no objective calls, and for a file without their name."""
    episodes = EpisodesPlan.of(recipe)
    if episodes is None:
        return
    where = "tools" if recipe.tools else "environment"
    if not isinstance(recipe.objective, Rollouts):
        kind = recipe.objective.kind
        raise UserError(
            f"tools are called in completions that the model samples, and {kind} samples none",
            where=where,
            fix="set objective.kind=grpo, or tools=[] and environment.python=null",
            code=2,
        )
    for tool in recipe.tools:
        name = tool.python.rpartition(":")[2]
        refuse_missing_name(tool.python, what=f"the tool {name}", kind="function")
    if recipe.environment.python is not None:
        refuse_missing_name(recipe.environment.python, what="the environment", kind="class")
    if recipe.environment.openenv is not None:
        _refuse_server(recipe.environment)


def refuse_reward_misfits(recipe: Recipe) -> None:
    """Raises UserError for rewards without completions to score, completions without rewards, a step that holds a part
    of a group, and completions that leave no room for a prompt.
    """
    objective = recipe.objective
    _refuse_tool_misfits(recipe)
    if not isinstance(objective, Rollouts):
        if recipe.rewards:
            raise UserError(
                f"rewards score generated completions, and {objective.kind} generates none",
                where="rewards",
                fix="set objective.kind=grpo, or rewards=[]",
                code=2,
            )
        return
    if isinstance(objective, OnPolicyDistill | GroupRollouts) and objective.teacher is not None:
        _refuse_estimator_misfits(objective)
        _refuse_own_teacher_misfits(recipe, objective)
    if isinstance(objective, OnPolicyDistill):
        if recipe.rewards:
            raise UserError(
                "on_policy_distill trains on the teacher's probabilities alone; grpo and rloo train on rewards, with a"
                " teacher or without",
                where="rewards",
                fix="set objective.kind=grpo, which takes a teacher as well, or rewards=[]",
                code=2,
            )
    elif not recipe.rewards and not recipe.environment.is_set:
        raise UserError(
            f"{objective.kind} needs rewards, which score the completions",
            where="rewards",
            fix="add a reward: rewards=[{verifier: exact_match, column: answer}]",
            code=2,
        )
    batch_size = recipe.train.batch_size
    group = objective.num_generations
    if batch_size is not None and batch_size % group:
        raise UserError(
            f"a step has {batch_size:,} completions, which is no multiple of the {group:,} of a prompt",
            where="train.batch_size",
            fix=f"set train.batch_size={-(-batch_size // group) * group}",
            code=2,
        )
    for reward in recipe.rewards:
        if isinstance(reward, VerifierReward):
            _refuse_verifier(reward)
            if reward.verifier == "soft_overlong":
                _refuse_overlong(reward, objective)
        elif isinstance(reward, PythonReward):
            refuse_missing_function(reward)
        elif isinstance(reward, PluginReward):
            refuse_missing_plugin(reward)
    names = [reward_name(reward) for reward in recipe.rewards]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UserError(
            f"two rewards have the name {repeated}",
            where="rewards",
            fix=f"give one of them another: name: {repeated}_2",
            code=2,
        )
    refuse_no_room(recipe)


def _refuse_own_teacher_misfits(recipe: Recipe, objective: OnPolicyDistill | GroupRollouts) -> None:
    """Raises UserError for a model that would teach itself what it knows, or that cannot be its base; and for prompts
    of a teacher that cannot be made.
    """
    template = objective.teacher_prompt_template
    key = "objective.teacher_prompt_template"
    if template is not None:
        template_fields(template, where=key)
    own = objective.own_teacher
    if own is None:
        return
    where = f"objective.teacher={own}"
    told_more = f"set {key}, such as " + r'"{prompt}\n\nA correct solution:\n{solution}"'
    if template is None and (own == "live" or isinstance(objective, OnPolicyDistill)):
        raise UserError(
            "the model has nothing to learn from itself: its teacher has the same weights and the same prompt",
            where=where,
            fix=f"{told_more}, or name another model",
            code=2,
        )
    adapter = recipe.adapter
    beside = adapter.modules_to_save if isinstance(adapter, Lora) else ["the base"]
    if own == "base" and (beside or recipe.vision.train != "none"):
        start = recipe.model.from_ or "FOLDER"
        raise UserError(
            "the model without its adapter is not its start: training changes the base as well",
            where=where,
            fix=f"set objective.teacher={start}, which loads the start a second time, or adapter.kind=lora",
            code=2,
        )


def _refuse_estimator_misfits(objective: OnPolicyDistill | GroupRollouts) -> None:
    """Raises UserError for an estimator of a sampled token where it would be of another divergence."""
    if objective.estimator == "full":
        return
    if objective.divergence != "reverse_kl":
        raise UserError(
            f"a sampled token estimates reverse_kl alone, not {objective.divergence}",
            where="objective.estimator=sampled",
            fix="set objective.estimator=full, or objective.divergence=reverse_kl",
            code=2,
        )
    if objective.num_iterations * objective.steps_per_generation > 1:
        raise UserError(
            "a sampled token estimates the divergence of the model that sampled it: one step trains on a rollout",
            where="objective.estimator=sampled",
            fix="set objective.num_iterations=1 and objective.steps_per_generation=1, or objective.estimator=full",
            code=2,
        )


def refuse_reference(recipe: Recipe, config: ModelConfig, *, devices: int) -> None:
    """Raises UserError for a frozen copy of the start in a form that this run does not support."""
    objective = recipe.objective
    assert isinstance(objective, RewardedRollouts)
    where = f"objective.reference={objective.reference}"
    fix = "set objective.reference=device"
    if objective.reference == "host" and devices > 1:
        problem = "not supported yet: a reference model on the host for several devices"
        raise UserError(problem, where=where, fix=f"{fix}, which parallel.shard divides", code=2)
    if objective.reference == "nf4" and config.transformers_backend is not None:
        problem = "quantization is not supported for the transformers implementation"
        raise UserError(problem, where=where, fix=fix, code=2)


def _refuse_server(environment: EnvironmentSection) -> None:
    """Raises UserError for a server beside a class, and for one of another machine that no key allows."""
    if environment.python is not None:
        problem = "an environment is a class or a server, not both"
        fix = "remove environment.python or environment.openenv"
    elif environment.leaves_machine and not environment.network:
        problem = f"the server of the environment is another machine: {environment.openenv}"
        fix = "set environment.network=true, or start it here: http://127.0.0.1:8000"
    else:
        return
    raise UserError(problem, where="environment.openenv", fix=fix, code=2)


def _refuse_verifier(reward: VerifierReward) -> None:
    """Raises UserError for a verifier without what it compares with, or with a pattern that is none."""
    if reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except re.error as error:
            raise UserError(
                f"the pattern of the reward {reward_name(reward)} is no regular expression: {error}",
                where="rewards",
                fix=r"write one such as '<answer>(.*)</answer>'",
                code=2,
            ) from error
    needed_keys = {
        "exact_match": ("column",),
        "math": ("column",),
        "regex": ("pattern",),
        "length": ("max_characters", "column"),
        "soft_overlong": ("max_completion_len",),
        "json_schema": ("column", "json_schema"),
        "unit_tests": ("column",),
    }[reward.verifier]
    if all(getattr(reward, key) is None for key in needed_keys):
        raise UserError(
            f"the verifier {reward.verifier} needs {' or '.join(needed_keys)}",
            where="rewards",
            fix=f"add {needed_keys[0]}, such as {{verifier: {reward.verifier}, {needed_keys[0]}: ...}}",
            code=2,
        )


def _refuse_overlong(reward: VerifierReward, objective: Rollouts) -> None:
    """Raises UserError for a soft punishment that no completion can reach, or that has no place to fall in."""
    longest = reward.max_completion_len
    assert longest is not None, "`_refuse_verifier` comes first"
    cache = reward.soft_punish_cache
    name = f"the verifier {reward.verifier}"
    if cache is None:
        problem = f"{name} needs soft_punish_cache"
        fix = f"add soft_punish_cache, such as soft_punish_cache: {max(1, longest // 4)}"
    elif cache > longest:
        problem = f"{name} has a soft_punish_cache of {cache:,} tokens, and max_completion_len is {longest:,}"
        fix = f"set soft_punish_cache to less, such as {max(1, longest // 4)}"
    elif longest - cache >= objective.max_completion_length:
        problem = (
            f"{name} punishes completions of more than {longest - cache:,} tokens, and none has more than"
            f" {objective.max_completion_length:,}"
        )
        fix = f"set max_completion_len={objective.max_completion_length}"
    else:
        return
    raise UserError(problem, where="rewards", fix=fix, code=2)


def refuse_several_devices(recipe: Recipe) -> None:
    """Raises UserError where the recipe sets more than one device, for a measurement of one, or samples completions."""
    if isinstance(recipe.objective, Rollouts):
        raise UserError(
            f"not supported yet: measuring {recipe.objective.kind}, whose steps need sampled completions",
            where="objective.kind",
            fix="`bloomery train RECIPE --smoke-test` times the first steps",
            code=2,
        )
    sizes = {key: getattr(recipe.parallel, key) for key in ALL_AXES}
    keys = [f"parallel.{key}={size}" for key, size in sizes.items() if size not in (1, "auto")]
    if keys:
        raise UserError(
            f"not supported in a measurement of one device: {', '.join(keys)}",
            where="recipe",
            fix=f"remove {'them' if len(keys) > 1 else 'it'} from the recipe",
            code=2,
        )


def refuse_optimizer_memory_misfits(recipe: Recipe) -> None:
    """Raises UserError for memory settings that the optimizer or a fused backward does not support."""
    optimizer = recipe.optimizer
    spec = OPTIMIZERS[optimizer.kind]

    # The memory settings of the recipe as they stand in it, by key.
    settings = {
        key: f"optimizer.{key}"
        for key in ("offload", "fused_backward", "stochastic_rounding")
        if getattr(optimizer, key)
    }
    if optimizer.paged:
        settings["offload"] = "optimizer.paged"  # another name for it
    if optimizer.state_dtype != "float32":
        settings["state_dtype"] = f"optimizer.state_dtype={optimizer.state_dtype}"
    unsupported = [
        setting
        for key, setting in settings.items()
        if key not in spec.settings and key not in spec.ineffective_settings
    ]
    if unsupported:
        raise UserError(
            f"{spec.name} does not support this setting: {unsupported[0]}",
            where=f"optimizer.kind={optimizer.kind}",
            fix=f"set optimizer.kind=adamw, or remove {' and '.join(unsupported)}",
            code=2,
        )

    # A fused backward updates after each micro-batch: both sizes of the recipe must be the same.
    micro_batch_size = recipe.train.micro_batch_size
    tokens_per_step = recipe.tokens_per_step
    if not optimizer.fused_backward or tokens_per_step == "auto" or micro_batch_size == "auto":
        return
    micro_batch_tokens = micro_batch_size * recipe.data.sequence_length
    if tokens_per_step != micro_batch_tokens:
        raise UserError(
            "optimizer.fused_backward has no gradient accumulation: a step is one micro-batch of"
            f" {micro_batch_tokens:,} tokens, not {tokens_per_step:,}",
            where="train.tokens_per_step",
            fix=f"set train.tokens_per_step={micro_batch_tokens}, or optimizer.fused_backward=false",
            code=2,
        )


def refuse_mesh(profile: Profile, *, gpus: int, nodes: int) -> None:
    """Raises UserError for several nodes without GPUs, and for several integrated GPUs."""
    if gpus * nodes == 1:
        return
    where = f"{gpus * nodes:,} devices"
    if profile.accelerator is None:
        if nodes > 1:
            fix = f'name a GPU: --gpu "MI300X" --gpus {gpus} --nodes {nodes}'
            raise UserError(
                "several nodes without GPUs are not planned", where=where, fix=fix, code=2
            )
        return  # ranks of one CPU share its cores and its memory
    if profile.accelerator.integrated or (profile.gpu is not None and profile.gpu.link == "APU"):
        problem = f"the table has no links between several {profile.accelerator.name}"
        fix = "plan and train on one device: no --gpus or --nodes, and no sizes above 1 in parallel"
        raise UserError(problem, where=where, fix=fix, code=2)


def refuse_misfits(
    recipe: Recipe,
    config: ModelConfig,
    dataset: DatasetFacts | None,
    *,
    known_vocabulary: int | None,
    added: int,
) -> None:
    """Raises UserError for a recipe that no machine can train: settings that the model or its implementation lacks, a
    dataset that does not fit it (ids without embeddings, tokens without positions).

    `known_vocabulary`: tokens of the pretrained model; `added`: new tokens of the recipe.
    """
    length = recipe.data.sequence_length
    extended = [f"model.{key}" for key in CONTEXT_KEYS if getattr(recipe.model, key) is not None]
    if extended and recipe.model.from_ is not None and recipe.adapter.kind != "none":
        problem = "an adapter cannot store another context length or rotary embedding than its base model's"
        fix = f"set adapter=none, or change config.json of {recipe.model.from_} and remove {', '.join(extended)}"
        raise UserError(problem, where=extended[0], fix=fix, code=2)
    if config.head == "values" and not recipe.objective.spec.values:
        raise UserError(
            "model.from is a reward model, without a language model head",
            where="objective.kind",
            fix="set objective.kind=reward, or use the language model that it was trained from",
            code=2,
        )
    if recipe.objective.spec.values and recipe.sample.prompts:
        problem = "a reward model generates no text for sample.prompts"
        raise UserError(problem, where="sample.prompts", fix="set sample.prompts=[]", code=2)
    if dataset is not None and (dataset.vocab_size or 0) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {dataset.vocab_size:,} ids and the model {config.vocab_size:,} embeddings",
            where="model.vocab_size",
            fix=f"set model.vocab_size={dataset.vocab_size}, or prepare with the model's own tokenizer",
        )
    refuse_new_rows(recipe, config, known_vocabulary=known_vocabulary, added=added)
    if config.positions == "learned" and length > config.max_positions:
        raise UserError(
            f"sequence length exceeds the model's {config.max_positions:,} learned positions: {length:,}",
            where="data.sequence_length",
            fix=f"set data.sequence_length={config.max_positions}, or a larger model.max_positions",
            code=2,
        )
    refuse_transformers_misfits(recipe, config)
    run_length = recipe.train.length
    steps = round(run_length.amount) if run_length.unit == "steps" else None
    refuse_settings(recipe, config, steps=steps)


Axis = Literal["replicate", "shard", "pipeline", "context"]
# Those over which a model is put onto several devices; `context` is about the sequences of the first two.
AXES: tuple[Axis, ...] = ("replicate", "shard", "pipeline")
ALL_AXES: tuple[Axis, ...] = (*AXES, "context")


@dataclass(frozen=True)
class Feature:
    """A row of the matrix. `is_used_by`: whether a recipe uses it. `replicate`, `shard`, `pipeline`, `context`: why it
    does not train over that axis; "" where it does.

    `in_model`: whether a model has it, where the recipe does not decide. `fix`: what to set instead. `untested`: why
    no test over several devices can fail where it trains.
    """

    name: str
    is_used_by: Callable[[Recipe], bool]
    replicate: str = ""
    shard: str = ""
    pipeline: str = ""
    context: str = ""
    fix: str = ""
    in_model: Callable[[ModelConfig], bool] | None = None
    untested: str = ""

    def applies(self, recipe: Recipe, config: ModelConfig | None) -> bool:
        """Whether training uses it. `config`: None where the model is not read yet."""
        in_model = self.in_model is not None and config is not None and self.in_model(config)
        return in_model or self.is_used_by(recipe)

    def reason(self, axis: Axis) -> str:
        return {
            "replicate": self.replicate,
            "shard": self.shard,
            "pipeline": self.pipeline,
            "context": self.context,
        }[axis]


def _lora(recipe: Recipe) -> Lora | None:
    return recipe.adapter if isinstance(recipe.adapter, Lora) else None


ONE_GRADIENT = "its updates run inside backward, before gradients are summed over devices"
WHOLE_WEIGHT = "it reads whole weight matrices, and each device holds some rows of them"
NOTHING_TO_OFFLOAD = "the memory of a CPU process is the host's, so that nothing moves"
WHOLE_LAYERS = "weights stream from the host as the layers of a whole model"
# of architectures that Bloomery's decoder lacks: Pythia, Falcon ...
TRANSFORMERS_LAYERS = "layers of transformers"
# as in Gemma 4's small models
SHARED_BY_LAYERS = "keys of another layer, inputs of each layer"
ALL_PARAMETERS = "PEFT ranks and replaces whole matrices, and each device holds some rows of them"
OTHER_ROWS = "each step exchanges other numbers of rows, and blocks would be compiled again"
ALL_LAYERS = "PEFT needs a whole model, and each stage has some of its layers"


def _has_objective(recipe: Recipe, *, kinds: tuple[str, ...]) -> bool:
    return recipe.objective.kind in kinds


def _has_optimizer(recipe: Recipe, *, kind: str) -> bool:
    return recipe.optimizer.kind == kind


def _has_optimizer_setting(recipe: Recipe, *, kind: str, key: str) -> bool:
    is_set: bool = getattr(recipe.optimizer, key) != PLAIN_SETTINGS[key]
    return is_set and _has_optimizer(recipe, kind=kind)


def _objective_features() -> Iterator[Feature]:
    """A row for objectives that read the same rows and count their loss alike."""
    alike: dict[object, list[ObjectiveSpec]] = {}
    for spec in OBJECTIVES.values():
        likeness = (
            spec.data_kind,
            spec.loss_unit,
            spec.values,
            spec.extra_forwards > 0,
            spec.source,
        )
        alike.setdefault(likeness, []).append(spec)
    for specs in alike.values():
        kinds = tuple(spec.kind for spec in specs)
        yield Feature(f"objective {', '.join(kinds)}", partial(_has_objective, kinds=kinds))


def _optimizer_features() -> Iterator[Feature]:
    """A row for each optimizer."""
    for kind, spec in OPTIMIZERS.items():
        is_used_by = partial(_has_optimizer, kind=kind)
        yield Feature(f"optimizer {kind}", is_used_by, shard=spec.over_shards)


def _optimizer_setting_features() -> Iterator[Feature]:
    """A row for each setting of one optimizer that does not train over shards."""
    for kind, spec in OPTIMIZERS.items():
        for key, reason in spec.settings_over_shards.items():
            yield Feature(
                f"optimizer.{key}, {kind}",
                partial(_has_optimizer_setting, kind=kind, key=key),
                shard=reason,
                fix="optimizer.kind=adamw optimizer.state_dtype=int8",
            )


FEATURES: tuple[Feature, ...] = (
    *_objective_features(),
    Feature(
        "objective.teacher, grpo, rloo",
        lambda r: isinstance(r.objective, GroupRollouts) and r.objective.teacher is not None,
    ),
    Feature("adapter lora", lambda r: _lora(r) is not None),
    Feature(
        "adapter dora",
        lambda r: (lora := _lora(r)) is not None and lora.kind == "dora",
        shard=WHOLE_WEIGHT,
    ),
    Feature(
        "adapter pissa",
        lambda r: (lora := _lora(r)) is not None and lora.init == "pissa",
        shard=WHOLE_WEIGHT,
    ),
    Feature(
        "PEFT methods",
        lambda r: isinstance(r.adapter, Peft),
        shard=ALL_PARAMETERS,
        pipeline=ALL_LAYERS,
    ),
    Feature("quantize nf4, int8", lambda r: r.quantize.kind != "none"),
    Feature("train.precision bfloat16", lambda r: r.train.precision in ("bfloat16", "auto")),
    Feature("train.precision bfloat16-pure", lambda r: r.train.precision == "bfloat16-pure"),
    Feature("train.precision float16", lambda r: r.train.precision == "float16"),
    Feature(
        "train.activation_checkpointing",
        lambda r: r.train.activation_checkpointing not in ("none", "auto"),
    ),
    Feature("train.compile", lambda r: r.train.compile is True),
    *_optimizer_features(),
    Feature("optimizer.state_dtype int8, bfloat16", lambda r: r.optimizer.state_dtype != "float32"),
    Feature("optimizer.stochastic_rounding, adamw", lambda r: r.optimizer.stochastic_rounding),
    *_optimizer_setting_features(),
    Feature(
        "optimizer.paged, offload",
        lambda r: r.optimizer.paged or r.optimizer.offload,
        untested=NOTHING_TO_OFFLOAD,
    ),
    Feature(
        "parallel.stream",
        lambda r: r.parallel.stream in ("layers", "experts"),
        shard=WHOLE_LAYERS,
        pipeline=WHOLE_LAYERS,
        context=WHOLE_LAYERS,
        fix="parallel.stream=off",
    ),
    Feature(
        "parallel.scoring_devices",
        lambda r: r.parallel.scoring_devices > 0,
        pipeline="each rank that asks has the head, and stages before the last have none",
        context="they score whole sequences, and each device has a part of them",
        fix="parallel.scoring_devices=0",
    ),
    Feature(
        "optimizer.fused_backward",
        lambda r: r.optimizer.fused_backward,
        replicate=ONE_GRADIENT,
        shard=ONE_GRADIENT,
        pipeline="its updates run inside backward, before the other micro-batches are back",
        context=ONE_GRADIENT,
        fix="optimizer.fused_backward=false",
    ),
    Feature(
        "train.offload_activations",
        lambda r: r.train.offload_activations,
        shard="it moves gathered weights to the host like activations",
        untested=NOTHING_TO_OFFLOAD,
    ),
    Feature(
        "train.ema_decay",
        lambda r: r.train.ema_decay is not None,
    ),
    Feature(
        SHARED_BY_LAYERS,
        lambda _: False,
        pipeline="a stage would lack the keys of another, or the embedded tokens that its layers read",
        in_model=lambda config: any(
            layer.keys_of is not None or layer.per_layer_input_size > 0 for layer in layers(config)
        ),
    ),
    Feature(
        TRANSFORMERS_LAYERS,
        lambda r: r.model.implementation == "transformers",
        pipeline="only Bloomery's decoder is cut into stages",
        context="only Bloomery's decoder exchanges heads",
        in_model=lambda config: config.transformers_backend is not None,
    ),
)


def refusals(recipe: Recipe, axis: Axis, config: ModelConfig | None = None) -> list[str]:
    """Why the recipe does not train over this axis: "feature: reason" for each. `config`: of its model, once read."""
    return [
        f"{feature.name}: {feature.reason(axis)}"
        for feature in _refused_features(recipe, axis, config)
    ]


def _refused_features(recipe: Recipe, axis: Axis, config: ModelConfig | None) -> list[Feature]:
    return [
        feature for feature in FEATURES if feature.reason(axis) and feature.applies(recipe, config)
    ]


def refuse_unsupported(
    recipe: Recipe,
    config: ModelConfig | None = None,
    *,
    replicate: int = 1,
    shard: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> None:
    """Raises UserError where a feature of the recipe, or of its model, does not train over these sizes."""
    sizes: dict[Axis, int] = {
        "replicate": replicate,
        "shard": shard,
        "pipeline": pipeline,
        "context": context,
    }
    for axis, size in sizes.items():
        reasons = refusals(recipe, axis, config) if size > 1 else []
        if reasons:
            raise UserError(
                f"not supported over {size} devices with parallel.{axis}: {'; '.join(reasons)}",
                where=f"parallel.{axis}",
                fix=_fix_over_devices(recipe, axis, size, config),
                code=2,
            )


def refuse_context(
    recipe: Recipe, config: ModelConfig, devices: int, *, teacher: ModelConfig | None = None
) -> None:
    """Raises UserError where the `devices` with copies or shards of the model cannot share sequences as the recipe
    asks. `teacher`: another model, which reads them as well.
    """
    size = recipe.parallel.context
    if size == 1:
        return
    length = recipe.data.sequence_length
    problem = ""
    fix = "set parallel.context=1"
    if recipe.parallel.pipeline not in (1, "auto"):
        problem = "a pipeline does not share sequences between devices"
        fix = "set parallel.context=1, or parallel.pipeline=1"
    elif devices % size:
        problem = f"{counted(devices, 'devices')} cannot be divided into groups of {size:,} that share sequences"
        fix = f"set parallel.context={math.gcd(devices, size)}, or train on a multiple of {size:,}"
    elif length % size:
        problem = f"sequences of {length:,} tokens cannot be divided among {size:,} devices"
        fix = f"set data.sequence_length={-(-length // size) * size}"
    else:
        problem, fix = _unshared(config, size)
        if not problem and teacher is not None:
            problem, fix = _unshared(teacher, size)
            if teacher.transformers_backend is not None:
                problem = "its layers are those of transformers, which do not exchange heads"
                fix = "set parallel.context=1, or choose a teacher with native layers"
            problem = problem and f"the teacher cannot share sequences: {problem}"
    if problem:
        raise UserError(problem, where=f"parallel.context={size}", fix=fix, code=2)


def _unshared(config: ModelConfig, size: int) -> tuple[str, str]:
    """Why so many devices cannot share the sequences of a model, and what to set instead; "" where they can."""
    # Each device takes as many heads of every layer.
    key_heads = math.gcd(*(layer.num_kv_heads for layer in layers(config)))
    mixers = {layer.mixer for layer in layers(config)} - {"attention"}
    fix = "set parallel.context=1, and parallel.shard for memory"
    if mixers:
        # Only attention exchanges heads: other mixers read the tokens before theirs.
        name = sorted(mixers)[0].replace("_", " ")
        return f"each layer with a {name} reads whole sequences, which devices cannot share", fix
    if config.attention_sinks:
        return "devices that share sequences share heads, and not the sinks of their attention", fix
    if key_heads % size:
        heads = counted(key_heads, "key/value heads")
        fix = f"set parallel.context={math.gcd(key_heads, size)}"
        return f"{size:,} devices cannot share the model's {heads}", fix
    return "", ""


def refuse_divided_experts(
    recipe: Recipe, config: ModelConfig, *, devices: int, shard: int = 1
) -> None:
    """Raises UserError where the `devices` with copies or shards of the model cannot divide its experts as the recipe
    asks. `shard`: of a split that the recipe names.
    """
    size = recipe.parallel.expert
    if size == 1:
        return
    experts = config.experts
    problem = ""
    fix = "set parallel.expert=1"
    if experts is None or config.transformers_backend is not None:
        problem = "there are no experts to divide: the model is no mixture of Bloomery's decoder"
    elif experts.count % size:
        problem = f"{experts.count:,} experts cannot be divided over {counted(size, 'devices')}"
        fix = f"set parallel.expert={math.gcd(experts.count, size)}"
    elif devices % size:
        problem = f"{counted(devices, 'devices')} cannot be divided into groups of {size:,} that divide the experts"
        fix = f"set parallel.expert={math.gcd(devices, size)}, or train on a multiple of {size:,}"
    elif shard not in (1, size):
        problem = f"the {shard:,} devices of a sharded copy divide the experts together, not {size:,} of them"
        fix = f"set parallel.expert={shard}, or parallel.shard={size}"
    else:
        for reason, setting in _not_with_divided_experts(recipe):
            problem = f"not supported while devices divide the experts: {reason}"
            fix = f"set {setting}, or parallel.expert=1"
            break
    if problem:
        raise UserError(problem, where=f"parallel.expert={size}", fix=fix, code=2)


def _not_with_divided_experts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the recipe uses and does not train so: the feature with the reason, and what to set instead."""
    optimizer = recipe.optimizer
    if isinstance(recipe.adapter, Peft):
        yield f"PEFT methods: {ALL_PARAMETERS}", "adapter.kind=lora"
    if recipe.train.compile is True:
        yield f"train.compile: {OTHER_ROWS}", "train.compile=false"
    if recipe.parallel.stream in ("layers", "experts"):
        yield f"parallel.stream: {WHOLE_LAYERS}", "parallel.stream=off"
    if optimizer.fused_backward:
        yield f"optimizer.fused_backward: {ONE_GRADIENT}", "optimizer.fused_backward=false"
    for key, reason in OPTIMIZERS[optimizer.kind].settings_over_shards.items():
        if getattr(optimizer, key) != PLAIN_SETTINGS[key]:
            yield f"optimizer.{key}, {optimizer.kind}: {reason}", f"optimizer.{key}=false"


def _fix_over_devices(recipe: Recipe, axis: Axis, size: int, config: ModelConfig | None) -> str:
    """The settings with which the recipe trains over as many devices, on this axis or on another."""
    if axis == "context":
        return "set parallel.context=1"
    refused = {candidate: _refused_features(recipe, candidate, config) for candidate in AXES}
    # First an axis that refuses nothing, and of several shards, which save most memory.
    preferred_axes: tuple[Axis, ...] = ("shard", "replicate", "pipeline")
    by_preference = sorted(
        preferred_axes,
        key=lambda candidate: (len(refused[candidate]) > 0, preferred_axes.index(candidate)),
    )
    for candidate in by_preference:
        if not all(feature.fix for feature in refused[candidate]):
            continue
        edits = [feature.fix for feature in refused[candidate]]
        if candidate != axis:
            edits += [f"parallel.{axis}=1", f"parallel.{candidate}={size}"]
        return f"set {' '.join(edits)}"
    return "train on one device"
