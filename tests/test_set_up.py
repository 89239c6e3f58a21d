"""scripts/setup.py: what it decides, without making an environment."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bloomery.hardware import wheels

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.py"


@pytest.fixture
def set_up(monkeypatch, tmp_path):
    """The script as a module, for a machine without GPU, PyTorch or package index."""
    spec = importlib.util.spec_from_file_location("set_up_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "set_up_script", module)
    spec.loader.exec_module(module)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(wheels, "index_answers", lambda index: False)
    for name, value in {"_own_torch": "", "_gpu": (None, None)}.items():
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr(module, "STAMP", tmp_path / "set-up.json")
    return module


def test_without_a_gpu_the_cpu_index_or_the_users_own(set_up, monkeypatch):
    assert set_up._torch().words == ("torch==2.13.0",)
    assert "does not answer" in set_up._torch().notes[0]
    set_up._torch.cache_clear()
    monkeypatch.setattr(wheels, "index_answers", lambda index: True)
    assert set_up._torch().words == (
        "--index-url",
        "https://download.pytorch.org/whl/cpu",
        "torch==2.13.0",
    )
    assert set_up._announcement().endswith(
        "no GPU found: PyTorch 2.13.0 for the CPU goes into .venv, once"
    )


def test_an_rx_6700_xt_gets_its_own_kernels_and_a_warning(set_up, monkeypatch):
    monkeypatch.setattr(set_up, "_gpu", lambda: ("gfx1031", None))
    assert set_up._torch().words[-1] == "torch[device-gfx1031]==2.13.0+rocm10.0.0"
    assert any("HSA_OVERRIDE" in note for note in set_up._torch().notes)


def test_torch_in_the_environment_wins_and_is_remembered(set_up, monkeypatch):
    monkeypatch.setenv("TORCH", "2.9.1")
    assert set_up._torch().words == ("torch==2.9.1",)
    set_up.STAMP.write_text('{"torch": "2.9.1"}')
    monkeypatch.delenv("TORCH")
    set_up._asked_torch.cache_clear()
    assert set_up._asked_torch() == "2.9.1"


def test_torch_may_be_any_words_for_pip(set_up, monkeypatch):
    monkeypatch.setenv("TORCH", "torch==2.14.0 --index-url https://example.org/simple")
    assert set_up._torch().words == ("torch==2.14.0", "--index-url", "https://example.org/simple")


def test_the_interpreters_own_torch_stays(set_up, monkeypatch):
    monkeypatch.setattr(set_up, "_own_torch", lambda arch: "2.10.0+rocm7.1")
    assert set_up._torch().words == ()
    assert "2.10.0+rocm7.1 stays" in set_up._torch().name


def test_another_gpu_python_or_pin_sets_up_again(set_up, monkeypatch):
    stamp = set_up._stamp()
    set_up.STAMP.write_text(set_up.json.dumps({**stamp, "extras": ["test"]}))
    monkeypatch.setattr(set_up, "PYTHON", Path(sys.executable))
    assert set_up._done(stamp) == ["test"]
    assert set_up._done({**stamp, "gpu": "gfx1031"}) is None
    set_up.STAMP.write_text("{")
    assert set_up._done(stamp) is None


def test_an_activated_venv_is_not_its_own_base(set_up, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(set_up, "VENV", tmp_path)
    monkeypatch.setattr(set_up.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(set_up.sys, "base_prefix", "/usr")
    monkeypatch.setattr(set_up.sys, "_base_executable", "/usr/bin/python3")
    monkeypatch.setattr(set_up.os, "execv", lambda path, words: started.append(path))
    set_up._outside_of_venv()
    assert started == ["/usr/bin/python3"]
    monkeypatch.setattr(set_up.sys, "prefix", "/opt/venv")
    set_up._outside_of_venv()
    assert len(started) == 1


def test_a_python_that_is_too_old_is_a_sentence(set_up, monkeypatch):
    monkeypatch.setattr(set_up.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(set_up, "shutil", SimpleNamespace(which=lambda name: None))
    with pytest.raises(set_up.SetUpError, match=r"needs Python 3.11 to 3.14, and this is 3.9.1"):
        set_up._suitable_python()


def test_a_long_install_shows_pips_newest_line(set_up, monkeypatch, tmp_path, capsys):
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho Collecting torch\nsleep 1.5\necho no space left\nexit 3\n")
    pip.chmod(0o755)
    monkeypatch.setattr(set_up, "PYTHON", pip)
    monkeypatch.setattr(set_up, "LOG", tmp_path / "log")
    line = set_up._line(lambda: "making it")
    line.moving = True
    with pytest.raises(set_up.SetUpError, match="no space left"), line:
        set_up._pip(["torch"], line)
    shown = capsys.readouterr().out
    assert shown.startswith("set-up     making it ") and "Collecting torch" in shown
    assert "Collecting torch" in (tmp_path / "log").read_text()
