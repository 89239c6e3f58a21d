"""`bloomery slurm RECIPE --site S --nodes N`: plan a run for a cluster, write its job, submit it to Slurm. No torch."""

import re
import shlex
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import chosen_recipe, echo, json_option, print_json, recipe_or_model
from bloomery.core.errors import UserError
from bloomery.core.text import expanded
from bloomery.core.units import GIB, counted, format_seconds, parse_duration

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.hardware.sites import Site
    from bloomery.launch.cloud_jobs import CloudJob
    from bloomery.launch.job_script import JobScript
    from bloomery.plan.types import PlanReport, RunPlan
    from bloomery.recipe.load import LoadedRecipe

# What only some kinds of sites take, and what to do instead. Where a kind is missing, the option is refused.
APPLIES = {
    "--account": (("slurm",), "leave it out"),
    "--time": (("slurm",), "leave it out; train.max_time=12h ends the run after a time"),
    "--queue": (("slurm", "kubernetes"), "leave it out"),
    "--exclude": (("slurm", "kubernetes"), "leave it out"),
    "--image": (
        ("skypilot", "kubernetes"),
        "leave it out: the job runs in this Python environment",
    ),
    "--volume": (("skypilot", "kubernetes"), "leave it out: nodes share the working folder"),
}


@click.command()
@recipe_or_model
@click.option(
    "--site",
    metavar="SITE",
    required=True,
    help="Site: frontier, lumi, generic, skypilot, kubernetes, FILE.",
)
@click.option(
    "--nodes", metavar="N", type=click.IntRange(1, 16384), required=True, help="Train on N nodes."
)
@click.option("--account", metavar="A", help="The project that pays for the job.")
@click.option(
    "--time",
    "time_limit",
    metavar="T",
    help="Time limit of a job: 90m, 12h or 12:00:00 [default: the queue's].",
)
@click.option("--queue", metavar="Q", help="Partition or quality of service [default: the site's].")
@click.option("--gpu", metavar="NAME", help="GPUs of a node where SITE does not say: 8xMI300X.")
@click.option("--exclude", metavar="HOSTS", help="Do not run on these hosts: node17,node[20-23].")
@click.option(
    "--image", metavar="IMAGE", help="Container image with Bloomery (SkyPilot, Kubernetes)."
)
@click.option("--volume", metavar="NAME", help="Volume of all machines (SkyPilot, Kubernetes).")
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
    image: str | None,
    volume: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Write a Slurm job script for a recipe, and submit it.

    Plans for the site's nodes first; a run that does not fit is not submitted. Before its time limit the job saves,
    returns to the queue and resumes, until the run is complete. The script goes to stdout, notes to stderr.
    For `--site skypilot` and `--site kubernetes` a SkyPilot task and a PyTorchJob are printed; you submit them.

    \b
    Example: bloomery slurm my.yaml --site frontier --nodes 64 --account ABC123
             bloomery slurm my.yaml --site generic --gpu 8xMI300X --nodes 2
             bloomery slurm my.yaml --site skypilot --gpu 8xH100 --nodes 1 > task
    """
    from bloomery.launch.job_script import submit, write_job_script
    from bloomery.plan.checkpoints import planned_save
    from bloomery.runs.consent import names_code

    options = {"--site": site, "--nodes": str(nodes), "--account": account, "--time": time_limit}
    options |= {"--queue": queue, "--gpu": gpu, "--exclude": exclude}
    options |= {"--image": image, "--volume": volume}
    given = {name: value for name, value in options.items() if value is not None}
    chosen_site = _chosen_site(given)
    loaded_recipe, source = chosen_recipe(recipe, overrides, model, data)
    chosen_site = chosen_site.with_scoring(loaded_recipe.recipe.parallel.scoring_devices)
    report, machine = _fitting_report(loaded_recipe, source, chosen_site, nodes)
    plan = report.plan
    words = [word for option in given.items() for word in option]
    written_by = f"bloomery slurm {source} {shlex.join(words)}"
    ranks = nodes * chosen_site.ranks_per_node
    if chosen_site.kind != "slurm":
        return _print_cloud_job(
            chosen_site,
            given,
            report,
            machine,
            name=loaded_recipe.name,
            source=source,
            written_by=written_by,
            nodes=nodes,
            as_json=as_json,
        )

    script = write_job_script(
        chosen_site,
        site_name=_lasting_name(site),
        name=loaded_recipe.name,
        arguments=source,
        command=written_by,
        nodes=nodes,
        account=account,
        seconds=_seconds(time_limit),
        queue_name=queue,
        excluded_hosts=exclude,
        step_seconds=_step_seconds(plan),
        save_seconds=planned_save(plan).seconds.high,
        run_seconds=None if plan.seconds is None else plan.seconds.value,
        names_code=names_code(plan),
    )
    # The plan with its warnings comes first: what follows costs hours of many devices.
    if not as_json:
        _print_plan(report, machine, source, chosen_site, nodes)
    job = None if dry_run else submit(script.text)
    if as_json:
        print_json(_document(script, report, nodes=nodes, ranks=ranks, job=job))
        return 0
    echo(script.text)
    name = loaded_recipe.name
    for line in _notes(script, plan, nodes=nodes, ranks=ranks, name=name, job=job, source=source):
        echo(line, err=True)
    return 0


def _chosen_site(given: dict[str, str]) -> "Site":
    """The site with what the options say of it. Raises UserError (code 2), also for options that it does not take."""
    from bloomery.hardware.sites import find_site
    from bloomery.hardware.specs import named_gpus
    from bloomery.launch.job_script import checked_name

    site = find_site(given["--site"])
    for option, (kinds, fix) in APPLIES.items():
        if option in given and site.kind not in kinds:
            problem = f"{option} does not apply to {site.title}"
            raise UserError(problem, where=option, fix=fix, code=2)
    for option in ("--account", "--queue", "--image", "--volume"):
        if option in given:
            checked_name(given[option], option)
    edits: dict[str, object] = {}
    if (gpu := given.get("--gpu")) is not None:
        (gpu_name,), count = named_gpus((gpu,), None)
        edits |= {"gpu": gpu_name, "gpus_per_node": count}
    edits |= {key: given[f"--{key}"] for key in ("image", "volume") if f"--{key}" in given}
    site = site.model_copy(update=edits)
    if not site.gpu:
        fix = "pass --gpu, such as --gpu 8xMI300X; or a site file with gpu and gpus_per_node"
        problem = f"the site {given['--site']} does not say which GPUs its nodes have"
        raise UserError(problem, fix=fix, code=2)
    return site


def _lasting_name(site: str) -> str:
    """The site as the ranks of the job can name it, which may run in another folder."""
    path = expanded(site)
    return str(path.absolute()) if path.is_file() else site


def _print_plan(
    report: "PlanReport", machine: "Machine", source: str, site: "Site", nodes: int
) -> None:
    """The short form of `bloomery plan`, on stderr: its verdict, every warning, and the command with every figure."""
    from bloomery.plan.summary import summary

    lines = summary(report, machine, source=source, commands=[], devices=_plan_options(site, nodes))
    echo("\n".join(lines) + "\n", err=True)


def _plan_options(site: "Site", nodes: int) -> str:
    """Those with which `bloomery plan` plans for these nodes; a plan of nodes without GPUs is one of this machine."""
    from bloomery.hardware.sites import CPU

    if site.gpu == CPU:
        return ""
    options = f' --gpu "{site.gpu}" --gpus {site.gpus_per_node}'
    return options + (f" --nodes {nodes}" if nodes > 1 else "")


def _fitting_report(
    loaded_recipe: "LoadedRecipe", source: str, site: "Site", nodes: int
) -> "tuple[PlanReport, Machine]":
    """The plan for the nodes of the site, with its warnings, and a node. Raises UserError where it does not fit."""
    from bloomery.hardware.sites import CPU
    from bloomery.plan.advise import advise
    from bloomery.plan.resolve import local_plan

    # Several nodes without GPUs have no plan: that of one of them has its memory, and more time.
    without_gpus = site.gpu == CPU
    plan, facts = local_plan(
        loaded_recipe,
        gpu=None if without_gpus else site.gpu,
        gpus=site.ranks_per_node,
        nodes=1 if without_gpus else nodes,
    )
    if not plan.fits:
        fix = f"bloomery plan {source}{_plan_options(site, nodes)}"
        if plan.suggestions:
            fix = f"add {plan.suggestions[0]}; more: {fix}"
        memory = plan.memory
        gpus = "each GPU"
        if memory.fits and plan.scoring is not None:
            memory = plan.scoring.memory
            gpus = "each GPU that scores"
        needed = f"{memory.total / GIB:.1f} of {memory.limit / GIB:.1f} GiB"
        raise UserError(f"the run does not fit: {needed} of {gpus}", where=source, fix=fix)
    return advise(loaded_recipe, plan, facts), facts.machine


def _step_seconds(plan: "RunPlan") -> float:
    """The upper end of the plan's range; a minute where the plan has no speed."""
    return 60.0 if plan.step_seconds is None else plan.step_seconds.high


