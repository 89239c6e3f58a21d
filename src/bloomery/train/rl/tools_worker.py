"""The process of the tools and the environment of a run: loads the user's files, and answers requests.

Each episode is a copy of this process, made by fork: a tool that hangs, ends its process or floods memory ends its own
episode. The calls of all episodes run at the same time. Does not import torch.

Requests, each with the numbers of episodes:

    {"reset": [[episode, seed, row], ...]}   begins them; answers {"text": ...}, what `reset` returns, or {"error": ...}
    {"calls": [[episode, [[name, arguments], ...]], ...]}       answers [[result, failed], ...] for the calls of each
    {"rewards": [[episode, messages or null], ...]}     answers {"reward": ..., "metrics": ...} or {"error": ...}
    {"close": [episode, ...]}
"""

import ctypes
import inspect
import json
import math
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, final

from bloomery.core.child import PR_SET_PDEATHSIG, accept, kill_group, reply, requests
from bloomery.core.sandbox.limits import limit_memory_for_good
from bloomery.core.sandbox.network import leave_network
from bloomery.train.rl.openenv import (
    TOOL,
    LocalSession,
    OpenEnvironment,
    ServerSession,
    action_class,
    server_schema,
    step_schema,
)
from bloomery.train.rl.reward_functions import address_space
from bloomery.train.rl.rewards_worker import Unusable, error_text, named_in_file
from bloomery.train.rl.task_sets import TaskSetEnvironment, is_task_set
from bloomery.train.rl.tool_functions import Json, called, failure, methods_of, schema_of

NO_NETWORK = "BLOOMERY_TOOLS_WITHOUT_NETWORK"  # in the environment of this process, which asks before it has threads
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MOST_BYTES = 2**20  # of a message of an episode, which its code may write
ORPHAN_SECONDS = 5.0  # for ending what tools have left behind
ENDED = "the tool ended its process, or used too much memory"
GARBLED = "the tool wrote into the connection of its process"


def main() -> None:
    problem = leave_network() if os.environ.pop(NO_NETWORK, "") else None
    job = accept()
    # What a tool leaves behind becomes a child of this process, which ends it with its episode.
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        toolbox = Toolbox(job)
    except Unusable as error:
        reply(job, {"error": error.problem, "fix": error.fix})
        return
    facts = {"schemas": toolbox.schemas, "has_reward": toolbox.has_reward, "network": problem}
    reply(job, {**facts, "reads_conversation": toolbox.reads_conversation})
    episodes = Episodes(
        toolbox, memory=job["memory"], seconds=job["seconds"], connection=job["socket"]
    )
    for request in requests(job):
        reply(job, {"answers": episodes.answers(request)})


