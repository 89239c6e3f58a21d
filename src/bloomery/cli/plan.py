"""`bloomery plan RECIPE`: memory, time and disk of a run, without torch; `bloomery recipes`: the packaged recipes"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click

from bloomery.cli.common import (
    NewPath,
    chosen_recipe,
    echo,
    echo_page,
    json_option,
    literal,
    print_json,
    recipe_or_model,
    text_flags,
)
from bloomery.core.errors import UserError
from bloomery.core.text import did_you_mean
from bloomery.core.units import GIB
from bloomery.runs.folder import find_run

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import Estimate, MemoryEstimate, ParallelPlan, PlanReport, RunPlan
    from bloomery.recipe.load import LoadedRecipe
    from bloomery.simulate.run import SimulationResult


@final
class PlanCommand(click.Command):
    """`--gpu "MI300X" x 8` and `--gpu 4090 x2`, typed as several words, reach the option as one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined = list[str]()
        words = list(args)
        while words:
            word = words.pop(0)
            joined.append(word)
            if word == "--gpu" and words:
                joined.append(words.pop(0))
            elif not word.startswith("--gpu="):
                continue
            if words and (times := re.fullmatch(r"[x×*](\d+)", words[0], re.IGNORECASE)):
                joined[-1] += f" x {times[1]}"
                del words[0]
            elif len(words) > 1 and words[0].lower() in ("x", "×", "*") and words[1].isdecimal():
                joined[-1] += f" x {words[1]}"
                del words[:2]
        return super().parse_args(ctx, joined)


