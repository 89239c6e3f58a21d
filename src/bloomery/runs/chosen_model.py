"""The model that a command names, and the device that it is used on. No torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.core.run_folder import find_run, is_run
from bloomery.core.text import expanded

if TYPE_CHECKING:
    from bloomery.infer.load import Use


def model_path(name: str) -> Path:
    """The folder of MODEL: a model, an adapter or a run; downloads a Hub id. Raises UserError.

    BASE+ADAPTER stays one path; `infer.model_folder.find_model` splits it.
    """
    folder = expanded(name)
    if name and any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return folder
    if "+" in name and not folder.exists() and not (Path("runs") / name).exists():
        base, _, adapter = name.partition("+")
        return Path(f"{model_path(base)}+{model_path(adapter)}")
    is_known_run = is_run(Path("runs") / name) or name == "last"
    if not folder.exists() and not is_known_run and name:
        from bloomery.hub import fetch_model, is_hub_id

        if is_hub_id(name):
            return fetch_model(name)
    return folder if name and folder.is_dir() and not is_known_run else find_run(name)


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
    from bloomery.infer.load import Use

    return Use.of(profile, quantize, machine=machine, requested_device=devices)
