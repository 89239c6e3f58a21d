"""Answers of a model to the rows of a dataset: to print, or added to a file that training reads."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from bloomery.data.examples import num_pictures
from bloomery.infer.answer_files import AnswerFile, refuse_pictures, training_row
from bloomery.infer.dataset_prompts import DatasetPrompt
from bloomery.infer.generate import Writer
from bloomery.infer.picture_prompts import Eyes
from bloomery.infer.top_scores import top_scores

Json = dict[str, Any]

ROWS_AT_ONCE = 32  # pictures take memory until their prompt has been read


def printed_answers(
    writer: Writer, prompts: Iterator[DatasetPrompt], eyes: Eyes | None
) -> Iterator[Json]:
    """Of each prompt its row, its text, the dataset's own answer where there is one, and the completion.

    `eyes`: of a model that reads pictures. Raises UserError.
    """
    while batch := list(islice(prompts, ROWS_AT_ONCE)):
        if eyes is not None and any(num_pictures(prompt.example) for prompt in batch):
            eyes.open()
        completions = writer.complete([prompt.example for prompt in batch])
        for prompt, completion in zip(batch, completions, strict=True):
            answer = {} if prompt.answer is None else {"answer": prompt.answer}
            source = {"row": prompt.example.source, "prompt": prompt.text}
            yield {**source, **answer, "text": completion}


def add_answers(file: AnswerFile, writer: Writer, prompts: Iterator[DatasetPrompt]) -> None:
    """Raises UserError, also for a prompt with pictures."""
    while batch := list(islice(prompts, ROWS_AT_ONCE)):
        examples = [prompt.example for prompt in batch]
        refuse_pictures(examples)
        for example, completion in zip(examples, writer.complete(examples), strict=True):
            file.add(training_row(example, completion))


def add_scored_answers(
    file: AnswerFile, writer: Writer, prompts: Iterator[DatasetPrompt], top: int
) -> None:
    """As `add_answers`, in token ids, with the `top` likeliest tokens at each token of an answer."""
    while batch := list(islice(prompts, ROWS_AT_ONCE)):
        examples = [prompt.example for prompt in batch]
        refuse_pictures(examples)
        for prompt_ids, answer in writer.answers(examples):
            answer_ids = list(answer.ids)
            if answer.is_ended and writer.end_id is not None:
                answer_ids.append(writer.end_id)
            scores = top_scores(writer.decoder, prompt_ids, answer_ids, top)
            file.add_scored(prompt_ids, answer_ids, *scores)
