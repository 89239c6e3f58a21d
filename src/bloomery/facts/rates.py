"""The usual range of a learning rate. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """The usual range of a learning rate. `first`: the value to start with, where that is not the highest."""

    low: float
    high: float
    first: float | None = None

    @property
    def start(self) -> float:
        return self.high if self.first is None else self.first

    def times(self, factor: float) -> "Rates":
        first = None if self.first is None else self.first * factor
        return Rates(self.low * factor, self.high * factor, first)

    def __str__(self) -> str:
        return f"{rate_text(self.low)} to {rate_text(self.high)}"


def rate_text(rate: float) -> str:
    """0.0002 -> "2e-4"; from 0.01 on as it is."""
    if rate >= 0.01:
        return f"{rate:g}"
    digits, _, exponent = f"{rate:.3e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"
