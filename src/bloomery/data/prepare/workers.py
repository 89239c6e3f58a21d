"""Encode documents in worker processes. They also format examples with the chat template."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, final

import numpy as np

from bloomery.core.child import Child, accept, reply, requests
from bloomery.core.errors import UserError
from bloomery.data.chat.render import EncodedText, Renderer
from bloomery.data.chat.written import PartCounts
from bloomery.data.examples import BadRow, from_wire
from bloomery.data.pictures.encoder import PictureEncoder, VisionSource
from bloomery.data.sources.documents import Document
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
_HOURS = 1e6  # seconds: no time limit; a child that dies is noticed
_Tag = TypeVar("_Tag")


@dataclass(frozen=True)
class EncodedBatch:
    """Ids of documents, one after the other, and the length of each.

    An example has one document per response, of length 0 where `bad_rows`, by the example's number, has the reason.
    `loss_mask`: one byte per token.
    """

    ids: Array
    lengths: np.ndarray[Any, np.dtype[np.uint64]]
    loss_mask: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    bad_rows: dict[int, BadRow] = field(default_factory=dict)
    pictures: list[tuple[bytes, ...]] = field(
        default_factory=list
    )  # of each document with a loss mask
    parts: PartCounts = field(default_factory=dict)  # that the chat template leaves out


class Encoder(Protocol):
    def encode(self, documents: list[Document]) -> EncodedBatch: ...


@dataclass(frozen=True)
class Rendering:
    """How examples are tokenized: the recipe's data.chat, the documents per example, and the longest prompt."""

    template: str | None
    train_on: Literal["assistant", "all", "last"]
    responses: int
    verbatim: bool = False  # for pretraining: texts are not formatted
    max_prompt_tokens: int | None = None  # of prompts without responses
    variables: Mapping[str, bool | int | float | str] | None = None  # of the template
    vision: VisionSource | None = None

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        return Renderer(
            tokenizer,
            template=self.template,
            train_on=self.train_on,
            verbatim=self.verbatim,
            variables=self.variables,
            pictures=None if self.vision is None else PictureEncoder(self.vision),
        )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Rendering":
        """From its JSON."""
        vision = fields["vision"]
        return cls(**{**fields, "vision": None if vision is None else VisionSource(**vision)})


