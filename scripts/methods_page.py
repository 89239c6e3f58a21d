"""Rewrites tables and pictures of methods-compared.md and lora.md in docs/explanation.

Usage: `python scripts/methods_page.py [--draw]`.

Measured figures come from benchmarks/results/methods.json, which benchmarks/methods.py writes; planned figures come
from the planner of this version. Block NAME is between `<!-- methods: NAME -->` and `<!-- end -->`. `--draw` draws the
figures again; each contains the hash of its input.
"""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from plan_pages import computer

from bloomery.core.units import GIB, format_count, two_digits
from bloomery.facts.counting import parameter_count
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.gather import facts_of
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.report.charts import Series, line_chart

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "methods.json"
FIGURES = ROOT / "docs" / "figures"
PAGES = [ROOT / "docs/explanation/methods-compared.md", ROOT / "docs/explanation/lora.md"]
BLOCK = re.compile(r"<!-- methods: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
DRAWN = re.compile(r"<!-- drawn from (\w+) -->")
SMALL, LARGE = "RX 7900 XTX", "MI300X"
BASE = "llama2-7b-lora"
ALL = "target_modules: [all-linear]"
SEVEN = {  # the settings of each method for Llama 2 7B: a packaged recipe and what changes in it
    "full, AdamW": (BASE, ("adapter={kind: none}", "optimizer.learning_rate=1e-5")),
    "full, Adafactor, fused backward": ("llama2-7b-full-24gb", ()),
    "LoRA r8": (BASE, (f"adapter={{kind: lora, rank: 8, alpha: 16, {ALL}}}",)),
    "LoRA r16": (BASE, (f"adapter={{kind: lora, rank: 16, alpha: 32, {ALL}}}",)),
    "DoRA r16": (BASE, (f"adapter={{kind: dora, rank: 16, alpha: 32, {ALL}}}",)),
    "AdaLoRA r24 to 16": (
        BASE,
        (
            "adapter={kind: peft, method: adalora, init_r: 24, target_r: 16, tinit: 100, tfinal: 100, lora_alpha: 48, "
            "target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}",
            "train.max_steps=1000",
        ),
    ),
    "QLoRA r16 (nf4)": (
        BASE,
        (f"adapter={{kind: lora, rank: 16, alpha: 32, {ALL}}}", "quantize={kind: nf4}"),
    ),
}


def refreshed(text: str) -> str:
    """The page with today's content in each of its blocks."""
    return BLOCK.sub(
        lambda found: f"<!-- methods: {found[1]} -->\n{BLOCKS[found[1]]()}\n<!-- end -->", text
    )


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def measured() -> str:
    found = report()
    lines = [
        "| method | validation loss | learning rate | trainable | memory, MiB | tensors, planned MiB | loss tokens/s "
        "| full = 1 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        f"| before training | {found['before']['loss']:.3f} | | | | | | |",
    ]
    for row in found["rows"]:
        share = row["trained"] / found["before"]["parameters"]
        lines.append(
            f"| {row['name']} | {row['held_out']:.3f} | {row['learning_rate']:g} | {row['trained']:,} ({share:.0%}) "
            f"| {row['peak_mib']:,.0f}, planned {row['planned_mib']:,.0f} | {row['planned_tensors_mib']:,.0f} | "
            f"{row['learned_per_second']:,.0f} | {row['times_full']:.2f} |"
        )
    return "\n".join(lines)


def searched() -> str:
    """Validation loss by learning rate."""
    tried = {row["name"]: dict(row["tried"]) for row in report()["rows"]}
    rates = sorted({rate for losses in tried.values() for rate in losses})
    lines = [
        "| | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---|" + "--:|" * len(rates),
    ]
    for name, losses in tried.items():
        cells = (f"{losses[rate]:.3f}" if rate in losses else "" for rate in rates)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def setting() -> str:
    """The machine, the base and the data of the measurement, in one paragraph."""
    found = report()
    first, machine, before = found["rows"][0], found["machine"], found["before"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, PyTorch {machine['torch']}, {machine['day']}. "
        f"The base: {before['parameters'] / 1e6:.1f} million parameters, "
        f"trained by the demo's recipe for {found['base_steps']} steps. Each method: {found['steps']} steps, "
        f"{first['tokens']:,} tokens, of which {first['loss_tokens']:,} are loss tokens; validation on "
        f"{before['tokens']:,} tokens. One seed."
    )


def planned_for(gpu: str, name: str, *words: str) -> RunPlan:
    recipe, own = SEVEN[name]
    with patch.dict(os.environ, {"XDG_CACHE_HOME": "/nonexistent"}):
        machine = with_gpu(computer(), find_gpu(gpu))
        loaded = load_recipe(recipe, (*own, *words))
        return resolve(loaded, facts_of(loaded, machine))


def planned() -> str:
    lines = [
        f"| method, Llama 2 7B | trained | least GiB | {SMALL}, 24 GB | {LARGE}, 192 GB |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in SEVEN:
        plan = planned_for(LARGE, name)
        least = planned_for(
            LARGE,
            name,
            "train.micro_batch_size=1",
            "train.tokens_per_step=2048",
            "train.activation_checkpointing=full",
        )
        trained = TrainedModel.of(plan, plan.model.config).trainable_count
        cells = " | ".join(_rate(each) for each in (planned_for(SMALL, name), plan))
        lines.append(
            f"| {name} | {format_count(trained)} | {least.memory.total / GIB:.1f} | {cells} |"
        )
    return "\n".join(lines)


def _rate(plan: RunPlan) -> str:
    if not plan.fits:
        return f"no: {plan.memory.total / GIB:.1f} GiB"
    rate = (
        plan.step_seconds.inverse(plan.train.tokens_per_step).value if plan.step_seconds else None
    )
    again = "*" if plan.train.activation_checkpointing == "full" else ""
    return f"{two_digits(rate)} tokens/s{again}" if rate else "fits"


def arithmetic() -> str:
    """Of Llama 2 7B, by the planner's own functions."""
    lines = ["| | weights | gradients | states | together |", "|---|--:|--:|--:|--:|"]
    for name, parts in seven_parts().items():
        cells = " | ".join(_decimal(size) for size in (*parts.values(), sum(parts.values())))
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def seven_parts() -> dict[str, dict[str, float]]:
    found = {}
    for name in ("full, AdamW", "LoRA r16", "QLoRA r16 (nf4)"):
        plan = planned_for(LARGE, name)
        model = TrainedModel.of(plan, plan.model.config)
        found[name] = model.state_parts(plan.optimizer.kind, plan.train.precision)
    return found


def _decimal(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def seven() -> str:
    config = planned_for(LARGE, "full, AdamW").model.config
    count = parameter_count(config)
    return (
        f"7 billion parameters x 16 bytes = 112 GB. Llama 2 7B has {count:,} of them: {16 * count / 1e9:.1f} GB, "
        "before any activation."
    )


def caught() -> str:
    """How much of the change of all matrices the best matrices of a rank hold."""
    spectra = report()["spectra"]
    ranks = list(next(iter(spectra.values()))["caught"])
    lines = [
        "| | " + " | ".join(f"rank {rank}" for rank in ranks) + " |",
        "|---|" + "--:|" * len(ranks),
    ]
    for name, found in spectra.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{share:.0%}" for share in found["caught"].values()) + " |"
        )
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "measured": measured,
    "searched": searched,
    "setting": setting,
    "planned": planned,
    "arithmetic": arithmetic,
    "seven": seven,
    "caught": caught,
}


# Pictures


def number() -> str:
    """Of what the pictures are drawn from."""
    drawn = json.dumps([report(), seven_parts()], sort_keys=True)
    return hashlib.sha256(drawn.encode()).hexdigest()[:16]


def draw() -> None:
    """All pictures, the same bytes for the same figures."""
    FIGURES.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        lines = [line.rstrip() for line in picture(report()).splitlines()]
        drawn = "\n".join([*lines, f"<!-- drawn from {number()} -->"]) + "\n"
        (FIGURES / f"{name}.svg").write_text(drawn, encoding="utf-8")


STYLE = """<style>
.figure{--card:#fff;--ink:#1d1c1a;--soft:#65615b;--rule:#e4e0d9;--weights:#c9d4e3;--first:#0072b2;--second:#d55e00;--third:#3f8f4f}
@media (prefers-color-scheme:dark){.figure{--card:#1e1d1a;--ink:#ebe7e0;--soft:#a39d93;--rule:#37342f;--weights:#4a5a70;
--first:#56b4e9;--second:#f0a35c;--third:#7cc98a}}
.figure text{font:13px system-ui,sans-serif;fill:var(--ink)}
.figure .soft{font-size:11px;fill:var(--soft)}
</style>"""
COLORS = ("first", "second", "third")


def _svg(width: int, height: int, label: str, parts: list[str]) -> str:
    """A picture that follows light and dark themes."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {width} {height}" role="img" '
    ground = f'<rect width="{width}" height="{height}" fill="var(--card)"/>'
    head += f'width="{width}" height="{height}" aria-label="{label}">'
    return "\n".join([head, STYLE, ground, *parts, "</svg>"])


def _text(x: float, y: float, words: str, *, anchor: str = "start", soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{words}</text>'


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="var(--{color})"/>'


def loss_curves(found: dict[str, Any]) -> str:
    """Validation loss of each method over steps, beginning with that of the base, as the report draws it."""
    curves = []
    for at, row in enumerate(found["rows"]):
        points = [(0, found["before"]["loss"]), *map(tuple, row["curve"])]
        curves.append(Series(f"{row['name']}: {row['held_out']:.3f}", points, f"d{at}"))
    return str(
        line_chart(
            "Validation loss of each method",
            curves,
            unit="nats per token",
            height=300,
            shape="image",
        )
    )


def singular_values(found: dict[str, Any]) -> str:
    """Of what full training and LoRA added to four matrices of one layer; both axes are logarithmic."""
    spectra, parts = found["spectra"], []
    for at, name in enumerate(("q_proj", "v_proj", "up_proj", "down_proj")):
        left, top, width, height = 60 + at % 2 * 345, 62 + at // 2 * 240, 270, 160
        curves = {
            who: [v for v in each["values"][name] if v > each["values"][name][0] * 1e-5]
            for who, each in spectra.items()
        }
        values, most = (
            [value for curve in curves.values() for value in curve],
            max(map(len, curves.values())),
        )
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        parts.append(_text(left, top - 12, f"{name}, layer {spectra['full']['layer'] + 1}"))
        for power in range(low, high + 1):
            y = top + height * (high - power) / (high - low)
            parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="var(--rule)"/>')
            parts.append(_text(left - 6, y + 4, f"{10.0**power:g}", anchor="end", soft=True))
        for tick in (1, 8, 64, most):
            x = left + width * math.log(tick) / math.log(most)
            parts.append(_text(x, top + height + 16, str(tick), anchor="middle", soft=True))
        for color, curve in zip(COLORS, curves.values(), strict=True):
            points = " ".join(
                f"{left + width * math.log(n) / math.log(most):.1f},"
                f"{top + height * (high - math.log10(value)) / (high - low):.1f}"
                for n, value in enumerate(curve, 1)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="var(--{color})" stroke-width="1.8"/>'
            )
        parts.append(
            _text(
                left + width / 2,
                top + height + 32,
                "singular value number",
                anchor="middle",
                soft=True,
            )
        )
    for at, (color, who) in enumerate(zip(COLORS, spectra, strict=True)):
        parts += [_box(60 + 150 * at, 14, 18, 10, color), _text(84 + 150 * at, 24, who)]
    return _svg(
        720,
        520,
        "Singular values of the change of four matrices, by full training and by LoRA",
        parts,
    )


def shapes(_found: dict[str, Any]) -> str:
    """W, B and A of Llama 2 7B's q_proj; areas to scale except for the rank."""
    width, rank, side, thin = planned_for(LARGE, "LoRA r16").model.config.hidden_size, 16, 220, 8
    trained = 2 * rank * width
    return _svg(
        720,
        285,
        "W, B and A of a LoRA of rank 16",
        [
            _box(20, 20, side, side, "weights"),
            _text(20 + side / 2, 115, "W, frozen", anchor="middle"),
            _text(20 + side / 2, 135, f"{width:,} x {width:,}", anchor="middle"),
            _text(20 + side / 2, 155, f"{width * width:,} numbers", anchor="middle"),
            _text(280, 135, "+ s x", anchor="middle"),
            _box(335, 20, thin, side, "second"),
            _text(335 + thin / 2, 262, f"B: {width:,} x {rank}", anchor="middle"),
            _text(390, 135, "x", anchor="middle"),
            _box(435, 20, side, thin, "second"),
            _text(435, 50, f"A: {rank} x {width:,}"),
            _text(435, 125, f"trainable: {trained:,} numbers,"),
            _text(435, 145, f"{trained / width**2:.2%} of W's"),
        ],
    )


def memory(_found: dict[str, Any]) -> str:
    """Weights, gradients and states of Llama 2 7B, one bar per method."""
    parts, drawn = seven_parts(), []
    scale = 430 / max(sum(each.values()) for each in parts.values())
    kinds = {"weights": "weights", "gradients": "second", "states": "third"}
    for at, (name, each) in enumerate(parts.items()):
        x, y = 150.0, 46 + 44 * at
        drawn.append(_text(140, y + 19, name, anchor="end"))
        for kind, color in kinds.items():
            drawn.append(_box(x, y, each[kind] * scale, 28, color))
            x += each[kind] * scale
        drawn.append(_text(x + 8, y + 19, _decimal(sum(each.values()))))
    for at, (kind, color) in enumerate(kinds.items()):
        drawn += [_box(150 + 120 * at, 16, 18, 10, color), _text(174 + 120 * at, 26, kind)]
    drawn.append(_text(700, 190, "before any activation", anchor="end", soft=True))
    return _svg(
        720,
        200,
        "Weights, gradients and states of Llama 2 7B, in full, with LoRA and with QLoRA",
        drawn,
    )


PICTURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "lora-shapes": shapes,
    "lora-memory": memory,
    "lora-loss": loss_curves,
    "lora-singular-values": singular_values,
}


if __name__ == "__main__":
    if "--draw" in sys.argv:
        draw()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        page.write_text(refreshed(before), encoding="utf-8")
        sys.stdout.write(
            f"{page.relative_to(ROOT)}{'' if refreshed(before) == before else ' is rewritten'}\n"
        )
