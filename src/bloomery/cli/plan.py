"""`bloomery plan`: what a run would do, need and take. Nothing is run, and no torch is needed."""

from typing import TYPE_CHECKING, Any

import click

from bloomery.cli.common import print_json, recipe_argument

if TYPE_CHECKING:
    from bloomery.plan.types import Estimate, Plan
    from bloomery.recipe.load import LoadedRecipe


@click.command()
@recipe_argument
@click.option("--gpu", metavar="NAME", help="Plan for this GPU instead of the machine: 'RX 6700 XT', 'MI300X', ...")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(recipe: str, overrides: tuple[str, ...], gpu: str | None, as_json: bool) -> int:
    """Say what a run would do, need and take, and whether it fits (exit code 1 when it does not).

    Example: bloomery plan go-coder-125m --gpu "RX 6700 XT"
    """
    from bloomery.recipe.load import load_recipe

    return show_plan(load_recipe(recipe, overrides), gpu=gpu, as_json=as_json, source=recipe)


def show_plan(
    loaded: "LoadedRecipe",
    *,
    gpu: str | None = None,
    devices: str | None = None,
    as_json: bool = False,
    source: str | None = None,
) -> int:
    """Print the plan of a recipe for this machine, its `devices` or `gpu`; 0 when it fits, 1 when it does not."""
    from bloomery.hardware.detect import detect
    from bloomery.launch.replan import narrowed
    from bloomery.plan.here import plan_here

    plan, machine = plan_here(loaded, gpu=gpu, machine=narrowed(detect(), devices))
    if as_json:
        print_json(document(plan))
    else:
        from bloomery.cli import cli
        from bloomery.plan.page import page

        verbs = cli.list_commands(click.Context(cli))
        click.echo("\n".join(page(plan, machine, source=source or loaded.name, verbs=verbs)))
    return 0 if plan.fits else 1


def document(plan: "Plan") -> dict[str, Any]:
    """The JSON of `plan --json`."""
    from bloomery.plan.memory import gib

    rate = plan.step_seconds.inverse(plan.train.tokens_per_step) if plan.step_seconds is not None else None
    memory = plan.memory
    return {
        "fits": plan.fits,
        "tokens": plan.total_tokens,
        "steps": plan.train.steps,
        "seconds": _estimate(plan.seconds),
        "step_seconds": _estimate(plan.step_seconds),
        "tokens_per_second": _estimate(rate),
        "memory": {
            "parts": {name: gib(value) for name, value in memory.parts.items()},
            "total": {
                "value": gib(memory.total), "low": gib(memory.low), "high": gib(memory.high), "from": memory.origin,
            },
            "limit": gib(memory.limit),
        },
        "disk": {name: gib(value) for name, value in plan.disk.items()},
        "energy_kwh": plan.energy_kwh,
        "claims": plan.claims,
        "contradictions": plan.contradictions,
        "remedies": plan.remedies,
        "choices": plan.decisions,
    }  # fmt: skip


def _estimate(estimate: "Estimate | None") -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "from": estimate.origin}
