"""Runs untrusted Python programs: without network, files or rights, with limits, and nothing of them survives."""

import json
import os
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bloomery.core.child import kill_group
from bloomery.core.errors import UserError
from bloomery.core.units import MIB

_START_SECONDS = 20.0  # of a sandbox on a busy machine, on top of the time of its program


@dataclass(frozen=True)
class Limits:
    """Of one program. `seconds`: wall-clock time, of all its processes; `cpu_seconds` and `memory_bytes`: of each.

    `folder_bytes`: of its empty working folder, which is in memory.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 256 * MIB
    processes: int = 16
    open_files: int = 32
    file_bytes: int = 4 * MIB
    folder_bytes: int = 16 * MIB


def run_program(program: str, *, banned: Sequence[str] = (), limits: Limits | None = None) -> str | None:
    """None when the program ends without an exception, else why it failed. `banned`: modules that it cannot import.

    Raises UserError where this system offers no sandbox.
    """
    limits, nonce = limits or Limits(), secrets.token_hex(16)
    # Of the base interpreter: a virtual environment adds nothing that a program may use.
    python, prefix = str(Path(sys.executable).resolve()), Path(sys.base_prefix)
    bases = {"base": str(prefix), "platbase": sys.base_exec_prefix}
    visible = [python, *(sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib"))]
    visible += [str(place) for place in prefix.glob("lib/libpython*")]
    with tempfile.TemporaryDirectory(prefix="bloomery-sandbox-") as folder:
        job = {**asdict(limits), "program": program, "nonce": nonce, "banned": list(banned), "python": python,
               "visible": visible, "folder": folder, "parent": os.getpid()}  # fmt: skip
        answer = _answer_of(python, json.dumps(job).encode("utf-8", errors="replace"), limits.seconds + _START_SECONDS)
    if "refused" in answer:
        problem = f"this system offers no sandbox for programs of a model: {answer['refused']}"
        fix = "allow user namespaces to this user, or run as root; in a container: --privileged"
        raise UserError(problem, where="--run-code", fix=fix)
    if answer.get("late"):
        return f"not finished after {limits.seconds:g} seconds"
    result = str(answer.get("result", ""))
    return None if result == nonce else result.replace(nonce, "") or "ended without a result"


def _answer_of(python: str, job: bytes, seconds: float) -> dict[str, Any]:
    script = str(Path(__file__).with_name("sandboxed.py"))
    process = subprocess.Popen(
        [python, "-I", "-S", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={},
        cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(job, timeout=seconds)
        answer: dict[str, Any] = json.loads(out) if out else {"refused": err.decode(errors="replace")[-300:].strip()}
        return answer
    except subprocess.TimeoutExpired:
        return {"late": True}
    finally:
        kill_group(process.pid)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def refuse_without_sandbox() -> None:
    """Raises UserError where this system offers no sandbox."""
    if not sys.platform.startswith("linux"):
        problem = "programs of a model run in a sandbox of the Linux kernel"
        raise UserError(problem, where="--run-code", fix="evaluate on Linux")
    if (problem := run_program("import math, json, re, statistics")) is not None:
        raise UserError(f"the sandbox does not work: {problem}", where="--run-code", fix="report this error")
