"""The Python files of rewards, read before a run without being run: a missing function is found at once."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from bloomery.core.errors import UserError
from bloomery.core.files import read_input
from bloomery.core.plugins import find_plugin, plugin_names
from bloomery.recipe.rewards import AnyReward, PluginReward, PythonReward, reward_name
from bloomery.recipe.schema import Recipe

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MOST = 2**24  # bytes of a file of Python


def refuse_missing_reward_files(rewards: Iterable[AnyReward]) -> None:
    """As `refuse_missing_function`, for the files of Python among them."""
    for reward in rewards:
        if isinstance(reward, PythonReward):
            refuse_missing_function(reward)


def refuse_missing_function(reward: PythonReward) -> None:
    """As `refuse_missing_name`, for the function of a reward."""
    refuse_missing_name(reward.python, what=f"the reward {reward_name(reward)}", kind="function")


def refuse_missing_name(place: str, *, what: str, kind: Literal["function", "class"]) -> None:
    """Raises UserError for a file that is no Python, and for one without the name. `place`: FILE:NAME.

    A file that is not here is none of this plan's business: the run reports it. Nor is one that makes its names when it
    runs.
    """
    file, _, function = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        return
    try:
        tree = ast.parse(read_input(path, _MOST))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        problem = f"the file of {what} cannot be loaded: {type(error).__name__}: {message}{line}"
        raise UserError(problem, where=file, fix=f"correct {path}", code=2) from error
    names = set(_names(tree.body))
    if function in names or "*" in names:
        return
    kinds = ast.ClassDef if kind == "class" else Definition
    found = [node.name for node in tree.body if isinstance(node, kinds)]
    raise UserError(
        f"{what} has no {kind} {function} in {path}",
        where=file,
        fix=f"its {'classes' if kind == 'class' else 'functions'} are: {', '.join(found) or 'none'}",
        code=2,
    )


def refuse_missing_plugin(reward: PluginReward) -> None:
    """Raises UserError for a reward that no installed package brings."""
    if find_plugin("rewards", reward.plugin) is not None:
        return
    names = plugin_names("rewards")
    fix = f"the installed ones are: {', '.join(names)}" if names else "install the package with pip"
    raise UserError(
        f"no installed package brings the reward {reward.plugin}",
        where="rewards",
        fix=fix,
        code=2,
    )


def refuse_missing_files(recipe: Recipe) -> None:
    """Raises UserError for a file of a reward, a tool or an environment that is not here."""
    places = {
        reward.python: f"the reward {reward_name(reward)}"
        for reward in recipe.rewards
        if isinstance(reward, PythonReward)
    }
    places |= {tool.python: f"the tool {tool.python.rpartition(':')[2]}" for tool in recipe.tools}
    if recipe.environment.python is not None:
        places[recipe.environment.python] = "the environment"
    for place, what in places.items():
        path = Path(place.rpartition(":")[0])
        if not path.is_file():
            raise UserError(
                f"{what} has no file {path}",
                where=str(path),
                fix="write its path relative to the recipe",
                code=2,
            )


def _names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that these statements of a module may set; "*" where they cannot be told."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
                continue
        for node in ast.iter_child_nodes(statement):
            if isinstance(node, ast.stmt):
                yield from _names([node])
            elif isinstance(node, ast.ExceptHandler | ast.match_case):
                yield from _names(node.body)
            else:
                yield from _names_of_expression(node)


def _names_of_expression(expression: ast.AST) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "vars", "setattr"):
            yield "*"
