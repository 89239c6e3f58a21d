"""A plan as a picture and in sentences: whether it fits, memory by component, time. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.core.units import counted, format_bytes, format_seconds, two_digits
from bloomery.facts.objectives import OBJECTIVES
from bloomery.facts.rates import rate_text
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.plan.advise import fit_of, span
from bloomery.plan.checkpoints import interval_text
from bloomery.plan.learning_rates import usual_of
from bloomery.plan.page_text import about
from bloomery.plan.price import cost_figures
from bloomery.plan.types import NOT_TENSORS, Cost, Fit, PlanReport, RunPlan
from bloomery.recipe.schema import Recipe

# What a legend calls parts of the estimate, the color of each, and the parts themselves.
GROUPS = (
    ("weights", "c2", ("weights", "half-precision copies", "vision tower")),
    ("other models", "c4", ("reference model", "teacher", "whole copy")),
    ("activations", "c1", ("activations", "logits", "temporaries", "pictures")),
    ("gradients and optimizer", "c3", ("adapter", "gradients", "optimizer", "optimizer states")),
    ("completions", "c6", ("rollout", "decoding copies")),
    ("PyTorch and reserve", "c5", NOT_TENSORS),
)
_OTHERS = ("others", "c8")
SMALLEST_SHARE = 0.002  # of the memory, below which a part is not shown
VERDICTS: Mapping[Fit, tuple[str, str]] = {
    # A word, and its tone
    "fits": ("Yes", "good"),
    "fits, barely": ("Barely", "warn"),
    "may not fit": ("Perhaps not", "warn"),
    "does not fit": ("No", "bad"),
}
# Usual numbers of sequences per step, as docs/how-to/hyperparameters.md has them.
BATCH_OF_ADAPTER, BATCH_OF_ALL = "16 to 64", "32 to 128"
RANKS = "8 to 64"


@dataclass(frozen=True)
class MemoryPart:
    """`color`: a token of the palette."""

    name: str
    bytes: float
    color: str


@dataclass(frozen=True)
class PlanFact:
    value: str
    words: str


@dataclass(frozen=True)
class PlanPicture:
    """`whole`: bytes that the bar stands for, the limit or, where the parts are more, their sum."""

    device: str
    verdict: str
    tone: str
    memory: str
    parts: tuple[MemoryPart, ...]
    limit: float
    whole: float
    facts: tuple[PlanFact, ...]
    saves: str
    longest: int | None  # tokens of a sequence that fit, one at a time; None: not known
    seconds: float | None = None  # of the run; None: not known
    cost: Cost | None = None


def picture_of(report: PlanReport, machine: Machine) -> PlanPicture:
    plan = report.plan
    verdict, tone = VERDICTS[fit_of(plan)]
    total, limit = plan.memory.total, plan.memory.limit
    profile = build_profile(machine)
    device = f"CPU, {machine.host.cpu_name}"
    if profile.accelerator is not None:
        device = profile.accelerator.name
    if plan.parallel is not None:
        device = f"{plan.parallel.devices:,} x {device}"
    longest = report.max_length
    return PlanPicture(
        device=device,
        verdict=verdict,
        tone=tone,
        memory=f"{format_bytes(total)} of {format_bytes(limit)}"
        + (" that are free" if profile.accelerator is None else ""),
        parts=tuple(_parts(plan)),
        limit=limit,
        whole=max(total, limit),
        facts=tuple(_facts(report)),
        saves=_saves(report),
        longest=None if longest is None else longest.as_planned or longest.checkpointed or None,
        seconds=None if plan.seconds is None else plan.seconds.value,
        cost=report.cost,
    )


def _parts(plan: RunPlan) -> list[MemoryPart]:
    """In the order of GROUPS, without those that are too small to be seen."""
    sizes = dict(plan.memory.parts)
    is_frozen = plan.adapter.kind != "none"
    parts = list[MemoryPart]()
    for name, color, members in GROUPS:
        size = sum(sizes.pop(member, 0.0) for member in members)
        if name == "weights" and is_frozen:
            name = "weights, frozen"
        if name.startswith("gradients") and is_frozen:
            name = "adapter and optimizer"
        parts.append(MemoryPart(name, size, color))
    name, color = _OTHERS
    parts.append(MemoryPart(name, sum(sizes.values()), color))
    return [part for part in parts if part.bytes >= SMALLEST_SHARE * plan.memory.total]


def _facts(report: PlanReport) -> list[PlanFact]:
    plan = report.plan
    step = plan.step_seconds
    is_measured = step is not None and step.origin == "measured"
    origin = "measured" if is_measured else "estimated, not measured"
    facts = list[PlanFact]()
    if plan.seconds is not None:
        ends = span((plan.seconds.low, plan.seconds.high), trimmed=True)
        facts.append(PlanFact(about(plan.seconds.value), ends))
    elif step is not None:
        rate = step.inverse(plan.trained_tokens_per_step)
        facts.append(PlanFact(format_seconds(1e6 / rate.value), "per million tokens"))
    if plan.train.steps is not None:
        is_estimate = plan.dataset is None or plan.dataset.spread > 0
        number = two_digits(plan.train.steps) if is_estimate else f"{plan.train.steps:,}"
        tokens = f"{plan.train.tokens_per_step:,} tokens each"
        steps = f"{number} step{'' if plan.train.steps == 1 else 's'}"
        facts.append(PlanFact(f"about {steps}" if is_estimate else steps, tokens))
    if step is not None:
        rate = step.inverse(plan.trained_tokens_per_step)
        facts.append(PlanFact(f"{two_digits(rate.value)} tokens/s", origin))
    disk = report.disk["checkpoints"] + report.disk.get("shards", 0.0)
    facts.append(PlanFact(format_bytes(disk), "disk, mostly checkpoints"))
    if report.energy_kwh is not None:
        facts.append(PlanFact(f"{report.energy_kwh:.2g} kWh", "electricity of the GPU"))
    if report.cost is not None:
        value, ends = cost_figures(report.cost)
        unit = "per million tokens" if report.cost.per_million_tokens else ends
        facts.append(PlanFact(value, f"{unit}, at {report.cost.per_hour} per hour"))
    return facts


def _saves(report: PlanReport) -> str:
    """When checkpoints are saved, and what a kill loses, as a sentence."""
    kill = report.kill
    every = f"Saves every {interval_text(report.plan.checkpoint)}"
    if kill.whole_run:
        return f"{every}; the run ends before that."
    lost = counted(kill.steps or 0, "steps") if kill.seconds is None else about(kill.seconds)
    return f"{every}: a kill loses at most {lost}."


def usual_values(recipe: Recipe, plan: RunPlan) -> dict[str, str]:
    """What is usual for the five settings that matter most, by key."""
    usual = usual_of(recipe, plan.model.config)
    repeats = OBJECTIVES[recipe.objective.kind].repeats
    is_adapted = recipe.adapter.kind != "none"
    batch = BATCH_OF_ADAPTER if is_adapted else BATCH_OF_ALL
    spec = plan.objective.spec
    if plan.data.layout == "packed" and not spec.reads_text and not spec.samples:
        batch = f"{batch} rows; short rows share a sequence"
    hints = {
        "optimizer.learning_rate": f"usual: {usual.rates}",
        "train.batch_size": f"usual: {batch}",
        "adapter.rank": f"usual: {RANKS}" if is_adapted else "all weights are trained",
        "data.sequence_length": _of_length(plan),
    }
    if repeats is not None:
        hints["train.epochs"] = f"usual: {repeats.usual_epochs}, at most {repeats.most_epochs}"
    return hints


def _of_length(plan: RunPlan) -> str:
    """How many rows of the dataset are longer than a sequence."""
    dataset = plan.dataset
    if dataset is None or plan.objective.spec.reads_text:
        return f"at most {plan.model.config.max_positions:,}"
    cut = dataset.cut_short + dataset.left_out
    return "no row is cut" if not cut else f"{counted(cut, 'rows')} are longer or left out"


def planned_values(plan: RunPlan) -> dict[str, str]:
    """What the plan trains with where the recipe leaves it open, by key."""
    values = {
        "optimizer.learning_rate": rate_text(plan.optimizer.learning_rate),
        "train.batch_size": f"{plan.train.sequences_per_step:,}",
        "data.sequence_length": str(plan.data.sequence_length),
    }
    if plan.epochs is not None:
        values["train.epochs"] = f"{float(f'{plan.epochs:.2g}'):g}"
    return values
