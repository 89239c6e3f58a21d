"""The requests that the endpoints take: OpenAI's parameters, and some of vLLM's."""

import json
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from bloomery.data.examples import Message
from bloomery.serve.limits import Refused

MOST_STOPS = 16
MOST_CHOICES = 16
MOST_TOP = 20
MOST_TURNS = 4096
MOST_TOOLS = 128
MEDIA = (
    "image",
    "input_image",
    "image_url",
    "input_audio",
    "audio",
    "input_file",
    "file",
    "video",
    "video_url",
)
Json = dict[str, Any]
Text = Annotated[str, StringConstraints(max_length=2**21)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Token = Annotated[int, Field(ge=0, lt=2**31)]


class TextFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]


class ObjectFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["json_object"]


class NamedSchema(BaseModel, extra="forbid", strict=True):
    name: str = ""
    description: str | None = None
    content: Json = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(BaseModel, extra="forbid", strict=True):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class GenerationRequest(BaseModel, extra="forbid", strict=True):
    """The parameters of both endpoints. `top_k` to `min_tokens` are not OpenAI's, and named as in vLLM."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    user: str | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = Field(
        None, discriminator="type"
    )
    top_k: int | None = Field(None, ge=1)
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0, allow_inf_nan=False)
    no_repeat_ngram_size: int = Field(0, ge=0, le=1000)
    min_tokens: int = Field(0, ge=0)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


class Part(BaseModel, extra="forbid", strict=True):
    type: Literal["text"]
    text: Text


def refuse_media(content: object) -> object:
    """Raises ValueError for a part that is no text, in words that name what is missing."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA:
            media = (
                "images" if "image" in kind else "audio" if "audio" in kind else "files and videos"
            )
            raise ValueError(f"{media} are not supported; send text parts alone")
    return content


Content = Annotated[Text | list[Part], BeforeValidator(refuse_media)]


class CalledFunction(BaseModel, extra="forbid", strict=True):
    name: FunctionName
    arguments: Text


class Called(BaseModel, extra="forbid", strict=True):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Turn(BaseModel, extra="forbid", strict=True):
    """A message. The four last fields are those that clients send back with an answer of the assistant."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[Called] | None = Field(None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Json] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _complete(self) -> "Turn":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has no tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs its tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("the message has neither content nor tool_calls")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    def message(self) -> Message:
        """As chat templates expect it. Raises Refused for arguments that are no JSON object."""
        calls = list[Json]()
        for call in self.tool_calls or ():
            try:
                arguments = json.loads(call.function.arguments)
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                problem = f"the arguments of {call.function.name} are not a JSON object"
                raise Refused(400, problem, parameter="messages")
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        role = "system" if self.role == "developer" else self.role
        name = None if self.role == "user" and self.name == "" else self.name
        return Message(role, self.text, tuple(calls), name, call_id=self.tool_call_id)


class Function(BaseModel, extra="forbid", strict=True):
    name: FunctionName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(BaseModel, extra="forbid", strict=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(BaseModel, extra="forbid", strict=True):
    name: str


class Chosen(BaseModel, extra="forbid", strict=True):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(GenerationRequest):
    """Of /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1, max_length=MOST_TURNS)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | Chosen | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _tools_exist(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have one name")
        if isinstance(self.tool_choice, Chosen) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice names {self.tool_choice.function.name!r}, which is no tool of the request"
            )
        if self.tool_choice in ("auto", "required") and not names:
            raise ValueError("tool_choice needs tools")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> tuple[Json, ...]:
        """The tools that the template writes; none where the model is not to call one."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ())

    @property
    def callable_tools(self) -> tuple[Json, ...]:
        """Those that may be called: one where it is named."""
        if isinstance(self.tool_choice, Chosen):
            name = self.tool_choice.function.name
            return tuple(tool for tool in self.offered_tools if tool["function"]["name"] == name)
        return self.offered_tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Chosen)


class CompletionRequest(GenerationRequest):
    """Of /v1/completions."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None


def schema_of(params: GenerationRequest) -> Json | None:
    """The JSON schema that the answer must follow, if any."""
    match params.response_format:
        case ObjectFormat():
            return {"type": "object"}
        case SchemaFormat(json_schema=named):
            return named.content
    return None


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as texts or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return cast(list[str | list[int]], prompt)


A = TypeVar("A", bound=BaseModel)


def parsed(kind: type[A], body: bytes) -> A:
    """The request in a body. Raises Refused (400) that names the first parameter that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a value that may have several forms each is reported; a sentence of ours says most.
    first_error = next((entry for entry in errors if entry["type"] == "value_error"), errors[0])
    path = _place(first_error["loc"], body)
    problem = first_error["msg"].removeprefix("Value error, ")
    if first_error["type"] == "extra_forbidden":
        raise Refused(400, f"unknown or unsupported parameter: {path}", parameter=path or None)
    raise Refused(400, f"{path or 'body'}: {problem}", parameter=path or None)


def _place(path: tuple[int | str, ...], body: bytes) -> str:
    """The path of a value in the body. pydantic also names the form that it tried, which is no part of it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
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
