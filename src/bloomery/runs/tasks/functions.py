"""Function tasks: the model writes the body of a function, a sandbox runs its tests, pass@k counts.

Rows as in HumanEval (Chen et al. 2021): `prompt` is the beginning of a program, `test` defines check(candidate). The
sandbox runs untrusted Python programs: without network, files or rights, with limits, and nothing of them survives.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bloomery.core.child import kill_group
from bloomery.core.errors import UserError
from bloomery.core.units import MIB
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.model.decoder import Decoder
from bloomery.model.decoding import Sampling
from bloomery.runs.tasks.items import Item, Request, Settings, Task, TaskScores, asking, complete, fitted_prompts
from bloomery.runs.tasks.statistics import Scores, pass_at_k

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


STDLIB = "stdlib-functions"
PACKAGED = Path(__file__).with_name(f"{STDLIB}.jsonl")
SAMPLED = 0.8  # temperature of several samples; one is greedy
_KS = (1, 10, 100)
_ENDS = ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nimport ", "\nfrom ", "\n```", "\nassert ")
_ASKED = "Complete this Python function. Reply with the whole function in one code block.\n\n```python\n{}\n```"
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_IMPORTS = re.compile(r"^(?:import|from) .*$", re.MULTILINE)


def refuse_settings(task: Task, settings: Settings) -> None:
    """Raises UserError for settings of another kind of task, and for function tasks without `run_code`."""
    functions = task.kind == "functions"
    given = {"--shots": settings.shots, "--extract": settings.extract} if functions else {}
    given |= {} if functions else {"--samples": settings.samples > 1, "--run-code": settings.run_code}
    if wrong := next((flag for flag, value in given.items() if value), None):
        raise UserError(f"{wrong} does not apply to {task.kind} tasks", where=wrong, fix=f"remove {wrong}", code=2)
    if functions and not settings.run_code:
        problem = "this task runs the programs that the model writes"
        fix = "add --run-code: a sandbox without network and files runs them, with limits of time, memory and processes"
        raise UserError(problem, where=task.name, fix=fix, code=2)


def solve(decoder: Decoder, tokenizer: Tokenizer, task: Task, settings: Settings) -> TaskScores:
    """pass@1 and, of several samples, pass@k up to their number. Raises UserError where there is no sandbox."""
    items, samples, new_tokens = task.items[: settings.limit], settings.samples, settings.most(decoder)
    temperature = settings.temperature if settings.temperature is not None else SAMPLED * (samples > 1)
    with asking(tokenizer, settings) as asker:
        if settings.chat:
            prompts = [asker.turns([Message("user", _ASKED.format(item.prompt.strip()))]) for item in items]
            stops: tuple[str, ...] = asker.stops
        else:
            prompts = [tokenizer.prefix + tokenizer.encode(item.prompt.rstrip()) for item in items]
            stops = (*settings.stop, *_ENDS)
        prompts, notes = fitted_prompts(decoder, prompts, new_tokens)
        settings_of = [
            Sampling(max_new_tokens=new_tokens, temperature=temperature, seed=settings.seed + number,
                     stop_ids=asker.stop_ids)
            for number in range(samples)
        ]  # fmt: skip
        requests = [Request(ids, sampling, stops) for ids in prompts for sampling in settings_of]
        completions = complete(decoder, tokenizer, requests)
    outputs, passed = [], []
    for number, item in enumerate(items):
        written = completions[number * samples : (number + 1) * samples]
        results = [run_program(program_of(item, text, chat=settings.chat), banned=item.banned) for text in written]
        passed.append(sum(one is None for one in results))
        outputs.append({"item": item.name, "passed": passed[-1], "completions": written, "failures": results})
    return TaskScores(tuple(scores_of(passed, samples)), tuple(outputs), tuple(notes))


def scores_of(passed: Sequence[int], samples: int) -> list[Scores]:
    """pass@k for k of 1, 10, 100 and the number of samples, from the samples of each item that passed."""
    return [
        Scores(f"pass@{k}", np.array([pass_at_k(samples, count, k) for count in passed]), np.ones(len(passed)))
        for k in sorted({*_KS, samples})
        if k <= samples
    ]


def program_of(item: Item, completion: str, *, chat: bool) -> str:
    """The program that tests a completion: of a chat its first code block, else what continues the prompt."""
    text = item.prompt.rstrip() + ("" if completion[:1] == "\n" else "\n") + completion
    if chat:
        block = _BLOCK.search(completion)
        code = block[1] if block else completion
        whole = f"def {item.entry_point}" in code
        text = "\n".join([*_IMPORTS.findall(item.prompt), code]) if whole else f"{item.prompt.rstrip()}\n{code}"
    return f"{text}\n\n{item.test}\n\ncheck({item.entry_point})\n"
