"""Prompts of a dataset's rows, in any format that training reads, with the answers of those that have one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bloomery.core.errors import UserError
from bloomery.data.examples import PICTURE, Example, Turns
from bloomery.data.sources.documents import Dataset, ReadStats, open_dataset, read_documents
from bloomery.data.sources.formats import RequiredFormat
from bloomery.recipe.schema import Source

# Rows with answers come first: most of them have a column of prompts, too.
_FORMATS: tuple[RequiredFormat, ...] = ("sft", "prompts")


class DatasetPrompt(NamedTuple):
    """`example`: of the kind "prompt". `answer`: that of the row; None of a row without one."""

    example: Example
    answer: str | None

    @property
    def text(self) -> str:
        """The last turn, with `<image>` for each picture."""
        prompt = self.example.prompt
        text = prompt if isinstance(prompt, str) else prompt[-1].content if prompt else ""
        return text.replace(PICTURE, "<image>")


def dataset_prompts(path: Path) -> Iterator[DatasetPrompt]:
    """Of each row, what comes before its last answer. Raises UserError for rows of other kinds."""
    for document in read_documents(_opened(path), on_error="stop", stats=ReadStats()):
        example = document.example
        assert example is not None, "the dataset was opened as rows"
        yield _prompt_of(example)


def _opened(path: Path) -> Dataset:
    failures = list[UserError | None]()
    for required_format in _FORMATS:
        try:
            dataset = open_dataset(Source(path=str(path)), required_format)
            first = next(read_documents(dataset, on_error="stop", stats=ReadStats()), None)
        except UserError as error:
            failures.append(error)
            continue
        if first is not None and first.example is not None:
            return dataset
        failures.append(None)
    raise failures[0] or UserError(
        "the rows are neither conversations nor prompts",
        where=str(path),
        fix='pass lines of text with --prompts, or rows such as {"messages": [...]}',
    )


def _prompt_of(example: Example) -> DatasetPrompt:
    if example.kind == "prompt":
        return DatasetPrompt(example, None)
    (response,) = example.responses
    prompt = example.prompt
    if example.kind == "chat":
        assert not isinstance(response, str)
        # The last answer may be several turns of the assistant.
        length = max(
            (n + 1 for n, turn in enumerate(response) if turn.role != "assistant"), default=0
        )
        prompt = response[:length]
        response = response[length:]
    asked = replace(example, kind="prompt", prompt=prompt, responses=())
    return DatasetPrompt(asked, _text_of(response))


def _text_of(response: Turns) -> str:
    return response if isinstance(response, str) else "\n".join(turn.content for turn in response)
