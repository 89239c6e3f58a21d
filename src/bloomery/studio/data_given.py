"""Data that a page is given: files and folders that are uploaded or dropped, and text that is pasted. No torch."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import final

from nicegui import ui
from nicegui.events import MultiUploadEventArguments

from bloomery.core.errors import UserError, of_the_system
from bloomery.core.text import harmless
from bloomery.core.units import counted
from bloomery.studio.components import button, text
from bloomery.studio.frame import question
from bloomery.studio.given_files import MOST_BYTES, MOST_FILES, places_of, save_pasted
from bloomery.studio.recipe_answers import sentence_of


@final
class GivenData:
    """Mutable: the buttons of a page, and what is dropped onto it. `on_data(path)`: it is in the working folder now.
    `on_mistake(words)`: why it is not.
    """

    def __init__(
        self,
        onto: ui.element,
        *,
        on_data: Callable[[str], Awaitable[None]],
        on_mistake: Callable[[str], None],
    ) -> None:
        """`onto`: the element that says that files may be dropped."""
        self._on_data = on_data
        self._on_mistake = on_mistake
        self._upload = ui.upload(
            on_multi_upload=self._uploaded,
            on_rejected=lambda: on_mistake(f"more than 2 GiB or {MOST_FILES:,} files: copy them"),
            auto_upload=True,
            multiple=True,
            max_file_size=MOST_BYTES,
            max_files=MOST_FILES,
        ).classes("hidden")
        # Of the whole drop: the browser knows how much of its one request is sent.
        with ui.element("div").classes("upload-progress").props("hidden") as self._bar:
            text("", "span", "small").props("role=status")
            with ui.element("div").classes("progress").props("aria-hidden=true"):
                ui.element("i")
        self._upload.on("uploading", js_handler=f"(sent) => studioUpload({self._bar.id}, sent)")
        self._upload.on("failed", lambda: on_mistake("the upload broke off: try it again"))
        onto.props(f"data-drop={self._upload.id}")
        self.upload_button = button("Upload", self._pick, icon="upload_file")
        button("Paste", self._paste, icon="content_paste")

    def _pick(self) -> None:
        self._upload.run_method("pickFiles")

    async def _uploaded(self, event: MultiUploadEventArguments) -> None:
        self._upload.reset()  # the next upload begins with no file
        try:
            dataset, places = places_of([file.name for file in event.files])
            for file, place in zip(event.files, places, strict=True):
                if place is not None:
                    await asyncio.to_thread(place.parent.mkdir, parents=True, exist_ok=True)
                    await file.save(place)
        except UserError as error:
            self._on_mistake(harmless(sentence_of(error)))
            return
        except OSError as error:
            worded = of_the_system(error)
            fix = worded.fix if worded else "start studio in another folder"
            self._on_mistake(harmless(f"cannot be written: {error.strerror}: {fix}"))
            return
        if left_out := places.count(None):
            ui.notify(f"{counted(left_out, 'files')} without rows or text: left out")
        await self._on_data(str(dataset))

    async def _paste(self) -> None:
        with question("Paste rows or text") as dialog:
            field = ui.textarea(
                placeholder='{"messages": [{"role": "user", "content": "..."}, ...]}'
            ).props('outlined rows=12 aria-label="Rows or text"')
            field.classes("w-full")
            mistake = text("", "p", "small bad").props("role=alert")

            def use() -> None:
                try:
                    dialog.submit(str(save_pasted(field.value or "")))
                except UserError as error:
                    mistake.text = sentence_of(error)

            with ui.element("div").classes("toolbar w-full dialog-buttons"):
                ui.space()
                button("Cancel", dialog.close, kind="quiet")
                button("Use it", use, kind="go")
        # Here, not in the dialog: that is deleted while the page still plans.
        path = await dialog
        if path:
            await self._on_data(path)
