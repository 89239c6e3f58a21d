"""The commands of the tutorial on GGUF run as printed, and llama.cpp answers as PyTorch does.

`BLOOMERY_UPDATE=1 pytest -m soak tests/docs/test_gguf_tutorial.py` writes their output into the page.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_tutorials_run import FILES
from words_of_docs import ROOT

PAGE = ROOT / "docs/tutorials/from-a-gguf-file.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
WIDTH = 150


def run(line: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}"
    passing = r"^(WARNING: |loading  |progress  |tokens +\d+%|checksums +\d).*\n"
    text = re.sub(passing, "", done.stdout, flags=re.MULTILINE)
    return "".join(
        f"{each.rstrip()[:WIDTH]}\n"
        for each in text.replace(str(folder), "~/bloomery").splitlines()
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)  # every command of the page, on a real model
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="not installed: llama-cpp-python")
def test_the_whole_way(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, content in FILES.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("python", "bloomery", "pip"):
        words = "-m bloomery" if name == "bloomery" else "-m pip" if name == "pip" else ""
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }
    said: dict[str, str] = {}

    def ran(block: re.Match[str]) -> str:
        lines = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
        for line in lines:
            said[line] = run(line, tmp_path, environment)
        return "```console\n" + "".join(f"$ {line}\n{said[line]}" for line in lines) + "```"

    written = BLOCK.sub(ran, text)
    if os.environ.get("BLOOMERY_UPDATE"):
        PAGE.write_text(written, encoding="utf-8")
    answers = {
        line: output.splitlines()[-1]
        for line, output in said.items()
        if "ask.py" in line or "chat" in line
    }
    before, after = (
        next(text for line, text in answers.items() if f"chat {name} " in line)
        for name in ("smollm2", "tuned")
    )
    assert before != after
    assert answers["python ask.py tuned-f16.gguf"] == after
    assert answers["python ask.py base-f16.gguf tuned-lora.gguf"] == after
    assert answers["python ask.py tuned-q8_0.gguf"] and answers["python ask.py tuned-q4_0.gguf"]
