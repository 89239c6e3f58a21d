"""What training was measured to reach: this user's own measurements, and cards that others gave. No torch."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from bloomery.core.errors import UserError
from bloomery.core.files import cache_folder, write_json
from bloomery.hardware.machine import Frozen, Machine
from bloomery.hardware.profile import choose_device
from bloomery.hardware.specs.specs import cpu_spec, gpu_spec

OWN = "this machine"  # as the giver of what was measured here
KEPT = 50  # own cards


class Point(Frozen):
    """One measured setting of a training step on one device."""

    sequence_length: int
    micro_batch_size: int  # rows
    accumulation: int
    precision: str
    attention: str
    compiled: bool
    activation_checkpointing: str
    optimizer: str
    tokens_per_second: float  # of whole optimizer steps
    setting: str = ""  # an adapter, a quantised base, lean states: plan.occupancy; empty: every weight, plainly
    peak_gib: float  # a GPU: allocated by tensors; a CPU: resident in the process


class Card(Frozen):
    """What a device reached with a model. It names no host and no person that did not ask for it."""

    device: str  # the product
    arch: str  # gfx1031, sm_90; of a processor its strongest instruction set
    cores: int = 0  # that were used; 0: a GPU
    memory_gib: float
    torch: str
    rocm: str = ""
    cuda: str = ""
    bloomery: str
    model: dict[str, Any]  # the facts of its ModelConfig
    parameters: int
    text: str  # prepared, or random: tokens without meaning in documents of whole rows
    contributor: str
    day: str  # 2026-11-21
    points: tuple[Point, ...]


class Device(NamedTuple):
    """How cards name a device. `cores`: those that would be used of a processor; 0: a GPU."""

    name: str
    arch: str
    cores: int


def calibration(machine: Machine) -> tuple[Card, ...]:
    """Cards of the device that training would use here, best first: own ones newest first, then those given."""
    here, found = device_of(machine), [*reversed(_own()), *given_cards()]
    return tuple(card for card in found if Device(card.device, card.arch, card.cores) == here)


def device_of(machine: Machine) -> Device:
    """The device that training would use: a GPU by its name in the table, a processor by its strongest instructions."""
    accelerator, _ = choose_device(machine)
    if accelerator is not None:
        spec = gpu_spec(accelerator)
        return Device(spec.name if spec else accelerator.name, accelerator.arch, 0)
    cpu = cpu_spec(machine.host)
    return Device(machine.host.cpu_name, cpu.flag if cpu else "", threads(machine))


def threads(machine: Machine) -> int:
    """That compute on the processor: every core, unless the user has bounded OpenMP."""
    asked = machine.software.environment.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else machine.host.cpu_cores


def remember(card: Card) -> bool:
    """Keeps an own card, instead of an older one of the same device, torch and model. False: it cannot be written."""
    mine = card.model_copy(update={"contributor": OWN})
    others = [each for each in _own() if _identity(each) != _identity(mine)]
    kept = [*others, mine][-KEPT:]
    return write_json(_own_file(), [each.model_dump(mode="json") for each in kept])


def write_card(card: Card, path: Path) -> None:
    """Raises UserError when the file cannot be written."""
    try:
        path.write_text(json.dumps(card.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        problem = f"the card cannot be written: {error.strerror}"
        raise UserError(problem, where=str(path), fix="name a file in a folder that you may write to") from error


@cache
def given_cards() -> tuple[Card, ...]:
    """The cards that come with Bloomery."""
    return tuple(card for path in sorted(cards_folder().glob("*.json")) if (card := _read(path)) is not None)


def cards_folder() -> Path:
    """`benchmarks/cards` of a checkout; an installed package holds a copy beside this file."""
    packaged = Path(__file__).with_name("cards")
    return packaged if packaged.is_dir() else Path(__file__).parents[4] / "benchmarks/cards"


def _identity(card: Card) -> tuple[object, ...]:
    return card.device, card.arch, card.cores, card.torch, json.dumps(card.model, sort_keys=True)


def _own_file() -> Path:
    return cache_folder() / "measured.json"


def _own() -> list[Card]:
    """A damaged file counts as empty: measuring again mends it."""
    try:
        stored = json.loads(_own_file().read_bytes())
    except (OSError, ValueError):
        return []
    return list(_valid(stored)) if isinstance(stored, list) else []


def _valid(stored: list[Any]) -> Iterator[Card]:
    for each in stored:
        try:
            yield Card.model_validate(each)
        except ValidationError:
            continue


def _read(path: Path) -> Card | None:
    """None for a card of a newer version that this one cannot read."""
    try:
        return Card.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
