"""The limits of a server, and how it answers what is beyond them."""

from dataclasses import dataclass
from pathlib import Path

RETRY_SECONDS = 2  # after which a client may ask a full server again
MOST_OPEN_BODIES = 32  # requests of the largest size that may be read and tokenized at once
SEEING_BODY = 32 * 2**20  # of a request to a model that sees, where nobody sets another limit
MOST_OPEN_BYTES = 2**28  # of such requests together
MOST_WAITING_BYTES = 2**31  # of what towers are given, of requests that wait for a slot


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`slots`: texts that are decoded at once, per model. `context`: tokens of prompt and output; None: as many as the
    model and the memory allow. `queue`: requests that wait. `seconds`: of a request, waiting included. `body_bytes`: of
    a request. `pictures`: of a request. `media_folder`: whose files requests may name; None: of none.
    """

    slots: int = 8
    context: int | None = None
    new_tokens: int = 2048
    queue: int = 64
    seconds: float = 600.0
    body_bytes: int = 2 * 2**20
    pictures: int = 16
    media_folder: Path | None = None

    @property
    def open_bytes(self) -> int:
        """Of requests that may be read and tokenized at once."""
        return max(self.body_bytes, min(MOST_OPEN_BODIES * self.body_bytes, MOST_OPEN_BYTES))

    @property
    def requests(self) -> int:
        """Requests that may be open at once, whatever they wait for."""
        return 4 * (self.slots + self.queue) + 64


class Refused(Exception):
    """An answer other than 200, as OpenAI words it."""

    def __init__(
        self, status: int, problem: str, *, code: str | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(problem)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": problem, "type": kind, "param": parameter, "code": code}}
