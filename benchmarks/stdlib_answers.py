"""Conversations and pairs from the standard library: "write a function that ...", answered by its source."""

import ast
import json
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from bloomery.data.sources.builtin import stdlib_files

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
LONGEST = 3000  # letters of an answer: most then fit a row of 1,024 tokens


def answers() -> Iterator[tuple[str, str]]:
    """(instruction, source without its docstring) of every function with a docstring, methods included."""
    seen = set()
    for file in stdlib_files():
        source = file.path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(source)
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.FunctionDef)
                or not (told := ast.get_docstring(node))
                or len(node.body) < 2
            ):
                continue
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            code = textwrap.dedent("".join(head + lines[node.body[0].end_lineno : node.end_lineno]))
            asked = f"Write a function `{node.name}`: {' '.join(told.split('.')[0].split())}."
            if len(code) <= LONGEST and asked not in seen:
                seen.add(asked)
                yield asked, code


def write_rows(folder: Path) -> int:
    """messages.jsonl and pairs.jsonl; returns how many. The rejected answer of a pair is that of the next question."""
    found = list(answers())
    with (
        (folder / "messages.jsonl").open("w") as chats,
        (folder / "pairs.jsonl").open("w") as pairs,
    ):
        for (asked, code), (_, other) in zip(found, found[1:] + found[:1], strict=True):
            prompt = [{"role": "user", "content": asked}]
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in (code, other))
            chats.write(json.dumps({"messages": prompt + chosen}) + "\n")
            pairs.write(
                json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n"
            )
    return len(found)
