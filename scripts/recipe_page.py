"""Write docs/reference/recipe.md and recipes/everything.yaml from the recipe's schema: `python scripts/recipe_page.py`.

Keys, types, defaults and meanings come from `bloomery.recipe.schema`. A test compares both files with what this writes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bloomery.recipe.load import json_schema

ROOT = Path(__file__).resolve().parents[1]
PAGE, EVERYTHING = ROOT / "docs/reference/recipe.md", ROOT / "src/bloomery/recipes/everything.yaml"
SHOWN = {  # examples that everything.yaml sets, as a recipe needs a model and data
    "preset",
    "path",
    "glob",
    "columns",
    "train",
    "tokens",
    "epochs",
    "tokens_per_second",
    "duration",
    "memory",
    "perplexity",
    "prompts",
}
LENGTHS = "2000 steps, 10B tokens, 3 epochs, 20% or 8h"
PAGE_HEAD = f"""# Recipe reference

Every section and key of a recipe. `bloomery recipes show everything` prints them as one recipe.
[Recipes](recipes.md) explains how they are read.
<!-- `python scripts/recipe_page.py` writes this page from the schema. -->

- A length or an interval is one of {LENGTHS} (20% is a share of the run; a bare number counts steps).
- A count takes a suffix: 16384, 1.5M, 10B. A size takes a unit: 12GiB, 500MB.
- `auto` is resolved once by `bloomery plan`, which prints the choice with its reason.
- A section with a `kind` accepts it alone: `adapter: lora`.
"""
HEAD = f"""# Every key that a recipe can have, with its default and its meaning. Copy what you need.
# A line that begins with "# key:" is unset by default, or belongs to another kind.
# Written by `python scripts/recipe_page.py` from the schema; docs/reference/recipe.md has the allowed values.
# Lengths: {LENGTHS} (20% is a share of the run).
"""


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part


def sections_of(schema: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that a value may be, one for each member of a union."""
    if "$ref" in part:
        found = resolved(schema, part)
        return [found] if "properties" in found else []
    members = (
        part.get("anyOf", [])
        + part.get("oneOf", [])
        + [part[key] for key in ("items",) if key in part]
    )
    return list(
        {id(one): one for member in members for one in sections_of(schema, member)}.values()
    )


