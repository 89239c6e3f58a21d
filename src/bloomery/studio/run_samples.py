"""What the model of a run writes, by step: samples of prompts, and completions with their rewards. No torch."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from nicegui import ui

from bloomery.core.text import redact_secrets
from bloomery.data.pictures.thumbnails import Shown, shown_thumbnail
from bloomery.monitor.events import Sampled
from bloomery.report.rewards import (
    PromptPictures,
    ShownCompletion,
    ShownTurn,
    rollout_steps,
    shown_rollout,
)
from bloomery.studio.components import StepSlider, text
from bloomery.studio.watching import OpenRun

INLINE_CHARACTERS = 60  # of a call or a result that is read without opening it


@final
class SampleList:
    """Mutable: what the model writes after each prompt at one step, which a slider chooses among all of them."""

    def __init__(self, opened: OpenRun) -> None:
        self._opened = opened
        self._images: dict[str, Shown | None] = {}
        self._samples: list[Sampled] = []
        self._shown: tuple[int | None, list[tuple[Sampled, Sampled]]] = None, []
        with ui.element("section").classes("card") as self._box:
            with ui.element("div").classes("step-head"):
                with text("Samples", "h2", "card-title"):
                    text("the same prompts, as training goes on", "small")
                self._slider = StepSlider("Samples of step", self._draw)
            self._content = ui.element("div").classes("sample-grid")
        self._box.visible = False

    async def update(self) -> None:
        with self._opened.lock:
            samples = list(self._opened.view.samples)
        if samples == self._samples:
            return
        self._samples = samples
        for image in {sample.image for sample in samples} - self._images.keys():
            folder = self._opened.reader.folder
            self._images[image] = await asyncio.to_thread(shown_thumbnail, folder, image)
        self._box.visible = True
        self._slider.show(sorted({sample.step for sample in samples}))
        self._draw()

    def _draw(self) -> None:
        step = self._slider.step
        shown = samples_at(self._samples, step)
        if (step, shown) == self._shown:
            return
        self._shown = step, shown
        self._content.clear()
        with self._content:
            for newest, first in shown:
                with ui.element("div").classes("sample"):
                    if newest.image:
                        self._draw_image(newest.image)
                    text(redact_secrets(newest.prompt), "div", "mono muted")
                    _draw_sample(newest, "" if newest.step == step else f"step {newest.step:,}")
                    if first.step != newest.step:
                        _draw_sample(first, f"at first, step {first.step:,}")

    def _draw_image(self, place: str) -> None:
        image = self._images[place]
        if image is None:
            ui.label(f"{place} is missing").classes("opacity-75")
        else:
            draw_image(image, place)


def samples_at(samples: Sequence[Sampled], step: int | None) -> list[tuple[Sampled, Sampled]]:
    """Of each prompt the newest completion up to this step, and the first of all; in the order of the first ones."""
    by_prompt: dict[tuple[str, str], list[Sampled]] = {}
    for sample in samples:
        by_prompt.setdefault((sample.prompt, sample.image), []).append(sample)
    until_step = (
        [sample for sample in of_prompt if step is not None and sample.step <= step]
        for of_prompt in by_prompt.values()
    )
    return [
        (max(reversed(reached), key=lambda sample: sample.step), reached[0])
        for reached in until_step
        if reached
    ]


def _draw_sample(sample: Sampled, words: str) -> None:
    with ui.element("div").classes("sample-text"):
        if words:
            text(words, "span", "muted small")
        text(redact_secrets(sample.completion), "div", "mono")


@final
class RolloutList:
    """Mutable: completions of one rollout with their rewards: the best, a middle and the worst; episodes as talks."""

    def __init__(self, opened: OpenRun) -> None:
        self._folder = opened.reader.folder
        self._pictures = PromptPictures(self._folder)
        self._changed: int | None = None  # when the folder of the files was written
        self._shown: tuple[str, list[ShownCompletion]] | None = None
        self._is_reading = False
        with ui.element("section").classes("card") as self._box:
            with ui.element("div").classes("step-head"):
                with text("Completions", "h2", "card-title") as self._title:
                    self._about = text("", "small")
                self._slider = StepSlider("Rollout of step", self._read)
            self._content = ui.element("div").classes("episodes")
        self._box.visible = False

    async def update(self) -> None:
        changed = await asyncio.to_thread(_written, self._folder / "completions")
        if changed is None or changed == self._changed:
            return
        steps = await asyncio.to_thread(rollout_steps, self._folder)
        self._changed = changed
        self._slider.show(steps)
        if steps:
            await self._read()

    async def _read(self) -> None:
        """Draws the rollout that is chosen. Of those that are chosen while one is read, the last one is the next."""
        if self._is_reading:
            return
        self._is_reading = True
        try:
            step = None
            while step != self._slider.step:
                step = self._slider.step
                assert step is not None
                shown = await asyncio.to_thread(shown_rollout, self._folder, step, self._pictures)
            self._draw(shown)
        finally:
            self._is_reading = False

    def _draw(self, shown: tuple[str, list[ShownCompletion]]) -> None:
        if shown == self._shown:
            return
        self._shown = shown
        title, completions = shown
        self._box.visible = True
        is_played = any(completion.turns for completion in completions)
        self._title.text = "Episodes" if is_played else "Completions"
        self._about.text = f"{title}: the best, a middle and the worst" if completions else title
        self._content.clear()
        with self._content:
            for completion in completions:
                _draw_completion(completion)


def _written(folder: Path) -> int | None:
    """When files of a folder were made or deleted; None: there is none."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return None


