"""One Chromium for every test of studio, and one studio for those of a file."""

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from studio_for_tests import BOLD, TOKEN, episode, make_run, studio_process, write_rollout

from bloomery.monitor.events import RunEnded, Warned
from browser import PROGRAM, Browser
from runs_for_tests import made_up_run


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("nicegui", reason="the extra `studio` is not installed")
    if PROGRAM is None:
        pytest.skip("no Chromium is installed")
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """The Chromium of all tests, as wide as a desktop's."""
    chromium.problems.clear()
    chromium.forget("bloomery_colors")
    chromium.look(width=1400)
    return chromium


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, whose runs and data studio shows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With three runs, two of which have a checkpoint, and two datasets."""
    folder = tmp_path_factory.mktemp("studio")
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    (folder / "odd.csv").write_text("id,customer_text,agent_text\n" + "1,Is it hot?,Yes.\n" * 40)
    with chdir(folder):
        make_run(BOLD, end=RunEnded(step=40, status="stopped"))
        # A warning with a word that is wider than a phone.
        warned = Warned(step=40, reason=f"cannot be read: /models/{'m' * 60}/model.safetensors")
        for name in ("first", "second"):
            folder_of_run = make_run(name, events=[*made_up_run(), warned])
            checkpoint = folder_of_run / "checkpoints" / "step-00000020"
            checkpoint.mkdir(parents=True)
            (checkpoint / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        for step in (1, 2):
            write_rollout(Path("runs/second"), step, *(episode(reward / 4) for reward in range(4)))
    return folder


@pytest.fixture(scope="module")
def studio(folder: Path, chromium: Browser) -> Iterator[str]:
    """The URL of a studio that shows the runs of `folder`; the browser has its token."""
    with studio_process(folder) as url:
        chromium.open(f"{url}?token={TOKEN}")
        yield url


@pytest.fixture(autouse=True, scope="module")
def _may_download() -> Iterator[None]:
    """Modules of other tests forbid it for their process as they are collected; New run then starts nothing that is to
    be downloaded. Of a module, before its studio begins.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield
