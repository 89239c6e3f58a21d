"""Rewrites tables and pictures of methods-compared.md and lora.md in docs/explanation.

Usage: `python scripts/methods_page.py [--draw]`.

Measured figures come from benchmarks/results/methods.json, which benchmarks/methods.py writes; planned figures come
from the planner of this version. Block NAME is between `<!-- methods: NAME -->` and `<!-- end -->`. `--draw` draws the
figures again and needs matplotlib; each contains the hash of its input.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from plan_pages import computer

from bloomery.core.units import GIB, format_count, two_digits
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs.specs import find_gpu
from bloomery.model.counting import parameter_count
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
        ("adapter={kind: peft, method: adalora, init_r: 24, target_r: 16, tinit: 100, tfinal: 100, lora_alpha: 48, "
         "target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}", "train.max_steps=1000"),
    ),
    "QLoRA r16 (nf4)": (BASE, (f"adapter={{kind: lora, rank: 16, alpha: 32, {ALL}}}", "quantize={kind: nf4}")),
}  # fmt: skip


def refreshed(text: str) -> str:
    """The page with today's content in each of its blocks."""
    return BLOCK.sub(lambda found: f"<!-- methods: {found[1]} -->\n{BLOCKS[found[1]]()}\n<!-- end -->", text)


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
    lines = ["| | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---|" + "--:|" * len(rates)]
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
        least = planned_for(LARGE, name, "train.micro_batch_size=1", "train.tokens_per_step=2048",
                            "train.activation_checkpointing=full")  # fmt: skip
        trained = TrainedModel.of(plan, plan.model.config).trained_count
        cells = " | ".join(_rate(each) for each in (planned_for(SMALL, name), plan))
        lines.append(f"| {name} | {format_count(trained)} | {least.memory.total / GIB:.1f} | {cells} |")
    return "\n".join(lines)


def _rate(plan: RunPlan) -> str:
    if not plan.fits:
        return f"no: {plan.memory.total / GIB:.1f} GiB"
    rate = plan.step_seconds.inverse(plan.train.tokens_per_step).value if plan.step_seconds else None
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
    lines = ["| | " + " | ".join(f"rank {rank}" for rank in ranks) + " |", "|---|" + "--:|" * len(ranks)]
    for name, found in spectra.items():
        lines.append(f"| {name} | " + " | ".join(f"{share:.0%}" for share in found["caught"].values()) + " |")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "measured": measured, "searched": searched, "setting": setting, "planned": planned, "arithmetic": arithmetic,
    "seven": seven, "caught": caught,
}  # fmt: skip


# Pictures


def number() -> str:
    """Of what the pictures are drawn from."""
    drawn = json.dumps([report(), seven_parts()], sort_keys=True)
    return hashlib.sha256(drawn.encode()).hexdigest()[:16]


def draw() -> None:
    """All pictures, the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "bloomery", "font.family": "sans-serif", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white",
    })  # fmt: skip
    FIGURES.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        path, drawn = FIGURES / f"{name}.svg", picture(report())
        if isinstance(drawn, str):
            path.write_text(drawn, encoding="utf-8")
        else:
            drawn.savefig(path, metadata={"Date": None, "Creator": None})
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
        path.write_text("\n".join([*lines, f"<!-- drawn from {number()} -->"]) + "\n", encoding="utf-8")


def loss_curves(found: dict[str, Any]) -> str:
    """Validation loss of each method over steps, beginning with that of the base, as the report draws it."""
    curves = []
    for at, row in enumerate(found["rows"]):
        points = [(0, found["before"]["loss"]), *map(tuple, row["curve"])]
        curves.append(Series(f"{row['name']}: {row['held_out']:.3f}", points, f"d{at}"))
    return str(line_chart("Validation loss of each method", curves, unit="nats per token", height=300, shape="image"))


def singular_values(found: dict[str, Any]) -> Any:
    """Of what full training and LoRA added to four matrices of one layer."""
    from matplotlib.figure import Figure

    spectra = found["spectra"]
    names = ["q_proj", "v_proj", "up_proj", "down_proj"]
    picture = Figure(figsize=(7.2, 5.0), layout="constrained")
    for place, name in zip(picture.subplots(2, 2).flat, names, strict=True):
        for who, style in zip(spectra, ("-", "--", "-."), strict=True):
            values = spectra[who]["values"][name]
            shown = [value for value in values if value > values[0] * 1e-5]  # beyond a LoRA's rank: rounding
            place.loglog(range(1, len(shown) + 1), shown, style, label=who)
        place.set(title=f"{name}, layer {spectra['full']['layer'] + 1}", xlabel="number", ylabel="singular value")
    place.legend(frameon=False)
    return picture


def shapes(_found: dict[str, Any]) -> Any:
    """W, B and A of Llama 2 7B's q_proj to scale in numbers: areas are counts."""
    from matplotlib.patches import Rectangle

    config = planned_for(LARGE, "LoRA r16").model.config
    width, rank = config.hidden_size, 16
    axes = _axes(7.2, 3.2)
    thin = 0.03  # of the page: 16 of 4,096 would be a hair
    parts = [
        (0.0, 0.0, 1.0, 1.0, f"W, frozen\n{width:,} x {width:,}\n{width * width:,} numbers", "#c9d4e3"),
        (1.35, 0.0, thin, 1.0, f"B\n{width:,} x {rank}", "#e8a33d"),
        (1.55, 1.0 - thin, 1.0, thin, f"A: {rank} x {width:,}", "#e8a33d"),
    ]
    for left, low, wide, high, text, colour in parts:
        axes.add_patch(Rectangle((left, low), wide, high, facecolor=colour, edgecolor="black", linewidth=0.6))
        inside = wide > 0.5 and high > 0.5
        where = (left + wide / 2, low + high / 2) if inside else (left + wide / 2, low - 0.06)
        axes.text(*where, text, ha="center", va="center" if inside else "top")
    axes.text(1.17, 0.5, "+  s x", ha="center", va="center", fontsize=13)
    trained = 2 * rank * width
    axes.text(1.55, 0.45, f"trained: {trained:,} numbers,\n{trained / width**2:.2%} of W's", va="center")
    axes.set(xlim=(-0.05, 2.65), ylim=(-0.28, 1.05), aspect="equal")
    axes.axis("off")
    return axes.figure


def memory(_found: dict[str, Any]) -> Any:
    """Weights, gradients and states of Llama 2 7B."""
    parts = seven_parts()
    axes = _axes(7.2, 2.4)
    names, left = list(parts), [0.0] * len(parts)
    for kind, colour in (("weights", "#c9d4e3"), ("gradients", "#e8a33d"), ("states", "#7aa874")):
        sizes = [parts[name][kind] / 1e9 for name in names]
        axes.barh(names, sizes, left=left, color=colour, label=kind)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for place, total in enumerate(left):
        axes.text(total + 1, place, f"{total:.1f} GB", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="GB, before any activation", xlim=(0, 1.15 * max(left)))
    axes.legend(frameon=False, loc="lower right")
    return axes.figure


def _axes(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


PICTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lora-shapes": shapes, "lora-memory": memory, "lora-loss": loss_curves, "lora-singular-values": singular_values,
}  # fmt: skip


if __name__ == "__main__":
    if "--draw" in sys.argv:
        draw()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        page.write_text(refreshed(before), encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)}{'' if refreshed(before) == before else ' is rewritten'}\n")
