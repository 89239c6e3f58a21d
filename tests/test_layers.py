"""What works before PyTorch is installed imports none of it. (The order of layers is import-linter's to check.)"""

import json
import subprocess
import sys
from pathlib import Path

import bloomery

ROOT = Path(bloomery.__file__).parent
WITHOUT_TORCH = [
    "core",
    "recipe",
    "hardware",
    "plan",
    "cli",
    "api.py",
    "facts",
    "data/sources",
    "data/tokenizer/tokenizer.py",
    "data/prepare",
    "data/shards.py",
    "data/packing.py",
    "monitor",
]


def modules():
    for name in WITHOUT_TORCH:
        place = ROOT / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place] * place.exists():
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_layers_below_and_above_the_model_need_no_torch():
    script = (
        "import importlib, json, sys\nfound = []\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        found.append(name)\n"
        "        [sys.modules.pop(m) for m in list(sys.modules) if m.partition('.')[0] == 'torch']\n"
        "        break\n"
        "print(json.dumps(found))"
    )
    words = [sys.executable, "-c", script, json.dumps(list(modules()))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_commands_that_use_a_model_import_neither_the_compiler_nor_shards():
    """Each takes one to two seconds of a core: half of what such a command takes until it begins."""
    slow = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"]
    script = (
        "import json, sys\n"
        "import bloomery.infer.generate, bloomery.serve.app, bloomery.export.layouts\n"
        f"print(json.dumps([name for name in {slow} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
