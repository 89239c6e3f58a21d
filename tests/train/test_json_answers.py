"""JSON of a schema: the verdicts are those of the library jsonschema, and schemas that cannot be judged are refused."""

import json
import random

import jsonschema
import pytest

from bloomery.core.errors import UserError
from bloomery.infer.grammar_trials import BYTES, GrammarTrials
from bloomery.train.rl.json_answers import canonical_forms, follow_schema

LEAVES = [
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "number"},
    {"type": "number", "minimum": -1, "exclusiveMaximum": 2.5},
    {"type": "string"},
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "pattern": "^[ab]+$"},
    {"type": "string", "enum": ["x", "é"]},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": [1, "a", None, 2.5]},
    {"const": {"a": 1, "b": [{"d": 2, "c": 3}]}},
    {"$ref": "#/$defs/pair"},
]
VALUES = [0, 1, 5, 12, -3, 0.5, 1.0, 2.25, 1e-7, 3e30, True, None, "", "a", "ab", "x", "é", "😀"]
VALUES += ['\x01\n"\\/', "zzzz", {"b": [{"c": 3, "d": 2}], "a": 1}, {"right": 1, "left": "x"}]
PAIR = {
    "type": "object",
    "properties": {"left": {"type": "string"}, "right": {"type": "integer"}},
    "required": ["left"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def trials():
    trials = GrammarTrials(BYTES)
    yield trials
    trials.close()


def a_schema(draw, depth=0):
    kind = draw.choice(["leaf", "array", "object", "object", "any"]) if depth < 3 else "leaf"
    if kind == "leaf":
        return draw.choice(LEAVES)
    if kind == "any":
        return {"anyOf": [a_schema(draw, depth + 1), a_schema(draw, depth + 1)]}
    if kind == "array":
        limits = draw.choice([{}, {"minItems": 1, "maxItems": 2}])
        return {"type": "array", "items": a_schema(draw, depth + 1), **limits}
    keys = draw.sample("abcd", draw.randint(0, 3))
    others = draw.choice(
        [{}, {"additionalProperties": False}, {"additionalProperties": a_schema(draw, depth + 1)}]
    )
    properties = {key: a_schema(draw, depth + 1) for key in keys}
    required = [key for key in keys if draw.random() < 0.5]
    return {"type": "object", "properties": properties, "required": required, **others}


def a_value(draw, schema):
    """A value that follows the schema more often than not; its keys come in any order."""
    if not isinstance(schema, dict) or draw.random() < 0.1:
        return draw.choice(VALUES)
    if "anyOf" in schema:
        return a_value(draw, draw.choice(schema["anyOf"]))
    if schema.get("type") == "array":
        return [a_value(draw, schema["items"]) for _ in range(draw.randint(0, 3))]
    if schema.get("type") != "object":
        fitting = [value for value in VALUES if verdict(value, schema)]
        return draw.choice(fitting or VALUES)
    keys = [key for key in schema["properties"] if key in schema["required"] or draw.random() < 0.6]
    entries = [(key, a_value(draw, schema["properties"][key])) for key in keys]
    if draw.random() < 0.3:
        entries.append(("q", a_value(draw, schema.get("additionalProperties"))))
    draw.shuffle(entries)
    return dict(entries)


def verdict(value, schema):
    return jsonschema.Draft202012Validator({**schema, "$defs": {"pair": PAIR}}).is_valid(value)


def test_verdicts_are_those_of_jsonschema(trials):
    verdicts = []
    for seed in range(80):
        draw = random.Random(seed)
        schema = {**a_schema(draw), "$defs": {"pair": PAIR}}
        values = [a_value(draw, schema) for _ in range(6)]
        texts = [json.dumps(value, indent=draw.choice([None, 2])) for value in values]
        expected = tuple(verdict(value, schema) for value in values)
        assert follow_schema(trials, schema, texts) == expected, (schema, texts)
        verdicts += expected
    assert 100 < sum(verdicts) < len(verdicts) - 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,]",
        "NaN",
        "1 2",
        '{"a": 1, "a": 2}',
        "```json\n{}\n```",
        "[" * 100_000,
        "1e",
        "9" * 5000,
    ],
    ids=lambda text: text[:12],
)
def test_what_is_no_json_follows_no_schema(trials, text):
    assert canonical_forms(text, {}) == []
    assert follow_schema(trials, {}, [text, " {} "]) == (False, True)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "no such type"}, "no such type"),
        ({"$ref": "#/missing"}, "missing"),
        ({"type": "string", "pattern": "("}, ""),
        ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_judged_is_refused(trials, schema, words):
    with pytest.raises(UserError, match="JSON schema not supported") as refusal:
        follow_schema(trials, schema, ["{}"])
    assert words in refusal.value.problem
    assert follow_schema(trials, {"type": "object"}, ["{}"]) == (True,)  # others still are