@click.command(cls=PlanCommand)
@recipe_or_model
@click.option(
    "--gpu",
    metavar="NAME",
    multiple=True,
    help="Plan for this GPU: 4090, 'RX 6700 XT', 8xMI300X, all.",
)
@click.option("--gpus", metavar="N", type=click.IntRange(1, 1024), help="Plan for N GPUs per node.")
@click.option(
    "--nodes", metavar="N", type=click.IntRange(1, 16384), default=1, help="Plan for N nodes."
)
@click.option(
    "--simulate", is_flag=True, help="Simulate a step on meta tensors for its peak memory."
)
@json_option
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    gpu: tuple[str, ...],
    gpus: int | None,
    nodes: int,
    simulate: bool,
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
             bloomery plan go-coder-125m --gpu MI300X --simulate
    """
    from bloomery.hardware.specs import named_gpus

    gpu, gpus = named_gpus(gpu, gpus)
    loaded, source = chosen_recipe(recipe, overrides, model, data, planning=True)
    if len(gpu) > 1 or "all" in gpu:
        if simulate:
            fix = f"bloomery plan {source} --gpu MI300X --simulate"
            raise UserError("--simulate works with one GPU only", where="--gpu", fix=fix, code=2)
        names = () if "all" in gpu else gpu
        return show_gpus(loaded, names, gpus=gpus, nodes=nodes, as_json=as_json, source=source)
    one = gpu[0] if gpu else None
    return show_plan(
        loaded, gpu=one, gpus=gpus, nodes=nodes, simulate=simulate, as_json=as_json, source=source
    )


def show_gpus(
    loaded: "LoadedRecipe",
    names: tuple[str, ...],
    *,
    gpus: int,
    nodes: int,
    as_json: bool,
    source: str,
) -> int:
    """Print one line per named GPU, or per GPU of the table where none is named; 0 when the run fits one of them."""
    from bloomery.hardware.specs import find_gpu
    from bloomery.plan.page import compare_gpus, gpus_page
    from bloomery.plan.resolve import local_facts

    machine = local_facts(loaded).machine
    chosen = {(device.name, device.memory_bytes): device for device in map(find_gpu, names)}
    plans = compare_gpus(loaded, machine, chosen=list(chosen.values()), gpus=gpus, nodes=nodes)
    if as_json:
        print_json([row.document() for row in plans])
    else:
        echo("\n".join(gpus_page(plans, loaded, gpus=gpus, nodes=nodes, source=source)))
    return 0 if any(row.fits for row in plans) else 1


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
    from bloomery.hardware.cpu_check import with_check
    from bloomery.hardware.detect import detect
    from bloomery.plan.advise import advise
    from bloomery.plan.resolve import local_plan
    from bloomery.runs.devices import planned_devices

    if gpu is None and gpus * nodes > 1 and not detect().accelerators:
        where = " ".join(
            f"{flag} {count}" for flag, count in (("--gpus", gpus), ("--nodes", nodes)) if count > 1
        )
        fix = f'name a GPU: --gpu "MI300X" {where}'
        raise UserError(
            "this machine has no GPU of which to plan several", where=where, fix=fix, code=2
        )
    machine = detect()
    if gpu is None and gpus * nodes == 1:
        machine, gpus = planned_devices(loaded.recipe, machine, devices)
        machine = with_check(machine)
    plan, facts = local_plan(loaded, gpu=gpu, machine=machine, gpus=gpus, nodes=nodes)
    report = advise(loaded, plan, facts)
    machine = facts.machine
    simulation = simulated(plan, machine) if simulate else None
    if as_json:
        print_json(
            document(report, machine) | ({"simulated": simulation.document()} if simulation else {})
        )
        return 0 if plan.fits and (simulation is None or simulation.fits) else 1
    from bloomery.cli import COMMANDS
    from bloomery.hub import cached_model, is_hub_id, local_model
    from bloomery.model.io.stored import is_bare
    from bloomery.plan.gather import absent, left_aside, models_of
    from bloomery.plan.made import ASSUMED
    from bloomery.plan.page import page
    from bloomery.plan.unsupported import untrained

    hidden = {"train"} if gpu is not None else set[str]()  # that GPU is not in this machine
    if (source or "").startswith("--model "):  # bench requires a recipe, and this one has no name
        hidden |= {"bench"}
    if assumed := Path(loaded.recipe.data.path or "").name == ASSUMED:
        hidden |= {"train"}
    missing = absent(loaded.recipe) if gpu is None and plan.dataset is None else ()
    if any(not place.startswith("hub:") for place in missing):
        hidden |= {"train"}
    words = "" if gpu is None else f' --gpu "{gpu}"'
    words += (f" --gpus {gpus}" if gpus > 1 else "") + (f" --nodes {nodes}" if nodes > 1 else "")
    commands = [name for name in COMMANDS if name not in hidden]
    lines = simulation.lines() if simulation else []
    echo_page(
        page(
            report,
            machine,
            source=source or loaded.name,
            commands=commands,
            devices=words,
            simulated=lines,
        )
    )
    notes = []
    models = models_of(loaded.recipe)
    for name in (name for name in models if cached_model(name) is None):
        then = "`train` refuses it" if untrained(plan.model.config) else "`train` downloads it"
        notes.append(f"{name} is not downloaded: shape from a table; {then}")
    for name in (name for name in models if not is_hub_id(name) and is_bare(local_model(name))):
        notes.append(f"no weights in {name}: `bloomery train` would fail")
    notes += left_aside(loaded.recipe)
    if assumed:
        length = loaded.recipe.data.sequence_length
        notes.append(
            f"no --data: conversations in packed sequences of {length:,} tokens are assumed; --data adds steps"
        )
    for place in missing if not assumed else ():
        then = (
            "`train` downloads it"
            if place.startswith("hub:")
            else "set data.path to your dataset before `train`"
        )
        notes.append(f"data.path does not exist: {place}; {then}")
    for note in notes:
        echo(f"note: {note}", err=True)
    return 0 if plan.fits and (simulation is None or simulation.fits) else 1


def simulated(plan: "RunPlan", machine: "Machine") -> "SimulationResult":
    """The memory of the plan's step, simulated on meta tensors. Raises UserError."""
    from bloomery.simulate.run import SimulationResult, simulate

    if plan.model.config.experts is not None:
        problem = "cannot simulate a mixture of experts: it is planned, not trained"
        raise UserError(problem, where="--simulate", fix="remove --simulate", code=2)
    if plan.model.config.transformers_backend is not None:
        problem = "cannot simulate transformers layers: they do not run on meta tensors"
        raise UserError(problem, where="--simulate", fix="remove --simulate", code=2)
    with progress() as show:
        return SimulationResult(plan, simulate(plan, machine, progress=show))


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
    rate = (
        plan.step_seconds.inverse(plan.train.tokens_per_step)
        if plan.step_seconds is not None
        else None
    )
    return {
        "fits": plan.fits,
        "tokens": plan.total_tokens,
        "steps": plan.train.steps,
        "epochs": plan.epochs,
        "seconds": estimate(plan.seconds),
        "step_seconds": estimate(plan.step_seconds),
        "tokens_per_second": estimate(rate),
        "memory": _memory(plan.memory),
        "disk": {name: value / GIB for name, value in report.disk.items()},
        "energy_kwh": report.energy_kwh,
        "claims": report.claims,
        "warnings": report.warnings,
        "suggestions": report.suggestions,
        "choices": plan.choices,
        "step_parts": {name: estimate(part) for name, part in report.step_parts.items()},
        "mfu": _utilization(plan, machine),
        "max_length": report.max_length,
        "mesh": None if plan.parallel is None else _mesh(plan.parallel),
    }


