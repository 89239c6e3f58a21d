"""Functions and methods of the user's that a model calls: what a template tells of them, and how they are called.

Does not import torch.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from bloomery.train.rl.rewards_worker import Unusable, error_text

Json = dict[str, Any]
MOST_CHARACTERS = 20_000  # of a result: more would fill a sequence with it
NOT_TOOLS = (
    "reset",
    "get_reward",
)  # methods of an environment that its model does not call, as in TRL
_ARGUMENTS = re.compile(
    r"^[ \t]*(?:Args|Arguments|Parameters):[ \t]*\n(.*?)(?=^[ \t]*[A-Z]\w*:[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_ARGUMENT = re.compile(r"^[ \t]*(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(.*)$", re.MULTILINE)


def schema_of(name: str, function: Callable[..., Any]) -> Json:
    """What chat templates tell of a function: its name, its docstring and the types of its arguments. Raises Unusable.

    `name`: in errors. Docstrings as Google writes them: a section `Args:` with a line for each argument.
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise Unusable(
                f"the tool {name} takes {parameter}, which no schema can tell",
                "name each of its arguments",
            )
        if parameter.annotation is parameter.empty:
            raise Unusable(
                f"the tool {name} does not say the type of its argument {parameter.name}",
                f"write it: def {function.__name__}({parameter.name}: int)",
            )
    documentation = inspect.getdoc(function) or ""
    if not documentation.strip():
        raise Unusable(
            f"the tool {name} has no docstring, which tells the model what it does",
            "write what it does in its first line, and its arguments in a section `Args:`",
        )
    try:
        parameters = without_titles(TypeAdapter(cast(Any, function)).json_schema())
    except (PydanticUserError, NameError, TypeError) as error:
        problem = f"the types of the tool {name} have no schema: {error_text(error)}"
        raise Unusable(problem, "use str, int, float, bool, list, dict, Literal or None") from error
    section = _ARGUMENTS.search(documentation)
    texts = dict(_described(section[1])) if section else {}
    for argument, of_argument in parameters.get("properties", {}).items():
        if argument in texts:
            of_argument["description"] = texts[argument]
    parameters.pop("additionalProperties", None)
    description = re.split(
        r"^[ \t]*[A-Z]\w*:[ \t]*$", documentation, maxsplit=1, flags=re.MULTILINE
    )
    function_json = {
        "name": function.__name__,
        "description": description[0].strip(),
        "parameters": parameters,
    }
    return {"type": "function", "function": function_json}


def _described(section: str) -> list[tuple[str, str]]:
    """Arguments and their texts, of which further lines may follow the first."""
    found = list(_ARGUMENT.finditer(section))
    ends = [match.start() for match in found[1:]] + [len(section)]
    return [
        (match[1], " ".join(section[match.start(2) : end].split()))
        for match, end in zip(found, ends, strict=True)
    ]


def without_titles(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: without_titles(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    return [without_titles(value) for value in schema] if isinstance(schema, list) else schema


def methods_of(environment: object) -> dict[str, Callable[..., Any]]:
    """The tools of an environment in TRL's form: its public methods, but for `reset` and `get_reward`."""
    return {
        name: method
        for name, method in inspect.getmembers(environment, inspect.ismethod)
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def called(tools: Mapping[str, Callable[..., Any]], name: str, arguments: str) -> tuple[str, bool]:
    """The result of a call as text, and whether it failed: then the text is what the model is told of the error."""
    function = tools.get(name)
    if function is None:
        return failure(f"there is no tool {name[:100]!r}; there are: {', '.join(tools)}"), True
    try:
        values = json.loads(arguments)
        if not isinstance(values, dict):
            raise ValueError("arguments are an object")
    except (ValueError, RecursionError) as error:
        return failure(f"the arguments are no JSON: {str(error)[:200]}"), True
    try:
        result = validate_call(function)(**values)
        text = result if isinstance(result, str) else str(result)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return failure(f"{where}: {first['msg']}"), True
    except Exception as error:  # the model is told: it may call it another way
        return failure(f"{type(error).__name__}: {_shown(error)}"), True
    return shortened(text), False


def failure(problem: str) -> str:
    """As TRL tells a model of an error."""
    return json.dumps({"error": problem}, ensure_ascii=False)


def shortened(text: str) -> str:
    """At most MOST_CHARACTERS, and how many there were."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}... (cut: {len(text):,} characters)"


def _shown(error: Exception) -> str:
    try:
        return str(error)[:500]
    except Exception:  # a __str__ of the user's own
        return "its text cannot be read"
