"""What a run is asked between two steps: to stop, to pause, to save. The ranks agree on it. No torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final


class Request(NamedTuple):
    """What is asked of one rank, or of any of them."""

    stop: bool = False
    pause: bool = False
    save: bool = False


@final
class StepRequests:
    """The requests of all ranks, which the gather of a step's figures carries along.

    A collective of their own would cost each step two more: the time of one grows with the number of ranks. Where no
    step has just ended, as before the first one and inside an evaluation, the ranks do ask each other. All ranks call
    the methods alike.
    """

    def __init__(
        self,
        own: Callable[[], Request] = Request,
        all_reduce_max: Callable[..., Sequence[float]] = lambda *numbers: numbers,
        step_taken: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`own`: what is asked of this rank now; a save is asked once. `all_reduce_max`: over all ranks.

        `step_taken` gets the number of each step, before any rank can report it.
        """
        self._own = own
        self._all_reduce_max = all_reduce_max
        self._step_taken = step_taken
        self._of_step: Request | None = None  # until `now` has answered with it
        self._save_requested = False

    def after_step(self, step: int) -> Request:
        """What is asked of this rank after the step, for `note`: every rank calls this before one gets the others'."""
        self._step_taken(step)
        return self._own()

    def note(self, requests_by_rank: Sequence[Sequence[float]]) -> None:
        """After a step: the `after_step` of every rank."""
        self._of_step = Request(*(any(column) for column in zip(*requests_by_rank, strict=True)))
        self._save_requested |= self._of_step.save

    def forget(self) -> None:
        """Time has passed since the step: `now` asks again."""
        self._of_step = None

    def now(self) -> Request:
        """What is asked of any rank: once after a step without a collective."""
        request = self._of_step
        self._of_step = None
        if request is None:
            request = Request(*map(bool, self._all_reduce_max(*self._own())))
            self._save_requested |= request.save
        return request

    def take_save(self) -> bool:
        """Whether a save was asked since the last call, as far as the ranks have told each other."""
        if self._of_step is None and not self._save_requested:
            self._save_requested = self.now().save
        save_requested = self._save_requested
        self._save_requested = False
        return save_requested
