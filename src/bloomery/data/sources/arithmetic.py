"""Sums of two small numbers, made here: a dataset for reinforcement learning that needs no download.

As prompts each sum has its right `answer` as a column for rewards. For supervised fine-tuning each has three answers,
of which one is right, so that a model trained on them knows the sum and says it a third of the time.
"""

from collections.abc import Iterator

from bloomery.data.examples import Example, to_wire
from bloomery.data.sources.formats import PROMPTS, RequiredFormat

NAME = "arithmetic"
LARGEST = 19  # of the two numbers


def examples(required_format: RequiredFormat) -> Iterator[Example]:
    """Prompts for objectives that generate completions; for others prompts with a completion, three for each sum."""
    for first in range(LARGEST + 1):
        for second in range(LARGEST + 1):
            prompt = f"{first}+{second}="
            source = f"{NAME}:{first}+{second}"
            total = first + second
            if required_format == PROMPTS:
                yield Example(source, "prompt", prompt, (), columns={"answer": str(total)})
                continue
            for answer in (total, first, second):
                yield Example(source, "completion", prompt, (str(answer),))


def num_bytes(required_format: RequiredFormat) -> int:
    """The size of the rows as JSON."""
    return sum(len(to_wire(example)) for example in examples(required_format))
