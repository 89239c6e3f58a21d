"""Parameters that this server does not have, and which of their values ask for nothing: one table for every endpoint.

Clients send many of them with every request. A value that asks for nothing is taken; any other is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import from_json

from bloomery.serve.limits import Refused

Json = dict[str, Any]
AsksNothing = Callable[[Any], bool]
MOST_SHOWN = 40  # characters of a value in a message


class Body(BaseModel, extra="forbid", strict=True):
    """A part of a request. `null` is a parameter that was left out, as in OpenAI's reference, at every level but inside
    of JSON that belongs to the client: schemas, arguments, metadata.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: entry for key, entry in value.items() if entry is not None}


B = TypeVar("B", bound=BaseModel)


def only(*values: object) -> AsksNothing:
    """One of these values. `true` is not 1, and 1.0 is."""

    def matches(value: Any) -> bool:
        return any(
            value == entry and isinstance(value, bool) == isinstance(entry, bool)
            for entry in values
        )

    return matches


def a_text(value: Any) -> bool:
    return isinstance(value, str)


def an_object(value: Any) -> bool:
    return isinstance(value, dict)


def a_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def a_switch(value: Any) -> bool:
    return isinstance(value, bool)


def clears_thoughts(value: Any) -> bool:
    """Anthropic's edits of a long context: the chat template drops thoughts of earlier turns by itself."""
    edits = value.get("edits", []) if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking_")
        for edit in edits
    )


# Parameter: the values that ask for nothing, and what a client does that wants more. `null` always asks for nothing.
NO_EFFECT: Mapping[str, tuple[AsksNothing, str]] = {
    # OpenAI's
    "metadata": (an_object, "send an object"),
    "user": (a_text, "send a text"),
    "safety_identifier": (a_text, "send a text"),
    "prompt_cache_key": (a_text, "send a text"),
    "prompt_cache_retention": (a_text, "send a text"),
    "prompt_cache_options": (an_object, "send an object"),
    "prediction": (an_object, "send an object"),  # a prediction changes the speed alone
    "store": (only(False), "chat completions are not kept; leave it out or send false"),
    "service_tier": (
        only("auto", "default", "standard_only"),
        "the server has one tier; leave it out or send auto",
    ),
    "modalities": (only(["text"]), 'answers are text; send ["text"]'),
    "functions": (only([]), "send tools"),
    "function_call": (only("none", "auto"), "send tool_choice"),
    "web_search_options": (only(), "the server has no search; leave it out"),
    "audio": (only(), "answers are text; leave it out"),
    "moderation": (only(), "the server has no moderation; leave it out"),
    "truncation": (
        only("disabled", "auto"),  # the answer to a long conversation says that it is too long
        "send disabled",
    ),
    "background": (only(False), "send the request with stream: true"),
    "conversation": (only(), "send the whole conversation as input, or previous_response_id"),
    "prompt": (only(), "prompts are not kept; send instructions"),
    "context_management": (clears_thoughts, "shorten the conversation before you send it"),
    "max_tool_calls": (a_count, "send a number"),  # of tools that run on OpenAI's servers
    # Anthropic's
    "container": (only(), "leave it out"),
    "mcp_servers": (only([]), "connect to MCP servers in the client, and send their tools"),
    "cache_control": (an_object, "send an object"),
    "diagnostics": (an_object, "send an object"),  # of the cache of prompts
    "thread": (only(), "messages are not kept; send the whole conversation"),
    "compaction": (only(), "shorten the conversation before you send it"),
    "fallbacks": (only([]), "leave it out"),
    "billing_policy": (only(), "leave it out"),
    "inference_geo": (only("global", "not_available"), "leave it out"),
    "speed": (only("standard"), "leave it out"),
    # vLLM's, Text Generation Inference's and llama.cpp's
    "ignore_eos": (only(False), "send min_tokens"),
    "skip_special_tokens": (a_switch, "send true or false"),
    "spaces_between_special_tokens": (a_switch, "send true or false"),
    "include_stop_str_in_output": (only(False), "add the stop text to the answer in the client"),
    "length_penalty": (only(1), "leave it out"),
    "use_beam_search": (only(False), "leave it out"),
    "early_stopping": (only(False), "leave it out"),
    "best_of": (only(1), "send n, or best_of to /v1/completions"),
    "n_predict": (only(-1), "send max_tokens"),
    "add_generation_prompt": (only(True), "leave it out"),
    "continue_final_message": (only(False), "send the text to /v1/completions"),
    "add_special_tokens": (only(False), "leave it out"),
    "include_reasoning": (only(True), "leave reasoning_content unread"),
    "prompt_logprobs": (only(False), "send echo and logprobs to /v1/completions"),
    "truncate_prompt_tokens": (only(), "shorten the prompt before you send it"),
    "documents": (only([]), "write documents into a message"),
    "bad_words": (only([]), "send logit_bias"),
    "allowed_token_ids": (only([]), "send logit_bias"),
    "logits_processors": (only([]), "leave it out"),
    "priority": (only(0), "requests have one priority; leave it out"),
    "request_id": (a_text, "send a text"),
    "detokenize": (only(True), "leave it out"),
    "return_token_ids": (only(False), "send logprobs"),
    "return_tokens_as_token_ids": (only(False), "send logprobs"),
    "mm_processor_kwargs": (only({}), "leave it out"),
    "typical_p": (only(1), "send top_p or min_p"),
    "top_a": (only(0), "send min_p"),
    "tfs_z": (only(1), "send top_p or min_p"),
    "mirostat": (only(0), "send temperature and top_p"),
    "repeat_penalty": (only(1), "send repetition_penalty"),
    "dry_multiplier": (only(0), "send no_repeat_ngram_size"),
    "xtc_probability": (only(0), "leave it out"),
    "cache_prompt": (a_switch, "send true or false"),
    "id_slot": (only(-1), "leave it out"),
    "slot_id": (only(-1), "leave it out"),
    "samplers": (only([]), "leave it out"),
    "grammar": (only(""), "send response_format with a JSON schema"),
    "guided_json": (only(), "send response_format with type json_schema"),
    "guided_regex": (only(), "send response_format with a JSON schema that has a pattern"),
    "guided_choice": (only(), "send response_format with a JSON schema that has an enum"),
    "guided_grammar": (only(), "send response_format with a JSON schema"),
    "structured_outputs": (only({}), "send response_format with a JSON schema"),
}


