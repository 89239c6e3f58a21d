"""Who may send requests, how many at once, and how refusals are worded, in OpenAI's form or in Anthropic's."""

import asyncio
import hmac
import secrets
from collections.abc import Sequence
from typing import Any, final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from bloomery.serve.limits import RETRY_SECONDS, Refused

# of a request that is refused, so that its client reads the answer
DRAIN_SECONDS = 1.0
DRAIN_BYTES = 4 * 2**20
MESSAGES = "/v1/messages"  # Anthropic's endpoints begin so
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def refusal(path: str, error: Refused) -> Response:
    """The answer, in the form of the API that the path belongs to."""
    later = {"Retry-After": str(RETRY_SECONDS)} if error.status == 503 else None
    body = anthropic_error(error) if is_anthropic(path) else error.body
    return JSONResponse(body, error.status, later)


def is_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def anthropic_error(error: Refused) -> dict[str, Any]:
    """An error as Anthropic words it."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_KINDS.get(error.status, usual)
    described: dict[str, Any] = {"type": kind, "message": error.body["error"]["message"]}
    if error.body["error"]["param"] == "thread":
        # From this Anthropic's client learns to send whole conversations, and sends its request again.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        described |= {"details": details}
    return {
        "type": "error",
        "error": described,
        "request_id": f"req_{secrets.token_hex(12)}",
    }


def refused(request: Request, error: Exception) -> Response:
    """A handler of starlette."""
    assert isinstance(error, Refused)
    return refusal(request.url.path, error)


def http_error(request: Request, error: Exception) -> Response:
    """A handler of starlette."""
    assert isinstance(error, HTTPException)
    response = refusal(request.url.path, Refused(error.status_code, error.detail))
    response.headers.update(error.headers or {})
    return response


@final
class Guard:
    """Refuses requests that name another host, lack the token, or are too many at once. The page holds no secret.

    What is refused before its body has arrived ends its connection: nobody reads the rest.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, hosts: Sequence[str], most_requests: int
    ) -> None:
        self.app = app
        self.token = token
        self.hosts = frozenset(hosts)
        self.most = most_requests
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = GuardedBody(receive, send)
        # The token comes first: a stranger learns nothing of a server, not even that it is busy.
        refused = self._stranger(scope)
        if refused is None and scope["path"] != "/health" and self.open >= self.most:
            refused = Refused(
                503, f"{self.open} requests are open; try again later", code="queue_full"
            )
        if refused is not None:
            await refusal(scope["path"], refused)(scope, body.receive, body.send)
            return
        self.open += 1
        try:
            await self.app(scope, body.receive, body.send)
        finally:
            self.open -= 1

    def _stranger(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        host = (
            host.rpartition(":")[0]
            if host.rpartition(":")[2].isdecimal() and not host.endswith("]")
            else host
        )
        if self.hosts and host not in self.hosts:
            return Refused(403, f"this server is not {host[:80]!r}")
        if self.token is not None and scope["path"] not in ("/", "/health"):
            # Anthropic's clients send their key in a header of its own.
            sent = headers.get("authorization") or headers.get("x-api-key", "")
            client_token = sent.removeprefix("Bearer ").encode()
            if not hmac.compare_digest(client_token, self.token.encode()):
                return Refused(401, "wrong or missing token", code="invalid_api_key")
        return None


@final
class GuardedBody:
    """The messages of one request. An answer before its body has arrived drops a little of the rest, and closes."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._arrived = False

    async def receive(self) -> Event:
        event = await self._receive()
        if event["type"] != "http.request" or not event.get("more_body", False):
            self._arrived = True
        return event

    async def send(self, event: Event) -> None:
        if event["type"] == "http.response.start" and not self._arrived:
            await self._drain()
            if not self._arrived:
                MutableHeaders(scope=event)["Connection"] = "close"
        await self._send(event)

    async def _drain(self) -> None:
        """A connection that closes on unread data is reset, and its client may lose the answer."""
        dropped = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._arrived and dropped < DRAIN_BYTES:
                    dropped += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return
