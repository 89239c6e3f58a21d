"""Runs whose model calls tools, killed between turns and inside them, at tools, scores, updates and saves, and resumed.

Oracle: the undisturbed run. Weights, optimizer states, random numbers, events, episodes and what tools answered are
equal to the last bit.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from episodes_for_tests import CHOSEN, DISTILL, EDITS, GUESS, PPO, write_episodes
from killed_runs import Kill, assert_same_run, killed, run_until_killed
from rollouts_for_tests import write_teacher
from runs_of_bloomery import Bloomery

from bloomery.monitor.events import StepDone

STEPS = 60
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "episode_kills.txt"
LETTERS = "ABCDEF"  # of the kinds of run, as columns
# What was killed, as rows of the table.
VICTIMS = {
    "worker": "killed: a rank",
    "launcher": "killed: the launcher",
    "tools": "killed: the process of the tools",
}
FUNCTION = '''

def square(n: int) -> str:
    """Square a number.

    Args:
        n: a number
    """
    return f"{n * n}"
'''
SQUARE = ("tools=[{python: 'game.py:square'}]",)
EDITS_OF_ALL = (
    *EDITS,
    "data.prepared=prepared",
    "train.compile=false",
    "eval.every=5 steps",
    "checkpoint={every: 2 steps, keep: 2, async_save: true}",
)
MOMENTS = ("turn", "tool", "journal", "rollout", "reward", "score", "update", "optimizer", "save")
FORESIGHT = 3  # steps: a kill comes within so many, of which a checkpoint has two
# Seconds from a place to the kill, where it does not come at once: the run is elsewhere by then.
LONGEST_DELAY = {"optimizer": 0.001}
DELAY = 0.05  # of other moments
# Sections of `killed_worker`, in the order of a turn.
IN_TURNS = ("reset of environments", "sampling", "tool call", "journal", "between turns")
OTHERS = ("optimizer step", "save")  # in which a run of 40 kills is killed, too


@dataclass(frozen=True)
class Setting:
    """A kind of run: its recipe's edits, the tool that its model calls, how often it is killed, on how many ranks.

    `moments`: of `killed_worker`, those that its process gets to.
    """

    edits: tuple[str, ...]
    tool: str
    kills: int = 20
    ranks: int = 1
    steps: int = 30
    moments: tuple[str, ...] = MOMENTS


SETTINGS = {
    "GRPO": Setting(SQUARE, "square", 40, steps=STEPS),
    "GRPO, environment": Setting(GUESS, "guess"),
    "GRPO, 2 ranks": Setting(SQUARE, "square", ranks=2),
    "GRPO, 2 ranks, chosen prompts": Setting((*GUESS, *CHOSEN), "guess", ranks=2),
    "PPO": Setting((*PPO, *GUESS), "guess"),
    "distillation": Setting((*DISTILL, *SQUARE, "rewards=[]"), "square"),
}
SAMPLE = "a sample"
SETTINGS_OF_ALL = {
    **SETTINGS,
    SAMPLE: Setting(SQUARE, "square", 3, steps=6, moments=("turn", "tool", "journal")),
}


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody killed, and how many places of each kind its ranks got to, rank by rank."""

    bloomery: Bloomery
    places: tuple[dict[str, int], ...]


@dataclass(frozen=True)
class Fall:
    """A kill of a kind of run: the last step before it, what the run was in, of which turn, and whether it saved."""

    kind: str
    kill: Kill
    step: int
    section: str
    turn: int
    is_saving: bool


def begun(folder: Path, setting: Setting) -> Bloomery:
    with chdir(folder):  # the paths of the recipe are relative
        write_episodes(folder)
        if "teacher" in setting.edits[0]:
            write_teacher(folder, *EDITS)
    with (folder / "game.py").open("a") as file:
        file.write(FUNCTION)
    (folder / "rl.yaml").rename(folder / "tiny.yaml")
    (folder / "runs").mkdir()
    return Bloomery(folder, ("-d", ",".join(["cpu"] * setting.ranks)))


