"""`bloomery plan --simulate`: runs the simulation and says on stderr what it is doing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from bloomery.cli.common import literal
from bloomery.errors import UserError

if TYPE_CHECKING:
    from bloomery.hardware.machine import Machine
    from bloomery.plan.types import Plan
    from bloomery.simulate.page import Beside


def simulated(plan: "Plan", machine: "Machine") -> "Beside":
    """What the plan's step would hold, run on fake tensors. Raises UserError."""
    from bloomery.simulate import simulate
    from bloomery.simulate.page import Beside

    if plan.model.config.foreign is not None:
        problem = "transformers' layers are not simulated: they do not run on tensors without memory here"
        raise UserError(problem, where="--simulate", remedy="leave out --simulate", code=2)
    with progress() as say:
        return Beside(plan, simulate(plan, machine, progress=say))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """One line on a terminal that changes; elsewhere a line each."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("simulating", spinner="line") as status:
        yield lambda text: status.update(literal(text))
