"""Every leaf of a row is in its example, is a reason of the mask, or is noted as not read; else the row is refused."""

import csv
import json
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bloomery.core.errors import UserError
from bloomery.data.examples import Example, Message
from bloomery.data.sources.documents import ReadStats, open_dataset, read_documents
from bloomery.facts.columns import MASKED_KEYS, TRAINED_KEYS
from bloomery.recipe.schema import Source


class Leaves:
    """Texts and numbers that occur once each, so that any of them can be found again."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.count = 0
        self.kinds: dict[
            str, int
        ] = {}  # of the odd values of a column: Arrow has one type for each

    def text(self) -> str:
        self.count += 1
        return f"leaf{self.count:04d}x"

    def odd(self, name: str) -> object:
        """A value that no column needs: a leaf, nothing, or something nested."""
        kind = self.kinds.setdefault(name, self.random.randrange(1, 7))
        match 0 if self.random.random() < 0.2 else kind:
            case 0:
                return None
            case 1:
                self.count += 1
                return 700_000 + self.count
            case 2:
                return [self.text(), self.text()]
            case 3:
                return {"in": self.text(), "deep": {"er": self.text(), "no": None}}
            case 4:
                return [{"in": self.text()}, {"in": self.text()}]
            case _:
                return self.text()


ODD_COLUMNS = (
    "id",
    "source",
    "meta",
    "margin",
    "score_chosen",
    "rating",
    "notes",
    "lang",
    "extra",
    # names that other rows use for a role
    "passage",
    "system_prompt",
    "task",
    "solution",
    "target",
    "weight",
    "functions",
    "user",
    "turns",
    "chosen_response",
    "labels",
)
ODD_KEYS = ("tool_plan", "ts", "channel", "annotations", "eot")


def turn(leaves: Leaves, role: str) -> dict:
    names = ("role", "content")
    if leaves.random.random() < 0.3:
        names = ("from", "value")
        role = {"user": "human", "assistant": "gpt"}.get(role, role)
    message = {names[0]: role, names[1]: leaves.text()}
    assistant = role in ("assistant", "gpt")
    if leaves.random.random() < 0.25:
        key = leaves.random.choice(ODD_KEYS)
        message[key] = leaves.odd(key)
    if assistant and leaves.random.random() < 0.2:
        message[leaves.random.choice(("reasoning_content", "thinking"))] = leaves.text()
    if assistant and leaves.random.random() < 0.2:
        arguments = {"city": leaves.text(), "unit": None}
        call = {"type": "function", "function": {"name": leaves.text(), "arguments": arguments}}
        if leaves.random.random() < 0.3:
            call["index"] = leaves.text()
        message["tool_calls"] = [call]
    if assistant and leaves.random.random() < 0.2:
        key = leaves.random.choice(("loss", "train", "weight", "masked"))
        message[key] = leaves.random.random() < 0.5
    return message


def turns(leaves: Leaves, *, is_answered: bool = True) -> list[dict]:
    roles = ["system"] if leaves.random.random() < 0.3 else []
    roles += ["user", "assistant"] * leaves.random.randint(0, 2) + ["user"]
    return [turn(leaves, role) for role in [*roles, *(["assistant"] if is_answered else [])]]


def side(leaves: Leaves, form: str, role: str) -> object:
    if form == "text":
        return leaves.text()
    return turn(leaves, role) if form == "message" else [turn(leaves, role)]


def row_of(leaves: Leaves, kind: str, form: str, extras: tuple[str, ...]) -> dict:
    match kind:
        case "messages":
            row = {"messages": turns(leaves)}
        case "alpaca":
            row = {"instruction": leaves.text(), "output": leaves.text()}
        case "qa":
            row = {"question": leaves.text(), "answer": leaves.text()}
        case "completion":
            row = {
                "prompt": side(leaves, form, "user"),
                "completion": side(leaves, form, "assistant"),
            }
        case "kto":
            row = {
                "prompt": side(leaves, form, "user"),
                "completion": side(leaves, form, "assistant"),
            }
            row["label"] = leaves.random.random() < 0.5
        case "kto messages":
            row = {"messages": turns(leaves), "label": leaves.random.random() < 0.5}
        case "pair":
            row = {"prompt": side(leaves, form, "user")}
            row |= {name: side(leaves, form, "assistant") for name in ("chosen", "rejected")}
        case "pair of a conversation":
            row = {"conversations": turns(leaves, is_answered=False)}
            row |= {name: side(leaves, "message", "assistant") for name in ("chosen", "rejected")}
        case "rejected response":
            row = {"messages": turns(leaves), "rejected_response": leaves.text()}
        case "prompt":
            row = {"prompt": side(leaves, form, "user"), "answer": leaves.text()}
        case _:
            row = {"text": leaves.text()}
    for column in extras:
        is_empty = leaves.random.random() < 0.2
        if column == "history":
            row[column] = None if is_empty else [[leaves.text(), leaves.text()]]
        else:
            is_odd = column in ODD_COLUMNS
            row[column] = None if is_empty else leaves.odd(column) if is_odd else leaves.text()
    return row


KINDS = {
    "messages": "sft",
    "alpaca": "sft",
    "qa": "sft",
    "completion": "sft",
    "kto": "kto",
    "kto messages": "kto",
    "pair": "pairs",
    "pair of a conversation": "pairs",
    "rejected response": "pairs",
    "prompt": "prompts",
    "text": "any",
}
SUFFIXES = ("jsonl", "json", "csv", "parquet")


def write(path, rows):
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv":
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]))
                table.writeheader()
                for row in rows:
                    cells = {
                        name: json.dumps(cell) if isinstance(cell, list | dict | bool) else cell
                        for name, cell in row.items()
                    }
                    table.writerow(cells)
        case ".json":
            path.write_text(json.dumps(rows))
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def leaves_in(value: object, key: str = "") -> list[tuple[str, str]]:
    """Each text and number in a value, with the innermost key of an object that holds it."""
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in leaves_in(item, name)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves_in(item, key)]
    return [] if value is None or value == "" else [(key, str(value))]


def text_of_examples(examples: list[object]) -> str:
    """All that the examples say: texts, calls, tools, reasoning, and columns for rewards."""
    parts = []
    for example in examples:
        if not isinstance(example, Example):
            parts.append(example.text)
            continue
        for part in (example.prompt, *example.responses):
            messages = [part] if isinstance(part, str) else part
            for message in messages:
                if isinstance(message, Message):
                    calls = json.dumps(message.calls)
                    parts += [message.content, message.thinking or "", message.name or "", calls]
                else:
                    parts.append(message)
        parts += [json.dumps(example.tools), json.dumps(example.columns)]
    return "\n".join(parts)


FLAGS = {*TRAINED_KEYS, *MASKED_KEYS}
ROLES = {"role", "from", "type", "label"}


def lost_leaves(row: dict, example_text: str, stats: ReadStats) -> list[tuple[str, str]]:
    """The leaves of a row that are in no example and in no note."""
    lost_leaves_of_row = []
    for column, cell in row.items():
        if column in stats.use.unread_columns:
            continue
        for key, leaf in leaves_in(cell, column):
            is_noted = any(
                name.rpartition(".")[2] == key or f'"{name}"' in json.dumps(cell)
                for name in stats.use.unread_turn_keys
            )
            if leaf not in example_text and key not in FLAGS | ROLES and not is_noted:
                lost_leaves_of_row.append((key, leaf))
    return lost_leaves_of_row


def check(seed: int, tmp_path) -> bool:
    """Whether the rows of a dataset could be read; those that are read lose nothing."""
    random = Random(seed)
    leaves = Leaves(random)
    kind = random.choice(list(KINDS))
    form = random.choice(("text", "message", "messages"))
    extras = random.sample(
        ("system", "input", "context", "history", *ODD_COLUMNS), random.randint(0, 4)
    )
    rows = [row_of(leaves, kind, form, tuple(extras)) for _ in range(random.randint(1, 3))]
    path = write(tmp_path / f"rows{seed}.{random.choice(SUFFIXES)}", rows)
    for required_format in (KINDS[kind], random.choice(("sft", "any"))):
        stats = ReadStats()
        try:
            dataset = open_dataset(Source(path=str(path)), required_format)
            documents = list(read_documents(dataset, on_error="stop", stats=stats))
        except UserError as error:
            assert error.fix and error.where
            continue
        example_text = text_of_examples([document.example or document for document in documents])
        for row in rows:
            assert not lost_leaves(row, example_text, stats), (
                seed,
                required_format,
                path.name,
                row,
                stats.use,
            )
        if required_format == KINDS[kind]:
            return True
    return False


SEEDS = 400


@pytest.mark.parametrize(
    "first_seed",
    range(0, SEEDS, 50),
)
def test_no_leaf_is_lost(first_seed, tmp_path):
    num_read = sum(check(seed, tmp_path) for seed in range(first_seed, first_seed + 50))
    assert num_read > 25  # the others are refused by name
