"""The part of a run's page about rewards: their curves, those of the completions, and a few completions themselves."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, final

from markupsafe import Markup

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.core.text import harmless
from bloomery.data.pictures.thumbnails import Shown, shown_picture
from bloomery.data.prompts import Prompts
from bloomery.monitor.events import StepDone, is_damaged
from bloomery.plan.store import read_plan
from bloomery.report.charts import Point, Series, line_chart
from bloomery.report.record import RunRecord

MOST_BYTES = 64 * 2**20  # of a file of completions that the page reads
SHOWN_CHARACTERS = 1200  # of a prompt or a completion
SHOWN_TURNS = 50  # of an episode, and calls of a turn
SHOWN_REWARDS = 50  # of a completion

# Charts of several metrics: the title, the unit, and the metrics with the names of their lines.
GROUPS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Length of completions",
        "tokens",
        {
            "completions/mean_length": "mean",
            "completions/mean_terminated_length": "mean of those that ended",
            "completions/min_length": "shortest",
            "completions/max_length": "longest",
        },
    ),
    (
        "Completions that did not end",
        "share that reached objective.max_completion_length",
        {"completions/clipped_ratio": "share"},
    ),
    (
        "Prompts without a difference",
        "share whose completions all have one reward",
        {"frac_reward_zero_std": "share"},
    ),
    (
        "Prompts of a rollout",
        "prompts",
        {
            "prompts/sampled": "sampled",
            "prompts/without_variance": "whose completions have one reward",
            "prompts/filled": "of them trained on",
            "prompts/easy": "always right",
            "prompts/hard": "always wrong",
            "prompts/skipped": "passed over",
        },
    ),
    ("Rounds of further prompts", "of a rollout", {"prompts/rounds": "rounds"}),
    ("Prompts left out", "share of the dataset", {"prompts/left_out": "share"}),
    ("Turns of an episode", "answers of the model", {"tools/turns": "mean"}),
    ("Tool calls", "of an episode", {"tools/call_frequency": "mean"}),
    ("Tool errors", "share of the calls", {"tools/failure_frequency": "share"}),
    ("Spread of rewards", "standard deviation within a prompt", {"reward_std": "spread"}),
    ("Entropy", "nats per token", {"entropy": "of the model's distribution"}),
    ("KL divergence", "nats per token, from the reference model", {"kl": "training"}),
    (
        "Terms of the loss",
        "each divided by its own count, before its weight",
        {
            "loss/rl": "by rewards",
            "loss/teacher": "divergence from the teacher",
            "loss/ce": "cross-entropy of the better completions",
        },
    ),
    (
        "Divergence from the teacher",
        "nats per token that the model sampled",
        {"divergence": "over the vocabulary", "log_ratio": "of the sampled tokens"},
    ),
    (
        "Agreement with the teacher",
        "share of tokens at which both think the same the likeliest",
        {"agreement": "share"},
    ),
    (
        "Clipped ratios",
        "share",
        {
            "clip_ratio/low_mean": "below the range",
            "clip_ratio/high_mean": "above the range",
            "cispo_clip_ratio": "above epsilon_high",
        },
    ),
    (
        "Generation against training",
        "difference of log-probabilities",
        {
            "sampling/sampling_logp_difference/mean": "mean",
            "sampling/sampling_logp_difference/max": "largest",
        },
    ),
    (
        "Importance of samples",
        "ratio of the trained model's probabilities to the generator's",
        {
            "sampling/importance_sampling_ratio/min": "smallest",
            "sampling/importance_sampling_ratio/mean": "mean",
            "sampling/importance_sampling_ratio/max": "largest",
        },
    ),
)
# Those of the experts of a mixture.
ROUTER_GROUPS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Load of experts",
        "relative to an even load",
        {
            "router/highest_load": "highest of all experts",
            "router/load_variation": "coefficient of variation, mean of layers",
        },
    ),
    (
        "Dead experts",
        "without a token in a step, of all layers",
        {"router/dead_experts": "experts"},
    ),
    (
        "Entropy of the load",
        "1: every expert has as many tokens",
        {"router/load_entropy": "share of the largest"},
    ),
    ("Entropy of routers", "nats per token", {"router/entropy": "of their probabilities"}),
    (
        "Losses of routers",
        "without their coefficients; an even load has the experts per token",
        {"router/balance_loss": "load balancing", "router/z_loss": "z-loss"},
    ),
)
# Metrics that a chart of the page shows in another form.
DRAWN_ELSEWHERE = ("reward", "clip_ratio/region_mean")
# Metrics of preference pairs. Both rewards in one chart, which shows their margin.
PREFERENCES = {"chosen_reward": "chosen", "rejected_reward": "rejected"}
METRIC_UNITS = {
    "accuracy": "share of pairs with a higher chosen reward",
    "margin": "chosen reward - rejected reward",
    "kl": "nats",
    "nats": "nats per token",
    "log_odds": "log odds ratio",
}


@dataclass(frozen=True)
class ShownTurn:
    """A turn of an episode on the page: an answer with the tools that it calls, or the result of the tool `name`.

    `calls`: of each the name, and its arguments.
    """

    role: Literal["assistant", "tool"]
    text: str
    name: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    failed: bool = False


@dataclass(frozen=True)
class ShownCompletion:
    """A completion on the page. `role`: best, middle or worst of its rollout. `turns`: of an episode; else none.

    `rewards`: of each the name, and what it gave.
    """

    role: str
    prompt: str
    completion: str
    reward: str
    rewards: tuple[tuple[str, str], ...]
    advantage: str
    ended: bool
    turns: tuple[ShownTurn, ...] = ()
    pictures: tuple[Shown, ...] = ()


def reward_series(record: RunRecord, smoothed: Sequence[Point]) -> list[Series]:
    """Of the main chart: each rollout, their moving average, held-out prompts."""
    held_out: list[Point] = [
        (event.step, event.metrics["reward"]) for event in record.evals if "reward" in event.metrics
    ]
    return [
        Series("reward of each rollout", metric_points(record.steps, "reward"), "raw"),
        Series("smoothed", smoothed, "line"),
        Series("held-out prompts", held_out, "eval"),
    ]


def reward_charts(record: RunRecord) -> tuple[list[Markup], set[str]]:
    """Charts of the rewards and completions, and the names of the metrics that need no other."""
    names = dict.fromkeys(name for step in record.steps for name in step.metrics)
    charts = []
    rewards = mean_rewards(names)
    if len(rewards) > 1:
        lines = [
            Series(line, points, f"d{number % 8}")
            for number, (name, line) in enumerate(rewards.items())
            if (points := metric_points(record.steps, name))
        ]
        charts.append(line_chart("Rewards, without their weights", lines, unit="mean"))
    charts += group_charts(record, GROUPS)
    charts.append(_seconds(record.steps))
    drawn = {name for _, _, metrics in GROUPS for name in metrics}
    return charts, drawn | set(DRAWN_ELSEWHERE) | {name for name in names if "rewards/" in name}


def group_charts(
    record: RunRecord, groups: Iterable[tuple[str, str, Mapping[str, str]]]
) -> list[Markup]:
    """One of each group of metrics that the run has."""
    charts = []
    for title, unit, metrics in groups:
        lines = [
            Series(line, points, f"d{number}")
            for number, (name, line) in enumerate(metrics.items())
            if (points := metric_points(record.steps, name))
        ]
        if lines:
            charts.append(line_chart(title, lines, unit=unit, from_zero=True))
    return charts


def mean_rewards(names: Iterable[str]) -> dict[str, str]:
    """Of the metrics with these names, the mean of each reward: the name of the reward by that of the metric."""
    return {
        name: name.removeprefix("rewards/").removesuffix("/mean")
        for name in names
        if name.startswith("rewards/") and name.endswith("/mean")
    }


def title_of(metric: str) -> str:
    """Of the chart of a metric."""
    return metric.replace("_", " ").capitalize()


def _seconds(steps: Sequence[StepDone]) -> Markup:
    """Where the time of the steps goes that begin with a rollout."""
    rollouts = [step for step in steps if step.rollout_seconds is not None]
    lines = [
        Series("sampling", [(s.step, s.rollout_seconds or 0.0) for s in rollouts], "d0"),
        Series("rewards", [(s.step, s.reward_seconds or 0.0) for s in rollouts], "d1"),
        Series("update", [(s.step, s.update_seconds) for s in steps], "d2"),
    ]
    return line_chart("Time of a step", lines, unit="seconds", from_zero=True)


def metric_points(steps: Sequence[StepDone], name: str) -> list[Point]:
    return [(step.step, step.metrics[name]) for step in steps if name in step.metrics]


def shown_completions(folder: Path) -> list[tuple[str, list[ShownCompletion]]]:
    """Of the first, the middle and the last rollout of a run: the best, a middle and the worst completion."""
    steps = rollout_steps(folder)
    if not steps:
        return []
    pictures = PromptPictures(folder)
    shown = (
        shown_rollout(folder, step, pictures)
        for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    )
    return [(title, completions) for title, completions in shown if title]


def rollout_steps(folder: Path) -> list[int]:
    """The steps whose rollouts have a file of completions in the folder of a run, in order."""
    try:
        names = {path.name for path in (folder / "completions").iterdir()}
    except OSError:  # no rollout so far, or something else in the place of the folder
        return []
    # A copy that somebody made, such as "step-00000001 (copy).jsonl", is no rollout.
    return sorted(int(match[1]) for name in names if (match := _ROLLOUT.fullmatch(name)))


def shown_rollout(
    folder: Path, step: int, pictures: "PromptPictures"
) -> tuple[str, list[ShownCompletion]]:
    """The title of a rollout with its best, a middle and its worst completion; "" and none where no line is left."""
    rows, num_damaged = _rows(folder / "completions" / f"step-{step:08d}.jsonl")
    if not rows and not num_damaged:
        return "", []
    title = f"step {step:,}, {len(rows):,} completions"
    if num_damaged:
        title += f", {num_damaged:,} damaged lines left out"
    return title, _three_of(rows, pictures)


_ROLLOUT = re.compile(r"step-([0-9]{8})\.jsonl")


def _rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Those that can be read, and how many lines have changed since they were written. A file that is too large, or no
    regular one, has none.
    """
    try:
        lines = read_whole(path, most=MOST_BYTES).splitlines()
    except (OSError, UserError):
        return [], 0
    rows = []
    num_damaged = 0
    for line in filter(None, lines):
        row = None
        with suppress(ValueError, RecursionError):
            row = None if is_damaged(line) else json.loads(line.decode("utf-8", errors="replace"))
        if isinstance(row, dict) and isinstance(row.get("completion"), str):
            rows.append(row)
        else:
            num_damaged += 1
    return rows, num_damaged


