"""The fix of a missing extra is a command that works here: Bloomery is not on PyPI."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from bloomery.core import extras
from bloomery.core.extras import extra_packages, install_extra, install_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVELOPMENT = {"test", "check", "docs"}
EXTRAS = sorted(PROJECT["optional-dependencies"].keys() - DEVELOPMENT)


def missing(name):
    raise extras.PackageNotFoundError(name)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_its_packages(extra, monkeypatch):
    expected = sorted(re.sub(r"\s", "", each) for each in PROJECT["optional-dependencies"][extra])
    assert sorted(extra_packages(extra)) == expected
    # A source tree that was never installed.
    monkeypatch.setattr(extras, "requires", missing)
    assert sorted(extra_packages(extra)) == expected


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_names_no_package_of_pypi_that_is_not_ours(extra):
    command = install_extra(extra)
    assert "bloomery[" not in command and "install" in command.split()


def test_the_command_begins_with_the_pip_of_this_python(tmp_path, monkeypatch):
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: name)
    folder = Path(sys.executable).parent
    monkeypatch.setattr(extras.shutil, "which", lambda _: str(folder / "pip"))
    assert install_packages("a>=1") == "pip install 'a>=1'"
    monkeypatch.setattr(extras.shutil, "which", lambda _: "/usr/bin/pip")
    monkeypatch.chdir(tmp_path)
    assert install_packages("a") == f"{sys.executable} -m pip install a"
    monkeypatch.chdir(folder.parent)
    assert install_packages("a") == f"{folder.name}/{Path(sys.executable).name} -m pip install a"
    # An environment of uv has no pip.
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(extras.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert install_packages("a").startswith("uv pip install --python ")


def test_the_set_up_installs_what_the_readme_begins_with():
    """`bloomery studio`, and the GGUF file that the demo ends with."""
    script = (ROOT / "scripts/setup.py").read_text()
    (installed,) = re.findall(r"join\(\[(.*?), \*extras\]\)", script)
    assert {"'studio'", "'gguf'"} <= {each.strip() for each in installed.split(",")}


def test_no_page_installs_bloomery_from_pypi():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    pages = [page for page in pages if page.parent.name != "decisions"]
    lines = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install.*bloomery(\[|$)", line)
    ]
    assert lines == []
