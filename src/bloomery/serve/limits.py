"""The limits of a server, and how it answers what is beyond them."""

from dataclasses import dataclass

RETRY_SECONDS = 2  # after which a client may ask a full server again
MOST_OPEN_BODIES = 32  # requests of the largest size that may be read and tokenized at once


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`slots`: texts that are decoded at once, per model. `context`: tokens of prompt and output; None: as many as the
    model and the memory allow. `queue`: requests that wait. `seconds`: of a request, waiting included. `body_bytes`: of
    a request.
    """

    slots: int = 8
    context: int | None = None
    new_tokens: int = 2048
    queue: int = 64
    seconds: float = 600.0
    body_bytes: int = 2 * 2**20

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
