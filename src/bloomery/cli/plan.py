"""`bloomery plan RECIPE`: memory, time and disk of a run, without torch"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import click

from bloomery.cli.common import (
    chosen_recipe,
    echo,
    echo_page,
    json_option,
    literal,
    memory_size,
    print_json,
    recipe_or_model,
)
from bloomery.core.errors import UserError
from bloomery.core.units import GIB

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.price import Price
    from bloomery.plan.types import (
        Cost,
        Estimate,
        MemoryEstimate,
        ParallelPlan,
        PlanReport,
        RolloutPlan,
        RunPlan,
        ScoringPlan,
        StreamPlan,
    )
    from bloomery.recipe.load import LoadedRecipe
    from bloomery.simulate.run import SimulationResult


@final
class PlanCommand(click.Command):
    """A click command to which `--gpu "MI300X" x 8` and `--gpu 4090 x2` are one argument each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined_args = list[str]()
        queue = list(args)
        while queue:
            argument = queue.pop(0)
            joined_args.append(argument)
            if argument == "--gpu" and queue:
                joined_args.append(queue.pop(0))
            elif not argument.startswith("--gpu="):
                continue
            # The argument just joined is a GPU: a count behind it, `x8` or `x 8`, belongs to it.
            if queue and (count := re.fullmatch(r"[x×*](\d+)", queue[0], re.IGNORECASE)):
                joined_args[-1] += f" x {count[1]}"
                del queue[0]
            elif len(queue) > 1 and queue[0].lower() in ("x", "×", "*") and queue[1].isdecimal():
                joined_args[-1] += f" x {queue[1]}"
                del queue[:2]
        return super().parse_args(ctx, joined_args)


def price_of(option: str, text: str | None) -> "Price | None":
    """Raises UserError."""
    from bloomery.plan.price import read_price

    return None if text is None else read_price(text, option)


