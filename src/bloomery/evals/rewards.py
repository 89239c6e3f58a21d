"""`bloomery eval RUN` of a run that trains with rewards: completions of held-out prompts, rewarded as in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from bloomery.core.errors import UserError
from bloomery.core.progress import progress
from bloomery.core.units import counted
from bloomery.data.chat.render import Renderer
from bloomery.data.order import mix
from bloomery.data.pictures.encoder import PictureEncoder, saved_vision
from bloomery.data.prepare.kinds import row_of
from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.sources.documents import ReadStats, open_dataset, read_documents
from bloomery.data.sources.task_sets import TASK_SETS
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.evals.statistics import shares
from bloomery.facts.limits import ROLLOUT_SLOTS
from bloomery.infer.completions import Completion, sample_completions
from bloomery.infer.forward import eval_mode
from bloomery.model.compiled_step import CompiledStep
from bloomery.model.decoder import Decoder
from bloomery.model.native import Uncompiled
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import Source
from bloomery.runs.consent import refuse_foreign_rewards
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.reward_models import RewardModels
from bloomery.train.rl.rewards import Rewards, ScoredCompletions, worker_rewards
from bloomery.train.rl.rollout_pictures import PromptReader, PromptsInTurn
from bloomery.train.rl.rollout_source import HELD_OUT, sampling_of
from bloomery.train.rl.sampler import keyed_uniforms
from bloomery.train.rl.scoring import of_environment, reward_entries, score_entries
from bloomery.train.rl.tools import RecordedCalls


@dataclass(frozen=True)
class RewardScores:
    """The mean reward of one completion of each prompt, with its 95% confidence interval over prompts.

    `interval`: how it was computed: bootstrap, wilson for rewards of 0 and 1, none of a single prompt. `rewards`: the
    mean of each reward, without its weight. `tokens`: of all completions; `clipped_ratio`: the share of them that
    reached the maximum length.
    """

    reward: float
    reward_low: float | None
    reward_high: float | None
    interval: str
    prompts: int
    rewards: dict[str, float]
    tokens: int
    mean_length: float
    clipped_ratio: float


def evaluate_rewards(
    decoder: Decoder,
    tokenizer: Tokenizer,
    plan: RunPlan,
    run_dir: Path,
    data: Path | None,
    *,
    template: str | None = None,
    trust_code: bool = False,
) -> tuple[RewardScores, list[str]]:
    """The scores on the run's held-out prompts, as its evaluations sample them, or on the rows of `data`; and notes.

    `decoder`: with its tower where the run's prompts have pictures.

    Raises UserError: without prompts, for a reward that fails, and without `trust_code` for Python rewards that the
    user has not asked for (`runs.consent`).
    """
    completions, scored, notes = reward_prompts(
        decoder, tokenizer, plan, run_dir, data, template=template, trust_code=trust_code
    )
    where = str(plan.data.prepared if data is None else data)
    return summarized(completions, scored, where=where), notes


def reward_prompts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    plan: RunPlan,
    run_dir: Path,
    data: Path | None,
    *,
    template: str | None = None,
    trust_code: bool = False,
) -> tuple[list[Completion], ScoredCompletions, list[str]]:
    """As `evaluate_rewards`: one completion of each prompt, its rewards, and the notes."""
    if not trust_code:
        refuse_foreign_rewards(run_dir, plan, command="eval")
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    notes = []
    if data is None:
        held_out = Prompts(plan.data.prepared, seed=plan.train.seed, split="validation")
        count = min(len(held_out), plan.eval.sequences or len(held_out))
        prompts = [held_out[number] for number in range(count)]
        if count < len(held_out):
            notes.append(f"same as in training: {count:,} of {len(held_out):,} held-out prompts")
        where = str(plan.data.prepared)
    else:
        prompts = read_prompts(data, tokenizer, plan.data.prepared, template=template)
        where = str(data)
    max_prompt_tokens = decoder.config.max_positions - objective.max_completion_length
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens]
    if len(fitting) < len(prompts):
        left_out = counted(len(prompts) - len(fitting), "prompts")
        notes.append(f"left out: {left_out} of more than {max_prompt_tokens:,} tokens")
    if not fitting:
        fix = "set data.validation in the recipe, or add --data FILE with prompts"
        raise UserError("no prompt to complete", where=where, fix=fix)

    completions = complete_as_trained(decoder, tokenizer, plan, fitting)
    entries = reward_entries(tokenizer, fitting, completions)
    device = decoder.device.type
    with (
        RewardModels(plan, SINGLE_RANK, device=device) as models,
        Rewards(
            worker_rewards(plan.rewards), columns=list(entries.columns), on_error=plan.data.on_error
        ) as rewards,
    ):
        values, skipped = models.score(entries.prompts, entries.texts)
        others = {**values, **of_environment(completions)}
        scored = score_entries(entries, rewards, others, skipped)
    notes += [f"skipped: {reason}" for reason in scored.skipped[:1]]
    sampled = f"sampled as in training: temperature {objective.temperature:g}"
    notes.append(f"{sampled}, one completion of each prompt; the interval is over prompts")
    return completions, scored, notes


def complete_as_trained(
    decoder: Decoder, tokenizer: Tokenizer, plan: RunPlan, prompts: Sequence[Prompt]
) -> list[Completion]:
    """One completion of each prompt, with the random numbers of the run's own evaluations."""
    sampling = sampling_of(plan, tokenizer)

    def key(place: int, number: int) -> int:
        return mix(plan.train.seed, HELD_OUT, place, number)

    def report(num_done: int) -> None:
        progress(f"{num_done:,} of {counted(len(prompts), 'completions')}")

    if decoder.device.type == "cpu":
        try:
            decoder.step = CompiledStep(decoder)
        except Uncompiled:
            decoder.step = None  # PyTorch decodes, too
    with eval_mode(decoder), torch.no_grad():
        if plan.episodes is not None:
            longest = plan.data.sequence_length
            with EpisodeSampler(plan.episodes, tokenizer, longest=longest) as episodes:
                return episodes.sample(
                    decoder,
                    prompts,
                    1,
                    sampling,
                    key,
                    slots=ROLLOUT_SLOTS,
                    recorded=RecordedCalls(None),
                    on_step=report,
                )
        in_turn = PromptsInTurn(prompts, PromptReader(plan.data.prepared))
        return sample_completions(
            decoder,
            in_turn,
            1,
            sampling,
            keyed_uniforms({(place, 0): key(place, 0) for place in range(len(prompts))}),
            slots=ROLLOUT_SLOTS,
            longest=in_turn.longest,
            on_step=report,
        )


