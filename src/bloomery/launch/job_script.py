"""Job scripts for Slurm: what a site wants, when a run has to save, and how its job returns to the queue. No torch."""

import math
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import final

from jinja2 import Environment, PackageLoader, StrictUndefined

from bloomery.core import __version__
from bloomery.core.errors import UserError, one_line
from bloomery.core.run_folder import RunFolder
from bloomery.core.units import format_seconds
from bloomery.hardware.sites import SITE_VARIABLE, Queue, Site
from bloomery.launch.launchers import job_run_name

# To finish a step, agree on it and end, in addition to the save itself.
ENDING_SECONDS = 60.0
START_SECONDS = 180.0  # of a job, until its first step
# Copying the Python environment, 10 GB or more, pays where this many nodes would read it from one file system.
COPY_FROM_NODES = 8
TRAINING_STEP = 1  # of the job: step 0 prepares the nodes
# node17,node[20-23,30]
HOST = r"[A-Za-z0-9][\w.-]*(\[[\d,-]+\])?"
SLURM_SECONDS = 60.0  # sbatch and scancel answer within this time


@final
@dataclass(frozen=True)
class JobScript:
    """A job script. `seconds`: its time limit; `signal_seconds`: how long before that the run has to save."""

    text: str
    seconds: int
    signal_seconds: int
    queue: Queue | None


TRUST_CODE = " --trust-code"  # an option of `bloomery resume`


def write_job_script(
    site: Site,
    *,
    site_name: str,
    name: str,
    arguments: str,
    command: str,
    nodes: int,
    account: str | None,
    seconds: float | None,
    queue_name: str | None,
    excluded_hosts: str | None,
    step_seconds: float,
    save_seconds: float,
    run_seconds: float | None,
    names_code: bool = False,
) -> JobScript:
    """The script that trains `arguments` (as for `bloomery train`) on `nodes` nodes of the site.

    `seconds`: the time limit that the user asked for; None: the queue's, or the run's where that is shorter.
    `site_name`: as `find_site` takes it. `command`: what wrote the script. `excluded_hosts`: "node17,node[20-23]", as
    Slurm takes them. `step_seconds` and `save_seconds`: the upper ends of the plan's ranges. `names_code`: whether the
    recipe names hooks or Python rewards, which the script asks for at a restart, too.

    Raises UserError (code 2) for what the site would refuse, and for a time in which no checkpoint can be saved.
    """
    if site.needs_account and not account:
        fix = "pass --account PROJECT, the project that pays for the job"
        raise UserError(f"{site.title} needs an account", where="--account", fix=fix, code=2)
    queue = site.queue(queue_name)
    signal_seconds = seconds_to_save(step_seconds, save_seconds)
    # A short run gets a short job, in which it also starts, and could save.
    wanted = None if run_seconds is None else 1.2 * run_seconds + START_SECONDS + signal_seconds
    limit = _limit(site, queue, nodes, seconds, wanted)
    if limit < signal_seconds + START_SECONDS:
        needed = math.ceil((signal_seconds + START_SECONDS) / 60)
        raise UserError(
            f"{format_seconds(limit)} are too short: starting takes about {START_SECONDS:.0f} s,"
            f" finishing a step and saving up to {signal_seconds} s",
            where="--time" if seconds is not None else f"the queue {queue.name if queue else ''}",
            fix=f"pass --time {needed}m or longer",
            code=2,
        )

    job_name = named(name)
    directives = [f"--job-name={job_name}"]
    if account:
        directives.append(f"--account={shlex.quote(checked_name(account, '--account'))}")
    if queue is not None:
        directives.append(f"--{queue.option}={shlex.quote(queue.name)}")
    per_node = f"--nodes={nodes} --ntasks-per-node={site.ranks_per_node}"
    cores = [f"--cpus-per-task={site.cpus_per_gpu}"] if site.cpus_per_gpu else []
    directives.append(" ".join([per_node, *site.rank_options, *cores]))
    directives += site.directives
    if excluded_hosts is not None:
        directives.append(f"--exclude={checked_hosts(excluded_hosts)}")
    directives.append(f"--time={_clock(limit)} --signal=TERM@{signal_seconds}")
    requeue = queue is None or queue.requeue
    returns = "--requeue" if requeue else "--no-requeue"
    directives.append(f"{returns} --open-mode=append --output={job_name}-%j.log")

    template = script_templates().get_template("job_script.sh.jinja")
    text = template.render(
        command=commented(command),
        version=__version__,
        run=job_run_name(name, f"slurm-0.{TRAINING_STEP}").removesuffix(f"0.{TRAINING_STEP}")
        + f"$SLURM_JOB_ID.{TRAINING_STEP}",
        requeue=requeue,
        one_rank=nodes * site.ranks_per_node == 1,
        directives=directives,
        setup=site.setup,
        # Each rank compares its CPUs with the site's table.
        environment={
            key: shlex.quote(value)
            for key, value in (site.environment | {SITE_VARIABLE: site_name}).items()
        },
        local_disk=site.local_disk,
        copy_environment=bool(site.local_disk) and nodes >= COPY_FROM_NODES,
        python=shlex.quote(sys.executable),
        prefix=shlex.quote(sys.prefix),
        nodes=nodes,
        # `srun` does not take the cores of a rank from the job's options (Slurm 22.05 and later).
        launch=" ".join(["srun", *cores, *site.step_options]),
        arguments=arguments,
        trust_code=TRUST_CODE * names_code,
        excluded_hosts=f"{excluded_hosts}," if excluded_hosts else "",
        stop_request=RunFolder(Path()).stop_request.name,
        excluded_hosts_file=RunFolder(Path()).excluded_hosts.name,
        checkpoints='runs/*-slurm-"$SLURM_JOB_ID".*/checkpoints/step-*',
        folder="runs",
        tries=".tries-$SLURM_JOB_ID",
        restarted="requeued",
        failed="$code",
    )
    return JobScript(text, int(limit), signal_seconds, queue)


