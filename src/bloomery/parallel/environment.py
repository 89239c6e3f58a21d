"""Which rank this process is, and where the ranks meet: the variables that a launcher sets. Does not import torch."""

import os
from dataclasses import dataclass
from typing import final

from bloomery.core.errors import UserError

# Variable: a file of this machine where the ranks meet. Without it they meet at MASTER_ADDR and MASTER_PORT.
RENDEZVOUS = "BLOOMERY_RENDEZVOUS"


class LinkFailed(UserError):
    """GPUs cannot send to each other, and their hosts can."""


@final
@dataclass(frozen=True)
class RankEnvironment:
    """`local_rank` counts the ranks of one host. Empty strings: the launcher did not set the variable."""

    rank: int
    local_rank: int
    rendezvous_file: str
    address: str
    port: str


def rank_environment() -> RankEnvironment:
    """A process without a launcher is rank 0."""
    return RankEnvironment(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        rendezvous_file=os.environ.get(RENDEZVOUS, ""),
        address=os.environ.get("MASTER_ADDR", ""),
        port=os.environ.get("MASTER_PORT", ""),
    )
