"""The wheel and the sdist: complete, installable from a file, and of use without PyTorch."""

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="a part of `make setup` for tests: the extra `test`")

ROOT = Path(__file__).parents[1]
CALIBRATION = "benchmarks/calibration/"


def built(source: Path, out: Path) -> Path:
    """The wheel, and beside it the sdist, of a source tree: by the backend alone, without the network."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("dist"))


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Recipes, tables, styles, templates, C++: whatever git has below src/bloomery, and the measurements of plans."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "src/bloomery", CALIBRATION]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    assert {Path(name).suffix for name in tracked} >= {".yaml", ".toml", ".css", ".html", ".jinja"}
    expected = {
        name.removeprefix("src/").replace(CALIBRATION, "bloomery/hardware/calibration/")
        for name in tracked
    }
    packaged = {name for name in names_in(wheel) if name.startswith("bloomery/")}
    assert sorted(expected - packaged) == []
    assert sorted(packaged - expected) == []


def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert not (source / "tests").exists()
    assert names_in(built(source, tmp_path / "dist")) == names_in(wheel)
    assert sdist.stat().st_size < 5 * 2**20


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment with the wheel and its dependencies, and neither PyTorch nor this checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-index", str(wheel)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for path in Path(pytest.__file__).parents[1].iterdir():
        if "bloomery" not in path.name and not path.name.startswith(("torch", "triton")):
            (dependencies / path.name).symlink_to(path)
    (site_packages,) = (folder / "venv/lib").glob("python3*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "venv/bin/bloomery"


def ran(installed: Path, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [installed, *words],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_wheel_plans_without_pytorch(installed: Path, tmp_path: Path) -> None:
    python = installed.parent / "python"
    where = "import bloomery, importlib.util as i; print(bloomery.__file__, i.find_spec('torch'))"
    place = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout
    assert place.startswith(str(installed.parents[1])) and place.endswith("None\n")

    plan = json.loads(ran(installed, tmp_path, "plan", "go-coder-125m", "--gpu", "4090", "--json"))
    assert plan["fits"] is True
    assert "--run-dir" in ran(installed, tmp_path, "demo", "--help")
    assert "qwen3.5-0.8b-lora" in ran(installed, tmp_path, "recipes", "list")
