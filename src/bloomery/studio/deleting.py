"""The question before runs are deleted: what goes with them. Does not import torch."""

import asyncio
from collections.abc import Sequence

from nicegui import ui

from bloomery.core.errors import UserError
from bloomery.core.text import harmless
from bloomery.core.units import counted, format_bytes
from bloomery.runs.cleaning import Leftover, deletable
from bloomery.studio.commands import Commands
from bloomery.studio.components import button
from bloomery.studio.frame import notify, question
from bloomery.studio.watching import Watching

SUBJECT = "deleted runs"  # of `bloomery runs rm`


async def ask_to_delete(watching: Watching, commands: Commands, names: Sequence[str]) -> bool:
    """Lists what goes with the runs, asks, and starts `bloomery runs rm`; whether it was started."""
    items, refusals = await asyncio.to_thread(_found, watching, names)
    total = format_bytes(sum(item.bytes for item in items))
    title = f"Delete {counted(len(items), 'runs')}, {total}?" if items else "Nothing to delete"
    with question(title) as dialog:
        with ui.column().classes("w-full gap-2 max-h-[50vh] overflow-auto no-wrap"):
            for item in items:
                with ui.column().classes("gap-0"):
                    ui.label(harmless(str(item.path))).classes("font-medium break-all")
                    ui.label(harmless(f"{format_bytes(item.bytes)}: {item.loss}")).classes(
                        "text-sm"
                    )
            for refusal in refusals:
                text = f"kept: {refusal.where}: {refusal.problem}"
                ui.label(harmless(f"{text}; fix: {refusal.fix}")).classes(
                    "text-negative break-words"
                )
        if items:
            ui.label("This cannot be undone. Exports and prepared datasets stay.").classes(
                "text-sm"
            )
        with ui.element("div").classes("toolbar w-full dialog-buttons"):
            ui.space()
            button("Keep", lambda: dialog.submit(False), kind="quiet").props("autofocus")
            if items:
                label = "Delete it" if len(items) == 1 else "Delete them"
                agree = button(label, lambda: dialog.submit(True), kind="go")
                agree.props("color=negative")
    agreed = bool(await dialog)
    if not agreed:
        return False
    try:
        commands.start("runs", "rm", *(str(item.path) for item in items), "--yes", subject=SUBJECT)
    except UserError as error:
        notify(error)
        return False
    return True


def _found(watching: Watching, names: Sequence[str]) -> tuple[list[Leftover], list[UserError]]:
    """What can be deleted, and why the others cannot."""
    items = list[Leftover]()
    refusals = list[UserError]()
    for name in names:
        try:
            items.append(deletable(watching.run(name).reader.folder))
        except UserError as error:
            refusals.append(error)
        except OSError as error:  # deleted or changed meanwhile
            problem = f"cannot be read: {error.strerror}"
            refusals.append(UserError(problem, where=f"runs/{name}", fix="try again"))
    return items, refusals
