"""The Dockerfiles, read as Docker reads them: no engine runs here, so what can be checked in the text is checked."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
KNOWN = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD"}

each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest), comments dropped and continued lines joined."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split(" ", 1)[0], re.sub(r"\s+", " ", line.split(" ", 1)[1])) for line in lines if line.strip()]


def of(file: Path, word: str) -> list[str]:
    return [rest for name, rest in instructions(file) if name == word]


def test_there_is_one_for_each_kind_of_machine():
    assert [file.name for file in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda", "Dockerfile.rocm"]


@each
def test_only_instructions_that_are_meant(file):
    """No EXPOSE and no ADD of an address: nothing listens, nothing is fetched unseen."""
    assert {word for word, _ in instructions(file)} <= KNOWN
    assert of(file, "CMD") == ['["bloomery", "doctor"]']


@each
def test_bases_are_pinned(file):
    defaults = dict(re.findall(r"(\w+)=\"?([^\"\s]+)", " ".join(of(file, "ARG"))))
    for base in of(file, "FROM"):
        name = defaults[base.strip("${}")] if base.startswith("$") else base
        image, _, tag = name.partition(":")
        assert image in ("rocm/pytorch", "python")
        assert re.search(r"\d+\.\d+", tag), name
        assert "latest" not in tag


@each
def test_what_is_copied_exists_and_no_secret_is(file):
    for rest in of(file, "COPY"):
        source, target = rest.split()
        assert (ROOT / source).exists()
        assert target == "."
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert {".git", ".venv", "runs", ".env"} <= set(ignored)


@each
def test_torch_comes_from_set_up_alone(file):
    """`make test` runs the same script; a `pip install torch` in an image would replace what the base brings."""
    commands = " ".join(of(file, "RUN"))
    assert commands.count("python3 scripts/setup.py") == 1
    assert (ROOT / "scripts/setup.py").is_file()
    assert "pip install" not in commands
    assert "torch" not in " ".join(rest for word, rest in instructions(file) if word == "ENV")


def test_the_rocm_image_proves_that_its_torch_survived():
    file = next(file for file in FILES if file.name.endswith("rocm"))
    command = next(rest for rest in of(file, "RUN") if "setup.py" in rest)
    assert 'test "$before" = "$after"' in command
    assert command.index("before=") < command.index("setup.py") < command.index("after=")


def check(before: str, after: str) -> int:
    """The last words of the ROCm image's RUN, in a shell."""
    file = next(file for file in FILES if file.name.endswith("rocm"))
    command = next(rest for rest in of(file, "RUN") if "setup.py" in rest)
    ending = command[command.index("test ") :]
    done = subprocess.run(["sh", "-c", f'before="{before}"; after="{after}"; {ending}'], check=False)
    return done.returncode


def test_that_proof_can_fail():
    assert check("2.9.1+rocm7.2 7.2.53211", "2.9.1+rocm7.2 7.2.53211") == 0
    assert check("2.9.1+rocm7.2 7.2.53211", "2.13.0+cu130 None") != 0
    assert check("2.9.1+cpu None", "2.9.1+cpu None") != 0


@each
def test_the_shell_accepts_every_command(file):
    for command in of(file, "RUN"):
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