def _draw_completion(completion: ShownCompletion) -> None:
    with ui.element("article").classes("episode"):
        with ui.element("div").classes("episode-head"):
            text(completion.role, "h3", classes="episode-role")
            text(completion.reward, "b")
            text(f"reward, advantage {completion.advantage}", "span", "muted small")
        if len(completion.rewards) > 1:
            with ui.element("dl").classes("episode-parts"):
                for name, value in completion.rewards:
                    text(redact_secrets(name), "dt")
                    text(value, "dd")
        for picture in completion.pictures:
            draw_image(picture, "picture of the prompt")
        text(redact_secrets(completion.prompt), "div", classes="mono episode-prompt")
        with ui.element("div").classes("episode-turns"):
            if completion.turns:
                for turn, results in in_talk(completion.turns):
                    _draw_turn(turn, results)
            else:
                text(redact_secrets(completion.completion), "div", "mono")
        if not completion.ended:
            text("cut at the maximum length", "p", "small warn")


def in_talk(turns: Sequence[ShownTurn]) -> Iterator[tuple[ShownTurn, list[ShownTurn]]]:
    """Each answer of the model with the results of its calls, in their order; a result without a call by itself."""
    answers: list[tuple[ShownTurn, list[ShownTurn]]] = []
    for turn in turns:
        if turn.role == "tool" and answers and len(answers[-1][1]) < len(answers[-1][0].calls):
            answers[-1][1].append(turn)
        else:
            answers.append((turn, []))
    yield from answers


def _draw_turn(turn: ShownTurn, results: Sequence[ShownTurn]) -> None:
    if turn.role == "tool":
        _draw_call(turn.name, None, turn)
        return
    if turn.text:
        text(redact_secrets(turn.text), "div", "mono")
    for index, (name, arguments) in enumerate(turn.calls):
        _draw_call(name, arguments, results[index] if index < len(results) else None)


def _draw_call(name: str, arguments: str | None, result: ShownTurn | None) -> None:
    """Folded: a line with the call and what came of it. `arguments`: None where the call is not known."""
    with ui.element("details").classes("call"):
        with ui.element("summary"):
            text(redact_secrets(name) or "a tool", "b")
            if arguments:
                text(_in_a_line(arguments), "code")
            if result is not None and result.failed:
                text("failed", "span", "bad")
            elif result is not None:
                text(f"→ {_in_a_line(result.text)}", "span", classes="call-result")
            else:
                text("without a result", "span", "muted")
        if arguments:
            text("arguments", "span", "muted small")
            text(redact_secrets(arguments), "div", "mono")
        if result is not None:
            text("result", "span", "muted small")
            text(redact_secrets(result.text), "div", "mono")


def _in_a_line(words: str) -> str:
    line = " ".join(redact_secrets(words).split())
    return line if len(line) <= INLINE_CHARACTERS else f"{line[: INLINE_CHARACTERS - 1]}…"


def draw_image(image: Shown, name: str) -> None:
    element = ui.element("img").classes("studio-image")
    element.props.update(src=image.url, alt=name, width=image.width, height=image.height)