def brief_document(plan: "RunPlan") -> dict[str, Any]:
    """The JSON of a plan without its claims."""
    memory = _memory(plan.memory)
    seconds = estimate(plan.seconds)
    return {"fits": plan.fits, "memory": memory, "seconds": seconds, "choices": plan.choices}


def _memory(memory: "MemoryEstimate") -> dict[str, Any]:
    """In GiB: the parts, the peak with the ends of its interval, and the limit."""
    ends = {
        "value": memory.total / GIB,
        "low": memory.low / GIB,
        "high": memory.high / GIB,
        "from": memory.origin,
    }
    return {
        "parts": {name: value / GIB for name, value in memory.parts.items()},
        "total": ends,
        "limit": memory.limit / GIB,
    }


def _utilization(plan: "RunPlan", machine: "Machine") -> dict[str, Any] | None:
    """Fractions of the GPU's peak and of its best published matmul; None where either is unknown."""
    from bloomery.hardware.profile import build_profile
    from bloomery.plan.page import dtype_of, reached_flops

    gpu = build_profile(machine).gpu
    if gpu is None or plan.step_seconds is None:
        return None
    reached = reached_flops(plan)
    peak = gpu.peak_flops(dtype_of(plan))
    best = gpu.achievable_flops(dtype_of(plan))
    return {
        "peak": reached / peak if peak else None,
        "achievable": reached / best if best else None,
        "formula": "FLOPs per token: 6 per matmul weight + 12 L d T",
    }


def _mesh(mesh: "ParallelPlan") -> dict[str, Any]:
    return {
        "gpus": mesh.gpus,
        "nodes": mesh.nodes,
        "runs_here": mesh.trains,
        "chosen": mesh.layouts[mesh.chosen].name,
        "reason": mesh.reason,
        "layouts": [
            {
                "chosen": at == mesh.chosen,
                "name": layout.name,
                "replicate": layout.replicate,
                "shard": layout.shard,
                "pipeline": layout.pipeline,
                "micro_batch_size": layout.micro_batch_size,
                "accumulation": layout.accumulation,
                "fits": layout.memory.fits,
                "memory_gib": layout.memory.total / GIB,
                "step_seconds": estimate(layout.step_seconds),
                "communication_seconds": layout.communication_seconds,
                "exposed_seconds": layout.exposed_seconds,
                "bubble_seconds": layout.bubble_seconds,
            }
            for at, layout in enumerate(mesh.layouts)
        ],
    }


def estimate(value: "Estimate | None") -> dict[str, Any] | None:
    """The JSON of an estimate."""
    return (
        None
        if value is None
        else {"value": value.value, "low": value.low, "high": value.high, "from": value.origin}
    )


