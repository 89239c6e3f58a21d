"""A child's death in one sentence."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.launch import worker
from bloomery.launch.stage_ends import StageResult, failure

FOLDER = RunFolder(Path("/somewhere/runs/one"))


def told(code: int, *tail: str, report: dict | None = None, stage: str = "train") -> str:
    return str(failure(StageResult(stage, code, report, tail), FOLDER, step=7))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "killed from outside after step 7 (SIGKILL)"),
        (-signal.SIGSEGV, "killed after step 7 by SIGSEGV, in a library or a driver"),
        (-signal.SIGABRT, "SIGABRT"),
        (-63, "signal 63"),
    ],
)
def test_signals_are_named(code: int, said: str) -> None:
    assert said in told(code, "some noise")
    assert "bloomery resume /somewhere/runs/one" in told(code)


def test_of_a_traceback_the_exception_is_told() -> None:
    tail = (
        "Traceback (most recent call last):",
        '  File "x.py", line 3',
        "    boom()",
        "RuntimeError: no such op",
        "",
    )
    assert "training failed after step 7: RuntimeError: no such op" in told(1, *tail)
    assert "/somewhere/runs/one/log.txt" in told(1, *tail)
    dotted = (
        "Traceback",
        "torch._inductor.exc.InductorError: CppCompileError: it broke",
        "",
        "Set X=1 for more",
    )
    assert "InductorError: CppCompileError: it broke" in told(1, *dotted)
    later = (*tail, "note: rerun with TORCH_LOGS=all", "frame: 7 of 9")
    assert "training failed after step 7: RuntimeError: no such op" in told(1, *later)
    assert "StopIteration" in told(1, "Traceback", "StopIteration", "done")
    of_a_rank = [f"[rank1]: {line}" for line in later]
    assert "training failed after step 7: RuntimeError: no such op" in told(1, *of_a_rank)


def test_without_a_word_it_says_so() -> None:
    assert "no output" in told(3)


def test_a_reported_error_is_passed_on_as_it_is() -> None:
    report = {"problem": "the corpus is empty", "where": "data.path", "fix": "add text", "code": 1}
    assert (
        told(1, report=report, stage="prepare")
        == "error: the corpus is empty\nwhere: data.path\nfix:   add text"
    )


def test_a_known_death_ends_in_cause_and_remedy() -> None:
    """The last lines that a person sees are why, and what to type."""
    fault = "Memory access fault by GPU node-1 (Agent handle: 0x1f8) on address 0x7a. Reason: Page not present"
    said = told(-signal.SIGABRT, "some warning", fault, "Fatal Python error: Aborted").splitlines()
    assert (
        said[0].startswith("error: training killed after step 7 by SIGABRT: ")
        and "memory" in said[0]
    )
    assert said[1].startswith("       (") and "HSA_OVERRIDE_GFX_VERSION" in said[1]
    assert [line[:7] for line in said if line[:7].strip()] == ["error: ", "where: ", "fix:   "]
    assert said[2] == f"where: {fault}"
    assert said[4] == "fix:   unset HSA_OVERRIDE_GFX_VERSION  # if it is set"
    assert "bloomery train /somewhere/runs/one/recipe.yaml train.compile=false" in said[5]
    assert said[-1] == "       bloomery resume /somewhere/runs/one"


def test_a_known_exception_is_explained_and_a_note_is_not() -> None:
    tail = ("Traceback (most recent call last):", "RuntimeError: No HIP GPUs are available")
    assert "ROCm build" in told(1, *tail)
    assert "sudo usermod -a -G render,video" in told(1, *tail)
    note = "UserWarning: Attempting to use hipBLASLt on an unsupported architecture! Overriding blas backend to hipblas"
    assert "training failed after step 7: RuntimeError: no such op" in told(
        1, note, "RuntimeError: no such op"
    )


def test_the_exception_counts_more_than_what_was_said_before() -> None:
    earlier = "[rank0]: Watchdog caught collective operation timeout"
    said = told(
        1, earlier, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert "NVIDIA GPU out of memory" in said


def test_the_machine_of_the_run_decides(tmp_path: Path) -> None:
    machine = Path(__file__).parent.parent / "machines/h200.json"
    (tmp_path / "machine.json").write_bytes(machine.read_bytes())
    ending = StageResult("train", 1, None, ("RuntimeError: HIP error: invalid device function",))
    assert "HIP error: invalid device function" in str(failure(ending, RunFolder(tmp_path), step=0))
    assert "where: " in str(failure(ending, RunFolder(tmp_path), step=0)).splitlines()[1], (
        "nothing is recognized"
    )


def test_a_real_child_that_aborts(tmp_path: Path) -> None:
    """What a driver does: a line on stderr, then SIGABRT."""
    script = "import os, sys; print('Memory access fault by GPU node-1', file=sys.stderr, flush=True); os.abort()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    said = str(
        failure(
            StageResult("train", done.returncode, None, tuple(done.stderr.splitlines())),
            FOLDER,
            step=3,
        )
    )
    assert "after step 3 by SIGABRT: memory access fault" in said


@pytest.mark.parametrize(
    ("result", "host"),
    [
        (StageResult("train", 1, None, ("RuntimeError: HIP error: no device",), 8, "n2"), "n2"),
        (StageResult("train", -signal.SIGKILL, None, (), 8, "n2"), "n2"),
        (StageResult("train", -signal.SIGKILL, None, (), 8, "n2", lost=True), "n2"),
        # Of a request to end, of a bug, and where all ranks are on one host.
        (StageResult("train", -signal.SIGTERM, None, (), 8, "n2"), ""),
        (StageResult("train", 1, None, ("ValueError: a wrong sample",), 8, "n2"), ""),
        (StageResult("train", -signal.SIGKILL, None, (), 8), ""),
    ],
)
def test_a_host_is_left_out_for_what_another_host_would_not_have(result, host) -> None:
    error = failure(result, FOLDER, step=7)
    assert error.host == host
    assert ("leave the host out" in error.fix) == bool(host)
    assert ("rank 8" in error.problem) and ("on n2" in error.problem) == bool(result.host)


def test_a_rank_that_sees_no_gpu_before_the_ranks_have_met_has_its_host_left_out() -> None:
    report = {"problem": "rank 8 on n2 sees no GPU", "where": "", "fix": "give it one", "code": 1}
    error = failure(StageResult("train", 1, report, (), 8, "n2"), FOLDER, step=0)
    assert error.host == "n2" and "start the ranks on other hosts than n2" in error.fix


@pytest.mark.parametrize("character", ["x", "\U0001f525", "\0", "\ud800"])
def test_the_longest_error_of_a_child_fits_into_its_pipe(character, tmp_path, monkeypatch) -> None:
    """Nobody reads it until the child has ended: one that writes more would wait for ever."""
    text = character * 100_000

    def fails(*_arguments: object, **_options: object) -> int:
        raise UserError(text, where=text, fix=text, host=text, code=7)

    monkeypatch.setattr(worker, "_train", fails)
    monkeypatch.setattr(worker, "die_with_parent", lambda _: None)
    monkeypatch.setattr(worker.StopFlag, "install", lambda _: None)
    with (tmp_path / "report").open("wb") as report:
        words = ("--parent", "1", "--report", str(report.fileno()))
        assert worker.main(["train", str(tmp_path), *words]) == worker.FAILED
    content = (tmp_path / "report").read_bytes()
    assert len(content) < 2**16
    error = UserError(**json.loads(content))
    assert error.code == 7 and len(error.problem) > 1000