@final
class Toolbox:
    """The functions and the class of the user's files. Raises Unusable for what a model cannot be told of."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        for file, name in job["tools"]:
            function = named_in_file(Path(file), name, what=f"the tool {name}")
            self._add(function.__name__, function)
        self.environment: Callable[[], Any] | None = None
        self.has_reward = False
        self.reads_conversation = False  # to reward an episode
        self.schemas: list[Json] = []
        schemas = [schema_of(name, function) for name, function in self.functions.items()]
        if job.get("openenv") is not None:
            address = job["openenv"]
            self._add(TOOL, OpenEnvironment.step)
            self.schemas = [*schemas, server_schema(address)]
            self.environment = lambda: OpenEnvironment(ServerSession(address))
            self.has_reward = True
            return
        if job["environment"] is not None:
            file, name = job["environment"]
            what = f"the environment {name}"
            self.environment = named_in_file(Path(file), name, what=what, kind="class")
            if self._add_openenv(self.environment):
                self.schemas = [*schemas, *self.schemas]
                return
            if self._add_task_set(self.environment):
                self.schemas = schemas
                return
            # One is made for what it is: its methods, and whether it has a reward.
            try:
                sample = self.environment()
            except Exception as error:
                problem = f"{what} cannot be made: {error_text(error)}"
                raise Unusable(problem, f"correct {name}.__init__, which takes nothing") from error
            if not callable(getattr(sample, "reset", None)):
                raise Unusable(
                    f"{what} has no method reset",
                    "write reset(self, **row), which begins an episode and returns text or None",
                )
            self.has_reward = callable(getattr(sample, "get_reward", None))
            for method_name, method in methods_of(sample).items():
                self._add(method_name, method)
                schemas.append(schema_of(f"{name}.{method_name}", method))
        if not schemas:
            raise Unusable(
                f"{what} has no tool: no public method beside reset and get_reward",
                "write a method for each thing that the model may do",
            )
        self.schemas = schemas

    def _add_openenv(self, environment: Any) -> bool:
        """Whether the class is an environment of OpenEnv, which has one tool then."""
        action = action_class(environment)
        if action is None:
            return False
        self._add(TOOL, OpenEnvironment.step)
        text = inspect.getdoc(environment) or inspect.getdoc(action) or ""
        self.schemas = [step_schema(action.model_json_schema(), text)]
        self.environment = lambda: OpenEnvironment(LocalSession(environment, action))
        self.has_reward = True
        return True

    def _add_task_set(self, environment: Any) -> bool:
        """Whether the class is a task set of verifiers, whose rewards read the conversation."""
        if not is_task_set(environment):
            return False
        task_set = environment
        self.environment = lambda: TaskSetEnvironment(task_set)
        self.has_reward = True
        self.reads_conversation = True
        return True

    def _add(self, name: str, function: Callable[..., Any]) -> None:
        if name in self.functions:
            raise Unusable(f"two tools have the name {name}", "rename one of them")
        self.functions[name] = function


@final
class Episode:
    """A copy of this process with an environment of its own. `problem`: why it is over before its time."""

    def __init__(self, toolbox: Toolbox, memory: int, others: Sequence[int]) -> None:
        """`others`: the connections of this process, which are none of the episode's."""
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        worker = os.getpid()
        self.process = os.fork()
        if self.process == 0:
            ours.close()
            # A tool that writes into every socket it finds reaches neither the run nor other episodes.
            for descriptor in others:
                os.close(descriptor)
            _play(toolbox, theirs, memory, worker)
        theirs.close()
        ours.setblocking(False)
        self.socket = ours
        self.problem: str | None = None
        self.received = bytearray()
        self.asked: Json = {}
        self.num_asked = 0

    def send(self, message: Json) -> None:
        self.num_asked += 1
        self.asked = message
        message = {"number": self.num_asked, **message}
        # Its process may be gone, or read nothing: then no answer comes.
        with suppress(OSError):
            self.socket.settimeout(1.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        self.socket.setblocking(False)

    def answer(self) -> Any:
        """What it has answered, None where more bytes must come.

        Raises EOFError with the reason once it has ended, and where its code wrote something else into the connection.
        """
        try:
            piece = self.socket.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(ENDED) from error
        if not piece:
            raise EOFError(ENDED)
        if len(self.received) > MOST_BYTES:
            raise EOFError(GARBLED)
        self.received += piece
        if not self.received.endswith(b"\n"):
            return None
        line = bytes(self.received)
        self.received.clear()
        try:
            number, answer = json.loads(line)
        except (ValueError, TypeError, RecursionError) as error:
            raise EOFError(GARBLED) from error
        if number != self.num_asked or not self._is_answer(answer):
            raise EOFError(GARBLED)
        return answer

    def _is_answer(self, answer: Any) -> bool:
        """Whether it has the form that belongs to what was asked."""
        if "call" not in self.asked:
            return isinstance(answer, dict)
        return (
            isinstance(answer, list)
            and len(answer) == 2
            and isinstance(answer[0], str)
            and isinstance(answer[1], bool)
        )

    def close(self) -> None:
        kill_group(self.process)
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)  # before it had a group of its own
        with suppress(ChildProcessError):
            os.waitpid(self.process, 0)
        self.socket.close()


def _play(toolbox: Toolbox, connection: socket.socket, memory: int, worker: int) -> NoReturn:
    """The process of an episode: answers one request after the other until it is killed."""
    code = 1
    try:
        os.setsid()
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != worker:
            os._exit(1)
        limit_memory_for_good(address_space() + memory)
        environment = None
        tools = toolbox.functions
        answer: Any
        with connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if "seed" in message:
                    _seed(message["seed"])
                    environment, answer = _begun(toolbox, message["row"], message["seed"])
                    if environment is not None:
                        tools = {**tools, **methods_of(environment)}
                elif "call" in message:
                    answer = list(called(tools, *message["call"]))
                else:
                    answer = _reward_of(environment, message["reward"])
                line_of_answer = json.dumps([message["number"], answer])
                connection.sendall(line_of_answer.encode() + b"\n")
        code = 0
    except BaseException as error:  # a fork has no caller that an exception may reach
        print(error_text(error), file=sys.stderr, flush=True)
    os._exit(code)


