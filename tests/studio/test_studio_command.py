"""`bloomery studio` as a process: its address, its refusals, and the commands that outlive it."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner
from studio_for_tests import TOKEN

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.serve.address import LOCAL, bound, url_for_others, url_of
from bloomery.studio.commands import Commands

needs_nicegui = pytest.mark.skipif(
    find_spec("nicegui") is None, reason="the extra `studio` is not installed"
)


def refused(*arguments: str) -> UserError:
    result = CliRunner().invoke(cli, ["studio", "--no-open", *arguments])
    assert isinstance(result.exception, UserError)
    return result.exception


def test_an_open_address_needs_a_token_of_yours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLOOMERY_STUDIO_TOKEN", raising=False)
    error = refused("--host", "0.0.0.0")
    assert error.code == 2
    # Other users of the machine can read the arguments of a process, but not its variables.
    assert "BLOOMERY_STUDIO_TOKEN=" in error.fix and "--token" not in error.fix
    assert "too short" in refused("--token", "short").problem
    assert "ASCII" in refused("--token", "schlüssel").problem


@pytest.mark.parametrize("host", ["127.0.0.1", "node7", "::1", "192.0.2.7"])
def test_an_address_of_one_host_is_printed_once(host: str) -> None:
    url = url_of(host, 8100)
    assert urlsplit(url).netloc == (f"[{host}]:8100" if ":" in host else f"{host}:8100")
    assert url_for_others(url, host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_studio_prints_an_address_that_other_machines_can_reach(host: str) -> None:
    if host == "::" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with bound(host, 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        local = f"{url_of(host, port)}run/demo?token={TOKEN}"
        others = url_for_others(local, host)
        assert others is not None and others.endswith(f":{port}/run/demo?token={TOKEN}")
        names = [urlsplit(url).hostname for url in (local, others)]
        assert names[0] in LOCAL
        assert names[1] not in (*LOCAL, host)
        for name in names:
            if name != socket.gethostname():  # without a network it may be no address
                socket.create_connection((name, port), timeout=10).close()


def test_without_a_network_other_machines_get_the_name_of_this_one(monkeypatch) -> None:
    monkeypatch.setattr("bloomery.serve.address._own_address", lambda _: None)
    assert (
        url_for_others("http://127.0.0.1:8100/", "0.0.0.0")
        == f"http://{socket.gethostname()}:8100/"
    )


@needs_nicegui
def test_a_port_that_is_taken_is_named_with_another() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        error = refused("--port", str(port))
    assert (error.code, error.where) == (2, f"127.0.0.1:{port}")
    assert f"--port {port + 1}" in error.fix


def test_the_command_line_does_not_import_nicegui() -> None:
    program = "import sys, bloomery.cli, bloomery.cli.studio, bloomery.serve.listen; print(sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "'click'" in modules
    assert "'nicegui'" not in modules and "'torch'" not in modules and "'fastapi'" not in modules


def test_a_command_outlives_the_studio_that_started_it(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from bloomery.studio.commands import Commands\n"
        "command = Commands().start('recipes', 'copy', 'go-coder-tiny', 'copy.yaml', subject='x')\n"
        "print(command.process.pid, os.getsid(command.process.pid), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    studio = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert studio.returncode == -signal.SIGKILL
    pid, session = studio.stdout.split()
    assert pid == session  # no signal of the terminal reaches it
    end = time.monotonic() + 60
    while not (tmp_path / "copy.yaml").exists():  # written long after studio was killed
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_command_that_the_system_refuses_is_an_error_in_words(monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(UserError, match="cannot start `bloomery stop runs/x`: No space") as refusal:
        Commands().start("stop", "runs/x", subject="x")
    assert refusal.value.where == "/tmp"
    assert refusal.value.fix.startswith("free disk space")


def test_of_two_pages_that_press_a_button_at_once_one_is_told_to_wait(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLOOMERY_STUDIO_TOKEN", TOKEN)
    commands = Commands()
    first = commands.start("resume", "runs/absent run", subject="absent")
    assert first.line == "bloomery resume 'runs/absent run'"  # as you would type it
    with pytest.raises(UserError, match="still runs"):
        commands.start("resume", "runs/absent run", subject="absent")
    assert first.process.wait(60) == 2
    assert "no run" in first.text()
    assert commands.of("absent") is first
    assert TOKEN not in first.text()
