"""Each file of a run as a pipe, a folder or an endless device: no command waits for it, none ends in a traceback."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import here, process
from rollouts_for_tests import write_recipe

from bloomery.core.files import remove
from bloomery.core.run_lock import worked_on
from bloomery.report.rewards import shown_completions
from bloomery.studio.post_mortem import post_mortem_of
from bloomery.studio.watching import Watching

SECONDS = 20
# What a run may have besides the files that a finished one keeps.
OPTIONAL = """excluded-hosts.txt fallback.json stop-requested pause profile-requested tracked.json rewards.json
    ranks/word.json ranks/server.json ranks/end-1.json ranks/lock stacks/hosts.json stacks/rank-0.txt
    attention.json evaluations.json""".split()
COMMANDS = (
    ("runs",),
    ("runs", "--json"),
    ("watch", "one", "--once"),
    ("report", "one"),
    ("stop", "one"),
    ("save", "one"),
    ("runs", "clean"),
)


@contextmanager
def at_most(seconds: int, what: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(what)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of rewards, which has most of the files that there are."""
    folder = write_recipe(tmp_path_factory.mktemp("rl"))
    before = Path.cwd()
    os.chdir(folder)
    try:
        edits = ("train.max_steps=2", "eval.every=2 steps", "checkpoint.every=1 steps")
        done = here("train", "rl.yaml", "--run-dir", "runs/one", "train.compile=false", *edits)
    finally:
        os.chdir(before)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(whole, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work/runs/one"


def names_of(run: Path) -> list[str]:
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return sorted(names | set(OPTIONAL))


def put(kind: str, path: Path) -> None:
    """Something else in the place of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


def read_in_studio() -> None:
    """What the list of runs, and the page of a run that has failed, read."""
    watching = Watching()
    watching.rows()
    opened = watching.run("one")
    opened.update()
    post_mortem_of(opened)
    shown_completions(Path("runs/one"))


@pytest.mark.parametrize(
    "kind",
    [
        "pipe",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("folder", "endless device")),
    ],
)
def test_no_command_waits_for_an_odd_file_of_a_run(run: Path, kind: str) -> None:
    # Of a checkpoint these commands read what says which one it is.
    names = [
        name
        for name in names_of(run)
        if not name.startswith("checkpoints/step-")
        or name.endswith(("MANIFEST.json", "state.json"))
    ]
    for name in names:
        kept = run.parent.parent / "kept"
        shutil.copytree(run, kept)
        put(kind, run / name)
        for words in COMMANDS:
            with at_most(SECONDS, f"{name} as a {kind}: {' '.join(words)}"):
                result = here(*words)
            assert result.code in (0, 1, 2), f"{name} as a {kind}: {words}: {result}"
            assert "internal error" not in result.err, f"{name} as a {kind}: {words}: {result.err}"
        if (run / "recipe.yaml").is_file():
            with at_most(SECONDS, f"{name} as a {kind}: studio"):
                read_in_studio()
        with at_most(SECONDS, f"{name} as a {kind}: runs rm"):
            assert here("runs", "rm", "one", "--yes").code in (0, 1, 2)
        shutil.rmtree(run, ignore_errors=True)
        kept.rename(run)


def resumed(run: Path, name: str, kind: str) -> None:
    """The run with that file goes on, or says which file is in the way."""
    put(kind, run / name)
    done = process("resume", "one", "train.max_steps=3", folder=run.parent.parent, timeout=120)
    shown = f"{name} as a {kind}: {done}"
    assert done.code == 0 or Path(name).name in done.err or name.split("/")[0] in done.err, shown
    assert "Traceback" not in done.err and "internal error" not in done.err, shown


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", ["lock", "rewards.json", "completions"])
def test_a_resume_tells_which_file_is_odd(run: Path, name: str, kind: str) -> None:
    resumed(run, name, kind)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless device"])
def test_a_resume_waits_for_no_odd_file(run: Path, kind: str) -> None:
    for name in names_of(run):
        kept = run.parent.parent / "kept"
        shutil.copytree(run, kept)
        if name != "recipe.yaml":  # without it the folder has no run
            resumed(run, name, kind)
        shutil.rmtree(run, ignore_errors=True)
        kept.rename(run)


def test_a_pipe_in_place_of_a_lock_is_no_lock(tmp_path: Path) -> None:
    for kind in ("pipe", "folder", "endless device"):
        put(kind, tmp_path / "lock")
        with at_most(SECONDS, kind):
            assert not worked_on(tmp_path)
