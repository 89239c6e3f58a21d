"""Responses that /v1/responses keeps in memory, up to so many bytes, for `previous_response_id` and references."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bloomery.serve.limits import Refused
from bloomery.serve.parameters import Json

MOST_BYTES = 64 * 2**20
_WAY_OUT = (
    "send the whole conversation as input; the server keeps the newest responses, until it ends"
)


@final
@dataclass(frozen=True)
class Kept:
    """A response, the items of its whole conversation, and their size."""

    response: Json
    conversation: tuple[Json, ...]
    size: int


@final
class KeptResponses:
    """Mutable. The oldest responses are dropped first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept = OrderedDict[str, Kept]()
        self._items = dict[str, tuple[str, Json]]()  # id -> (id of its response, item)

    def keep(self, response: Json, conversation: Sequence[Json]) -> None:
        """`conversation`: the items of the input, those of earlier responses too."""
        items = (*conversation, *response["output"])
        kept = Kept(response, items, len(json.dumps([response, items])))
        self._kept[response["id"]] = kept
        self._bytes += kept.size
        self._items |= {item["id"]: (response["id"], item) for item in response["output"]}
        while self._bytes > self._most_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, name: str) -> None:
        """Raises Refused (404) for a response that is not kept."""
        kept = self.of(name)
        del self._kept[name]
        self._bytes -= kept.size
        for item in kept.response["output"]:
            del self._items[item["id"]]

    def of(self, name: str) -> Kept:
        """Raises Refused (404) for a response that is not kept."""
        if name not in self._kept:
            raise Refused(404, f"no such response: {name[:80]!r}", code="not_found")
        return self._kept[name]

    def conversation(self, name: str) -> tuple[Json, ...]:
        """The items before and of a response. Raises Refused where it is not kept."""
        if name not in self._kept:
            problem = f"no such response: {name[:80]!r}; {_WAY_OUT}"
            raise Refused(
                400,
                problem,
                code="previous_response_not_found",
                parameter="previous_response_id",
            )
        return self._kept[name].conversation

    def item(self, name: str) -> Json:
        """An item of a response, by its id. Raises Refused where it is not kept."""
        if name not in self._items:
            problem = f"no such item: {name[:80]!r}; {_WAY_OUT}"
            raise Refused(400, problem, code="item_not_found", parameter="input")
        return self._items[name][1]
