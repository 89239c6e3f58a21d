"""One recipe with several versions of PyTorch: what is refused, the environments, and which version wins."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.bench import environments, measuring, torch_versions
from bloomery.bench.environments import (
    PREFIX,
    Download,
    cache_variables,
    make_environment,
    refusal,
    remove_orphans,
    share_packages,
    throwaway_folder,
    torch_of,
)
from bloomery.bench.torch_versions import (
    Comparison,
    MeasuredRelease,
    Release,
    loss_spread,
    measure,
    ratio,
    releases_to_compare,
    verdict,
)
from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.hardware.detect import detect
from bloomery.hardware.profile import with_gpu
from bloomery.hardware.specs import find_gpu

HERE = Path(__file__).parent
INSTALLED = (detect().software.torch or "").partition("+")[0]
OTHER = "2.12.1" if INSTALLED != "2.12.1" else "2.11.0"


class FakePip:
    """Writes a package that calls itself torch and has the asked version."""

    def __init__(self, environment) -> None:
        del environment
        self.installed: list[tuple[str, ...]] = []
        self.imported_version = ""  # another one than was asked for

    def downloads(self, python, arguments):
        assert python.exists()
        return [Download(name=arguments[-1].replace("==", " "), bytes=200_000_000)]

    def install(self, python, arguments, on_line):
        self.installed.append(tuple(arguments))
        on_line("Collecting torch")
        version = self.imported_version or arguments[-1].partition("==")[2]
        (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
        (packages / "torch").mkdir()
        (packages / "torch/__init__.py").write_text(
            f"__version__ = '{version}+cpu'\nclass version: hip = None; cuda = None\n"
        )


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """Children that reply what the returned function is given, by environment, and the environments that ran."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}".strip(":"))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(measuring, "CHILD", "measured_bench")
    monkeypatch.setattr(torch_versions, "index_answers", lambda index: False)

    def set_figures(**by_environment) -> Path:
        monkeypatch.setenv("FIGURES", json.dumps(by_environment))
        return tmp_path / "ran"

    return set_figures


# What is refused


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "2 to 6 versions can be compared, not 0"),
        ("2.9.0,2.9.1,2.10.0,2.11.0,2.12.0,2.12.1,2.13.0", "not 7"),
        ("newest,2.12.1", "not a release of PyTorch: 'newest'"),
        ("2.13.0+rocm7.2,2.12.1", "not a release of PyTorch: '2.13.0+rocm7.2'"),
        ("2.8.0,2.12.1", "PyTorch 2.8.0 is too old: Bloomery needs 2.9 or newer"),
        ("2.12,2.12.0", "PyTorch 2.12.0 is named twice"),
        (INSTALLED, "is installed here: it would be compared with itself"),
    ],
)
def test_what_is_no_pair_of_versions_is_refused(text, problem):
    with pytest.raises(UserError) as refused:
        releases_to_compare(text, detect())
    assert problem in refused.value.problem and refused.value.code == 2


def test_a_version_without_a_wheel_for_the_gpu_is_refused():
    machine = with_gpu(detect(), find_gpu("780M 32GB"))  # gfx1103: first in AMD's wheels of 2.11
    assert releases_to_compare("2.11.0,2.12.0", machine)
    with pytest.raises(UserError, match=r"PyTorch 2.9.1 has no wheel for this GPU: .* gfx1103"):
        releases_to_compare("2.9.1,2.12.0", machine)


@pytest.mark.parametrize(
    ("gpu", "index", "requirement"),
    [
        ("RX 7900 XTX", "https://download.pytorch.org/whl/rocm7.1", "torch==2.10.0+rocm7.1"),
        ("MI50 32GB", "https://download.pytorch.org/whl/rocm6.3", "torch==2.9.1+rocm6.3"),
        ("H100", None, "torch==2.10.0"),
        (None, "https://download.pytorch.org/whl/cpu", "torch==2.10.0"),
    ],
)
def test_each_version_comes_from_the_index_of_the_machine(gpu, index, requirement, monkeypatch):
    monkeypatch.setattr(torch_versions, "index_answers", lambda index: True)
    machine = detect().model_copy(update={"accelerators": ()})
    if gpu is not None:
        machine = with_gpu(machine, find_gpu(gpu))
    software = machine.software.model_copy(update={"torch": "2.14.0", "build": None})
    machine = machine.model_copy(update={"software": software})
    release = requirement.partition("==")[2].partition("+")[0]
    release, _ = releases_to_compare(f"{release},2.11.0", machine)
    assert release.arguments == (*(("--index-url", index) if index else ()), requirement)


