"""The command that installs packages into this environment, such as those of an extra of Bloomery.

Bloomery is not on PyPI: the packages of an extra are named themselves, so that the command works in a git checkout, for
a wheel and in any folder.
"""

import importlib.util
import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

NAME = "bloomery"


def install_extra(extra: str) -> str:
    """Such as `pip install 'nicegui>=3.18'`."""
    return install_packages(*extra_packages(extra))


def install_packages(*packages: str) -> str:
    """With the pip of this Python, by its path where `pip` is another one; with uv where the environment has no pip."""
    python = Path(sys.executable)
    pip = shutil.which("pip")
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is not None:
        command = ["uv", "pip", "install", "--python", _short(python)]
    elif pip is not None and Path(pip).parent == python.parent:
        command = ["pip", "install"]
    else:
        command = [_short(python), "-m", "pip", "install"]
    return shlex.join([*command, *packages])


def extra_packages(extra: str) -> list[str]:
    """The requirements of an extra, as installed; of a source tree without metadata, those of its pyproject.toml."""
    try:
        requirements = requires(NAME) or []
    except PackageNotFoundError:
        requirements = []
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    packages = [
        requirement.partition(";")[0].strip()
        for requirement in requirements
        if marker.search(requirement.partition(";")[2])
    ]
    return packages or _of_source_tree(extra)


def _of_source_tree(extra: str) -> list[str]:
    import tomllib

    project_file = Path(__file__).resolve().parents[3] / "pyproject.toml"
    try:
        project = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
        return list(project["optional-dependencies"][extra])
    except (OSError, ValueError, KeyError):
        return [f"{NAME}[{extra}]"]


def _short(path: Path) -> str:
    """Relative to the working folder where the path is in it."""
    folder = Path.cwd()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
