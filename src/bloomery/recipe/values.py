"""The values of a recipe: lengths, counts, ranges and paths."""

import os
import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PositiveInt,
)
from pydantic_core import CoreSchema

from bloomery.core.units import (
    GIB,
    MIB,
    Duration,
    Unit,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_range,
    whole_steps,
)

# of any quantity: what is beyond is a slip of the keyboard, and overflows what is computed from it
_MOST = 1e18


def _duration(value: object) -> Duration:
    examples = "2000 steps, 10B tokens, 3 epochs, 20% or 8h"
    duration = value if isinstance(value, Duration) else parse_duration(_word(value, examples))
    if not 0 <= duration.amount <= _MOST:
        raise ValueError(f"{str(value)[:40]} is not a length; it must be finite and not negative")
    return duration


def _more_than_nothing(value: Duration) -> Duration:
    if value.amount == 0:
        raise ValueError("must be longer than nothing")
    return value


def _count(value: object) -> int:
    number = parse_count(_word(value, "16384, 1.5M or 10B"))
    if not 0 < number <= _MOST:
        raise ValueError(f"{str(value)[:40]!r} is not a count; it must be above 0, and finite")
    return round(number)


def _word(value: object, examples: str) -> str | float:
    """Text or a number, but neither a truth value nor a section."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be text or a number such as {examples}")
    return value


def write_duration(value: Duration) -> str:
    # A time in the largest unit of which it is a whole number: 15m, not 900s.
    if value.unit == "seconds" and value.amount:
        for seconds, unit in ((3600, "h"), (60, "m")):
            if value.amount % seconds == 0:
                return f"{value.amount / seconds:.0f}{unit}"
    amount = f"{value.amount:.0f}" if value.amount.is_integer() else repr(value.amount)
    return amount + {"percent": "%", "seconds": "s"}.get(value.unit, f" {value.unit}")


LengthOrNothing = Annotated[
    Duration,
    BeforeValidator(_duration, json_schema_input_type=str | float),
    PlainSerializer(write_duration, return_type=str),
]
Length = Annotated[LengthOrNothing, AfterValidator(_more_than_nothing)]


def _of_unit(unit: Unit, example: str) -> Any:
    """A validator of an amount of one unit, with the unit or without it: 3, "3 epochs", "10B", "10B tokens"."""

    def read(value: object) -> float:
        word = _word(value, example)
        has_unit = isinstance(word, str) and re.search(r"[0-9].*[a-z%]{2,}|%", word, re.IGNORECASE)
        if has_unit:
            duration = parse_duration(word)
            if duration.unit != unit:
                raise ValueError(f"{word!r} is not a number of {unit}; write {example}")
            amount = duration.amount
        else:
            try:
                amount = parse_count(word)
            except ValueError as error:
                raise ValueError(
                    f"{str(value)[:40]!r} is not a number of {unit}; write {example}"
                ) from error
        if unit == "steps":
            amount = whole_steps(amount, str(value)).amount
        if not 0 < amount <= _MOST or (unit != "epochs" and round(amount) < 1):
            raise ValueError(
                f"{str(value)[:40]} is not a number of {unit}; it must be above 0, and finite"
            )
        return amount if unit == "epochs" else round(amount)

    return BeforeValidator(read, json_schema_input_type=str | float)


Epochs = Annotated[float, _of_unit("epochs", "3 or 0.5")]
Steps = Annotated[int, _of_unit("steps", "2000")]
Tokens = Annotated[int, _of_unit("tokens", "10B")]
Count = Annotated[int, BeforeValidator(_count, json_schema_input_type=str | int), Field(gt=0)]


def _tokens_of_a_sequence(value: object) -> object:
    """A suffix is refused: 128k is 128,000 to this program, and 131,072 to the authors of most models."""
    if isinstance(value, str):
        with_suffix = re.fullmatch(r"([0-9]+)\s*[kK](?:i?B?)", value.strip())
        if with_suffix:
            decimal = int(with_suffix[1]) * 1000
            binary = int(with_suffix[1]) * 1024
            raise ValueError(f"{value!r} may be {decimal} or {binary} tokens; write the number")
        raise ValueError(
            f"{value[:40]!r} is not a number of tokens; write a whole number such as 1024 or 131072"
        )
    return value


_TwoOrMore = Annotated[int, Field(ge=2)]
SequenceLength = Annotated[
    _TwoOrMore, BeforeValidator(_tokens_of_a_sequence, json_schema_input_type=_TwoOrMore)
]
Auto = Literal["auto"]
_PositiveOrNone = Annotated[float, Field(gt=0)] | Literal["none"] | None
PositiveOrNone = Annotated[  # none is read as null
    Annotated[float, Field(gt=0)] | None,
    BeforeValidator(
        lambda value: None if value == "none" else value, json_schema_input_type=_PositiveOrNone
    ),
]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]

ClaimedRange = tuple[float, float]


def claimed(parse: Callable[[str | float], float | Duration], examples: str) -> BeforeValidator:
    """A claim is one value or a range: "10B", "10 to 11 GB"."""

    def read(value: object) -> ClaimedRange:
        if (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(isinstance(end, int | float) for end in value)
        ):
            low, high = value
        else:
            low, high = parse_range(_word(value, examples), parse)
        if not 0 <= low <= high <= _MOST:
            shown = str(value)[:40]
            raise ValueError(
                f"{shown!r} is not a range; write the smaller value first, and no more than {_MOST:g}"
            )
        return low, high

    return BeforeValidator(read, json_schema_input_type=str | float)


def _wall_time(text: str | float) -> Duration:
    duration = parse_duration(text)
    if duration.unit != "seconds":
        raise ValueError(f"{text!r} is not a time; write 8h or 5 to 7 days")
    return duration


def _memory(value: object) -> int:
    num_bytes = parse_bytes(_word(value, "4GiB"))
    if not 0 < num_bytes <= _MOST:
        raise ValueError(f"{str(value)[:40]} is not a size; write 4GiB or 500MB")
    return round(num_bytes)


def write_memory(value: int) -> str | int:
    """In the largest unit of which it is a whole number: 4GiB, not 4294967296."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return value


