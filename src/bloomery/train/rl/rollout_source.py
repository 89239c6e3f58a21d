"""The batch source of reinforcement learning: it samples completions, has them scored, and hands them to the steps.

A rollout is sampled before its first step and trained on for `num_iterations` x `steps_per_generation` steps.
Everything in it is keyed by the run's seed and the number of the prompt, so that a resumed run samples what the
uninterrupted one samples; a rollout that a checkpoint interrupts is a part of the checkpoint.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, final

import torch

from bloomery.data.batch import Batch
from bloomery.data.chat.render import chat_format
from bloomery.data.order import mix
from bloomery.data.prompts import Prompt, Prompts
from bloomery.data.shards import read_manifest
from bloomery.data.tokenizer.templates import own_templates
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.infer.completions import Completion
from bloomery.infer.sampling import Sampling, known_ids
from bloomery.model.decoder import Decoder
from bloomery.model.divergence import AGREEMENT, DIVERGENCE
from bloomery.model.heads import ScoreSettings
from bloomery.monitor.events import Emit, Phase, Warned
from bloomery.parallel.mesh import Mesh
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import (
    GroupRollouts,
    OnPolicyDistill,
    RewardedRollouts,
    Rollouts,
)
from bloomery.train.batch_source import SourceInputs, StepBatches, asked_ahead
from bloomery.train.objectives.distillation import (
    before_of_teacher,
    on_policy_head,
    policy_scoring,
    scored,
)
from bloomery.train.objectives.objective import Before, Scoring
from bloomery.train.objectives.teacher import TeacherPlan, scored_teacher_of, teacher_of_rank
from bloomery.train.rl.advantages import Advantages, advantages_of
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.groups import SampledGroups, control_totals
from bloomery.train.rl.policy_loss import COMPLETIONS_PER_TOKEN, mean_of
from bloomery.train.rl.policy_scores import PolicyScores
from bloomery.train.rl.prompt_choice import PromptChoice
from bloomery.train.rl.prompt_history import PromptCounts
from bloomery.train.rl.reward_files import changed_rewards
from bloomery.train.rl.reward_models import RewardModels
from bloomery.train.rl.rewards import Rewards, worker_rewards
from bloomery.train.rl.rollout import (
    Complete,
    MicroBatchShape,
    PlacedSamples,
    Rollout,
    RolloutSample,
    pack_for_rank,
)
from bloomery.train.rl.rollout_pictures import PromptReader, RolloutPictures
from bloomery.train.rl.rollout_records import completion_metrics, write_completions
from bloomery.train.rl.sampler import JointWait, Sampler
from bloomery.train.rl.scoring import CompletionScorer, columns_of
from bloomery.train.rl.teacher_prompts import TeacherPrompts
from bloomery.train.rl.teacher_reader import TeacherReader
from bloomery.train.rl.teacher_texts import teacher_texts
from bloomery.train.scorers.client import ScoredBefore, TeacherOutput
from bloomery.train.state import TrainState

REPORT_SECONDS = 1.0
CONTROLS = {"random": "coin flips", "shuffled": "the rewards of other completions"}
ALL_LEFT_OUT = "every prompt has been always right or always wrong: all of them are sampled again"
HELD_OUT = 2**63  # in keys of random numbers: the prompts of training have smaller numbers


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How completions are sampled and trained on."""

    num_generations: int
    sampling: Sampling
    num_iterations: int = 1
    steps_per_generation: int = 1
    mask_truncated: bool = False
    choice: PromptChoice = field(default_factory=PromptChoice)
    reward_control: Literal["none", "random", "shuffled"] = "none"
    entropy_bonus: bool = False
    trains_on_rewards: bool = True
    shown: Literal["none", "shown", "all"] = "shown"

    @property
    def num_steps(self) -> int:
        """How many optimizer steps train on a rollout."""
        return self.num_iterations * self.steps_per_generation


