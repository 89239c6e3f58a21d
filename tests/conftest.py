"""One thread a test process: the suite runs several at once, and threads that wait on busy cores are slow.

The cache of measurements and probes is the tests' own: plans follow the tables, whatever was measured on this machine.
"""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from device_for_tests import SIMULATED

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="bloomery-tests-")
os.environ["BLOOMERY_CPU_CHECK"] = "off"
os.environ["XDG_STATE_HOME"] = os.environ["XDG_CACHE_HOME"]
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# What Bloomery compiles is kept for all tests of a session, whose caches begin empty: `kept_compiler.sh` is their g++.
if "BLOOMERY_TESTS_COMPILED" not in os.environ and (compiler := shutil.which("g++")):
    compiled = Path(tempfile.mkdtemp(prefix="bloomery-tests-compiled-"))
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["BLOOMERY_TESTS_COMPILED"] = str(compiled)
    os.environ["BLOOMERY_TESTS_COMPILER"] = compiler
    (compiled / "g++").symlink_to(Path(__file__).with_name("kept_compiler.sh"))
    os.environ["PATH"] = f"{compiled}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where no bytecode is kept, hundreds of children would each compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# readline, in the process that starts those of the tests, says that the terminal has 80 columns; there is none.
for size in ("COLUMNS", "LINES"):
    os.environ.pop(size, None)
# A shell that runs the suite in the background has children ignore Ctrl+C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Events of `sys.audit`. With `--quick` a test that causes one is skipped.
PROCESS_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")
LONG_FOLDERS = ("train", "runs", "model", "studio")
running_tests: list[str] = []
gc.disable()  # while libraries are imported: millions of objects come, and none goes


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "skip each test that starts a process or trains, at the moment when it does"
    parser.addoption("--quick", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """With `--quick` nobody lists the slow tests: one that does what takes time is skipped when it begins with it.

    Otherwise one process forks those of the tests, for all processes that pytest-xdist starts.
    """
    if not config.getoption("--quick"):
        if config.getoption("numprocesses", None) and sys.platform == "linux":
            import preloaded

            preloaded.Server().share()
        return
    from bloomery.train import loop

    def starts_no_process(event: str, _arguments: tuple[object, ...]) -> None:
        if event in PROCESS_STARTS and running_tests:
            pytest.skip("starts a process")

    def trains_nothing(*_arguments: object, **_options: object) -> None:
        pytest.skip("trains")

    sys.addaudithook(starts_no_process)
    loop.run = trains_nothing  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    running_tests.append(item.nodeid)
    try:
        return (yield)
    finally:
        running_tests.pop()
        # What a file has imported stays. Runs of tests collect garbage after every rollout, and would walk over it.
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most cases of a test marked as `sampled` become soak. Files that take long begin first."""
    # With a long file at the end one process of pytest-xdist would work and the others wait.
    items.sort(key=lambda item: item.path.parent.name not in LONG_FOLDERS)
    for item in items if SIMULATED else []:
        if mark := item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"about the CPU: {mark.args[0]}"))
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and not item.get_closest_marker("soak"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker("soak")
            seen[name] += 1


def pytest_collection_finish() -> None:
    gc.freeze()  # what stands now stays, and need not be walked over again and again
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked_children() -> None:
    """Processes that Bloomery starts from the process of a test are forked where that makes no difference, too."""
    import preloaded
    from bloomery.core import child
    from bloomery.launch import supervisor

    for module in (child, supervisor):
        module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": preloaded.Popen})


if SIMULATED:

    @pytest.fixture(autouse=True)
    def device_without_problems() -> Generator[None]:
        """Whatever a test is about: no race, no wrong device, no operator that the simulated device lacks.

        With `run.py --current 1` this process uses the second device, as rank 1 does: the first one stays empty.
        """
        import simulated
        import torch

        current = int(os.environ.get("BLOOMERY_SIMULATED_CURRENT", "0"))
        torch.accelerator.set_device_index(current)
        simulated.clear()
        made_before = simulated.stats(0).total
        yield
        report = simulated.report()
        if current:
            assert simulated.stats(0).total == made_before
        assert report["problem"] == {}
        assert report["missing"] == {}
