"""`bloomery plan`: what a run would do, need and take. Nothing is run, and no torch is needed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import chosen_recipe, literal, print_json, recipe_or_model, say
from bloomery.core.errors import UserError

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import RunPlan
    from bloomery.simulate.run import SimulationResult


def simulated(plan: "RunPlan", machine: "Machine") -> "SimulationResult":
    """What the plan's step would hold, run on fake tensors. Raises UserError."""
    from bloomery.simulate.run import SimulationResult, simulate

    if plan.model.config.transformers_backend is not None:
        problem = "transformers' layers are not simulated: they do not run on tensors without memory here"
        raise UserError(problem, where="--simulate", fix="leave out --simulate", code=2)
    with progress() as say:
        return SimulationResult(plan, simulate(plan, machine, progress=say))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """One line on a terminal that changes; elsewhere a line each."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("simulating", spinner="line") as status:
        yield lambda text: status.update(literal(text))


if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import Estimate, LayoutPlan, MemoryEstimate, ParallelPlan, PlanReport, RunPlan
    from bloomery.recipe.load import LoadedRecipe


@click.command()
@recipe_or_model
@click.option(
    "--gpu",
    "gpu",
    metavar="NAME",
    multiple=True,
    help="Plan for this GPU instead of the machine: 4090, 'RX 6700 XT', all.",
)
@click.option("--gpus", metavar="N", type=click.IntRange(1, 1024), default=1, help="So many of them in a node.")
@click.option("--nodes", metavar="N", type=click.IntRange(1, 16384), default=1, help="So many nodes.")
@click.option("--simulate", is_flag=True, help="Run a step on tensors without memory, and read its peak.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    gpu: tuple[str, ...],
    gpus: int,
    nodes: int,
    simulate: bool,
    as_json: bool,
) -> int:
    """Say what a run would do, need and take, and whether it fits (exit code 1 when it does not).

    \b
    Example: bloomery plan go-coder-125m --gpu "RX 6700 XT"
             bloomery plan go-coder-125m --gpu 4090 --gpu "RX 7900 XTX" --gpu T4
             bloomery plan go-coder-125m --gpu all
             bloomery plan go-coder-125m --gpu MI300X --simulate
    """
    from bloomery.core.errors import UserError

    loaded, source = chosen_recipe(recipe, overrides, model, data)
    if len(gpu) > 1 or "all" in gpu:
        if simulate:
            fix = f"name it: `bloomery plan {source} --gpu MI300X --simulate`"
            raise UserError("--simulate is for one card, not for several", fix=fix, code=2)
        names = () if "all" in gpu else gpu
        return show_cards(loaded, names, gpus=gpus, nodes=nodes, as_json=as_json, source=source)
    one = gpu[0] if gpu else None
    return show_plan(loaded, gpu=one, gpus=gpus, nodes=nodes, simulate=simulate, as_json=as_json, source=source)


def show_cards(
    loaded: "LoadedRecipe", names: tuple[str, ...], *, gpus: int, nodes: int, as_json: bool, source: str
) -> int:
    """Print one line for each named card, or each of the table where none is named; 0 when the run fits one."""
    from bloomery.hardware.specs.specs import find_gpu
    from bloomery.plan.local import local_facts
    from bloomery.plan.report.all_gpus import compare_gpus, gpus_page

    machine = local_facts(loaded).machine
    chosen = {(device.name, device.memory_bytes): device for device in map(find_gpu, names)}
    found = compare_gpus(loaded, machine, chosen=list(chosen.values()), gpus=gpus, nodes=nodes)
    if as_json:
        print_json([row.document() for row in found])
    else:
        say("\n".join(gpus_page(found, loaded, gpus=gpus, nodes=nodes, source=source)))
    return 0 if any(row.fits for row in found) else 1


def show_plan(
    loaded: "LoadedRecipe",
    *,
    gpu: str | None = None,
    devices: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    simulate: bool = False,
    as_json: bool = False,
    source: str | None = None,
) -> int:
    """Print the plan of a recipe for this machine, its `devices` or `gpu`; 0 when it fits, 1 when it does not."""
    from bloomery.hardware.detect.detect import detect
    from bloomery.plan.advice.advise import advise
    from bloomery.plan.local import local_plan
    from bloomery.runs.resume_plan import narrowed

    plan, facts = local_plan(loaded, gpu=gpu, machine=narrowed(detect(), devices), gpus=gpus, nodes=nodes)
    report, machine = advise(loaded, plan, facts), facts.machine
    found = simulated(plan, machine) if simulate else None
    if as_json:
        print_json(document(report, machine) | ({"simulated": found.document()} if found else {}))
    else:
        from bloomery.cli import cli
        from bloomery.plan.gather import absent, left_aside, unfetched, weightless
        from bloomery.plan.report.page import page

        elsewhere = {"train"} if gpu is not None else set[str]()  # nobody trains on a card that is not here
        if (source or "").startswith("--model "):  # bench reads a recipe by its name, and this one has none
            elsewhere |= {"bench"}
        commands = [verb for verb in cli.list_commands(click.Context(cli)) if verb not in elsewhere]
        told, source = found.lines() if found else [], source or loaded.name
        words = _device_words(gpu, gpus, nodes)
        say("\n".join(page(report, machine, source=source, commands=commands, devices=words, simulated=told)))
        for model in unfetched(loaded.recipe):
            say(f"note: {model} is not on this disk: its shape is from a table, and train fetches it", err=True)
        for model in weightless(loaded.recipe):
            say(f"note: no weights lie in {model}: `bloomery train` would stop there", err=True)
        for line in left_aside(loaded.recipe):
            say(f"note: {line}", err=True)
        for place in absent(loaded.recipe) if gpu is None and plan.dataset is None else ():
            then = "train fetches it" if place.startswith("hub:") else "`bloomery train` would stop there"
            say(f"note: nothing lies at data.path {place}: {then}", err=True)
    return 0 if plan.fits and (found is None or found.fits) else 1


def _device_words(gpu: str | None, gpus: int, nodes: int) -> str:
    """What was typed to choose devices, for the commands that a plan suggests."""
    words = "" if gpu is None else f' --gpu "{gpu}"'
    return words + (f" --gpus {gpus}" if gpus > 1 else "") + (f" --nodes {nodes}" if nodes > 1 else "")


def document(report: "PlanReport", machine: "Machine") -> dict[str, Any]:
    """The JSON of `plan --json`."""
    from bloomery.core.units import GIB

    plan = report.plan
    rate = plan.step_seconds.inverse(plan.train.tokens_per_step) if plan.step_seconds is not None else None
    return {
        "fits": plan.fits,
        "tokens": plan.total_tokens,
        "steps": plan.train.steps,
        "epochs": plan.epochs,
        "seconds": _estimate(plan.seconds),
        "step_seconds": _estimate(plan.step_seconds),
        "tokens_per_second": _estimate(rate),
        "memory": _memory(plan.memory),
        "disk": {name: value / GIB for name, value in report.disk.items()},
        "energy_kwh": report.energy_kwh,
        "claims": report.claims,
        "warnings": report.warnings,
        "suggestions": report.suggestions,
        "choices": plan.choices,
        "step_parts": {name: _estimate(part) for name, part in report.step_parts.items()},
        "mfu": _utilisation(plan, machine),
        "max_length": report.max_length,
        "mesh": None if plan.parallel is None else _mesh(plan.parallel),
    }  # fmt: skip


def brief_document(plan: "RunPlan") -> dict[str, Any]:
    """What `plan --json` says of the plan alone, and not of its claims."""
    memory, seconds = _memory(plan.memory), _estimate(plan.seconds)
    return {"fits": plan.fits, "memory": memory, "seconds": seconds, "choices": plan.choices}


def _memory(memory: "MemoryEstimate") -> dict[str, Any]:
    from bloomery.core.units import GIB

    ends = {"value": memory.total / GIB, "low": memory.low / GIB, "high": memory.high / GIB, "from": memory.origin}
    return {
        "parts": {name: value / GIB for name, value in memory.parts.items()},
        "total": ends,
        "limit": memory.limit / GIB,
    }


def _utilisation(plan: "RunPlan", machine: "Machine") -> dict[str, Any] | None:
    """Shares of the device's peak and of the best product published; None where either is unknown."""
    from bloomery.hardware.profile import build_profile
    from bloomery.plan.report.page import dtype_of, reached_flops

    gpu = build_profile(machine).gpu
    if gpu is None or plan.step_seconds is None:
        return None
    reached, peak, best = reached_flops(plan), gpu.peak_flops(dtype_of(plan)), gpu.achievable_flops(dtype_of(plan))
    return {
        "peak": reached / peak if peak else None,
        "achievable": reached / best if best else None,
        "formula": "6 a weight of the products + 12 L d T a token",
    }


def _mesh(mesh: "ParallelPlan") -> dict[str, Any]:
    return {
        "gpus": mesh.gpus,
        "nodes": mesh.nodes,
        "runs_here": False,  # this version trains on one device
        "chosen": mesh.layouts[mesh.chosen].name,
        "reason": mesh.reason,
        "layouts": [{"chosen": at == mesh.chosen} | _layout(layout) for at, layout in enumerate(mesh.layouts)],
    }


def _layout(layout: "LayoutPlan") -> dict[str, Any]:
    return {
        "name": layout.name,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "pipeline": layout.pipeline,
        "micro_batch_size": layout.micro_batch_size,
        "accumulation": layout.accumulation,
        "fits": layout.memory.fits,
        "memory_gib": layout.memory.total / 2**30,
        "step_seconds": _estimate(layout.step_seconds),
        "exposed_seconds": layout.exposed_seconds,
        "bubble_seconds": layout.bubble_seconds,
    }


def _estimate(estimate: "Estimate | None") -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "from": estimate.origin}
