"""`bloomery doctor`: check the machine, suggest fixes, explain error messages.

`--fix N` runs the pip command of a finding, or pins torch in this environment. `--bundle FILE` writes the machine, the
findings and the end of the last log, without names and secrets.
"""

import errno
import getpass
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import click

from bloomery.cli.common import echo_page, plain, print_json
from bloomery.core import __version__
from bloomery.core.child import python_module
from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_input, write_durably
from bloomery.core.run_folder import every_run
from bloomery.core.text import expanded, redact_secrets
from bloomery.hardware.doctor.symptoms import PIN, Finding
from bloomery.hardware.machine import Machine
from bloomery.hardware.vendors import TRITONS

FILE_NAME = re.compile(r"[\w.~-]*/[\w./~-]*|[\w.~-]+\.(?:log|txt|out|err)")
MAX_LOG_BYTES = 8_000_000  # the end of a log that is read
Ask = Callable[[str], bool] | None  # None: the user has agreed by --yes
MAX_NAME_LENGTH = 1_000  # of a file; a longer text after --explain is a message


@click.command()
@click.option("--probe", is_flag=True, help="Test matmul, attention and torch.compile (1 minute).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option(
    "--machine",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check a machine.json or bundle instead.",
)
@click.option(
    "--explain", metavar="TEXT", help="Explain an error message, a log file or stdin (-)."
)
@click.option(
    "--fix",
    "number",
    type=int,
    metavar="N",
    help="Apply the fix of finding N after asking, without sudo.",
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a report for a bug report, without names.",
)
@click.option(
    "--docker", is_flag=True, help="Print the docker run command with this machine's GPUs."
)
@click.option(
    "--gpu-check",
    "gpu_check",
    is_flag=True,
    help="Prove that this GPU computes right, then time it (30 min).",
)
@click.option("--tiny", is_flag=True, help="Small shapes, on any device (--gpu-check).")
@click.option("--only", metavar="PART,PART", help="Run these parts (--gpu-check).")
@click.option("--limit", metavar="TIME", help="End after this time, such as 15m (--gpu-check).")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write this file (--gpu-check) [default: gpu-check.json].",
)
@click.option("--by", metavar="NAME", help="Your name in the file, if you like (--gpu-check).")
@click.option("-y", "--yes", is_flag=True, help="Do not ask (--fix, --gpu-check).")
def command(
    probe: bool,
    as_json: bool,
    machine: Path | None,
    explain: str | None,
    number: int | None,
    bundle: Path | None,
    docker: bool,
    gpu_check: bool,
    tiny: bool,
    only: str | None,
    limit: str | None,
    output: Path | None,
    by: str | None,
    yes: bool,
) -> int:
    """Check this machine and suggest fixes.

    Exit code 1 if a problem blocks training. Example: bloomery doctor --explain "HIP error: invalid device function"
    """
    from bloomery.hardware.doctor.diagnose import diagnose, ready, run_lines

    # Options that exclude each other are refused before anything is checked.
    start_time = time.monotonic()
    tasks = {
        "--explain": explain is not None,
        "--fix": number is not None,
        "--bundle": bundle is not None,
        "--docker": docker,
        "--gpu-check": gpu_check,
    }
    gpu_check_settings = {
        "--tiny": tiny,
        "--only": only is not None,
        "--limit": limit is not None,
        "--output": output is not None,
        "--by": by is not None,
        "--yes": yes,
    }
    _refuse_combinations(
        [option for option, requested in tasks.items() if requested],
        [option for option, requested in gpu_check_settings.items() if requested],
        machine=machine,
        probe=probe,
        as_json=as_json,
    )
    if gpu_check:
        from bloomery.cli.gpu_check import GpuCheckOptions, run_gpu_check

        check_options = GpuCheckOptions(
            tiny=tiny,
            only=only or "",
            limit=limit,
            output=output,
            by=by or "",
            yes=yes,
            as_json=as_json,
        )
        return run_gpu_check(check_options, public=without_names)

    # Explaining a message and printing a docker command need the machine, not its findings.
    checked_machine = load_machine(machine, probe=probe)
    if explain is not None:
        return _explain(explain, checked_machine, as_json=as_json)
    if docker:
        click.echo("\n".join(run_lines(checked_machine)))
        return 0

    findings = diagnose(checked_machine)
    documents = [document(finding) for finding in findings]
    if number is not None:
        apply_fix(number, findings, checked_machine, ask=None if yes else click.confirm)
        return 0
    if bundle is not None:
        num_bytes = write_bundle(bundle, checked_machine, documents)
        content = "this machine, its findings, the end of the last run's log"
        click.echo(f"bundle     {bundle} ({num_bytes / 1000:.0f} kB): {content}")
        click.echo(
            "           Names of users, hosts and groups are removed. Read it before you attach it to a report."
        )
        return 0

    # Without a task: the page, with what a packaged recipe would need once the problems are fixed.
    from bloomery.cli.doctor_page import page, preview, then_document, then_lines
    from bloomery.cli.plugins import plugin_documents

    result = preview(checked_machine, findings)
    if as_json:
        summary = {
            "ready": ready(findings),
            "findings": documents,
            "machine": anonymous(checked_machine),
            "then": then_document(result),
            "plugins": plugin_documents(),
        }
        print_json(summary)
    else:
        seconds = time.monotonic() - start_time
        echo_page(page(checked_machine, findings, seconds=seconds, plan_lines=then_lines(result)))
    return 0 if ready(findings) else 1


