"""A server over tiny models in this process, on a port of its own."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn

from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.infer.grammar import JsonGrammars
from bloomery.infer.model_folder import find_model
from bloomery.infer.picture_prompts import load_eyes
from bloomery.model.adapters.many import Adapters
from bloomery.model.io.weights import load_decoder
from bloomery.plan.types import EpisodesPlan
from bloomery.serve.app import Server
from bloomery.serve.engine import Engine
from bloomery.serve.limits import Limits
from bloomery.serve.listen import uvicorn_config
from bloomery.serve.served import Served, readable_source, serve_loaded
from bloomery.serve.server_tools import ServerTools

LIMITS = Limits(slots=4, context=120, new_tokens=100, queue=200, seconds=60, body_bytes=20_000)


@dataclass
class Running:
    url: str
    engine: Engine
    models: list[Served]


def serve_command(folder: Path, *options: str) -> subprocess.Popen[str]:
    """`bloomery serve` as users start it, on a port of its own; its stderr is a pipe."""
    words = [sys.executable, "-m", "bloomery", "serve", str(folder), *options]
    words += ["--port=0", "--template=chatml", "--devices=cpu"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=folder.parent)


@contextmanager
def running(
    folders: dict[str, Path],
    *,
    limits: Limits = LIMITS,
    adapters: dict[str, Path] | None = None,
    token: str | None = None,
    defaults: dict[str, Any] | None = None,
    template: str | None = "chatml",
    episodes: EpisodesPlan | None = None,
) -> Iterator[Running]:
    with ExitStack() as stack:
        models = []
        for name, folder in folders.items():
            decoder = load_decoder(folder)
            many = Adapters(decoder, adapters) if adapters else None
            tokenizer = load_tokenizer(folder)
            files = find_model(folder)
            source = readable_source(files, print)
            if source is not None:
                load_eyes(decoder, files, source)
            models.append(
                serve_loaded(decoder, tokenizer, name, limits, stack, template, many, source)
            )
        engine = stack.enter_context(Engine(models, limits))
        tools = None
        if episodes is not None:
            tools = ServerTools(episodes, models, most=limits.slots)
            stack.callback(tools.close)
        endpoints = Server(engine, token=token, defaults=defaults, tools=tools)
        app = endpoints.app(("127.0.0.1", "localhost"))
        server = uvicorn.Server(uvicorn_config(app, limits, port=0))
        thread = threading.Thread(target=server.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(lambda: setattr(server, "should_exit", True))
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", engine, models)
        endpoints.close()
        engine.close()


def grammar_takes(
    grammars: JsonGrammars, grammar: str, text: str, tokenizer: Tokenizer, end: int
) -> bool:
    """Whether the text, and the token that ends an answer behind it, may be sampled under a grammar."""
    follow = grammars.follow(grammar)
    for token in (*tokenizer.encode(text, special=True), end):
        if follow.masked(torch.zeros(tokenizer.vocab_size))[token] != 0:
            return False
        follow.take(token)
    return True
