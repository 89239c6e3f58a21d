"""What the plan of a run tells its views: figures beside those of events, and facts for the diagnosis."""

from contextlib import suppress
from dataclasses import dataclass

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.data.prepare.stats import DatasetStats, read_stats
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.history import PlanFacts
from bloomery.plan.estimate.speed import device_rate, useful_flops
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.routers import trains_router
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import RewardedRollouts
from bloomery.recipe.rewards import VerifierReward


@dataclass(frozen=True)
class PlannedFigures:
    """Figures of the plan that a view shows and no event holds; None is not shown."""

    name: str = ""
    every_steps: int = 10
    steps: int | None = None
    flops_per_token: float | None = None  # forward and backward
    peak_flops: float | None = None  # per second, of all devices together
    memory_limit_gib: float | None = None
    show_memory: bool = False  # in each line of the table

    def utilization(self, tokens_per_second: float) -> float | None:
        """MFU: the share of the device's peak that the model's own arithmetic uses (PaLM, appendix B)."""
        if not self.flops_per_token or not self.peak_flops:
            return None
        return tokens_per_second * self.flops_per_token / self.peak_flops


def figures_of_plan(plan: RunPlan, machine: Machine | None) -> PlannedFigures:
    """MFU needs the device's peak in the plan's precision from the table."""
    config = plan.model.config
    train = plan.train
    rate = None
    if machine is not None:
        profile = build_profile(machine)
        rate = device_rate(
            profile,
            machine,
            precision=train.precision,
            width=config.hidden_size,
            compiled=train.compile,
        )
    return PlannedFigures(
        name=plan.name,
        every_steps=plan.logging.every_steps,
        steps=train.steps,
        flops_per_token=useful_flops(TrainedModel.of(plan, config), plan.data.sequence_length),
        peak_flops=rate.peak if rate else None,
        memory_limit_gib=plan.memory.limit / GIB,
        show_memory=plan.logging.memory,
    )


def diagnosis_facts(plan: RunPlan, machine: Machine | None) -> PlanFacts:
    """Reads a sample of the shards: a tenth of a second. Facts of a missing or damaged dataset are None."""
    config = plan.model.config
    train = plan.train
    optimizer = plan.optimizer
    stats: DatasetStats | None = None
    with suppress(UserError, OSError):
        stats = read_stats(plan.data.prepared)
    # A step is compared with its plan without the sampling of completions, whose length nobody knows before.
    estimate = plan.step_seconds
    if plan.rollout is not None:
        estimate = plan.rollout.seconds.get("update")
    objective = plan.objective
    aim = objective.spec
    nats = aim.loss_unit == "token"
    own_rate = OPTIMIZERS[optimizer.kind].own_rate
    router = train.router if trains_router(plan.adapter, config) else None
    return PlanFacts(
        vocab_size=config.vocab_size if nats else None,  # a guess is worth ln V to these alone
        fresh=plan.model.source is None and nats,  # other losses begin and fall otherwise
        falls=aim.falls,
        steps=train.steps,
        # Completions are packed: a step has fewer tokens than its sequences have room for.
        tokens_per_step=train.tokens_per_step if plan.rollout is None else 0,
        sequence_length=plan.data.sequence_length,
        layout=plan.data.layout,
        learning_rate=optimizer.learning_rate,
        matrix_rate_key="" if own_rate is None else f"optimizer.{own_rate.key}",
        matrix_rate=0.0 if own_rate is None else getattr(optimizer, own_rate.key),
        warmup_steps=optimizer.warmup_steps,
        clip=train.max_grad_norm,
        precision=train.precision,
        # counted over all of the text
        unigram_nats=stats.unigram_nats if stats and aim.reads_text else None,
        bytes_per_token=stats.bytes_per_token if stats else None,
        duplicates=stats.duplicates if stats else None,
        has_pictures=plan.dataset is not None and plan.dataset.pictures is not None,
        text_tokens=stats.tokens if stats else None,
        device=train.device,
        fused_attention=None
        if machine is None
        else build_profile(machine).attention.value == "fused",
        checkpointing=train.activation_checkpointing,
        compiled=train.compile,
        saves_in_background=plan.checkpoint.async_save,
        memory_limit_gib=plan.memory.limit / GIB,
        step_seconds=None if estimate is None else (estimate.low, estimate.high),
        router_loss=None if router is None else router.loss,
        router_bias_update=0.0 if router is None else router.bias_update,
        trains_on_rewards=isinstance(objective, RewardedRollouts),
        highest_reward=_highest_reward(plan),
        max_completion_length=objective.max_completion_length
        if isinstance(objective, RewardedRollouts)
        else 0,
        kl_key=objective.kl_key if isinstance(objective, RewardedRollouts) else "",
        kl_weight=objective.kl_weight if isinstance(objective, RewardedRollouts) else None,
        clip_key=objective.clip_key if isinstance(objective, RewardedRollouts) else "",
    )


def _highest_reward(plan: RunPlan) -> float | None:
    """The weights of verifiers, each of which gives 1 at most; None where the user's code gives rewards."""
    if not plan.rewards or not all(isinstance(reward, VerifierReward) for reward in plan.rewards):
        return None
    return sum(max(0.0, reward.weight) for reward in plan.rewards)
