"""Studio in a notebook: the page of a run in a frame, from a `bloomery studio` that ends with the notebook's kernel."""

import html
import json
import os
import secrets
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

from bloomery.core.errors import UserError
from bloomery.core.extras import install_extra
from bloomery.studio.commands import TOKEN
from bloomery.studio.listening import ListeningProcess, parent_option
from bloomery.studio.watching import address_of

START_SECONDS = 60.0
_ADDRESS = r"^studio +(http://127\.0\.0\.1:\d+/)"
_started = dict[Path, tuple[ListeningProcess, str]]()  # by the folder with runs/, with the token


@final
@dataclass(frozen=True)
class StudioFrame:
    """A page of studio: a frame in a notebook, its address as text. `height`: pixels."""

    url: str
    height: int

    def __str__(self) -> str:
        return self.url

    def _repr_html_(self) -> str:
        # A browser sends the cookie of a frame only where its host is that of the notebook.
        name = f"studio-{secrets.token_hex(4)}"
        script = (
            f"document.getElementById({json.dumps(name)}).src = {json.dumps(self.url)}"
            ".replace('127.0.0.1', location.hostname === 'localhost' ? 'localhost' : '127.0.0.1')"
        )
        return (
            f'<iframe id="{name}" title="Studio" width="100%" height="{self.height}" style="border: 0"></iframe>'
            f'<script>{script}</script><a href="{html.escape(self.url)}" target="_blank">In a tab of its own</a>'
        )


def frame_of(run: Path, height: int) -> StudioFrame:
    """The page of a run. Starts studio once per folder of runs. Raises UserError."""
    path = run.resolve()
    if find_spec("nicegui") is None:
        fix = install_extra("studio")
        raise UserError("studio needs NiceGUI", where="this environment", fix=fix)
    if path.parent.name != "runs":
        fix = "train without run_dir, or into a folder named runs"
        raise UserError("studio shows the runs of a folder runs/", where=str(path), fix=fix)
    folder = path.parent.parent
    process, token = _started.get(folder, (None, ""))
    if process is None or process.state == "ended":
        token = secrets.token_urlsafe(16)
        process = ListeningProcess(
            *("studio", "--port=0", "--no-open", parent_option()),
            address=_ADDRESS,
            environment={**os.environ, TOKEN: token},
            folder=folder,
        )
        _started[folder] = process, token
    end = time.monotonic() + START_SECONDS
    while process.state == "starting" and time.monotonic() < end:
        time.sleep(0.05)
    if process.url is None:
        process.close()
        raise UserError(
            "studio did not start", where=str(folder), fix=process.text() or "try again"
        )
    return StudioFrame(f"{process.url.rstrip('/')}{address_of(path.name)}?token={token}", height)
