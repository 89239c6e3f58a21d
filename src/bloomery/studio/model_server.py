"""The models that studio lets you try: loaded by one `bloomery serve`, which ends with studio. No torch."""

import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import final

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from bloomery.core.errors import UserError
from bloomery.serve.address import TOKEN
from bloomery.studio import commands
from bloomery.studio.listening import ListeningProcess, parent_option

IDLE_SECONDS = 300.0  # after the last look at its page, a model frees its memory
MOST_MODELS = 2
PATHS = ("", "v1/models", "v1/chat/completions", "v1/completions")  # of the server, for its page
_ADDRESS = r"^serving +(http://127\.0\.0\.1:\d+/)"
_FORWARDED = ("content-type", "content-security-policy", "cache-control")


@final
class ModelServer:
    """Mutable: a `bloomery serve` with these models on 127.0.0.1, with a token that only this process has."""

    def __init__(self, models: Sequence[str], device: str) -> None:
        self.models = tuple(models)
        self.device = device
        self.token = secrets.token_urlsafe(24)
        self.used = time.monotonic()
        environment = {name: text for name, text in os.environ.items() if name != commands.TOKEN}
        self.process = ListeningProcess(
            *("serve", "--port=0", parent_option(), f"--devices={device}", "--", *models),
            address=_ADDRESS,
            environment={**environment, TOKEN: self.token},
            folder=Path.cwd(),
        )


@final
class ModelServers:
    """Mutable: at most one server, so that models do not add up in the memory of a device that may train."""

    def __init__(self) -> None:
        self.current: ModelServer | None = None
        self._lock = threading.Lock()

    def open(self, models: Sequence[str], device: str = "auto") -> ModelServer:
        """The server with these models; the one with others ends. Raises UserError for a wrong number of models."""
        if not 1 <= len(models) <= MOST_MODELS or len(set(models)) < len(models):
            fix = f"choose 1 to {MOST_MODELS} different ones in the list of models"
            raise UserError(f"cannot chat with {len(models)} models", where="studio", fix=fix)
        with self._lock:
            current = self.current
            if current is not None and current.process.state != "ended":
                if (current.models, current.device) == (tuple(models), device):
                    current.used = time.monotonic()
                    return current
                current.process.close()
            self.current = ModelServer(models, device)
            threading.Thread(
                target=self._end_when_idle, args=(self.current,), name="idle model", daemon=True
            ).start()
            return self.current

    def _end_when_idle(self, server: ModelServer) -> None:
        while server.process.state != "ended":
            left = server.used + IDLE_SECONDS - time.monotonic()
            if left <= 0:
                server.process.close()
                return
            time.sleep(min(left, 5.0))

    def close(self) -> None:
        with self._lock:
            if self.current is not None:
                self.current.process.close()

    async def forward(self, request: Request) -> Response:
        """A request of the server's page, with the token. The page itself needs none."""
        path = request.path_params["path"]
        server = self.current
        if path not in PATHS:
            return PlainTextResponse("not a path of the chat\n", 404)
        if server is None or server.process.state != "ready":
            return PlainTextResponse("no model is loaded\n", 503)
        server.used = time.monotonic()
        client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), trust_env=False)
        headers = {"Authorization": f"Bearer {server.token}"}
        if kind := request.headers.get("content-type"):
            headers["Content-Type"] = kind
        sent = client.build_request(
            request.method,
            f"{server.process.url}{path}",
            headers=headers,
            # In pieces: the server refuses a body that is too large, before it is in memory.
            content=request.stream() if request.method == "POST" else None,
        )
        try:
            answer = await client.send(sent, stream=True)
        except ClientDisconnect:
            await client.aclose()
            return Response(status_code=499)
        except httpx.HTTPError as error:
            await client.aclose()
            return PlainTextResponse(f"the model's process does not answer: {error}\n", 502)

        async def pieces() -> AsyncIterator[bytes]:
            # A page that goes away ends the generation: its connection to the server closes here.
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()
                await client.aclose()

        kept = {name: text for name, text in answer.headers.items() if name in _FORWARDED}
        return StreamingResponse(pieces(), answer.status_code, headers=kept)