def seconds_to_save(step_seconds: float, save_seconds: float) -> int:
    """Whole minutes, in seconds: to finish a step and agree in the next, save, and end."""
    return 60 * math.ceil((2 * step_seconds + save_seconds + ENDING_SECONDS) / 60)


def checked_hosts(hosts: str) -> str:
    """A list of hosts for Slurm's `--exclude`. Raises UserError (code 2) for a text that is none."""
    if not re.fullmatch(f"{HOST}(,{HOST})*", hosts):
        fix = "pass names with commas and no spaces, such as node17,node[20-23]"
        raise UserError(f"{hosts!r} is no list of hosts", where="--exclude", fix=fix, code=2)
    return hosts


def checked_name(value: str, option: str) -> str:
    """The name of an account, a queue, an image or a volume, as it goes into a line of a job script.

    Raises UserError (code 2) at `option` for a text in which a newline would begin another line.
    """
    if not value.strip() or not value.isprintable():
        problem = f"{value!r} is no name for a job script"
        raise UserError(problem, where=option, fix="pass the name alone, in one line", code=2)
    return value


def _limit(
    site: Site, queue: Queue | None, nodes: int, seconds: float | None, wanted: float | None
) -> float:
    """The time limit of the job in seconds. `wanted`: that of the whole run, where it is known.

    Raises UserError (code 2) for one that the queue does not give.
    """
    longest = None if queue is None else queue.hours(nodes)
    if seconds is None:
        limits = [limit for limit in (wanted, None if longest is None else longest * 3600) if limit]
        if not limits:
            raise UserError(
                f"{site.title} has no known time limit, and neither has the run",
                where="--time",
                fix="pass --time 12h",
                code=2,
            )
        return 60 * math.ceil(min(limits) / 60)
    if longest is not None and seconds > longest * 3600:
        assert queue is not None
        raise UserError(
            f"the queue {queue.name} gives {nodes} nodes at most {longest:g} h",
            where="--time",
            fix=f"pass --time {longest:g}h: a job that reaches it saves, returns to the queue and resumes",
            code=2,
        )
    return seconds


def _clock(seconds: float) -> str:
    """As Slurm writes it: 02:00:00, or 2-00:00:00 from a day on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02}:{minutes:02}:{rest:02}"
    return f"{days}-{clock}" if days else clock


def submit(script: str) -> str:
    """Hands the script to `sbatch`; returns the job number. Raises UserError with Slurm's own words."""
    try:
        answer = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            text=True,
            timeout=SLURM_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise UserError(
            "no `sbatch` here: this machine is no login node of a cluster with Slurm",
            where="bloomery slurm",
            fix="add --dry-run to print the script, or run the command on a login node",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"sbatch did not answer within {SLURM_SECONDS:.0f} s",
            where="bloomery slurm",
            fix="check with `squeue --me` whether the job was submitted before you try again",
        ) from error
    if answer.returncode != 0:
        reason = answer.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(
            f"sbatch refused the job: {reason[-1].removeprefix('sbatch: error: ')}",
            where="bloomery slurm",
            fix="correct the options, or print the script with --dry-run and edit it",
        )
    return answer.stdout.strip().split(";")[0]


def log_file(name: str, job: str) -> Path:
    """Where the job's output goes, below the folder of the submission."""
    return Path(f"{named(name)}-{job}.log")


def named(recipe_name: str) -> str:
    """The job's name, as the run folder has it."""
    return re.sub(r"[^\w.-]+", "-", recipe_name).strip("-.")[:80] or "bloomery"


def commented(command: str) -> str:
    """The command that wrote a file, for a comment of it that begins with "# ": an argument may have several lines, and
    characters that a file of YAML cannot hold.
    """
    return "\n# ".join(map(one_line, command.splitlines()))


def script_templates() -> Environment:
    # The text is a shell script, not markup: values are quoted for the shell where they are made.
    return Environment(
        loader=PackageLoader("bloomery.launch", ""),
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
