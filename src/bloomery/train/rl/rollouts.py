"""The batch source of reinforcement learning: it draws completions, has them rewarded, and hands them to the steps.

A rollout is drawn before its first step and trained on for `num_iterations` x `steps_per_generation` steps. Everything
in it is keyed by the run's seed and the number of the prompt, so that a resumed run draws what the uninterrupted one
draws; a rollout that a checkpoint interrupts is a part of the checkpoint.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from bloomery.core.files import write_durably
from bloomery.data.batch import Batch
from bloomery.data.order import mix
from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.infer.completions import Completion
from bloomery.infer.forward import eval_mode, forward, to_device
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import Emit, Phase, Warned, stamped_line
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import GroupRollouts, Grpo, Ppo, Rloo, Rollouts
from bloomery.recipe.rewards import (
    FunctionReward,
    ModelReward,
    PythonReward,
    VerifierReward,
    reward_name,
)
from bloomery.train.batch_source import SourceInputs, StepBatches
from bloomery.train.objectives.build import Scoring, as_reference, policy_scoring
from bloomery.train.rl.policy_loss import (
    deviation_of,
    group_advantages,
    leave_one_out_advantages,
    mean_of,
    share_without_variance,
)
from bloomery.train.rl.ppo import TokenRewarding
from bloomery.train.rl.program_answers import longest_seconds
from bloomery.train.rl.reward_files import changed_rewards
from bloomery.train.rl.reward_models import RewardModels
from bloomery.train.rl.rewards import Rewards, RewardSource, ScoredCompletions
from bloomery.train.rl.rollout import (
    TARGETS,
    Place,
    Rollout,
    Sample,
    completion_span,
    empty_batch,
    pack,
)
from bloomery.train.rl.sampler import JointWait, Sampler
from bloomery.train.state import TrainState

REPORT_SECONDS = 1.0
SAMPLED_PROMPTS = 200  # whose columns are looked at
# Rows of a policy's head: the log-probability of each label, and with a value head the value of each position.
LOGPS = 0
VALUES = 2
# How rewards become advantages of whole completions.
Scale = Literal["group", "batch", "none", "leave_one_out"]
HELD_OUT = 2**63  # in keys of random numbers: the prompts of training have smaller numbers


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How completions are sampled and scored."""

    num_generations: int
    sampling: Sampling
    advantages: Scale | TokenRewarding = "group"
    num_iterations: int = 1
    steps_per_generation: int = 1
    mask_truncated: bool = False
    reward_beta: float = (
        0.0  # of RLOO: the weight of the KL divergence that is taken off the rewards
    )
    shown: Literal["none", "shown", "all"] = "shown"


@dataclass(frozen=True)
class HeldOutReward:
    """The mean reward of one completion of each held-out prompt, and how many tokens these have."""

    reward: float
    prompts: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class DrawnRollout:
    """A new rollout, the metrics of its completions, and the seconds that its parts took."""

    rollout: Rollout
    metrics: dict[str, float]
    seconds: dict[str, float]


