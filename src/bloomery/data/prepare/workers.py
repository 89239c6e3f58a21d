"""Documents to ids on all cores: child processes that read texts from a pipe and write ids to another.

Examples travel as example_wire writes them and are rendered where they are encoded, so that templates use all cores.
Pipes of plain bytes and not multiprocessing: nothing is pickled, no `__main__` runs twice, and the children end with
their parent.
"""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar, final

import numpy as np

from bloomery.core.errors import UserError
from bloomery.data.chat.examples import Example, from_wire
from bloomery.data.chat.render import Renderer, Sequence
from bloomery.data.sources.streams import Flaw
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

_FAILED = 2**32 - 1
_PLAIN = "\n"  # before a text among examples, which begin with a quotation mark
_Tag = TypeVar("_Tag")


@dataclass(frozen=True)
class Encoded:
    """Ids of documents one after the other, and how many each has.

    Of examples: an example has as many documents as answers, all of length 0 where `flaws` says, by the example's
    number, why it has none; `learned` is a byte a token.
    """

    ids: np.ndarray[Any, np.dtype[Any]]
    lengths: np.ndarray[Any, np.dtype[np.uint64]]
    learned: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    flaws: dict[int, Flaw] = field(default_factory=dict)


class Encoder(Protocol):
    def encode(self, texts: list[str]) -> Encoded: ...


@dataclass(frozen=True)
class Rendering:
    """How examples become tokens: the recipe's data.chat, and how many answers each has."""

    template: str | None
    train_on: Literal["assistant", "all", "last"]
    answers: int
    verbatim: bool = False  # of pretraining: texts stay texts

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        return Renderer(tokenizer, template=self.template, train_on=self.train_on, verbatim=self.verbatim)


def packed_example(example: Example, wire: str) -> str:
    """What travels of an example."""
    return f"{json.dumps(example.source)}\n{wire}"


def packed_text(text: str) -> str:
    """What travels of a text among examples."""
    return _PLAIN + text


def _unpacked_example(text: str) -> Example:
    source, _, wire = text.partition("\n")
    return from_wire(wire, json.loads(source))


@final
class Inline:
    """Encodes in this process: [bos] + ids + [eos] a document, eos left out where it is the bos."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ends = tokenizer.eos_id if tokenizer.eos_id != tokenizer.bos_id else None
        self._bos, self._eos = (
            b"" if i is None else np.array([i], tokenizer.dtype).tobytes() for i in (tokenizer.bos_id, ends)
        )

    def encode(self, texts: list[str]) -> Encoded:
        documents = [self._bos + self._tokenizer.encode_array(text).tobytes() + self._eos for text in texts]
        size = np.dtype(self._tokenizer.dtype).itemsize
        lengths = np.array([len(document) // size for document in documents], np.uint64)
        return Encoded(np.frombuffer(b"".join(documents), self._tokenizer.dtype), lengths)


@final
class Rendered:
    """Renders and encodes in this process, with nothing added to what the template writes. A text among the examples is
    encoded as Inline does, and all of it is learned.
    """

    def __init__(self, tokenizer: Tokenizer, rendering: Rendering) -> None:
        self._inline = Inline(tokenizer)
        self._renderer = rendering.renderer(tokenizer)
        self._answers, self._dtype = rendering.answers, tokenizer.dtype

    def encode(self, texts: list[str]) -> Encoded:
        examples = [_unpacked_example(text) for text in texts if not text.startswith(_PLAIN)]
        rendered = iter(self._renderer.encode_batch(examples))
        ids, learned, flaws = [np.zeros(0, self._dtype)], [np.zeros(0, np.uint8)], dict[int, Flaw]()
        for number, text in enumerate(texts):
            found = self._whole(text) if text.startswith(_PLAIN) else next(rendered)
            if isinstance(found, Flaw):
                flaws[number] = found
                found = (Sequence([], []),) * self._answers
            assert len(found) == self._answers
            ids += [np.array(sequence.ids, self._dtype) for sequence in found]
            learned += [np.array(sequence.learned, np.uint8) for sequence in found]
        lengths = np.array([len(part) for part in ids[1:]], np.uint64)
        return Encoded(np.concatenate(ids), lengths, np.concatenate(learned), flaws)

    def _whole(self, text: str) -> tuple[Sequence, ...]:
        ids = self._inline.encode([text.removeprefix(_PLAIN)]).ids.tolist()
        return (Sequence(ids, [True] * len(ids)),)

    def close(self) -> None:
        self._renderer.close()


@final
class _Child:
    """One process and the parent's ends of its pipes."""

    def __init__(self, folder: Path, dtype: str, rendering: Rendering | None) -> None:
        said = [] if rendering is None else [json.dumps(asdict(rendering))]
        command = [sys.executable, "-m", "bloomery.data.prepare.workers", str(folder), *said]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=2**20)
        self._dtype, self._structured = dtype, rendering is not None

    def encode(self, texts: list[str]) -> Encoded:
        assert self._process.stdin and self._process.stdout
        try:
            _write(self._process.stdin, [text.encode() for text in texts])
            lengths, content = _read(self._process.stdout)
            beside = _read(self._process.stdout) if self._structured else None
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            raise UserError(f"a process that made tokens died (code {code})", where="prepare",
                            remedy="if memory ran out, set data.workers to a smaller number") from error  # fmt: skip
        ids = np.frombuffer(content, self._dtype)
        if beside is None:
            return Encoded(ids, lengths)
        learned, flaws = beside[1][: len(ids)], json.loads(beside[1][len(ids) :])
        found = {int(number): Flaw(*parts) for number, parts in flaws.items()}
        return Encoded(ids, lengths, np.frombuffer(learned, np.uint8), found)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        try:
            self._process.stdin.close()
        except BrokenPipeError:  # what was not yet sent goes nowhere
            return