def _refuse_combinations(
    tasks: Sequence[str],
    gpu_check_settings: Sequence[str],
    *,
    machine: Path | None,
    probe: bool,
    as_json: bool,
) -> None:
    """Raises UserError (code 2) for options that exclude each other. `tasks`, `gpu_check_settings`: those requested."""
    if machine is not None and (probe or "--fix" in tasks):
        name = "--probe" if probe else "--fix"
        problem = f"{name} works only on this machine"
        fix = f"omit --machine, or run {name} on that machine"
        raise UserError(problem, where=f"--machine {machine}", fix=fix, code=2)
    if len(tasks) > 1:
        problem = f"{tasks[0]} and {tasks[1]} cannot be combined"
        fix = f"omit {tasks[1]} and run `bloomery doctor {tasks[1]} ...` afterwards"
        raise UserError(problem, where="doctor", fix=fix, code=2)
    if as_json and {"--fix", "--bundle", "--docker"} & set(tasks):
        problem = "--json cannot be combined with --fix, --bundle or --docker"
        fix = "omit --json; it can be combined with --explain, --probe and --machine"
        raise UserError(problem, where="doctor", fix=fix, code=2)
    if "--fix" in tasks:
        gpu_check_settings = [option for option in gpu_check_settings if option != "--yes"]
    if gpu_check_settings and "--gpu-check" not in tasks:
        problem = f"{gpu_check_settings[0]} is a setting of --gpu-check"
        fix = f"bloomery doctor --gpu-check {' '.join(gpu_check_settings)} ..."
        raise UserError(problem, where="doctor", fix=fix, code=2)
    if "--gpu-check" in tasks and (machine is not None or probe):
        name = "--machine" if machine is not None else "--probe"
        problem = f"--gpu-check and {name} cannot be combined"
        raise UserError(problem, where="doctor", fix=f"omit {name}", code=2)


def load_machine(file: Path | None, *, probe: bool) -> Machine:
    """The machine of `file`, or this one with the results of its probes, new or cached."""
    from bloomery.check import attention_probes, step_probes
    from bloomery.hardware.detect import detect
    from bloomery.hardware.probes import run_probes

    if file is not None:
        return read_record(file)
    local = detect()
    if not probe:
        return local
    unprobed = local.model_copy(update={"probes": ()})  # earlier failures do not affect new probes
    extra = (
        *attention_probes.attention_probe_specs(unprobed),
        *step_probes.step_probe_specs(unprobed),
    )
    probes = run_probes(unprobed, extra=extra, on_progress=_progress)
    return unprobed.model_copy(update={"probes": probes})


def read_record(file: Path) -> Machine:
    """The machine of a machine.json or a bundle. Raises UserError (code 2)."""
    from pydantic import ValidationError

    try:
        content = json.loads(read_input(expanded(file), pipes=True, code=2))
        record = content.get("machine", content) if isinstance(content, dict) else content
        return Machine.model_validate(record)
    except (UserError, ValueError, RecursionError) as error:
        reason = error.problem.lower() if isinstance(error, UserError) else "not JSON"
        if isinstance(error, ValidationError):  # the first error, with its key
            details = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, details["loc"])) or "document"
            reason = f"{key}: {details['msg'].lower()}"
        fix = "use a file of `bloomery doctor --bundle FILE`, or runs/*/machine.json"
        problem = f"not a machine record: {reason}"
        raise UserError(problem, where=str(file), fix=fix, code=2) from error


