"""The pages of studio as one application, and the server that answers with it until Ctrl+C."""

import gc
import socket
import threading
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.middleware.gzip import GZipMiddleware
from nicegui import Client, app, core, ui
from starlette.exceptions import HTTPException

from bloomery.core.text import harmless
from bloomery.serve.address import url_of
from bloomery.serve.limits import Limits
from bloomery.serve.listen import answer, hosts_of, listen, uvicorn_config
from bloomery.studio.chat_page import chat_page, link_to_chat
from bloomery.studio.commands import Commands
from bloomery.studio.compare_page import compare_page
from bloomery.studio.components import sentence
from bloomery.studio.downloads import ADDRESS, download
from bloomery.studio.frame import failure_of, nothing_here, page
from bloomery.studio.guard import StudioGuard
from bloomery.studio.machine_page import machine_page
from bloomery.studio.model_server import ModelServers
from bloomery.studio.models_page import models_page
from bloomery.studio.new_run_page import new_run_page
from bloomery.studio.page_messages import leave_out_odd_messages
from bloomery.studio.run_page import run_page
from bloomery.studio.runs_page import runs_page
from bloomery.studio.sensors import shared_sensors
from bloomery.studio.watching import Watching

LIMITS = Limits(
    slots=16, queue=128
)  # of connections: a browser holds one per page, and some for its files

COMPRESSION = 2  # ECharts takes 0.02 s instead of 0.12 at level 9, for a fifth more bytes
PAGE_SECONDS = 60.0  # to build a page, on a machine whose cores train


def add_pages(watching: Watching, commands: Commands) -> None:
    """Registers every page with NiceGUI, which has one application per process."""
    servers = ModelServers()

    async def runs() -> None:
        await runs_page(watching, commands)

    async def one_run(name: str) -> None:
        await run_page(watching, commands, name)

    async def run_of_a_sweep(sweep: str, name: str) -> None:
        await run_page(watching, commands, f"{sweep}/{name}")

    async def new_run(request: Request) -> None:
        await new_run_page(watching, commands, request.query_params)

    async def compare(runs: str = "", over: str = "", sweep: str = "") -> None:
        await compare_page(watching, commands, runs, over, sweep)

    async def machine() -> None:
        await machine_page(shared_sensors(), commands)

    async def models() -> None:
        await models_page(commands)

    async def chat(request: Request) -> None:
        query = request.query_params
        # A link on a page of another origin loads no model, and ends none.
        is_foreign = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if is_foreign:
            link_to_chat(f"/chat?{query}")
        else:
            await chat_page(servers, query.getlist("model"), query.get("device", ""))

    for address, build in (
        ("/", runs),
        ("/run/{name}", one_run),
        ("/run/{sweep}/{name}", run_of_a_sweep),
        ("/new", new_run),
        ("/compare", compare),
        ("/machine", machine),
        ("/models", models),
        ("/chat", chat),
    ):
        ui.page(address, response_timeout=PAGE_SECONDS)(build)
    app.exception_handler(404)(_not_found)
    app.on_page_exception(_server_error)
    app.add_route("/serve/{path:path}", servers.forward, methods=["GET", "POST"])
    app.add_route(ADDRESS, download, methods=["GET"])
    app.on_shutdown(servers.close)


def _server_error(error: Exception) -> None:
    """The page in place of one that could not be built."""
    failure = failure_of(error)
    with page("Error", "", tells_errors=False):
        nothing_here("This page failed", failure.problem, failure.fix, ("All runs", "/"))
        sentence(f"where: {failure.where}", "muted", small=True)


async def _not_found(request: Request, error: Exception) -> Response:
    """A page for an address that is none; what is no page, such as a script, is answered without one."""
    endpoint = request.scope.get("endpoint")
    if endpoint not in (None, app) and isinstance(error, HTTPException):
        return await http_exception_handler(request, error)
    with Client(ui.page(""), request=request) as client, page("No such page", ""):
        problem = f"no page {harmless(request.url.path)[:80]}"
        remark = "It may have been typed wrongly: the pages are in the list at the side."
        nothing_here("No such page", problem, remark, ("All runs", "/"))
    return client.build_response(request, 404)


def serve_studio(
    listener: socket.socket,
    *,
    host: str,
    token: str,
    on_ready: Callable[[str], None],
    show: bool,
    address: str = "/",
    for_notebook: bool = False,
) -> None:
    """Answers requests until SIGINT or SIGTERM. `address`: of the page that is opened first. `for_notebook`: pages of
    this machine may have studio in a frame. Raises UserError where the address is taken by now."""
    listen(listener, host)
    watching = Watching()
    add_pages(watching, Commands())
    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(
        application,
        title="Bloomery",
        dark=None,
        language="en-US",
        reconnect_timeout=30.0,
        show_welcome_message=False,
        tailwind=False,  # it compiles in the browser, again at each change: style.css has what pages use
        gzip_middleware_factory=partial(GZipMiddleware, compresslevel=COMPRESSION),
    )
    leave_out_odd_messages(core.sio)
    # What has been made so far stays: looking at it again and again would be a sixth of reading a long run.
    gc.collect()
    gc.freeze()
    port = listener.getsockname()[1]
    url = url_of(host, port)
    guard = StudioGuard(application, token, hosts_of(host), port, for_notebook=for_notebook)
    config = uvicorn_config(guard, LIMITS, ws="websockets-sansio", lifespan="on")

    def begin(address: str) -> None:
        threading.Thread(target=watching.look_around, name="first-look", daemon=True).start()
        on_ready(address)

    first_page = f"{url.rstrip('/')}{address}"
    answer(
        config,
        listener,
        f"{first_page}?token={token}",
        on_ready=begin,
        on_stop=watching.processes.close,
        opened=f"{first_page}?token={guard.new_key()}" if show else None,
    )
