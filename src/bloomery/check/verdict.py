"""What the check says of a device under the settings of a plan: one verdict, for runs, for ranks and for the doctor."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from bloomery.check.cures import cure_of, fix_of
from bloomery.check.examination import Examination, examine, problem_of
from bloomery.check.known_devices import (
    DeviceIdentity,
    identity_of,
    keep_answer,
    key_of,
    known_answer,
)
from bloomery.core.errors import UserError
from bloomery.hardware.machine import Machine
from bloomery.plan.types import RunPlan
from bloomery.train.process import out_of_memory


@final
@dataclass(frozen=True)
class DeviceVerdict:
    """`problem` is "" where the device is right; else the fields up to `in_attention` tell about it. All are JSON's."""

    device: str
    arch: str
    torch: str
    driver: str
    problem: str = ""
    part: str = ""
    detail: str = ""
    error: float = 0.0
    fix: str = ""
    setting: str = (
        ""  # with which everything is right, as on the command line; "" where none was found
    )
    setting_text: str = ""  # the same in words
    in_attention: bool = False
    unrepeatable: str = ""  # the first part that gives other bits at the second time
    skipped: str = ""  # why nothing was checked
    seconds: float = 0.0
    from_cache: bool = False  # it is the answer of an earlier check


def judge(
    plan: RunPlan, machine: Machine | None, begins: Callable[[], None] = lambda: None
) -> DeviceVerdict:
    """Check this process's device, or read that it was checked. `begins`: called before a check."""
    identity = identity_of(plan.train.device, machine)
    try:
        key = key_of(plan, identity)
        earlier_examination = known_answer(key)
        if earlier_examination is None:
            begins()
        examination = earlier_examination or examine(plan)
    except UserError as error:
        return replace(unchecked(identity), skipped=error.problem)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return replace(unchecked(identity), skipped="not enough memory for the small model")
    if earlier_examination is not None:
        return replace(verdict_of(plan, identity, earlier_examination), from_cache=True)
    keep_answer(key, identity, examination)
    return verdict_of(plan, identity, examination)


def unchecked(identity: DeviceIdentity) -> DeviceVerdict:
    return DeviceVerdict(identity.device, identity.arch, identity.torch, identity.driver)


def verdict_of(plan: RunPlan, identity: DeviceIdentity, examination: Examination) -> DeviceVerdict:
    """Looks for a setting that is right where something is wrong, which takes as long as some checks."""
    verdict = replace(
        unchecked(identity),
        unrepeatable=next(iter(examination.unrepeatable), ""),
        seconds=examination.seconds,
    )
    if not examination.faults:
        return verdict
    fault = examination.faults[0]
    cure = cure_of(plan, fault)
    return replace(
        verdict,
        problem=problem_of(plan.train, fault),
        part=fault.part,
        detail=fault.detail,
        error=fault.error,
        fix=fix_of(fault, cure),
        setting="" if cure is None else cure.setting,
        setting_text="" if cure is None else cure.text,
        in_attention=fault.kind == "attention",
    )
