"""The program under test and its grader, two processes inside the sandbox; both run this file. Standard library alone.

The grader holds the test of the task and writes the verdict. The program's process defines functions and is called
through pipes: values go there and back as JSON, and come back as built-in types. So nothing that a program patches,
reads, writes or ends decides: it must return what the test asks for. A pipe to the verdict is the grader's alone, and
the kernel lets no process of the sandbox look into the grader's memory.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, NoReturn

MOST = 2**24  # bytes of a message
ITEMS = 10_000  # of an iterator that a function returns
LARGE = 2**53  # whole numbers from here on are sent in hexadecimal
SET_UP_FAILED = 70  # exit code
PR_SET_DUMPABLE = 4  # linux/prctl.h
PASSED = "passed"
FAILED = "failed: "
# Types whose values are sent as their name and the list or text that makes them again.
SENT: dict[Any, Callable[[Any], Any]] = {
    tuple: list,
    set: list,
    frozenset: list,
    bytearray: lambda value: value.hex(),
    bytes: lambda value: value.hex(),
    range: lambda value: [value.start, value.stop, value.step],
    complex: lambda value: [value.real, value.imag],
    collections.deque: list,
    decimal.Decimal: str,
    fractions.Fraction: str,
    datetime.datetime: datetime.datetime.isoformat,
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
}
MADE: dict[str, Callable[[Any], Any]] = {
    **{str(kind.__name__): kind for kind in SENT},
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "complex": lambda parts: complex(*parts),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "iterator": iter,
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "dict": dict,
    "builtin": lambda name: getattr(builtins, name),
}
# sent as lists
LISTS: tuple[type, ...] = (list, type({}.keys()), type({}.values()), type({}.items()))
Message = dict[str, Any]


class EndedError(BaseException):
    """The program ended, or sent what is no message. No test can catch it by `except Exception`."""


def packed(value: Any, pack_other: Callable[[Any], Any]) -> Any:
    """JSON of a value; `pack_other` gives that of values that are not plain data."""
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value) if abs(value) < LARGE else {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, LISTS):
        entries: Iterator[Any] = iter(value)  # type: ignore[call-overload]
        return [packed(entry, pack_other) for entry in entries]
    if isinstance(value, dict):
        return {
            "dict": [
                [packed(key, pack_other), packed(entry, pack_other)] for key, entry in value.items()
            ]
        }
    for kind, parts in SENT.items():
        if isinstance(value, kind):
            parts_sent = parts(value)
            return {
                kind.__name__: packed(parts_sent, pack_other)
                if isinstance(parts_sent, list)
                else parts_sent
            }
    if isinstance(value, Iterator):
        return {"iterator": [packed(entry, pack_other) for entry in itertools.islice(value, ITEMS)]}
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return {"builtin": name}
    return pack_other(value)


def unpacked(content_sent: Any, unpack_other: Callable[[str, Any], Any]) -> Any:
    """The value of JSON; `unpack_other` makes those that the other process named."""
    if isinstance(content_sent, list):
        return [unpacked(entry, unpack_other) for entry in content_sent]
    if not isinstance(content_sent, dict):
        return content_sent
    ((kind, content),) = content_sent.items()
    if kind not in MADE:
        return unpack_other(kind, content)
    if kind == "dict":
        return {
            unpacked(key, unpack_other): unpacked(entry, unpack_other) for key, entry in content
        }
    return MADE[kind](unpacked(content, unpack_other) if isinstance(content, list) else content)


class Talk:
    """Messages of two processes through two pipes, one JSON object per line."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading = reading
        self.writing = writing
        self.unread = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        while unsent:
            try:
                unsent = unsent[os.write(self.writing, unsent) :]
            except BrokenPipeError:
                raise EndedError("ended without a result") from None

    def receive(self) -> Message:
        while (end := self.unread.find(b"\n")) < 0:
            piece = os.read(self.reading, 2**16)
            if not piece or len(self.unread) > MOST:
                raise EndedError("a value is too large" if piece else "ended without a result")
            self.unread += piece
        line = bytes(self.unread[:end])
        del self.unread[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise EndedError("the program wrote to the channel of its results") from None
        if not isinstance(message, dict):
            raise EndedError("the program wrote to the channel of its results")
        return message


# The process of the program


def answer_grader(talk: Talk) -> NoReturn:
    """Runs the program, then answers what the grader asks for, for ever."""
    job = talk.receive()
    objects = list[Any]()
    sys.modules.update(dict.fromkeys(job["banned"]))  # None: the import is refused
    names: dict[str, Any] = {"__name__": "__main__"}

    def remember(value: Any) -> Any:
        objects.append(value)
        return {"remote": [len(objects) - 1, type(value).__name__]}

    def of_the_test(kind: str, content: Any) -> Any:
        if kind == "remote":
            return objects[content[0]]

        def callback(*arguments: Any) -> Any:
            talk.send(
                {
                    "callback": content,
                    "arguments": [packed(argument, remember) for argument in arguments],
                }
            )
            answer = talk.receive()
            if "raised" in answer:
                raise error_of(answer["raised"], names)
            return unpacked(answer["value"], of_the_test)

        return callback

    def answer(request: Message) -> Message:
        if "get" in request:
            return {"value": packed(eval(request["get"], names), remember)}
        target = objects[request["remote"]]
        if "attribute" in request:
            return {"value": packed(getattr(target, request["attribute"]), remember)}
        arguments = [unpacked(argument, of_the_test) for argument in request["arguments"]]
        keywords = {
            name: unpacked(argument, of_the_test) for name, argument in request["keywords"].items()
        }
        value = packed(target(*arguments, **keywords), remember)
        return {"value": value, "arguments": [packed(argument, remember) for argument in arguments]}

    request: Message = {}
    while True:
        try:
            if request:
                message = answer(request)
            else:
                exec(compile(job["program"], "program", "exec"), names)
                message = {"value": None}
        except BaseException as error:
            message = {"raised": raised(error)}
        talk.send(message)
        request = talk.receive()


def raised(error: BaseException) -> list[Any]:
    """The names of an exception's classes, its arguments as far as they are plain, and its text."""
    names = [kind.__name__ for kind in type(error).__mro__]
    arguments = [packed(argument, lambda value: str(type(value))) for argument in error.args]
    return [names, arguments, str(error)[:300]]


def error_of(error_message: Sequence[Any], names: Mapping[str, Any]) -> BaseException:
    """The exception of the first class that is known here, so that a test can expect it."""
    kinds, arguments, text = error_message
    for kind in kinds:
        error_class = names.get(kind, getattr(builtins, str(kind), None))
        if isinstance(error_class, type) and issubclass(error_class, Exception):
            for candidate_arguments in (
                [unpacked(argument, lambda *_: None) for argument in arguments],
                [text],
            ):
                # an exception that wants other arguments: its base class, then
                with suppress(Exception):
                    return error_class(*candidate_arguments)
    return EndedError(f"{kinds[0]}: {text}"[:300])


# The process of the grader


class Remote:
    """Something of the program that is no plain value: it can be called, and has attributes. It equals only itself."""

    def __init__(self, program: "Program", number: int, kind: str) -> None:
        self._program = program
        self._number = number
        self._kind = kind

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._program.call(self._number, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask({"remote": self._number, "attribute": name})[0]

    def __repr__(self) -> str:
        return f"a {self._kind} of the program"


class Program:
    """The program as its grader sees it."""

    def __init__(self, talk: Talk, names: dict[str, Any]) -> None:
        self.talk = talk
        self.names = names
        self.functions = list[Any]()

    def call(self, number: int, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """What the function returns. Lists, sets and dicts among the arguments are changed as the function did."""
        value, changed_arguments = self.ask(
            {
                "remote": number,
                "arguments": [packed(entry, self._named) for entry in arguments],
                "keywords": {name: packed(entry, self._named) for name, entry in keywords.items()},
            }
        )
        for argument, changed_argument in zip(arguments, changed_arguments, strict=False):
            if isinstance(argument, list | bytearray) and isinstance(
                changed_argument, list | bytearray
            ):
                argument[:] = changed_argument
            elif isinstance(argument, set | dict) and isinstance(changed_argument, set | dict):
                argument.clear()
                argument.update(changed_argument)
        return value

    def ask(self, message: Message) -> tuple[Any, list[Any]]:
        """A value, and the arguments after a call. Raises what the program raised, or EndedError."""
        self.talk.send(message)
        answer = self.talk.receive()
        try:
            while "callback" in answer:
                self.talk.send(self._called(answer))
                answer = self.talk.receive()
            if "raised" in answer:
                error = error_of(answer["raised"], self.names)
            else:
                value = unpacked(answer["value"], self._remote)
                return value, [
                    unpacked(argument, self._remote) for argument in answer.get("arguments", ())
                ]
        except (
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ):
            raise EndedError("the program wrote to the channel of its results") from None
        raise error

    def _called(self, request: Message) -> Message:
        function = self.functions[request["callback"]]
        arguments = [unpacked(argument, self._remote) for argument in request["arguments"]]
        try:
            return {"value": packed(function(*arguments), self._named)}
        except Exception as error:
            return {"raised": raised(error)}

    def _named(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"remote": [value._number, value._kind]}
        if not callable(value):
            raise TypeError(f"the test passes a {type(value).__name__}, which is no plain value")
        self.functions.append(value)
        return {"function": len(self.functions) - 1}

    def _remote(self, kind: str, content: Any) -> Any:
        if kind != "remote":
            raise ValueError(kind)
        number, name = content
        return Remote(self, int(number), str(name)[:80])


def known_names(prompt: str) -> dict[str, Any]:
    """What the beginning of the program defines that the task's author wrote: imports and helpers that a test may use.

    Its last function has no body yet.
    """
    names: dict[str, Any] = {"__name__": "test"}
    imports = "\n".join(
        line for line in prompt.splitlines() if line.startswith(("import ", "from "))
    )
    for text in (
        prompt,
        *(f"{prompt.rstrip()}\n{' ' * width}pass\n" for width in (1, 2, 4, 8)),
        imports,
    ):
        with suppress(SyntaxError):
            code = compile(text, "prompt", "exec")
            with suppress(Exception):  # then the program, which begins with it, fails as well
                exec(code, names)
            break
    return names


def used_names(code: Any) -> Iterator[str]:
    """Names that a code object and the functions in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from used_names(constant)


def grade(job: Message, talk: Talk) -> None:
    """Raises what the test raises; returns when it passes."""
    names = known_names(job["prompt"])
    test = compile(job["test"], "test", "exec")
    program = Program(talk, names)
    program.ask({"program": job["program"], "banned": job["banned"]})
    candidate, _ = program.ask({"get": job["entry_point"]})
    if job["entry_point"].isidentifier():
        names[job["entry_point"]] = candidate
    exec(test, names)
    for name in set(used_names(test)) - names.keys() - vars(builtins).keys():
        with suppress(Exception):  # not the program's either: the test fails where it uses the name
            names[name], _ = program.ask({"get": name})
    check = names["check"]
    if not isinstance(check, FunctionType):
        raise EndedError("the test defines no function check(candidate)")
    check(candidate)


def run_grader(talk: Talk, verdict_pipe: int) -> NoReturn:
    """Reads the job from stdin and writes the verdict to `verdict_pipe`."""
    job = json.loads(sys.stdin.buffer.read())
    try:
        import ctypes

        hidden = ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    except (ImportError, OSError):
        hidden = False
    if not hidden:
        os.write(verdict_pipe, b"the grader's memory cannot be hidden from the program")
        os._exit(SET_UP_FAILED)
    try:
        grade(job, talk)
        verdict = PASSED
    except EndedError as error:
        verdict = f"{FAILED}{error}"
    except BaseException as error:
        verdict = f"{FAILED}{type(error).__name__}: {error}"[:300]
    os.write(verdict_pipe, verdict.encode(errors="replace"))
    os._exit(0)


def main() -> NoReturn:
    role, reading, writing, *rest = sys.argv[1:]
    talk = Talk(int(reading), int(writing))
    verdict_pipe = int(rest[0]) if rest else -1
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (1, 2) if role == "grader" else (0, 1, 2):
        os.dup2(null, stream)
    if role == "grader":
        run_grader(talk, verdict_pipe)
    try:
        answer_grader(talk)
    except BaseException:
        os._exit(1)


if __name__ == "__main__":
    main()
