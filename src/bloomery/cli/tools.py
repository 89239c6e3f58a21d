"""`--tools`, `--environment` and `--max-turns` of commands whose models call tools by themselves. No torch"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bloomery.core.errors import UserError

if TYPE_CHECKING:
    from bloomery.plan.types import EpisodesPlan

MAX_TURNS = 8  # answers to one message
_OPTIONS = (
    click.option(
        "--tools",
        multiple=True,
        metavar="FILE:FUNCTION",
        help="Let the model call this function; can be repeated.",
    ),
    click.option(
        "--environment",
        metavar="FILE:CLASS",
        help="Let the model act in an environment: its methods are tools.",
    ),
    click.option(
        "--max-turns",
        type=click.IntRange(1, 1000),
        default=MAX_TURNS,
        show_default=True,
        help="Limit the answers to one message, calls of tools between.",
    ),
)


def tools_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets `tools`, `environment` and `max_turns`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def episodes_of(
    tools: tuple[str, ...], environment: str | None, max_turns: int
) -> "EpisodesPlan | None":
    """What the model may call; None where nothing. Raises UserError, also for a file that is not here."""
    if not tools and environment is None:
        return None
    from bloomery.plan.types import EpisodesPlan

    plan = EpisodesPlan.of_places(tools, environment, max_turns=max_turns)
    for place in plan.files:
        path = Path(place.rpartition(":")[0])
        if not path.is_file():
            option = "--tools" if place in [tool.python for tool in plan.tools] else "--environment"
            raise UserError(
                "there is no such file", where=f"{option} {path}", fix="correct its name", code=2
            )
    return plan