@dataclass(frozen=True)
class HeldOutDivergence:
    """The mean divergence from the teacher, in nats per token of completions of held-out prompts, and the share of
    tokens at which both think the same the likeliest; of a teacher with another tokenizer, in place of it the share
    that it judges.

    `reward`: the mean of an environment, which training does not use; None without one.
    """

    divergence: float
    share_name: Literal["agreement", "aligned"]
    share: float
    tokens: int
    seconds: float
    reward: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return {"divergence": self.divergence, self.share_name: self.share}


@dataclass(frozen=True)
class HeldOutReward:
    """The mean reward of one completion of each held-out prompt, and how many tokens these have.

    `taught`: how far the model is from its teacher on them; None without one.
    """

    reward: float
    prompts: int
    tokens: int
    seconds: float
    taught: HeldOutDivergence | None = None


@dataclass(frozen=True)
class SampledRollout:
    """A new rollout, the metrics of its completions, and the seconds that its parts took."""

    rollout: Rollout
    metrics: dict[str, float]
    seconds: dict[str, float]


@final
class RolloutSource:
    """Samples from the model that trains. The first rank calls the rewards and writes the completions."""

    def __init__(
        self,
        state: TrainState,
        *,
        settings: RolloutSettings,
        prompts: Prompts,
        held_out: Prompts,
        scorer: CompletionScorer,
        advantages: Advantages,
        read_prompt: PromptReader,
        pictures: RolloutPictures,
        episodes: EpisodeSampler | None,
        taught: PolicyScores | None,
        teacher_reader: TeacherReader | None,
        tokenizer: Tokenizer,
        run_dir: Path,
        emit: Emit,
        stop: Callable[[], bool],
        time_is_up: Callable[[], bool],
        ahead: ScoredBefore | None = None,
    ) -> None:
        """`taught`: what a teacher thinks of completions; None without one. `teacher_reader`: what it reads, where that
        is not what the model has. `ahead`: sends the next step on a rollout to a teacher in scoring processes.
        """
        self._state = state
        self._sampler = Sampler(
            state,
            settings.sampling,
            read_prompt=read_prompt,
            episodes=episodes,
            calls=run_dir / "tools",
            emit=emit,
            stop=stop,
        )
        self._episodes = episodes
        self._pictures = pictures
        self._settings = settings
        self._prompts = prompts
        self._held_out = held_out
        self._scorer = scorer
        self._advantages = advantages
        self._taught = taught
        self._teacher_reader = teacher_reader
        self._tokenizer = tokenizer
        self._run_dir = run_dir
        self._emit = emit
        self._time_is_up = time_is_up
        self._ahead = ahead
        self._rewards_are_slow = False  # then their beginning is told
        self._last_sampled: SampledRollout | None = None  # by this process

    @property
    def _mesh(self) -> Mesh:
        return self._state.model_and_optimizer.mesh

    @contextmanager
    def steps(self, plan: RunPlan) -> Iterator[Iterator[StepBatches]]:
        if (control := self._settings.reward_control) != "none":
            reason = f"a control: trains on {CONTROLS[control]}, and reports the real rewards"
            self._emit(Warned(step=self._state.progress.step, reason=reason))
        with (
            self._scorer.started(),
            self._episodes or nullcontext(),
            self._teacher_reader or nullcontext(),
        ):
            yield self._steps(plan)

    def _steps(self, plan: RunPlan) -> Iterator[StepBatches]:
        shape = MicroBatchShape.of(plan.train, plan.data)
        upcoming: StepBatches | None = None  # of the same rollout, which scoring processes have
        while True:
            # A checkpoint may hold the rest of a rollout; its first steps have been taken.
            step = self._state.progress.step
            seconds: dict[str, float] = {}
            if self._state.rollout is None or self._state.rollout.is_over(step):
                self._last_sampled = self._next_rollout(plan)
                self._state.rollout = self._last_sampled.rollout
                seconds = self._last_sampled.seconds
            rollout = self._state.rollout
            # The first step has the metrics of the completions, also where it is tried again out of memory.
            metrics: dict[str, float] = {}
            if self._last_sampled is not None and self._last_sampled.rollout is rollout:
                metrics = self._last_sampled.metrics if step == rollout.first_step else {}
            number = step - rollout.first_step
            current = upcoming or self._step_of(rollout, number, shape, seed=plan.train.seed)
            upcoming = None
            if self._ahead is not None and number + 1 < rollout.num_steps:
                current = current.asked(self._ahead)
                following = self._step_of(rollout, number + 1, shape, seed=plan.train.seed)
                upcoming = following.asked(self._ahead)
            yield replace(current, metrics=metrics, seconds=seconds)

    def evaluate(
        self, plan: RunPlan, limit: int | None
    ) -> HeldOutReward | HeldOutDivergence | None:
        """One completion of each of at most `limit` held-out prompts, sampled as in training; None without prompts.

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
        num_tokens = sum(len(text.ids) for text in completions)
        divergence = None
        if self._taught is not None:
            samples = [
                _sample_of(text, prompts[text.prompt], prompt_number=text.prompt)
                for text in completions
            ]
            if self._teacher_reader is not None:
                samples = self._teacher_reader.read(samples, prompts, completions)
            divergences, shares = self._taught.rows_of_head(
                samples, MicroBatchShape.of(plan.train, plan.data), (DIVERGENCE, AGREEMENT)
            )
            num_sampled = sum(sample.num_sampled for sample in samples)
            num_shared = sum(map(sum, shares))
            reader = self._teacher_reader
            aligns_texts = reader is not None and reader.has_other_tokenizer
            num_judged = num_shared if aligns_texts else num_sampled
            divergence = HeldOutDivergence(
                sum(map(sum, divergences)) / max(1, num_judged),
                "aligned" if aligns_texts else "agreement",
                num_shared / max(1, num_sampled),
                num_tokens,
                time.perf_counter() - start_time,
            )
        totals = [
            total for total in self._scorer.score(prompts, completions).totals if total == total
        ]
        if not totals:
            return divergence
        reward = mean_of(torch.tensor(totals, dtype=torch.float64))
        if divergence is not None and not self._settings.trains_on_rewards:
            return replace(divergence, reward=reward)
        return HeldOutReward(
            reward,
            len(totals),
            num_tokens,
            time.perf_counter() - start_time,
            divergence,
        )

    def _next_rollout(self, plan: RunPlan) -> SampledRollout:
        """Sample completions of the next prompts, score them, and judge each by how much better it is than others."""
        settings = self._settings
        step = self._state.progress.step
        first_prompt = self._state.cursor.consumed
        num_completions = plan.train.sequences_per_step * settings.steps_per_generation
        num_prompts = num_completions // settings.num_generations

        # 1. Completions with their rewards. Prompts whose completions all have one reward teach nothing: others are
        # sampled in their place, as often as the recipe allows.
        choice = settings.choice
        history = self._state.prompt_history.copied()
        sampled = SampledGroups(settings.num_generations)
        counts = PromptCounts()
        seconds = {"rollout": 0.0, "reward": 0.0}
        next_prompt = first_prompt
        missing = math.ceil(num_prompts * choice.oversampling)
        for round_number in range(1 + choice.max_resample_times):
            was_out = len(history.left_out)
            numbers, next_prompt = history.next_numbers(self._prompts, next_prompt, missing)
            if was_out and not history.left_out:
                self._emit(Warned(step=step, reason=ALL_LEFT_OUT))
            self._sample_groups(plan, sampled, numbers, seconds)
            counts.rounds = round_number
            missing = 0
            if choice.prefers_variance:
                missing = max(0, num_prompts - len(sampled.with_variance()))
            if not missing:
                break
        metrics = completion_metrics(
            sampled.completions, sampled.scored, num_generations=settings.num_generations
        )

        # 2. Those that are trained on, and what is remembered of all of them.
        groups = sampled
        if choice.prefers_variance:
            groups = sampled.only(sampled.chosen(num_prompts))
        if choice.is_active:
            counts.sampled = len(sampled.prompts)
            counts.skipped = next_prompt - first_prompt - counts.sampled
            counts.without_variance = counts.sampled - len(sampled.with_variance())
            counts.filled = missing
            for group, number in enumerate(sampled.numbers):
                totals = sampled.of_group(group)
                counts.easy += choice.is_easy(totals)
                counts.hard += choice.is_hard(totals)
                if choice.leaves_out:
                    history.note(self._prompts, number, choice.treatment(totals))
            metrics |= counts.metrics()
        if choice.leaves_out:
            epoch = next_prompt // len(self._prompts)
            metrics["prompts/left_out"] = history.num_left_out(epoch) / len(self._prompts)
        samples = [
            _sample_of(
                text,
                groups.prompts[text.prompt],
                has_loss=not (settings.mask_truncated and text.truncated),
                prompt_number=groups.numbers[text.prompt],
            )
            for text in groups.completions
        ]
        if self._teacher_reader is not None:
            samples = self._teacher_reader.read(samples, groups.prompts, groups.completions)

        # 3. By how much each completion, or each of its tokens, was better than expected.
        start_time = time.perf_counter()
        judged = self._advantages.judge(
            samples,
            groups.totals,
            [text.truncated for text in groups.completions],
            num_steps=settings.num_steps,
            shape=MicroBatchShape.of(plan.train, plan.data),
        )
        rollout = Rollout(step, settings.num_steps, next_prompt - first_prompt, judged.samples)
        if self._mesh.first_rank and settings.shown != "none":
            write_completions(
                self._run_dir,
                rollout,
                groups.prompts,
                groups.completions,
                groups.scored,
                self._tokenizer,
            )
        seconds["advantages"] = time.perf_counter() - start_time
        history.counts.add(counts)
        self._state.prompt_history = history
        return SampledRollout(rollout, {**metrics, **judged.metrics}, seconds)

    def _sample_groups(
        self,
        plan: RunPlan,
        groups: SampledGroups,
        numbers: Sequence[int],
        seconds: dict[str, float],
    ) -> None:
        """Adds the completions of these prompts with their rewards to `groups`, and what it took to `seconds`."""
        # 1. Each rank samples the completions of some prompts; then every rank has all of them.
        start_time = time.perf_counter()
        prompts = [self._prompts[number] for number in numbers]
        completions = self._sampler.completions(
            plan,
            prompts,
            self._settings.num_generations,
            lambda place, number: mix(plan.train.seed, numbers[place], number),
            time_is_up=self._time_is_up,
        )
        seconds["rollout"] += time.perf_counter() - start_time

        # 2. Rewards.
        start_time = time.perf_counter()
        step = self._state.progress.step
        if self._rewards_are_slow:
            self._emit(Phase(step=step, name="reward", done=0, total=len(completions)))
        scored = self._scorer.score(prompts, completions)
        for reason in scored.skipped[:1]:
            others = len(scored.skipped) - 1
            more = f" (and {others:,} more completions)" if others else ""
            self._emit(Warned(step=step, reason=f"skipped: {reason}{more}"))
        reward_seconds = time.perf_counter() - start_time
        self._rewards_are_slow = reward_seconds > REPORT_SECONDS
        seconds["reward"] += reward_seconds
        keys = [mix(plan.train.seed, numbers[text.prompt], text.number) for text in completions]
        totals = control_totals(scored.totals, self._settings.reward_control, keys)
        groups.add(numbers, prompts, completions, scored, totals)

    def _step_of(
        self,
        rollout: Rollout,
        number: int,
        shape: MicroBatchShape,
        *,
        seed: int,
    ) -> StepBatches:
        """The micro-batches of the rollout's step of that number, on this rank."""
        # 1. Each pass goes through the samples in an order of its own, a part of them in each step.
        per_step = len(rollout.samples) // self._settings.steps_per_generation
        pass_number, part = divmod(number, self._settings.steps_per_generation)
        order = sorted(
            range(len(rollout.samples)),
            key=lambda index: mix(seed, rollout.first_step, pass_number, index),
        )
        indices = sorted(order[part * per_step : (part + 1) * per_step])
        samples = [rollout.samples[index] for index in indices]
        complete: Complete = self._pictures
        if self._settings.entropy_bonus:
            num_tokens = sum(sample.num_sampled for sample in samples if sample.has_loss)
            complete = partial(self._completed, per_token=len(samples) / max(1, num_tokens))
        batches, _ = pack_for_rank(samples, shape, self._mesh, complete=complete)

        # 2. The prompts are behind the run once the last step has trained on them.
        is_last = number == rollout.num_steps - 1
        return StepBatches(
            batches,
            consumed=rollout.num_prompts if is_last else 0,
            tokens=sum(map(len, samples)),
        )

    def _completed(self, batch: Batch, members: PlacedSamples, *, per_token: float) -> Batch:
        """With pictures, and with the completions of a step per loss token."""
        completions_per_token = torch.full_like(batch.loss_mask, per_token)
        return self._pictures(batch, members).with_extras(
            **{COMPLETIONS_PER_TOKEN: completions_per_token}
        )