def _print_cloud_job(
    site: "Site",
    given: dict[str, str],
    report: "PlanReport",
    machine: "Machine",
    *,
    name: str,
    source: str,
    written_by: str,
    nodes: int,
    as_json: bool,
) -> int:
    """A SkyPilot task or a PyTorchJob on stdout, and on stderr how to submit it. Raises UserError (code 2)."""
    from bloomery.launch.cloud_jobs import (
        refuse_recipe_elsewhere,
        write_pytorch_job,
        write_skypilot_task,
    )
    from bloomery.launch.job_script import seconds_to_save
    from bloomery.plan.checkpoints import planned_save
    from bloomery.runs.consent import names_code

    refuse_recipe_elsewhere(source)
    plan = report.plan
    signal_seconds = seconds_to_save(_step_seconds(plan), planned_save(plan).seconds.high)
    if site.kind == "skypilot":
        job = write_skypilot_task(
            site,
            name=name,
            arguments=source,
            command=written_by,
            nodes=nodes,
            names_code=names_code(plan),
        )
        saves = "at checkpoint.every; a machine that is taken away gets no signal"
    else:
        job = write_pytorch_job(
            site,
            name=name,
            arguments=source,
            command=written_by,
            nodes=nodes,
            queue=given.get("--queue"),
            excluded_hosts=given.get("--exclude"),
            signal_seconds=signal_seconds,
            names_code=names_code(plan),
        )
        saves = f"when a pod is asked to end, which has {signal_seconds} s for it; then the pods start again"
    ranks = nodes * site.ranks_per_node
    if as_json:
        print_json(_cloud_document(job, report, nodes=nodes, ranks=ranks))
        return 0
    _print_plan(report, machine, source, site, nodes)
    echo(job.text)
    for line in [
        _ranks_note(nodes, ranks),
        f"{'saves':<10}{saves}",
        f"{'file':<10}write it to {job.file}: add > {job.file}",
        f"{'submit':<10}{job.submit}",
        f"{'follow':<10}{job.follow}",
        f"{'stop':<10}{job.stop}",
    ]:
        echo(line, err=True)
    return 0