def summarized(
    completions: Sequence[Completion], scored: ScoredCompletions, *, where: str
) -> RewardScores:
    """Raises UserError where every reward abstained of every completion."""
    totals = [total for total in scored.totals if not math.isnan(total)]
    if not totals:
        fix = "check the rewards of the recipe, and the columns that they read"
        raise UserError("no reward scored any completion", where=where, fix=fix)
    estimate = shares("reward", totals).estimate()
    numbers = {
        name: [reward for reward in rewards if reward is not None]
        for name, rewards in scored.by_name.items()
    }
    lengths = [len(completion.ids) for completion in completions]
    return RewardScores(
        reward=estimate.value,
        reward_low=estimate.low,
        reward_high=estimate.high,
        interval=estimate.interval,
        prompts=len(totals),
        rewards={name: fmean(rewards) for name, rewards in numbers.items() if rewards},
        tokens=sum(lengths),
        mean_length=fmean(lengths),
        clipped_ratio=fmean(completion.truncated for completion in completions),
    )


def read_prompts(
    data: Path, tokenizer: Tokenizer, prepared: Path | None, *, template: str | None
) -> list[Prompt]:
    """The rows of a file or folder with their columns, tokenized as `prepare` does. Raises UserError.

    `prepared`: the run's dataset, None without a run. Where it has pictures, so may the rows.
    """
    source = None if prepared is None else saved_vision(prepared)
    encoder = None if source is None else PictureEncoder(source)
    format = TASK_SETS if data.suffix == ".py" else "prompts"
    dataset = open_dataset(Source(path=str(data), format=format), "prompts")
    prompts = []
    with Renderer(tokenizer, template=template, train_on="assistant", pictures=encoder) as renderer:
        for document in read_documents(dataset, on_error="stop", stats=ReadStats()):
            example = document.example
            if example is None:
                continue
            encoded = renderer.encode(example)[0]
            prompt, columns = row_of(example)
            prompts.append(
                Prompt(
                    np.array(encoded.ids, np.int64),
                    prompt if isinstance(prompt, str) else tokenizer.decode(encoded.ids),
                    None if isinstance(prompt, str) else prompt,
                    columns,
                    encoded.pictures,
                )
            )
    return prompts
