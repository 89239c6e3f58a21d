"""Rewrites the README's tree from the first line of each source file: `python scripts/tree.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "bloomery"
MARK = "<!-- tree -->"
FOLDERS = {
    "": "shared by all layers, and the evaluation and generation that the command line calls",
    "cli": "layer 7: one file a verb",
    "bench": "layer 6: what a machine reaches with a recipe, measured",
    "launch": "layer 6: a run as a folder and as processes",
    "report": "layer 6: the page about a run",
    "export": "layer 6: models for other programs",
    "simulate": "layer 6: one step on tensors without memory, to read its peak",
    "train": "layer 5: the loop and what it holds",
    "parallel": "layer 4: what is put onto a plain model from outside",
    "plan": "layer 3: a recipe and a machine become a plan",
    "model": "layer 2: the decoder",
    "data": "layer 2: text to batches",
    "monitor": "layer 2: events and who reads them",
    "recipe": "layer 1: what a person writes",
    "hardware": "layer 1: what the machine is",
    "hub": "layer 0: models and data sets of the Hugging Face Hub",
}
TABLES = {
    "hardware/gpus.toml": "every GPU and processor that is known: memory, rates, kernels, each with its source",
    "hardware/symptoms.toml": "what people see when a machine does not train: how to know it, its cause, what mends it",
    "report/style.css": "how the report looks, in the light and in the dark",
}


def sentence(path: Path) -> str:
    """The first line of a file's docstring, or its line in `TABLES`."""
    name = path.relative_to(SOURCE).as_posix()
    if name in TABLES:
        return TABLES[name]
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0].rstrip(".")


def files(folder: str) -> list[Path]:
    """What lies directly in a folder and says something."""
    found = sorted(path for path in (SOURCE / folder).iterdir() if path.suffix in (".py", ".toml", ".css"))
    return [path for path in found if sentence(path)]


def tree() -> str:
    """One line for each folder and file; fails for a folder that `FOLDERS` does not know."""
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages <= set(FOLDERS), f"say in FOLDERS what is in {sorted(packages - set(FOLDERS))}"
    lines = []
    for folder, what in FOLDERS.items():
        title = f"src/bloomery/{folder}/".replace("//", "/")
        lines.append(f"{title:<28}{what}")
        lines += [f"  {path.name:<26}{sentence(path)}" for path in files(folder)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def with_tree(readme: str) -> str:
    """The README with a fresh tree between its two marks."""
    before, _, after = readme.split(MARK)
    return f"{before}{MARK}\n{tree()}{MARK}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(with_tree(page.read_text(encoding="utf-8")), encoding="utf-8")
