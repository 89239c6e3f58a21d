"""Quantities with units: "10B", "12GiB", "5m", "3 epochs"."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Unit = Literal["steps", "tokens", "epochs", "percent", "seconds"]

GIB = 2**30
MIB = 2**20
JOULES_IN_KWH = 3.6e6

_COUNT_SUFFIX = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTE_SUFFIX = {
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "seconds": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "minutes": 60,
    "h": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86400,
    "day": 86400,
    "days": 86400,
    "year": 31557600,
    "years": 31557600,
}
_NUMBER = r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|\.[0-9]+)"


@dataclass(frozen=True)
class Duration:
    """A length in the unit in which it was given."""

    amount: float
    unit: Unit

    def __str__(self) -> str:
        if self.unit == "percent":
            return f"{self.amount:g}%"
        if self.unit == "seconds":
            return format_seconds(self.amount)
        return (
            f"{self.amount:,.0f} {self.unit}"
            if self.amount >= 100
            else f"{self.amount:g} {self.unit}"
        )


_COUNTS = "write a number such as 195000, 1.5M or 10B"
_SIZES = "write 12GiB or 500MB"
_LENGTHS = "write 2000 steps, 10B tokens, 3 epochs, 20% or 8h"


def _split(text: str, forms: str) -> tuple[float, str]:
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([a-zA-Z%]*(?:\s+[a-z]+)?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit; {forms}")
    return float(re.sub("[_,]", "", match[1])), match[2].strip().lower()


def parse_count(text: str | float) -> float:
    """ "10B" -> 1e10, "1.5k" -> 1500. Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    amount, suffix = _split(text, _COUNTS)
    if suffix not in _COUNT_SUFFIX:
        raise ValueError(f"{text!r} is not a count; {_COUNTS}")
    return amount * _COUNT_SUFFIX[suffix]


def parse_bytes(text: str | float) -> float:
    """ "12GiB" -> bytes; GB is 1e9, GiB 2**30. Raises ValueError."""
    if isinstance(text, int | float):
        return float(text)
    amount, suffix = _split(text, _SIZES)
    if suffix not in _BYTE_SUFFIX:
        raise ValueError(f"{text!r} is not a size; {_SIZES}")
    return amount * _BYTE_SUFFIX[suffix]


def parse_duration(text: str | float) -> Duration:
    """ "3 epochs", "10B tokens", "2000 steps", "20%", "8h". A bare number counts steps. Raises ValueError."""
    if isinstance(text, int | float):
        return whole_steps(float(text), text)
    amount, rest = _split(text, _LENGTHS)
    if rest == "%":
        return Duration(amount, "percent")
    if rest in _SECONDS:
        return Duration(amount * _SECONDS[rest], "seconds")
    suffix, _, unit = rest.rpartition(" ")
    unit = unit + "s" if unit in ("step", "token", "epoch") else unit
    if unit == "steps" or (unit == "" and suffix == ""):
        return whole_steps(amount * _COUNT_SUFFIX.get(suffix, 1.0), text)
    if unit == "tokens" and suffix in _COUNT_SUFFIX:
        return Duration(amount * _COUNT_SUFFIX[suffix], "tokens")
    if unit == "epochs" and suffix == "":
        return Duration(amount, "epochs")
    raise ValueError(f"{text!r} is not a length; {_LENGTHS}")


def whole_steps(amount: float, text: str | float) -> Duration:
    """A length in steps. `text`: what the user wrote.

    Raises ValueError with the whole numbers next to a fraction of a step.
    """
    # 0.0011M steps are 1100, despite rounding
    if math.isfinite(amount) and abs(amount - round(amount)) > 1e-6:
        below = math.floor(amount)
        meant = f"{below} or {below + 1} steps" if below else "1 step"
        raise ValueError(f"{text} is not a whole number of steps; write {meant}")
    return Duration(amount, "steps")


def parse_range(text: str | float, parse: Callable[[str], float | Duration]) -> tuple[float, float]:
    """ "5 to 7 days" -> (5 days, 7 days) in seconds; a single value is a range of itself. `parse` reads one end."""
    if isinstance(text, int | float):
        return float(text), float(text)
    low, separator, high = text.partition(" to ")
    if not separator:
        value = _amount(parse(text))
        return value, value
    unit = re.sub(_NUMBER, "", high, count=1, flags=re.IGNORECASE).strip()
    low = low if re.search("[a-zA-Z%]", low) else f"{low} {unit}"
    return _amount(parse(low)), _amount(parse(high))


def _amount(value: float | Duration) -> float:
    return value.amount if isinstance(value, Duration) else value


def counted(count: int, things: str) -> str:
    """ "1 pair", "2 pairs", "1 batch", "2 batches"."""
    if count != 1:
        return f"{count:,} {things}"
    suffix = "es" if things.endswith(("ches", "shes", "sses", "xes")) else "s"
    return f"1 {things.removesuffix(suffix)}"


def format_count(value: float) -> str:
    """1.24e8 -> "124 M", 3.19e9 -> "3.19 B"; three significant digits."""
    for size, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if abs(value) >= 0.9995 * size:  # 999.9 million are written as 1 B
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}"


def format_bytes(value: float) -> str:
    """Bytes as GiB, MiB or KiB with one decimal."""
    for size, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {suffix}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """80 -> "80 s", 600 -> "10 min", 518400 -> "6.0 days". Years have two significant digits."""
    if value < 120:
        return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
    if (years := value / 31557600) >= 1:
        return f"{two_digits(years) if years >= 9.95 else f'{years:.1f}'} years"
    for size, unit, name in ((86400 * 1.5, 86400, "days"), (5400, 3600, "h")):
        if value >= size:
            return f"{value / unit:.1f} {name}"
    return f"{value / 60:.0f} min"


def two_digits(value: float) -> str:
    """5233 -> "5,200": two significant digits, for estimates."""
    return f"{float(f'{value:.2g}'):,.0f}"


def format_joules(joules: float) -> str:
    """In Wh or kWh, three digits."""
    kwh = joules / JOULES_IN_KWH
    if kwh >= 100:
        return f"{kwh:,.0f} kWh"
    return f"{kwh:.3g} kWh" if kwh >= 1 else f"{kwh * 1000:.3g} Wh"