def _progress(name: str, num_finished: int, total: int) -> None:
    """Print the running probe on one line of stderr that the next overwrites; nothing where that is no terminal."""
    if sys.stderr.isatty():
        count = f"{num_finished + 1} of {total}"
        click.echo(f"\r\033[Kprobing    {count}: {name}", nl=False, err=True)
        if num_finished + 1 == total:
            click.echo("\r\033[K", nl=False, err=True)


def document(finding: Finding) -> dict[str, Any]:
    """A finding as JSON."""
    names = ("id", "level", "what", "evidence", "fix", "verify")
    return {name: getattr(finding, name) for name in names}


def _explain(text: str, machine: Machine, *, as_json: bool) -> int:
    """Print the known problems that a message matches: those of this machine, or without any, of every machine."""
    from bloomery.cli.doctor_page import explained_lines
    from bloomery.hardware.doctor.symptoms import finding_of, match

    message = _message(text)
    if not message.strip() and not as_json:
        fix = 'bloomery doctor --explain "the last lines of the log"'
        raise UserError("the message to explain is empty", where="--explain", fix=fix, code=2)
    # The symptoms of other machines are better than none: the log may have come from one.
    matches = match(message, machine=machine) or match(message)
    findings = [finding_of(symptom) for symptom in matches]
    if as_json:
        print_json({"findings": [document(finding) for finding in findings]})
    else:
        echo_page(explained_lines(findings, matches[0].cites if matches else ()))
    return 0


def _message(text: str) -> str:
    """The text, the content of the file that it names, or stdin for "-"."""
    if text == "-":
        return _last_bytes(sys.stdin.buffer).decode(errors="replace")
    if len(text) >= MAX_NAME_LENGTH or re.search(r"[\n\0]", text):
        return text

    # A text that looks like a file is one: where it does not exist, that is an error, not a message to explain.
    try:
        path = expanded(text)
        if (path / "log.txt").is_file():  # the folder of a run
            path /= "log.txt"
        if not path.is_file() and not FILE_NAME.fullmatch(text):
            return text
        with open_input(path, pipes=True, code=2) as stream:
            if stream.seekable():
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            return _last_bytes(stream).decode(errors="replace")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # not a file name: one long line of a log
            return text
        raise
    except UserError as error:
        fix = "pass a readable file, or pipe it into `bloomery doctor --explain -`"
        problem = f"{text} {error.problem.lower()}"
        raise UserError(problem, where="--explain", fix=fix, code=2) from error


def _last_bytes(stream: BinaryIO) -> bytes:
    """The end of a stream, in constant memory."""
    end = b""
    while piece := stream.read(1 << 20):
        end = (end + piece)[-MAX_LOG_BYTES:]
    return end


PINNED = ("torch", *TRITONS, "torchvision", "torchaudio")
WRONG_TORCH = (
    "wrong-build",
    "wheel-unfit",
    "arch-not-in-wheel",
    "device-package-missing",
    "no-torch",
    "torch-too-old",
)


def apply_fix(number: int, findings: Sequence[Finding], machine: Machine, *, ask: Ask) -> None:
    """Apply the fix of finding `number` after asking. Raises UserError if only the user can."""
    if not 1 <= number <= len(findings):
        numbers = f"1 to {len(findings)}" if findings else "none"
        problem = f"no finding has number {number}; findings: {numbers}"
        raise UserError(problem, where="--fix", fix="bloomery doctor", code=2)
    finding = findings[number - 1]
    if not finding.run:
        problem = "no automatic fix for this finding"
        fix = "\n       ".join(finding.fix)
        raise UserError(problem, where=f"{number}: {finding.what}", fix=fix)
    if finding.run != PIN:
        _install(finding.run, ask)
        return

    # A pin keeps the installed PyTorch, so it must be the right one.
    torch_problem = next((entry for entry in findings if entry.id in WRONG_TORCH), None)
    if torch_problem is not None:
        problem = "the wrong PyTorch is installed: it is not pinned"
        raise UserError(problem, where=torch_problem.what, fix="\n       ".join(torch_problem.fix))
    version = machine.software.torch
    build_version = version if version and "+" in version else None
    if _pin(build_version, lambda commands: _agreed(commands, ask)):
        click.echo("done       pip can no longer replace this PyTorch")


