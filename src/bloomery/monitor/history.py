"""Input of a diagnosis: settings of the plan, statistics of the dataset, and the events of the run so far."""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    ExpertLoad,
    RunStarted,
    Saved,
    StepDone,
    StepHealth,
    last_kept_step,
)

RECENT = 200  # steps and samples that are kept
FEW = 20  # steps that a mean of the loss is taken over
FEW_ROLLOUTS = 10  # that a mean of their metrics is taken over


@dataclass(frozen=True)
class PlanFacts:
    """Settings and statistics that no event holds; None or 0: unknown, and the rules that need it are skipped."""

    vocab_size: int | None = None
    fresh: bool = True  # random initial weights
    # A loss in nats per token must fall; the loss of a pair may stay near its first value.
    falls: bool = True
    steps: int | None = None
    tokens_per_step: int = 0
    sequence_length: int = 0
    layout: str = "packed"
    learning_rate: float = 0.0  # the peak
    matrix_rate_key: str = ""  # of an optimizer with another rate for the matrices of layers
    matrix_rate: float = 0.0
    warmup_steps: int = 0
    clip: float | None = None
    precision: str = "float32"
    unigram_nats: float | None = None  # entropy of the token frequencies
    bytes_per_token: float | None = None
    duplicates: float | None = None  # share of documents that repeat another one
    has_pictures: bool = False  # the loader makes patches of them for each batch
    text_tokens: int | None = None  # in the training split
    device: str = "cpu"
    fused_attention: bool | None = None  # whether the device has fused kernels
    checkpointing: str = "none"
    compiled: bool = False
    saves_in_background: bool = True
    memory_limit_gib: float | None = None
    step_seconds: tuple[float, float] | None = (
        None  # the plan's range, without sampling completions
    )
    # Of a mixture whose routers train: the coefficient of the loss that evens the load; None: of another model.
    router_loss: float | None = None
    router_bias_update: float = 0.0
    # Of a run with rewards.
    trains_on_rewards: bool = (
        True  # False: a teacher trains it, and an environment's rewards are figures alone
    )
    highest_reward: float | None = None  # that a completion can have, where that is known
    max_completion_length: int = 0
    kl_key: str = "beta"  # the objective's key with the weight of its KL divergence
    kl_weight: float | None = None
    clip_key: str = "epsilon_high"  # the objective's key with the upper clip range


@dataclass(frozen=True)
class Diagnosis:
    """A problem with its evidence and its fix: an edit of the recipe or a command."""

    cause: str  # one word: each is reported once
    problem: str
    evidence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem} ({self.evidence}): {self.fix}"


@dataclass(frozen=True)
class Moved:
    """How far the weights have moved by a step."""

    step: int = 0
    path: float = 0.0  # the sum of the update-to-weight ratios
    largest: float = 0.0  # of the update-to-weight ratios


