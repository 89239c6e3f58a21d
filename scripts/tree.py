"""Write docs/contributing/code-map.md from the first line of each source file: `python scripts/tree.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "bloomery"
PAGE = ROOT / "docs" / "contributing" / "code-map.md"
HEAD = """# Code map

A line for each file of `src/bloomery`, from top to bottom: a package imports only those below it, which
`make check` enforces. `python scripts/tree.py` writes this page.
"""
PACKAGES = {
    "cli": "the command line: one file for a command or a topic",
    "": "what `import bloomery` offers",
    "studio": "a page in the browser that shows runs and starts commands",
    "serve": "an OpenAI-compatible server",
    "sweep": "runs of one recipe with different settings, and their ranking",
    "evals": "models judged: held-out text, tasks, rewards",
    "runs": "a run as a folder, from its start to its end",
    "launch": "the processes of a run: ranks, their messages, job scripts",
    "bench": "what a machine reaches with a recipe, measured",
    "report": "the page about a run or a model",
    "export": "models for other programs",
    "simulate": "one step on tensors without memory, to read its peak",
    "check": "does this device compute right",
    "train": "the loop and what it holds",
    "view": "a run as it is seen: read once, for terminals, studio and the report",
    "infer": "a model that answers: loaded, decoded, sampled",
    "parallel": "what is put onto a plain model from outside",
    "plan": "a recipe and a machine become a plan",
    "model": "the decoder and what is changed about it",
    "data": "text to batches",
    "monitor": "events and who reads them",
    "recipe": "what you write: sections, defaults, errors",
    "hardware": "what the machine is and what it can do",
    "facts": "what is known of models and methods, without torch",
    "core": "errors, units, files, child processes",
}
TABLES = {
    "core/tokens.css": "the look, once: colors in the light and in the dark, type, space; every page reads it",
    "facts/published.toml": "shapes of well-known models, each with its source, for plans before a download",
    "hardware/gpus.toml": "every GPU and CPU that is known: memory, rates, kernels, each with its source",
    "hardware/sites.toml": "clusters with Slurm: queues, GPUs of a node, modules, options of a job script",
    "hardware/wheels.toml": "PyTorch builds by index and GPU, releases of ROCm and of its driver",
    "hardware/doctor/symptoms.toml": "log lines of a machine that does not train: how to recognize them, cause, fix",
    "cli/other_options.toml": "options of other programs and other commands, and what to type instead",
    "recipe/aliases.toml": "keys and values of other programs and of version 1, and what to write instead",
    "report/templates/style.css": "how the report looks, in the light and in the dark",
    "report/templates/image.css": "the same for a chart as an SVG file, in a notebook or a page",
    "studio/studio.js": "what studio's pages do in the browser: charts, colors, the clipboard, the keyboard's focus",
    "studio/style.css": "how studio's pages look: reset, utility classes by Tailwind's names, components",
}


def sentence(path: Path) -> str:
    """The first line of a file's docstring, or its line in `TABLES`."""
    name = path.relative_to(SOURCE).as_posix()
    if name in TABLES:
        return TABLES[name]
    return (
        (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        .split("\n")[0]
        .rstrip(".")
    )


def page() -> str:
    """Fails for a package that `PACKAGES` lacks."""
    known = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert known <= set(PACKAGES), f"describe in PACKAGES: {sorted(known - set(PACKAGES))}"
    lines = [HEAD]
    for package, what in PACKAGES.items():
        lines += [
            f"## {package or 'bloomery'}\n\n{what[0].upper()}{what[1:]}.\n",
            "| file | what it is |\n|---|---|",
        ]
        found = (SOURCE / package).rglob("*") if package else SOURCE.glob("*")
        for path in sorted(found, key=lambda path: (path.parent != SOURCE / package, path)):
            if path.suffix in (".py", ".toml", ".css", ".js") and (said := sentence(path)):
                name = path.relative_to(SOURCE).as_posix()
                lines.append(
                    f"| [{name}](../../src/bloomery/{name}) | {said.replace('|', chr(92) + '|')} |"
                )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
