"""Why a run is slow and why a loss does not fall: sentences with evidence in figures and a remedy, from the events."""

from collections.abc import Callable, Iterable, Iterator
from typing import final

from bloomery.monitor.diagnose.history import Facts, Finding, Seen, seen_of
from bloomery.monitor.diagnose.learning import ENOUGH, not_learning
from bloomery.monitor.diagnose.speed import slow
from bloomery.monitor.events import EvalDone, Event, StepDone, Warned

__all__ = ["Diagnosis", "Facts", "Finding", "findings", "why_not_learning", "why_slow"]
_LOOKS = (10, 25, 50, 100, 200, 500)  # steps after which a run is looked at; then every thousand, and at evaluations


def why_slow(events: Iterable[Event], facts: Facts) -> tuple[str, ...]:
    """What takes time that could be had back; empty where nothing does. Judged after 30 seconds of steps."""
    return tuple(str(found) for found in slow(seen_of(events), facts))


def why_not_learning(events: Iterable[Event], facts: Facts) -> tuple[str, ...]:
    """What keeps the loss from falling, the surest first; empty for a run that learns or is too young to judge."""
    return tuple(str(found) for found in not_learning(seen_of(events), facts))


def findings(events: Iterable[Event], facts: Facts) -> list[Finding]:
    """Why it did not learn, then why it was slow, for those who lay them out themselves."""
    seen = seen_of(events)
    return [*not_learning(seen, facts), *slow(seen, facts)]


@final
class Diagnosis:
    """Reads a run's events as they come and says each cause once, also over resumes. `facts` is asked when needed."""

    def __init__(self, facts: Callable[[], Facts], before: Iterable[Event] = ()) -> None:
        self._facts, self._seen = facts, Seen()
        self._known: Facts | None = None
        self._said: set[str] = set()
        for event in before:
            self._read(event)

    def look(self, event: Event) -> Iterator[Warned]:
        """What is to be said after this event."""
        self._read(event)
        if not self._due(event):
            return
        self._known = self._known or self._facts()
        for found in (*not_learning(self._seen, self._known), *slow(self._seen, self._known)):
            if found.cause not in self._said:
                self._said.add(found.cause)
                yield Warned(step=self._seen.step, because=str(found), cause=found.cause)

    def _read(self, event: Event) -> None:
        self._seen.add(event)
        if isinstance(event, Warned) and event.cause:
            self._said.add(event.cause)

    def _due(self, event: Event) -> bool:
        if isinstance(event, EvalDone):
            return event.step >= ENOUGH
        return isinstance(event, StepDone) and (event.step in _LOOKS or event.step % 1000 == 0)
