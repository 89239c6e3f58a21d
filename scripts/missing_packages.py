"""Names the packages that Bloomery needs and this Python lacks: `python3 scripts/missing_packages.py`.

Exit code 2 where one is missing. For a clone that is not installed. Standard library only.
"""

import importlib.util
import sys

MODULES = {  # as they are imported: what pip calls them
    "click": "click",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "pynvml": "nvidia-ml-py",
    "pydantic": "pydantic",
    "rich": "rich",
    "ruamel.yaml": "ruamel.yaml",
    "safetensors": "safetensors",
    "starlette": "starlette",
    "tokenizers": "tokenizers",
    "uvicorn": "uvicorn",
}


def missing_packages() -> list[str]:
    """Names of pip, torch first."""
    packages = [] if importlib.util.find_spec("torch") else ["torch"]
    for module, package in MODULES.items():
        try:
            is_here = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the parent of a dotted name
            is_here = False
        if not is_here:
            packages.append(package)
    return packages


def main() -> int:
    """PyTorch has many builds, and which one fits is not for pip to choose."""
    packages = missing_packages()
    if not packages:
        return 0
    print(f"missing: {', '.join(packages)}", file=sys.stderr)
    if "torch" in packages:
        hint = "PyTorch first: https://pytorch.org/get-started names the build for this GPU"
        print(hint, file=sys.stderr)
    others = [package for package in packages if package != "torch"]
    if others:
        print(f"{sys.executable} -m pip install {' '.join(others)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