def _install(command: str, ask: Ask) -> None:
    """Runs a pip command in this environment, never in the system Python. An existing pin is renewed for the new build.

    `command`: `NAME=value ... pip install ARGUMENTS`. Raises UserError where pip fails, and in the system Python.
    """
    if sys.prefix == sys.base_prefix:
        fix = f"python3 -m venv .venv && . .venv/bin/activate && {command}"
        raise UserError("pip does not run in the system Python", where=sys.prefix, fix=fix)
    settings, _, arguments = command.partition("pip install ")
    if not _agreed([command], ask, f"in {sys.prefix}; downloads several GB"):
        return
    environment = dict(setting.split("=", 1) for setting in shlex.split(settings))
    pip_command = python_module("pip", "install", *shlex.split(arguments))
    _run(pip_command, fix=command, environment=environment)
    if settings:  # pip ignored the old pin
        _pin(None, lambda _: True)
    click.echo("done       verify with: bloomery doctor --probe")


def _agreed(commands: Sequence[str], ask: Ask, remark: str = "") -> bool:
    """Whether the user agrees to run these. Raises UserError if stdin is not a terminal."""
    lines = [*commands, remark] if remark else commands
    click.echo("run        " + "\n           ".join(lines))
    if ask is None:
        return True
    if not sys.stdin.isatty():
        problem = "cannot ask for confirmation: stdin is not a terminal"
        fix = "\n       ".join((*commands, "or add --yes, which agrees to this"))
        raise UserError(problem, where="--fix", fix=fix)
    if not (agreed := ask("Run it?")):
        click.echo("canceled   nothing changed")
    return agreed


