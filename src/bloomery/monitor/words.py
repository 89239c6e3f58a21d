"""Events, evaluations and device statistics as lines of text, for terminals, log.txt and the report."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from bloomery.core.units import format_bytes, format_seconds
from bloomery.monitor.events import (
    CPU_DEVICE,
    DeviceStats,
    EvalDone,
    Event,
    ExpertLoad,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepChecked,
    StepDone,
    StepHealth,
    Warned,
)

BEST_CHECKPOINT = "checkpoint (best)"
# Before the first step: a live view shows them, a plain terminal does not.
STARTING_PHASES = {
    "libraries": "loading PyTorch",
    "model": "loading the model",
    "first step": "computing the first step",
}
_PHASES = {
    "tokenizer": "training the tokenizer",
    "tokens": "tokenizing the dataset",
    "checksums": "writing checksums",
    "check": "checking one step against the CPU",
    "compile": "compiling the first step",
    "reference": "computing log-probabilities of the reference model",
    **STARTING_PHASES,
}
# Cells of a device that a narrow screen omits: first the memory of PyTorch, then the clock.
_OPTIONAL = (7, 4)
_LEFT_ALIGNED = (6, 7)  # the other cells are numbers


def incident_text(event: Event) -> str | None:
    """Text for an event that is no measurement, without its step; None for other events."""
    match event:
        case StepDone(loss=None):
            return "loss or gradient not finite: step skipped"
        case Saved():
            if event.weights_only:
                return "best weights, no checkpoint"
            return BEST_CHECKPOINT if event.best else "checkpoint"
        case Resumed(path=""):
            return f"no checkpoint yet: restarted from step 0 in {format_seconds(event.seconds)}"
        case Resumed():
            return f"resumed from {Path(event.path).name} in {format_seconds(event.seconds)}"
        case Recovered():
            return f"{event.reason}; {event.action}"
        case Warned():
            return event.reason
        case StepChecked():
            return checked_text(event)
        case RunEnded():
            return f"failed: {event.error}" if event.status == "failed" else event.status
        case Phase(name="paused"):
            return "training paused"
        case Phase(name="stopping"):
            return "stop requested: saving a checkpoint after this step"
    return None


def checked_text(event: StepChecked) -> str:
    """What the check of one step has found, in a line."""
    if event.problem:
        return f"{event.problem} ({event.detail})"
    seconds = "known" if event.from_cache else format_seconds(event.seconds)
    text = f"one step on {event.device} equals the CPU's in {event.precision} ({seconds})"
    return f"{text}; not compared: {event.not_compared}" if event.not_compared else text


def phase_text(phase: Phase) -> str:
    """What is done in a phase, in words; of an unknown one its name."""
    return _PHASES.get(phase.name, phase.name)


def progress_text(event: RunStarted | Phase | StepDone, steps: int | None = None) -> str:
    """The running phase or step and its progress, for a status line; "" for the news of another run length."""
    if isinstance(event, RunStarted):
        return "first step"
    if isinstance(event, Phase):
        if event.name == "length":
            return ""
        # Checksums are the last phase of preparing.
        if event.name == "checksums" and 0 < event.total <= event.done:
            return "loading PyTorch and the model"
        return phase_text(event) + (f" {event.done / event.total:.0%}" if event.total else "")
    loss = "" if event.loss is None else f" · loss {event.loss:.2f}"
    if (reward := event.metrics.get("reward")) is not None:
        loss = f" · reward {reward:.3f}"
    of_steps = f" of {steps:,}" if steps else ""
    return f"step {event.step:,}{of_steps}{loss} · {event.tokens_per_second:,.0f} tokens/s"


def eval_text(evaluation: EvalDone, digits: int = 3) -> str:
    """Bits per byte where they are known, the reward of completions, else the loss and the accuracy."""
    if evaluation.bits_per_byte is not None:
        return f"{evaluation.bits_per_byte:.{digits}f}"
    if evaluation.loss is None:
        return "not finite"
    if (reward := evaluation.metrics.get("reward")) is not None:
        return f"{reward:.{digits + 1}f}"
    accuracy = evaluation.metrics.get("accuracy")
    loss = f"{evaluation.loss:.{digits}f}"
    return loss if accuracy is None else f"{loss}, accuracy {accuracy:.{digits - 2}%}"


def devices_text(event: RunStarted) -> str:
    """The device; of several their number, with the axes of the mesh: "8 x MI300X (replicate 2, shard 4)"."""
    if event.world_size == 1:
        return event.device
    axes = ", ".join(f"{axis} {size}" for axis, size in event.mesh.items())
    return f"{event.world_size} x {event.device} ({axes})"


def load_text(metrics: Mapping[str, float]) -> str:
    """How even the load of a mixture's experts was in a step: "up to 2.1 x, 3 dead"; "" without experts."""
    highest = metrics.get("router/highest_load")
    if highest is None:
        return ""
    dead = metrics.get("router/dead_experts", 0)
    return f"up to {highest:.3g} x" + (f", {dead:,.0f} dead" if dead else "")