def read_object(body: bytes) -> Json:
    """The JSON object in a body. Raises Refused (400)."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"body: Invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "body: a request is a JSON object")
    return value


def without_no_effect(kind: type[BaseModel], request: Json) -> Json:
    """The request without parameters whose values ask for nothing. Raises Refused (400) for other values of them.

    What the endpoint itself has is left as it is.
    """
    aliases = {field.alias for field in kind.model_fields.values()}
    remaining = dict[str, Any]()
    for name, value in request.items():
        if name in kind.model_fields or name in aliases or name not in NO_EFFECT:
            remaining[name] = value
            continue
        asks_nothing, fix = NO_EFFECT[name]
        if value is not None and not asks_nothing(value):
            problem = f"{name}: {str(value)[:MOST_SHOWN]} is not supported: {fix}"
            raise Refused(400, problem, parameter=name)
    return remaining


def parsed(kind: type[B], body: bytes) -> B:
    """The request in a body. Raises Refused (400) that names the first parameter that is wrong."""
    return validated(kind, without_no_effect(kind, read_object(body)))


def validated(kind: type[B], request: Json) -> B:
    """The request of an object. Raises Refused (400) that names the first parameter that is wrong."""
    try:
        return kind.model_validate(request)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a value that may have several forms each is reported; a sentence of ours says most.
    first_error = next((entry for entry in errors if entry["type"] == "value_error"), errors[0])
    path = _place(first_error["loc"], request)
    problem = first_error["msg"].removeprefix("Value error, ")
    if first_error["type"] == "extra_forbidden":
        raise Refused(400, f"unknown or unsupported parameter: {path}", parameter=path or None)
    raise Refused(400, f"{path or 'body'}: {problem}", parameter=path or None)


def _place(path: tuple[int | str, ...], request: Json) -> str:
    """The path of a value in the request. pydantic also names the form that it tried, which is no part of it."""
    value: Any = request
    names = list[str]()
    for depth, part in enumerate(path):
        if isinstance(value, dict) and (
            part in value or (depth == len(path) - 1 and str(part).isidentifier())
        ):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        names.append(str(part))
    return ".".join(names)[:120]
