"""The sections of the rewards that score completions, and their names. No torch."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PositiveInt, Tag

from bloomery.core.units import GIB, MIB, Duration
from bloomery.recipe.sections import Section, key
from bloomery.recipe.values import Memory, WallTime


def file_and_function(value: str) -> str:
    """Raises ValueError."""
    file, _, function = value.rpartition(":")
    if not file or not function.isidentifier():
        raise ValueError("must be FILE:FUNCTION, such as my_rewards.py:score")
    return value


class RewardSection(Section):
    """A number for each completion; the rewards of a completion are added by weight."""

    weight: float = key(1.0, "Weight in the sum of the rewards.")
    name: str | None = key(
        None, "Name in metrics and files; unset: that of the function, verifier or model.", "score"
    )


class PythonReward(RewardSection):
    python: Annotated[str, AfterValidator(file_and_function)] = Field(
        description="FILE:FUNCTION of a Python file, relative to the recipe.",
        examples=["my_rewards.py:score"],
    )
    timeout: WallTime = key(Duration(60.0, "seconds"), "Longest time of one call.")
    memory: Memory = key(4 * GIB, "Address space of its process.", "4GiB")


class VerifierReward(RewardSection):
    verifier: Literal[
        "exact_match", "math", "regex", "json_schema", "unit_tests", "length", "soft_overlong"
    ] = Field(description="Check of a completion that is part of Bloomery.")
    column: str | None = key(
        None, "Column of the dataset that the completion is checked against.", "answer"
    )
    pattern: str | None = key(
        None,
        "regex: the pattern to find; its first group is compared with the column.",
        "<answer>(.*)</answer>",
    )
    max_characters: PositiveInt | None = key(
        None, "length: characters up to which a completion has the whole reward.", 400
    )
    max_completion_len: PositiveInt | None = key(
        None, "soft_overlong: sampled tokens from which a completion has -1.", 1024
    )
    soft_punish_cache: PositiveInt | None = key(
        None, "soft_overlong: the last tokens before that, in which it falls from 0.", 256
    )
    json_schema: dict[str, Any] | None = key(
        None, "json_schema: the schema of every row, in place of a column.", {"type": "object"}
    )
    program_timeout: WallTime = key(
        Duration(5.0, "seconds"),
        "unit_tests: longest CPU time of one program; after twice as long it is ended.",
    )
    program_memory: Memory = key(256 * MIB, "unit_tests: memory of one program.", "256MiB")
    timeout: WallTime = key(Duration(60.0, "seconds"), "Longest time of one call.")


class ModelReward(RewardSection):
    model: str = Field(
        description="Reward model: a folder in Hugging Face format, a run or a Hub id.",
        examples=["runs/my-reward"],
    )


class FunctionReward(RewardSection):
    function: str = Field(
        description="Name of a Python function that `bloomery.train(recipe, rewards=[...])` is given.",
        examples=["score"],
    )
    timeout: WallTime = key(Duration(60.0, "seconds"), "Longest time of one call.")
    memory: Memory = key(4 * GIB, "Address space beyond that of the calling process.", "4GiB")


class PluginReward(RewardSection):
    plugin: str = Field(
        description="Name of a reward that an installed package brings, as `bloomery doctor` lists it.",
        examples=["politeness"],
    )
    timeout: WallTime = key(Duration(60.0, "seconds"), "Longest time of one call.")
    memory: Memory = key(4 * GIB, "Address space of its process.", "4GiB")


def _reward_tag(value: Any) -> str | None:
    """A reward has no `kind`: the key that it must have tells which one it is."""
    tags = {
        "python": "PythonReward",
        "verifier": "VerifierReward",
        "model": "ModelReward",
        "function": "FunctionReward",
        "plugin": "PluginReward",
    }
    if isinstance(value, RewardSection):
        return type(value).__name__
    keys = value if isinstance(value, dict) else {}
    return next((tag for name, tag in tags.items() if name in keys), None)


AnyReward = Annotated[
    Annotated[PythonReward, Tag("PythonReward")]
    | Annotated[VerifierReward, Tag("VerifierReward")]
    | Annotated[ModelReward, Tag("ModelReward")]
    | Annotated[FunctionReward, Tag("FunctionReward")]
    | Annotated[PluginReward, Tag("PluginReward")],
    Discriminator(
        _reward_tag,
        custom_error_type="reward",
        custom_error_message="a reward with python, verifier, model, function or plugin",
    ),
]


def reward_name(
    reward: PythonReward | VerifierReward | ModelReward | FunctionReward | PluginReward,
) -> str:
    """The name of a reward in metrics and files."""
    if reward.name is not None:
        return reward.name
    if isinstance(reward, PythonReward):
        return reward.python.rpartition(":")[2]
    if isinstance(reward, VerifierReward):
        return reward.verifier
    if isinstance(reward, FunctionReward):
        return reward.function
    if isinstance(reward, PluginReward):
        return reward.plugin
    return reward.model.rstrip("/").rpartition("/")[2]
