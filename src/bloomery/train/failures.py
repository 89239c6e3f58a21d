"""Why training ends before its last step: errors that the loop and its launchers tell apart. No torch."""

from bloomery.core.errors import UserError


class Stopped(Exception):
    """The run was stopped before the first step, in a rollout or during an evaluation."""


class TimeIsUp(Exception):
    """The time of a wall-time run was over in a rollout, which is dropped."""


class OutOfMemory(UserError):
    """A micro-batch of one sequence does not fit."""


class Diverged(UserError):
    """Loss, gradients or weights stayed non-finite after skipping and rewinding."""


class Unsound(UserError):
    """A kernel computes wrong numbers."""


class KernelUnusable(UserError):
    """An attention kernel cannot be compiled, loaded or launched."""
