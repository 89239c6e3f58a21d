"""Draws the schedules of pipelines and writes their table: `python scripts/pipeline_page.py`.

The figure is docs/figures/pipeline-schedules.svg: four stages, eight micro-batches, a forward of one unit of time and a
backward of two, in the order that a step takes (`plan.pipeline.order`). The table is between `<!-- schedules -->` and
`<!-- end -->` in docs/how-to/pipelines.md.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery.plan.pipeline import Action, bubble, most_in_flight, order
from bloomery.recipe.schema import PipelineSchedule

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs/figures/pipeline-schedules.svg"
PAGE = ROOT / "docs/how-to/pipelines.md"
TABLE = re.compile(r"<!-- schedules -->\n.*?<!-- end -->", re.DOTALL)

SCHEDULES: dict[PipelineSchedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # with chunks
STAGES = 4
MICRO_BATCHES = 8
FORWARD = 1.0  # units of time of a pass through all layers of a device
BACKWARD = 2.0

LEFT = 74
UNIT = 20  # pixels
ROW = 22
CLASSES = {(True, 0): "a", (False, 0): "b", (True, 1): "c", (False, 1): "d"}  # direction, chunk
COLORS = {"a": "#4c8bf5", "b": "#3fa67a", "c": "#a371f7", "d": "#e8833a"}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.s{font-size:11px}.n{font-size:10px;text-anchor:middle}"
    ".h{font-weight:600}.w{fill:none;stroke:#8c959f;stroke-dasharray:4 3}.p{fill-opacity:.55}\n"
    + "".join(f".{name}{{fill:{color};stroke:{color}}}" for name, color in COLORS.items())
    + "\n"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


@dataclass(frozen=True)
class Pass:
    """One action of a device and when it runs, in units of time."""

    stage: int
    action: Action
    start: float
    end: float


def timeline(
    schedule: PipelineSchedule, *, stages: int, micro_batches: int, chunks: int
) -> list[Pass]:
    """Every pass of a step. A device takes its passes in turn, each as soon as its input is there; sending is free."""
    remaining = [
        order(schedule, stages=stages, stage=stage, micro_batches=micro_batches, chunks=chunks)
        for stage in range(stages)
    ]
    last_group = stages * chunks - 1
    free_at = [0.0] * stages
    ends = dict[tuple[bool, int, int], float]()  # by direction, group of the model, micro-batch
    passes = list[Pass]()
    while any(remaining):
        # The first device whose next pass has its input; one of them always has, or the order would hang.
        stage, input_at = next(
            (stage, input_at)
            for stage, actions in enumerate(remaining)
            if actions and (input_at := _input_at(actions[0], stage, stages, last_group, ends)) >= 0
        )
        action = remaining[stage].pop(0)
        start = max(free_at[stage], input_at)
        free_at[stage] = start + (FORWARD if action.is_forward else BACKWARD) / chunks
        group = action.chunk * stages + stage
        ends[action.is_forward, group, action.micro_batch] = free_at[stage]
        passes.append(Pass(stage, action, start, free_at[stage]))
    return passes


def _input_at(
    action: Action,
    stage: int,
    stages: int,
    last_group: int,
    ends: Mapping[tuple[bool, int, int], float],
) -> float:
    """When the input of a pass is there; -1 while it is not."""
    group = action.chunk * stages + stage
    if action.is_forward:
        return 0.0 if group == 0 else ends.get((True, group - 1, action.micro_batch), -1.0)
    if group == last_group:
        return ends.get((True, group, action.micro_batch), -1.0)
    return ends.get((False, group + 1, action.micro_batch), -1.0)


def figure() -> str:
    parts = list(_parts())
    height = 24 + len(SCHEDULES) * (STAGES * ROW + 52) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img">\n'
        "<title>The schedules gpipe, 1f1b and interleaved</title>\n"
        f"<desc>{_description()}</desc>\n"
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _description() -> str:
    shares = ", ".join(
        f"{name} {bubble(stages=STAGES, micro_batches=MICRO_BATCHES, chunks=chunks):.0%}"
        for name, chunks in SCHEDULES.items()
    )
    return (
        f"Time runs from left to right, {STAGES} stages and {MICRO_BATCHES} micro-batches with their numbers. "
        f"Share of the step in which a stage waits: {shares}."
    )


def _parts() -> Iterator[str]:
    # What the colors mean, once for all schedules.
    x = LEFT
    labels = ("forward", "backward", "forward, second group", "backward, second group")
    for label, name in zip(labels, COLORS, strict=True):
        yield _box(x, 6, 12, 12, name)
        yield f'<text class="s" x="{x + 18}" y="16">{label}</text>'
        x += 36 + 7 * len(label)

    top = 24.0
    for schedule, chunks in SCHEDULES.items():
        passes = timeline(schedule, stages=STAGES, micro_batches=MICRO_BATCHES, chunks=chunks)
        duration = max(one_pass.end for one_pass in passes)
        share = bubble(stages=STAGES, micro_batches=MICRO_BATCHES, chunks=chunks)
        yield f'<text class="h" x="{LEFT}" y="{top + 24:g}">{schedule}</text>'
        yield f'<text class="s" x="{LEFT + 86}" y="{top + 24:g}">a stage waits {share:.0%} of the step</text>'
        top += 34
        for stage in range(STAGES):
            y = top + stage * ROW
            yield f'<text class="s" x="12" y="{y + 13:g}">stage {stage + 1}</text>'
            yield f'<rect class="w" x="{LEFT}" y="{y:g}" width="{duration * UNIT:g}" height="18"/>'
        for one_pass in passes:
            x_start = LEFT + one_pass.start * UNIT
            width = (one_pass.end - one_pass.start) * UNIT
            y = top + one_pass.stage * ROW
            action = one_pass.action
            yield _box(x_start, y, width, 18, CLASSES[action.is_forward, action.chunk])
            middle = x_start + width / 2
            number = action.micro_batch + 1
            yield f'<text class="n" x="{middle:g}" y="{y + 13:g}">{number}</text>'
        top += STAGES * ROW + 18


def _box(x: float, y: float, width: float, height: float, name: str) -> str:
    return f'<rect class="p {name}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def table() -> str:
    """Share of waiting and micro-batches in memory, for the sizes that gaming computers have."""
    rows = [
        "| stages | micro-batches | gpipe waits, holds | 1f1b waits, holds | interleaved waits, holds |",
        "|--:|--:|--:|--:|--:|",
    ]
    for stages in (2, 4, 6):
        for micro_batches in (stages, 4 * stages, 8 * stages):
            cells = [
                _cell(name, chunks, stages, micro_batches) for name, chunks in SCHEDULES.items()
            ]
            rows.append(f"| {stages} | {micro_batches} | {' | '.join(cells)} |")
    return "\n".join(["<!-- schedules -->", *rows, "<!-- end -->"])


def _cell(schedule: PipelineSchedule, chunks: int, stages: int, micro_batches: int) -> str:
    share = bubble(stages=stages, micro_batches=micro_batches, chunks=chunks)
    passes = most_in_flight(
        schedule, stages=stages, stage=0, micro_batches=micro_batches, chunks=chunks
    )
    return f"{share:.0%}, {passes / chunks:g}"


def refreshed(text: str) -> str:
    """The page with today's table."""
    return TABLE.sub(lambda _: table(), text)


def main() -> None:
    FIGURE.write_text(figure(), encoding="utf-8")
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
