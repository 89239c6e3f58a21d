"""Every function of studio.js is called by a page, and pages call no others."""

import re
from pathlib import Path

import bloomery.studio

FOLDER = Path(bloomery.studio.__file__).parent


def test_pages_call_the_functions_of_the_script_and_no_others():
    script = (FOLDER / "studio.js").read_text()
    defined = set(re.findall(r"^window\.(studio\w+) =", script, re.MULTILINE))
    sources = "".join(path.read_text() for path in FOLDER.glob("*.py"))
    assert set(re.findall(r"\b(studio[A-Z]\w*)\(", sources)) == defined != set()


def test_the_script_cannot_end_its_element():
    assert "</script" not in (FOLDER / "studio.js").read_text().lower()
