"""What a run costs, by a price per hour of a device that the user names: no price is known here. No torch."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bloomery.core.errors import UserError
from bloomery.core.files import state_folder, write_json
from bloomery.core.units import two_digits
from bloomery.plan.types import Cost, RunPlan

VARIABLE = "BLOOMERY_PRICE_PER_HOUR"
MOST_PER_HOUR = 1e6
_NUMBER = r"[0-9]+(?:[.,][0-9]+)?"
_CURRENCY = r"[A-Za-z]{2,4}|[$€£¥₹₩₺₽₫₱฿]"
_PRICE = re.compile(rf"({_CURRENCY})?\s*({_NUMBER})\s*({_CURRENCY})?")


class Price(NamedTuple):
    """Of one device for an hour. `currency`: as typed, a sign or a code; "" where none was."""

    amount: float
    currency: str = ""

    @property
    def text(self) -> str:
        return _with_currency(f"{self.amount:g}", self.currency)


def read_price(text: str, where: str) -> Price:
    """ "1.99", "$1.99", "1.99 EUR". Raises UserError (code 2)."""
    match = _PRICE.fullmatch(text.strip())
    amount = float(match[2].replace(",", ".")) if match else 0.0
    if match is None or (match[1] and match[3]) or not 0 < amount <= MOST_PER_HOUR:
        raise UserError(
            f"not a price per hour: {text!r}",
            where=where,
            fix="write a number, with a currency or without: 1.99, $1.99 or 1.99 EUR",
            code=2,
        )
    return Price(amount, match[1] or match[3] or "")


def kept_price() -> Price | None:
    """The price of this machine's devices: $BLOOMERY_PRICE_PER_HOUR, else the one that was kept. Raises UserError."""
    if text := os.environ.get(VARIABLE, "").strip():
        return read_price(text, VARIABLE)
    with suppress(OSError, ValueError, UserError, KeyError, TypeError, AttributeError):
        stored_price = json.loads(_file().read_text(encoding="utf-8"))
        return read_price(stored_price["per_hour"], str(_file()))
    return None


def keep_price(price: Price | None) -> bool:
    """For the plans of this user on this machine; whether it could be written. None: no price."""
    if price is None:
        _file().unlink(missing_ok=True)
        return True
    return write_json(_file(), {"per_hour": price.text})


def _file() -> Path:
    return state_folder() / "price.json"


def run_cost(plan: RunPlan, price: Price | None) -> Cost | None:
    """The planned time at this price, on every device of the plan; that of a million tokens where the run's length is
    not known. None where the price or the speed is unknown.
    """
    seconds = plan.seconds
    if seconds is None and plan.step_seconds is not None:
        seconds = plan.step_seconds.scaled(1e6 / plan.trained_tokens_per_step)
    if price is None or seconds is None:
        return None
    return Cost(
        money=seconds.scaled(price.amount * plan.num_gpus / 3600),
        per_hour=price.text,
        currency=price.currency,
        per_million_tokens=plan.seconds is None,
    )


def money_text(amount: float, currency: str) -> str:
    """ "$0.42", "12 EUR", "$1,200": of an estimate, so two digits."""
    if amount < 0.005:
        return f"less than {_with_currency('0.01', currency)}"
    if amount < 10:
        return _with_currency(f"{amount:.2f}", currency)
    return _with_currency(two_digits(amount), currency)


def _with_currency(number: str, currency: str) -> str:
    if not currency:
        return number
    return f"{number} {currency}" if currency.isalpha() else f"{currency}{number}"


def cost_figures(cost: Cost) -> tuple[str, str]:
    """The likeliest cost, and its range: "$0.42", "$0.31 to $0.55"."""
    value, low, high = (
        money_text(amount, cost.currency)
        for amount in (cost.money.value, cost.money.low, cost.money.high)
    )
    return value, low if low == high else f"{low} to {high}"


def cost_text(cost: Cost) -> str:
    """ "cost $0.42 ($0.31 to $0.55), at $1.99 per hour and device"."""
    value, ends = cost_figures(cost)
    if cost.per_million_tokens:
        value = f"{value} per million tokens"
    elif ends != value:
        value = f"{value} ({ends})"
    return f"cost {value}, at {cost.per_hour} per hour and device"
