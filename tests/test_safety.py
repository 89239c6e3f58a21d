"""What the source never does: open pickles, run text, listen on a port; and what no tracked file holds."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
CALLS = {
    "torch.load",
    "torch.save",
    "eval",
    "exec",
    "compile",
    "os.system",
    "os.popen",
    "__import__",
    "yaml.load",
}
MODULES = {
    "pickle",
    "dill",
    "marshal",
    "shelve",
    "cloudpickle",
    "joblib",
    "socketserver",
    "http.server",
    "asyncio",
}
KEYWORDS = {"allow_pickle", "shell", "trust_remote_code"}
# A port that ranks meet at is found by binding to it on this host; nothing listens there before torch does.
# `bloomery serve` listens, for it is a server: on 127.0.0.1, elsewhere only with a token (tests/serve).
# Functions that `bloomery.train` is given are asked through sockets in a folder of this user alone, which have no port.
# graded.py is the program of two processes inside the sandbox of the reward unit_tests (tests/core/test_sandbox.py).
ALLOWED = {
    "src/bloomery/core/ports.py": ["listener.bind", "listener.bind"],
    "src/bloomery/core/sandbox/graded.py": [
        "compile",
        "exec",
        "compile",
        "exec",
        "exec",
        "eval",
        "compile",
    ],
    # On 127.0.0.1, or the address of the launch's meeting; who connects has to send the token of a private file.
    "src/bloomery/launch/rank_messages.py": [
        "import asyncio",
        "from asyncio",
        "listener.bind",
        "listener.listen",
    ],
    "src/bloomery/serve/app.py": ["import asyncio"],
    "src/bloomery/serve/connections.py": ["import asyncio"],
    "src/bloomery/serve/guard.py": ["import asyncio"],
    "src/bloomery/serve/address.py": ["listener.bind"],
    "src/bloomery/serve/listen.py": [
        "import asyncio",
        "listen",
        "listener.listen",
        "listener.listen",
    ],
    "src/bloomery/serve/server_tools.py": ["import asyncio"],
    "src/bloomery/serve/tokenizing.py": ["import asyncio"],
    "src/bloomery/studio/application.py": ["listen"],  # that of serve/listen.py
    "src/bloomery/studio/chat_page.py": ["import asyncio"],
    "src/bloomery/studio/compare_page.py": ["import asyncio"],
    "src/bloomery/studio/data_given.py": ["import asyncio"],
    "src/bloomery/studio/deleting.py": ["import asyncio"],
    "src/bloomery/studio/export_dialogs.py": ["import asyncio"],
    "src/bloomery/studio/fitting_models.py": ["import asyncio"],
    "src/bloomery/studio/machine_page.py": ["import asyncio"],
    "src/bloomery/studio/models_page.py": ["import asyncio"],
    "src/bloomery/studio/new_run_page.py": ["import asyncio"],
    "src/bloomery/studio/post_mortem.py": ["import asyncio"],
    "src/bloomery/studio/run_notes_view.py": ["import asyncio"],
    "src/bloomery/studio/run_page.py": ["import asyncio"],
    "src/bloomery/studio/run_samples.py": ["import asyncio"],
    "src/bloomery/studio/run_sections.py": ["import asyncio"],
    "src/bloomery/studio/runs_page.py": ["import asyncio"],
    "src/bloomery/studio/sensors.py": ["import asyncio"],
    "src/bloomery/studio/sweep_section.py": ["import asyncio"],
    "src/bloomery/train/rl/reward_functions.py": ["listener.bind", "listener.listen"],
    "src/bloomery/train/rl/task_sets.py": ["import asyncio"],
    # A socket of the host in a folder of this user, for the ranks of the run.
    "src/bloomery/train/scorers/process.py": ["listener.bind", "listener.listen"],
}
METHODS = {"listen", "bind", "serve_forever"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of the expression; `ast.unparse` alone would take seconds for all calls."""
    if isinstance(node, ast.Name):
        return node.id
    return (
        f"{dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Attribute)
        else ast.unparse(node)
    )


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in CALLS or called.rpartition(".")[2] in METHODS:
                yield called
            for keyword in node.keywords:
                refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in KEYWORDS and not refused:
                    yield f"{called}({keyword.arg}=...)"


def test_no_pickle_no_shell_no_port() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): sorted(faults(ast.parse(path.read_bytes())))
        for path in FILES
    }
    allowed = {name: sorted(faults) for name, faults in ALLOWED.items()}
    assert {name: faults for name, faults in found.items() if faults} == allowed


def test_the_test_sees_what_it_looks_for() -> None:
    bad = [
        "import pickle",
        "torch.load(x)",
        "run(x, shell=True)",
        "np.load(x, allow_pickle=True)",
        "eval(x)",
    ]
    assert len(list(faults(ast.parse("\n".join(bad))))) == len(bad)
    assert (
        list(faults(ast.parse("np.load('x', allow_pickle=False); model.eval(); re.compile('x')")))
        == []
    )


def test_tracked_files_hold_no_secrets_and_no_weights() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    refused = (".pt", ".pth", ".bin", ".pkl", ".safetensors", ".gguf", ".env")
    assert not [path for path in files if path.suffix in refused]
    shape = re.compile(
        r"hf_[A-Za-z0-9]{34}|gh[pousr]_[A-Za-z0-9]{36}|AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE KEY"
    )
    own = ROOT / "src"
    assert not [
        path
        for path in files
        if path.is_relative_to(own) and shape.search(path.read_text(errors="replace"))
    ]
