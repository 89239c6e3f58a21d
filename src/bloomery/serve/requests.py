"""The requests of chat and completions: OpenAI's parameters, and some of vLLM's."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from bloomery.data.examples import PICTURE, Message
from bloomery.serve.limits import Refused
from bloomery.serve.parameters import Body, Json

MOST_STOPS = 16
MOST_CHOICES = 16
MOST_TOP = 20
MOST_TURNS = 4096
MOST_TOOLS = 128
MOST_BIASES = 1024
COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as OpenAI and vLLM have it
# What libraries send as the model where their user names none: huggingface_hub, vLLM's and TGI's clients.
NAMELESS = ("", "dummy", "tgi", "default")
MEDIA = (
    "image",
    "input_image",
    "image_url",
    "input_audio",
    "audio",
    "input_file",
    "file",
    "document",
    "video",
    "video_url",
)
Text = Annotated[str, StringConstraints(max_length=2**21)]
# Of a picture: a data URL, or that of a file.
Address = Annotated[str, StringConstraints(min_length=1, max_length=2**26)]
# Hints that have no effect: the model's own image processor says how large it sees a picture.
Detail = Literal["auto", "low", "high", "original"]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# vLLM and Transformers write 0 and -1 for no limit.
TopK = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(lambda value: None if value in (0, -1) and value is not False else value),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    """Text Generation Inference has `value`, a schema."""

    type: Literal["json_object"]
    value: Json | None = None


class NamedSchema(Body):
    name: str = ""
    description: str | None = None
    content: Json = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="before")
    @classmethod
    def _value(cls, value: Any) -> Any:
        """Text Generation Inference calls it `value`."""
        if isinstance(value, dict) and "json_schema" not in value and "value" in value:
            return {"type": value.get("type"), "json_schema": value["value"]}
        return value


class ValueFormat(Body):
    """Of Text Generation Inference, which huggingface_hub sends for `json_schema`."""

    type: Literal["json"]
    value: Json


def refuse_expression(value: object) -> object:
    if isinstance(value, dict) and value.get("type") in ("regex", "grammar", "structural_tag"):
        raise ValueError(
            f"{value['type']} is not supported; send json_schema, with a pattern for a text"
        )
    return value


ResponseFormat = Annotated[
    Annotated[TextFormat | ObjectFormat | SchemaFormat | ValueFormat, Field(discriminator="type")]
    | None,
    BeforeValidator(refuse_expression),
]


class StreamOptions(Body):
    """Padding of events against listeners (`include_obfuscation`) is not sent; nothing else depends on it."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class GenerationRequest(Body):
    """The parameters of both endpoints. `top_k` to `stop_token_ids` are not OpenAI's, and named as in vLLM."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=MOST_BIASES
    )
    response_format: ResponseFormat = None
    top_k: TopK = None
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0, allow_inf_nan=False)
    no_repeat_ngram_size: int = Field(0, ge=0, le=1000)
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[Token] = Field([], max_length=MOST_BIASES)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def completions(self) -> int:
        """Of each prompt."""
        return self.n

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids with what is added to their logits. Raises Refused for a key that is no id."""
        try:
            return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())
        except ValueError as error:
            problem = "logit_bias: the keys are token ids"
            raise Refused(400, problem, parameter="logit_bias") from error


class Part(Body):
    """Of text. `refusal` is what an answer may hold in place of text; no other key changes the text."""

    type: Literal["text", "refusal"]
    text: Text = ""
    refusal: Text = ""
    cache_control: Any = None
    annotations: Any = None

    @property
    def content(self) -> str:
        return self.text if self.type == "text" else self.refusal


class NamedPicture(Body):
    url: Address
    detail: Detail | None = None


