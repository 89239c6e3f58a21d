"""Write docs/reference/python-api.md from the signatures and docstrings: `python scripts/reference_pages.py`.

The source is read and not imported: signatures are those that are written there, with the names of types. What comes
out is plain Markdown, which a code host shows, too.
"""

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reference/python-api.md"
API = "bloomery.api"
FUNCTIONS = (
    *("plan", "train", "load", "generate"),
    *("evaluate", "evaluate_task", "evaluate_environment", "evaluate_harness", "compare"),
    *("export", "convert", "merge"),
)
CLASSES = (
    "bloomery.api.Run",
    "bloomery.infer.generate.Model",
    "bloomery.plan.types.PlanReport",
    "bloomery.evals.evaluate.TextScores",
    "bloomery.evals.picture_scores.PictureScores",
    "bloomery.evals.rewards.RewardScores",
    "bloomery.train.evaluation.scoring.PairMetrics",
    "bloomery.evals.tasks.TaskReport",
    "bloomery.export.layouts.Exported",
    "bloomery.report.charts.Plot",
    "bloomery.studio.notebook.StudioFrame",
    "bloomery.core.errors.UserError",
)
WIDTH = 88  # of a signature in one line
HEAD = """# Python API

Call the same functions as the command line, in a script or a notebook:

```python
import bloomery

print(bloomery.plan("demo").plan.fits)
run = bloomery.train("demo", run_dir="runs/first")
print(run.model().generate("def main():", max_new_tokens=50))
```

`import bloomery` does not import PyTorch. [Exit codes](exit-codes.md) do not apply: errors are raised as
[`UserError`](#usererror).
"""
Def = ast.FunctionDef | ast.ClassDef


def page() -> str:
    api = parsed(API)
    parts = [HEAD, generated_note(), cleandoc(ast.get_docstring(api) or "").partition("\n\n")[2]]
    functions = {name: found(api, name) for name in FUNCTIONS}
    parts.append("| function | effect |\n|---|---|")
    parts[-1] += "".join(
        f"\n| [`{name}`](#{name}) | {first_sentence(function)} |"
        for name, function in functions.items()
    )
    parts.append("Signatures use these names:\n\n```python\n" + "\n".join(aliases(api)) + "\n```")
    parts.append("## Functions")
    for name, function in functions.items():
        assert isinstance(function, ast.FunctionDef)
        parts += [f"### {name}", *described(function, f"bloomery.{name}")]
    parts.append("## Types that they return or raise")
    for full_name in CLASSES:
        module, _, name = full_name.rpartition(".")
        parts += list(class_parts(found(parsed(module), name)))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def generated_note() -> str:
    return "<!-- `python scripts/reference_pages.py` writes this page from the code. -->"


def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def found(tree: ast.Module, name: str) -> Def:
    return next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    )


def aliases(tree: ast.Module) -> Iterator[str]:
    """The types that have a name of their own in the module: `Recipe = str | Path | Mapping[str, Any]`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0])[0].isupper():
            yield ast.unparse(node).replace("'", '"')


def class_parts(cls: Def) -> Iterator[str]:
    """Its docstring, its fields, and its methods."""
    yield f"### {cls.name}"
    yield markdown(ast.get_docstring(cls) or "")
    fields = [
        ast.unparse(node)
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node).startswith("_")
    ]
    if fields:
        yield "```python\n" + "\n".join(line.replace("'", '"') for line in fields) + "\n```"
    for node in cls.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name == "__init__" and cls.name.endswith("Error"):
            yield from described(node, cls.name, hides_self=True)
        elif not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if "cached_property" in decorators or "property" in decorators:
                yield f"```python\n.{node.name}: {returned(node)}\n```"
            elif "staticmethod" not in decorators:  # `bloomery.load` makes a model
                yield from described(node, f".{node.name}", hides_self=True)


def described(function: ast.FunctionDef, shown: str, *, hides_self: bool = False) -> Iterator[str]:
    yield f"```python\n{signature(function, shown, hides_self=hides_self)}\n```"
    docstring = ast.get_docstring(function)
    if docstring:
        yield markdown(docstring)


def returned(function: ast.FunctionDef) -> str:
    return "" if function.returns is None else ast.unparse(function.returns).strip("'\"")


def signature(function: ast.FunctionDef, shown: str, *, hides_self: bool) -> str:
    """As it is written, in one line or with a parameter a line."""
    arguments = function.args
    parameters = [
        _parameter(argument, default)
        for argument, default in zip(
            arguments.args,
            [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults),
            strict=True,
        )
    ][int(hides_self) :]
    if arguments.vararg is not None:
        parameters.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parameters.append("*")
    parameters += [
        _parameter(argument, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append("**" + _parameter(arguments.kwarg, None))
    result = returned(function)
    end = f") -> {result}" if result and result != "None" else ")"
    line = f"{shown}({', '.join(parameters)}{end}"
    if len(line) <= WIDTH:
        return line
    return f"{shown}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + end


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    if default is not None:
        text += f" = {ast.unparse(default)}"
    return text.replace("'", '"')


def markdown(docstring: str) -> str:
    """A docstring as it is, with its indented examples as blocks of Python."""
    return re.sub(
        r"(?:^    .*\n?)+",
        lambda block: "```python\n" + cleandoc(block[0]) + "\n```\n",
        docstring,
        flags=re.MULTILINE,
    )


def first_sentence(function: Def) -> str:
    """The first sentence of a docstring, or its part before the list that follows a colon."""
    text = " ".join((ast.get_docstring(function) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[^.]{2})\.(?= |$)|: |; ", text)[0]
