"""The components of studio's pages: style.css lists them and says how they look."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, final

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

Tone = Literal["", "good", "warn", "bad", "muted"]

# Of a status: what is good, what wants a look, what is the thing itself.
STATUS_TONES: dict[str, str] = {
    "running": "good",
    "paused": "warn",
    "stopping": "warn",
    "done": "ember",
    "failed": "bad",
    "killed": "bad",
    "unreadable": "bad",
    "deleted": "bad",
}


def text(words: str, tag: str = "span", classes: str = "") -> TextElement:
    """Words in an element of this tag."""
    return TextElement(tag=tag, text=words).classes(classes)


@contextmanager
def heading(title: str, sub: str = "") -> Iterator[tuple[TextElement, TextElement]]:
    """The title of a page and the sentence below it, both to be changed; inside the block its buttons."""
    with ui.element("div").classes("heading"):
        with ui.element("div").classes("min-w-0"):
            name = text(title, "h1", "title")
            below = text(sub, "p", "sub")
            below.bind_visibility_from(below, "text", backward=bool)
        with ui.element("div").classes("toolbar"):
            yield name, below


@contextmanager
def card(title: str = "", remark: str = "", *, level: int = 2) -> Iterator[ui.element]:
    """What belongs together, under a title and a remark; inside the block its content."""
    with ui.element("section").classes("card") as section:
        if title or remark:
            with TextElement(tag=f"h{level}", text=title).classes("card-title"):
                text(remark, "small")
        yield section


@contextmanager
def toolbar() -> Iterator[None]:
    with ui.element("div").classes("toolbar"):
        yield


@contextmanager
def acts_on(chosen: Callable[[], Sequence[object]]) -> Iterator[Callable[[], None]]:
    """Buttons that act on what is marked in a list; on a phone they stand at the bottom of the window while something
    is, since the list is long. Yields what is to be called when that changes.
    """
    with ui.element("div").classes("acts") as box:

        def follow() -> None:
            is_chosen = bool(chosen())
            box.classes(add="on" if is_chosen else None, remove=None if is_chosen else "on")

        yield follow


def button(
    words: str,
    on_click: Callable[[], Any] | None = None,
    *,
    kind: Literal["go", "plain", "quiet"] = "plain",
    icon: str | None = None,
) -> ui.button:
    """`go`: the one of a page that acts. `quiet`: without a line."""
    made = ui.button(words, icon=icon, on_click=on_click).props("no-caps")
    return made.props({"go": "unelevated", "plain": "outline", "quiet": "flat"}[kind])


def sentence(words: str, tone: Tone = "", *, small: bool = False) -> TextElement:
    return text(words, "p", f"{tone} {'small' if small else ''} break-words")


def note(words: str, tone: Literal["", "good", "warn", "bad"] = "") -> TextElement:
    """A sentence that wants to be read."""
    return text(words, "p", f"note {tone}")


@final
class Number:
    """Mutable: a number with its label above and a sentence below it. `lead`: the one that decides."""

    def __init__(self, *, lead: bool = False) -> None:
        with ui.element("div").classes("number lead" if lead else "number") as self.element:
            self._label = text("")
            with TextElement(tag="b", text="") as self._value:
                self._unit = text("", "small")
            self._below = text("", "em")
        self._tone = ""

    def show(
        self, label: str, value: str, below: str = "", tone: Tone = "", *, unit: str = ""
    ) -> None:
        self._label.text, self._value.text, self._unit.text, self._below.text = (
            label,
            value,
            unit,
            below,
        )
        if tone != self._tone:
            self._below.classes(remove=self._tone, add=tone)
            self._tone = tone


@contextmanager
def numbers() -> Iterator[ui.element]:
    with ui.element("div").classes("numbers") as row:
        yield row


def fact(value: str, words: str) -> None:
    """A smaller number with its words below."""
    with ui.element("div").classes("fact"):
        text(value, "b")
        text(words)


@contextmanager
def chips() -> Iterator[ui.element]:
    with ui.element("div").classes("chips") as row:
        yield row


def chip(words: str, on_click: Callable[[], Any] | None = None, *, on: bool = False) -> TextElement:
    """A choice in a pill; `on`: it is chosen."""
    made = text(words, "button" if on_click else "span", "chip on" if on else "chip")
    if on_click:
        made.props(f"type=button aria-pressed={str(on).lower()}").on("click", lambda: on_click())
    return made


def choice(title: str, words: str, on_click: Callable[[], Any], *, on: bool = False) -> ui.element:
    """A large choice: a word and a sentence below it."""
    with ui.element("button").classes("choice on" if on else "choice") as made:
        text(title, "b")
        text(words)
    return made.props(f"type=button aria-pressed={str(on).lower()}").on("click", lambda: on_click())


@final
class Badge:
    """Mutable: the status of a run."""

    def __init__(self, status: str = "") -> None:
        self.element = text("", "span", "badge").props('aria-live="polite"')
        self._tone = ""
        self.show(status)

    def show(self, status: str) -> None:
        tone = STATUS_TONES.get(status, "")
        self.element.text = status
        self.element.classes(remove=self._tone, add=tone)
        self._tone = tone


class Part(NamedTuple):
    """Of a bar. `size`: in any unit, the same for all. `color`: a token, such as "c1"."""

    name: str
    size: float
    figure: str
    color: str


def bar(parts: Sequence[Part], whole: float) -> None:
    """Parts of a whole side by side, with a legend; what they leave of the whole stays empty."""
    label = ", ".join(f"{part.name} {part.figure}" for part in parts)
    with ui.element("div").classes("bar").props("role=img") as strip:
        strip.props["aria-label"] = label
        for part in parts:
            share = 100 * part.size / whole if whole else 0.0
            ui.element("i").style(f"width: {share:.2f}%; background: var(--{part.color})")
    with ui.element("div").classes("legend").props("aria-hidden=true"):
        for part in parts:
            ui.element("i").style(f"background: var(--{part.color})")
            text(part.name)
            text(part.figure)


@final
class Progress:
    """Mutable: a thin line of what is done, from 0 to 1."""

    def __init__(self) -> None:
        with ui.element("div").classes("progress").props("aria-hidden=true") as self.element:
            self._line = ui.element("i")

    def show(self, share: float) -> None:
        self._line.style(f"width: {100 * min(max(share, 0.0), 1.0):.2f}%")


@final
class StepSlider:
    """Mutable: which of some steps is looked at. The newest, also of those that come, until another one is chosen."""

    def __init__(self, name: str, on_change: Callable[[], Any]) -> None:
        """`name`: what the steps are of, for screen readers. `on_change`: somebody has chosen another step."""
        self._steps: list[int] = []
        self._on_change = on_change
        with ui.element("div").classes("step-slider") as self.element:
            self._words = text("", "span", "small")
            self._slider = ui.slider(min=0, max=0, step=1, value=0, on_change=self._change)
            self._slider.props(f'dense snap aria-label="{name}"')
        self.element.visible = False

    @property
    def step(self) -> int | None:
        """None while there is none."""
        return self._steps[int(self._slider.value)] if self._steps else None

    def show(self, steps: Sequence[int]) -> None:
        """`steps`: in order, at least those of before."""
        chosen = self.step
        stays = chosen is not None and chosen != self._steps[-1] and chosen in steps
        self._steps = list(steps)
        self.element.visible = len(steps) > 1
        last = max(0, len(steps) - 1)
        self._slider.props["max"] = last
        with self._slider.props.suspend_updates():
            self._slider.value = steps.index(chosen) if chosen is not None and stays else last
        self._slider.update()
        self._tell()

    def _tell(self) -> None:
        if self._steps:
            number = int(self._slider.value) + 1
            self._words.text = f"step {self.step:,}, {number} of {len(self._steps)}"

    def _change(self) -> Any:
        self._tell()
        return self._on_change()


@contextmanager
def fold(title: str, *, opened: bool = False) -> Iterator[ui.expansion]:
    """A title that opens; inside the block what it hides."""
    with ui.expansion(title, value=opened).classes("w-full") as box:
        yield box


def caption_fold(box: ui.expansion, caption: str) -> None:
    """A remark under the title of a fold. Quasar names the fold by its title alone, without what stands below it."""
    # Parts of a name are told apart by a space between them, also where each has a line of its own.
    box.props["caption"] = f" {caption}"
    box.props["toggle-aria-label"] = f"{box.text} {caption}"


def mono(words: str) -> TextElement:
    """Text as a program wrote it."""
    return text(words, "div", "mono")


@contextmanager
def two_columns() -> Iterator[ui.element]:
    """What is asked, and beside it a card that stays in view: the second of the two elements inside the block."""
    with ui.element("div").classes("two") as columns:
        yield columns


@contextmanager
def card_grid(columns: Literal[2, 3]) -> Iterator[ui.element]:
    """Cards side by side; one column on a phone."""
    with ui.element("div").classes("grid2" if columns == 2 else "grid3") as grid:
        yield grid