@click.command(cls=PlanCommand)
@recipe_or_model
@click.option(
    "--gpu",
    metavar="NAME",
    multiple=True,
    help="Plan for this GPU: 4090, 'RX 6700 XT', 8xMI300X, all.",
)
@click.option(
    "-d",
    "--devices",
    metavar="LIST",
    help="Plan for these devices of this machine: 0,1 or cpu,cpu.",
)
@click.option("--gpus", metavar="N", type=click.IntRange(1, 1024), help="Plan for N GPUs per node.")
@click.option(
    "--nodes", metavar="N", type=click.IntRange(1, 16384), default=1, help="Plan for N nodes."
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    callback=memory_size,
    help="Plan for a node with SIZE of memory: 32GiB.",
)
@click.option(
    "--price-per-hour",
    metavar="PRICE",
    callback=lambda _context, parameter, value: price_of(parameter.opts[0], value),
    help="Add the cost at this price of a device: 1.99, $1.99.",
)
@click.option(
    "--simulate", is_flag=True, help="Simulate a step on meta tensors for its peak memory."
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Print every figure, each choice and its reason."
)
@json_option
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    gpu: tuple[str, ...],
    devices: str | None,
    gpus: int | None,
    nodes: int,
    host_memory: int | None,
    price_per_hour: "Price | None",
    simulate: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Estimate GPU memory, time and disk of a run; runs nothing.

    Exit code 1 when the run does not fit.

    \b
    Example: bloomery plan go-coder-125m --gpu "RX 6700 XT"
             bloomery plan go-coder-125m --gpu 4090 --gpu "RX 7900 XTX" --gpu T4
             bloomery plan --model Qwen/Qwen3-8B --gpu 4090
             bloomery plan go-coder-125m --gpu all
             bloomery plan llama3.1-8b-full-8gpu --gpu 8xMI300X
             bloomery plan go-coder-125m --gpu "RTX 3090 + RTX 3060 12GB"
             bloomery plan go-coder-125m --gpu MI300X --simulate
             bloomery plan --model Qwen/Qwen3-14B --gpu 4070 --host-memory 32GiB
             bloomery plan qwen3-8b-qlora --gpu H100 --price-per-hour '$1.99'
    """
    from bloomery.hardware.specs import named_gpus

    # Several GPUs are compared in one table; a single one, or this machine, gets a page.
    gpu_names, gpus_per_node = named_gpus(gpu, gpus)
    if devices is not None and (gpu_names or gpus_per_node * nodes > 1):
        raise UserError(
            "-d names devices of this machine, the other options those of another",
            where=f"-d {devices}",
            fix="leave out --gpu, --gpus and --nodes, or leave out -d",
            code=2,
        )
    loaded_recipe, source = chosen_recipe(recipe, overrides, model, data, planning=True)
    if len(gpu_names) > 1 or "all" in gpu_names:
        if price_per_hour is not None:
            fix = f"bloomery plan {source} --gpu MI300X --price-per-hour {price_per_hour.amount:g}"
            problem = "--price-per-hour is that of one GPU"
            raise UserError(problem, where="--price-per-hour", fix=fix, code=2)
        if simulate:
            fix = f"bloomery plan {source} --gpu MI300X --simulate"
            raise UserError("--simulate works with one GPU only", where="--gpu", fix=fix, code=2)
        names = () if "all" in gpu_names else gpu_names
        return show_gpus(
            loaded_recipe,
            names,
            gpus=gpus_per_node,
            nodes=nodes,
            host_memory=host_memory,
            as_json=as_json,
            source=source,
        )
    return show_plan(
        loaded_recipe,
        gpu=gpu_names[0] if gpu_names else None,
        devices=devices,
        gpus=gpus_per_node,
        nodes=nodes,
        host_memory=host_memory,
        price=price_per_hour,
        simulate=simulate,
        verbose=verbose,
        as_json=as_json,
        source=source,
    )


def show_gpus(
    loaded_recipe: "LoadedRecipe",
    names: tuple[str, ...],
    *,
    gpus: int,
    nodes: int,
    host_memory: int | None = None,
    as_json: bool,
    source: str,
) -> int:
    """Print one line per named GPU, or per GPU of the table where none is named; 0 when the run fits one of them."""
    from bloomery.hardware.specs import TOGETHER, find_gpu
    from bloomery.plan.compared_gpus import compare_gpus, gpus_page
    from bloomery.plan.mesh import training_devices_of
    from bloomery.plan.resolve import local_facts

    machine = local_facts(loaded_recipe).machine
    # Two names of the same GPU give one line.
    together = next((name for name in names if TOGETHER in name), None)
    if together is not None:
        fix = f'bloomery plan {source} --gpu "{together}"'
        problem = f"GPUs that train together are planned alone, not compared: {together}"
        raise UserError(problem, where="--gpu", fix=fix, code=2)
    devices = {(device.name, device.memory_bytes): device for device in map(find_gpu, names)}
    plans = compare_gpus(
        loaded_recipe,
        machine,
        gpu_models=list(devices.values()),
        gpus=training_devices_of(loaded_recipe.recipe.parallel, gpus=gpus, nodes=nodes),
        nodes=nodes,
        host_memory=host_memory,
    )
    if as_json:
        print_json([plan.document() for plan in plans])
    else:
        echo("\n".join(gpus_page(plans, loaded_recipe, gpus=gpus, nodes=nodes, source=source)))
    return 0 if any(plan.fits for plan in plans) else 1


def show_plan(
    loaded_recipe: "LoadedRecipe",
    *,
    gpu: str | None = None,
    devices: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    host_memory: int | None = None,
    price: "Price | None" = None,
    simulate: bool = False,
    verbose: bool = False,
    as_json: bool = False,
    source: str | None = None,
) -> int:
    """Print the plan of a recipe for this machine, its `devices` or `gpu`; 0 when it fits, 1 when it does not."""
    from bloomery.plan.notes import plan_notes
    from bloomery.plan.price import kept_price, run_cost
    from bloomery.runs.devices import planned_report

    recipe = loaded_recipe.recipe
    report, machine = planned_report(
        loaded_recipe,
        gpu=gpu,
        devices=devices,
        gpus=gpus,
        nodes=nodes,
        host_memory=host_memory,
    )
    plan = report.plan
    # A price that was kept is that of this machine's devices.
    here_price = kept_price() if gpu is None else None
    report = report.model_copy(update={"cost": run_cost(plan, price or here_price)})
    simulation = simulated(plan, machine) if simulate else None
    exit_code = 0 if plan.fits and (simulation is None or simulation.fits) else 1
    if as_json:
        extra = {"simulated": simulation.document()} if simulation else {}
        notes = {"notes": list(plan_notes(recipe, plan, is_local=gpu is None))}
        print_json(document(report, machine) | notes | extra)
        return exit_code

    from bloomery.cli import COMMANDS
    from bloomery.plan.notes import is_dataset_assumed, missing_datasets
    from bloomery.plan.page import page
    from bloomery.plan.summary import summary

    # The page suggests no command that would fail: `train` on a GPU of another machine, on more devices than there are
    # or without its dataset, and `bench` of a generated recipe, which has no name.
    local_devices = None if devices == "auto" else devices
    num_local = len(machine.accelerators) or len((local_devices or "cpu").split(","))
    is_local = gpu is None and gpus * nodes == 1 and plan.num_gpus <= num_local
    missing_files = [path for path in missing_datasets(recipe, plan) if not path.startswith("hub:")]
    hidden_commands = set[str]()
    if not is_local or is_dataset_assumed(recipe) or missing_files:
        hidden_commands.add("train")
    if (source or "").startswith("--model "):
        hidden_commands.add("bench")
    local_options = "" if local_devices is None else f" -d {local_devices}"
    device_options = local_options if gpu is None else f' --gpu "{gpu}"'
    num_gpus = plan.num_gpus // nodes
    if not local_options:
        device_options += f" --gpus {num_gpus}" if num_gpus > 1 else ""
    device_options += f" --nodes {nodes}" if nodes > 1 else ""
    if host_memory is not None:
        device_options += f" --host-memory {host_memory / GIB:g}GiB"
    write = page if verbose else summary
    lines = write(
        report,
        machine,
        source=source or loaded_recipe.name,
        commands=[name for name in COMMANDS if name not in hidden_commands],
        devices=device_options,
        local_devices=local_options,
        simulated=simulation.lines() if simulation else [],
    )
    echo_page(lines)

    for note in plan_notes(recipe, plan, is_local=gpu is None):  # not a part of the plan
        echo(f"note: {note}", err=True)
    return exit_code


def simulated(plan: "RunPlan", machine: "Machine") -> "SimulationResult":
    """The memory of the plan's step, simulated on meta tensors. Raises UserError."""
    from bloomery.simulate.run import SimulationResult, simulate

    if plan.model.config.transformers_backend is not None:
        problem = "cannot simulate transformers layers: they do not run on meta tensors"
        raise UserError(problem, where="--simulate", fix="remove --simulate", code=2)
    if plan.rollout is not None:
        problem = "cannot simulate a run with rewards: its sequences are sampled while it trains"
        fix = "remove --simulate; the plan counts the memory of rollouts"
        raise UserError(problem, where="--simulate", fix=fix, code=2)
    if plan.train.stream == "experts":
        problem = "cannot simulate experts that stream: which ones follows from real tokens"
        fix = "remove --simulate; the plan counts the buffers of their layers"
        raise UserError(problem, where="--simulate", fix=fix, code=2)
    with progress() as report:
        return SimulationResult(plan, simulate(plan, machine, progress=report))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, else one line per call."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("simulating", spinner="line") as status:
        yield lambda text: status.update(literal(text))


