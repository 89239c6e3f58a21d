"""`bloomery doctor`: why this machine does not train, what mends it, and what a message means."""

import errno
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from bloomery.cli.common import print_json
from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_input
from bloomery.core.text import expanded

if TYPE_CHECKING:
    from bloomery.hardware.doctor.symptoms import Finding
    from bloomery.hardware.machine import Machine

LOOKS_LIKE_A_FILE = re.compile(r"[\w.~-]*/[\w./~-]*|[\w.~-]+\.(?:log|txt|out|err)")
MOST_BYTES = 8_000_000  # of a log: its end counts, and of that what `match` looks at
LONGEST_NAME = 1_000  # of a file; a longer text after --explain is the message itself


@click.command()
@click.option("--probe", is_flag=True, help="Try everything on the devices: products, attention, compiling (a minute).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--machine", type=click.Path(path_type=Path), metavar="FILE", help="Diagnose a record or bundle instead.")
@click.option("--explain", metavar="TEXT", help="Say what a message, a log file or (-) what is piped in means.")
@click.option("--fix", "number", type=int, metavar="N", help="Mend finding N, after asking; it never calls sudo.")
@click.option("--bundle", type=click.Path(path_type=Path), metavar="FILE", help="Write what a maintainer needs.")
@click.option("--docker", is_flag=True, help="Print the line that starts a container with this machine's GPUs.")
def command(
    probe: bool,
    as_json: bool,
    machine: Path | None,
    explain: str | None,
    number: int | None,
    bundle: Path | None,
    docker: bool,
) -> int:
    """Say whether this machine can train, what stops or slows it, and the command that mends it.

    Exit code 1 when something stops training. Example: bloomery doctor --explain "HIP error: invalid device function"
    """
    from bloomery.hardware.doctor.access import run_lines
    from bloomery.hardware.doctor.diagnose import diagnose, ready

    began = time.monotonic()
    for name in ("probe",) * probe + ("fix",) * (number is not None):
        if machine is not None:
            problem, fix = (
                f"--{name} works on this machine alone",
                f"leave out --machine, or run --{name} on that machine",
            )
            raise UserError(problem, where=f"--machine {machine}", fix=fix, code=2)
    asked = {"--explain": explain is not None, "--fix": number is not None, "--bundle": bundle is not None}
    given = [name for name, there in (asked | {"--docker": docker}).items() if there]
    if len(given) > 1:
        fix = f"leave out {given[1]}, and call `bloomery doctor {given[1]} ...` afterwards"
        raise UserError(f"{given[0]} and {given[1]} are two things", where="doctor", fix=fix, code=2)
    if as_json and (number is not None or bundle is not None or docker):
        fix = "leave out --json; it goes with --explain, --probe and --machine"
        raise UserError("--json is for findings", where="doctor", fix=fix, code=2)
    examined = examine(machine, probe=probe)
    if explain is not None:
        return _explain(explain, examined, as_json=as_json)
    if docker:
        click.echo("\n".join(run_lines(examined)))
        return 0
    findings = diagnose(examined)
    if number is not None:
        from bloomery.cli.doctor.fix import apply_fix

        apply_fix(number, findings, examined, ask=_confirm)
        return 0
    if bundle is not None:
        from bloomery.cli.doctor.bundle import write_bundle

        size = write_bundle(bundle, examined, [document(finding) for finding in findings])
        told = "this machine, what was found, the end of the last run's log"
        click.echo(f"bundle     {bundle} ({size / 1000:.0f} kB): {told}")
        click.echo(
            "           names of users, hosts and groups are taken out; read it before you attach it to a report"
        )
        return 0
    from bloomery.cli.doctor.page import page, prospect, then_document, then_lines

    seen = prospect(examined, findings)
    if as_json:
        from bloomery.cli.doctor.bundle import nameless_document

        answer = {"ready": ready(findings), "findings": [document(finding) for finding in findings]}
        print_json(answer | {"machine": nameless_document(examined), "then": then_document(seen)})
    else:
        click.echo("\n".join(page(examined, findings, seconds=time.monotonic() - began, then=then_lines(seen))))
    return 0 if ready(findings) else 1


