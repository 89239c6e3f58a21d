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
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from bloomery.cli.common import echo_page, plain, print_json
from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_input, write_durably
from bloomery.core.text import expanded, redact_secrets
from bloomery.hardware.doctor.symptoms import PIN, Finding
from bloomery.hardware.machine import Machine
from bloomery.runs.folder import all_runs

if TYPE_CHECKING:
    from bloomery.hardware.doctor.symptoms import Finding
    from bloomery.hardware.machine import Machine

LOOKS_LIKE_A_FILE = re.compile(r"[\w.~-]*/[\w./~-]*|[\w.~-]+\.(?:log|txt|out|err)")
MOST_BYTES = 8_000_000  # the end of a log that is read
LONGEST_NAME = 1_000  # of a file; a longer text after --explain is a message


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
def command(
    probe: bool,
    as_json: bool,
    machine: Path | None,
    explain: str | None,
    number: int | None,
    bundle: Path | None,
    docker: bool,
) -> int:
    """Check this machine and suggest fixes.

    Exit code 1 if a problem blocks training. Example: bloomery doctor --explain "HIP error: invalid device function"
    """
    from bloomery.hardware.doctor.diagnose import diagnose, ready, run_lines

    began = time.monotonic()
    if machine is not None and (probe or number is not None):
        name = "--probe" if probe else "--fix"
        problem = f"{name} works only on this machine"
        fix = f"omit --machine, or run {name} on that machine"
        raise UserError(problem, where=f"--machine {machine}", fix=fix, code=2)
    asked = {
        "--explain": explain is not None,
        "--fix": number is not None,
        "--bundle": bundle is not None,
    }
    given = [name for name, value in (asked | {"--docker": docker}).items() if value]
    if len(given) > 1:
        fix = f"omit {given[1]} and run `bloomery doctor {given[1]} ...` afterwards"
        raise UserError(
            f"{given[0]} and {given[1]} cannot be combined", where="doctor", fix=fix, code=2
        )
    if as_json and (number is not None or bundle is not None or docker):
        fix = "omit --json; it can be combined with --explain, --probe and --machine"
        raise UserError(
            "--json cannot be combined with --fix, --bundle or --docker",
            where="doctor",
            fix=fix,
            code=2,
        )
    checked = load_machine(machine, probe=probe)
    if explain is not None:
        return _explain(explain, checked, as_json=as_json)
    if docker:
        click.echo("\n".join(run_lines(checked)))
        return 0
    findings = diagnose(checked)
    if number is not None:
        apply_fix(number, findings, checked, ask=click.confirm)
        return 0
    if bundle is not None:
        size = write_bundle(bundle, checked, [document(finding) for finding in findings])
        click.echo(
            f"bundle     {bundle} ({size / 1000:.0f} kB): this machine, its findings, the end of the last run's log"
        )
        click.echo(
            "           Names of users, hosts and groups are removed. Read it before you attach it to a report."
        )
        return 0
    from bloomery.cli.doctor_page import page, preview, then_document, then_lines

    result = preview(checked, findings)
    if as_json:
        answer = {"ready": ready(findings), "findings": [document(finding) for finding in findings]}
        print_json(answer | {"machine": anonymous(checked), "then": then_document(result)})
    else:
        echo_page(
            page(checked, findings, seconds=time.monotonic() - began, then=then_lines(result))
        )
    return 0 if ready(findings) else 1


def load_machine(file: Path | None, *, probe: bool) -> "Machine":
    """The machine of `file`, or this one with the results of its probes, new or cached."""
    from bloomery.bench import attention_probes
    from bloomery.hardware.detect import detect
    from bloomery.hardware.probes import run_probes

    if file is not None:
        return read_record(file)
    local = detect()
    if not probe:
        return local
    unprobed = local.model_copy(update={"probes": ()})  # earlier failures do not affect new probes
    probes = run_probes(unprobed, extra=attention_probes.specs(unprobed), on_progress=_progress)
    return unprobed.model_copy(update={"probes": probes})


