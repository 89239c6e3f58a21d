"""`bloomery studio`: runs in the browser."""

import secrets
import socket
from importlib.util import find_spec

import click

from bloomery.cli.common import echo
from bloomery.core.child import die_with_parent
from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8100,
    show_default=True,
    help="Listen on this port.",
)
@click.option(
    "--token",
    envvar="BLOOMERY_STUDIO_TOKEN",
    show_envvar=True,
    help="Ask browsers for this token (default: a new one).",
)
@click.option("--no-open", is_flag=True, help="Print the address, open no browser.")
@click.option("--parent", type=int, hidden=True)  # a notebook, which shows studio in a frame
def command(host: str, port: int, token: str | None, no_open: bool, parent: int | None) -> None:
    """Show the runs of this folder in the browser, until Ctrl+C.

    Runs are processes of their own: they train on when this ends. The printed address has a token, without which
    nothing is shown; any other --host than 127.0.0.1 needs a --token of yours.

    Example: bloomery studio --no-open
    """
    from bloomery.serve.address import LOCAL, bound, refuse_weak, unguarded

    if parent is not None:
        die_with_parent(parent)
    if host not in LOCAL and not token:
        # Not as --token: every user of this machine can read the arguments of a process.
        fix = "export BLOOMERY_STUDIO_TOKEN=$(openssl rand -hex 16)"
        raise unguarded(host, f"{fix}; then run this again")
    if token is not None:
        refuse_weak(token, "the token", "--token")
    refuse_without_nicegui()
    with bound(host, port) as listener:
        if host not in LOCAL:
            echo(
                f"open       {host} lets other machines in: with the token they read every run, start and stop\n"
                "           training, and thereby run programs as you. The connection is not encrypted.",
                err=True,
            )
        show(listener, host, token=token, opens=not no_open, for_notebook=parent is not None)


def refuse_without_nicegui() -> None:
    """Raises UserError where the extra is not installed."""
    if find_spec("nicegui") is None:
        fix = install_extra("studio")
        raise UserError("bloomery studio needs NiceGUI", where="this environment", fix=fix)


def show(
    listener: socket.socket,
    host: str,
    *,
    token: str | None = None,
    opens: bool = True,
    address: str = "/",
    for_notebook: bool = False,
) -> None:
    """Studio until Ctrl+C. `address`: of the page that is printed and, if `opens`, opened in a browser."""
    from bloomery.serve.address import url_for_others
    from bloomery.studio.application import serve_studio

    def announce(url: str) -> None:
        echo(f"studio     {url}  (Ctrl+C ends it; runs train on)", err=True)
        if (others := url_for_others(url, host)) is not None:
            echo(f"others     {others}  (from another machine)", err=True)

    serve_studio(
        listener,
        host=host,
        token=token or secrets.token_urlsafe(16),
        on_ready=announce,
        show=opens,
        address=address,
        for_notebook=for_notebook,
    )
    echo("stopped", err=True)
