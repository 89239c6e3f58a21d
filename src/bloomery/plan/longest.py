"""The longest row of tokens that a device can train on."""

from dataclasses import replace

from bloomery.plan.batch import SMALL_CHUNK, Measure
from bloomery.plan.occupancy import Occupancy
from bloomery.plan.types import Longest

STEP = 256  # tokens: nobody asks for less
MOST = 2**22


def longest_rows(load: Occupancy, measure: Measure) -> Longest:
    """One row at a time, its logits in chunks; 0 where not even `STEP` tokens fit."""
    return Longest(
        as_planned=_longest(load, measure), checkpointed=_longest(replace(load, checkpointing="full"), measure)
    )


def _longest(load: Occupancy, measure: Measure) -> int:
    fits, too_long = 0, MOST // STEP
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if measure(_of_length(load, middle * STEP)).fits:
            fits = middle
        else:
            too_long = middle
    return fits * STEP


def _of_length(load: Occupancy, length: int) -> Occupancy:
    """Learned positions grow with the row."""
    config = load.config
    if config.positions == "learned" and length > config.max_positions:
        config = replace(config, max_positions=length)
    return replace(load, config=config, sequence_length=length, micro_batch=1, score_chunk=min(SMALL_CHUNK, length))
