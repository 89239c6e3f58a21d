"""The request of a profile: a file in the run folder that says how many steps to record. No torch."""

from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.core.files import read_whole
from bloomery.recipe.values import LONGEST_PROFILE

PROFILE = "profile"  # folder of traces and memory lists


PROFILE_ASKED = "profile-asked"  # request file: how many steps to record


NOT_RECORDED = "cannot write the profile"


def requested_steps(request: Path) -> int:
    """The number of steps in the request file; 0 without a valid one."""
    try:
        text = read_whole(request, most=100).decode()
    except (OSError, ValueError, UserError):
        return 0
    return min(int(text), LONGEST_PROFILE) if text.isdecimal() else 0
