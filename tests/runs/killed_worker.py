"""The training child of a run with rewards. SIGKILL ends it, or its launcher, as `kill.json` next to the run states.

{"moment": "rollout", "call": 7, "victim": "worker"}: at the 7th place of that kind that this process gets to. Places
are before each forward of sampling ("rollout"), while a reward is waited for and around the file of completions
("reward"), where a teacher, values or a reference judge ("score"), before each micro-batch and around the update of the
weights ("update"), and around each file of a checkpoint ("save"). Where the model calls a tool they are, too, behind
each turn's answers and behind their results ("turn"), while the process of the tools works ("tool"), around and within
a line of its answers on the disk ("journal"), and within an update ("optimizer").

"delay": seconds from that place to the kill, in which the run goes on. "rank": of the process that dies, or whose
launcher or process of the tools does ("tools"). "tool": the model calls it, as `episodes_for_tests.steered` says.
What the run was in is then in `fell.json`; one that was not killed writes how many places it got to.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from bloomery.core.child import loading
from bloomery.launch import worker

places = Counter()
# What the main thread is in, the outermost first; `turn`: of the episodes that it plays.
sections = ["set-up"]
turn = 0
tools = None  # the ones that were asked last


def rank():
    return int(os.environ.get("RANK", "0"))


def strike(wanted):
    """Notes what the run is in, and kills."""
    victims = {
        "worker": os.getpid,
        "launcher": os.getppid,
        "tools": lambda: tools._child._process.pid,
    }
    is_saver = threading.current_thread().name.startswith("save-")
    is_saving = any(thread.name.startswith("save-") for thread in threading.enumerate())
    section = "save" if is_saver else sections[-1]
    fell = {"section": section, "turn": turn, "is_saving": is_saving}
    Path(wanted["folder"], "fell.json").write_text(json.dumps(fell))
    os.kill(victims[wanted["victim"]](), signal.SIGKILL)


def arrive(moment, wanted):
    """Kills where this is the place."""
    places[moment] += 1
    if moment != wanted["moment"] or places[moment] != wanted["call"]:
        return
    if rank() != wanted.get("rank", 0):
        return
    if delay := wanted.get("delay", 0.0):
        threading.Timer(delay, strike, [wanted]).start()
        return
    strike(wanted)
    if wanted["victim"] != "tools":
        time.sleep(60)  # a child ends with its launcher


@contextmanager
def within(section):
    """Of the main thread: others write checkpoints."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    sections.append(section)
    try:
        yield
    finally:
        sections.pop()


def lay_places(wanted):
    from bloomery.train import loop, step
    from bloomery.train.checkpoint import saver as checkpoint
    from bloomery.train.optim.build import OptimizersContainer
    from bloomery.train.rl import rewards, rollout_source, sampler
    from bloomery.train.rl.policy_scores import PolicyScores

    def around(owner, name, moment, *, section=None, before=True, after=False):
        work = getattr(owner, name)

        def work_with_places(*arguments, **named):
            with within(section or sections[-1]):
                if before:
                    arrive(moment, wanted)
                result = work(*arguments, **named)
                if after:
                    arrive(moment, wanted)
                return result

        setattr(owner, name, work_with_places)

    for owner, name, section in (
        (loop, "take_steps", "between steps"),
        (loop, "evaluate_and_sample", "evaluation"),
        (rollout_source.RolloutSource, "_next_rollout", "rest of a rollout"),
    ):
        around(owner, name, "", section=section, before=False)
    around(sampler.Agreement, "before_forward", "rollout", section="sampling")
    # Every worker has been asked by then.
    around(rewards.Rewards, "_answer", "reward", section="reward")
    around(rollout_source, "write_completions", "reward", section="file of completions", after=True)
    around(PolicyScores, "rows_of_head", "score", section="scoring", after=True)
    around(step, "compute_losses", "update", section="micro-batch")
    around(OptimizersContainer, "step", "update", section="optimizer step", after=True)
    for name in ("save_file", "copy_tokenizer", "put_in_place", "note_best"):
        around(checkpoint, name, "save", section="save", after=True)
    for name in ("seal", "damage", "remove_folder"):
        around(checkpoint, name, "save", section="save")
    if "tool" in wanted:
        around(OptimizersContainer, "_set_learning_rate", "optimizer", before=False, after=True)
        lay_places_of_episodes(wanted, around)