@dataclass
class RunHistory:
    """Mutable: figures of the events so far. Bounded except for eight bytes per step."""

    first: StepDone | None = None  # step 1 itself
    recent: deque[StepDone] = field(default_factory=lambda: deque(maxlen=RECENT))
    losses: "array[float]" = field(default_factory=lambda: array("f"))  # finite ones, in order
    loss_steps: "array[int]" = field(default_factory=lambda: array("I"))  # the step of each of them
    health: deque[StepHealth] = field(default_factory=lambda: deque(maxlen=RECENT))
    gpus: deque[DeviceStats] = field(default_factory=lambda: deque(maxlen=RECENT * 8))
    # PyTorch's memory in the training process.
    allocator: deque[DeviceStats] = field(default_factory=lambda: deque(maxlen=RECENT))
    expert_loads: deque[ExpertLoad] = field(default_factory=lambda: deque(maxlen=FEW))
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> validation loss
    attention: str = ""
    step: int = 0
    steps_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0
    first_norms: list[float] = field(default_factory=list)
    peak_rate: float = 0.0
    peak_gib: float = 0.0
    moved: deque[Moved] = field(default_factory=lambda: deque([Moved()], maxlen=RECENT))
    began_at: int = 0  # the step at which this process started
    began: StepDone | None = None  # its first step
    compiled_graphs: int | None = None  # early in this process
    num_rollouts: int = 0
    first_rollouts: list[StepDone] = field(default_factory=list)  # the steps that began with one

    def add(self, event: Event) -> None:
        """Events in the order of the file."""
        if (last_kept := last_kept_step(event)) is not None:
            self._go_back(last_kept)
        match event:
            case StepDone():
                self._add_step(event)
            case StepHealth():
                self._add_health(event)
            case ExpertLoad():
                self.expert_loads.append(event)
            case EvalDone(loss=float() as loss):
                self.evaluations[event.step] = loss
                self.evaluation_seconds += event.seconds
            case Saved():
                self.saving_seconds += event.seconds
            case DeviceStats() if event.reserved_gib is not None:
                self.allocator.append(event)
            case DeviceStats() if event.device >= 0:
                self.gpus.append(event)
            case RunStarted():
                self.attention = event.attention
                self.began_at = event.step
                self.began = self.compiled_graphs = None

    def _add_step(self, event: StepDone) -> None:
        self.began = self.began or event
        self.step = event.step
        if event.step == 1:
            self.first = event
        self.recent.append(event)
        if "reward" in event.metrics:
            self.num_rollouts += 1
            if len(self.first_rollouts) < FEW_ROLLOUTS:
                self.first_rollouts.append(event)
        self.steps_seconds += event.step_seconds
        self.peak_rate = max(self.peak_rate, event.learning_rate)
        self.peak_gib = max(self.peak_gib, event.memory_gib)
        if event.loss is not None:
            self.losses.append(event.loss)
            self.loss_steps.append(event.step)
        if event.grad_norm is not None and len(self.first_norms) < FEW:
            self.first_norms.append(event.grad_norm)

    def _add_health(self, event: StepHealth) -> None:
        # The path counts each ratio for all steps since the previous one: ratios change slowly.
        steps_since = event.step - (self.health[-1].step if self.health else self.began_at)
        ratio = event.update_ratio or 0.0
        previous = self.moved[-1]
        path = previous.path + ratio * max(1, steps_since)
        self.moved.append(Moved(event.step, path, max(previous.largest, ratio)))
        # Compilation is over after a few steps of this process; later graphs are recompilations.
        is_settled = event.step >= self.began_at + FEW
        if event.graphs is not None and self.compiled_graphs is None and is_settled:
            self.compiled_graphs = event.graphs
        self.health.append(event)

    def _go_back(self, step: int) -> None:
        """Discards the steps after `step`; seconds are kept."""
        num_kept = bisect_right(self.loss_steps, step)
        del self.losses[num_kept:], self.loss_steps[num_kept:]
        past = [moved for moved in self.moved if moved.step <= step] or [Moved()]
        self.moved = deque(past, maxlen=RECENT)
        self.num_rollouts -= sum(
            step_done.step > step and "reward" in step_done.metrics for step_done in self.recent
        )
        self.recent = deque(
            (step_done for step_done in self.recent if step_done.step <= step), maxlen=RECENT
        )
        self.health = deque(
            (health for health in self.health if health.step <= step), maxlen=RECENT
        )
        self.expert_loads = deque(
            (load for load in self.expert_loads if load.step <= step), maxlen=FEW
        )
        self.allocator = deque(
            (sample for sample in self.allocator if sample.step <= step), maxlen=RECENT
        )
        self.evaluations = {
            eval_step: loss for eval_step, loss in self.evaluations.items() if eval_step <= step
        }
        self.first = self.first if step else None
        self.first_rollouts = [rollout for rollout in self.first_rollouts if rollout.step <= step]
        self.step = step

    @property
    def newest_rollouts(self) -> list[StepDone]:
        """The newest steps that began with a rollout."""
        rollouts = [step_done for step_done in self.recent if "reward" in step_done.metrics]
        return rollouts[-FEW_ROLLOUTS:]

    @property
    def steps_without_gradient(self) -> set[int]:
        """Recent steps whose completions have no gradient by construction.

        All completions of a prompt have one reward, so that every advantage is zero, or no completion is trained on.
        The steps that follow a rollout train on it, too.
        """
        steps = set[int]()
        is_without = False
        for step_done in self.recent:
            if "reward" in step_done.metrics:
                is_without = equal_rewards(step_done) == 1.0
            if is_without or (self.first_rollouts and step_done.loss_tokens == 0):
                steps.add(step_done.step)
        return steps

    @property
    def path(self) -> float:
        """Upper bound on the distance of the weights from their initial values, in units of their size."""
        return self.moved[-1].path

    @property
    def largest_ratio(self) -> float:
        return self.moved[-1].largest

    @property
    def begin(self) -> float | None:
        """The loss of the first step, before any update."""
        return self.first.loss if self.first is not None else None

    @property
    def loss(self) -> float | None:
        """The mean of the last few steps."""
        return fmean(self.losses[-FEW:]) if self.losses else None

    @property
    def lowest(self) -> float | None:
        """The lowest mean of FEW consecutive steps."""
        blocks = range(0, len(self.losses) - FEW + 1, FEW)
        return min((fmean(self.losses[start : start + FEW]) for start in blocks), default=None)

    @property
    def flat(self) -> bool:
        """Whether the loss fell by less than 1% from the middle tenth of the steps to the last."""
        tenth = max(FEW, len(self.losses) // 10)
        half = len(self.losses) // 2
        if half < 2 * FEW:
            return False
        middle_losses = self.losses[half - tenth // 2 : half + tenth - tenth // 2]
        return fmean(self.losses[-tenth:]) > 0.99 * fmean(middle_losses)

    @property
    def healthy_rate(self) -> list[StepHealth]:
        """The health of steps with a learning rate of at least 1% of the peak: others hardly change the weights."""
        rates = {step_done.step: step_done.learning_rate for step_done in self.recent}
        return [
            v for v in self.health if rates.get(v.step, self.peak_rate) >= 0.01 * self.peak_rate
        ]

    @property
    def ratio(self) -> float | None:
        """Median of the ten newest update-to-weight ratios."""
        return middle([v.update_ratio for v in self.healthy_rate[-10:]])


def equal_rewards(rollout: StepDone) -> float:
    """Share of the prompts of a rollout whose completions all have one reward."""
    return rollout.metrics.get("frac_reward_zero_std", 0.0)


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the known values."""
    known_values = [value for value in values if value is not None]
    return median(known_values) if known_values else None


def history_of(events: Iterable[Event]) -> RunHistory:
    """The history of these events."""
    history = RunHistory()
    for event in events:
        history.add(event)
    return history
