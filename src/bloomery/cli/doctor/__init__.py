"""`bloomery doctor`: check the machine, suggest fixes, explain error messages."""

import errno
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from bloomery.cli.common import echo_page, print_json
from bloomery.core.errors import UserError
from bloomery.core.files import open_input, read_input
from bloomery.core.text import expanded

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
    "--machine", type=click.Path(path_type=Path), metavar="FILE", help="Check a machine.json or bundle instead."
)
@click.option("--explain", metavar="TEXT", help="Explain an error message, a log file or stdin (-).")
@click.option("--fix", "number", type=int, metavar="N", help="Apply the fix of finding N after asking, without sudo.")
@click.option(
    "--bundle", type=click.Path(path_type=Path), metavar="FILE", help="Write a report for a bug report, without names."
)
@click.option("--docker", is_flag=True, help="Print the docker run command with this machine's GPUs.")
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
    from bloomery.hardware.doctor.access import run_lines
    from bloomery.hardware.doctor.diagnose import diagnose, ready

    began = time.monotonic()
    if machine is not None and (probe or number is not None):
        name = "--probe" if probe else "--fix"
        problem, fix = f"{name} works only on this machine", f"omit --machine, or run {name} on that machine"
        raise UserError(problem, where=f"--machine {machine}", fix=fix, code=2)
    asked = {"--explain": explain is not None, "--fix": number is not None, "--bundle": bundle is not None}
    given = [name for name, value in (asked | {"--docker": docker}).items() if value]
    if len(given) > 1:
        fix = f"omit {given[1]} and run `bloomery doctor {given[1]} ...` afterwards"
        raise UserError(f"{given[0]} and {given[1]} cannot be combined", where="doctor", fix=fix, code=2)
    if as_json and (number is not None or bundle is not None or docker):
        fix = "omit --json; it can be combined with --explain, --probe and --machine"
        raise UserError("--json cannot be combined with --fix, --bundle or --docker", where="doctor", fix=fix, code=2)
    checked = load_machine(machine, probe=probe)
    if explain is not None:
        return _explain(explain, checked, as_json=as_json)
    if docker:
        click.echo("\n".join(run_lines(checked)))
        return 0
    findings = diagnose(checked)
    if number is not None:
        from bloomery.cli.doctor.fix import apply_fix

        apply_fix(number, findings, checked, ask=click.confirm)
        return 0
    if bundle is not None:
        from bloomery.cli.doctor.bundle import write_bundle

        size = write_bundle(bundle, checked, [document(finding) for finding in findings])
        click.echo(
            f"bundle     {bundle} ({size / 1000:.0f} kB): this machine, its findings, the end of the last run's log"
        )
        click.echo("           Names of users, hosts and groups are removed. Read it before you attach it to a report.")
        return 0
    from bloomery.cli.doctor.page import page, preview, then_document, then_lines

    result = preview(checked, findings)
    if as_json:
        from bloomery.cli.doctor.bundle import anonymous

        answer = {"ready": ready(findings), "findings": [document(finding) for finding in findings]}
        print_json(answer | {"machine": anonymous(checked), "then": then_document(result)})
    else:
        echo_page(page(checked, findings, seconds=time.monotonic() - began, then=then_lines(result)))
    return 0 if ready(findings) else 1


def load_machine(file: Path | None, *, probe: bool) -> "Machine":
    """The machine of `file`, or this one with the results of its probes, new or cached."""
    from bloomery.bench import attention_probes
    from bloomery.hardware.detect.detect import detect
    from bloomery.hardware.probes.run import run_probes

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
        return Machine.model_validate(content.get("machine", content) if isinstance(content, dict) else content)
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
    from bloomery.cli.doctor.page import explained_lines
    from bloomery.hardware.doctor.symptoms import Finding, match

    message = _message(text)
    if not message.strip() and not as_json:
        fix = 'bloomery doctor --explain "the last lines of the log"'
        raise UserError("the message to explain is empty", where="--explain", fix=fix, code=2)
    matches = match(message, machine=machine) or match(message)
    findings = [
        Finding(id=one.id, level=one.level, what=f"{one.what}: {one.cause}", evidence=one.line[:300], fix=one.fix,
                verify=one.verify)
        for one in matches
    ]  # fmt: skip
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
