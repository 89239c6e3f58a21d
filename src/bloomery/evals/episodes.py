"""`bloomery eval MODEL --environment FILE:CLASS`: episodes of any model with tools, played as in training."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.units import counted
from bloomery.data.chat.render import chat_format
from bloomery.data.order import mix
from bloomery.data.prompts import Prompt
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.evals.rewards import read_prompts
from bloomery.evals.statistics import shares
from bloomery.facts.limits import ROLLOUT_SLOTS
from bloomery.infer.completions import Completion, Episode
from bloomery.infer.forward import eval_mode
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.decoder import Decoder
from bloomery.model.native import Uncompiled
from bloomery.plan.types import EpisodesPlan
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.tools import RecordedCalls

PASSES = 1.0  # the reward from which an episode counts as passed


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """`generations`: episodes per prompt. `max_new_tokens`: of an episode, results of tools included."""

    generations: int = 1
    limit: int | None = None
    max_new_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0
    template: str | None = None


@dataclass(frozen=True)
class EpisodeScores:
    """`reward`: the mean over prompts, with its 95% confidence interval over prompts (`interval`: how). `passed_1`: the
    share of episodes with a reward of at least 1, `passed_all`: of prompts with such an episode among all
    `generations`. `turns`, `calls`: of an episode; `failed`: the share of calls that failed. `clipped_ratio`: the share
    of episodes that ended for want of room. `outputs`: one JSON object per episode.
    """

    reward: float
    reward_low: float | None
    reward_high: float | None
    interval: str
    prompts: int
    generations: int
    passed_1: float
    passed_all: float
    turns: float
    calls: float
    failed: float
    mean_length: float
    clipped_ratio: float
    outputs: tuple[dict[str, Any], ...]


def evaluate_episodes(
    decoder: Decoder,
    tokenizer: Tokenizer,
    plan: EpisodesPlan,
    data: Path,
    settings: EpisodeSettings,
) -> tuple[EpisodeScores, list[str]]:
    """Plays `generations` episodes of each row of `data`; the scores and notes.

    Raises UserError for an environment that cannot be loaded or has no reward, and for prompts that leave no room.
    """
    prompts = read_prompts(data, tokenizer, None, template=settings.template)[: settings.limit]
    if not prompts:
        raise UserError("no prompt to complete", where=str(data), fix="name a file with prompts")
    with chat_format(tokenizer, settings.template) as form:
        ends = [tokenizer.eos_id, decoder.config.eos_token_id, *form.stop_ids]
    sampling = Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        stop_ids=known_ids(*ends),
    )
    num_episodes = len(prompts) * settings.generations
    notes = list[str]()
    if decoder.device.type == "cpu":
        try:
            decoder.step = CompiledStep(decoder)
        except Uncompiled:
            decoder.step = None  # PyTorch decodes, too
    longest = decoder.config.max_positions
    sampler = EpisodeSampler(
        plan, tokenizer, longest=longest, template=settings.template, on_note=notes.append
    )
    with eval_mode(decoder), torch.no_grad(), sampler as episodes:
        completions = episodes.sample(
            decoder,
            prompts,
            settings.generations,
            sampling,
            lambda place, number: mix(settings.seed, place, number),
            slots=ROLLOUT_SLOTS,
            recorded=RecordedCalls(None),
            on_step=lambda done: progress(f"{done:,} of {counted(num_episodes, 'episodes')}"),
        )
    where = plan.environment.place or str(data)
    return scores_of(completions, prompts, settings.generations, where=where), notes


def scores_of(
    completions: Sequence[Completion], prompts: Sequence[Prompt], generations: int, *, where: str
) -> EpisodeScores:
    """Of `generations` episodes of each prompt, in order. An episode whose environment is gone has the reward 0."""
    episodes = [_episode(completion) for completion in completions]
    if all(episode.reward is None for episode in episodes):
        raise UserError(
            "the environment rewards no episode",
            where=where,
            fix="write get_reward, which returns a number",
        )
    rewards = [episode.reward or 0.0 for episode in episodes]
    groups = [rewards[start : start + generations] for start in range(0, len(rewards), generations)]
    estimate = shares("reward", [fmean(group) for group in groups]).estimate()
    num_calls = sum(episode.calls for episode in episodes)
    return EpisodeScores(
        reward=estimate.value,
        reward_low=estimate.low,
        reward_high=estimate.high,
        interval=estimate.interval,
        prompts=len(groups),
        generations=generations,
        passed_1=fmean(pass_at(1, group) for group in groups),
        passed_all=fmean(pass_at(generations, group) for group in groups),
        turns=fmean(episode.turns for episode in episodes),
        calls=num_calls / len(episodes),
        failed=sum(episode.failed for episode in episodes) / num_calls if num_calls else 0.0,
        mean_length=fmean(completion.num_sampled for completion in completions),
        clipped_ratio=fmean(completion.truncated for completion in completions),
        outputs=tuple(
            output_of(completion, prompts[completion.prompt]) for completion in completions
        ),
    )


def output_of(completion: Completion, prompt: Prompt) -> dict[str, Any]:
    """An episode as people read it: under the names that the files of completions of a run have."""
    episode = _episode(completion)
    return {
        "prompt": prompt.text if prompt.messages is None else prompt.messages,
        "messages": episode.messages,
        "reward": episode.reward,
        "turns": episode.turns,
        "calls": episode.calls,
        "failed": episode.failed,
        "truncated": completion.truncated,
    }


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """The probability that one of `k` episodes passes, without bias: arXiv:2107.03374, eq. 1."""
    num_failed = sum(reward < PASSES for reward in rewards)
    return 1.0 - comb(num_failed, k) / comb(len(rewards), k)


def _episode(completion: Completion) -> Episode:
    assert completion.episode is not None, "each was played with tools"
    return completion.episode