def log_line(event: Event) -> str:
    """An event as one line of log.txt."""

    def listed(metrics: dict[str, float]) -> str:
        return "".join(f"  {name} {value:.4g}" for name, value in metrics.items())

    def number(value: float | None) -> str:  # a value that is not finite is never shown as a number
        return "skipped" if value is None else f"{value:.4f}"

    match event:
        case RunStarted():
            devices = devices_text(event)
            return f"bloomery {event.version}: {event.parameters:,} parameters on {devices}, {event.attention}"
        case Phase():
            if not event.total and not event.done:
                return phase_text(event)
            total = f" of {event.total:,.0f}" if event.total else ""
            return f"{event.name} {event.done:,.0f}{total}"
        case StepDone():
            return (
                f"step {event.step}  loss {number(event.loss)}  grad_norm {number(event.grad_norm)}"
                f"  lr {event.learning_rate:.3g}  {event.tokens_per_second:,.0f} tokens/s  {event.memory_gib:.2f} GiB"
                + listed(event.metrics)
            )
        case StepHealth():
            return f"step {event.step}  update-to-weight ratio {figure(event.update_ratio, '.2g', '') or 'unknown'}"
        case ExpertLoad():
            highest = max((max(ratios) for _, ratios in event.rows()), default=0.0)
            return f"step {event.step}  load of experts up to {highest:.3g} times an even one"
        case EvalDone():
            bits = figure(event.bits_per_byte, ".4f", " bits per byte")
            figures = f"loss {number(event.loss)}"
            if not event.metrics or event.perplexity:
                figures += f"  perplexity {number(event.perplexity)}"
            if bits:
                figures += f"  {bits}"
            return f"evaluation at step {event.step}  {figures}{listed(event.metrics)}"
        case Sampled():
            image = f"{event.image} " if event.image else ""
            return f"sample {image}{event.prompt!r} -> {event.completion!r}"
        case Saved():
            best = ", the best so far" if event.best else ""
            kind = "weights" if event.weights_only else "checkpoint"
            return f"{kind} {event.path} ({format_bytes(event.bytes)} in {format_seconds(event.seconds)}{best})"
        case DeviceStats():
            return " ".join(sensor_lines([event])[0].split())
    kinds: dict[type[Event], str] = {
        Warned: "warning",
        Recovered: f"recovered at step {event.step}",
        RunEnded: "ended",
        StepChecked: "check",
    }
    kind = kinds.get(type(event), f"step {event.step}")
    return f"{kind}: {incident_text(event) or type(event).__name__}"


def sensor_lines(newest: Iterable[DeviceStats], width: int = 100) -> list[str]:
    """One line per device, from its newest values, in aligned columns; unknown values are left out."""
    rows = [_cells(sample) for sample in newest]
    columns: list[int] = []
    if rows:
        columns = [column for column in range(len(rows[0])) if any(row[column] for row in rows)]

    # All columns at first; then without the optional ones, until the widest line fits.
    lines: list[str] = []
    for omitted in (None, *_OPTIONAL):
        columns = [column for column in columns if column != omitted]
        widths = {column: max(len(row[column]) for row in rows) for column in columns}
        lines = []
        for row in rows:
            cells = [f"{row[0]:<9}"]
            for column in columns[1:]:
                alignment = "<" if column in _LEFT_ALIGNED else ">"
                cells.append(f"{row[column]:{alignment}{widths[column]}}")
            lines.append("  ".join(cells).rstrip())
        if max(map(len, lines), default=0) <= width:
            break
    return [line[:width] for line in lines]


def short_sensor_lines(newest: Iterable[DeviceStats], width: int = 80) -> list[str]:
    """Two devices per line: utilization, temperature, power, memory in use, and whether a limit throttles it."""
    cells = []
    for sample in newest:
        name, utilization, temperature, power, _, _, throttled, _ = _cells(sample)
        memory = figure(sample.memory_gib, ".0f", " GiB")
        line = f"{name:<5}{utilization:>5}{temperature:>7}{power.replace('GPU ', ''):>8}{memory:>9}"
        cells.append(f"{line} slow" if throttled else line)
    half = width // 2
    pairs = zip(cells[::2], [*cells[1::2], ""], strict=False)
    return [f"{left:<{half}}{right}".rstrip()[:width] for left, right in pairs]


def _cells(sample: DeviceStats) -> tuple[str, ...]:
    of_total = f" of {sample.memory_total_gib:.1f}" if sample.memory_total_gib else ""
    pytorch = ""
    if sample.reserved_gib is not None and sample.allocated_gib is not None:
        pytorch = f"tensors {sample.allocated_gib:.1f}, reserved {sample.reserved_gib:.1f}"
    return (
        "cpu" if sample.device == CPU_DEVICE else f"gpu {sample.device}",
        figure(sample.utilization, ".0f", "%"),
        figure(sample.temperature, ".0f", " °C"),
        f"with GPU {sample.shared_with}"
        if sample.shared_with is not None
        else figure(sample.power, ",.0f", " W"),
        figure(sample.clock_mhz, ",.0f", " MHz"),
        figure(sample.memory_gib, ".1f", f"{of_total} GiB"),
        f"throttled: {sample.throttled}" if sample.throttled else "",
        pytorch,
    )


def figure(value: float | None, spec: str, unit: str) -> str:
    """Empty for an unknown value."""
    return "" if value is None else f"{value:{spec}}{unit}"


def number_format_of(metric: str) -> str:
    """Shares are percent, bits per byte have four digits."""
    return ".4f" if metric.endswith("bits_per_byte") else ".1%"


def with_interval(value: float, low: float | None, high: float | None, spec: str) -> str:
    """A value with its confidence interval, where it has one."""
    interval = "" if low is None or high is None else f" ({low:{spec}} to {high:{spec}})"
    return f"{value:{spec}}{interval}"
