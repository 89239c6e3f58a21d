"""The real command line, in this process or as one of its own, and what every refusal must look like."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import preloaded
from bloomery import cli
from small_words import SMALL_WORDS

MODEL = """{family: llama, hidden_size: 16, intermediate_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1,
        head_dim: 8, max_positions: 32}"""
RECIPE = f"""
model: {MODEL}
tokenizer: {{train: {{kind: bpe, vocab_size: 300}}}}
data: {{path: text, sequence_length: 32, validation: 20%, num_proc: 1}}
optimizer: {{warmup: 1 steps}}
train: {{max_steps: 6, tokens_per_step: 64, micro_batch_size: 2, precision: float32, compile: false}}
checkpoint: {{every: 2 steps, keep: 2}}
eval: {{every: 3 steps}}
"""
PATIENCE_SECONDS = 120.0
LIMIT_LINES = 4


@dataclass(frozen=True)
class Result:
    """What a person saw."""

    code: int
    out: str
    err: str


def here(*words: str) -> Result:
    """The command line in this process and its working folder. What nothing catches is raised."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli._run(list(words), debug=False)
    return Result(code, out.getvalue(), err.getvalue())


def process(
    *words: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    code: str = "",
    timeout: float = PATIENCE_SECONDS,
    forked: bool = True,
) -> Result:
    """`bloomery words` as a process in `folder`; `code` runs in it before. Without `forked` it starts from nothing."""
    popen = preloaded.Popen if forked else subprocess.Popen
    done = preloaded.run(
        [*python(code), *words],
        popen=popen,
        cwd=folder,
        env=os.environ | dict(environment or {}),
        timeout=timeout,
        start_new_session=True,
    )
    return Result(
        done.returncode, *(text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    )


def python(code: str = "") -> list[str]:
    """Words that start the command line, after `code`."""
    if not code:
        return [sys.executable, "-m", "bloomery"]
    return [
        sys.executable,
        "-c",
        f"{code}\nimport runpy; runpy.run_module('bloomery', run_name='__main__')",
    ]


def assert_clear(
    result: Result, *, code: int = 1, mentions: Sequence[str] = (), lines: int = LIMIT_LINES
) -> None:
    """One sentence, where, and what to do; the exit code of the contract; no traceback."""
    shown = f"exit code {result.code}\n{result.err}"
    assert result.code == code, shown
    for forbidden in ("Traceback", "stumbled", 'File "', "\x1b"):
        assert forbidden not in result.err, shown
    error = result.err[result.err.find("error: ") :]
    assert error.startswith("error: "), shown
    assert len(error.splitlines()) <= lines, shown
    assert re.search(r"^fix:   \S", error, re.MULTILINE), shown
    assert max(map(len, error.splitlines())) < 600, shown
    for word in mentions:
        assert word in error, f"{word!r} is not in\n{shown}"


def write_workshop(folder: Path, *, documents: int = 30) -> Path:
    """A folder with a tiny recipe and its text; returns the recipe."""
    text = folder / "text"
    text.mkdir(parents=True)
    for number in range(documents):
        chosen = (
            SMALL_WORDS[(number * 7 + place * place) % len(SMALL_WORDS)] for place in range(60)
        )
        (text / f"{number}.txt").write_text(" ".join(chosen))
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder / "tiny.yaml"