@final
class PromptPictures:
    """Of a run's prompts, read in its prepared dataset."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, row: Mapping[str, Any]) -> tuple[Shown, ...]:
        """Of a row of completions; none where the dataset is gone, or was prepared anew in another way."""
        number = row.get("prompt_number")
        if not isinstance(number, int) or self._prompts is None:
            return ()
        try:
            contents = self._prompts.pictures_of(number)
            return tuple(filter(None, map(shown_picture, contents)))
        except (UserError, OSError, ValueError, IndexError):
            return ()

    @cached_property
    def _prompts(self) -> Prompts | None:
        try:
            plan = read_plan(self._folder / "plan.json")
            return Prompts(plan.data.prepared, seed=plan.train.seed)
        except (UserError, OSError, ValueError):
            return None


def _three_of(rows: Sequence[Mapping[str, Any]], pictures: PromptPictures) -> list[ShownCompletion]:
    """By their rewards; of rows without any the first, the middle and the last."""
    if not rows:
        return []
    scored = [(reward, row) for row in rows if (reward := _finite(row.get("reward"))) is not None]
    by_reward = [row for _, row in sorted(scored, key=lambda entry: -entry[0])] or list(rows)
    places = {"best": 0, "middle": len(by_reward) // 2, "worst": len(by_reward) - 1}
    shown: dict[int, str] = {}
    for role, place in places.items():
        shown.setdefault(place, role)
    return [
        replace(_shown(role, by_reward[place]), pictures=pictures.of(by_reward[place]))
        for place, role in shown.items()
    ]


def _finite(value: object) -> float | None:
    """None for anything but a finite number that float64 holds."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(role: str, row: Mapping[str, Any]) -> ShownCompletion:
    prompt = row.get("prompt")
    if isinstance(prompt, list):  # messages
        prompt = "\n".join(
            f"{turn.get('role', '')}: {turn.get('content', '')}"
            for turn in prompt
            if isinstance(turn, dict)
        )
    rewards = row.get("rewards")
    by_name = rewards if isinstance(rewards, dict) else {}
    return ShownCompletion(
        role=role,
        prompt=_cut(str(prompt)),
        completion=_cut(row["completion"]),
        reward=_number(row.get("reward")),
        rewards=tuple(
            (_cut(str(name)), _number(value))
            for name, value in islice(by_name.items(), SHOWN_REWARDS)
        ),
        advantage=_number(_advantage_of(row), sign="+"),
        ended=not row.get("truncated"),
        turns=shown_turns(row.get("messages")),
    )


