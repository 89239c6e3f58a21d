"""The requests that the endpoints take: OpenAI's parameters, and some of vLLM's."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, ValidationError

from bloomery.serve.limits import Refused

MOST_STOPS, MOST_CHOICES, MOST_TOP = 16, 16, 20
MOST_TURNS = 4096
MEDIA = ("image", "input_image", "image_url", "input_audio", "audio", "input_file", "file", "video", "video_url")
Json = dict[str, Any]
Text = Annotated[str, StringConstraints(max_length=2**21)]
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


class Asked(BaseModel, extra="forbid", strict=True):
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
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = Field(None, discriminator="type")
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


def _refuse_media(content: object) -> object:
    """Raises ValueError for a part that is no text, in words that name what is missing."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA:
            what = "images" if "image" in kind else "audio" if "audio" in kind else "files and videos"
            raise ValueError(f"{what} are not supported; send text parts alone")
    return content


Content = Annotated[Text | list[Part], BeforeValidator(_refuse_media)]


class Turn(BaseModel, extra="forbid", strict=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatAsked(Asked):
    """Of /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1, max_length=MOST_TURNS)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionAsked(Asked):
    """Of /v1/completions."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None


A = TypeVar("A", bound=BaseModel)


def parsed(kind: type[A], body: bytes) -> A:
    """The request in a body. Raises Refused (400) that names the first parameter that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a value that may have several forms each is reported; a sentence of ours says most.
    first = next((each for each in errors if each["type"] == "value_error"), errors[0])
    place = _place(first["loc"], body)
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        raise Refused(400, f"unknown or unsupported parameter: {place}", parameter=place or None)
    raise Refused(400, f"{place or 'body'}: {problem}", parameter=place or None)


def _place(path: tuple[int | str, ...], body: bytes) -> str:
    """The path of a value in the body. pydantic also names the form that it tried, which is no part of it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    names = list[str]()
    for depth, part in enumerate(path):
        if isinstance(value, dict) and (part in value or (depth == len(path) - 1 and str(part).isidentifier())):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        names.append(str(part))
    return ".".join(names)[:120]