def document(report: "PlanReport", machine: "Machine") -> dict[str, Any]:
    """The JSON of `plan --json`."""
    plan = report.plan
    tokens_per_second = None
    if plan.step_seconds is not None:
        tokens_per_second = plan.step_seconds.inverse(plan.trained_tokens_per_step)
    return {
        "fits": plan.fits,
        "tokens": plan.total_tokens,
        "steps": plan.train.steps,
        "epochs": plan.epochs,
        "seconds": estimate(plan.seconds),
        "step_seconds": estimate(plan.step_seconds),
        "tokens_per_second": estimate(tokens_per_second),
        "memory": _memory(plan.memory),
        "disk": {name: value / GIB for name, value in report.disk.items()},
        "save": {
            "host_gib": report.save.host_bytes / GIB,
            "stall_seconds": estimate(report.save.stall_seconds),
            "seconds": estimate(report.save.seconds),
        },
        "kill": {
            "seconds": report.kill.seconds,
            "steps": report.kill.steps,
            "whole_run": report.kill.whole_run,
        },
        "energy_kwh": report.energy_kwh,
        "cost": _cost(report.cost),
        "claims": report.claims,
        "warnings": report.warnings,
        "suggestions": report.suggestions,
        "choices": plan.choices,
        "step_parts": {name: estimate(part) for name, part in report.step_parts.items()},
        "mfu": _utilization(plan, machine),
        "max_length": report.max_length,
        "mesh": None if plan.parallel is None else _mesh(plan.parallel),
        "rollout": None if plan.rollout is None else _rollout(plan.rollout),
        "stream": None if plan.stream is None else _stream(plan.stream),
        "scoring": None if plan.scoring is None else _scoring(plan.scoring),
        "pictures": _pictures(plan),
    }


def brief_document(plan: "RunPlan") -> dict[str, Any]:
    """The JSON of a plan without its claims."""
    memory = _memory(plan.memory)
    seconds = estimate(plan.seconds)
    return {"fits": plan.fits, "memory": memory, "seconds": seconds, "choices": plan.choices}


def _memory(memory: "MemoryEstimate") -> dict[str, Any]:
    """The parts, the peak with the ends of its interval, and the limit, in GiB."""
    total = {
        "value": memory.total / GIB,
        "low": memory.low / GIB,
        "high": memory.high / GIB,
        "from": memory.origin,
    }
    return {
        "parts": {name: part_bytes / GIB for name, part_bytes in memory.parts.items()},
        "total": total,
        "limit": memory.limit / GIB,
    }


