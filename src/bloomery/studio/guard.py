"""Who may talk to studio: requests with the token, to this host, from its own pages. Does not import torch."""

import hmac
import html
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# NiceGUI compiles templates in the browser, hence 'unsafe-eval'; nothing loads from another host.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; object-src 'none'; frame-ancestors 'self'"
)
_NOTEBOOKS = f"{POLICY} http://localhost:* http://127.0.0.1:*"  # they may have studio in a frame
PACKET_TYPES = "0123456"  # the first character of a packet, by Engine.IO's protocol of version 4
_HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@final
class StudioGuard:
    """Refuses requests without the token, for another host, or from a page of another origin.

    The printed address has the token: it becomes a cookie, and leaves the address. A program sends it as
    `Authorization: Bearer TOKEN`. `hosts`: the only ones that requests may name; empty: any.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        hosts: tuple[str, ...],
        port: int,
        *,
        for_notebook: bool = False,
    ) -> None:
        """`for_notebook`: pages of this machine may have studio in a frame."""
        self.app = app
        self.policy = _NOTEBOOKS if for_notebook else POLICY
        self.token = token
        self.hosts = frozenset(hosts)
        self.cookie = f"bloomery_studio_{port}"  # browsers share cookies between ports
        self._key: str | None = None

    def new_key(self) -> str:
        """In an address it is as good as the token, once: for a browser that is started with the address as an
        argument, which every user of this machine can read.
        """
        self._key = secrets.token_urlsafe(16)
        return self._key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        response = self._refusal(scope)
        if response is None:
            try:
                await self.app(scope, _packets_of(receive), _with_headers(send, self.policy))
            except RuntimeError as error:
                # Of a middleware of NiceGUI's, where the browser has left before its page was built.
                if str(error) != "No response returned.":
                    raise
        elif scope["type"] == "http":
            await response(scope, receive, _with_headers(send, self.policy))
        else:  # before it is accepted, a closed websocket is answered with 403
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.hosts and _without_port(host) not in self.hosts:
            return PlainTextResponse(f"studio is not {host[:80]!r}", 403)
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return PlainTextResponse("requests from pages of another origin are refused", 403)

        # A page of another port of this host sends the cookie too, and no origin with its images and scripts.
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if is_foreign and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("requests from pages of another origin are refused", 403)

        # The token in the address, once; then the cookie.
        parameters = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        given = [value for name, value in parameters if name == "token"]
        if given and scope["type"] == "http":
            is_token = self._is_token(given[0])
            if is_token and scope["method"] not in ("GET", "HEAD"):  # no log shall have it
                return PlainTextResponse("only an address to open has a token", 400)
            if not is_token and not (scope["method"] == "GET" and self._take_key(given[0])):
                return _closed("wrong token")
            rest = urlencode([(name, value) for name, value in parameters if name != "token"])
            # As it came: the name of a run may hold an encoded "?". One slash at the beginning: two would name another
            # host.
            path = "/" + scope["raw_path"].decode("ascii").lstrip("/\\")
            address = f"{path}?{rest}" if rest else path
            answer: Response = RedirectResponse(address, 303)
            if headers.get("sec-fetch-site") == "cross-site":
                # A browser follows a redirect from a link on a page of another site, such as a terminal in a browser,
                # without the cookie: this page goes on by itself.
                go_on = f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">'
                answer = HTMLResponse(f"<!DOCTYPE html><title>Bloomery</title>{go_on}")
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(_cookie(headers, self.cookie)):
            return None
        return _closed("the token is missing")

    def _take_key(self, text: str) -> bool:
        is_key = self._key is not None and _same(text, self._key)
        if is_key:
            self._key = None
        return is_key

    def _is_token(self, text: str) -> bool:
        return _same(text, self.token)


def _same(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", errors="replace"), secret.encode())


def _closed(problem: str) -> Response:
    return PlainTextResponse(f"{problem}: open the address that `bloomery studio` printed\n", 401)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() and not host.endswith("]") else host


def _cookie(headers: Headers, name: str) -> str:
    jar = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[name].value if name in jar else ""


def _packets_of(receive: Receive) -> Receive:
    """Without messages of a websocket that are no packet of Engine.IO, over which its handler would fail."""

    async def receiving() -> Message:
        message = await receive()
        while message["type"] == "websocket.receive" and not _is_packet(message):
            message = await receive()
        return message

    return receiving


def _is_packet(message: Message) -> bool:
    text = message.get("text")
    return bool(message.get("bytes")) if not text else text[0] in PACKET_TYPES


def _with_headers(send: Send, policy: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Content-Security-Policy"] = policy
            for name, value in _HEADERS.items():
                headers[name] = value
        await send(message)

    return sending