Memory = Annotated[
    int,
    BeforeValidator(_memory, json_schema_input_type=str | int),
    PlainSerializer(write_memory, return_type=str | int, when_used="json"),
    Field(json_schema_extra={"format": "bytes"}),
]
ClaimedNumber = Annotated[ClaimedRange, claimed(parse_count, "10B or 50 to 100")]
ClaimedTime = Annotated[ClaimedRange, claimed(_wall_time, "8h or 5 to 7 days")]
ClaimedBytes = Annotated[ClaimedRange, claimed(parse_bytes, "10 to 11 GB")]


WallTime = Annotated[
    Duration,
    BeforeValidator(
        lambda value: (
            value
            if isinstance(value, Duration)
            else _more_than_nothing(_wall_time(_word(value, "8h")))
        ),
        json_schema_input_type=str,
    ),
    PlainSerializer(write_duration, return_type=str),
]

T = TypeVar("T")


class _OneOrMoreSchema:
    """The JSON schema of one value or a list of them."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        list_schema = handler(core)
        return {"anyOf": [list_schema["items"], list_schema]}


OneOrMore = Annotated[
    list[T],
    BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value),
    _OneOrMoreSchema(),
]


def _path(value: str) -> str:
    """The limits of Linux, which are those of most file systems, and the letters that it has bytes for here."""
    try:
        value.encode(), os.fsencode(value)
    except UnicodeEncodeError as error:
        raise ValueError(
            "holds a letter that this locale has no bytes for: set LANG=C.UTF-8, or rename it"
        ) from error
    sizes = [len(part.encode()) for part in value.split("/")]
    if max(sizes) > 255 or sum(sizes) > 4000:
        raise ValueError("is longer than a file system takes")
    return value


FilePath = Annotated[str, AfterValidator(_path)]


_SHORT_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PRECISIONS = Literal["auto", "float32", "bfloat16", "float16", "bfloat16-pure"]
Precision = Annotated[
    _PRECISIONS,
    BeforeValidator(
        lambda value: _SHORT_PRECISION.get(value, value) if isinstance(value, str) else value,
        json_schema_input_type=Literal[_PRECISIONS, "fp32", "bf16", "fp16"],
    ),
]
Checkpointing = Annotated[
    Auto | Annotated[str, Field(pattern="^(none|selective|full|every-[1-9][0-9]*)$")],
    BeforeValidator(
        lambda value: ("full" if value else "none") if isinstance(value, bool) else value,
        json_schema_input_type=str | bool,
    ),
]


def _words_of_a_command(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError("a quote is never closed in this command") from error
    if not words:
        raise ValueError("must be a command, not an empty text")
    return value


LONGEST_PROFILE = 20  # steps: a profile of more fills the disk


def _in_order(value: list[int]) -> list[int]:
    if value[0] > value[1] or value[1] - value[0] >= LONGEST_PROFILE:
        raise ValueError(
            f"must be the first and the last of at most {LONGEST_PROFILE} steps, such as [100, 102]"
        )
    return value


ShellCommand = Annotated[str, AfterValidator(_words_of_a_command)]
StepRange = Annotated[
    list[PositiveInt], Field(min_length=2, max_length=2), AfterValidator(_in_order)
]
