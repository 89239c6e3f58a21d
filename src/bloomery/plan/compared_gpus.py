"""Plans of a recipe on several GPUs, or on all of the table (`--gpu all`), and the table that compares them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bloomery.core.errors import UserError
from bloomery.core.text import labelled
from bloomery.core.units import GIB, format_seconds, two_digits
from bloomery.hardware.machine import Accelerator, Machine
from bloomery.hardware.profile import with_gpu, with_host_memory
from bloomery.hardware.specs import GpuSpec, arch_spec, gpu_spec, gpu_table
from bloomery.hardware.vendors import VENDORS
from bloomery.plan.advise import energy_kwh
from bloomery.plan.gather import facts_of
from bloomery.plan.page_text import LABEL, SHORT_NAMES, WIDTH
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import LoadedRecipe

HEAD = f"{'GPU':<26}{'GiB':>5}  {'needs':>6}  {'dtype':<5}{'tokens/s':>11}  {'low to high':<22}{'takes':>10}{'kWh':>8}"


@dataclass(frozen=True)
class GpuPlan:
    """One GPU, and the plan for so many of it; `refused`: the reason where there is none."""

    spec: GpuSpec
    memory_gib: float
    plan: RunPlan | None
    energy_kwh: float | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def rate(self) -> tuple[float, float, float] | None:
        """Tokens/s: typical, low, high."""
        if self.plan is None or self.plan.step_seconds is None:
            return None
        rate = self.plan.step_seconds.inverse(self.plan.trained_tokens_per_step)
        return rate.value, rate.low, rate.high

    def document(self) -> dict[str, Any]:
        """Of `--json`."""
        plan = self.plan
        rate = self.rate
        seconds = plan.seconds if plan else None
        origin = plan.step_seconds.origin if plan and plan.step_seconds else None
        return {
            "gpu": self.name,
            "arch": self.spec.arch,
            "memory_gib": self.memory_gib,
            "peak_tflops": self.spec.peak_tflops,
            "peaks": "estimated" if self.spec.peaks_estimated else "published",
            "fits": self.fits,
            "needs_gib": plan.memory.total / GIB if plan else None,
            "precision": plan.train.precision if plan else None,
            "stream": plan.train.stream if plan else None,
            "micro_batch_size": plan.train.micro_batch_size if plan else None,
            "tokens_per_second": rate
            and {"value": rate[0], "low": rate[1], "high": rate[2], "from": origin},
            "days": seconds.value / 86400 if seconds else None,
            "energy_kwh": self.energy_kwh,
            "refused": self.refused,
        }


def compare_gpus(
    loaded_recipe: LoadedRecipe,
    machine: Machine,
    *,
    gpu_models: Sequence[Accelerator] = (),
    gpus: int = 1,
    nodes: int = 1,
    host_memory: int | None = None,
) -> list[GpuPlan]:
    """The plans on `gpu_models`, or on every GPU of the table with each of its memory sizes: the fastest that fits
    first, those that do not fit last. `host_memory`: bytes of each node; None: what such machines usually have.

    Raises UserError when the recipe itself is wrong.
    """
    compared = gpu_models or list(devices())
    facts = facts_of(loaded_recipe, machine)
    results = []
    for device in compared:
        memory = device.usable_bytes / GIB
        spec = gpu_spec(device)
        assert spec is not None, f"gpus.toml has no {device.name}"
        there = with_host_memory(with_gpu(machine, device), host_memory, gpus=gpus)
        facts_there = facts.on(there)
        try:
            plan = resolve(loaded_recipe, facts_there, gpus=gpus, nodes=nodes)
            results.append(GpuPlan(spec, memory, plan, energy_kwh(plan, facts_there.profile)))
        except UserError as refused:
            results.append(GpuPlan(spec, memory, None, refused=refused.problem))
    if all(gpu.plan is None for gpu in results):
        first = with_host_memory(with_gpu(machine, compared[0]), host_memory, gpus=gpus)
        resolve(loaded_recipe, facts.on(first), gpus=gpus, nodes=nodes)

    def order(gpu: GpuPlan) -> tuple[int, float]:
        if gpu.plan is None:
            return 3, 0.0
        if not gpu.fits:
            return 2, gpu.plan.memory.total
        return (0, -gpu.rate[0]) if gpu.rate else (1, 0.0)

    return sorted(results, key=order)


def devices() -> Iterator[Accelerator]:
    """Every GPU of the table, once for each of its memory sizes."""
    for spec in gpu_table().gpu:
        facts = arch_spec(spec.arch)
        assert facts is not None, f"gpus.toml has no [[arch]] for {spec.arch}"
        for size in spec.memory_gib:
            memory = size * GIB if len(spec.memory_gib) > 1 else spec.memory_bytes()
            yield Accelerator(
                index=0, vendor=facts.vendor, name=spec.name, arch=spec.arch, memory_bytes=memory
            )


def gpus_page(
    results: list[GpuPlan], loaded_recipe: LoadedRecipe, *, gpus: int, nodes: int, source: str
) -> list[str]:
    """The table that compares GPUs."""
    count = (
        ""
        if gpus * nodes == 1
        else f" on {gpus} of each"
        if nodes == 1
        else f" on {nodes} nodes of {gpus} of each"
    )
    device_options = (f" --gpus {gpus}" if gpus > 1 else "") + (
        f" --nodes {nodes}" if nodes > 1 else ""
    )
    fitting = [gpu for gpu in results if gpu.fits]
    speeds = [gpu.plan.step_seconds for gpu in results if gpu.plan and gpu.plan.step_seconds]
    measured = sum(speed.origin == "measured" for speed in speeds)
    origin = f"Estimated, {measured} from measurements" if measured else "Estimated"
    lines = [
        f"{loaded_recipe.name}{count}: fits {len(fitting)} of {len(results)} GPUs. "
        f"{origin}, fastest first; nothing was run.",
        "",
        HEAD,
        *(_line(gpu) for gpu in results),
        "",
    ]
    if any(gpu.plan is not None and gpu.plan.stream for gpu in results):
        lines[-1:] = [
            "* weights stream from the host's memory; parallel.stream=off plans without",
            "",
        ]
    best = (fitting or results)[0]
    if best.plan is not None and best.plan.parallel is not None and best.plan.parallel.remark:
        lines.append(best.plan.parallel.remark)
    size = f" {best.memory_gib:.0f}GB" if len(best.spec.memory_gib) > 1 else ""
    name = best.name + size
    if not best.spec.memory_gib:  # integrated GPU: its name has the machine's memory
        facts = arch_spec(best.spec.arch)
        assert facts is not None
        machine_gib = best.memory_gib / VENDORS[facts.vendor].shared_part
        name = f"{best.spec.short_name} {machine_gib:.0f}GB"
    command = f'bloomery plan {source} --gpu "{name}"{device_options}'
    return [*lines, *labelled("next", command, indent=LABEL, width=WIDTH)]


def _line(gpu: GpuPlan) -> str:
    head = f"{gpu.spec.short_name:<26}{gpu.memory_gib:>5.0f}  "
    if gpu.plan is None:
        return f"{head}{gpu.refused}"[:100]
    needs = f"{gpu.plan.memory.total / GIB:>6.1f}  "
    if not gpu.fits:
        return f"{head}{needs}does not fit"
    dtype = SHORT_NAMES[gpu.plan.train.precision] + ("*" if gpu.plan.stream else "")
    if gpu.rate is None:
        return f"{head}{needs}{dtype:<5}speed unknown"
    value, low, high = (two_digits(rate) for rate in gpu.rate)
    seconds = gpu.plan.seconds
    energy = gpu.energy_kwh
    takes = format_seconds(seconds.value) if seconds else "?"
    kwh = "?" if energy is None else f"{energy:.1f}" if energy < 9.95 else two_digits(energy)
    ends = f"{low} to {high}"
    return f"{head}{needs}{dtype:<5}{value:>11}  {ends}{takes:>{32 - len(ends)}}{kwh:>8}"
