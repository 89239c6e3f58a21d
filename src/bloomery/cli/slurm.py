"""`bloomery slurm RECIPE --site S --nodes N`: plan a run for a cluster, write its job script, submit it. No torch."""

import shlex
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import chosen_recipe, echo, json_option, print_json, recipe_or_model
from bloomery.core.errors import UserError
from bloomery.core.units import GIB, format_count, format_seconds, parse_duration

if TYPE_CHECKING:
    from bloomery.plan.types import RunPlan
    from bloomery.runs.job_script import JobScript


@click.command()
@recipe_or_model
@click.option(
    "--site",
    metavar="SITE",
    required=True,
    help="The cluster: frontier, lumi, generic, or a TOML file.",
)
@click.option(
    "--nodes", metavar="N", type=click.IntRange(1, 16384), required=True, help="Train on N nodes."
)
@click.option("--account", metavar="A", help="The project that pays for the job.")
@click.option(
    "--time",
    "time_limit",
    metavar="T",
    help="Time limit of a job, such as 90m or 12h [default: the queue's].",
)
@click.option("--queue", metavar="Q", help="Partition or quality of service [default: the site's].")
@click.option("--gpu", metavar="NAME", help="GPUs of a node where SITE does not say: 8xMI300X.")
@click.option("--exclude", metavar="HOSTS", help="Do not run on these hosts: node17,node[20-23].")
@click.option("--dry-run", is_flag=True, help="Print the script; submit nothing.")
@json_option
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    data: str | None,
    site: str,
    nodes: int,
    account: str | None,
    time_limit: str | None,
    queue: str | None,
    gpu: str | None,
    exclude: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Write a Slurm job script for a recipe, and submit it.

    Plans for the site's nodes first; a run that does not fit is not submitted. Before its time limit the job saves,
    returns to the queue and goes on, until the run is complete. The script goes to stdout, notes to stderr.

    \b
    Example: bloomery slurm recipe.yaml --site frontier --nodes 64 --account ABC123 --dry-run
             bloomery slurm recipe.yaml --site generic --gpu 8xMI300X --nodes 2 --time 12h
    """
    from bloomery.hardware.sites import CPU, find_site
    from bloomery.hardware.specs import named_gpus
    from bloomery.plan.advise import planned_save
    from bloomery.plan.resolve import local_plan
    from bloomery.runs.job_script import submit, write_job_script

    # The nodes of the site, as the plan sees them.
    chosen_site = find_site(site)
    if gpu is not None:
        (gpu_name,), count = named_gpus((gpu,), None)
        chosen_site = chosen_site.model_copy(update={"gpu": gpu_name, "gpus_per_node": count})
    if not chosen_site.gpu:
        fix = "pass --gpu, such as --gpu 8xMI300X; or a site file with gpu and gpus_per_node"
        raise UserError(f"the site {site} does not say which GPUs its nodes have", fix=fix, code=2)
    loaded_recipe, source = chosen_recipe(recipe, overrides, model, data)
    # Several nodes without GPUs have no plan: that of one of them has its memory, and more time.
    without_gpus = chosen_site.gpu == CPU
    plan, _ = local_plan(
        loaded_recipe,
        gpu=None if without_gpus else chosen_site.gpu,
        gpus=chosen_site.gpus_per_node,
        nodes=1 if without_gpus else nodes,
    )
    if not plan.fits:
        fix = f'bloomery plan {source} --gpu "{chosen_site.gpu}" --gpus {chosen_site.gpus_per_node} --nodes {nodes}'
        if plan.suggestions:
            fix = f"add {plan.suggestions[0]}; more: {fix}"
        needed = f"{plan.memory.total / GIB:.1f} of {plan.memory.limit / GIB:.1f} GiB"
        raise UserError(f"the run does not fit: {needed} of each GPU", where=source, fix=fix)

    # Where the plan knows no speed, a step is taken to last a minute.
    options = {"--site": site, "--nodes": str(nodes), "--account": account, "--time": time_limit}
    options |= {"--queue": queue, "--gpu": gpu, "--exclude": exclude}
    given = [word for key, value in options.items() if value is not None for word in (key, value)]
    script = write_job_script(
        chosen_site,
        name=loaded_recipe.name,
        arguments=source,
        command=f"bloomery slurm {source} {shlex.join(given)}",
        nodes=nodes,
        account=account,
        seconds=_seconds(time_limit),
        queue_name=queue,
        excluded_hosts=exclude,
        step_seconds=60.0 if plan.step_seconds is None else plan.step_seconds.high,
        save_seconds=planned_save(plan).seconds.high,
        run_seconds=None if plan.seconds is None else plan.seconds.value,
    )
    ranks = nodes * chosen_site.gpus_per_node
    job = None if dry_run else submit(script.text)
    if as_json:
        print_json(_document(script, plan, nodes=nodes, ranks=ranks, job=job))
        return 0
    echo(script.text)
    name = loaded_recipe.name
    for line in _notes(script, plan, nodes=nodes, ranks=ranks, name=name, job=job, source=source):
        echo(line, err=True)
    return 0


def _seconds(time_limit: str | None) -> float | None:
    """Raises UserError for a text that is no time."""
    if time_limit is None:
        return None
    try:
        duration = parse_duration(time_limit)
    except ValueError as error:
        raise UserError(str(error), where="--time", fix="pass --time 12h", code=2) from error
    if duration.unit != "seconds":
        problem = f"{time_limit!r} is no time"
        raise UserError(problem, where="--time", fix="pass --time 12h, or 90m", code=2)
    return duration.amount


def _notes(
    script: "JobScript",
    plan: "RunPlan",
    *,
    nodes: int,
    ranks: int,
    name: str,
    job: str | None,
    source: str,
) -> list[str]:
    """What will happen, for a person; on stderr, so that the script alone can go into a file."""
    from bloomery.runs.job_script import TRAINING_STEP, log_file
    from bloomery.runs.launchers import job_run_name

    memory = f"{plan.memory.total / GIB:.1f} of {plan.memory.limit / GIB:.1f} GiB each"
    notes = [f"{'ranks':<10}{ranks} on {nodes} node{'s' * (nodes > 1)}, {memory}"]
    if plan.seconds is not None and plan.step_seconds is not None:
        jobs = plan.seconds.value / (script.seconds - script.signal_seconds)
        rate = format_count(plan.trained_tokens_per_step / plan.step_seconds.value)
        starts = "one job" if jobs <= 1 else f"about {jobs:,.0f} starts of the job"
        notes.append(
            f"{'time':<10}about {format_seconds(plan.seconds.value)} at {rate} tokens/s: {starts} of"
            f" {format_seconds(script.seconds)}"
        )
    notes.append(
        f"{'saves':<10}{script.signal_seconds} s before each time limit; then the job returns to the queue, where it"
        " first waits for about two minutes until its credential has expired"
    )
    if plan.dataset is None:
        notes.append(
            f"{'dataset':<10}not prepared yet: `bloomery prepare {source}` first, or all nodes wait for one"
        )
    if job is None:
        return notes
    run = f"runs/{job_run_name(name, f'slurm-{job}.{TRAINING_STEP}')}"
    return [
        *notes,
        f"{'job':<10}{job} is in the queue: squeue --job {job}",
        f"{'follow':<10}bloomery watch {run}   (or: tail -f {log_file(name, job)})",
        f"{'stop':<10}bloomery stop {run}   (saves first)",
    ]


def _document(
    script: "JobScript", plan: "RunPlan", *, nodes: int, ranks: int, job: str | None
) -> dict[str, object]:
    from bloomery.cli.plan import estimate

    return {
        "job": job,
        "nodes": nodes,
        "ranks": ranks,
        "queue": script.queue.name if script.queue else None,
        "time_seconds": script.seconds,
        "signal_seconds": script.signal_seconds,
        "run_seconds": estimate(plan.seconds),
        "script": script.text,
    }
