"""The table of events names every event and every field of it."""

import re
from dataclasses import fields

from words_of_docs import ROOT, quoted

from bloomery.monitor.events import KINDS

ELSEWHERE = {"StepHealth"}  # docs/how-to/troubleshooting.md


def test_every_event_stands_there_with_its_fields() -> None:
    page = (ROOT / "docs/how-to/logging.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z]\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) == set(KINDS)
    for kind in set(KINDS) - ELSEWHERE:
        told = {word for words in quoted(rows[kind]) for word in words.split(", ")}
        assert {field.name for field in fields(KINDS[kind])} - {"step", "time"} <= told, kind
