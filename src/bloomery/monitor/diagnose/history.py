"""What a diagnosis knows: plain facts of the plan and the text, and what a run's events have told so far."""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    Recovered,
    Resumed,
    RunStarted,
    Saved,
    StepDone,
    StepHealth,
)

RECENT = 200  # steps and samples that count as "now"
FEW = 20  # steps that a mean of the loss is taken over


@dataclass(frozen=True)
class Facts:
    """What the events do not tell; None or 0 is not known, and what needs it is then not said."""

    vocab_size: int | None = None
    fresh: bool = True  # the weights began as noise
    falls: bool = True  # the loss is nats a token, whose way down is known; that of a pair may stay near where it began
    steps: int | None = None
    tokens_per_step: int = 0
    sequence_length: int = 0
    layout: str = "packed"
    optimizer: str = "adamw"
    learning_rate: float = 0.0  # the peak
    muon_learning_rate: float = 0.0  # Muon's own
    warmup_steps: int = 0
    clip: float | None = None
    precision: str = "float32"
    unigram_nats: float | None = None  # the loss of knowing how often each token occurs, and nothing else
    bytes_per_token: float | None = None
    duplicates: float | None = None  # share of documents that repeat another one
    text_tokens: int | None = None  # of the training split
    device: str = "cpu"
    fused_attention: bool | None = None  # whether the device has such kernels
    checkpointing: str = "none"
    compiled: bool = False
    saves_in_background: bool = True
    memory_limit_gib: float | None = None
    step_seconds: tuple[float, float] | None = None  # the plan's range


@dataclass(frozen=True)
class Finding:
    """A cause with its evidence and what mends it: an edit of the recipe or a command."""

    cause: str  # one word, by which it is said once
    what: str
    seen: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} ({self.seen}): {self.fix}"


@dataclass(frozen=True)
class Moved:
    """How far the weights have come until a step."""

    step: int = 0
    path: float = 0.0  # how many times their own size, at most
    largest: float = 0.0  # of the update-to-weight ratios


@dataclass
class Seen:
    """Mutable: what the events told. Bounded, but for eight bytes a step."""

    first: StepDone | None = None  # step 1 itself
    recent: deque[StepDone] = field(default_factory=lambda: deque(maxlen=RECENT))
    losses: "array[float]" = field(default_factory=lambda: array("f"))  # finite ones, in order
    told_at: "array[int]" = field(default_factory=lambda: array("I"))  # the step of each of them
    health: deque[StepHealth] = field(default_factory=lambda: deque(maxlen=RECENT))
    gpus: deque[DeviceStats] = field(default_factory=lambda: deque(maxlen=RECENT * 8))
    allocator: deque[DeviceStats] = field(default_factory=lambda: deque(maxlen=RECENT))  # as training tells it
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> held-out loss
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

    def add(self, event: Event) -> None:
        """Events in the order of the file."""
        match event:
            case StepDone():
                self._add_step(event)
            case StepHealth():
                self._add_vitals(event)
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
                self.attention, self.began_at, self.began, self.compiled_graphs = (
                    event.attention,
                    event.step,
                    None,
                    None,
                )
            case Resumed() | Recovered():
                self._go_back(event.step)

    def _add_step(self, event: StepDone) -> None:
        self.began = self.began or event
        self.step, self.first = event.step, event if event.step == 1 else self.first
        self.recent.append(event)
        self.steps_seconds += event.step_seconds
        self.peak_rate, self.peak_gib = max(self.peak_rate, event.learning_rate), max(self.peak_gib, event.memory_gib)
        if event.loss is not None:
            self.losses.append(event.loss)
            self.told_at.append(event.step)
        if event.grad_norm is not None and len(self.first_norms) < FEW:
            self.first_norms.append(event.grad_norm)

    def _add_vitals(self, event: StepHealth) -> None:
        """The path takes each ratio for all steps since the one before: they change slowly."""
        since = event.step - (self.health[-1].step if self.health else self.began_at)
        ratio, before = event.update_ratio or 0.0, self.moved[-1]
        self.moved.append(Moved(event.step, before.path + ratio * max(1, since), max(before.largest, ratio)))
        if event.graphs is not None and self.compiled_graphs is None and event.step >= self.began_at + FEW:
            self.compiled_graphs = event.graphs
        self.health.append(event)

    def _go_back(self, step: int) -> None:
        """What a resume or a recovery gave up is forgotten; seconds that were spent stay spent."""
        kept = bisect_right(self.told_at, step)
        del self.losses[kept:], self.told_at[kept:]
        past = [told for told in self.moved if told.step <= step] or [Moved()]
        self.moved = deque(past, maxlen=RECENT)
        self.recent = deque((told for told in self.recent if told.step <= step), maxlen=RECENT)
        self.health = deque((told for told in self.health if told.step <= step), maxlen=RECENT)
        self.allocator = deque((told for told in self.allocator if told.step <= step), maxlen=RECENT)
        self.evaluations = {at: loss for at, loss in self.evaluations.items() if at <= step}
        self.first, self.step = self.first if step else None, step

    @property
    def path(self) -> float:
        """How many times their own size the weights have moved at most."""
        return self.moved[-1].path

    @property
    def largest_ratio(self) -> float:
        return self.moved[-1].largest

    @property
    def begin(self) -> float | None:
        """The loss of the first step, before anything was learned."""
        return self.first.loss if self.first is not None else None

    @property
    def loss(self) -> float | None:
        """The mean of the last few steps."""
        return fmean(self.losses[-FEW:]) if self.losses else None

    @property
    def lowest(self) -> float | None:
        """The lowest mean of a few steps in a row."""
        blocks = range(0, len(self.losses) - FEW + 1, FEW)
        return min((fmean(self.losses[at : at + FEW]) for at in blocks), default=None)

    @property
    def flat(self) -> bool:
        """Whether the second half of the steps brought less than 1%: its last tenth beside the tenth in the middle."""
        tenth, half = max(FEW, len(self.losses) // 10), len(self.losses) // 2
        if half < 2 * FEW:
            return False
        return fmean(self.losses[-tenth:]) > 0.99 * fmean(self.losses[half - tenth // 2 : half + tenth - tenth // 2])

    @property
    def healthy_rate(self) -> list[StepHealth]:
        """The health of steps whose learning rate was at least a hundredth of the peak: others hardly move anything."""
        rates = {told.step: told.learning_rate for told in self.recent}
        return [v for v in self.health if rates.get(v.step, self.peak_rate) >= 0.01 * self.peak_rate]

    @property
    def ratio(self) -> float | None:
        """The update-to-weight ratio of the newest ten vitals, their median."""
        return middle([v.update_ratio for v in self.healthy_rate[-10:]])


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def seen_of(events: Iterable[Event]) -> Seen:
    """What all of these events told."""
    seen = Seen()
    for event in events:
        seen.add(event)
    return seen


def total(values: Sequence[float | None]) -> float:
    """The sum of those that are known."""
    return sum(value for value in values if value is not None)
