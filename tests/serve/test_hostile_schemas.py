"""Schemas of tools that hold themselves, or whose rules would grow without end: a client may send any."""

import math
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_tool_forms import FORM, chat_model

from bloomery.core.errors import UserError
from bloomery.data.chat.tool_arguments import KINDS, kind_of, kinds_of
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.infer.grammar import JsonGrammars
from bloomery.serve.bare_arguments import BareRules
from bloomery.serve.tools import AnswerRules, answer_grammar

SELF = {"$ref": "#/$defs/node"}
NODE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "next": SELF},
    "required": ["n"],
    "additionalProperties": False,
}


def bare_rules(schema: dict) -> list[str]:
    return BareRules("r", schema, strict=False, quote="<[5]>", text="text").lines


def of_definitions(properties: dict, **definitions: object) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def test_a_schema_that_holds_itself_has_a_rule_for_each_definition() -> None:
    """The rules of 100 references in a definition to itself would be a million for each level."""
    members = {f"p{number}": SELF for number in range(100)}
    node = {"type": "object", "properties": members}
    assert len(bare_rules(of_definitions(members, node=node))) < 1000
    schema = of_definitions({}, node={"anyOf": [SELF] * 100})
    begun = time.process_time()
    assert kinds_of(SELF, schema) == KINDS
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("name", ["Gemma 4", "FunctionGemma"])
def test_arguments_that_hold_themselves_are_bound_at_any_depth(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(chat_model(tmp_path, name))
    form = FORM[name]
    end = tokenizer.id_of("<|im_end|>")
    parameters = of_definitions({"node": SELF}, node=NODE)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = answer_grammar(AnswerRules([tool], required=True), form, tokenizer, [end])

    def nested(innermost: dict) -> dict:
        node = innermost
        for number in range(12):
            node = {"n": number, "next": node}
        return {"node": node}

    with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
        for innermost, is_valid in (({"n": 1}, True), ({"n": "one"}, False), ({}, False)):
            follow = grammars.follow(grammar)
            text = form.written("f", nested(innermost))
            for token in (*tokenizer.encode(text, special=True), end):
                is_taken = follow.masked(torch.zeros(tokenizer.vocab_size))[token] == 0
                if not is_taken:
                    break
                follow.take(token)
            assert is_taken == is_valid, innermost


@pytest.mark.parametrize(
    "definitions",
    [
        {"node": SELF},
        {"node": {"$ref": "#/$defs/other"}, "other": SELF},
        {"node": {"anyOf": [SELF, {"type": "integer"}]}},
    ],
)
def test_a_definition_that_is_only_itself_ends(tmp_path: Path, definitions: dict) -> None:
    """Refused or followed: a client may send it."""
    tokenizer = load_tokenizer(chat_model(tmp_path, "Gemma 4"))
    end = tokenizer.id_of("<|im_end|>")
    parameters = of_definitions({"node": SELF}, **definitions)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    rules = AnswerRules([tool], required=True)
    grammar = answer_grammar(rules, FORM["Gemma 4"], tokenizer, [end])
    with closing(JsonGrammars(tokenizer, tokenizer.vocab_size, [end])) as grammars:
        try:
            follow = grammars.follow(grammar)
        except UserError:
            return
        assert (follow.masked(torch.zeros(tokenizer.vocab_size)) == 0).any()


def test_an_infinite_number_has_a_type() -> None:
    assert [kind_of(value) for value in (math.inf, 2.0, 2.5, 10**400)] == [
        "number",
        "integer",
        "number",
        "integer",
    ]


@pytest.mark.parametrize("num_tools", [1, 40])
def test_definitions_are_not_repeated_without_end(tmp_path: Path, num_tools: int) -> None:
    """Where arguments are written one by one, each that names a definition has a copy of all of them."""
    name = "GLM 4.5 and later"
    tokenizer = load_tokenizer(chat_model(tmp_path, name))
    filling = {f"d{number}": {"type": "integer"} for number in range(1000)}

    def grammar(schema: dict, num_arguments: int) -> str:
        properties = {f"p{number}": schema for number in range(num_arguments)}
        parameters = of_definitions(properties, node={"type": "integer"}, **filling)
        tools = [
            {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}
            for number in range(num_tools)
        ]
        return answer_grammar(AnswerRules(tools, required=True), FORM[name], tokenizer, [5])

    assert '"d999"' not in grammar({"type": "integer"}, 2)
    assert '"d999"' in grammar(SELF, 2)
    with pytest.raises(UserError, match="definitions that many arguments name"):
        grammar(SELF, 800 // num_tools)
