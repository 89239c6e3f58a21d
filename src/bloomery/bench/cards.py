"""A measurement as a card: what anyone may see of a machine, and nothing else."""

import re
import time
from collections.abc import Sequence

from bloomery.bench.measuring import Row
from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.core.version import __version__
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.hardware.specs.calibration import Card, Point, device_of
from bloomery.model.counting import parameter_count
from bloomery.plan.rules.objective import setting

ANONYMOUS = "anonymous"


def make_card(rows: Sequence[Row], machine: Machine, *, giver: str = ANONYMOUS) -> Card | None:
    """The settings of one model shape that could be measured, the recipe as planned first; None: there are none.

    A point whose model differs from the first one's is left out: a card is of one model.
    """
    measured = [row for row in rows if row.outcome == "ok" and row.plan is not None]
    if not measured or measured[0].plan is None:
        return None
    plan, profile = measured[0].plan, build_profile(machine)
    device = device_of(machine)
    software, accelerator = machine.software, profile.accelerator
    memory = accelerator.usable_bytes if accelerator else machine.host.memory_bytes
    return Card(
        device=device.name,
        arch=device.arch,
        cores=device.cores,
        memory_gib=round(memory / GIB, 2),
        torch=software.torch or "",
        rocm=software.hip,
        cuda=software.cuda,
        bloomery=__version__,
        model=plan.model_dump(mode="json")["model"]["config"],
        parameters=parameter_count(plan.model.config),
        text="prepared" if (plan.data.prepared / "manifest.json").is_file() else "random",
        giver=giver_name(giver),
        day=time.strftime("%Y-%m-%d"),
        points=tuple(_point(row) for row in measured if row.plan and row.plan.model.config == plan.model.config),
    )


def giver_name(text: str) -> str:
    """A name as people sign with. Raises UserError for what is none, or could be markup."""
    name = " ".join(text.split())
    if not re.fullmatch(r"[\w .,'@+-]{1,60}", name):
        remedy = 'write --giver "Ada L.", or leave it out to stay anonymous'
        raise UserError(f"{text!r} is no name for a card", where="--giver", remedy=remedy, code=2)
    return name


def _point(row: Row) -> Point:
    assert row.plan is not None and row.tokens_per_second is not None and row.peak_gib is not None
    train = row.plan.train
    return Point(
        sequence_length=row.plan.data.sequence_length,
        micro_batch=train.micro_batch,
        accumulation=train.accumulation,
        precision=train.precision,
        attention=row.plan.model.attention,
        compiled=train.compile,
        activation_checkpointing=train.activation_checkpointing,
        optimizer=row.plan.optimizer.kind,
        setting=setting(row.plan),
        tokens_per_second=round(row.tokens_per_second, 1),
        peak_gib=round(row.peak_gib, 3),
    )
