"""The grammar of arguments with bare names, as Gemma 4 writes them: `days:2,city:<|"|>Bern<|"|>`."""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, final

from bloomery.data.chat.tool_arguments import Json, definition_of, kinds_of
from bloomery.infer.grammar_trials import unsupported_schema

_SCALARS = ("integer", "number", "boolean", "null")
_DEEPEST = 8  # objects and lists within each other; deeper ones have any values
# Keywords that the grammar obeys, and those that ask for nothing.
_OBEYED = {"type", "properties", "required", "additionalProperties", "items", "enum", "const"}
_OBEYED |= {"anyOf", "$ref", "$defs", "definitions", "title", "description", "default", "examples"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


@final
class BareRules:
    """Rules of the arguments of one tool. `quote`: the mark around a text, as a grammar has it; `text`: the rule of
    any text up to that mark, and the mark.

    Raises UserError for a schema that is not supported; of a strict tool also for keywords that bind nothing here.
    """

    def __init__(self, rule: str, schema: Json, *, strict: bool, quote: str, text: str) -> None:
        self._rule = rule
        self._schema = schema
        self._strict = strict
        self._quote = quote
        self._text = text
        self._count = 0
        self.lines: list[str] = []
        self._has_any = False
        self._definitions: dict[str, str] = {}  # their rules, by the reference to them
        self._unwritten = deque[str]()
        kind = schema.get("type", "object")
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if kind != "object" or not isinstance(properties, dict) or not isinstance(required, list):
            raise unsupported_schema("arguments are an object of properties, some of them required")
        self.lines.append(f"{rule}: {self._members(schema, 0)}")

        # Each definition is one rule, however often it is named: it may hold itself. Its own may name further ones.
        while self._unwritten:
            reference = self._unwritten.popleft()
            body = self._value(self._referred(reference), 0)
            self.lines.append(f"{self._definitions[reference]}: {body}")

    def _new_name(self) -> str:
        self._count += 1
        return f"{self._rule}_{self._count}"

    def _named(self, body: str) -> str:
        name = self._new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def _members(self, schema: Mapping[str, Any], depth: int) -> str:
        """The members of an object without its braces, in the order of the schema."""
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        further = schema.get("additionalProperties", not properties)
        last = '""'
        begin_last = '""'
        if further is not False:
            other = self._named(f'/[A-Za-z0-9_.-]{{1,64}}/ ":" {self._value(further, depth + 1)}')
            last = f'("," {other})*'
            begin_last = f"({other} {last})?"
        more = self._named(last)
        begin = self._named(begin_last)
        for name, of_member in reversed(properties.items()):
            member = self._named(f"{json.dumps(name + ':')} {self._value(of_member, depth + 1)}")
            is_required = name in required
            begins = f"{member} {more}" + ("" if is_required else f" | {begin}")
            goes_on = f'"," {member} {more}' + ("" if is_required else f" | {more}")
            begin = self._named(begins)
            more = self._named(goes_on)
        return begin

    def _value(self, schema: object, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._definitions:
                self._definitions[reference] = self._new_name()
                self._unwritten.append(reference)
            return self._definitions[reference]
        if self._strict and (unknown := schema.keys() - _OBEYED - _OF_NUMBERS):
            raise unsupported_schema(f"{min(unknown)} in calls of this chat template")
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        if allowed == []:
            raise unsupported_schema("an enum without values")
        if isinstance(allowed, list):
            return self._named(" | ".join(map(self._constant, allowed)))
        if isinstance(schema.get("anyOf"), list):
            alternatives = [self._value(alternative, depth + 1) for alternative in schema["anyOf"]]
            return self._named(" | ".join(alternatives))
        if "type" not in schema and not schema.keys() & {"properties", "items"}:
            return self._any()
        kinds = kinds_of(schema, self._schema)
        alternatives = list[str]()
        if "string" in kinds and "type" in schema:
            alternatives.append(f"{self._quote} {self._text}")
        scalars = [kind for kind in _SCALARS if kind in kinds and "type" in schema]
        if scalars:
            limits = {key: schema[key] for key in _OF_NUMBERS & schema.keys()}
            alternatives.append(f"%json {json.dumps({'type': scalars, **limits})}")
        if "array" in kinds and ("type" in schema or "items" in schema):
            item = self._value(schema.get("items", True), depth + 1)
            alternatives.append(f'"[" ({item} ("," {item})*)? "]"')
        if "object" in kinds and ("type" in schema or "properties" in schema):
            alternatives.append(f'"{{" {self._members(schema, depth + 1)} "}}"')
        if not alternatives:
            raise unsupported_schema("a value of no type")
        return self._named(" | ".join(self._named(alternative) for alternative in alternatives))

    def _constant(self, value: object) -> str:
        """A value as it is written."""
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        if isinstance(value, list | dict):
            raise unsupported_schema("an enum of lists or objects in calls of this chat template")
        return json.dumps(json.dumps(value))

    def _referred(self, reference: str) -> object:
        schema = definition_of(reference, self._schema)
        if schema is None:
            raise unsupported_schema(f"{reference} leads nowhere")
        return schema

    def _any(self) -> str:
        rule = f"{self._rule}_any"
        if not self._has_any:
            self._has_any = True
            number = r"/-?[0-9]{1,20}(\.[0-9]{1,20})?/"
            name = "/[A-Za-z0-9_.-]{1,64}/"
            member = f'{name} ":" {rule}'
            self.lines += [
                f'{rule}: {self._quote} {self._text} | {number} | "true" | "false" | "null"'
                f' | "[" ({rule} ("," {rule})*)? "]" | "{{" ({rule}_member ("," {rule}_member)*)? "}}"',
                f"{rule}_member: {member}",
            ]
        return rule
