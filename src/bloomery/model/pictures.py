"""How a decoder meets pictures: their features in place of embedded tokens, and rotary positions in three axes.

B sequences, T tokens of each, N tokens of pictures, D hidden size, R frequencies of a head.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bloomery.core.errors import UserError
from bloomery.facts.pictures import BothWays, PositionAxes


@final
@dataclass(frozen=True)
class SeenPictures:
    """The pictures of a forward. `places_N`: int64, in the flattened tokens, in their order.

    `features_ND`: in place of their embeddings. `deep_features`, each [N, D]: added to what leaves the first layers.
    `both_ways`: the layers in which tokens of a picture attend to those after them, too.
    """

    places_N: Tensor
    features_ND: Tensor
    deep_features: tuple[Tensor, ...] = ()
    both_ways: BothWays = "none"

    def in_place_of_tokens(self, x_BTD: Tensor) -> Tensor:
        rows = x_BTD.flatten(0, 1).index_copy(0, self.places_N, self.features_ND.to(x_BTD.dtype))
        return rows.view(x_BTD.shape)

    def tokens_without(self, tokens_BT: Tensor, pad_id: int) -> Tensor:
        """With padding in place of pictures."""
        return tokens_BT.flatten().index_fill(0, self.places_N, pad_id).view(tokens_BT.shape)

    def added_after(self, layer: int, x_BTD: Tensor) -> Tensor:
        if layer >= len(self.deep_features):
            return x_BTD
        features_ND = self.deep_features[layer].to(x_BTD.dtype)
        return x_BTD.flatten(0, 1).index_add(0, self.places_N, features_ND).view(x_BTD.shape)

    def numbers_of(self, tokens_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """int64 [B, T]: which picture each token belongs to; -1: none. Neighbors in a document belong to one picture.

        `documents_BT`: the document of each token; None: every row is one.
        """
        is_picture_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        is_picture_BT.view(-1)[self.places_N] = True
        begins_BT = is_picture_BT.clone()
        continues_BT = is_picture_BT[:, :-1]
        if documents_BT is not None:
            continues_BT = continues_BT & (documents_BT[:, 1:] == documents_BT[:, :-1])
        begins_BT[:, 1:] &= ~continues_BT
        return torch.where(is_picture_BT, begins_BT.long().cumsum(1), -1)


def axis_of_frequencies(axes: PositionAxes, count: int, device: torch.device) -> Tensor:
    """int64 [R]: which of time, row and column turns each frequency.

    Raises UserError where blocks of the three are fewer or more than `count`, the frequencies of a head.
    """
    # Comparisons with numbers of the host: a tensor of them would be copied, and the host would wait for that.
    time, row, column = axes.sections
    index_R = torch.arange(count, device=device)
    if not axes.interleaved:
        if time + row + column != count:
            raise UserError(
                f"mrope_section {list(axes.sections)} is of {sum(axes.sections)} frequencies; heads have {count}",
                where="config.json",
                fix="put the config.json there that was published with these weights",
            )
        return (index_R >= time).long() + (index_R >= time + row).long()
    # Dealt out in turn, as far as the sections of row and column reach; time has the rest.
    turn_R = index_R % 3
    is_row_R = (turn_R == 1) & (index_R < 3 * row)
    is_column_R = (turn_R == 2) & (index_R < 3 * column)
    return is_row_R.long() + 2 * is_column_R.long()
