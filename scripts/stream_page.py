"""Draws the two queues of weights that stream, and writes the plans of the recipes: `python scripts/stream_page.py`.

The figure is docs/figures/streamed-weights.svg: six layers, a forward of one unit of time and a backward of three, once
with copies that are shorter than a forward and once with longer ones, as `plan.estimate.queues` times them. The table
is between `<!-- plans -->` and `<!-- end -->` in docs/how-to/larger-than-your-card.md.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.units import GIB, two_digits
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.estimate.queues import Queues
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs/figures/streamed-weights.svg"
PAGE = ROOT / "docs/how-to/larger-than-your-card.md"
TABLE = re.compile(r"<!-- plans -->\n.*?<!-- end -->", re.DOTALL)

LAYERS = 6
FORWARD = 1.0  # units of time of a layer
BACKWARD = 3.0  # with what it computes again
COPIES = {"Hidden: a copy takes 0.8 of a forward": 0.8, "Not hidden: a copy takes 2.2": 2.2}
LEFT = 74
UNIT = 24  # pixels
ROW = 24
COLORS = {"f": "#4c8bf5", "b": "#3fa67a", "c": "#e8833a"}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.n{font-size:10px;text-anchor:middle}"
    ".h{font-weight:600}\n"
    + "".join(f".{name}{{fill:{color};fill-opacity:.75}}" for name, color in COLORS.items())
    + "\n@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


@dataclass(frozen=True)
class Planned:
    """A row of the table: a recipe on a GPU, on a host with so many GiB of memory."""

    recipe: str
    gpu: str
    host_gib: int


PLANS = (
    Planned("qwen3-14b-lora-12gb", "RX 6700 XT", 64),
    Planned("qwen3-30b-a3b-qlora-12gb", "RX 6700 XT", 32),
    Planned("qwen3-30b-a3b-qlora-12gb", "RTX 3060 12GB", 32),
    Planned("qwen3-32b-qlora-16gb", "RX 7600 XT", 32),
    Planned("llama3.1-8b-full-24gb", "RX 7900 XTX", 64),
    Planned("llama2-7b-full-24gb-streamed", "RX 7900 XTX", 64),
    Planned("llama2-7b-full-24gb", "RX 7900 XTX", 64),
    Planned("qwen3.8-27b-lora-24gb", "RX 7900 XTX", 64),
    Planned("qwen3.8-27b-lora-24gb", "RTX 4090", 64),
)


COLUMNS = (
    "recipe",
    "GPU, memory",
    "streams",
    "on the GPU",
    "in the host's memory",
    "tokens per load, hidden from",
    "tokens/s",
)


@dataclass(frozen=True)
class Task:
    """What a queue does with a layer, and when it ends."""

    kind: str
    layer: int
    queue: str
    seconds: float
    end: float


def tasks_of(copy: float) -> list[Task]:
    """Those of a pass. Two buffers: a copy begins when the layer that it replaces is over."""
    queues = Queues()
    tasks = list[Task]()
    uses = [("f", layer) for layer in range(LAYERS)]
    uses += [("b", layer) for layer in reversed(range(LAYERS))]
    arrived = dict[int, float]()
    computed = 0.0
    held: list[int] = []

    def run(kind: str, layer: int, queue: str, seconds: float, *after: float) -> float:
        end = queues.run(queue, seconds, *after)
        tasks.append(Task(kind, layer, queue, seconds, end))
        return end

    for place, (kind, layer) in enumerate(uses):
        upcoming = uses[place + 1][1] if place + 1 < len(uses) else layer
        for wanted in dict.fromkeys((layer, upcoming)):
            if wanted not in held:
                arrived[wanted] = run("c", wanted, "copy", copy, computed)
                held = [*held, wanted][-2:] if layer in (*held, wanted) else [wanted]
        seconds = FORWARD if kind == "f" else BACKWARD
        computed = run(kind, layer, "GPU", seconds, computed, arrived[layer])
        held = [*(each for each in held if each != layer), layer][-2:]
    return tasks


def figure() -> str:
    drawings = {title: tasks_of(copy) for title, copy in COPIES.items()}
    last_end = max(task.end for tasks in drawings.values() for task in tasks)
    width = LEFT + UNIT * last_end + 12
    height = len(drawings) * (2 * ROW + 46) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
        ' aria-label="Layers compute while the next one is copied">',
        f"<style>{STYLE}</style>",
    ]
    top = 18
    for title, tasks in drawings.items():
        parts.append(f'<text class="h" x="6" y="{top}">{title}</text>')
        for row, (queue, label) in enumerate((("GPU", "computes"), ("copy", "copies"))):
            y = top + 10 + row * ROW
            parts.append(f'<text x="6" y="{y + 15}">{label}</text>')
            for task in tasks:
                if task.queue != queue:
                    continue
                x = LEFT + UNIT * (task.end - task.seconds)
                size = UNIT * task.seconds - 1
                parts.append(
                    f'<rect class="{task.kind}" x="{x:g}" y="{y}" width="{size:g}" height="{ROW - 4}" rx="2"/>'
                    f'<text class="n" x="{x + size / 2:g}" y="{y + 14}">{task.layer + 1}</text>'
                )
        top += 2 * ROW + 46
    return "\n".join([*parts, "</svg>", ""])


def machine(row: Planned) -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=8,
        cpu_flags=("avx2",),
        memory_bytes=row.host_gib * GIB,
        memory_free_bytes=int(row.host_gib * 0.9 * GIB),
        disk_free_bytes=500 * GIB,
        compiler="/usr/bin/g++",
    )
    software = Software(python="3.12.4", torch="2.13.0+cpu", build="cpu")
    bare = Machine(accelerators=(), host=host, software=software)
    return with_gpu(bare, find_gpu(row.gpu))


def planned(row: Planned) -> RunPlan:
    """Of a dataset that is large enough for whole steps; it is not read."""
    loaded = load_recipe(row.recipe)
    dataset = DatasetFacts(sequences_per_epoch=10_000, tokens=20_480_000, vocab_size=None)
    return resolve(loaded, facts_of(loaded, machine(row), dataset=dataset), gpus=1)


def table() -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---|---|--:|--:|--:|--:|"
    for row in PLANS:
        yield line(row, planned(row))


def line(row: Planned, plan: RunPlan) -> str:
    memory = plan.memory
    seconds = plan.step_seconds
    assert seconds is not None
    tokens = plan.train.tokens_per_step
    value, low, high = (
        two_digits(tokens / each) for each in (seconds.value, seconds.high, seconds.low)
    )
    stream = plan.stream
    hidden = "" if stream is None else f"{stream.tokens_per_load:,}, {stream.hidden_from:,}"
    host = "" if stream is None else f"{sum(stream.host_bytes.values()) / GIB:.0f} GiB"
    mode = {"off": "nothing"}.get(plan.train.stream, plan.train.stream)
    return (
        f"| `{row.recipe}` | {row.gpu}, {row.host_gib} GiB | {mode} |"
        f" {memory.total / GIB:.1f} of {memory.limit / GIB:.1f} GiB | {host} | {hidden} | {value} ({low} to {high}) |"
    )


def main() -> None:
    FIGURE.write_text(figure(), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    written = "\n".join(["<!-- plans -->", *table(), "<!-- end -->"])
    PAGE.write_text(TABLE.sub(lambda _: written, text), encoding="utf-8")


if __name__ == "__main__":
    main()
