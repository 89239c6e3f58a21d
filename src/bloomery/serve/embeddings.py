"""/v1/embeddings: hidden states after the final norm, pooled over the tokens of a text, of length 1."""

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from pydantic import Field
from torch import Tensor

from bloomery.model.cache import Cache
from bloomery.model.heads import Hidden
from bloomery.serve.engine import End
from bloomery.serve.parameters import Body, Json
from bloomery.serve.requests import Text, Token
from bloomery.serve.served import Served

MOST_INPUTS = 256
Pooling = Literal["mean", "last"]
_HIDDEN = Hidden()


class EmbeddingsRequest(Body):
    """`pooling` is not OpenAI's."""

    model: str = ""
    input: Text | list[Text] | list[Token] | list[list[Token]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
    pooling: Pooling = "mean"


@final
@dataclass(eq=False)
class Embedding:
    """The texts of one request. A step reads a piece of one text, so that answers continue between them."""

    model: Served
    prompts: Sequence[Sequence[int]]
    adapter: str | None
    pooling: Pooling
    put: Callable[[list[list[float]] | End], None]
    canceled: bool = False
    born: float = field(default_factory=time.monotonic)
    _found: list[list[float]] = field(default_factory=list)
    _read: int = 0  # tokens of the current text
    _sum: Tensor | None = None
    _cache: Cache | None = None

    def step(self) -> bool:
        """True when every text is embedded, and `put` was called."""
        ids = self.prompts[len(self._found)]
        if self._cache is None:
            self._cache = Cache(self.model.decoder.config, len(ids))
        hidden_TD = self.model.read_piece(
            ids, read=self._read, cache=self._cache, adapter=self.adapter, head=_HIDDEN
        )
        summed = hidden_TD[-1] if self.pooling == "last" else hidden_TD.sum(0)
        self._sum = summed if self._sum is None or self.pooling == "last" else self._sum + summed
        self._read += len(hidden_TD)
        if self._read == len(ids):
            # The length is 1 either way: a sum and a mean have one direction.
            self._found.append(torch.nn.functional.normalize(self._sum, dim=0).tolist())
            self._read = 0
            self._sum = None
            self._cache = None
        if len(self._found) < len(self.prompts):
            return False
        self.put(self._found)
        return True

    def fail(self, end: End) -> None:
        self.put(end)


def embedded(
    vectors: Sequence[Sequence[float]], params: EmbeddingsRequest, name: str, tokens: int
) -> Json:
    """As OpenAI words it; base64 is of little-endian float32."""
    data = []
    for index, vector in enumerate(vectors):
        value: str | Sequence[float] = vector
        if params.encoding_format == "base64":
            value = base64.b64encode(torch.tensor(vector).numpy().astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    return {
        "object": "list",
        "data": data,
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
