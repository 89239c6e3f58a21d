"""Parts `probes` and `step`: the doctor's probes, and the checked step of several recipes in each precision."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Outcome, Row
from bloomery.bench.gpu_check.small_runs import machine_of
from bloomery.check.step_probes import examined, recipe_plan
from bloomery.hardware.machine import Probe
from bloomery.hardware.probes import ProbeSpec, each_probe

PROBES = (
    "device",
    "matmul",
    "bandwidth",
    "host",
    "attention",
    "bitsandbytes",
    "flash-attn",
    "compile",
)
TINY_PROBES = ("device", "matmul-float32")
OUTCOMES: dict[str, Outcome] = {
    "ok": "ok",
    "absent": "skipped",
    "wrong": "wrong",
    "failed": "failed",
    "crashed": "crashed",
    "hung": "timeout",
}

QLORA = ("quantize.kind=nf4", "quantize.double_quant=true")
# The recipe, the precision, whether layers are compiled, and what else: the cheapest first.
STEPS = (
    ("go-coder-125m", "float32", False, ()),
    ("go-coder-125m", "float16", False, ()),
    ("go-coder-125m", "bfloat16", False, ()),
    ("qwen2.5-1.5b-lora", "float16", False, ()),
    ("qwen2.5-1.5b-lora", "bfloat16", False, ()),
    ("llama3.1-8b-lora", "float16", False, QLORA),
    ("llama3.1-8b-lora", "bfloat16", False, QLORA),
    ("go-coder-125m", "bfloat16", True, ()),
    ("go-coder-125m", "float16", True, ()),
)
TINY_STEPS = (
    ("qwen2.5-1.5b-lora-tiny", "float32", False, ()),
    ("llama3.1-8b-lora-tiny", "float32", False, QLORA),
)


def probed(job: PartJob) -> Iterator[Row]:
    """A row for each probe of the doctor. They are remembered, and the later parts are planned by them."""
    yield from probe_rows(job, TINY_PROBES if job.tiny else PROBES, ())


def probe_rows(job: PartJob, names: Collection[str], extra: Sequence[ProbeSpec]) -> Iterator[Row]:
    probes = each_probe(
        machine_of(job.device),
        other_devices=False,
        extra=extra,
        only=names,
        on_progress=lambda name, _done, _of: job.begin(name),
    )
    for probe in probes:
        yield _row_of_probe(probe)


def _row_of_probe(probe: Probe) -> Row:
    numbers: dict[str, Any] = {"error": probe.error, "seconds": probe.seconds} | dict(probe.facts)
    return Row(
        case=probe.name,
        outcome=OUTCOMES[probe.outcome],
        message=probe.message,
        numbers={name: value for name, value in numbers.items() if value not in (None, "")},
    )


def stepped(job: PartJob) -> Iterator[Row]:
    """A row for each step; of a wrong one the part at fault, and the setting with which it is right."""
    cases = [
        (_step_name(*step), partial(_step_row, job.device, *step))
        for step in (TINY_STEPS if job.tiny else STEPS)
    ]
    yield from rows_of(job, cases)


def _step_name(recipe: str, precision: str, compiled: bool, overrides: tuple[str, ...]) -> str:
    quantized = " nf4" if overrides else ""
    return f"{recipe}{quantized} {precision}{' compiled' if compiled else ''}"


def _step_row(
    device: str, recipe: str, precision: str, compiled: bool, overrides: tuple[str, ...]
) -> Row:
    settings = (
        f"train.precision={precision}",
        f"train.compile={str(compiled).lower()}",
        *overrides,
    )
    plan = recipe_plan(recipe, settings, machine_of(device))
    result = examined(plan)
    facts = result["facts"]
    message = result.get("message", "")
    if detail := facts.get("detail"):
        message += f" ({detail})"
    numbers = {
        "attention": facts["attention"],
        "seconds": round(result["seconds"], 2),
        "other_bits_at_the_second_time": facts["unrepeatable"],
    }
    return Row(
        case=_step_name(recipe, precision, compiled, overrides),
        outcome=OUTCOMES[result["outcome"]],
        message=message,
        numbers={name: value for name, value in numbers.items() if value != ""},
    )