def _cloud_document(
    job: "CloudJob", report: "PlanReport", *, nodes: int, ranks: int
) -> dict[str, object]:
    from bloomery.cli.plan import estimate

    return {
        "nodes": nodes,
        "ranks": ranks,
        "run_seconds": estimate(report.plan.seconds),
        "warnings": list(report.warnings),
        "file": job.file,
        "submit": job.submit.partition("  ")[0],
        "script": job.text,
    }


# As sbatch takes it: 12:00:00, or 1-12:00:00 with days. Its shorter forms mean minutes, or hours after days.
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)")


def _seconds(time_limit: str | None) -> float | None:
    """Raises UserError for a text that is no time."""
    if time_limit is None:
        return None
    clock = _CLOCK.fullmatch(time_limit.strip())
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    fix = "pass --time 12h, 90m or 12:00:00"
    try:
        duration = parse_duration(time_limit)
    except ValueError as error:
        raise UserError(f"{time_limit!r} is no time", where="--time", fix=fix, code=2) from error
    if duration.unit != "seconds":
        raise UserError(f"{time_limit!r} is no time", where="--time", fix=fix, code=2)
    return duration.amount


def _ranks_note(nodes: int, ranks: int) -> str:
    return f"{'ranks':<10}{ranks} on {counted(nodes, 'nodes')}"


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
    from bloomery.launch.job_script import TRAINING_STEP, log_file
    from bloomery.launch.launchers import job_run_name

    notes = [_ranks_note(nodes, ranks)]
    if plan.seconds is not None:
        jobs = plan.seconds.value / (script.seconds - script.signal_seconds)
        starts = "one job" if jobs <= 1 else f"about {jobs:,.0f} starts of the job"
        notes.append(f"{'starts':<10}{starts} of {format_seconds(script.seconds)}")
    saves = f"{script.signal_seconds} s before each time limit; then the job returns to the queue, where it first"
    saves += " waits for about two minutes until its credential has expired"
    if script.queue is not None and not script.queue.requeue:
        saves = f"{script.signal_seconds} s before the time limit, where the job ends: the queue"
        saves += f" {script.queue.name} allows no chain of jobs"
    notes.append(f"{'saves':<10}{saves}")
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
    script: "JobScript", report: "PlanReport", *, nodes: int, ranks: int, job: str | None
) -> dict[str, object]:
    from bloomery.cli.plan import estimate

    return {
        "job": job,
        "nodes": nodes,
        "ranks": ranks,
        "queue": script.queue.name if script.queue else None,
        "time_seconds": script.seconds,
        "signal_seconds": script.signal_seconds,
        "run_seconds": estimate(report.plan.seconds),
        "warnings": list(report.warnings),
        "script": script.text,
    }
