"""Runs the steps of a Dockerfile without a container engine: `python scripts/dockerfile_steps.py FILE FOLDER`, as root.

FOLDER is a system that stands in for the image's base, such as Debian with its own Python instead of python:3.12:

    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm FOLDER

RUN lines run in it by chroot, as the user of the last USER, with the file's ENV; COPY copies what git tracks, and CMD
ends it. The addresses and certificates of this machine's package registries (PIP_*, *_proxy, /etc/pip.conf, /etc/apt)
are those inside. What it cannot show: layers, the base itself, and what a registry of images adds.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED_FILES = (
    "/etc/resolv.conf",
    "/etc/pip.conf",
    "/etc/apt/apt.conf.d",
    "/etc/ssl/certs/ca-certificates.crt",
)
SHARED_VARIABLES = re.compile(r"PIP_\w+|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|(?:https?|no)_proxy", re.I)
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments. Comments are left out, also those between two lines."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name.upper(), arguments.strip()


class Image:
    """A folder in the state after some instructions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {"PATH": BASE_PATH, "HOME": "/root"}
        self.arguments = dict[str, str]()
        self.working_folder = "/"
        self.user = "0:0"

    def apply(self, name: str, arguments: str) -> None:
        """Raises ValueError for an instruction that no file here has."""
        match name:
            case "FROM":
                print("base: stand-in for", arguments)
            case "RUN":
                self.run(arguments)
            case "CMD":
                self.run(shlex.join(json.loads(arguments)), may_fail=True)
            case "WORKDIR":
                self.working_folder = arguments
                self._inside(arguments).mkdir(parents=True, exist_ok=True)
            case "COPY" if arguments == ". .":
                self._copy_checkout()
            case "ARG":
                variable, _, default = arguments.partition("=")
                self.arguments[variable] = " ".join(shlex.split(default))
            case "ENV":
                for word in shlex.split(arguments):
                    variable, _, value = word.partition("=")
                    self.variables[variable] = value.replace("$PATH", self.variables["PATH"])
            case "USER":
                self.user = arguments
            case _:
                raise ValueError(f"no rule for {name} {arguments}")

    def run(self, command: str, *, may_fail: bool = False) -> None:
        """Raises CalledProcessError where it fails, unless it `may_fail`."""
        print(f"{self.user} {self.working_folder} $ {command}", flush=True)
        shared = {name: os.environ[name] for name in os.environ if SHARED_VARIABLES.fullmatch(name)}
        inner = f"cd {shlex.quote(self.working_folder)} && {command}"
        root = shlex.quote(str(self.folder))
        # A view of processes and devices that ends with the command.
        outer = (
            f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && "
            f"exec chroot --userspec={self.user} {root} /bin/sh -c {shlex.quote(inner)}"
        )
        code = subprocess.run(
            ["unshare", "--mount", "sh", "-c", outer],
            env={**shared, **self.arguments, **self.variables},
            check=not may_fail,
        ).returncode
        print(f"exit code {code}")

    def share_registries(self) -> None:
        for name in SHARED_FILES:
            source, target = Path(name), self._inside(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.exists():
                shutil.copyfile(source, target)

    def _copy_checkout(self) -> None:
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        for name in filter(None, names):
            target = self._inside(self.working_folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    def _inside(self, path: str) -> Path:
        return self.folder / path.lstrip("/")


def main(dockerfile: Path, folder: Path) -> None:
    image = Image(folder.resolve())
    image.share_registries()
    for name, arguments in instructions(dockerfile.read_text(encoding="utf-8")):
        image.apply(name, arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
