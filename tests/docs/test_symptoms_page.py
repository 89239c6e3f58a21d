"""docs/reference/error-messages.md is what `python scripts/symptoms.py` writes today."""

import importlib.util
from types import ModuleType

from words_of_docs import ROOT

from bloomery.hardware.doctor.symptoms import symptoms


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("symptoms_script", ROOT / "scripts/symptoms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    page = (ROOT / "docs/reference/error-messages.md").read_text(encoding="utf-8")
    assert page == script().page(), "run python scripts/symptoms.py"


def test_every_symptom_is_on_it_once_with_its_message() -> None:
    page = (ROOT / "docs/reference/error-messages.md").read_text(encoding="utf-8")
    for symptom in symptoms():
        assert page.count(f"(`{symptom.id}`)") == 1
        assert symptom.log in page
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == len(set(headings))
