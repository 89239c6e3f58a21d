"""Where a server listens, and the token that clients of other machines send. Does not import torch."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from bloomery.core.errors import UserError

TOKEN = "BLOOMERY_SERVE_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")
# Every address of this machine, which is none to open: a browser here takes the one on the right.
_EVERY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}
# Addresses for documentation (RFC 5737, RFC 3849): no machine has them, so the way there is that to other networks.
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


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


def url_of(host: str, port: int) -> str:
    """Of a server that listens at `host`, for a browser of this machine."""
    return f"http://{_EVERY.get(host) or (f'[{host}]' if ':' in host else host)}:{port}/"


def url_for_others(url: str, host: str) -> str | None:
    """`url` of a server that listens at `host`, as other machines reach it; None where that is `url`, or none does."""
    if host not in _EVERY:
        return None
    families = [socket.AF_INET] if host != "::" else [socket.AF_INET6, socket.AF_INET]
    address = next(filter(None, map(_own_address, families)), socket.gethostname())
    name = f"[{address}]" if ":" in address else address
    parts = urlsplit(url)
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()


def _own_address(family: socket.AddressFamily) -> str | None:
    """The address from which this machine reaches other networks; None without a network. Nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[family], 9))
        address = str(probe.getsockname()[0])
        return None if address.startswith("127.") or address == "::1" else address
    return None


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