def _sample_of(
    completion: Completion, prompt: Prompt, *, prompt_number: int, has_loss: bool = True
) -> RolloutSample:
    episode = completion.episode
    return RolloutSample(
        tuple(prompt.ids.tolist() if episode is None else episode.prompt_ids),
        tuple(completion.ids),
        tuple(completion.logps),
        has_loss=has_loss,
        prompt_number=prompt_number,
        given=tuple((start, end) for start, end in completion.given),
    )


def rollout_source(inputs: SourceInputs) -> RolloutSource:
    """The source of the plan's objective and rewards."""
    plan = inputs.plan
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    scoring = Scoring(
        ScoreSettings(
            plan.model.score_chunk, plan.train.compile, native=plan.model.scores == "compiled"
        ),
        inputs.state.model.value_head,
    )
    prompts = Prompts(plan.data.prepared, seed=plan.train.seed)
    held_out = Prompts(plan.data.prepared, seed=plan.train.seed, split="validation")
    pictures = RolloutPictures(plan.data.prepared, prompts)
    mesh = inputs.state.model_and_optimizer.mesh
    code = () if plan.episodes is None else plan.episodes.files
    if mesh.first_rank:
        for reason in changed_rewards(inputs.run_dir, plan.rewards, code):
            inputs.emit(Warned(step=inputs.state.progress.step, reason=reason))
    reward_wait = JointWait(mesh, inputs.stop)
    rewards = Rewards(
        worker_rewards(plan.rewards),
        columns=columns_of(prompts),
        on_error=plan.data.on_error,
        stop=reward_wait.go_on,
    )
    policy_scores = PolicyScores(
        inputs.state,
        policy_scoring(objective, scoring),
        inputs.reference_model,
        plan.train,
        pictures,
    )
    episodes = None
    if plan.episodes is not None:
        episodes = EpisodeSampler(
            plan.episodes,
            inputs.tokenizer,
            longest=plan.data.sequence_length,
            # All ranks ask together whether to stop. One that waits for its tools is alone: it asks before its next
            # forwards.
            stop=inputs.stop if mesh.world == 1 else lambda: False,
            on_note=lambda note: inputs.emit(Warned(step=inputs.state.progress.step, reason=note)),
        )
    taught = None
    teacher_reader = None
    if isinstance(objective, OnPolicyDistill | GroupRollouts) and objective.teacher is not None:
        taught = _teacher_scores(inputs, objective, scoring, held_out)
        if objective.teacher_prompt_template is not None or plan.aligns_texts:
            teacher_reader = _teacher_reader(inputs, objective, episodes, (prompts, held_out))
    return RolloutSource(
        inputs.state,
        settings=RolloutSettings(
            num_generations=objective.num_generations,
            sampling=sampling_of(plan, inputs.tokenizer),
            num_iterations=objective.num_iterations,
            steps_per_generation=objective.steps_per_generation,
            mask_truncated=isinstance(objective, GroupRollouts)
            and objective.mask_truncated_completions,
            choice=PromptChoice.of(objective),
            reward_control=objective.reward_control
            if isinstance(objective, GroupRollouts)
            else "none",
            entropy_bonus=isinstance(objective, RewardedRollouts) and objective.entropy_coef > 0,
            trains_on_rewards=isinstance(objective, RewardedRollouts),
            shown=plan.logging.completions,
        ),
        prompts=prompts,
        held_out=held_out,
        scorer=CompletionScorer(
            rewards=rewards,
            models=RewardModels(plan, mesh, scorers=inputs.scorers),
            wait=reward_wait,
            tokenizer=inputs.tokenizer,
            mesh=mesh,
        ),
        advantages=advantages_of(objective, policy_scores),
        read_prompt=PromptReader(plan.data.prepared),
        episodes=episodes,
        pictures=pictures,
        taught=taught,
        teacher_reader=teacher_reader,
        tokenizer=inputs.tokenizer,
        run_dir=inputs.run_dir,
        emit=inputs.emit,
        stop=inputs.stop,
        time_is_up=inputs.time_is_up,
        ahead=asked_ahead(inputs),
    )