@click.group(invoke_without_command=True)
@click.pass_context
def recipes_command(context: click.Context) -> None:
    """List, show, copy and import recipes; print the JSON schema.

    Example: bloomery recipes copy demo mine.yaml
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


# Fine-tuning recipes by the release of their model, the newest first; then pretraining and the demos.
NEWEST_FIRST = (
    "smollm3",
    "qwen3",
    "gemma3",
    "phi4",
    "llama3.2",
    "qwen2.5",
    "llama3.1",
    "llama2",
    "go-coder",
    "demo",
)


def by_release(name: str) -> int:
    """The place of a recipe in the list."""
    return next(
        (at for at, start in enumerate(NEWEST_FIRST) if name.startswith(start)), len(NEWEST_FIRST)
    )


@recipes_command.command("list")
def list_() -> None:
    """List the packaged recipes with model, dataset and GPU."""
    from bloomery.recipe.load import packaged

    rows = [("recipe", "method", "model", "GPU", "dataset")]
    others = []
    for name, path in sorted(packaged().items(), key=lambda item: (by_release(item[0]), item[0])):
        comment = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").rstrip(".")
        method, colon, rest = comment.partition(": ")
        if not colon or name.endswith("-tiny"):
            others.append(name)
            continue
        model, dataset, gpu = rest.split(", ")
        smallest = gpu.removesuffix(" GPU").replace("one ", "").replace("no", "none")
        smallest = smallest.removesuffix(" GPUs").replace("eight ", "8 x ")
        rows.append((name, method, model, smallest, dataset))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = shutil.get_terminal_size((1000, 24)).columns  # a pipe gets whole lines
    # no room for a dataset
    for row in rows if room >= sum(widths[:-1]) + 20 else [row[:-1] for row in rows]:
        line = "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)
        ).rstrip()
        echo(line if len(line) <= room else line[: room - 1] + "…")
    twins = sum(name.endswith("-tiny") for name in others)
    echo("\nGPU         the smallest one that fits, estimated")
    echo(f"NAME-tiny   {twins} of them with a small random model: test your setup on a CPU")
    echo("everything  every key with its default: bloomery recipes show everything")


@recipes_command.command()
@recipe_or_model
def show(
    recipe: str | None, overrides: tuple[str, ...], model: str | None, data: str | None
) -> None:
    """Print a recipe: packaged, of a run, or generated.

    With --model and --data: the recipe that `train` generates for them and for the keys behind them, as a file.

    \b
    Example: bloomery recipes show qwen2.5-1.5b-lora
             bloomery recipes show --model Qwen/Qwen2.5-0.5B-Instruct --data chats.jsonl train.epochs=2 > mine.yaml
    """
    if recipe is not None and "=" in recipe and model and data:
        overrides = (recipe, *overrides)
        recipe = None
    if recipe is None and model is not None and data is not None:
        from bloomery.plan.made import made_recipe

        with text_flags():
            echo(made_recipe(model, data, overrides).shown, nl=False)
        return
    if recipe is None or overrides or model or data:
        fix = "bloomery recipes show NAME, or bloomery recipes show --model MODEL --data PATH [section.key=value ...]"
        raise UserError(
            "missing argument: NAME, or --model and --data",
            where="`bloomery recipes show`",
            fix=fix,
            code=2,
        )
    echo(_recipe_path(recipe).read_text(encoding="utf-8"), nl=False)


@recipes_command.command()
@click.argument("name")
@click.argument("path", required=False, type=NewPath())
def copy(name: str, path: Path | None) -> None:
    """Copy a recipe to PATH (default: NAME.yaml)."""
    source = _recipe_path(name)
    name = source.parent.name if source.name == "recipe.yaml" else name
    target = path if path is not None else Path(f"{name}.yaml")
    target = target / f"{name}.yaml" if target.is_dir() else target
    command = f"bloomery recipes copy {name} my-{name}.yaml"
    _write_new(target, source.read_text(encoding="utf-8"), command)
    echo(f"copied     {target}\nnext       bloomery plan {target}")


@recipes_command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", metavar="PATH", type=NewPath(), help="Write the recipe to PATH, not to stdout."
)
def import_(file: Path, out: Path | None) -> None:
    """Convert an Axolotl, LLaMA-Factory or TRL YAML to a recipe.

    Every key of FILE is mapped to a recipe key, or listed in a comment with the reason and an alternative.

    Example: bloomery recipes import axolotl.yml --out mine.yaml
    """
    from bloomery.recipe.importing import import_recipe

    text, program = import_recipe(file)
    if out is None:
        echo(text, nl=False)
        return
    _write_new(out, text, "choose another --out")
    echo(f"imported   {out}, from {file} ({program})\nnext       bloomery plan {out}", err=True)


def _write_new(path: Path, text: str, fix: str) -> None:
    """Write a new file. Raises UserError where it exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(
            "the file exists; nothing was overwritten", where=str(path), fix=fix
        ) from error
    except OSError as error:
        problem = f"cannot write the recipe: {error.strerror}"
        raise UserError(problem, where=str(path), fix="choose another PATH") from error


@recipes_command.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from bloomery.recipe.load import json_schema

    print_json(json_schema())


def _recipe_path(name: str) -> Path:
    from bloomery.recipe.load import packaged

    known = packaged()
    if name in known:
        return known[name]
    try:
        return find_run(name) / "recipe.yaml"
    except UserError:  # its message is about runs
        pass
    fix = did_you_mean(name, known, "`bloomery recipes list` lists the packaged recipes")
    raise UserError(f"no such packaged recipe or run: {name!r}", fix=fix, code=2)