def test_the_installed_version_is_not_downloaded_and_the_users_index_serves(monkeypatch):
    monkeypatch.setattr(torch_versions, "index_answers", lambda index: False)
    machine = detect().model_copy(update={"accelerators": ()})
    first, second = releases_to_compare(OTHER, machine)
    assert (first.version, first.is_installed) == (INSTALLED, True)
    assert second.arguments == (f"torch=={OTHER}",) and "does not answer" in second.note


LISTED = (
    "ERROR: Could not find a version that satisfies the requirement torch=={} (from versions: {})"
)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (LISTED.format("9.9.9", "2.12.1, 2.13.0"), "no such wheel for Python"),
        (
            "WARNING: Retrying: NameResolutionError(...)\n" + LISTED.format("2.12.1", "none"),
            "the package index does not answer",
        ),
        (LISTED.format("2.12.1", "none"), "the package index has no PyTorch"),
        (
            "    The user requested (constraint) torch<=2.14.1\nERROR: Cannot install torch",
            "a constraint of pip torch<=2.14.1 excludes it",
        ),
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: broken wheel", "pip failed: broken wheel"),
    ],
)
def test_each_failure_of_pip_is_a_sentence(output, problem):
    error = refusal(output.splitlines(), ["torch==9.9.9"])
    assert problem in error.problem and "pip install torch==9.9.9" in error.where


def wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with one module that knows its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"version = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n")
    return path


def test_real_pip_installs_next_to_the_shared_packages_and_removes_none(tmp_path, monkeypatch):
    own_settings = {"PIP_CONSTRAINT": os.devnull, "PIP_CONFIG_FILE": os.devnull}
    pip = environments.Pip(os.environ | own_settings)
    shared = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel(tmp_path, "plain", "1.0")) as archive:
        archive.extractall(shared)
    monkeypatch.syspath_prepend(str(shared))
    share_packages(tmp_path / "packages")
    python = make_environment(tmp_path / "env", tmp_path / "packages")

    # pip replaces what is in its environment: the shared package is not.
    newer = wheel(tmp_path, "plain", "2.0")
    arguments = ["--no-index", str(newer)]
    (download,) = pip.downloads(python, arguments)
    assert download == Download(name="plain 2.0", bytes=newer.stat().st_size)
    lines: list[str] = []
    pip.install(python, arguments, lines.append)
    assert any("Installing" in line for line in lines)
    code = "import plain; print(plain.version)"
    answer = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "2.0"
    assert (shared / "plain/__init__.py").read_text() == "version = '1.0'\n"
    assert (shared / "plain-1.0.dist-info/METADATA").exists()

    # A version that does not exist, and the versions that do.
    wheel(tmp_path, "torch", "2.12.1")
    with pytest.raises(UserError, match="no such wheel for Python") as refused:
        pip.downloads(python, ["--no-index", "--find-links", str(tmp_path), "torch==9.9.9"])
    assert "2.12.1" in refused.value.fix


def test_without_pip_nothing_begins(monkeypatch):
    monkeypatch.setattr(environments.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip is not installed"):
        environments.Pip(os.environ)


def test_a_look_for_pip_leaves_setuptools_to_torch_compile():
    """Its finder gives up `distutils` where it is asked for pip, and `import setuptools` fails on Python 3.11."""
    program = (
        "import os; from bloomery.bench.environments import Pip; Pip(os.environ); import setuptools"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_full_disk_and_a_torch_on_the_path_are_refused_before_a_download(
    bench, figures, tmp_path, monkeypatch
):
    figures(installed={"seconds": 1})
    pip = FakePip({})
    comparison = Comparison(bench(), releases_to_compare(OTHER, detect()), tmp_path / "tmp", pip)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, GIB))
    with pytest.raises(UserError, match=r"about 1.1 GiB are needed, 1.0 GiB are free"):
        comparison.prepare(lambda phase: None)
    (tmp_path / "path/torch").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    with pytest.raises(UserError, match="PYTHONPATH has a PyTorch"):
        share_packages(tmp_path / "other")
    assert pip.installed == []


