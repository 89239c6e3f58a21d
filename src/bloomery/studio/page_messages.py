"""Messages of pages over the websocket: what no page sends is left out, before a handler fails over it. No torch.

NiceGUI's handlers read a message as its own script writes it. One of another form, from somebody who has the token,
would end in a traceback on studio's terminal; a text for the log would be printed with its control characters.
"""

import json
import logging
from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import parse_qs

from socketio.exceptions import ConnectionRefusedError

from bloomery.core.text import harmless

LONGEST_LOG = 2000  # characters of a message of a page that are printed
_OPTIONAL_TEXT = (str, type(None))
# Of each event the entries that its handler reads, with their types.
FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "event": {"client_id": (str,), "id": (int,), "listener_id": (str,)},
    "handshake": {"client_id": (str,), "tab_id": (str,), "document_id": (str,)},
    "javascript_response": {"client_id": (str,), "request_id": (str,)},
    "ack": {"client_id": (str,), "next_message_id": (int,)},
    "log": {"client_id": (str,), "level": (str,), "message": (str,)},
}
_LEVELS = ("debug", "info", "warning", "error")
# What the libraries raise over bytes that are no packet, or a packet that is no message.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def leave_out_odd_messages(server: Any) -> None:
    """Puts a check before each handler of this socket.io server, which has NiceGUI's handlers already."""
    handlers = server.handlers["/"]
    for name in FIELDS:
        handlers[name] = _checked(name, handlers[name])
    handlers["connect"] = _checked_connect(handlers["connect"])
    logging.getLogger("engineio.server").addFilter(_is_no_malformed_packet)


def is_message(name: str, message: Any) -> bool:
    """Whether the handler of this event can read it."""
    if not isinstance(message, dict):
        return False
    if not all(isinstance(message.get(key), kinds) for key, kinds in FIELDS[name].items()):
        return False
    if name == "event":
        arguments = message.get("args", [])
        return isinstance(arguments, list) and all(map(_is_argument, arguments))
    if name == "handshake":
        return isinstance(message.get("old_tab_id"), _OPTIONAL_TEXT) and _is_number(
            message.get("next_message_id")
        )
    return name != "log" or message["level"] in _LEVELS


def _is_argument(argument: Any) -> bool:
    """JSON, or nothing."""
    if argument is None:
        return True
    try:
        json.loads(argument)
    except _MALFORMED:
        return False
    return True


def _is_number(value: Any) -> bool:
    """A whole number, also as text, or nothing."""
    return value is None or isinstance(value, int) or (isinstance(value, str) and value.isdecimal())


def _checked(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    def prepared(messages: tuple[Any, ...]) -> dict[str, Any] | None:
        if len(messages) != 1 or not is_message(name, messages[0]):
            return None
        message: dict[str, Any] = messages[0]
        if name == "log":
            message["message"] = harmless(message["message"])[:LONGEST_LOG]
        return message

    if iscoroutinefunction(handler):

        async def answer(sid: str, *messages: Any) -> Any:
            message = prepared(messages)
            return False if message is None else await handler(sid, message)

        return answer

    def act(sid: str, *messages: Any) -> None:
        message = prepared(messages)
        if message is None:
            return
        try:
            handler(sid, message)
        except KeyError:  # of an element or a listener that the page has no more
            return

    return act


def _checked_connect(handler: Callable[..., Any]) -> Callable[..., Any]:
    async def connect(sid: str, environment: dict[str, Any], *authentication: Any) -> Any:
        query = parse_qs(environment.get("QUERY_STRING", ""))
        values = {name: texts[0] for name, texts in query.items()}
        if values.get("implicit_handshake") == "true" and not is_message("handshake", values):
            raise ConnectionRefusedError("no handshake of a page")
        return await handler(sid, environment, *authentication)

    return connect


def _is_no_malformed_packet(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], _MALFORMED)