def allowed(schema: dict[str, Any], part: dict[str, Any]) -> list[str]:
    """The values that a key takes, as text."""
    if "$ref" in part:
        return (
            ["a section"]
            if "properties" in resolved(schema, part)
            else allowed(schema, resolved(schema, part))
        )
    if members := part.get("anyOf", part.get("oneOf")):
        words = list(dict.fromkeys(word for member in members for word in allowed(schema, member)))
        return [word for word in words if word != "null"]
    if "enum" in part or "const" in part:
        return [f"`{value}`" for value in part.get("enum", [part.get("const")])]
    kind = part.get("type")
    if kind in ("integer", "number"):
        bounds = (
            ("exclusiveMinimum", ">"),
            ("minimum", ">="),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        limits = [
            f"{sign} {part[key]:g}"
            for key, sign in bounds
            if key in part and abs(part[key]) < 2**31
        ]
        return [" ".join([str(kind), *limits])]
    if kind == "array":
        if "prefixItems" in part:
            return ["list of 2 numbers"]
        return ["list of " + " or ".join(allowed(schema, part.get("items", {})))]
    return {
        "string": ["text"],
        "boolean": ["`true`", "`false`"],
        "object": ["keys with values"],
    }.get(str(kind), [])


def value(found: Any) -> str:
    """As YAML in one line; most JSON is."""
    if isinstance(found, str):
        plain = (
            found
            and not set(found) & set("*#:[]{},\"'&!<>")
            and found.lower() not in ("true", "false", "null")
        )
        return found if plain else json.dumps(found)
    if isinstance(found, list):
        return f"[{', '.join(map(value, found))}]"
    if isinstance(found, dict):
        return f"{{{', '.join(f'{key}: {value(one)}' for key, one in found.items())}}}"
    return json.dumps(found) if found is None or isinstance(found, bool) else f"{found:.12g}"


def tables(
    schema: dict[str, Any], path: tuple[str, ...], section: dict[str, Any], about: str
) -> Iterator[str]:
    """The table of a section and those of the sections in it."""
    kinds = allowed(schema, section["properties"].get("kind", {}))
    of = f" ({', '.join(kinds)})" if kinds and path[0] in ("objective", "adapter") else ""
    if path:
        yield f"## {'.'.join(path)}{of}\n\n{about}\n"
    yield "| key | allowed | default | meaning |\n|---|---|---|---|"
    inner = []
    for key, part in section["properties"].items():
        default = f"`{value(part['default'])}`" if part.get("default") not in (None, [], {}) else ""
        found = sections_of(schema, part)
        if found and isinstance(part.get("default"), dict):
            default = ""
        words = ", ".join(allowed(schema, part)).replace("|", "\\|")
        yield f"| `{key}` | {words} | {default} | {part.get('description', '')} |"
        inner += [((*path, key), one, part.get("description", "")) for one in found]
    yield ""
    for place, one, words in inner:
        yield from tables(schema, place, one, words)


def page() -> str:
    schema = json_schema()
    body = "\n".join(tables(schema, ("recipe",), schema, "The sections.")).replace(
        "## recipe.", "## "
    )
    return PAGE_HEAD + "\n" + body.replace("\n\n\n", "\n\n").rstrip() + "\n"


HIDDEN = ("rope_scaling", "delta_net", "experts")  # sections that are off by default


def entries(
    schema: dict[str, Any], section: dict[str, Any], indent: str, off: str | None
) -> Iterator[tuple[str, str]]:
    """(line, comment) for each key; `off`: the indentation at which all lines are commented out."""

    def line(text: str, hidden: bool) -> str:
        at = off if off is not None else indent if hidden else None
        return indent + text if at is None else f"{at}# {indent[len(at) :]}{text}"

    for key, part in section["properties"].items():
        examples, default, found = (
            part.get("examples", []),
            part.get("default"),
            sections_of(schema, part),
        )
        words, about = allowed(schema, part), part.get("description", "")
        chosen = [
            word.strip("`")
            for word in words
            if word.startswith("`") and word not in ("`true`", "`false`")
        ]
        about += f" One of {', '.join(chosen)}." if len(chosen) > 1 else ""
        if found and (isinstance(default, dict) or key in ("model", "data", "train", *HIDDEN)):
            first = [
                one
                for one in found
                if not isinstance(default, dict) or takes(one, default.get("kind"))
            ][:1]
            hidden = off if off is not None else indent if key in HIDDEN else None
            yield line(f"{key}:", hidden is not None), part.get("description", "")
            for one in [*first, *(other for other in found if other not in first)]:
                inner = hidden if hidden is not None else None if one in first else indent + "  "
                yield from entries(schema, one, indent + "  ", inner)
            continue
        if default in (None, [], {}) and key == "kind":
            default = part.get("const", part.get("enum", [None])[0])
        if examples and (default in (None, [], {}) or key in SHOWN):
            yield line(f"{key}: {value(examples[0])}", key not in SHOWN), about
            continue
        yield line(f"{key}: {value(default)}", default is None), about
        for example in examples:
            yield line(f"{key}: {value(example)}", True), ""


def takes(section: dict[str, Any], kind: str | None) -> bool:
    stated = section["properties"].get("kind", {})
    return kind is None or kind in stated.get("enum", [stated.get("const")])


def everything() -> str:
    schema, lines = json_schema(), []
    for line, comment in entries(schema, schema, "", None):
        if not line.startswith((" ", "#")) and lines[-1:] != [""]:
            lines.append("")
        lines.append(f"{line:<39} # {comment}" if comment else line)
    return HEAD + "\n" + "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    EVERYTHING.write_text(everything(), encoding="utf-8")
