"""Tags and the note of a run on its page, and the dialog that changes them. No torch."""

import asyncio
from typing import final

from nicegui import ui

from bloomery.core.errors import UserError, system_errors_worded
from bloomery.core.run_notes import RunNotes, change_notes, read_notes
from bloomery.core.text import redact_secrets
from bloomery.studio.components import button, text
from bloomery.studio.frame import notify, question
from bloomery.studio.watching import OpenRun


@final
class NotesView:
    """Mutable: what people wrote about the run. `bloomery runs note` writes the same file."""

    def __init__(self, opened: OpenRun) -> None:
        self._folder = opened.reader.folder
        self._shown: RunNotes | None = None
        self._box = ui.element("div").classes("chips run-notes")
        self._show(read_notes(self._folder))

    async def update(self) -> None:
        notes = await asyncio.to_thread(read_notes, self._folder)
        if notes != self._shown:
            self._show(notes)

    def _show(self, notes: RunNotes) -> None:
        self._shown = notes
        self._box.clear()
        with self._box:
            for tag in notes.tags:
                text(tag).classes("tag")
            if words := notes.note or notes.problem:
                text(redact_secrets(words)).classes("run-note")
            label = "Edit the note" if notes.note or notes.tags else "Add a note or tags"
            button(label, self._ask, kind="quiet").classes("small")

    async def _ask(self) -> None:
        notes = read_notes(self._folder)
        with question("Note and tags") as dialog:
            tags = ui.input("Tags, with spaces between them", value=" ".join(notes.tags))
            words = ui.textarea("Note", value=notes.note).props("autogrow")
            for field in (tags, words):
                field.props("outlined dense").classes("w-full")
            with ui.row().classes("w-full justify-end"):
                button("Cancel", lambda: dialog.submit(False), kind="quiet")
                button("Save", lambda: dialog.submit(True), kind="go")
        if not await dialog:
            return
        wanted = str(tags.value or "").split()
        try:
            with system_errors_worded():
                self._show(
                    change_notes(
                        self._folder,
                        add=set(wanted) - set(notes.tags),
                        remove=set(notes.tags) - set(wanted),
                        note=str(words.value or ""),
                    )
                )
        except UserError as error:
            notify(error)
