"""Runs a program that a model wrote against a test, in a sandbox: without network, files or rights.

Time, memory and processes are limited, and nothing of it survives. Does not import torch.
"""

import json
import os
import re
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
from bloomery.core.sandbox.graded import FAILED, PASSED
from bloomery.core.units import MIB

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_IMPORTS = re.compile(r"^(?:import|from) .*$", re.MULTILINE)
_GRADED = Path(__file__).with_name("graded.py")
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


def run_program(
    program: str,
    *,
    test: str,
    entry_point: str,
    prompt: str = "",
    banned: Sequence[str] = (),
    limits: Limits | None = None,
    where: str = "the sandbox",
) -> str | None:
    """None when the program passes the test, else why it failed. `banned`: modules that it cannot import.

    `test` defines check(candidate), `candidate` is the `entry_point` of the program. The test runs in another process
    than the program, with the names that `prompt` defines: imports and helpers of the task. Raises UserError at `where`
    where this system offers no sandbox.
    """
    limits = limits or Limits()
    # Of the base interpreter: a virtual environment adds nothing that a program may use.
    python = str(Path(sys.executable).resolve())
    prefix = Path(sys.base_prefix)
    bases = {"base": str(prefix), "platbase": sys.base_exec_prefix}
    visible = [python, *(sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib"))]
    visible += [str(library) for library in prefix.glob("lib/libpython*")]
    with tempfile.TemporaryDirectory(prefix="bloomery-sandbox-") as folder:
        job = {
            **asdict(limits),
            "program": program,
            "test": test,
            "entry_point": entry_point,
            "prompt": prompt,
            "banned": list(banned),
            "code": _GRADED.read_text(encoding="utf-8"),
            "python": python,
            "visible": visible,
            "folder": folder,
            "parent": os.getpid(),
        }
        answer = _answer_of(
            python,
            json.dumps(job).encode("utf-8", errors="replace"),
            limits.seconds + _START_SECONDS,
        )
    if "refused" in answer:
        problem = f"this system offers no sandbox for programs of a model: {answer['refused']}"
        fix = "allow user namespaces to this user, or run as root; in a container: --privileged"
        raise UserError(problem, where=where, fix=fix)
    if answer.get("late"):
        return f"not finished after {limits.seconds:g} seconds"
    result = str(answer.get("result", ""))
    return None if result == PASSED else result.removeprefix(FAILED) or "ended without a result"


def _answer_of(python: str, job: bytes, seconds: float) -> dict[str, Any]:
    script = str(Path(__file__).with_name("sandboxed.py"))
    process = subprocess.Popen(
        [python, "-I", "-S", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(job, timeout=seconds)
        answer: dict[str, Any] = (
            json.loads(stdout)
            if stdout
            else {"refused": stderr.decode(errors="replace")[-300:].strip()}
        )
        return answer
    except subprocess.TimeoutExpired:
        return {"late": True}
    finally:
        kill_group(process.pid)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def refuse_without_sandbox(where: str = "the sandbox") -> None:
    """Raises UserError where this system offers no sandbox. `where`: what needs one."""
    if not sys.platform.startswith("linux"):
        problem = "programs of a model run in a sandbox of the Linux kernel"
        raise UserError(problem, where=where, fix="use Linux")
    program = "import math, json, re, statistics\ndef f(x): return math.isqrt(x)"
    if (
        problem := run_program(
            program, test="def check(f): assert f(9) == 3", entry_point="f", where=where
        )
    ) is not None:
        raise UserError(
            f"the sandbox does not work: {problem}", where=where, fix="report this error"
        )


def program_of(completion: str, *, prompt: str, entry_point: str, chat: bool) -> str:
    """The program of a completion: of a chat its first code block, else what continues the prompt."""
    text = prompt.rstrip() + ("" if completion[:1] == "\n" else "\n") + completion
    if chat:
        block = _BLOCK.search(completion)
        code = block[1] if block else completion
        is_complete = f"def {entry_point}" in code
        text = (
            "\n".join([*_IMPORTS.findall(prompt), code])
            if is_complete
            else f"{prompt.rstrip()}\n{code}"
        )
    return f"{text}\n"