def shown_turns(messages: object) -> tuple[ShownTurn, ...]:
    """Of the messages of an episode, as a line of completions/ has them; what is no message is left out."""
    turns = []
    for message in islice(messages, SHOWN_TURNS) if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") not in ("assistant", "tool"):
            continue
        text = message.get("content")
        text = _cut(text) if isinstance(text, str) else ""
        if message["role"] == "tool":
            failed = text.startswith('{"error":')
            turns.append(ShownTurn("tool", text, _cut(str(message.get("name", ""))), failed=failed))
            continue
        calls = message.get("tool_calls")
        turns.append(
            ShownTurn(
                "assistant",
                text,
                calls=tuple(map(_shown_call, islice(calls, SHOWN_TURNS)))
                if isinstance(calls, list)
                else (),
            )
        )
    return tuple(turns)


def _shown_call(call: object) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "", ""
    return _cut(str(function.get("name", ""))), _cut(str(function.get("arguments", "")))


def _advantage_of(row: Mapping[str, Any]) -> object:
    """Of the completion; PPO's tokens have one each, of which this is the mean."""
    advantages = row.get("advantages")
    if not isinstance(advantages, list) or not advantages:
        return row.get("advantage")
    numbers = [number for value in advantages if (number := _finite(value)) is not None]
    return sum(numbers) / len(numbers) if len(numbers) == len(advantages) else None


def _cut(text: str) -> str:
    text = harmless(text)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _number(value: object, sign: str = "") -> str:
    number = _finite(value)
    return (
        "none"
        if number is None
        else f"{number:{sign}.3f}"
        if abs(number) < 1e15
        else f"{number:{sign}.3e}"
    )
