"""What an event, an evaluation or a device is called in a line of text: for terminals, log.txt and the report."""

from collections.abc import Iterable
from pathlib import Path

from bloomery.core.units import format_bytes, format_seconds
from bloomery.monitor.events import (
    CPU_DEVICE,
    DeviceStats,
    EvalDone,
    Event,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    StepHealth,
    Warned,
)
from bloomery.monitor.summary import JOULES_IN_KWH, DeviceSummary

_SPARE = (7, 4)  # cells of a device that a narrow screen does without: what PyTorch holds, then the clock
_LEFT_ALIGNED = (6, 7)  # the rest are figures, whose last digits stand under each other


def happened(event: Event) -> str | None:
    """What people should hear of besides the figures, without its step; None of an event that is none."""
    match event:
        case StepDone(loss=None):
            return "loss or gradient was not finite: the step was skipped"
        case Saved():
            return "saved, the best" if event.best else "saved"
        case Resumed():
            source = (
                f"from {Path(event.path).name}" if event.path else "from the beginning, as no checkpoint was saved yet,"
            )
            return f"resumed {source} in {format_seconds(event.seconds)}"
        case Recovered():
            return f"{event.reason}; {event.action}"
        case Warned():
            return event.reason
        case RunEnded():
            return f"failed: {event.error}" if event.status == "failed" else event.status
        case Phase(name="paused"):
            return "training waits"
        case Phase(name="stopping"):
            return "asked to stop: a checkpoint is written after this step, then the run ends"
    return None


def doing(event: Phase | StepDone, steps: int | None = None) -> str:
    """For a line that moves: what is being done, and how far it is."""
    if isinstance(event, Phase):
        return event.name + (f" {event.done / event.total:.0%}" if event.total and event.done else "")
    loss = "" if event.loss is None else f" · loss {event.loss:.2f}"
    whole = f" of {steps:,}" if steps else ""
    return f"step {event.step:,}{whole}{loss} · {event.tokens_per_second:,.0f} tokens/s"


def score(exam: EvalDone, per: str, digits: int = 3) -> str:
    """Bits per byte where they are known, else the loss; and the share of right answers. `per`: what the loss is of."""
    if exam.bits_per_byte is not None:
        return f"{exam.bits_per_byte:.{digits}f} bits/byte"
    if exam.loss is None:
        return "not finite"
    right = exam.metrics.get("accuracy")
    share = "" if right is None else f", {right:.{digits - 2}%} right"
    return f"{exam.loss:.{digits}f}{' nats' if per == 'token' else ''}{share}"


def sentence(event: Event) -> str:
    """An event as one line of log.txt."""

    def told(metrics: dict[str, float]) -> str:
        return "".join(f"  {name} {value:.4g}" for name, value in metrics.items())

    def number(value: float | None) -> str:  # what was not finite is never shown as a number
        return "skipped" if value is None else f"{value:.4f}"

    match event:
        case RunStarted():
            return f"bloomery {event.version}: {event.parameters:,} parameters on {event.device}, {event.attention}"
        case Phase():
            return f"{event.name} {event.done:,.0f}" + (f" of {event.total:,.0f}" if event.total else "")
        case StepDone():
            return (
                f"step {event.step}  loss {number(event.loss)}  gradient {number(event.grad_norm)}"
                f"  rate {event.learning_rate:.3g}  {event.tokens_per_second:,.0f} tokens/s  {event.memory_gib:.2f} GiB"
                + told(event.metrics)
            )
        case StepHealth():
            moved = f"weights moved by {event.update_ratio:.2g} of their size" if event.update_ratio else "no update"
            return f"vitals of step {event.step}  {moved}"
        case EvalDone():
            bits = f"  {event.bits_per_byte:.4f} bits/byte" if event.bits_per_byte is not None else ""
            guess = f"  perplexity {number(event.perplexity)}" if not event.metrics or event.perplexity else ""
            return f"exam at step {event.step}  loss {number(event.loss)}{guess}{bits}{told(event.metrics)}"
        case Sampled():
            return f"sample {event.prompt!r} -> {event.completion!r}"
        case Saved():
            kept = ", the best so far" if event.best else ""
            return f"saved {event.path} ({format_bytes(event.bytes)} in {format_seconds(event.seconds)}{kept})"
        case DeviceStats():
            return " ".join(lines([DeviceSummary(latest=event)])[0].split())
    kinds: dict[type[Event], str] = {Warned: "warning", Recovered: f"recovered at step {event.step}", RunEnded: "ended"}
    kind = kinds.get(type(event))
    return f"{kind}: {happened(event)}" if kind else f"step {event.step}: {happened(event) or type(event).__name__}"


def lines(devices: Iterable[DeviceSummary], width: int = 100) -> list[str]:
    """A line a device, as it is now; what is not known, or has no room, is left out. Figures stand under each other."""
    rows = [_cells(device) for device in devices]
    shown = [at for at in range(len(rows[0])) if any(row[at] for row in rows)] if rows else []
    for spare in (None, *_SPARE):
        shown = [at for at in shown if at != spare]
        widths = {at: max(len(row[at]) for row in rows) for at in shown}
        told = [
            "  ".join(
                [f"{row[0]:<9}"] + [f"{row[at]:{'<' if at in _LEFT_ALIGNED else '>'}{widths[at]}}" for at in shown[1:]]
            ).rstrip()
            for row in rows
        ]
        if max(map(len, told), default=0) <= width:
            break
    return [line[:width] for line in told]


def short_lines(devices: Iterable[DeviceSummary], width: int = 80) -> list[str]:
    """Two devices a line: load, temperature, power and memory in use, and whether it is slowed."""
    cells = []
    for device in devices:
        name, load, heat, power, _, _, slowed, _ = _cells(device)
        memory = figure(device.latest.memory_gib, ".0f", " GiB")
        told = f"{name:<5}{load:>5}{heat:>7}{power.replace('GPU ', ''):>8}{memory:>9}"
        cells.append(f"{told} slow" if slowed else told)
    half = width // 2
    pairs = zip(cells[::2], [*cells[1::2], ""], strict=False)
    return [f"{left:<{half}}{right}".rstrip()[:width] for left, right in pairs]


def _cells(device: DeviceSummary) -> tuple[str, ...]:
    now = device.latest
    whole = f" of {now.memory_total_gib:.1f}" if now.memory_total_gib else ""
    held = ""
    if now.reserved_gib is not None and now.allocated_gib is not None:
        held = f"tensors {now.allocated_gib:.1f}, held {now.reserved_gib:.1f}"
    return (
        "cpu" if now.device == CPU_DEVICE else f"gpu {now.device}",
        figure(now.utilization, ".0f", "%"),
        figure(now.temperature, ".0f", " °C"),
        f"with GPU {now.shared_with}" if now.shared_with is not None else figure(now.power, ",.0f", " W"),
        figure(now.clock_mhz, ",.0f", " MHz"),
        figure(now.memory_gib, ".1f", f"{whole} GiB"),
        f"slowed: {now.throttled}" if now.throttled else "",
        held,
    )


def figure(value: float | None, spec: str, unit: str) -> str:
    """Nothing of what is not known."""
    return "" if value is None else f"{value:{spec}}{unit}"


def format_joules(joules: float) -> str:
    """As Wh or kWh, three digits."""
    kwh = joules / JOULES_IN_KWH
    if kwh >= 100:
        return f"{kwh:,.0f} kWh"
    return f"{kwh:.3g} kWh" if kwh >= 1 else f"{kwh * 1000:.3g} Wh"