def examine(file: Path | None, *, probe: bool) -> "Machine":
    """The machine of `file`, or this one with what its probes found, now or earlier."""
    from bloomery.bench import attention_probes
    from bloomery.hardware.detect.detect import detect
    from bloomery.hardware.probes.run import run_probes

    if file is not None:
        return read_record(file)
    here = detect()
    if not probe:
        return here
    fresh = here.model_copy(update={"probes": ()})  # what failed earlier decides nothing now
    return fresh.model_copy(
        update={"probes": run_probes(fresh, extra=attention_probes.specs(fresh), on_progress=_progress)}
    )


def read_record(file: Path) -> "Machine":
    """A machine.json of a run, or the machine in a bundle. Raises UserError (code 2)."""
    import json

    from pydantic import ValidationError

    from bloomery.hardware.machine import Machine

    try:
        content = json.loads(read_input(expanded(file), pipes=True, code=2))
        return Machine.model_validate(content.get("machine", content) if isinstance(content, dict) else content)
    except (UserError, ValueError, RecursionError) as error:
        why = error.problem.lower() if isinstance(error, UserError) else "it is no JSON"
        if isinstance(error, ValidationError):  # the first thing that is wrong, with the key it is at
            first = error.errors(include_url=False, include_input=False)[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg'].lower()}"
        fix = "`bloomery doctor --bundle FILE` writes one; runs/*/machine.json are others"
        problem = f"this file is no record of a machine: {why}"
        raise UserError(problem, where=str(file), fix=fix, code=2) from error


def _progress(name: str, done: int, total: int) -> None:
    """One line on stderr, rewritten on a terminal and silent elsewhere."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[Kprobing    {done + 1} of {total}: {name}", nl=False, err=True)
        if done + 1 == total:
            click.echo("\r\033[K", nl=False, err=True)


def document(finding: "Finding") -> dict[str, Any]:
    """A finding as JSON."""
    names = ("id", "level", "what", "evidence", "fix", "verify")
    return {name: getattr(finding, name) for name in names}


def _explain(text: str, machine: "Machine", *, as_json: bool) -> int:
    """What is known of a message: on this machine, else on any."""
    from bloomery.cli.doctor.page import explained_lines
    from bloomery.hardware.doctor.symptoms import Finding, match

    told = _told(text)
    if not told.strip() and not as_json:
        fix = 'bloomery doctor --explain "the last lines of the log"'
        raise UserError("there is nothing to explain: it is empty", where="--explain", fix=fix, code=2)
    known = match(told, machine=machine) or match(told)
    findings = [
        Finding(
            id=one.id,
            level=one.level,
            what=f"{one.what}: {one.cause}",
            evidence=one.line[:300],
            fix=one.fix,
            verify=one.verify,
        )
        for one in known
    ]
    if as_json:
        print_json({"findings": [document(finding) for finding in findings]})
    else:
        click.echo("\n".join(explained_lines(findings, known[0].cites if known else ())))
    return 0


def _told(text: str) -> str:
    """The text itself, that of the file it names, or what is piped in for "-"."""
    if text == "-":
        return _last_bytes(sys.stdin.buffer).decode(errors="replace")
    file = expanded(text)
    try:
        named = len(text) < LONGEST_NAME and not re.search(r"[\n\0]", text)
        if named and (file / "log.txt").is_file():  # the folder of a run
            file = file / "log.txt"
        if named and (file.is_file() or LOOKS_LIKE_A_FILE.fullmatch(text)):
            return end_of(file)
        return text
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # no name of a file: one long line of a log
            return text
        raise
    except UserError as error:
        fix = "name a file that can be read, or pipe it: `bloomery doctor --explain -` reads what is piped in"
        problem = f"{text} {error.problem.lower()}"
        raise UserError(problem, where="--explain", fix=fix, code=2) from error


def _last_bytes(stream: BinaryIO) -> bytes:
    """The end of what is piped in, in little memory."""
    kept = b""
    while piece := stream.read(1 << 20):
        kept = (kept + piece)[-MOST_BYTES:]
    return kept


def end_of(file: Path) -> str:
    """As much of a log as is looked at, however long it is."""
    with open_input(file, pipes=True, code=2) as stream:
        if stream.seekable():
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_BYTES))
        return _last_bytes(stream).decode(errors="replace")


def _confirm(question: str) -> bool:
    return click.confirm(question, default=False)
