"""What one forward of several is given, all of which pass through a layer before the next one (`Decoder.forward_all`).

B batch, T time.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

from torch import Tensor

from bloomery.model.attention.attend import DocumentBorders
from bloomery.model.heads import Head, Logits
from bloomery.model.pictures import SeenPictures

ALL_LOGITS = Logits()


@final
@dataclass(frozen=True)
class ForwardInput:
    """The arguments of `Decoder.forward`, without a cache."""

    tokens_BT: Tensor
    positions_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    borders: DocumentBorders | None = None
    head: Head = ALL_LOGITS
    is_real_BT: Tensor | None = None
    pictures: SeenPictures | None = None
    axes_3BT: Tensor | None = None
    begin: Callable[[], None] | None = None  # called before it begins: seeds its dropout
    # Entered around each part of it: before the first layer, each layer, and the head.
    around: Callable[[], AbstractContextManager[object]] = nullcontext
