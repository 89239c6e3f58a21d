"""Rates of copies between a device and its host, which a run whose weights stream measures before its first step."""

import pytest
import simulated
import torch

from bloomery.hardware import copy_rates as measured


def test_every_direction_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "COPIED_BYTES", 2**16)
    simulated.clear()
    rates = measured.copy_rates("cuda")
    assert set(rates) == {"to_device", "from_device", "both", "pageable"}
    assert min(rates.values()) > 0
    assert simulated.report()["problem"] == {}


def test_a_copy_that_changes_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "COPIED_BYTES", 2**16)
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(RuntimeError, match="changed the data"):
        measured.copy_rates("cuda")
