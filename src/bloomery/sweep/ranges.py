"""Ranges of settings, `optimizer.learning_rate=1e-5..1e-3`, from which a search draws values. No torch."""

import math
import random
import re
from dataclasses import dataclass
from typing import Literal, final

from bloomery.core.errors import UserError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(?:(?P<scale>log|linear):)?(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})")
_INTEGER = re.compile(r"[-+]?\d+")
_DIGITS = 3  # of a drawn number: more would only lengthen the names of folders


@final
@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, ends included. `scale`: log draws their logarithm uniformly, linear them."""

    low: float
    high: float
    scale: Literal["log", "linear"]
    integers: bool

    @property
    def text(self) -> str:
        """In words: "log-uniform from 1e-05 to 0.001"."""
        kind = "log-uniform" if self.scale == "log" else "uniform"
        whole = ", whole numbers" if self.integers else ""
        return f"{kind} from {self.low:g} to {self.high:g}{whole}"

    def draw(self, source: random.Random) -> str:
        """A number as one types it, with at most three significant digits, within the range."""
        share = source.random()
        if self.integers and self.scale == "linear":
            return str(int(self.low) + math.floor(share * (int(self.high) - int(self.low) + 1)))
        if self.scale == "log":
            drawn = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            drawn = self.low + share * (self.high - self.low)
        if self.integers:
            return str(min(max(round(drawn), int(self.low)), int(self.high)))
        rounded = float(f"{drawn:.{_DIGITS}g}")
        return _typed(min(max(rounded, self.low), self.high))


def range_of(key: str, text: str, *, where: str) -> Range | None:
    """The range that `text` means for a key; None for another value.

    Without `log:` or `linear:` a learning rate is drawn by its logarithm, as Bergstra and Bengio 2012 draw it, and
    anything else uniformly. Ends without a point and an exponent mean whole numbers. Raises UserError (code 2).
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        if re.match(rf"(log|linear):|{_NUMBER}\.\.", text):
            fix = f"write {key}=LOW..HIGH with two numbers, such as 1e-5..1e-3, or log:LOW..HIGH"
            raise UserError(f"not a range: {text}", where=where, fix=fix, code=2)
        return None
    low, high = float(match["low"]), float(match["high"])
    is_rate = key.rpartition(".")[2].endswith("rate")
    scale: Literal["log", "linear"] = "log" if is_rate else "linear"
    if match["scale"] is not None:
        scale = "log" if match["scale"] == "log" else "linear"
    if not low < high:
        fix = f"write the smaller number first: {key}={match['high']}..{match['low']}"
        if low == high:
            fix = f"set the value itself: {key}={match['low']}"
        raise UserError(f"an empty range: {text}", where=where, fix=fix, code=2)
    if scale == "log" and low <= 0:
        fix = f"begin above zero, or draw uniformly: {key}=linear:{match['low']}..{match['high']}"
        raise UserError(f"a logarithmic range begins at {low:g}", where=where, fix=fix, code=2)
    integers = bool(_INTEGER.fullmatch(match["low"]) and _INTEGER.fullmatch(match["high"]))
    return Range(low, high, scale, integers)


def _typed(number: float) -> str:
    """The shortest text of a number, 1.37e-4 rather than 0.000137 or 1.37e-04."""
    if number == 0 or 1e-2 <= abs(number) < 1e4:
        return f"{number:.10g}"
    mantissa, exponent = f"{number:.{_DIGITS - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
