"""Where a server listens, and the token that clients of other machines send. Does not import torch."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bloomery.core.errors import UserError

TOKEN = "BLOOMERY_SERVE_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")


def token_for(host: str, environment: Mapping[str, str]) -> str | None:
    """The token that clients must send. Raises UserError for an open address without one."""
    token = environment.get(TOKEN)
    if host not in LOCAL and not token:
        fix = f"set {TOKEN}, which clients send as their API key: export {TOKEN}=$(openssl rand -hex 16)"
        raise unguarded(host, fix)
    if token is not None:
        refuse_weak(token, TOKEN, "the environment")
    return token


def unguarded(host: str, fix: str) -> UserError:
    problem = f"{host} can be reached from other machines"
    return UserError(problem, where="--host", code=2, fix=fix)


def refuse_weak(token: str, name: str, where: str) -> None:
    """Raises UserError for a token that is too short, or that no header can have."""
    if len(token) < 8 or not token.isascii() or not token.isprintable():
        problem = f"{name} is too short, or not plain ASCII"
        raise UserError(problem, where=where, fix="use 8 characters or more", code=2)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at the address, which does not listen yet. Raises UserError for an address that is taken or unknown."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise taken(error, host, port) from error
        yield listener


def taken(error: OSError, host: str, port: int) -> UserError:
    fix = f"choose another: --port {port + 1 if port < 65535 else 0}"
    return UserError(f"cannot listen: {error.strerror}", where=f"{host}:{port}", fix=fix, code=2)
