"""The ports of this host at which ranks meet."""

import errno
import socket

from bloomery.core.errors import UserError


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_taken(port: int) -> bool:
    """Whether another process listens at the port, so that torch's store could not."""
    with socket.socket() as listener:
        # As the store does: connections of an earlier run that are still closing do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def port_taken(address: str, port: int | str) -> UserError:
    return UserError(
        f"port {port} of {address} is taken, so the ranks cannot meet",
        where=f"MASTER_PORT={port}",
        fix="unset MASTER_PORT, or set a free one",
    )