@final
class RolloutSource:
    """Draws from the model that trains. The first rank calls the rewards and writes the completions."""

    def __init__(
        self,
        state: TrainState,
        *,
        settings: RolloutSettings,
        prompts: Prompts,
        held_out: Prompts,
        rewards: Rewards,
        reward_wait: JointWait,
        reward_models: RewardModels,
        scoring: Scoring,
        tokenizer: Tokenizer,
        run_dir: Path,
        emit: Emit,
        stop: Callable[[], bool],
        time_is_up: Callable[[], bool],
        reference: Decoder | None = None,
    ) -> None:
        """`reference`: the frozen copy of the start; None where the model without its adapter is the reference."""
        self._state = state
        self._reference = reference
        self._sampler = Sampler(state, settings.sampling, emit=emit, stop=stop)
        self._settings = settings
        self._prompts = prompts
        self._held_out = held_out
        self._rewards = rewards
        self._reward_wait = reward_wait
        self._reward_models = reward_models
        self._scoring = scoring
        self._tokenizer = tokenizer
        self._run_dir = run_dir
        self._emit = emit
        self._time_is_up = time_is_up
        self._rewards_are_slow = False  # then their beginning is told
        self._drawn: DrawnRollout | None = None  # the last one of this process

    @property
    def _mesh(self) -> Mesh:
        return self._state.model_and_optimizer.mesh

    @contextmanager
    def steps(self, plan: RunPlan) -> Iterator[Iterator[StepBatches]]:
        with self._rewards, self._reward_models:
            # A mistake in a reward is told before a rollout is drawn.
            self._reward_models.start()
            if self._mesh.first_rank:
                self._rewards.start()
            yield self._steps(plan)

    def _steps(self, plan: RunPlan) -> Iterator[StepBatches]:
        while True:
            # A checkpoint may hold the rest of a rollout; its first steps have been taken.
            step = self._state.progress.step
            seconds: dict[str, float] = {}
            if self._state.rollout is None or self._state.rollout.is_over(step):
                self._drawn = self._draw(plan)
                self._state.rollout = self._drawn.rollout
                seconds = self._drawn.seconds
            rollout = self._state.rollout
            # The first step has the metrics of the completions, also where it is tried again out of memory.
            metrics: dict[str, float] = {}
            if self._drawn is not None and self._drawn.rollout is rollout:
                metrics = self._drawn.metrics if step == rollout.first_step else {}
            yield self._step_of(rollout, step - rollout.first_step, plan, metrics, seconds)

    # ---- held-out prompts

    def evaluate(self, plan: RunPlan, limit: int | None) -> HeldOutReward | None:
        """One completion of each of at most `limit` held-out prompts, drawn as in training; None without prompts.

        The random numbers are the same at every evaluation.
        """
        start_time = time.perf_counter()
        count = len(self._held_out) if limit is None else min(limit, len(self._held_out))
        if count == 0:
            return None
        prompts = [self._held_out[number] for number in range(count)]
        completions = self._sampler.completions(
            plan,
            prompts,
            1,
            lambda place, number: mix(plan.train.seed, HELD_OUT, place, number),
            phase="evaluation",
        )
        totals = [total for total in self._scored(prompts, completions).totals if total == total]
        if not totals:
            return None
        return HeldOutReward(
            mean_of(torch.tensor(totals, dtype=torch.float64)),
            len(totals),
            sum(len(text.ids) for text in completions),
            time.perf_counter() - start_time,
        )

    # ---- drawing

    def _draw(self, plan: RunPlan) -> DrawnRollout:
        """The next rollout."""
        settings = self._settings
        first_prompt = self._state.cursor.consumed
        num_completions = plan.train.sequences_per_step * settings.steps_per_generation
        num_prompts = num_completions // settings.num_generations
        prompts = [self._prompts[first_prompt + index] for index in range(num_prompts)]

        # 1. Each rank draws the completions of some prompts; then every rank has all of them.
        start_time = time.perf_counter()
        completions = self._sampler.completions(
            plan,
            prompts,
            settings.num_generations,
            lambda place, number: mix(plan.train.seed, first_prompt + place, number),
            time_is_up=self._time_is_up,
        )
        rollout_seconds = time.perf_counter() - start_time

        # 2. Rewards, and by how much each completion is better than the others of its prompt.
        start_time = time.perf_counter()
        if self._rewards_are_slow:
            step = self._state.progress.step
            self._emit(Phase(step=step, name="reward", done=0, total=num_completions))
        scored = self._scored(prompts, completions)
        for reason in scored.skipped[:1]:
            others = len(scored.skipped) - 1
            more = f" (and {others:,} more completions)" if others else ""
            self._emit(Warned(step=self._state.progress.step, reason=f"skipped: {reason}{more}"))
        reward_seconds = time.perf_counter() - start_time
        self._rewards_are_slow = reward_seconds > REPORT_SECONDS
        metrics = self._metrics(completions, scored)
        samples = [
            Sample(
                tuple(prompts[text.prompt].ids.tolist()),
                tuple(text.ids),
                tuple(text.logps),
                has_loss=not (settings.mask_truncated and text.truncated),
            )
            for text in completions
        ]

        # 3. By how much each completion, or each of its tokens, was better than expected. That may take forwards of the
        # model and of its reference.
        start_time = time.perf_counter()
        num_steps = settings.num_iterations * settings.steps_per_generation
        if isinstance(settings.advantages, TokenRewarding):
            samples, more_metrics = self._with_targets(
                settings.advantages,
                samples,
                scored.totals,
                [text.truncated for text in completions],
                plan,
            )
        else:
            samples, more_metrics = self._with_advantages(
                settings.advantages, samples, scored.totals, num_steps, plan
            )
        rollout = Rollout(self._state.progress.step, num_steps, num_prompts, tuple(samples))
        if self._mesh.first_rank and settings.shown != "none":
            self._write(rollout, prompts, completions, scored)
        return DrawnRollout(
            rollout,
            {**metrics, **more_metrics},
            {
                "rollout": rollout_seconds,
                "reward": reward_seconds,
                "advantages": time.perf_counter() - start_time,
            },
        )

    def _with_advantages(
        self,
        scale: Scale,
        samples: Sequence[Sample],
        totals: Sequence[float],
        num_steps: int,
        plan: RunPlan,
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples compared with the others of their prompts, and the divergence from the reference model, where
        that is a part of their rewards.
        """
        # Of several steps the first changes the model, which then is no more the one that drew: its log-probabilities
        # are computed before.
        old_logps: list[list[float]] | None = None
        if num_steps > 1 or self._settings.reward_beta:
            old_logps = self._logps(samples, plan)
        penalties = [0.0] * len(samples)
        metrics = {}
        if self._settings.reward_beta:
            assert old_logps is not None
            divergences = self._divergences(samples, old_logps, plan)
            penalties = [self._settings.reward_beta * divergence for divergence in divergences]
            num_tokens = sum(len(sample.completion_ids) for sample in samples if sample.has_loss)
            metrics["kl"] = sum(divergences) / max(1, num_tokens)
        advantages = self._advantages(
            scale, [total - penalty for total, penalty in zip(totals, penalties, strict=True)]
        )
        judged_samples = [
            replace(
                sample,
                advantage=advantage,
                old_logps=None if num_steps == 1 or old_logps is None else tuple(old_logps[index]),
            )
            for index, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
        ]
        return judged_samples, metrics

    def _with_targets(
        self,
        rewarding: TokenRewarding,
        samples: Sequence[Sample],
        totals: Sequence[float],
        is_truncated: Sequence[bool],
        plan: RunPlan,
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with targets of each token, by the model's value head. One without any reward has no loss."""
        logps, values = self._rows_of_head(samples, plan, (LOGPS, VALUES))
        reference_logps = None
        if rewarding.kl_coef:
            reference_logps = self._logps(samples, plan, of_reference=True)
        rewarded = rewarding(
            totals, is_truncated, logps=logps, reference_logps=reference_logps, values=values
        )
        judged_samples = [
            replace(
                sample,
                old_logps=tuple(old_logps),
                targets=targets,
                has_loss=sample.has_loss and total == total,
            )
            for sample, old_logps, targets, total in zip(
                samples, logps, rewarded.targets, totals, strict=True
            )
        ]
        return judged_samples, rewarded.metrics

    def _scored(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> ScoredCompletions:
        """The rewards: all ranks have the reward models score a part, the first one asks functions and verifiers."""
        answer: list[Any] = []
        entries = scored_entries(self._tokenizer, prompts, completions)
        values, skipped_by_models = self._reward_models.score(entries.prompts, entries.texts)
        if self._mesh.first_rank:
            scored = score_entries(entries, self._rewards, values, skipped_by_models)
            answer = [
                {name: list(rewards) for name, rewards in scored.by_name.items()},
                [None if total != total else total for total in scored.totals],
                list(scored.skipped),
            ]
        self._reward_wait.finish()
        by_name, totals, skipped = self._mesh.all_gather_json(answer)[0]
        return ScoredCompletions(
            by_name,
            tuple(float("nan") if total is None else total for total in totals),
            tuple(skipped),
        )

    def _divergences(
        self, samples: Sequence[Sample], old_logps: Sequence[Sequence[float]], plan: RunPlan
    ) -> list[float]:
        """Of each completion: the log-probability under the model less that under the reference model."""
        reference_logps = self._logps(samples, plan, of_reference=True)
        return [
            sum(logps) - sum(reference)
            for logps, reference in zip(old_logps, reference_logps, strict=True)
        ]

    def _advantages(self, scale: Scale, totals: Sequence[float]) -> list[float]:
        rewards = torch.tensor(totals, dtype=torch.float64)
        if scale == "leave_one_out":
            advantages = leave_one_out_advantages(rewards, self._settings.num_generations)
        else:
            advantages = group_advantages(rewards, self._settings.num_generations, scale=scale)
        numbers: list[float] = advantages.tolist()
        return numbers

    def _logps(
        self, samples: Sequence[Sample], plan: RunPlan, *, of_reference: bool = False
    ) -> list[list[float]]:
        """Of every sample's tokens under the model as it is, or under its reference model."""
        return self._rows_of_head(samples, plan, (LOGPS,), of_reference=of_reference)[0]

    def _rows_of_head(
        self,
        samples: Sequence[Sample],
        plan: RunPlan,
        rows: Sequence[int],
        *,
        of_reference: bool = False,
    ) -> list[list[list[float]]]:
        """Of each of these rows of the head's output the numbers of every sample's tokens, computed as training does.

        Log-probabilities are 0 for a sample without loss.
        """
        # 1. Ranks share out the samples, and take equally many forwards.
        model = self._state.model
        device = next(model.parameters()).device
        mesh = self._mesh
        batches, places = self._shared_out(samples, plan)

        # 2. The outputs for this rank's samples, then those of all.
        outputs = list[Tensor]()
        scored = as_reference(model, self._reference) if of_reference else self._as_it_is(model)
        with scored as scored_model:
            for batch in batches:
                on_device = to_device(batch, device)
                head = self._scoring(on_device)
                output = forward(scored_model, on_device, head, precision=plan.train.precision)
                outputs.append(output.head[list(rows)].cpu())
        own_numbers = [
            outputs[place.micro_batch][:, place.row, completion_span(sample, place)].tolist()
            for sample, place in zip(
                samples[mesh.data_rank :: mesh.data_world], places, strict=True
            )
        ]
        numbers: list[list[list[float]]] = [[] for _ in samples]
        for rank, numbers_of_rank in enumerate(mesh.all_gather_json(own_numbers)):
            numbers[rank :: mesh.data_world] = numbers_of_rank
        return [[of_sample[row] for of_sample in numbers] for row in range(len(rows))]

    @staticmethod
    @contextmanager
    def _as_it_is(model: Decoder) -> Iterator[Decoder]:
        with eval_mode(model):
            yield model

    def _shared_out(
        self, samples: Sequence[Sample], plan: RunPlan
    ) -> tuple[list[Batch], list[Place]]:
        """This rank's micro-batches, as many as every rank has, and the places of its samples.

        A rank has every `data_world`th sample.
        """
        mesh = self._mesh
        length = plan.data.sequence_length
        rows = plan.train.micro_batch_size
        packed_by_rank = [
            pack(samples[rank :: mesh.data_world], length=length, rows=rows)
            for rank in range(mesh.data_world)
        ]
        batches, places = packed_by_rank[mesh.data_rank]
        most_batches = max(len(of_rank) for of_rank, _ in packed_by_rank)
        while len(batches) < most_batches:
            batches.append(empty_batch(samples, length=length, rows=rows))
        return batches, places

    # ---- steps

    def _step_of(
        self,
        rollout: Rollout,
        number: int,
        plan: RunPlan,
        metrics: dict[str, float],
        seconds: dict[str, float],
    ) -> StepBatches:
        """The micro-batches of the rollout's step of that number, on this rank."""
        # 1. Each pass goes through the samples in an order of its own, a part of them in each step.
        per_step = len(rollout.samples) // self._settings.steps_per_generation
        pass_number, part = divmod(number, self._settings.steps_per_generation)
        order = sorted(
            range(len(rollout.samples)),
            key=lambda index: mix(plan.train.seed, rollout.first_step, pass_number, index),
        )
        indices = sorted(order[part * per_step : (part + 1) * per_step])
        samples = [rollout.samples[index] for index in indices]

        # 2. The prompts are behind the run once the last step has trained on them.
        is_last = number == rollout.num_steps - 1
        return StepBatches(
            self._shared_out(samples, plan)[0],
            consumed=rollout.num_prompts if is_last else 0,
            tokens=sum(map(len, samples)),
            metrics=metrics,
            seconds=seconds,
        )

    # ---- what people read

    def _metrics(
        self, completions: Sequence[Completion], scored: ScoredCompletions
    ) -> dict[str, float]:
        """TRL's names."""
        generations = self._settings.num_generations
        lengths = torch.tensor([len(text.ids) for text in completions], dtype=torch.float32)
        is_truncated = torch.tensor([text.truncated for text in completions])
        ended_lengths = lengths[~is_truncated]
        totals = torch.tensor(scored.totals, dtype=torch.float64)
        # Completions are compared with those of their prompt; one that is alone in its own, with all.
        groups = totals.view(-1, generations if generations > 1 else len(totals))
        deviations = [deviation_of(group) for group in groups]
        metrics = {
            "reward": mean_of(totals),
            "reward_std": mean_of(torch.tensor(deviations, dtype=torch.float64)),
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(is_truncated.float().mean()),
        }
        if generations > 1:
            share = share_without_variance(scored.totals, generations)
            metrics["frac_reward_zero_std"] = share
        if len(ended_lengths):
            metrics["completions/mean_terminated_length"] = float(ended_lengths.mean())
        for name, rewards in scored.by_name.items():
            known_rewards = [reward for reward in rewards if reward is not None]
            if known_rewards:
                numbers = torch.tensor(known_rewards, dtype=torch.float64)
                metrics[f"rewards/{name}/mean"] = mean_of(numbers)
                metrics[f"rewards/{name}/std"] = deviation_of(numbers, correction=0)
        return metrics

    def _write(
        self,
        rollout: Rollout,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        scored: ScoredCompletions,
    ) -> None:
        """completions/step-00000001.jsonl, named after the first step that trains on them."""
        folder = self._run_dir / "completions"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{rollout.first_step + 1:08d}.jsonl"
        lines = []
        for index, (text, sample) in enumerate(zip(completions, rollout.samples, strict=True)):
            total = scored.totals[index]
            entry = {
                "prompt_ids": list(sample.prompt_ids),
                "completion_ids": text.ids,
                "prompt": value_of(prompts[text.prompt]),
                "completion": self._tokenizer.decode(text.ids),
                "rewards": {name: rewards[index] for name, rewards in scored.by_name.items()},
                "reward": None if total != total else total,
                "advantage": sample.advantage,
                "logps": text.logps,
                "truncated": text.truncated,
            }
            if sample.targets is not None:
                # Of each token, in place of one for all of them.
                del entry["advantage"]
                entry |= {name: list(getattr(sample.targets, name)) for name in TARGETS}
            lines.append(stamped_line(json.dumps(entry, ensure_ascii=False)))
        write_durably(path, b"".join(lines))


def rollout_source(inputs: SourceInputs) -> RolloutSource:
    """The source of the plan's objective and rewards."""
    plan = inputs.plan
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    scoring = Scoring(
        plan.model.score_chunk,
        plan.train.compile,
        native=plan.model.scores == "compiled",
        value_head=inputs.state.model.value_head,
    )
    prompts = Prompts(plan.data.prepared, seed=plan.train.seed)
    if inputs.state.model_and_optimizer.mesh.first_rank:
        for reason in changed_rewards(inputs.run_dir, plan):
            inputs.emit(Warned(step=inputs.state.progress.step, reason=reason))
    reward_wait = JointWait(inputs.state.model_and_optimizer.mesh, inputs.stop)
    rewards = Rewards(
        sources_of_rewards(plan),
        columns=columns_of(prompts),
        on_error=plan.data.on_error,
        stop=reward_wait.go_on,
    )
    return RolloutSource(
        inputs.state,
        settings=settings_of(
            plan, known_ids(inputs.tokenizer.eos_id, plan.model.config.eos_token_id)
        ),
        prompts=prompts,
        held_out=Prompts(plan.data.prepared, seed=plan.train.seed, split="validation"),
        rewards=rewards,
        reward_wait=reward_wait,
        reward_models=RewardModels(plan, inputs.state.model_and_optimizer.mesh),
        scoring=policy_scoring(objective, scoring),
        tokenizer=inputs.tokenizer,
        run_dir=inputs.run_dir,
        emit=inputs.emit,
        stop=inputs.stop,
        time_is_up=inputs.time_is_up,
        reference=inputs.reference_model,
    )


def settings_of(plan: RunPlan, stop_ids: tuple[int, ...]) -> RolloutSettings:
    """`stop_ids` end a completion."""
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    sampling = Sampling(
        max_new_tokens=objective.max_completion_length,
        temperature=objective.temperature,
        top_k=objective.top_k,
        top_p=objective.top_p,
        min_p=objective.min_p,
        stop_ids=stop_ids,
    )
    return RolloutSettings(
        num_generations=objective.num_generations,
        sampling=sampling,
        advantages=advantages_of(objective),
        num_iterations=objective.num_iterations,
        steps_per_generation=objective.steps_per_generation,
        mask_truncated=isinstance(objective, GroupRollouts)
        and objective.mask_truncated_completions,
        reward_beta=objective.beta if isinstance(objective, Rloo) else 0.0,
        shown=plan.logging.completions,
    )


def advantages_of(objective: Rollouts) -> Scale | TokenRewarding:
    """How the objective turns rewards into advantages."""
    if isinstance(objective, Ppo):
        return TokenRewarding(
            kl_coef=objective.kl_coef,
            kl_estimator=objective.kl_estimator,
            missing_eos_penalty=objective.missing_eos_penalty,
            whiten_rewards=objective.whiten_rewards,
            gamma=objective.gamma,
            lam=objective.lam,
        )
    if isinstance(objective, Rloo):
        return "leave_one_out"
    assert isinstance(objective, Grpo)
    return objective.scale_rewards


def sources_of_rewards(plan: RunPlan) -> list[RewardSource]:
    """Those that workers compute: functions and verifiers."""
    return [
        source_of_reward(reward) for reward in plan.rewards if not isinstance(reward, ModelReward)
    ]


def source_of_reward(reward: PythonReward | VerifierReward | FunctionReward) -> RewardSource:
    """What the worker of a reward runs."""
    if isinstance(reward, FunctionReward):
        return RewardSource(
            name=reward_name(reward),
            job={"connect": reward.function},
            weight=reward.weight,
            timeout=reward.timeout.amount,
            memory=reward.memory,
        )
    if isinstance(reward, PythonReward):
        file, _, function = reward.python.rpartition(":")
        return RewardSource(
            name=reward_name(reward),
            job={"file": file, "function": function},
            weight=reward.weight,
            timeout=reward.timeout.amount,
            memory=reward.memory,
        )
    program_seconds = reward.program_timeout.amount
    return RewardSource(
        name=reward_name(reward),
        job={
            "verifier": reward.verifier,
            "settings": {
                "column": reward.column,
                "pattern": reward.pattern,
                "max_characters": reward.max_characters,
                "json_schema": reward.json_schema,
                "program_seconds": program_seconds,
                "program_memory": reward.program_memory,
            },
        },
        weight=reward.weight,
        timeout=reward.timeout.amount,
        # A program that never ends is a wrong answer: the reward waits as long as all programs may take.
        seconds_of=partial(longest_seconds, cpu_seconds=program_seconds)
        if reward.verifier == "unit_tests"
        else lambda _: 0.0,
    )


def columns_of(prompts: Prompts) -> list[str]:
    """The columns for rewards, by the first prompts: not every row must have all."""
    first_prompts = (prompts[number] for number in range(min(len(prompts), SAMPLED_PROMPTS)))
    return list(dict.fromkeys(name for prompt in first_prompts for name in prompt.columns))


@dataclass(frozen=True)
class RewardEntries:
    """What rewards are given, one entry a completion, as by TRL: a conversation's completion is a message.

    `texts`: the completions as texts.
    """

    prompts: list[Any]
    texts: list[str]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


def scored_entries(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> RewardEntries:
    of_completion = [prompts[completion.prompt] for completion in completions]
    texts = [tokenizer.decode(visible_ids(completion)) for completion in completions]
    values = [
        text if prompt.messages is None else [{"role": "assistant", "content": text}]
        for text, prompt in zip(texts, of_completion, strict=True)
    ]
    names = list(dict.fromkeys(name for prompt in of_completion for name in prompt.columns))
    columns = {name: [prompt.columns.get(name) for prompt in of_completion] for name in names}
    return RewardEntries(
        [value_of(prompt) for prompt in of_completion],
        texts,
        values,
        [completion.ids for completion in completions],
        columns,
    )


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
    )
    return replace(scored, skipped=(*scored.skipped, *skipped_by_models))


def value_of(prompt: Prompt) -> Any:
    """The row's prompt: a text or messages."""
    return prompt.text if prompt.messages is None else prompt.messages


def visible_ids(completion: Completion) -> list[int]:
    """Without the token that ended it."""
    return completion.ids if completion.truncated else completion.ids[:-1]