@final
class LocalEncoder:
    """Encodes in this process. A text is [bos] + ids + [eos], without eos where it equals bos; next to examples all of
    it is trained on. Nothing is added to text that a template formatted.
    """

    def __init__(self, tokenizer: Tokenizer, rendering: Rendering | None) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.dtype(tokenizer.dtype)
        self._rendering = rendering
        self._renderer = rendering.renderer(tokenizer) if rendering is not None else None
        ends = tokenizer.eos_id if tokenizer.eos_id != tokenizer.bos_id else None
        self._bos, self._eos = (
            np.array([] if token is None else [token], self._dtype).tobytes()
            for token in (tokenizer.bos_id, ends)
        )

    def encode(self, documents: list[Document]) -> EncodedBatch:
        parts = list[bytes]()
        loss_mask = list[Array]()
        bad_rows = dict[int, BadRow]()
        pictures = list[tuple[bytes, ...]]()
        examples = [document.example for document in documents if document.example is not None]
        rendered = iter(self._renderer.encode_batch(examples) if self._renderer is not None else [])
        for number, document in enumerate(documents):
            if document.example is None:
                parts.append(
                    self._bos + self._tokenizer.encode_array(document.text).tobytes() + self._eos
                )
                loss_mask.append(np.ones(len(parts[-1]) // self._dtype.itemsize, np.uint8))
                pictures.append(())
                continue
            assert self._rendering is not None
            encoded = next(rendered)
            if document.example.kind == "prompt" and not isinstance(encoded, BadRow):
                encoded = self._without_misfits(document, encoded)
            if isinstance(encoded, BadRow):
                bad_rows[number] = encoded
                encoded = (EncodedText([], []),) * self._rendering.responses
            assert len(encoded) == self._rendering.responses
            parts += [np.array(sequence.ids, self._dtype).tobytes() for sequence in encoded]
            loss_mask += [np.array(sequence.loss_mask, np.uint8) for sequence in encoded]
            pictures += [sequence.pictures for sequence in encoded]
        ids = np.frombuffer(b"".join(parts), self._dtype)
        lengths = np.array([len(part) // self._dtype.itemsize for part in parts], np.uint64)
        if self._renderer is None:
            return EncodedBatch(ids, lengths)
        flags = np.concatenate([np.zeros(0, np.uint8), *loss_mask])
        return EncodedBatch(ids, lengths, flags, bad_rows, pictures, self._renderer.take_parts())

    def _without_misfits(
        self, document: Document, encoded: tuple[EncodedText, ...]
    ) -> tuple[EncodedText, ...] | BadRow:
        """A prompt, or why the model cannot complete it."""
        assert self._rendering is not None
        count = len(encoded[0].ids)
        limit = self._rendering.max_prompt_tokens
        if not count:
            return BadRow(document.source, "has a prompt without tokens")
        if limit is None or count <= limit:
            return encoded
        room = f"{limit:,} (data.sequence_length - objective.max_completion_length)"
        problem = f"has a prompt of {count:,} tokens, and a prompt may have {room}"
        fix = f"raise data.sequence_length by {count - limit:,}, or set data.on_error=skip"
        return BadRow(document.source, problem, fix)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()


@final
class _ChildEncoder:
    """A LocalEncoder in a process of its own."""

    def __init__(self, folder: Path, dtype: str, rendering: Rendering | None) -> None:
        job = {"folder": str(folder), "rendering": None if rendering is None else asdict(rendering)}
        self._child = Child("bloomery.data.prepare.workers", job, environment=os.environ).start()
        self._dtype = np.dtype(dtype)
        self._structured = rendering is not None

    def encode(self, documents: list[Document]) -> EncodedBatch:
        parts = [document.wire for document in documents]
        sources = [None if document.example is None else document.source for document in documents]
        request = {"sizes": [len(part) for part in parts], "sources": sources}
        response = self._child.ask(request, b"".join(parts), seconds=_HOURS)
        if isinstance(response, str):
            raise UserError(
                f"a tokenizing process died (code {self._child.code})",
                where="prepare",
                fix="if it was out of memory, set data.num_proc to a smaller number",
            )
        if "refused" in response:
            problem, where, fix = response["refused"]
            raise UserError(
                problem, where=where or "prepare", fix=fix or "use another tokenizer file"
            )
        content = response.get("content", b"")
        lengths = np.array(response["lengths"], np.uint64)
        end = int(lengths.sum()) * self._dtype.itemsize
        ids = np.frombuffer(content[:end], self._dtype)
        if not self._structured:
            return EncodedBatch(ids, lengths)
        bad_rows = {int(number): BadRow(*parts) for number, parts in response["bad_rows"].items()}
        end_of_mask = end + len(ids)
        loss_mask = np.frombuffer(content[end:end_of_mask], np.uint8)
        pictures = _unjoined(content[end_of_mask:], response["picture_sizes"])
        return EncodedBatch(ids, lengths, loss_mask, bad_rows, pictures, response["parts"])

    def close(self) -> None:
        self._child.close()


def _unjoined(content: bytes, sizes: list[list[int]]) -> list[tuple[bytes, ...]]:
    """The pictures of each document, which follow each other in `content`."""
    stream = io.BytesIO(content)
    return [tuple(stream.read(size) for size in of_document) for of_document in sizes]


@contextmanager
def encoders(
    folder: Path, tokenizer: Tokenizer, workers: int, rendering: Rendering | None = None
) -> Iterator[list[Encoder]]:
    """`workers` processes that encode with the tokenizer in `folder`; for 0 and 1 this process alone. `rendering`: for
    examples.
    """
    with ExitStack() as stack:
        if workers <= 1:
            yield [stack.enter_context(closing(LocalEncoder(tokenizer, rendering)))]
            return
        children = (_ChildEncoder(folder, tokenizer.dtype, rendering) for _ in range(workers))
        yield [stack.enter_context(closing(child)) for child in children]


def encode_in_order(
    jobs: Iterable[tuple[_Tag, list[Document]]], using: list[Encoder]
) -> Iterator[tuple[_Tag, EncodedBatch]]:
    """The ids of every job, in the order of the jobs. At most two jobs per encoder are in flight."""
    if len(using) == 1:
        yield from ((tag, using[0].encode(documents)) for tag, documents in jobs)
        return
    waiting: list[tuple[_Tag, Future[EncodedBatch]]] = []
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in using]
        stack.callback(lambda: [future.cancel() for _, future in waiting])
        for number, (tag, documents) in enumerate(jobs):
            turn = number % len(using)
            waiting.append((tag, threads[turn].submit(using[turn].encode, documents)))
            if len(waiting) >= 2 * len(using):
                first_tag, future = waiting.pop(0)
                yield first_tag, future.result()
        while waiting:
            first_tag, future = waiting.pop(0)
            yield first_tag, future.result()


def count_workers(num_proc: int | str, bytes_of_text: float, *, rendered: bool = False) -> int:
    """Processes for a dataset of this size, at most one per core. Starting one costs as much as encoding about 10 MB or
    rendering 1 MB.
    """
    bytes_per_worker = 1_000_000 if rendered else 10_000_000
    return min(
        num_proc if isinstance(num_proc, int) else max(1, int(bytes_of_text) // bytes_per_worker),
        cores(),
    )


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fewer_workers(num_proc: int | str) -> str | None:
    """The warning for a recipe with more processes than the machine has cores."""
    if isinstance(num_proc, int) and num_proc > cores():
        return f"data.num_proc={num_proc:,} starts {cores():,} processes, as many as this machine has cores"
    return None


def main() -> None:
    """The worker process: reads documents, writes ids."""
    job = accept()
    rendering = None if job["rendering"] is None else Rendering.of(job["rendering"])
    encoder = LocalEncoder(load_tokenizer(Path(job["folder"])), rendering)
    for request in requests(job):
        content = request.get("content", b"")
        documents = list[Document]()
        end = 0
        for size, source in zip(request["sizes"], request["sources"], strict=True):
            text = content[end : end + size].decode()
            documents.append(
                Document("", text) if source is None else Document(source, from_wire(text, source))
            )
            end += size
        try:
            batch = encoder.encode(documents)
        except UserError as error:
            reply(job, {"refused": [error.problem, error.where, error.fix]})
            continue
        loss_mask = b"" if batch.loss_mask is None else batch.loss_mask.tobytes()
        bad_rows = {
            number: (bad_row.where, bad_row.reason, bad_row.fix)
            for number, bad_row in batch.bad_rows.items()
        }
        reply(
            job,
            {
                "lengths": batch.lengths.tolist(),
                "bad_rows": bad_rows,
                "parts": batch.parts,
                "picture_sizes": [[len(each) for each in of_one] for of_one in batch.pictures],
            },
            b"".join((batch.ids.tobytes(), loss_mask, *chain(*batch.pictures))),
        )


if __name__ == "__main__":
    main()
