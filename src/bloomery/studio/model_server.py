"""The models that studio lets you try: loaded by one `bloomery serve`, which ends with studio. No torch."""

import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Literal, final

import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from bloomery.core.child import kill_group
from bloomery.core.errors import UserError
from bloomery.core.text import harmless, redact_secrets
from bloomery.serve.address import TOKEN
from bloomery.studio import commands

IDLE_SECONDS = 300.0  # after the last look at its page, a model frees its memory
MOST_MODELS = 2
PATHS = ("", "v1/models", "v1/chat/completions", "v1/completions")  # of the server, for its page
_ADDRESS = re.compile(r"^serving +(http://127\.0\.0\.1:\d+/)")
_FORWARDED = ("content-type", "content-security-policy", "cache-control")
State = Literal["loading", "ready", "ended"]


@final
class ModelServer:
    """Mutable: a `bloomery serve` with these models on 127.0.0.1, with a token that only this process has."""

    def __init__(self, models: Sequence[str], device: str) -> None:
        self.models = tuple(models)
        self.device = device
        self.token = secrets.token_urlsafe(24)
        self.url: str | None = None
        self.used = time.monotonic()
        self._lines: deque[str] = deque(maxlen=40)
        environment = {name: text for name, text in os.environ.items() if name != commands.TOKEN}
        options = ["--port=0", f"--parent={os.getpid()}", f"--devices={device}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bloomery", "serve", *options, "--", *models],
            stdin=subprocess.PIPE,  # closes when studio ends, however that happens
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**environment, TOKEN: self.token},
        )
        threading.Thread(target=self._read, name="model server", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode("utf-8", errors="replace").rstrip()
            if match := _ADDRESS.match(text):
                self.url = match[1]
            self._lines.append(redact_secrets(harmless(text.rpartition("\r")[2])))

    @property
    def state(self) -> State:
        if self._process.poll() is not None:
            return "ended"
        return "loading" if self.url is None else "ready"

    def text(self) -> str:
        """The end of what it has printed."""
        return "\n".join(self._lines.copy())

    def close(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()


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
            if current is not None and current.state != "ended":
                if (current.models, current.device) == (tuple(models), device):
                    current.used = time.monotonic()
                    return current
                current.close()
            self.current = ModelServer(models, device)
            threading.Thread(
                target=self._end_when_idle, args=(self.current,), name="idle model", daemon=True
            ).start()
            return self.current

    def _end_when_idle(self, server: ModelServer) -> None:
        while server.state != "ended":
            left = server.used + IDLE_SECONDS - time.monotonic()
            if left <= 0:
                server.close()
                return
            time.sleep(min(left, 5.0))

    def close(self) -> None:
        with self._lock:
            if self.current is not None:
                self.current.close()

    async def forward(self, request: Request) -> Response:
        """A request of the server's page, with the token. The page itself needs none."""
        path = request.path_params["path"]
        server = self.current
        if path not in PATHS:
            return PlainTextResponse("not a path of the chat\n", 404)
        if server is None or server.state != "ready":
            return PlainTextResponse("no model is loaded\n", 503)
        server.used = time.monotonic()
        client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), trust_env=False)
        headers = {"Authorization": f"Bearer {server.token}"}
        if kind := request.headers.get("content-type"):
            headers["Content-Type"] = kind
        sent = client.build_request(
            request.method, f"{server.url}{path}", headers=headers, content=await request.body()
        )
        try:
            answer = await client.send(sent, stream=True)
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
