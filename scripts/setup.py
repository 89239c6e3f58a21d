"""Makes .venv once: the PyTorch build that fits this machine, Bloomery, and what the tests need when asked for it.

    python3 scripts/setup.py [test] [check] [docs]

Standard library only. TORCH=2.9.1 or TORCH="any words for pip install" chooses another PyTorch. The build that was
chosen is pinned in .venv/pip.conf, so that no later `pip install` in that environment replaces it.
"""

# an older Python must reach the error that names the version needed
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP, LOG, PIN = VENV / "set-up.json", VENV / "set-up.log", VENV / "torch-pin.txt"
PINNED = (
    *("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "triton-xpu"),
    *("torchvision", "torchaudio"),
)
EXTRAS = {
    "test": "pytest and what the tests compare with",
    "check": "ruff, mypy, import-linter",
    "docs": "mkdocs",
}
SUPPORTED = ((3, 11), (3, 14))
WIDTH = 100


class SetUpError(Exception):
    """An error of the set-up, with its fix."""


def main() -> int:
    """Exit code 0 when .venv is ready, 1 with a sentence when it cannot be made."""
    wanted = [word for word in sys.argv[1:] if word in EXTRAS]
    unknown = [word for word in sys.argv[1:] if word not in EXTRAS]
    if unknown:
        print(
            f"error: {unknown[0]!r} is no part of the set-up; there are: {', '.join(EXTRAS)}",
            file=sys.stderr,
        )
        return 2
    try:
        _outside_of_venv()
        _suitable_python()
        _set_up(wanted)
    except SetUpError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    return 0


def _outside_of_venv() -> None:
    """Continue in the Python that .venv was made from when .venv is activated: it is no base of itself."""
    if sys.prefix != sys.base_prefix and Path(sys.prefix).resolve() == VENV.resolve():
        base = sys._base_executable  # type: ignore[attr-defined]
        os.execv(base, [base, *sys.argv])


def _suitable_python() -> None:
    """Continue in a newer Python of this machine when `python3` is too old, or not yet supported."""
    low, high = SUPPORTED
    if low <= sys.version_info[:2] <= high:
        return
    for minor in range(high[1], low[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        if (
            other
            and subprocess.run(
                [other, "-c", "import venv"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            os.execv(other, [other, *sys.argv])
    version = ".".join(map(str, sys.version_info[:3]))
    needed = f"Bloomery needs Python 3.{low[1]} to 3.{high[1]}, and this is {version}"
    raise SetUpError(
        f"{needed}\nfix:   install one of them, or make setup PYTHON=/path/to/python3.12"
    )


def _set_up(wanted: list[str]) -> None:
    stamp = _stamp()
    done = _done(stamp)
    if done is None:
        with _line(_announcement) as line:
            _make_environment(line)
            _install_torch(line)
            _install_bloomery(wanted, line)
        done = wanted
    missing = [name for name in wanted if name not in done]
    if missing:
        with _line(
            lambda: " and ".join(EXTRAS[name] for name in missing) + " go into .venv, once"
        ) as line:
            _install_pinned(_requirements(missing), line)
    if missing or _made() == {}:
        STAMP.write_text(json.dumps({**stamp, "extras": sorted({*done, *missing})}))


# What is there already


def _stamp() -> dict[str, object]:
    """What an environment depends on: change any of it, and set-up runs again."""
    import tomllib  # not before the version of Python is known to be new enough

    digest = hashlib.sha256()
    digest.update(
        json.dumps(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]).encode()
    )
    wheels = tuple(f"src/bloomery/hardware/{name}" for name in ("wheels.py", "wheels.toml"))
    for name in ("constraints.txt", "scripts/setup.py", *wheels):
        digest.update((ROOT / name).read_bytes())
    python = ".".join(map(str, sys.version_info[:2]))
    place = {"place": str(VENV), "python": python, "gpu": _gpu_hint()}
    return {"inputs": digest.hexdigest(), "torch": _asked_torch(), **place}


@cache
def _asked_torch() -> str:
    """The variable TORCH; where it is empty, its value when .venv was made."""
    return os.environ.get("TORCH", "").strip() or str(_made().get("torch", ""))


def _made() -> dict[str, object]:
    """The stamp that the last set-up left, empty when it did not finish."""
    try:
        made = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return made if isinstance(made, dict) else {}


def _done(stamp: dict[str, object]) -> list[str] | None:
    """The extras that are installed, or None when the environment is missing, unfinished or of another kind."""
    made = _made()
    extras = made.pop("extras", [])
    return list(extras) if isinstance(extras, list) and made == stamp and PYTHON.exists() else None


def _gpu_hint() -> str:
    """Cheap enough for every call: the AMD and Intel chips, and whether NVIDIA's driver is loaded."""
    nvidia = "nvidia" if Path("/proc/driver/nvidia/version").exists() else ""
    return " ".join(filter(None, [*_amd_chips(), nvidia, *_intel_chips()]))


def _amd_chips() -> list[str]:
    from bloomery.hardware.kfd import read_kfd

    nodes = read_kfd()
    return [node.arch for node in nodes if not node.integrated] or [node.arch for node in nodes]


def _intel_chips() -> list[str]:
    from bloomery.hardware.intel import read_intel

    return [gpu.arch for gpu in read_intel() if gpu.node]


@cache
def _gpu() -> tuple[str | None, int | None]:
    """(gfx1031, sm_86, xe2-hpg or None, NVIDIA's driver). Of several vendors AMD comes first, Intel last."""
    chips = _amd_chips()
    if chips:
        return chips[0], None
    arch, driver = _nvidia_gpu()
    return arch or next(iter(_intel_chips()), None), driver


def _nvidia_gpu() -> tuple[str | None, int | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    query = [program, "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None, None
    found = re.match(r"\s*(\d+)\.(\d+), *(\d+)", answer)
    return (f"sm_{found[1]}{found[2]}", int(found[3])) if found else (None, None)


# Making it


@dataclass(frozen=True)
class Torch:
    """Which PyTorch: `words` for pip, none when the interpreter's own is kept; `name` for the progress line."""

    name: str
    words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@cache
def _torch() -> Torch:
    from bloomery.hardware.wheels import DEFAULT_TORCH, detect_site, index_answers, torch_builds

    asked = _asked_torch()
    if asked and not re.fullmatch(r"\d+(\.\d+)+", asked):
        return Torch(f"TORCH asks for {asked}, which", tuple(shlex.split(asked)))
    arch, driver = _gpu()
    own = "" if asked else _own_torch(arch)
    if own:
        return Torch(f"this interpreter's PyTorch {own} stays; the rest")
    build = torch_builds(
        arch,
        python=(sys.version_info[0], sys.version_info[1]),
        system=platform.system(),
        cpu_arch=platform.machine(),
        torch=asked or DEFAULT_TORCH,
        driver=driver,
        site=detect_site(),
    )[0]
    plain = arch is None and not build.before
    notes = [] if plain else [build.reason, *(f"never {rule}" for rule in build.never)]
    notes += [f"first, in this shell and in every job: {command}" for command in build.before]
    notes += [
        f"put {name}={value} into the environment of every run" for name, value in build.environment
    ]
    words = build.arguments
    if build.cpu and build.index and not index_answers(build.index):
        notes.append(f"{build.index} does not answer: your own package index serves")
        words = [build.requirement]
    return Torch(
        _named(build.requirement) + (" for the CPU" if build.cpu else ""),
        tuple(words),
        tuple(notes),
    )


def _named(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return f"PyTorch {version}" + (f" as {name}" if name != "torch" else "")


def _announcement() -> str:
    arch, _ = _gpu()
    gpu = f"{arch} found" if arch else "no GPU found"
    return f"Python {platform.python_version()}, {gpu}: {_torch().name} goes into .venv, once"


def _own_torch(arch: str | None) -> str:
    """The version of the PyTorch that this interpreter brings (a container, a module of an HPC site), if it fits."""
    from bloomery.hardware.wheels import fits

    script = (
        "import json, torch; t = torch.version; "
        "print(json.dumps([torch.__version__, t.hip, t.cuda, torch.cuda.get_arch_list(), getattr(t, 'xpu', None)]))"
    )
    if importlib.util.find_spec("torch") is None:
        return ""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True
        )
        version, hip, cuda, kernels, xpu = json.loads(answer.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return ""  # one that cannot be imported
    problem = fits(arch, torch=version, hip=hip, cuda=cuda, kernels=kernels, xpu=xpu)
    return "" if problem else str(version)


class _line:
    """One line: what is being done, and at its end how long it took. On a terminal a second one, rewritten each second,
    has pip's newest words.
    """

    def __init__(self, text: Callable[[], str]) -> None:
        self.text, self.describe = "set-up     ", text
        self.moving = sys.stdout.isatty()

    def __enter__(self) -> _line:
        self.began = time.monotonic()
        # a package index that is asked may take seconds to answer
        print(self.text, end="", flush=True)
        words = self.describe() + " "
        print(words, end="", flush=True)
        self.text += words
        return self

    def note(self, text: str) -> None:
        """A line of its own below the one that is being written."""
        self.show("")
        print(f"\n           {text}", end="", flush=True)
        self.text = f"           {text} "

    def show(self, progress: str) -> None:
        """Below the line that is being written, until the next call; "" clears it."""
        if self.moving:
            columns = shutil.get_terminal_size().columns
            below = f"           {time.monotonic() - self.began:.0f} s  {progress}"[
                : min(WIDTH, columns) - 1
            ]
            back = f"\x1b[A\x1b[{len(self.text) % columns + 1}G"
            print(f"\n\x1b[K{below if progress else ''}{back}", end="", flush=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.show("")
        if kind is None:
            seconds = f" {time.monotonic() - self.began:.0f} s"
            width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
            print("." * max(3, width - len(self.text) % width - len(seconds)) + seconds, flush=True)


def _make_environment(line: _line) -> None:
    """Make .venv, or bring an unfinished one up to date; one of another Python is cleared."""
    if (
        not (VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}").is_dir()
        or not PYTHON.exists()
    ):
        shutil.rmtree(VENV, ignore_errors=True)
    shared = [] if _torch().words else ["--system-site-packages"]
    with TemporaryFile() as written:
        code = _watched(
            [sys.executable, "-m", "venv", *shared, str(VENV)],
            written,
            lambda: line.show("making .venv"),
        )
        written.seek(0)
        said = written.read().decode("utf-8", errors="replace")
    if code:
        hint = (
            f"sudo apt install python3.{sys.version_info[1]}-venv"
            if "ensurepip" in said
            else "see the lines above"
        )
        raise SetUpError(f".venv cannot be made\n{said.strip()}\nfix:   {hint}")
    STAMP.unlink(missing_ok=True)
    LOG.write_text("")
    # this Python is itself an environment (rocm/pytorch's /opt/venv)
    if shared and sys.prefix != sys.base_prefix:
        folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
        own = VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (own / "interpreters-packages.pth").write_text("".join(lines))


def _install_torch(line: _line) -> None:
    """Install the chosen build, then pin whatever is there now."""
    PIN.write_text("")
    (VENV / "pip.conf").write_text(f"[install]\nconstraint = {PIN.as_uri()}\n")
    for note in _torch().notes:
        line.note(note)
    try:
        _pip(["pip>=25"], line)  # older ones take twice as long to choose versions
    except SetUpError:
        line.note("pip cannot be upgraded: the set-up takes longer")
    if _torch().words:
        _pip([*_torch().words], line)
    _write_pin()


def _write_pin() -> None:
    script = (
        "from importlib import metadata as m\n"
        f"for name in {PINNED!r}:\n"
        "    try: print(f'{name}=={m.version(name)}')\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    found = subprocess.run(
        [str(PYTHON), "-c", script], capture_output=True, text=True, check=True
    ).stdout
    if "torch==" not in found:
        raise SetUpError(
            f"pip ended well, but no PyTorch is in .venv\nwhere: {LOG}\nfix:   make clean-venv setup"
        )
    PIN.write_text(
        "# Chosen by scripts/setup.py for the GPU of this machine; pip refuses to replace it.\n"
        + found
    )


def _install_bloomery(extras: list[str], line: _line) -> None:
    # The demo ends with a GGUF file, and the README begins with studio.
    _install_pinned(["-e", f"{ROOT}[{','.join(['gguf', 'studio', *extras])}]"], line)


def _requirements(extras: list[str]) -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        requirement for name in extras for requirement in project["optional-dependencies"][name]
    ]


def _install_pinned(words: list[str], line: _line) -> None:
    """At the versions that the tests passed with, or newer ones where those do not exist for this Python."""
    try:
        _pip(["-c", (ROOT / "constraints.txt").as_uri(), *words], line)
    except SetUpError as error:
        if not re.search(
            "No matching distribution|ResolutionImpossible|conflicting dependencies", str(error)
        ):
            raise
        line.note(
            "constraints.txt does not suit this Python or package index: newer versions instead"
        )
        _pip(words, line)


def _pip(words: list[str], line: _line) -> None:
    """pip writes to the log; its newest line is shown each second."""
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--no-input",
        # Python compiles what it imports, unless it is told to write nothing: each command would compile it again.
        *([] if os.environ.get("PYTHONDONTWRITEBYTECODE") else ["--no-compile"]),
        "--disable-pip-version-check",
        *words,
    ]
    with LOG.open("ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        begin = log.tell()
        code = _watched(
            command, log, lambda: line.show((_log_since(begin) or ["starting pip"])[-1].strip())
        )
    if code:
        tail = "\n".join(_log_since(begin)[-12:])
        fix = "read the lines above; the same command continues where it stopped"
        raise SetUpError(
            f"pip could not install {shlex.join(words)}\n{tail}\nwhere: {LOG}\nfix:   {fix}"
        )


def _watched(command: list[str], output: IO[bytes], show: Callable[[], None]) -> int:
    """The exit code of a program that writes to `output`. `show` is called each second until it ends.

    Ctrl+C reaches the program, too: both are in one process group.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    while True:
        show()
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            continue


def _log_since(begin: int) -> list[str]:
    return LOG.read_bytes()[begin:].decode("utf-8", errors="replace").strip().splitlines()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