# The environments


def test_packages_are_shared_without_torch_and_what_was_compiled_with_it(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    for name, library in (("extension", b"\x7fELF libtorch_cpu.so"), ("plain", None)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
        files = f"{name}/__init__.py,,\n{name}-1.0.dist-info/METADATA,,\n"
        if library is not None:
            (folder / name / "_C.so").write_bytes(library)
            files += f"{name}/_C.so,,\n"
        (folder / f"{name}-1.0.dist-info").mkdir()
        (folder / f"{name}-1.0.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: torch>=2\n"
        )
        (folder / f"{name}-1.0.dist-info/RECORD").write_text(files)
    monkeypatch.syspath_prepend(str(folder))
    assert share_packages(tmp_path / "shared") == ["extension 1.0"]
    names = {path.name for path in (tmp_path / "shared").iterdir()}
    assert {"plain", "plain-1.0.dist-info", "pydantic", "pip"} <= names
    assert not {"extension", "extension-1.0.dist-info", "torch", "torchgen"} & names
    assert not [name for name in names if name.startswith("torch-")]


def test_an_environment_has_its_own_torch_and_the_packages_of_here(tmp_path):
    share_packages(tmp_path / "packages")
    python = make_environment(tmp_path / "env", tmp_path / "packages")
    with pytest.raises(UserError, match="PyTorch cannot be imported: ModuleNotFoundError"):
        torch_of(python)
    FakePip({}).install(python, ["torch==2.12.1"], lambda line: None)
    facts = torch_of(python)
    assert (facts.version, facts.hip, facts.cuda) == ("2.12.1+cpu", "", "")
    assert Path(facts.file).is_relative_to(tmp_path / "env")
    code = "import bloomery, pydantic, pip; print(pydantic.__file__)"
    answer = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert Path(answer.stdout.strip()).is_relative_to(tmp_path / "packages")


def test_an_environment_that_imports_another_version_is_refused(bench, figures, tmp_path):
    figures(installed={"seconds": 1})
    pip = FakePip({})
    pip.imported_version = "2.11.0"
    comparison = Comparison(bench(), releases_to_compare(OTHER, detect()), tmp_path / "tmp", pip)
    prepared = comparison.prepare(lambda phase: None)
    with pytest.raises(UserError, match=f"torch {OTHER} is installed, but 2.11.0"):
        comparison.install(prepared[1], lambda phase: None)


def test_the_folder_is_removed_after_an_error_and_so_are_orphans(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphan = tmp_path / f"{PREFIX}{dead.pid}-x"
    running = tmp_path / f"{PREFIX}{os.getpid()}-x"
    for folder in (orphan, running, tmp_path / f"{PREFIX}mine-x"):
        folder.mkdir()
    with pytest.raises(RuntimeError, match="a fault"), throwaway_folder() as folder:
        assert not orphan.exists() and running.exists()
        (folder / "file").write_text("")
        raise RuntimeError("a fault")
    assert not folder.exists() and (tmp_path / f"{PREFIX}mine-x").exists()
    remove_orphans(tmp_path)
    assert running.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_folder(tmp_path, number):
    code = (
        "import sys, time; from bloomery.bench.environments import throwaway_folder\n"
        "with throwaway_folder() as folder: print(folder, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    process.send_signal(number)
    process.wait(30)
    assert not folder.exists()


def test_pip_ends_with_the_command(tmp_path, monkeypatch):
    """A pip that never ends: Ctrl+C raises in the loop that reads its lines."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho Collecting torch\nexec sleep 600\n"
    )
    python.chmod(0o755)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environments.Pip(os.environ).install(python, ["torch==2.12.1"], interrupt)
    number = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{number}").exists()


def test_caches_of_kernels_are_apart():
    first, second = (set(cache_variables(Path(name)).values()) for name in ("/a", "/b"))
    assert len(first) == 3 and not first & second


# Which version wins


def results_of(row, rates, **changes):
    """Rows like `row` with these tokens per second."""
    tokens = row.plan.train.tokens_per_step
    return tuple(measuring.replace(row, step_seconds=tokens / rate, **changes) for rate in rates)


@pytest.fixture
def measured(bench):
    plan = bench().plan()
    learning = measuring.Learning(steps=5, loss_before=8.0, loss_after=6.0, grad_norm=1.0)
    row = measuring.BenchResult(
        overrides=(), plan=plan, outcome="ok", step_seconds=1.0, peak_gib=0.5, learning=learning
    )

    def made(version, rates, **changes) -> MeasuredRelease:
        return MeasuredRelease(
            release=Release(version=version, arguments=(f"torch=={version}",)),
            version=version,
            results=results_of(row, rates, **changes),
        )

    return made


def test_the_interval_is_students():
    """By hand: the logarithms are ln 2 twice and ln 4 twice, their standard error is ln 2 / sqrt(12)."""
    result = ratio([2, 2, 4, 4], [1, 1, 1, 1])
    half = 3.18 * math.log(2) / math.sqrt(12)
    assert result.value == pytest.approx(2**1.5)
    assert (math.log(result.low), math.log(result.high)) == pytest.approx(
        (1.5 * math.log(2) - half, 1.5 * math.log(2) + half)
    )
    assert ratio([2], [1]) is None


def test_the_faster_version_is_named_beyond_the_noise_alone(measured):
    slow = measured("2.12.1", [100, 90, 110, 100])
    assert verdict([slow, measured("2.13.0", [400, 370, 430, 410])]).faster.version == "2.13.0"
    assert verdict([slow, measured("2.13.0", [104, 89, 108, 107])]).faster is None
    assert verdict([slow, measured("2.13.0", [400])]).faster is None  # one round has no interval
    # Of three, it is faster than each other one.
    fast = [measured("2.13.0", [400, 401, 399]), measured("2.14.0", [400, 399, 402])]
    assert verdict([slow, *fast]).faster is None


def test_a_version_that_failed_does_not_win(measured):
    slow = measured("2.12.1", [100, 90, 110, 100])
    broken = measured("2.13.0", [400, 370], outcome="failed", message="the gradient norm is 0: ...")
    assert broken.problem.startswith("the gradient norm is 0")
    assert verdict([slow, broken]).faster is None
    lines = "\n".join(torch_versions.verdict_lines([slow, broken], "demo"))
    page = [*torch_versions.table([slow, broken]), *lines.splitlines()]
    assert max(len(line) for line in page) <= measuring.WIDTH
    assert "torch 2.13.0 cannot win: the gradient norm is 0" in lines
    assert "fewer than two versions could be measured" in lines


def test_other_losses_for_the_same_work_are_a_warning(measured):
    other = measuring.Learning(steps=5, loss_before=8.5, loss_after=6.0, grad_norm=1.0)
    pair = [measured("2.12.1", [1, 1]), measured("2.13.0", [1, 1], learning=other)]
    assert loss_spread(pair) == pytest.approx(8.5 / 8 - 1)
    assert "warning" in "\n".join(torch_versions.verdict_lines(pair, "demo"))
    assert "warning" not in "\n".join(torch_versions.verdict_lines(pair[:1] * 2, "demo"))


def command(*words: str):
    return CliRunner().invoke(
        cli, ["bench", "tiny.yaml", *words], catch_exceptions=False, standalone_mode=False
    )


def test_versions_are_measured_in_turns_with_caches_of_their_own(
    bench, figures, monkeypatch, tmp_path
):
    bench()
    ran = figures(installed={"seconds": 1.0}, **{OTHER: {"seconds": 0.25}})
    monkeypatch.setattr(environments, "Pip", FakePip)
    result = command("--torch", OTHER, "--json")
    document = json.loads(result.stdout)
    assert result.return_value == 0, result.stderr
    assert [version["version"].partition("+")[0] for version in document["versions"]] == [
        INSTALLED,
        OTHER,
    ]
    assert document["faster"] == f"{OTHER}+cpu"
    assert document["ratio"]["value"] == pytest.approx(4)
    runs = [json.loads(line) for line in ran.read_text().splitlines()]
    assert [name == OTHER for name, _ in runs] == [False, True] * torch_versions.ROUNDS
    assert len({cache for _, cache in runs}) == 2
    assert list((tmp_path / "tmp").iterdir()) == []
    # What is done is printed first, and every measurement with its loss and gradient norm.
    assert f"pip install torch=={OTHER}" in result.stderr and "190.7 MiB" in result.stderr
    assert result.stderr.count("loss 8.0000 -> 6.0000 · gradient norm 1") == len(runs)
    assert f"torch {OTHER}+cpu: 4.00 times" in result.stderr


def test_a_version_whose_gradient_is_zero_is_named_and_measured_once(bench, figures, monkeypatch):
    bench()
    ran = figures(installed={"seconds": 1.0}, **{OTHER: {"seconds": 0.25, "grad_norm": 0.0}})
    monkeypatch.setattr(environments, "Pip", FakePip)
    result = command("--torch", OTHER)
    assert result.return_value == 1
    assert f"torch {OTHER}+cpu cannot win: the gradient norm is 0" in result.stdout
    assert len(ran.read_text().splitlines()) == torch_versions.ROUNDS + 1


def test_a_version_that_cannot_be_imported_is_a_row_and_the_others_are_measured(
    bench, figures, monkeypatch
):
    class OneIsBroken(FakePip):
        def install(self, python, arguments, on_line):
            super().install(python, arguments, on_line)
            if arguments[-1] == "torch==2.9.1":
                (package,) = (python.parents[1] / "lib").glob("python*/site-packages/torch")
                (package / "__init__.py").write_text("raise OSError('libhipblaslt.so.1: missing')")

    bench()
    ran = figures(installed={"seconds": 1.0}, **{OTHER: {"seconds": 0.5}})
    monkeypatch.setattr(environments, "Pip", OneIsBroken)
    result = command("--torch", f"2.9.1,{INSTALLED},{OTHER}")
    assert result.return_value == 1
    text = " ".join(result.stdout.split())
    cause = "PyTorch cannot be imported: OSError: libhipblaslt.so.1: missing"
    assert f"torch 2.9.1 cannot win: {cause}" in text
    assert f"torch {OTHER}+cpu: 2.00 times" in text
    assert len(ran.read_text().splitlines()) == 2 * torch_versions.ROUNDS


@pytest.mark.parametrize("words", [("--sweep", "train.compile=true"), ("--export", "x.json")])
def test_other_tables_do_not_go_with_it(bench, words):
    bench()
    with pytest.raises(UserError, match="it does not go with"):
        command("--torch", OTHER, *words)


def test_a_recipe_error_comes_before_any_environment(bench, figures, monkeypatch, tmp_path):
    bench()
    figures(installed={"seconds": 1})
    monkeypatch.setattr(environments, "Pip", FakePip)
    with pytest.raises(UserError, match="micro-batch size"):
        command("train.micro_batch_size=5", "--torch", OTHER)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"grad_norm": 0.0}, "the gradient norm is 0"),
        ({"loss_after": 8.0}, "the loss of a micro-batch did not fall"),
        ({"loss_after": 9.5}, "the loss of a micro-batch did not fall"),
    ],
)
def test_plain_bench_fails_where_nothing_is_learned_and_prints_both(bench, figures, fault, problem):
    bench()
    figures(installed={"seconds": 1.0, **fault})
    result = command("--sweep", "train.micro_batch_size=1")
    assert result.return_value == 1
    text = " ".join(result.stdout.split())
    assert f"could not be measured: failed, {problem}" in text
    figure = fault.get("loss_after", 6.0)
    assert f"loss 8.0000 -> {figure:.4f} in 5 steps" in text
    assert f"gradient norm {fault.get('grad_norm', 1.0):.3g}" in text


@pytest.mark.soak
def test_two_real_wheels_are_compared(bench, tmp_path, monkeypatch):
    """The installed one and another one from the package index; gigabytes on a machine without PyTorch's own index."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    recipe = bench()
    with throwaway_folder() as folder:
        comparison = Comparison(
            recipe, releases_to_compare(OTHER, recipe.machine), folder, environments.Pip(os.environ)
        )
        try:
            prepared = comparison.prepare(lambda phase: None)
        except UserError as error:
            pytest.skip(error.problem)
        assert prepared[1].downloads[0].bytes > 10**8
        benches = [comparison.install(version, lambda phase: None) for version in prepared]
        pairs = list(zip([version.release for version in prepared], benches, strict=True))
        measurements = measure(
            pairs,
            on_phase=lambda phase: None,
            on_result=lambda *result: None,
            time_left=lambda: True,
            rounds=2,
        )
    assert [measured.problem for measured in measurements] == ["", ""]
    assert loss_spread(measurements) < 0.001  # float32 and the same steps
    assert all(result.learning.grad_norm > 0 for one in measurements for result in one.results)
    assert not folder.exists()