def _teacher_scores(
    inputs: SourceInputs,
    objective: OnPolicyDistill | GroupRollouts,
    scoring: Scoring,
    held_out: Prompts,
) -> PolicyScores:
    """What the teacher of the steps thinks of completions of held-out prompts."""
    plan = inputs.plan
    mesh = inputs.state.model_and_optimizer.mesh
    teacher: Decoder | TeacherOutput | None
    before: Before | None
    # The step has loaded the teacher: this is the same one.
    of_scorers = scored_teacher_of(plan, inputs.scorers)
    if of_scorers is not None:
        teacher, before = scored(of_scorers, spans=plan.aligns_texts)
    else:
        loaded = None if objective.own_teacher is not None else teacher_of_rank(plan, mesh)
        before = before_of_teacher(
            objective,
            loaded,
            scoring.settings,
            precision=plan.train.precision,
            together=plan.train.stream_micro_batches,
            spans=plan.aligns_texts,
            mesh=mesh,
        )
        teacher = loaded
    head = on_policy_head(objective, teacher, scoring, spans=plan.aligns_texts, mesh=mesh)
    pictures = RolloutPictures(plan.data.prepared, held_out)
    return PolicyScores(inputs.state, head, None, plan.train, pictures, before)


def _teacher_reader(
    inputs: SourceInputs,
    objective: OnPolicyDistill | GroupRollouts,
    episodes: EpisodeSampler | None,
    splits: Sequence[Prompts],
) -> TeacherReader:
    """Of a teacher with other prompts or another tokenizer."""
    plan = inputs.plan
    tokenizer = inputs.tokenizer
    texts = None
    if plan.aligns_texts:
        tokenizer = load_tokenizer(TeacherPlan.of(plan).folder)
        texts = teacher_texts(
            inputs.tokenizer,
            tokenizer,
            turns=episodes is not None or read_manifest(plan.data.prepared).turns,
            stop_ids=sampling_of(plan, inputs.tokenizer).stop_ids,
            variables=objective.teacher_template_kwargs,
        )
    prompts = TeacherPrompts(
        objective.teacher_prompt_template,
        plan.data.prepared,
        tokenizer,
        longest=plan.data.sequence_length - objective.max_completion_length,
        variables=objective.teacher_template_kwargs,
        chats=episodes is not None,
    )
    return TeacherReader(prompts, texts, episodes, splits=splits, length=plan.data.sequence_length)


def sampling_of(plan: RunPlan, tokenizer: Tokenizer) -> Sampling:
    """How completions are sampled, up to the end of a text, or of a turn where prompts are conversations."""
    objective = plan.objective
    assert isinstance(objective, Rollouts)
    ends = [tokenizer.eos_id, plan.model.config.eos_token_id]
    if read_manifest(plan.data.prepared).turns and own_templates(tokenizer.config):
        # A tokenizer of base models may end texts with one token, and its template turns with another.
        with chat_format(tokenizer, None) as form:
            ends += form.stop_ids
    return Sampling(
        max_new_tokens=objective.max_completion_length,
        temperature=objective.temperature,
        top_k=objective.top_k,
        top_p=objective.top_p,
        min_p=objective.min_p,
        stop_ids=known_ids(*ends),
    )
