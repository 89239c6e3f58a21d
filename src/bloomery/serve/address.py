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
        raise UserError(
            f"{host} can be reached from other machines",
            where="--host",
            code=2,
            fix=f"set {TOKEN}, which clients send as their API key: export {TOKEN}=$(openssl rand -hex 16)",
        )
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        problem = f"{TOKEN} is too short, or not plain ASCII"
        fix = "use 8 characters or more"
        raise UserError(problem, where="the environment", fix=fix, code=2)
    return token


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