def _write(stream: BinaryIO | Any, parts: list[bytes], lengths: list[int] | None = None) -> None:
    sizes = [len(part) for part in parts] if lengths is None else lengths
    total = sum(len(part) for part in parts)
    stream.write(struct.pack(f"<IQ{len(sizes)}Q", len(sizes), total, *sizes))
    for part in parts:
        stream.write(part)
    stream.flush()


def _read(stream: BinaryIO | Any) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], bytes]:
    count, total = struct.unpack("<IQ", _exactly(stream, 12))
    if count == _FAILED:
        problem, where, remedy = json.loads(_exactly(stream, total))
        raise UserError(problem, where=where or "prepare", remedy=remedy or "use another tokenizer file")
    lengths = np.frombuffer(_exactly(stream, 8 * count), np.uint64)
    return lengths, _exactly(stream, total)


def _exactly(stream: BinaryIO | Any, count: int) -> bytes:
    content: bytes = stream.read(count)
    if len(content) < count:
        raise EOFError
    return content


@contextmanager
def encoders(
    folder: Path, tokenizer: Tokenizer, workers: int, rendering: Rendering | None = None
) -> Iterator[list[Encoder]]:
    """`workers` processes that encode with the tokenizer in `folder`, or this process alone for 0 and 1; texts, or
    with `rendering` examples.
    """
    if workers <= 1:
        if rendering is None:
            yield [Inline(tokenizer)]
            return
        with closing(Rendered(tokenizer, rendering)) as rendered:
            yield [rendered]
        return
    with ExitStack() as stack:
        children = [_Child(folder, tokenizer.dtype, rendering) for _ in range(workers)]
        for child in children:
            stack.callback(child.close)
        yield list(children)


def encode_in_order(jobs: Iterable[tuple[_Tag, list[str]]], using: list[Encoder]) -> Iterator[tuple[_Tag, Encoded]]:
    """Every job's ids in the order of the jobs, whoever finishes first. At most two jobs an encoder are in flight."""
    if len(using) == 1:
        yield from ((tag, using[0].encode(texts)) for tag, texts in jobs)
        return
    waiting: list[tuple[_Tag, Future[Encoded]]] = []
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in using]
        stack.callback(lambda: [future.cancel() for _, future in waiting])
        for number, (tag, texts) in enumerate(jobs):
            turn = number % len(using)
            waiting.append((tag, threads[turn].submit(using[turn].encode, texts)))
            if len(waiting) >= 2 * len(using):
                first, future = waiting.pop(0)
                yield first, future.result()
        while waiting:
            first, future = waiting.pop(0)
            yield first, future.result()


def count_workers(asked: int | str, bytes_of_text: float, *, rendered: bool = False) -> int:
    """Processes for so much text, never more than there are cores: starting one costs as much as encoding some 10 MB,
    or rendering 1 MB.
    """
    each = 1_000_000 if rendered else 10_000_000
    return min(asked if isinstance(asked, int) else max(1, int(bytes_of_text) // each), cores())


def cores() -> int:
    """Of this machine, for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fewer_workers(asked: int | str) -> str | None:
    """What to say of a recipe that asks for more processes than the machine has cores."""
    if isinstance(asked, int) and asked > cores():
        return f"data.workers={asked:,} starts {cores():,} processes, as many as this machine has cores"
    return None


def main() -> None:
    """A child: frames of texts on stdin, frames of ids on stdout, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole group; the parent decides
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = load_tokenizer(Path(sys.argv[1]))
    chat = Rendering(**json.loads(sys.argv[2])) if len(sys.argv) > 2 else None
    encoder = Inline(tokenizer) if chat is None else Rendered(tokenizer, chat)
    try:
        while True:
            sizes, content = _read(source)
            ends = np.cumsum(sizes).tolist()
            texts = [content[end - int(size) : end].decode() for size, end in zip(sizes, ends, strict=True)]
            _answer(sink, encoder, texts)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent is gone or done: no flush of a pipe that nobody reads


def _answer(sink: BinaryIO, encoder: Encoder, texts: list[str]) -> None:
    try:
        encoded = encoder.encode(texts)
    except UserError as error:
        message = json.dumps([error.problem, error.where, error.remedy]).encode()
        sink.write(struct.pack("<IQ", _FAILED, len(message)) + message)
        sink.flush()
        return
    _write(sink, [encoded.ids.tobytes()], [int(length) for length in encoded.lengths])
    if encoded.learned is not None:
        flaws = {number: [flaw.where, flaw.problem, flaw.remedy] for number, flaw in encoded.flaws.items()}
        _write(sink, [encoded.learned.tobytes(), json.dumps(flaws).encode()])


if __name__ == "__main__":
    main()
