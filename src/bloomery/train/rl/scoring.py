"""Scores of completions: all ranks together ask reward models, functions and verifiers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.completions import Completion
from bloomery.parallel.mesh import Mesh
from bloomery.train.rl.reward_models import RewardModels
from bloomery.train.rl.rewards import Rewards, ScoredCompletions
from bloomery.train.rl.sampler import JointWait

ENVIRONMENT = "environment"  # the name of its reward
COLUMN_PROMPTS = 200  # the first ones, whose columns are looked at


@final
@dataclass(frozen=True, kw_only=True)
class CompletionScorer:
    """Every rank has the reward models score a part; the first one asks functions and verifiers.

    `wait`: of the other ranks, for the first one.
    """

    rewards: Rewards
    models: RewardModels
    wait: JointWait
    tokenizer: Tokenizer
    mesh: Mesh

    @contextmanager
    def started(self) -> Iterator[None]:
        """Inside the block models and workers are ready. Raises UserError for a mistake in a reward."""
        with self.rewards, self.models:
            self.models.start()
            if self.mesh.first_rank:
                self.rewards.start()
            yield

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> ScoredCompletions:
        """The same on all ranks, which call it together. Raises UserError and Stopped."""
        entries = reward_entries(self.tokenizer, prompts, completions)
        values, skipped_by_models = self.models.score(entries.prompts, entries.texts)
        message: list[Any] = []
        if self.mesh.first_rank:
            others = {**values, **of_environment(completions)}
            scored = score_entries(entries, self.rewards, others, skipped_by_models)
            # JSON has no NaN.
            message = [
                {name: list(rewards) for name, rewards in scored.by_name.items()},
                [None if total != total else total for total in scored.totals],
                list(scored.skipped),
            ]
        self.wait.finish()
        by_name, totals, skipped = self.mesh.all_gather_json(message)[0]
        return ScoredCompletions(
            by_name,
            tuple(float("nan") if total is None else total for total in totals),
            tuple(skipped),
        )


@dataclass(frozen=True)
class RewardEntries:
    """What rewards are given, one entry a completion, as by TRL: a conversation's completion is a message.

    `texts`: the completions as texts. `sampled_ids`: their ids without those that were given.
    """

    prompts: list[Any]
    texts: list[str]
    completions: list[Any]
    completion_ids: list[list[int]]
    sampled_ids: list[list[int]]
    columns: dict[str, list[Any]]


def reward_entries(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> RewardEntries:
    of_completion = [prompts[completion.prompt] for completion in completions]
    texts = [_text_of(tokenizer, completion) for completion in completions]
    values = [
        completion.episode.messages
        if completion.episode is not None
        else text
        if prompt.messages is None
        else [{"role": "assistant", "content": text}]
        for completion, text, prompt in zip(completions, texts, of_completion, strict=True)
    ]
    names = list(dict.fromkeys(name for prompt in of_completion for name in prompt.columns))
    columns = {name: [prompt.columns.get(name) for prompt in of_completion] for name in names}
    return RewardEntries(
        [prompt_value(prompt) for prompt in of_completion],
        texts,
        values,
        [completion.ids for completion in completions],
        [completion.sampled_ids for completion in completions],
        columns,
    )


def _text_of(tokenizer: Tokenizer, completion: Completion) -> str:
    """Of an episode, its last answer."""
    if completion.episode is None:
        return tokenizer.decode(visible_ids(completion))
    answers = [turn for turn in completion.episode.messages if turn["role"] == "assistant"]
    text: str = answers[-1]["content"]
    return text


def of_environment(
    completions: Sequence[Completion],
) -> dict[str, tuple[float, Sequence[float | None]]]:
    """The rewards of an environment, with their weight, as further ones; of none, none."""
    rewards = [
        None if completion.episode is None else completion.episode.reward
        for completion in completions
    ]
    return {} if all(reward is None for reward in rewards) else {ENVIRONMENT: (1.0, rewards)}


def score_entries(
    entries: RewardEntries,
    rewards: Rewards,
    values: Mapping[str, tuple[float, Sequence[float | None]]],
    skipped_by_models: Sequence[str],
) -> ScoredCompletions:
    """Functions and verifiers are asked; `values` are those of reward models, with their weights."""
    scored = rewards.score(
        entries.prompts,
        entries.completions,
        entries.completion_ids,
        entries.columns,
        others=values,
        sampled_ids=entries.sampled_ids,
    )
    return replace(scored, skipped=(*scored.skipped, *skipped_by_models))


def prompt_value(prompt: Prompt) -> Any:
    """The row's prompt: a text or messages."""
    return prompt.text if prompt.messages is None else prompt.messages


def visible_ids(completion: Completion) -> list[int]:
    """Without the token that ended it."""
    return completion.ids if completion.truncated else completion.ids[:-1]


def columns_of(prompts: Prompts) -> list[str]:
    """The columns for rewards, by the first prompts: not every row must have all."""
    first_prompts = (prompts[number] for number in range(min(len(prompts), COLUMN_PROMPTS)))
    return list(dict.fromkeys(name for prompt in first_prompts for name in prompt.columns))
