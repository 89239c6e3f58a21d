"""Preparing tells of its progress at a pace that people can read."""

from bloomery.launch.worker import throttle
from bloomery.monitor.events import Event, Phase


def test_a_thousand_files_are_not_a_thousand_events() -> None:
    told: list[Event] = []
    report = throttle(told.append, seconds=3600)
    for done in range(1001):
        report("checksums", done, 1000)
    report("tokens", 0, 0)
    phases = [(event.name, event.done) for event in told if isinstance(event, Phase)]
    assert phases == [("checksums", 0), ("checksums", 1000), ("tokens", 0)]
