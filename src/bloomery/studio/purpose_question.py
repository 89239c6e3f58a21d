"""What a model should learn from the rows: five choices, and for rewards how a completion is scored. No torch."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import final

from nicegui import ui

from bloomery.studio.components import choice, text
from bloomery.studio.data_choices import PURPOSES, DataFacts
from bloomery.studio.recipe_form import value_text


@final
class PurposeQuestion:
    """Mutable: the choices. `on_purpose(name)`: of PURPOSES. `on_reward(reward)`: an entry of `rewards` as YAML."""

    def __init__(
        self,
        *,
        on_purpose: Callable[[str], Awaitable[None]],
        on_reward: Callable[[str], Awaitable[None]],
    ) -> None:
        self._on_purpose = on_purpose
        self._on_reward = on_reward
        self._choices = ui.element("div").classes("choices")
        self._mistake = text("", "p", "small bad").props("role=alert")
        self._rewards = ui.element("div").classes("columns")
        self._shown: tuple[object, ...] | None = None

    def show(
        self, facts: DataFacts | None, purpose: str, mistake: str, *, reward: str | None
    ) -> None:
        """`purpose`: the one that counts. `reward`: None where the recipe says how completions are scored."""
        self._mistake.text = mistake
        self._mistake.visible = bool(mistake)
        # Drawn again, a choice would lose the keyboard's focus.
        shown = facts, purpose, reward
        if shown == self._shown:
            return
        self._shown = shown
        self._choices.clear()
        with self._choices:
            for one in PURPOSES:
                lack = "" if facts is None else facts.lacks.get(one.name, "")
                pick = partial(self._on_purpose, one.name)
                box = choice(one.title, lack or one.words, pick, on=one.name == purpose)
                box.mark(f"purpose-{one.name}")
                box.props(f"data-focus=purpose-{one.name}")
                if lack or facts is None:
                    box.props("disabled")
        self._rewards.clear()
        if purpose == "rewards" and facts is not None and reward is not None:
            with self._rewards:
                self._ask_reward(facts.columns, reward)

    def _ask_reward(self, columns: tuple[str, ...], reward: str) -> None:
        """How completions are scored: against a column, or by a function."""
        options = {
            f"{{verifier: {kind}, column: {value_text(column)}}}": f"{words} {column}"
            for column in columns
            for kind, words in (("exact_match", "exactly"), ("math", "the same number as in"))
        }
        select = ui.select(
            options, value=reward if reward in options else None, label="Right is what equals"
        ).props("outlined dense")
        select.on_value_change(lambda: self._on_reward(str(select.value)))
        function = ui.input(
            "or a function of yours",
            placeholder="my_rewards.py:score",
            value=reward.removeprefix("{python: ").removesuffix("}") if "python" in reward else "",
        ).props("outlined dense")
        function.on(
            "change",
            lambda: self._on_reward(f"{{python: {value_text(function.value or '')}}}"),
        )
