"""What was measured of a device corrects what the table says of it: by how much the table missed the measured steps."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from pydantic import TypeAdapter, ValidationError

from bloomery.core.units import GIB
from bloomery.hardware.specs.calibration import OWN, Card, Point
from bloomery.model.config import ModelConfig
from bloomery.plan.estimate.states import FULL
from bloomery.plan.estimate.step_shape import Occupancy
from bloomery.plan.types import Estimate, MemoryEstimate

NEAR = 2.0  # doublings of width between a measured model and this one: beyond them nothing is concluded
SPREAD = {True: 0.10, False: 0.25}  # half an interval, of the value: own measurements, given ones
SPREAD_PER_DOUBLING = 0.10  # of the model's width, and as much again for each doubling of the micro-batch's tokens

MEMORY_SPREAD = 0.05  # for the same micro-batch; as much again for each doubling, and twice that for a given card

TableMemory = Callable[[Occupancy], MemoryEstimate]
TableSeconds = Callable[[Occupancy, int], float | None]  # of a step over so many tokens


@dataclass(frozen=True, kw_only=True)
class Known:
    """The measurement that lies nearest to what is planned."""

    card: Card
    point: Point
    distance: float  # doublings

    @property
    def own(self) -> bool:
        return self.card.giver == OWN

    @property
    def because(self) -> str:
        who = "measured on this machine" if self.own else f"measured by {self.card.giver} on {self.card.device}"
        return f"{who} on {self.card.day} with {self.point.micro_batch} x {self.point.sequence_length:,} tokens"


def corrected(
    parts: Mapping[str, Estimate], load: Occupancy, cards: Sequence[Card], *, seconds: TableSeconds
) -> dict[str, Estimate]:
    """The parts of a step of `load`, each times what the nearest measured step was of the table's figure for that one.

    Without a measurement that is near enough they stay as they are. The shares of the parts stay the table's.
    """
    known = nearest(load, cards)
    factor = None if known is None else missed_by(known, load, seconds)
    if known is None or factor is None:
        return dict(parts)
    spread = 1 + SPREAD[known.own] + SPREAD_PER_DOUBLING * known.distance
    return {name: _around(part.value * factor, spread, by=known.because) for name, part in parts.items()}


def corrected_memory(
    table: MemoryEstimate, load: Occupancy, cards: Sequence[Card], *, memory: TableMemory
) -> MemoryEstimate:
    """The table's bytes times how far it missed the measured peak of the same model at nearly as many tokens."""
    known = nearest(load, [card for card in cards if _shape(_config(card)) == _shape(load.config)])
    unlike = known is None or known.distance > NEAR or known.point.setting != load.setting
    there = None if known is None or unlike else occupancy(known, load)
    if known is None or there is None:
        return table
    expected = memory(there)
    counted = expected.allocated if load.on_gpu else expected.total
    factor = known.point.peak_gib * GIB / counted
    if not load.on_gpu:  # a run's process also maps the text, examines and copies checkpoints; a measured step does not
        factor = max(1.0, factor)
    parts = {name: part if name == "context" else part * factor for name, part in table.parts.items()}
    spread, total = 1 + MEMORY_SPREAD * (1 + known.distance) * (1 if known.own else 2), sum(parts.values())
    ends = {"parts": parts, "low": total / spread, "high": total * spread, "origin": "measured"}
    return table.model_copy(update=ends)


def _around(value: float, spread: float, *, by: str) -> Estimate:
    return Estimate(value=value, low=value / spread, high=value * spread, origin="measured", by=by)


def missed_by(known: Known, load: Occupancy, seconds: TableSeconds) -> float | None:
    """The measured seconds over the table's; None where the table has none or the card's model cannot be read."""
    there, point = occupancy(known, load), known.point
    tokens = point.micro_batch * point.accumulation * point.sequence_length
    expected = None if there is None else seconds(there, tokens)
    return None if not expected else tokens / point.tokens_per_second / expected


def compile_gain(cards: Sequence[Card], *, model: ModelConfig, precision: str, setting: str) -> float | None:
    """How many times faster compiled steps of this model were than uncompiled ones, as one card measured both.

    None: no card of the device has both.
    """
    for card in cards:
        if _shape(_config(card)) != _shape(model):
            continue
        best = {True: 0.0, False: 0.0}
        for point in card.points:
            if (point.precision, point.setting) == (precision, setting):
                best[point.compiled] = max(best[point.compiled], point.tokens_per_second)
        if all(best.values()):
            return best[True] / best[False]
    return None


def nearest(load: Occupancy, cards: Sequence[Card]) -> Known | None:
    """Among the points of the same precision and way of compiling; own cards before given ones."""
    found = [
        Known(card=card, point=point, distance=_distance(load, card, point))
        for card in cards
        for point in card.points
        if (point.precision, point.compiled) == (load.precision, load.compiled)
        and point.setting in ("", load.setting)
        and _width(card) is not None
    ]
    near = [known for known in found if _width_doublings(load, known.card) <= NEAR]
    return min(near, key=lambda k: (not k.own, k.point.setting != load.setting, k.distance), default=None)


def occupancy(known: Known, load: Occupancy) -> Occupancy | None:
    """What the measured step held, on the device of `load`; None for a model that this version cannot read."""
    config = _config(known.card)
    if config is None:
        return None
    point = known.point
    plain = replace(load, way=FULL, looks=0, teacher=None, offloading=False, learned=1.0)
    return replace(
        load if point.setting else plain,
        config=config,
        sequence_length=point.sequence_length,
        micro_batch=point.micro_batch,
        optimizer=point.optimizer,
        attention=point.attention,
        checkpointing=point.activation_checkpointing,
        score_chunk=point.micro_batch * point.sequence_length,
    )


def _distance(load: Occupancy, card: Card, point: Point) -> float:
    rows = abs(math.log2(point.micro_batch * point.sequence_length / load.rows))
    settings = (point.activation_checkpointing != load.checkpointing) + (point.attention != load.attention)
    return _width_doublings(load, card) + rows + 0.5 * settings


def _width_doublings(load: Occupancy, card: Card) -> float:
    width = _width(card)
    return math.inf if width is None else abs(math.log2(width / load.config.hidden_size))


def _width(card: Card) -> int | None:
    width = card.model.get("hidden_size")
    return width if isinstance(width, int) and width > 0 else None


def _config(card: Card) -> ModelConfig | None:
    return _parsed(json.dumps(card.model, sort_keys=True))


@cache
def _parsed(text: str) -> ModelConfig | None:
    try:
        return TypeAdapter(ModelConfig).validate_json(text)
    except ValidationError:
        return None


def _shape(config: ModelConfig | None) -> ModelConfig | None:
    """Without the numbers of special tokens, which nobody knows before the text is prepared."""
    return None if config is None else replace(config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