def lay_places_of_episodes(wanted, around):
    """Also steers the model to call the tool."""
    import episodes_for_tests

    from bloomery.core.child import Child
    from bloomery.train.rl import episodes
    from bloomery.train.rl.tools import RecordedCalls, Tools

    # 1. Turns, and what the model samples in them.
    enter = episodes.EpisodeSampler.__enter__
    sample = episodes.EpisodeSampler.sample
    answer = episodes.EpisodeSampler._answer

    def enter_and_steer(self):
        episodes_for_tests.TOKENIZER = self._tokenizer
        episodes_for_tests.TOOL = wanted["tool"]
        return enter(self)

    def sample_and_count_turns(*arguments, **named):
        global turn
        with within("between turns"):
            completions = sample(*arguments, **named)
        turn = 0
        return completions

    def answer_in_turn(*arguments, **named):
        global turn
        turn += 1
        with within("sampling"):
            answer(*arguments, **named)
        arrive("turn", wanted)

    episodes.sample_completions = episodes_for_tests.steered
    episodes.EpisodeSampler.__enter__ = enter_and_steer
    episodes.EpisodeSampler.sample = sample_and_count_turns
    episodes.EpisodeSampler._answer = answer_in_turn
    around(episodes.EpisodeSampler, "_call", "turn", before=False, after=True)

    # 2. The process of the tools has been asked and has not been heard.
    is_waiting = False

    def asked(name, section):
        ask = getattr(Tools, name)

        def ask_with_place(self, *arguments, **named):
            global tools
            nonlocal is_waiting
            tools = self
            with within(section):
                is_waiting = True
                try:
                    return ask(self, *arguments, **named)
                finally:
                    is_waiting = False

        setattr(Tools, name, ask_with_place)

    listen = Child.next

    def listen_with_place(self, seconds):
        nonlocal is_waiting
        if is_waiting and self is tools._child:
            is_waiting = False
            arrive("reward" if sections[-1] == "reward" else "tool", wanted)
        return listen(self, seconds)

    Child.next = listen_with_place
    asked("reset", "reset of environments")
    asked("call", "tool call")
    asked("scores", "reward")

    # 3. The line on the disk: before it, cut off anywhere, and behind it.
    add = RecordedCalls.add
    flush = os.fsync

    def add_with_places(self, answered):
        if self._path is None or not answered:
            add(self, answered)
            return
        size = self._path.stat().st_size if self._path.exists() else 0

        def cut_and_flush(descriptor):
            flush(descriptor)
            written = os.fstat(descriptor).st_size
            dies_here = wanted["moment"] == "journal" and wanted["call"] == places["journal"] + 1
            if dies_here and not wanted.get("delay"):
                os.ftruncate(descriptor, size + 1 + wanted["cut"] % (written - size))
            arrive("journal", wanted)

        with within("journal"):
            arrive("journal", wanted)
            os.fsync = cut_and_flush
            try:
                add(self, answered)
            finally:
                os.fsync = flush
            arrive("journal", wanted)

    RecordedCalls.add = add_with_places


if __name__ == "__main__":
    if sys.argv[1] == "train":
        with loading():
            from bloomery.train import loop  # noqa: F401
        kill = Path(sys.argv[2]).parent / "kill.json"
        lay_places({**json.loads(kill.read_text()), "folder": str(kill.parent)})
    code = worker.main(sys.argv[1:])
    if sys.argv[1] == "train":
        kill.with_name(f"places-{rank()}.json").write_text(json.dumps(places))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