class PicturePart(Body):
    type: Literal["image_url"]
    image_url: Address | NamedPicture
    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _has_address(cls, value: Any) -> Any:
        named = value.get("image_url") if isinstance(value, dict) else None
        address = named.get("url") if isinstance(named, dict) else named
        if not isinstance(address, str) or not address:
            raise ValueError('an image is {"type": "image_url", "image_url": {"url": "data:..."}}')
        return value

    @property
    def address(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


def refuse_media(picture: str) -> Callable[[object], object]:
    """What raises ValueError for a part of another kind than text and picture, in words that name it. `picture`: the
    type of a picture in this API.
    """

    def refuse(content: object) -> object:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in MEDIA or kind == picture:
                continue
            if "image" in kind:
                raise ValueError(f"an image is a part of type {picture} here, and not {kind}")
            media = "audio is" if "audio" in kind else "files and videos are"
            raise ValueError(f"{media} not supported; send text and {picture} parts")
        return content

    return refuse


Content = Annotated[
    Text | list[Annotated[Part | PicturePart, Field(discriminator="type")]],
    BeforeValidator(refuse_media("image_url")),
]


class CalledFunction(Body):
    """`arguments`: as JSON text; some clients send the object. `parsed_arguments` repeats them."""

    name: FunctionName
    arguments: Text | Json = ""
    parsed_arguments: Any = None


class Called(Body):
    """A call that the assistant made. `index`: of the stream in which it came."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


def refuse_function_call(value: object) -> object:
    if value is not None:
        raise ValueError("send tool_calls, and results with role tool")
    return value


class Turn(Body):
    """A message. The fields from `refusal` on are those that clients send back with an answer of the assistant: what
    repeats content, calls or thoughts is not read.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[Called] | None = Field(None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    audio: None = None
    function_call: Annotated[None, BeforeValidator(refuse_function_call)] = None
    annotations: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None
    cache_control: Any = None

    @model_validator(mode="after")
    def _complete(self) -> "Turn":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has no tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs its tool_call_id")
        says_something = self.tool_calls or self.refusal is not None or self.thought is not None
        if self.content is None and not says_something:
            raise ValueError("the message has neither content nor tool_calls")
        return self

    @property
    def thought(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def pictures(self) -> tuple[str, ...]:
        """The addresses of its pictures."""
        if self.content is None or isinstance(self.content, str):
            return ()
        return tuple(part.address for part in self.content if isinstance(part, PicturePart))

    @property
    def text(self) -> str:
        """With PICTURE for each picture; what a text has of that letter stands for nothing, and is left out there."""
        if self.content is None or isinstance(self.content, str):
            return self.content or self.refusal or ""
        if not self.pictures:
            return "".join(part.content for part in self.content if isinstance(part, Part))
        return "".join(
            PICTURE if isinstance(part, PicturePart) else part.content.replace(PICTURE, "")
            for part in self.content
        )

    def message(self) -> Message:
        """As chat templates expect it. Raises Refused for arguments that are no JSON object."""
        calls = list[Json]()
        for call in self.tool_calls or ():
            function = {"name": call.function.name, "arguments": arguments_of(call.function)}
            calls.append({"id": call.id, "type": "function", "function": function})
        role = "system" if self.role == "developer" else self.role
        name = None if self.role == "user" and self.name == "" else self.name
        return Message(
            role,
            self.text,
            tuple(calls),
            name,
            thinking=self.thought,
            call_id=self.tool_call_id,
            pictures=self.pictures,
        )


def arguments_of(function: CalledFunction) -> Json:
    """The object of a call's arguments. Raises Refused where there is none."""
    if isinstance(function.arguments, dict):
        return function.arguments
    if not function.arguments.strip():  # of a function without parameters
        return {}
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        problem = f"the arguments of {function.name} are not a JSON object"
        raise Refused(400, problem, parameter="messages")
    return arguments


class Function(Body):
    name: FunctionName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


def refuse_other_tools(tool: object) -> object:
    """Raises ValueError for a tool that is no function, in words that name it."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"a tool of type {kind[:40]!r} is not supported; send functions alone")
    return tool


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: Any = None


FunctionTool = Annotated[Tool, BeforeValidator(refuse_other_tools)]


class ChosenFunction(Body):
    name: str


class Chosen(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[Chosen] = Field(min_length=1, max_length=MOST_TOOLS)


class Allowed(Body):
    """Some of the tools: the template writes all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(GenerationRequest):
    """Of /v1/chat/completions. `chat_template_kwargs`: variables of the chat template, as in Transformers and vLLM.
    `reasoning_effort` and `verbosity` are hints: the chat template gets them, too.
    """

    messages: list[Turn] = Field(min_length=1, max_length=MOST_TURNS)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)
    tools: list[FunctionTool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | Chosen | Allowed | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Json | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None

    @model_validator(mode="after")
    def _tools_exist(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have one name")
        for name in self.chosen_names or ():
            if name not in names:
                raise ValueError(f"tool_choice names {name!r}, which is no tool of the request")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice needs tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> tuple[Json, ...]:
        """The tools that the template writes; none where the model is not to call one."""
        if self.tool_choice == "none":
            return ()
        return tuple(
            tool.model_dump(exclude_none=True, exclude={"cache_control"})
            for tool in self.tools or ()
        )

    @property
    def chosen_names(self) -> frozenset[str] | None:
        """The tools that may be called; None: all of them."""
        match self.tool_choice:
            case Chosen(function=function):
                return frozenset({function.name})
            case Allowed(allowed_tools=allowed):
                return frozenset(tool.function.name for tool in allowed.tools)
        return None

    @property
    def callable_tools(self) -> tuple[Json, ...]:
        """Those that may be called: one where it is named."""
        names = self.chosen_names
        if names is None:
            return self.offered_tools
        return tuple(tool for tool in self.offered_tools if tool["function"]["name"] in names)

    @property
    def must_call(self) -> bool:
        match self.tool_choice:
            case Chosen():
                return True
            case Allowed(allowed_tools=allowed):
                return allowed.mode == "required"
        return self.tool_choice == "required"

    @property
    def may_call_again(self) -> bool:
        """Whether an answer may hold several calls: a named function is called once, as by OpenAI."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, Chosen)

    @property
    def template_variables(self) -> Json:
        """What the chat template gets besides messages and tools."""
        variables = dict[str, Any]()
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                variables["enable_thinking"] = False
        return variables | (self.chat_template_kwargs or {})


def refuse_suffix(value: object) -> object:
    if value:
        raise ValueError("a text after the completion is not supported; leave suffix out")
    return value


class CompletionRequest(GenerationRequest):
    """Of /v1/completions. `best_of`: completions of each prompt, of which the `n` likeliest are returned."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(COMPLETION_TOKENS, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    suffix: Annotated[Literal[""] | None, BeforeValidator(refuse_suffix)] = None

    @model_validator(mode="after")
    def _best(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError("best_of is smaller than n")
        if self.stream and self.completions > self.n:
            raise ValueError("best_of cannot be streamed: the best is known at the end")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs cannot be streamed")
        return self

    @property
    def completions(self) -> int:
        """Of each prompt."""
        return self.best_of or self.n


def schema_of(params: GenerationRequest) -> Json | None:
    """The JSON schema that the answer must follow, if any."""
    match params.response_format:
        case ObjectFormat(value=None):
            return {"type": "object"}
        case ObjectFormat(value=schema) | ValueFormat(value=schema):
            return schema
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