def _run(
    command: Sequence[str], *, fix: str, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Runs pip, with `environment` added to the variables of this process. Raises UserError with `fix` if it fails."""
    variables = {**os.environ, **environment}
    exit_code = subprocess.run(command, env=variables, check=False).returncode
    if exit_code:
        raise UserError(f"pip failed: exit code {exit_code}", where="see the output above", fix=fix)


def _pin(torch_version: str | None, confirm: Callable[[Sequence[str]], bool]) -> bool:
    """Pins the installed versions, as `make setup` does: a constraints file in the folder of the environment, set in
    its pip configuration. Returns False where the user declines.

    `torch_version`: with the build, where the installed metadata lacks it. `confirm` gets the shell commands that do
    the same.

    Raises UserError if pip already uses a constraints file of the user or fails, OSError if the file cannot be written.
    """
    versions = {}
    for name in PINNED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if torch_version:
        versions["torch"] = torch_version
    pins = [f"{name}=={version}" for name, version in versions.items()]
    file = Path(sys.prefix) / "torch-pin.txt"

    # pip has one constraints setting: a file of the user's is not replaced.
    pip_config = python_module("pip", "config")
    setting = os.environ.get("PIP_CONSTRAINT")
    if not setting:
        query = [*pip_config, "get", "install.constraint"]
        setting = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    harmless_files = (os.devnull, str(file), file.as_uri())
    user_files = [path for path in setting.split() if path not in harmless_files]
    if user_files:
        problem = "this environment already has a pip constraints file"
        fix = "\n       ".join(["add to this file:", *pins])
        raise UserError(problem, where=user_files[0], fix=fix)

    # The user agrees to shell commands; Python writes the same file, but durably.
    write_command = f"printf '%s\\n' {shlex.join(pins)} > {shlex.quote(str(file))}"
    config_command = [*pip_config, "--site", "set", "install.constraint", file.as_uri()]
    if not confirm([write_command, shlex.join(config_command)]):
        return False
    write_durably(file, "".join(f"{pin}\n" for pin in pins))
    _run(config_command, fix=shlex.join(config_command))
    return True


LOG_LINES = 200
COMMON_GROUPS = frozenset(
    ("root", "video", "render", "sudo", "wheel", "docker", "users", "adm", "dialout", "nogroup")
)
COMMON_NAMES = frozenset(("root", "localhost", "user", "host", "127"))
ADDRESS = re.compile(
    r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)\b"
    r"|\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b|\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b|\bfe80::[\w:%]+"
)
# Keys whose values are words of Bloomery's own, never names of this machine.
FIXED_KEYS = frozenset(("vendor", "arch", "build", "level", "id", "outcome", "kind", "origin"))
ALIASED_KEYS = frozenset(("groups", "listed_groups", "kfd_group", "unique_id", "hive_id"))
USERS = ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
HOSTS = ("HOSTNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_JOB_NODELIST", "MASTER_ADDR")
NAMES_IN_SLURM = re.compile("NODELIST|HOST|USER|ACCOUNT|SUBMIT_DIR|JOB_NAME|PARTITION")


def write_bundle(file: Path, machine: Machine, findings: Sequence[dict[str, Any]]) -> int:
    """Write a bundle; return its size in bytes. Raises UserError if the file cannot be written."""
    log_lines: list[str] = []
    runs = every_run()
    if runs and (log := runs[-1] / "log.txt").is_file():
        log_lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    content = {
        "bloomery": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": anonymous(machine, exclude_defaults=True),
        "findings": _redacted(plain(list(findings)), {}),
        "last_run_log": [without_names(without_addresses(line)) for line in log_lines],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    # Only an earlier bundle is overwritten: a mistyped name must not cost the user a file.
    target = expanded(file)
    if target.is_file() and not _may_overwrite(target):
        problem = "this file is not a bundle: not overwritten"
        fix = "pass a new file: bloomery doctor --bundle report.json"
        raise UserError(problem, where=str(file), fix=fix, code=2)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"cannot write the bundle: {error.strerror}"
        fix = "pass a file in a writable folder: bloomery doctor --bundle ~/report.json"
        raise UserError(problem, where=str(file), fix=fix) from error
    return len(text.encode())


def _may_overwrite(file: Path) -> bool:
    """Whether a file is an earlier bundle, or empty."""
    try:
        with file.open("rb") as stream:
            beginning = stream.read(20).lstrip()
        return beginning.startswith(b'{\n "bloomery"') or not file.stat().st_size
    except OSError:
        return True  # writing it raises the error


def anonymous(machine: Machine, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """A machine as in machine.json, without secrets, names of users, groups and hosts, and the IDs of GPUs. Equal names
    stay equal.
    """
    # Slurm's variables that hold names go; the others, such as the number of tasks, explain a failed start.
    around = machine.host.around
    slurm = {name: value for name, value in around.slurm.items() if not NAMES_IN_SLURM.search(name)}
    host = machine.host.model_copy(update={"around": around.model_copy(update={"slurm": slurm})})

    # An alias per group and per chip: whether two are the same is what a diagnosis needs, not what they are called.
    access = machine.host.access
    groups = dict.fromkeys((*access.groups, *access.listed_groups, access.kfd_group))
    private_groups = (name for name in groups if name and name not in COMMON_GROUPS)
    aliases = {name: f"group{number}" for number, name in enumerate(private_groups, 1)}
    gpu_ids = [gpu_id for gpu in machine.accelerators for gpu_id in (gpu.unique_id, gpu.hive_id)]
    chips = dict.fromkeys(gpu_id for gpu_id in gpu_ids if gpu_id)
    aliases |= {gpu_id: f"chip-{number}" for number, gpu_id in enumerate(chips)}

    public_machine = machine.model_copy(update={"host": host})
    fields = public_machine.model_dump(mode="json", exclude_defaults=exclude_defaults)
    redacted_fields: dict[str, Any] = _redacted(plain(fields), aliases)
    return redacted_fields


def _redacted(value: Any, aliases: Mapping[str, str], key: str = "") -> Any:
    """A document with its texts redacted, except under FIXED_KEYS: a host can be named "amd", a user "torch"."""
    if isinstance(value, dict):
        return {
            name: _redacted(field, aliases, key if key == "environment" else name)
            for name, field in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item, aliases, key) for item in value]
    if not isinstance(value, str) or key in FIXED_KEYS:
        return value
    if key in ALIASED_KEYS:
        return without_names(aliases.get(value, value))
    return without_names(without_addresses(value) if key == "environment" else value)


def without_addresses(text: str) -> str:
    """The text without network addresses, except 127.0.0.1."""
    return ADDRESS.sub("[address]", text)


def without_names(text: str) -> str:
    """The text without the home folder, user name, host name and secrets."""
    # Home folders first: they contain user names.
    home = str(Path.home())
    public_text = text.replace(home, "~") if home != "/" else text
    public_text = re.sub(r"(/home/|/Users/)[\w.-]+", r"\1user", public_text)

    users = {os.environ.get(variable, "") for variable in USERS}
    with suppress(KeyError, OSError):  # a user ID without a name, as in containers
        users.add(getpass.getuser())
    hosts = {os.environ.get(variable, "") for variable in HOSTS}
    hosts.add(platform.node())
    hosts |= {host.partition(".")[0] for host in hosts}

    # The longest name first: a host's full name contains its short one.
    for names, placeholder in ((users, "user"), (hosts, "host")):
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2 and name not in COMMON_NAMES:
                name_pattern = rf"(?<![\w.-]){re.escape(name)}(?![\w-])"
                public_text = re.sub(name_pattern, placeholder, public_text)
    return redact_secrets(public_text)
