"""The process that scores while others train: `python -m bloomery.train.scorers.worker SOCKET PARENT`.

It loads the teacher and the reward models of a plan, and answers the requests of its training ranks one after the other
until the one that started it ends. A thread per rank reads its requests, and another one writes the answers, so that
neither side waits for the other to read.
"""

import queue
import socket
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from bloomery.core.child import LONGEST_REASON, Message, accept, loading, reply, requests
from bloomery.core.errors import UserError

WAITING_RANKS_SECONDS = 600.0  # until all of them have connected, which they do at once


@final
@dataclass(frozen=True)
class Client:
    """A training rank, by its connection, with the answers that are to be written."""

    connection: socket.socket
    answers: "queue.SimpleQueue[tuple[Mapping[str, Any], bytes]]" = field(
        default_factory=queue.SimpleQueue
    )

    def serve(self, arrived: "queue.SimpleQueue[tuple[Client, Message]]") -> None:
        """Starts the threads that read its requests and write its answers."""
        for work in (lambda: self._read(arrived), self._write):
            threading.Thread(target=work, name="a training rank", daemon=True).start()

    def _read(self, arrived: "queue.SimpleQueue[tuple[Client, Message]]") -> None:
        for request in requests(self._job):
            arrived.put((self, request))

    def _write(self) -> None:
        while True:
            message, content = self.answers.get()
            try:
                reply(self._job, message, content)
            except (BrokenPipeError, ConnectionResetError):  # the rank has ended
                return

    @property
    def _job(self) -> Mapping[str, Any]:
        return {"socket": self.connection.fileno()}


def main() -> None:
    job = accept()
    arrived = queue.SimpleQueue[tuple[Client, Message]]()
    clients = connected_clients(int(job["listener"]), int(job["clients"]))
    for client in clients:
        client.serve(arrived)
    try:
        with loading():
            from bloomery.train.scorers.models import ScoringModels

        models = ScoringModels.load(job["plan"], int(job["device_index"]))
        for client in clients:
            client.answers.put((models.description(), b""))
        while True:
            client, request = arrived.get()
            message, content = models.attempt(request)
            client.answers.put(({**message, "number": request["number"]}, content))
    except Exception as error:
        # The ranks raise it, and end this process when they have.
        traceback.print_exc()
        report = report_of(error)
        for client in clients:
            client.answers.put(({"error": report}, b""))
        threading.Event().wait()


def connected_clients(listener: int, count: int) -> list[Client]:
    with socket.socket(fileno=listener) as listening:
        listening.settimeout(WAITING_RANKS_SECONDS)
        connections = [listening.accept()[0] for _ in range(count)]
    for connection in connections:
        connection.setblocking(True)
    return [Client(connection) for connection in connections]


def report_of(error: Exception) -> dict[str, Any]:
    """The fields of a UserError."""
    if isinstance(error, UserError):
        texts = {"problem": error.problem, "where": error.where, "fix": error.fix}
        return {**texts, "code": error.code}
    if is_out_of_memory(error):
        return {
            "problem": "out of memory while a teacher or a reward model was loaded to score",
            "fix": "set objective.teacher_quantize=nf4, or choose smaller models",
        }
    return {
        "problem": f"scoring failed: {type(error).__name__}: {error}"[:LONGEST_REASON],
        "where": "the traceback is in the log of the run",
    }


def is_out_of_memory(error: Exception) -> bool:
    from bloomery.train.process import out_of_memory

    return out_of_memory(error)


if __name__ == "__main__":
    main()
