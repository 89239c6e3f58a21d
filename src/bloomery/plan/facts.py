"""What a view of a run needs from its plan and its machine."""

from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import build_profile
from bloomery.monitor.tally import RunFacts
from bloomery.plan.speed import device_rate, useful_flops
from bloomery.plan.states import way_of
from bloomery.plan.types import Plan
from bloomery.units import GIB


def run_facts(plan: Plan, machine: Machine | None) -> RunFacts:
    """MFU has a denominator only where the table knows the device's peak in the precision of the plan."""
    config, train = plan.model.config, plan.train
    rate = None
    if machine is not None:
        profile = build_profile(machine)
        rate = device_rate(
            profile, machine, precision=train.precision, width=config.hidden_size, compiled=train.compile
        )
    return RunFacts(
        name=plan.name,
        every_steps=plan.monitor.every_steps,
        steps=train.steps,
        flops_per_token=useful_flops(config, way_of(plan, config), plan.data.sequence_length),
        peak_flops=rate.peak if rate else None,
        memory_limit_gib=plan.memory.limit / GIB,
        tells_memory=plan.monitor.memory,
    )
