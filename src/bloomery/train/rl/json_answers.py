"""Whether a text is JSON that follows a schema, by the grammars that `serve` holds its answers to. No torch.

A grammar fixes what JSON leaves free: white space, the order of an object's keys, how a number is written. So the value
of a text is written again as the grammar writes it, and that is compared.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from bloomery.infer.grammar_trials import GrammarTrials

Schema = Mapping[str, Any]
FORM: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
MOST_ORDERS = 8  # of the keys of an object to which several schemas apply
MOST_DIGITS = 400  # of a number that is written without an exponent


def follow_schema(trials: GrammarTrials, schema: Schema, texts: Sequence[str]) -> tuple[bool, ...]:
    """Of each text. Raises UserError for a schema that is not valid, not supported or too complex."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=FORM)
    forms = [canonical_forms(text, schema) for text in texts]
    accepted = iter(trials.accepted(grammar, [form for of_text in forms for form in of_text]))
    return tuple(sum(next(accepted) for _ in of_text) > 0 for of_text in forms)


def canonical_forms(text: str, schema: Schema) -> list[str]:
    """The text's value as the grammar of the schema may write it; none where the text is no JSON.

    Several schemas may apply to an object, and have its keys in different orders: a form for the order of each.
    """
    try:
        value = json.loads(
            text, parse_float=Decimal, parse_constant=_no_json, object_pairs_hook=_object
        )
        forms = ("".join(_written(value, [schema], schema, first)) for first in range(MOST_ORDERS))
        return list(dict.fromkeys(forms))
    except (ValueError, ArithmeticError, RecursionError):
        return []


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that stands twice: which of its values is meant?"""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key stands twice")
    return entries


def _written(value: Any, schemas: Sequence[Any], root: Schema, first: int) -> Iterator[str]:
    """The value in compact JSON; `schemas`: those that apply to it; `first`: which of them orders the keys."""
    applicable = [part for schema in schemas for part in _parts(schema, root, depth=0)]
    with_keys = [schema for schema in applicable if _mapping(schema, "properties")]
    if with_keys:
        chosen = with_keys[first % len(with_keys)]
        applicable.sort(key=lambda schema: schema is not chosen)
    constants = [
        constant
        for schema in applicable
        for constant in (schema.get("const"), *_list(schema, "enum"))
        if isinstance(constant, dict | list) and constant == value
    ]
    if isinstance(value, dict):
        # The grammar has the keys of the schema first, in its order, then all others.
        properties = dict[str, list[Any]]()
        for constant in constants:
            for key, of_key in dict(constant).items():
                properties.setdefault(key, []).append({"const": of_key})
        for schema in applicable:
            for key, of_key in _mapping(schema, "properties").items():
                properties.setdefault(key, []).append(of_key)
        keys = [key for key in properties if key in value]
        keys += [key for key in value if key not in properties]
        yield "{"
        for number, key in enumerate(keys):
            yield f"{',' if number else ''}{_text(key)}:"
            schemas_of_others = [
                of_key
                for schema in applicable
                for of_key in (
                    schema.get("additionalProperties"),
                    *_mapping(schema, "patternProperties").values(),
                )
            ]
            yield from _written(
                value[key], [*properties.get(key, ()), *schemas_of_others], root, first
            )
        yield "}"
    elif isinstance(value, list):
        yield "["
        for number, entry in enumerate(value):
            yield "," if number else ""
            schemas_of_entry = [schema.get("items") for schema in applicable]
            schemas_of_entry += [{"const": constant[number]} for constant in constants]
            for schema in applicable:
                schemas_of_entry += _list(schema, "prefixItems")[number : number + 1]
            yield from _written(entry, schemas_of_entry, root, first)
        yield "]"
    elif isinstance(value, Decimal):
        yield _number(value)
    elif isinstance(value, str):
        yield _text(value)
    else:
        yield json.dumps(value)


def _parts(schema: Any, root: Schema, depth: int) -> Iterator[Schema]:
    """The schema and those that it refers to or combines, to a depth that ends circles."""
    if not isinstance(schema, Mapping) or depth > 16:
        return
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield from _parts(_referred(reference, root), root, depth + 1)
    for key in ("allOf", "anyOf", "oneOf"):
        for part in _list(schema, key):
            yield from _parts(part, root, depth + 1)


def _referred(reference: str, root: Schema) -> Any:
    target: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def _mapping(schema: Schema, key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _number(value: Decimal) -> str:
    """Without an exponent, and whole numbers without a point: 1.0 is an integer to JSON schemas."""
    if not value:
        return "0"
    if abs(value.adjusted()) > MOST_DIGITS:
        return str(value)
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