def _seed(seed: int) -> None:
    """Of the generators that a file may use without a seed of its own."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def _begun(toolbox: Toolbox, row: Json, seed: int) -> tuple[Any, Json]:
    """The environment of an episode, None without one, and `text`, which the last turn of the user ends with, or
    `error`.
    """
    if toolbox.environment is None:
        return None, {"text": None}
    try:
        environment = toolbox.environment()
    except Exception as error:
        return None, {"error": f"it cannot be made: {error_text(error)}"}
    return environment, _reset(environment, row, seed)


def _reset(environment: Any, row: Json, seed: int) -> Json:
    parameters = inspect.signature(environment.reset).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = {"seed": seed, **row}
    try:
        text = environment.reset(
            **{name: value for name, value in given.items() if takes_all or name in parameters}
        )
    except Exception as error:
        return {"error": f"its reset failed: {error_text(error)}"}
    if text is not None and not isinstance(text, str):
        return {"error": f"its reset returned {type(text).__name__}, not text or None"}
    return {"text": text}


def _reward_of(environment: Any, conversation: Any) -> Json:
    """`conversation`: its messages, for an environment that reads them; else None."""
    try:
        if conversation is not None:
            environment.read_conversation(conversation)
        reward = environment.get_reward()
        if reward is None or isinstance(reward, str):
            return {"error": f"its get_reward returned {reward!r:.100}, no number"}
        number = float(reward.item() if hasattr(reward, "item") else reward)
    except Exception as error:
        return {"error": f"its get_reward failed: {error_text(error)}"}
    if not math.isfinite(number):
        return {"error": f"its get_reward returned {number}, no finite number"}
    metrics = {} if conversation is None else environment.metrics
    return {"reward": number, "metrics": metrics}


@final
class Episodes:
    """The episodes that run. `seconds`: for one call of one of them. `connection`: the descriptor of the run's."""

    def __init__(self, toolbox: Toolbox, *, memory: int, seconds: float, connection: int) -> None:
        self._toolbox = toolbox
        self._memory = memory
        self._seconds = seconds
        self._connection = connection
        self._running: dict[int, Episode] = {}

    def answers(self, request: Mapping[str, Any]) -> list[Any]:
        """One for each entry of the request, in its order."""
        if "close" in request:
            self._close(request["close"])
            return []
        messages: dict[int, list[Json]]
        if "reset" in request:
            self._close([number for number, _, _ in request["reset"]])
            for number, _, _ in request["reset"]:
                self._running[number] = self._begun()
            messages = {
                number: [{"seed": seed, "row": row}] for number, seed, row in request["reset"]
            }
            return [answers[0] for answers in self._asked(messages).values()]
        if "rewards" in request:
            messages = {
                number: [{"reward": conversation}] for number, conversation in request["rewards"]
            }
            return [answers[0] for answers in self._asked(messages).values()]
        messages = {
            number: [{"call": call} for call in calls] for number, calls in request["calls"]
        }
        # A late or broken answer is told to the model like an error of the tool.
        return [
            [
                [failure(answer["error"]), True] if isinstance(answer, dict) else answer
                for answer in answers
            ]
            for answers in self._asked(messages).values()
        ]

    def _asked(self, messages: Mapping[int, Sequence[Json]]) -> dict[int, list[Any]]:
        """The answers of all episodes, which work at the same time; each has its own messages one after the other."""
        waiting = {number: deque(of_episode) for number, of_episode in messages.items()}
        answers: dict[int, list[Any]] = {number: [] for number in messages}
        deadlines = dict[int, float]()

        def go_on(number: int) -> None:
            """Sends the next message of an episode; of one that is over, answers them all."""
            deadlines.pop(number, None)
            episode = self._running[number]
            while waiting[number]:
                message = waiting[number].popleft()
                if episode.problem is None:
                    episode.send(message)
                    deadlines[number] = time.monotonic() + self._seconds
                    return
                answers[number].append({"error": episode.problem})

        def give_up(number: int, problem: str) -> None:
            episode = self._running[number]
            episode.close()
            answers[number].append({"error": problem})
            if self._toolbox.environment is None:  # functions have no state that is lost
                self._running[number] = self._begun()
            else:
                episode.problem = f"the environment is gone: {problem}"
            go_on(number)

        for number in messages:
            go_on(number)
        while deadlines:
            poll = select.poll()
            numbers = {self._running[number].socket.fileno(): number for number in deadlines}
            for descriptor in numbers:
                poll.register(descriptor, select.POLLIN)
            seconds_left = min(deadlines.values()) - time.monotonic()
            ready = poll.poll(max(0.0, seconds_left) * 1000)
            for descriptor, _ in ready:
                number = numbers[descriptor]
                try:
                    answer = self._running[number].answer()
                except EOFError as error:
                    give_up(number, str(error))
                    continue
                if answer is not None:
                    answers[number].append(answer)
                    go_on(number)
            now = time.monotonic()
            for number in [number for number, deadline in deadlines.items() if deadline <= now]:
                give_up(number, f"it took longer than {self._seconds:g} s")
        return answers

    def _begun(self) -> Episode:
        others = [episode.socket.fileno() for episode in self._running.values()]
        # Those of episodes that are over are closed, which have no number any more.
        connections = [self._connection, *(number for number in others if number >= 0)]
        return Episode(self._toolbox, self._memory, connections)

    def _close(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            episode = self._running.pop(number, None)
            if episode is not None:
                episode.close()
        if not self._running:
            _kill_orphans()


def _kill_orphans() -> None:
    """Ends what tools have left behind, which is a child of this process by now.

    Each that ends leaves its own children to this process: it looks again until there are none.
    """
    deadline = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < deadline:
        orphans = _children()
        if not orphans:
            return
        for process in orphans:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in orphans:
            with suppress(ChildProcessError):
                os.waitpid(process, 0)


def _children() -> list[int]:
    me = os.getpid()
    processes = list[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == me:
                processes.append(int(path.parent.name))
    return processes


if __name__ == "__main__":
    main()