def _pictures(plan: "RunPlan") -> dict[str, Any] | None:
    """Of the dataset; None without any."""
    facts = None if plan.dataset is None else plan.dataset.pictures
    if facts is None:
        return None
    return {
        "pictures_per_epoch": facts.pictures_per_epoch,
        "looked_at": facts.looked_at,
        "sizes": facts.sizes,
        "of_picture": facts.of_picture,
        "mean_of_sequence": facts.mean,
        "fullest_sequence": facts.fullest,
    }


def _stream(stream: "StreamPlan") -> dict[str, Any]:
    """Weights that stream: memory in GiB, copies of a step, and from how many tokens per load they cost no time."""
    return {
        "micro_batches": stream.micro_batches,
        "buffers_gib": stream.buffer_bytes / GIB,
        "host_gib": {name: value / GIB for name, value in stream.host_bytes.items()},
        "pinned_gib": stream.pinned_bytes / GIB,
        "host_limit_gib": stream.host_limit / GIB,
        "loaded_gib": stream.loaded_bytes / GIB,
        "sent_gib": stream.sent_bytes / GIB,
        "tokens_per_load": stream.tokens_per_load,
        "hidden_from": stream.hidden_from,
        "hidden": stream.hidden,
        "waiting_share": stream.waiting_share,
        "link": stream.link,
    }


def _scoring(scoring: "ScoringPlan") -> dict[str, Any]:
    """Devices of each host that score: the memory of one, and the seconds of a step that one computes."""
    return {
        "devices": scoring.devices,
        "memory": _memory(scoring.memory),
        "seconds": scoring.seconds,
    }


def _rollout(rollout: "RolloutPlan") -> dict[str, Any]:
    """How completions are sampled. `seconds`: of one step by part; `memory`: while sampling, and in a step."""
    return {
        "prompts": rollout.num_prompts,
        "completions": rollout.num_completions,
        "steps": rollout.num_steps,
        "slots": rollout.slots,
        "slot_tokens": rollout.slot_tokens,
        "prompt_tokens": rollout.prompt_tokens,
        "completion_tokens": estimate(rollout.completion_tokens),
        "micro_batches": rollout.micro_batches,
        "seconds": {name: estimate(part) for name, part in rollout.seconds.items()},
        "memory": {
            "sampling": _memory(rollout.memory),
            "step": _memory(rollout.training_memory),
        },
    }


def _utilization(plan: "RunPlan", machine: "Machine") -> dict[str, Any] | None:
    """The fractions of the GPU's peak and of its best published matmul that training reaches.

    None where the GPU or the time of a step is unknown.
    """
    from bloomery.hardware.profile import build_profile
    from bloomery.plan.page_time import dtype_of, mixer_flops, reached_flops

    gpu = build_profile(machine).gpu
    if gpu is None or plan.step_seconds is None:
        return None
    flops = reached_flops(plan)
    peak_flops = gpu.peak_flops(dtype_of(plan))
    achievable_flops = gpu.achievable_flops(dtype_of(plan))
    return {
        "peak": flops / peak_flops if peak_flops else None,
        "achievable": flops / achievable_flops if achievable_flops else None,
        "formula": f"FLOPs per token: 6 per matmul weight + {mixer_flops(plan.model.config)}",
    }


def _mesh(mesh: "ParallelPlan") -> dict[str, Any]:
    return {
        "gpus": mesh.gpus,
        "nodes": mesh.nodes,
        "chosen": mesh.layouts[mesh.chosen].name,
        "reason": mesh.reason,
        "layouts": [
            {
                "chosen": index == mesh.chosen,
                "name": layout.name,
                "replicate": layout.replicate,
                "shard": layout.shard,
                "pipeline": layout.pipeline,
                "context": layout.context,
                "expert": layout.expert,
                "pipeline_schedule": layout.pipeline_schedule,
                "pipeline_chunks": layout.pipeline_chunks,
                "pipeline_layers": layout.pipeline_layers,
                "stage_seconds": layout.stage_seconds,
                "fullest_stage": layout.fullest_stage + 1,
                "micro_batch_size": layout.micro_batch_size,
                "accumulation": layout.accumulation,
                "fits": layout.memory.fits,
                "memory_gib": layout.memory.total / GIB,
                "step_seconds": estimate(layout.step_seconds),
                "communication_seconds": layout.communication_seconds,
                "exposed_seconds": layout.exposed_seconds,
                "bubble_seconds": layout.bubble_seconds,
            }
            for index, layout in enumerate(mesh.layouts)
        ],
    }


def _cost(cost: "Cost | None") -> dict[str, Any] | None:
    if cost is None:
        return None
    names = ("currency", "per_hour", "per_million_tokens")
    return (estimate(cost.money) or {}) | {name: getattr(cost, name) for name in names}


def estimate(value: "Estimate | None") -> dict[str, Any] | None:
    """The JSON of an estimate."""
    if value is None:
        return None
    return {"value": value.value, "low": value.low, "high": value.high, "from": value.origin}
