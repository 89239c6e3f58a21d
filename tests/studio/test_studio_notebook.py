"""Studio from a notebook and from `bloomery watch --web`: at the page of a run."""

import signal
import subprocess
import sys
import time
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from click.testing import CliRunner
from studio_for_tests import make_run

from bloomery.api import Run
from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.studio.notebook import StudioFrame

pytest.importorskip("nicegui", reason="the extra `studio` is not installed")


def test_a_frame_has_the_host_of_its_notebook() -> None:
    """A browser sends the cookie of studio to the host of the page around the frame alone."""
    url = "http://127.0.0.1:8100/run/a%20run?token=b"
    frame = StudioFrame(url, 500)
    page = frame._repr_html_()
    assert str(frame) == url and url in page
    assert 'height="500"' in page
    assert "location.hostname === 'localhost' ? 'localhost' : '127.0.0.1'" in page


@pytest.mark.soak
def test_a_run_has_its_page_in_a_frame_until_the_notebook_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("a run")
    notebook = (
        "import sys\n"
        "from bloomery.api import Run\n"
        "from pathlib import Path\n"
        "frames = [Run(Path('runs/a run'), 0).studio(height=500) for _ in range(2)]\n"
        "assert 'nicegui' not in sys.modules and 'torch' not in sys.modules\n"
        "print(*frames, sep='\\n')\n"
        "print(frames[0]._repr_html_(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", notebook],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert kernel.stdout is not None
        url, second, page = (kernel.stdout.readline().strip() for _ in range(3))
        assert url == second  # one studio for both
        assert 'height="500"' in page and url in page
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with browser.open(url) as answer:
            assert answer.url.endswith("/run/a%20run")
            assert "frame-ancestors 'self' http://localhost:*" in str(answer.headers)
    finally:
        kernel.send_signal(signal.SIGKILL)
        kernel.communicate()
    end = time.monotonic() + 30
    while True:  # studio ends with the kernel
        try:
            browser.open(url).close()
        except OSError:
            break
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_outside_of_runs_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="folder runs/"):
        Run(tmp_path / "elsewhere", 0).studio()


def test_watch_web_opens_studio_at_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run("one").absolute()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    shown = []
    monkeypatch.setattr(
        "bloomery.cli.studio.show",
        lambda listener, host, *, address: shown.append((host, address, Path.cwd())),
    )
    result = CliRunner().invoke(cli, ["watch", str(run), "--web"])
    assert result.exception is None, result.output
    assert shown == [("127.0.0.1", "/run/one", tmp_path)]

    outside = run.rename(tmp_path / "two")
    result = CliRunner().invoke(cli, ["watch", str(outside), "--web"])
    assert isinstance(result.exception, UserError) and "folder runs/" in result.exception.problem
