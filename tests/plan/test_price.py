"""What a run costs: the planned time on every device, at a price that the user names."""

import json

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.plan.price import (
    VARIABLE,
    Price,
    cost_text,
    keep_price,
    kept_price,
    money_text,
    read_price,
    run_cost,
)
from bloomery.recipe.load import load_recipe
from bloomery.runs.devices import planned_report


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("text", "price", "shown"),
    [
        ("1.99", Price(1.99), "1.99"),
        (" $2 ", Price(2.0, "$"), "$2"),
        ("1,5 EUR", Price(1.5, "EUR"), "1.5 EUR"),
        ("chf 0.4", Price(0.4, "chf"), "0.4 chf"),
        ("¥300", Price(300, "¥"), "¥300"),
    ],
)
def test_a_price_is_read_and_shown_as_typed(text: str, price: Price, shown: str) -> None:
    assert read_price(text, "here") == price
    assert price.text == shown
    assert read_price(shown, "here") == price


@pytest.mark.parametrize(
    "text", ["", "free", "-1", "0", "1e9", "$1 EUR", "1.2.3", "2 per day", "9" * 400, "nan", "١"]
)
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a price per hour") as caught:
        read_price(text, "--price-per-hour")
    assert (caught.value.where, caught.value.code) == ("--price-per-hour", 2)


def test_amounts_have_two_digits_and_never_say_nothing() -> None:
    amounts = (0.0001, 0.05, 1.234, 12.3, 1234.0)
    texts = ["less than $0.01", "$0.05", "$1.23", "$12", "$1,200"]
    assert [money_text(amount, "$") for amount in amounts] == texts


def test_the_cost_is_the_time_of_every_device() -> None:
    loaded = load_recipe("llama3.1-8b-full-8gpu", ["train.max_steps=1000"])
    plan = planned_report(loaded, gpu="MI300X", gpus=8)[0].plan
    cost = run_cost(plan, Price(2.0, "$"))
    assert cost is not None and plan.seconds is not None
    assert cost.money.value == pytest.approx(8 * 2.0 * plan.seconds.value / 3600)
    assert cost.money.low == pytest.approx(8 * 2.0 * plan.seconds.low / 3600)
    assert "at $2 per hour and device" in cost_text(cost)
    assert run_cost(plan, None) is None


def test_a_price_is_kept_for_this_machine_and_the_variable_comes_first(monkeypatch) -> None:
    assert kept_price() is None
    assert keep_price(Price(1.5, "EUR"))
    assert kept_price() == Price(1.5, "EUR")
    monkeypatch.setenv(VARIABLE, "$3")
    assert kept_price() == Price(3.0, "$")
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(UserError, match="not a price"):
        kept_price()
    monkeypatch.delenv(VARIABLE)
    assert keep_price(None)
    assert kept_price() is None


def test_plan_prints_the_cost_of_the_run_or_of_a_million_tokens() -> None:
    def printed(*words: str) -> dict[str, object]:
        result = CliRunner().invoke(cli, ["plan", *words, "--json"])
        assert result.exit_code in (0, 1), result.output
        return json.loads(result.stdout)

    whole = printed(
        "go-coder-125m", "train.max_steps=100", "--gpu", "H100", "--price-per-hour", "$1.99"
    )
    cost, seconds = whole["cost"], whole["seconds"]
    assert cost["value"] == pytest.approx(1.99 * seconds["value"] / 3600)
    assert (cost["currency"], cost["per_hour"], cost["per_million_tokens"]) == ("$", "$1.99", False)
    assert printed("go-coder-125m", "--gpu", "H100")["cost"] is None
    # A kept price is that of this machine's devices alone.
    keep_price(Price(1.0))
    assert printed("go-coder-125m", "--gpu", "H100")["cost"] is None
    assert printed("demo")["cost"]["per_hour"] == "1"
    unknown = printed("qwen3-8b-qlora", "--gpu", "H100", "--price-per-hour", "2")["cost"]
    assert unknown["per_million_tokens"] is True and unknown["value"] > 0
    result = CliRunner().invoke(cli, ["plan", "demo", "--gpu", "all", "--price-per-hour", "2"])
    assert result.exit_code != 0
