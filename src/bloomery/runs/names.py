"""Find the run, model or device that a command-line argument names. No torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.errors import UserError
from bloomery.core.text import closest, expanded

if TYPE_CHECKING:
    from bloomery.train.use import Use


def is_run(folder: Path) -> bool:
    """A run folder has its recipe from the start."""
    return (folder / "recipe.yaml").is_file()


def all_runs(root: Path | None = None) -> list[Path]:
    """The run folders in `root` (default `runs/`), newest last."""
    root = Path("runs") if root is None else root
    found = [folder for folder in root.iterdir() if is_run(folder)] if root.is_dir() else []
    return sorted(found, key=lambda folder: ((folder / "recipe.yaml").stat().st_mtime, folder.name))


def find_run(name: str) -> Path:
    """The run folder: a path, a name under `runs/`, a unique prefix of one, or `last`. Raises UserError (code 2)."""
    runs = all_runs()
    if name == "last" and runs:
        return runs[-1]
    for folder in (expanded(name), Path("runs") / name) if name else ():
        if is_run(folder):
            return folder
    where = str(Path("runs").resolve())
    begun = name.removeprefix("runs/").rstrip("/")
    alike = [folder for folder in runs if begun and folder.name.startswith(begun)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        fix = "use one of " + ", ".join(folder.name for folder in alike[-8:])
        raise UserError(f"{len(alike)} runs start with {name!r}", where=where, fix=fix, code=2)
    if not runs:
        fix = "start one with `bloomery demo` or `bloomery train RECIPE`, or cd to the folder with runs/"
        raise UserError(f"no run {name!r}: there are no runs", where=where, fix=fix, code=2)
    names = [folder.name for folder in runs]
    near = closest(name, ["last", *names], count=3, cutoff=0.4) or names[-3:]
    raise UserError(f"no run {name!r}", where=where, fix="similar names: " + ", ".join(near), code=2)


def model_path(name: str) -> Path:
    """The folder of MODEL: a model, an adapter or a run; downloads a Hub id. Raises UserError.

    BASE+ADAPTER stays one path; `train.model_folder.find_model` splits it.
    """
    folder = expanded(name)
    if name and any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return folder
    if "+" in name and not folder.exists() and not (Path("runs") / name).exists():
        base, _, adapter = name.partition("+")
        return Path(f"{model_path(base)}+{model_path(adapter)}")
    known = is_run(Path("runs") / name) or name == "last"
    if not folder.exists() and not known and name:
        from bloomery.hub import fetch_model, is_hub_id

        if is_hub_id(name):
            return fetch_model(name)
    return folder if name and folder.is_dir() and not known else find_run(name)


def chosen_use(devices: str = "auto", quantize: str | None = None) -> "Use":
    """The device and quantization of a model. Sets environment variables, so torch must not be imported yet.

    Raises UserError for a device that does not exist or that this PyTorch cannot use.
    """
    from bloomery.hardware.detect import detect
    from bloomery.hardware.profile import apply_environment, build_profile
    from bloomery.runs.devices import narrowed

    machine = narrowed(detect(), devices)
    profile = build_profile(machine)
    apply_environment(machine)
    from bloomery.train.use import Use

    return Use.of(profile, quantize, machine=machine, asked=devices)
