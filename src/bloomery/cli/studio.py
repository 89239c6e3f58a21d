"""`bloomery studio`: runs in the browser."""

import secrets
from importlib.util import find_spec

import click

from bloomery.cli.common import echo
from bloomery.core.errors import UserError


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
def command(host: str, port: int, token: str | None, no_open: bool) -> None:
    """Show the runs of this folder in the browser, until Ctrl+C.

    Runs are processes of their own: they train on when this ends. The printed address has a token, without which
    nothing is shown; any other --host than 127.0.0.1 needs a --token of yours.

    Example: bloomery studio --no-open
    """
    from bloomery.serve.address import LOCAL, bound, refuse_weak, unguarded

    if host not in LOCAL and not token:
        raise unguarded(host, f"bloomery studio --host {host} --token $(openssl rand -hex 16)")
    if token is not None:
        refuse_weak(token, "the token", "--token")
    if find_spec("nicegui") is None:
        fix = 'pip install "bloomery[studio]"'
        raise UserError("bloomery studio needs NiceGUI", where="this environment", fix=fix)

    with bound(host, port) as listener:
        from bloomery.studio.application import serve_studio

        if host not in LOCAL:
            echo(
                f"open       {host} lets other machines in: with the token they read every run, start and stop\n"
                "           training, and thereby run programs as you. The connection is not encrypted.",
                err=True,
            )

        def announce(url: str) -> None:
            echo(f"studio     {url}  (Ctrl+C ends it; runs train on)", err=True)

        serve_studio(
            listener,
            host=host,
            token=token or secrets.token_urlsafe(16),
            on_ready=announce,
            show=not no_open,
        )
    echo("stopped", err=True)
