"""What objectives refuse of a recipe: rewards, verifiers, teachers, references, tools and environments."""

import re

from bloomery.core.errors import UserError
from bloomery.data.prepare.kinds import refuse_no_room
from bloomery.facts.config import ModelConfig
from bloomery.facts.prompt_templates import template_fields
from bloomery.plan.reward_code import (
    refuse_missing_function,
    refuse_missing_name,
    refuse_missing_plugin,
)
from bloomery.plan.types import EpisodesPlan
from bloomery.recipe.episodes import EnvironmentSection
from bloomery.recipe.objectives import (
    Distill,
    GroupRollouts,
    OnPolicyDistill,
    RewardedRollouts,
    Rollouts,
)
from bloomery.recipe.rewards import PluginReward, PythonReward, VerifierReward, reward_name
from bloomery.recipe.schema import Lora, Recipe


def refuse_distill_misfits(objective: Distill) -> None:
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