def words_of(setting: Setting) -> tuple[str, ...]:
    return (*setting.edits, *EDITS_OF_ALL, f"train.max_steps={setting.steps}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    @cache
    def of(kind: str) -> Undisturbed:
        setting = SETTINGS_OF_ALL[kind]
        bloomery = begun(tmp_path_factory.mktemp("undisturbed"), setting)
        done = run_until_killed(bloomery, Kill(tool=setting.tool), *words_of(setting))
        assert done.returncode == 0, done.stderr
        places = [
            json.loads((bloomery.folder / f"runs/places-{rank}.json").read_text())
            for rank in range(setting.ranks)
        ]
        return Undisturbed(bloomery, tuple(places))

    return of


def kills_of(
    setting: Setting, whole: Undisturbed, draw: random.Random
) -> Iterator[tuple[Kill, int]]:
    """Each kind of place in turn, in any order; with each how many of them the process gets to in `FORESIGHT` steps."""
    moments: list[list[str]] = [[] for _ in range(setting.ranks)]
    for _ in range(setting.kills):
        rank = draw.randrange(setting.ranks)
        places = whole.places[rank]
        if not moments[rank]:
            moments[rank] = [name for name in setting.moments if places.get(name)]
            draw.shuffle(moments[rank])
        moment = moments[rank].pop()
        most_calls = max(1, places[moment] * FORESIGHT // setting.steps)
        kill = Kill(
            moment,
            draw.randint(1, most_calls),
            draw.choice(("worker", "worker", "launcher", *["tools"] * (moment == "tool"))),
            delay=draw.choice((0.0, draw.uniform(0.0, LONGEST_DELAY.get(moment, DELAY)))),
            rank=rank,
            cut=draw.randrange(1000),
            tool=setting.tool,
        )
        yield kill, most_calls


def assert_asked_once(bloomery: Bloomery, whole: Bloomery) -> None:
    """What a function answered was written down as it was for the run that nobody killed, and not asked again."""
    answers = [
        {
            path.name: sorted(line for line in path.read_bytes().splitlines() if is_whole(line))
            for path in (run.run_dir / "tools").iterdir()
        }
        for run in (bloomery, whole)
    ]
    assert answers[1]
    assert answers[0] == answers[1]


def is_whole(line: bytes) -> bool:
    """No line that a kill cut off."""
    return line.endswith(b"]")


@pytest.fixture(scope="module")
def falls(request: pytest.FixtureRequest) -> Iterator[list[Fall]]:
    """Where kills fell, reported on the terminal after the last run of `make soak`; BLOOMERY_UPDATE=1 stores it."""
    all_falls: list[Fall] = []
    yield all_falls
    of_soak = [fall for fall in all_falls if fall.kind != SAMPLE]
    if not of_soak:
        return
    text = table_of(of_soak)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", text, sep="\n")
    if os.environ.get("BLOOMERY_UPDATE"):
        TABLE.write_text(text, encoding="utf-8")


def table_of(falls: Sequence[Fall]) -> str:
    """A column per kind of run; rows by what it was in, then by what was killed."""
    kinds = [kind for kind in SETTINGS if any(fall.kind == kind for fall in falls)]
    counts = Counter[tuple[str, str]]()
    for fall in falls:
        in_turn = f", turn {fall.turn}" if fall.section in IN_TURNS and fall.turn else ""
        counts[fall.section + in_turn, fall.kind] += 1
    in_turns = [
        row
        for section in IN_TURNS
        for row in sorted({row for row, _ in counts})
        if row.startswith(section)
    ]
    rows = [
        *in_turns,
        *sorted({row for row, _ in counts} - {*in_turns}),
        "all",
        "while a checkpoint was written",
    ]
    for fall in falls:
        counts["all", fall.kind] += 1
        counts["while a checkpoint was written", fall.kind] += fall.is_saving
        counts[VICTIMS[fall.kill.victim], fall.kind] += 1
    rows += VICTIMS.values()
    width = max(map(len, rows)) + 2
    lines = [
        "SIGKILL to runs whose model calls tools: what they were in when it came, and what it killed. Each run was",
        "killed that often in its folder and resumed each time; its end is bitwise that of a run that nobody killed:",
        "weights, optimizer states, random numbers, losses, metrics, evaluations, episodes, what functions answered.",
        "BLOOMERY_UPDATE=1 pytest -m soak tests/runs/test_episode_kills.py",
        "",
    ]
    for letter, kind in zip(LETTERS, kinds, strict=False):
        steps = " ".join(str(fall.step) for fall in falls if fall.kind == kind)
        lines.append(f"{letter}  {kind}: {SETTINGS[kind].steps} steps, killed after {steps}")
    lines += [
        "",
        " " * width + "".join(f"{letter:>5}" for letter in LETTERS[: len(kinds)]) + "  all",
    ]
    for row in rows:
        of_kinds = [counts[row, kind] for kind in kinds]
        cells = "".join(f"{count or '':>5}" for count in of_kinds)
        lines.append(f"{row:<{width}}{cells}{sum(of_kinds):>5}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "kind", [SAMPLE, *(pytest.param(kind, marks=pytest.mark.soak) for kind in SETTINGS)]
)
def test_kills_between_and_inside_turns_leave_no_trace(
    kind: str, tmp_path: Path, undisturbed: Callable[[str], Undisturbed], falls: list[Fall]
) -> None:
    setting, whole = SETTINGS_OF_ALL[kind], undisturbed(kind)
    draw = random.Random(f"episodes {kind}")
    bloomery = begun(tmp_path, setting)
    for kill, most_calls in kills_of(setting, whole, draw):
        fell = killed(bloomery, whole.bloomery, kill, most_calls, draw, *words_of(setting))
        steps = [event.step for event in bloomery.events() if isinstance(event, StepDone)]
        falls.append(Fall(kind, kill, max(steps, default=0), **fell))
    done = run_until_killed(bloomery, Kill(tool=setting.tool), *words_of(setting))
    assert done.returncode == 0, done.stderr
    assert_same_run(bloomery, whole.bloomery)
    if setting.tool == "square":
        assert_asked_once(bloomery, whole.bloomery)
    sections = {fall.section for fall in falls if fall.kind == kind}
    assert setting.kills < 40 or sections >= {*IN_TURNS, *OTHERS}