def read_record(file: Path) -> "Machine":
    """The machine of a machine.json or a bundle. Raises UserError (code 2)."""
    import json

    from pydantic import ValidationError

    from bloomery.hardware.machine import Machine

    try:
        content = json.loads(read_input(expanded(file), pipes=True, code=2))
        return Machine.model_validate(
            content.get("machine", content) if isinstance(content, dict) else content
        )
    except (UserError, ValueError, RecursionError) as error:
        reason = error.problem.lower() if isinstance(error, UserError) else "not JSON"
        if isinstance(error, ValidationError):  # the first error, with its key
            first = error.errors(include_url=False, include_input=False)[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg'].lower()}"
        fix = "use a file of `bloomery doctor --bundle FILE`, or runs/*/machine.json"
        problem = f"not a machine record: {reason}"
        raise UserError(problem, where=str(file), fix=fix, code=2) from error


def _progress(name: str, done: int, total: int) -> None:
    """One line on stderr, overwritten on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[Kprobing    {done + 1} of {total}: {name}", nl=False, err=True)
        if done + 1 == total:
            click.echo("\r\033[K", nl=False, err=True)


def document(finding: "Finding") -> dict[str, Any]:
    """A finding as JSON."""
    names = ("id", "level", "what", "evidence", "fix", "verify")
    return {name: getattr(finding, name) for name in names}


def _explain(text: str, machine: "Machine", *, as_json: bool) -> int:
    """Matches on this machine; without any, matches on every machine."""
    from bloomery.cli.doctor_page import explained_lines
    from bloomery.hardware.doctor.symptoms import Finding, match

    message = _message(text)
    if not message.strip() and not as_json:
        fix = 'bloomery doctor --explain "the last lines of the log"'
        raise UserError("the message to explain is empty", where="--explain", fix=fix, code=2)
    matches = match(message, machine=machine) or match(message)
    findings = [
        Finding(
            id=one.id,
            level=one.level,
            what=f"{one.what}: {one.cause}",
            evidence=one.line[:300],
            fix=one.fix,
            verify=one.verify,
        )
        for one in matches
    ]
    if as_json:
        print_json({"findings": [document(finding) for finding in findings]})
    else:
        echo_page(explained_lines(findings, matches[0].cites if matches else ()))
    return 0


def _message(text: str) -> str:
    """The text, the content of the file that it names, or stdin for "-"."""
    if text == "-":
        return _last_bytes(sys.stdin.buffer).decode(errors="replace")
    file = expanded(text)
    try:
        named = len(text) < LONGEST_NAME and not re.search(r"[\n\0]", text)
        if named and (file / "log.txt").is_file():  # the folder of a run
            file = file / "log.txt"
        if named and (file.is_file() or LOOKS_LIKE_A_FILE.fullmatch(text)):
            with open_input(file, pipes=True, code=2) as stream:
                if stream.seekable():
                    stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_BYTES))
                return _last_bytes(stream).decode(errors="replace")
        return text
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
        end = (end + piece)[-MOST_BYTES:]
    return end


PINNED = ("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "torchvision", "torchaudio")
WRONG_TORCH = (
    "wrong-build",
    "wheel-unfit",
    "arch-not-in-wheel",
    "device-package-missing",
    "no-torch",
    "torch-too-old",
)


def apply_fix(
    number: int, findings: Sequence[Finding], machine: Machine, *, ask: Callable[[str], bool]
) -> None:
    """Apply the fix of finding `number` after asking. Raises UserError if only the user can."""
    if not 1 <= number <= len(findings):
        problem = f"no finding has number {number}; findings: " + (
            f"1 to {len(findings)}" if findings else "none"
        )
        raise UserError(problem, where="--fix", fix="bloomery doctor", code=2)
    finding = findings[number - 1]
    if not finding.run:
        manual = "\n       ".join(finding.fix)
        raise UserError(
            "no automatic fix for this finding", where=f"{number}: {finding.what}", fix=manual
        )
    if finding.run != PIN:
        _install(finding.run, ask)
        return
    wrong = next((other for other in findings if other.id in WRONG_TORCH), None)
    if wrong is not None:
        fix = "\n       ".join(wrong.fix)
        raise UserError(
            "the wrong PyTorch is installed: it is not pinned", where=wrong.what, fix=fix
        )
    local = (
        machine.software.torch if machine.software.torch and "+" in machine.software.torch else None
    )
    if _pin(local, lambda commands: _agreed(commands, ask)):
        click.echo("done       pip can no longer replace this PyTorch")


def _install(command: str, ask: Callable[[str], bool]) -> None:
    """In this environment, never in the system Python. An existing pin is renewed for the new build."""
    if sys.prefix == sys.base_prefix:
        fix = f"python3 -m venv .venv && . .venv/bin/activate && {command}"
        raise UserError("pip does not run in the system Python", where=sys.prefix, fix=fix)
    settings, _, words = command.partition("pip install ")
    if _agreed([command], ask, f"in {sys.prefix}; downloads several GB"):
        environment = dict(setting.split("=", 1) for setting in shlex.split(settings))
        _run(
            [sys.executable, "-m", "pip", "install", *shlex.split(words)],
            shown=command,
            environment=environment,
        )
        if settings:  # pip ignored the old pin
            _pin(None, lambda _: True)
        click.echo("done       verify with: bloomery doctor --probe")


def _agreed(commands: Sequence[str], ask: Callable[[str], bool], remark: str = "") -> bool:
    """Whether the user agrees to run these. Raises UserError if stdin is not a terminal."""
    click.echo(
        "\n           ".join(
            ["run        " + commands[0], *commands[1:], *([remark] if remark else [])]
        )
    )
    if not sys.stdin.isatty():
        problem = "cannot ask for confirmation: stdin is not a terminal"
        raise UserError(problem, where="--fix", fix="\n       ".join(commands))
    if not (agreed := ask("Run it?")):
        click.echo("canceled   nothing changed")
    return agreed


def _run(
    command: Sequence[str], *, shown: str, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """`environment`: variables added to those of this process. Raises UserError if the command fails."""
    if code := subprocess.run(command, env={**os.environ, **environment}, check=False).returncode:
        raise UserError(f"pip failed: exit code {code}", where="see the output above", fix=shown)


def _pin(torch: str | None, agreed: Callable[[Sequence[str]], bool]) -> bool:
    """Pins the installed versions, as `make setup` does: a constraints file in the folder of the environment, set in
    its pip configuration. `torch`: its full version, with the build. `agreed` gets the shell commands that do the same.

    Raises UserError if pip already uses a constraints file of the user or fails, OSError if the file cannot be written.
    """
    versions = {}
    for name in PINNED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions |= {"torch": torch} if torch else {}
    pins = [f"{name}=={version}" for name, version in versions.items()]
    file = Path(sys.prefix) / "torch-pin.txt"
    pip = [sys.executable, "-m", "pip", "config"]
    words = [*pip, "get", "install.constraint"]
    current = os.environ.get("PIP_CONSTRAINT")
    current = current or subprocess.run(words, capture_output=True, text=True, check=False).stdout
    others = [one for one in current.split() if one not in (os.devnull, str(file), file.as_uri())]
    if others:
        fix = "\n       ".join(["add to this file:", *pins])
        raise UserError(
            "this environment already has a pip constraints file", where=others[0], fix=fix
        )
    command = [*pip, "--site", "set", "install.constraint", file.as_uri()]
    if not agreed(
        [f"printf '%s\\n' {shlex.join(pins)} > {shlex.quote(str(file))}", shlex.join(command)]
    ):
        return False
    write_durably(file, "".join(f"{line}\n" for line in pins))
    _run(command, shown=shlex.join(command))
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
# values: fixed words
FIXED_KEYS = frozenset(("vendor", "arch", "build", "level", "id", "outcome", "kind", "origin"))
ALIASED_KEYS = frozenset(("groups", "listed_groups", "kfd_group", "unique_id", "hive_id"))
USERS = ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
HOSTS = ("HOSTNAME", "SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "SLURM_JOB_NODELIST", "MASTER_ADDR")
NAMES_IN_SLURM = re.compile("NODELIST|HOST|USER|ACCOUNT|SUBMIT_DIR|JOB_NAME|PARTITION")


def write_bundle(file: Path, machine: Machine, findings: Sequence[dict[str, Any]]) -> int:
    """The number of bytes written. Raises UserError if the file cannot be written."""
    runs = all_runs()
    log = runs[-1] / "log.txt" if runs else None
    tail = (
        log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        if log is not None and log.is_file()
        else []
    )
    content = {
        "bloomery": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": anonymous(machine, exclude_defaults=True),
        "findings": _redacted(plain(list(findings)), {}),
        "last_run_log": [without_names(without_addresses(line)) for line in tail],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    target = expanded(file)
    if target.is_file() and not _bundle(target):
        fix = "pass a new file: bloomery doctor --bundle report.json"
        raise UserError(
            "this file is not a bundle: not overwritten", where=str(file), fix=fix, code=2
        )
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "pass a file in a writable folder: bloomery doctor --bundle ~/report.json"
        raise UserError(
            f"cannot write the bundle: {error.strerror}", where=str(file), fix=fix
        ) from error
    return len(text.encode())


def _bundle(file: Path) -> bool:
    """Whether it is an earlier bundle, or empty."""
    try:
        with file.open("rb") as stream:
            return (
                stream.read(20).lstrip().startswith((b'{\n "bloomery"',)) or not file.stat().st_size
            )
    except OSError:
        return True  # writing it raises the error


def anonymous(machine: Machine, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """A machine as in machine.json, without secrets, names of users, groups and hosts, and the IDs of GPUs. Equal names
    stay equal.
    """
    access = machine.host.access
    around = machine.host.around
    slurm = {name: value for name, value in around.slurm.items() if not NAMES_IN_SLURM.search(name)}
    host = machine.host.model_copy(update={"around": around.model_copy(update={"slurm": slurm})})
    groups = dict.fromkeys((*access.groups, *access.listed_groups, access.kfd_group))
    named = (name for name in groups if name and name not in COMMON_GROUPS)
    chips = dict.fromkeys(
        name for gpu in machine.accelerators for name in (gpu.unique_id, gpu.hive_id) if name
    )
    aliases = {name: f"group{number}" for number, name in enumerate(named, 1)}
    aliases |= {name: f"chip-{number}" for number, name in enumerate(chips)}
    shown = machine.model_copy(update={"host": host}).model_dump(
        mode="json", exclude_defaults=exclude_defaults
    )
    document: dict[str, Any] = _redacted(plain(shown), aliases)
    return document


def _redacted(value: Any, aliases: Mapping[str, str], key: str = "") -> Any:
    """A document with its texts redacted, except under FIXED_KEYS: a host can be named "amd", a user "torch"."""
    if isinstance(value, dict):
        return {
            name: _redacted(one, aliases, key if key == "environment" else name)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_redacted(one, aliases, key) for one in value]
    if not isinstance(value, str) or key in FIXED_KEYS:
        return value
    value = aliases.get(value, value) if key in ALIASED_KEYS else value
    return without_names(without_addresses(value) if key == "environment" else value)


def without_addresses(text: str) -> str:
    """Without network addresses, except 127.0.0.1."""
    return ADDRESS.sub("[address]", text)


def without_names(text: str) -> str:
    """Without the home folder, user name, host name and secrets."""
    home = str(Path.home())
    text = text.replace(home, "~") if home != "/" else text
    text = re.sub(r"(/home/|/Users/)[\w.-]+", r"\1user", text)
    users, hosts = (
        {os.environ.get(name, "") for name in variables} for variables in (USERS, HOSTS)
    )
    with suppress(KeyError, OSError):  # a user ID without a name, as in containers
        users.add(getpass.getuser())
    hosts.add(platform.node())
    for names, instead in (
        (users, "user"),
        (hosts | {name.partition(".")[0] for name in hosts}, "host"),
    ):
        for name in sorted(names, key=len, reverse=True):
            if len(name) > 2 and name not in COMMON_NAMES:
                text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return redact_secrets(text)
