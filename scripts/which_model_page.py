"""Writes the tables of docs/how-to/which-model.md: which model fits which card, by the plan's own numbers.

    python scripts/which_model_page.py

For each card and model the first method that fits: LoRA over bfloat16 weights, else QLoRA; full fine-tuning where it
fits, too. Shapes come from facts/published.toml; a model that it lacks is named below the tables.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.units import GIB, format_count, two_digits
from bloomery.facts.published import published_entry
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.types import RunPlan
from bloomery.plan.which_model import MODELS, ModelFit, model_fits

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/how-to/which-model.md"
TABLE = re.compile(r"<!-- (cards|missing) -->\n.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Card:
    """A row of the page's tables. `gpu` is a name of the table of GPUs; None: the CPU alone."""

    title: str
    gpu: str | None
    count: int = 1


CARDS = (
    Card("12 GB: Radeon RX 6700 XT", "RX 6700 XT"),
    Card("16 GB: GeForce RTX 4060 Ti 16GB", "RTX 4060 Ti 16GB"),
    Card("24 GB: Radeon RX 7900 XTX", "RX 7900 XTX"),
    Card("2 x 24 GB: two GeForce RTX 3090", "RTX 3090", 2),
    Card("192 GB: Instinct MI300X", "MI300X"),
    Card("No GPU: a CPU with AVX-512 and bfloat16, 8 cores, 32 GB of memory", None),
)


def machine(card: Card) -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=8,
        cpu_flags=("avx2", "avx512f", "avx512_bf16"),
        memory_bytes=64 * GIB if card.gpu else 32 * GIB,
        memory_free_bytes=60 * GIB if card.gpu else 30 * GIB,
        disk_free_bytes=500 * GIB,
        compiler="/usr/bin/g++",
    )
    software = Software(python="3.12.4", torch="2.13.0+cpu", build="cpu")
    bare = Machine(accelerators=(), host=host, software=software)
    return bare if card.gpu is None else with_gpu(bare, find_gpu(card.gpu))


def cells(fit: ModelFit) -> list[str] | None:
    """Of a model that fits."""
    if fit.plan is None:
        return None
    return [
        f"`{fit.name}`",
        format_count(fit.parameters),
        f"{fit.method}, or full" if fit.fits_in_full else fit.method,
        str(fit.plan.train.micro_batch_size),
        f"{fit.plan.memory.total / GIB:.1f}",
        time(fit.plan),
    ]


def time(plan: RunPlan) -> str:
    """Of one epoch, with the range of the plan, in minutes or hours."""
    if plan.seconds is None:
        return "unknown"
    size, unit = (3600, "h") if plan.seconds.value >= 5400 else (60, "min")
    ends = (plan.seconds.value, plan.seconds.low, plan.seconds.high)
    value, low, high = (seconds / size for seconds in ends)
    return f"{rounded(value)} {unit} ({rounded(low)} to {rounded(high)})"


def rounded(value: float) -> str:
    return two_digits(value) if value >= 10 else f"{value:.1f}"


def card_tables() -> Iterator[str]:
    for card in CARDS:
        yield from section(card)


def section(card: Card) -> Iterator[str]:
    """The heading, the table and the models that are too large."""
    yield f"## {card.title}"
    yield ""
    rows = {fit.name: cells(fit) for fit in model_fits(machine(card), count=card.count)}
    yield "| model | parameters | method | micro-batch | GiB | 1,000 chats |"
    yield "|---|--:|---|--:|--:|--:|"
    yield from (f"| {' | '.join(row)} |" for row in rows.values() if row is not None)
    yield ""
    too_large = [f"`{name}`" for name, row in rows.items() if row is None]
    if too_large:
        yield f"Too large: {', '.join(too_large)}."
        yield ""


def missing() -> Iterator[str]:
    """The models that the table of shapes lacks."""
    names = [f"`{name}`" for name in MODELS if published_entry(name) is None]
    if names:
        yield f"Not in the table of shapes: {', '.join(names)}. `bloomery plan --model NAME` downloads a config.json."
    else:
        yield "Every model that this page means to compare is in its tables."


def refreshed(text: str) -> str:
    """The page with today's tables."""
    tables = {"cards": card_tables, "missing": missing}

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(tables[match[1]]()).strip("\n")
        return f"<!-- {match[1]} -->\n{lines}\n<!-- end -->"

    return TABLE.sub(table, text)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    new_text = refreshed(text)
    if new_text != text:
        PAGE.write_text(new_text, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)} is rewritten")


if __name__ == "__main__":
    main()
