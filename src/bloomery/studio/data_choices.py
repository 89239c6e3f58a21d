"""The datasets that a new run may train on: what files and folders here hold, and for what. Does not import torch."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

from bloomery import hub
from bloomery.core.errors import UserError
from bloomery.core.text import expanded, harmless
from bloomery.core.units import counted, two_digits
from bloomery.data.sources.documents import ReadStats, open_dataset, peek
from bloomery.data.sources.files import DATA, TABLES, TEXT, list_files, suffix_of
from bloomery.data.sources.formats import RequiredFormat
from bloomery.data.sources.questions import likely_sides, two_texts_fix
from bloomery.data.sources.readers import Value, read_values
from bloomery.plan.dataset_size import sample_rows
from bloomery.recipe.schema import Source

MOST_ENTRIES = 60  # files and folders of the working folder that are offered
COUNTED_BYTES = 2**26  # of a JSON Lines file whose rows are counted, not estimated
MODEL_FILES = ("config.json", "adapter_config.json")
NO_DATA = ("runs", "prepared", "exports", "models", "node_modules", "__pycache__")
NO_DATA_FILES = ("readme", "license", "licence", "changelog", "package", "tsconfig", "requirements")


@dataclass(frozen=True)
class Purpose:
    """What a model may learn from rows. `objective`: its kind; `data_kind`: the format that it reads."""

    name: str
    title: str
    words: str
    objective: str
    data_kind: RequiredFormat
    formats: frozenset[str] = frozenset()


PURPOSES = (
    Purpose(
        "chat",
        "Chat",
        "answers in conversations (SFT)",
        "sft",
        "sft",
        frozenset({"messages", "sharegpt"}),
    ),
    Purpose(
        "instructions",
        "Instructions",
        "a response to each prompt (SFT)",
        "sft",
        "sft",
        frozenset({"alpaca", "completion", "captions", "tokens"}),
    ),
    Purpose(
        "preferences",
        "Preferences",
        "better and worse answers (DPO, KTO)",
        "dpo",
        "pairs",
        frozenset({"preference", "kto"}),
    ),
    Purpose("rewards", "Rewards", "a function scores its answers (GRPO)", "grpo", "prompts"),
    Purpose("text", "Plain text", "every token (continued pretraining)", "pretrain", "any"),
)
# Those that two columns of text may be for, whatever their names are.
ASKED_PURPOSES = ("instructions", "text")
PURPOSE = {purpose.name: purpose for purpose in PURPOSES}
# What rows of a format are called, of one and of several.
NOUNS = {
    "messages": "conversations",
    "sharegpt": "conversations",
    "alpaca": "prompts with their response",
    "completion": "prompts with their response",
    "captions": "pictures with their caption",
    "preference": "preference pairs",
    "kto": "labeled answers",
    "tokens": "tokenized rows",
}
_LACKS = {
    "chat": "the rows are no conversations",
    "instructions": "no prompt with a response",
    "preferences": "no rejected response and no label",
    "rewards": "no column with prompts",
    "text": "no column with text",
}


@dataclass(frozen=True)
class DataFacts:
    """What a dataset holds. `about`: "400 conversations, JSONL". `lacks`: why it is not for a purpose, by its name; it
    is for those that are missing. `columns`: of its first row, and `texts` those of text. `sides`: the likeliest prompt
    and response, where no column has a usual name. `problem`, `fix`: why no rows can be read as they are.
    """

    path: str
    about: str
    proposed: str = ""
    objective: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    sides: tuple[str, str] | None = None
    problem: str = ""
    fix: str = ""


def place_of(data: str) -> str:
    """As a recipe names it: a path, or hub:ORG/NAME."""
    if data.startswith(hub.PREFIX) or expanded(data).exists() or not hub.is_hub_id(data):
        return data if data.startswith(hub.PREFIX) else str(expanded(data))
    return hub.PREFIX + data


def facts_of(data: str) -> DataFacts:
    """Reads the first rows. Raises UserError for a dataset that does not exist, that is not downloaded, or that is a
    model."""
    source = Source(path=place_of(data))
    place = Path(source.path)
    if any((place / name).is_file() for name in MODEL_FILES):
        raise UserError(
            "that is a model, not a dataset", where=data, fix="choose files with rows or texts"
        )
    list_files(source, rows=True)
    cells = _first_cells(source)
    columns = tuple(map(str, cells))
    texts = tuple(str(name) for name, value in cells.items() if isinstance(value, str) and value)
    try:
        found = peek(source)
    except UserError as error:
        if _is_for(
            PURPOSE["rewards"], source, None
        ):  # prompts without answers are for rewards alone
            others = {name: lack for name, lack in _LACKS.items() if name != "rewards"}
            about = _about(source, None)
            return DataFacts(data, about, "rewards", "grpo", others, columns, texts)
        # The words of the command line name two columns where these may be prompt and response: the page asks.
        sides = None
        if len(texts) > 1 and error.fix == two_texts_fix(texts, cells, pretrains=False):
            sides = likely_sides(texts, cells)
            source = source.model_copy(update={"columns": {"text": sides[1]}})
        return DataFacts(
            data,
            _about(source, None),
            columns=columns,
            texts=texts,
            sides=sides,
            lacks={
                purpose.name: _LACKS[purpose.name]
                for purpose in PURPOSES
                if not sides or purpose.name not in ASKED_PURPOSES
            },
            problem=harmless(error.problem),
            fix=harmless(error.fix),
        )
    format = None if found is None else found[0]
    lacks = {
        purpose.name: _LACKS[purpose.name]
        for purpose in PURPOSES
        if not _is_for(purpose, source, format)
    }
    proposed = next((purpose.name for purpose in PURPOSES if format in purpose.formats), "text")
    return DataFacts(
        data,
        _about(source, format),
        proposed=proposed,
        objective="kto" if format == "kto" else PURPOSE[proposed].objective,
        lacks=lacks,
        columns=columns,
        texts=texts,
    )


def _is_for(purpose: Purpose, source: Source, format: str | None) -> bool:
    """Whether the rows can be read for it."""
    if format in purpose.formats:
        return True
    if purpose.name in ("chat", "instructions", "preferences"):
        # Pairs have a conversation, too, and labels an answer.
        try:
            other = peek(source, purpose.data_kind)
        except UserError:
            return False
        return other is not None and other[0] in purpose.formats
    try:
        return peek(source, purpose.data_kind) is not None or purpose.name == "text"
    except UserError:
        return False


def _first_cells(source: Source) -> Mapping[str, object]:
    """The columns of the first row; none of plain texts and of files that cannot be read."""
    file = list_files(source, rows=True)[0]
    if file.format in ("text", "code"):
        return {}
    with suppress(UserError, OSError, EOFError, ValueError):
        for value in islice(read_values(file.path, file.shown, file.format, None), 1):
            if isinstance(value, Value) and isinstance(value.content, dict):
                return value.content
    return {}


def _about(source: Source, format: str | None) -> str:
    """How many rows of which kind, in which files."""
    is_text = format is None
    dataset = open_dataset(source, "any" if is_text else "sft")
    names = sorted({file.format for file in dataset.files})
    kinds = " and ".join("CSV" if name == "csv" else name.upper() for name in names[:2])
    if names == ["text"] or names == ["code"]:
        return counted(len(dataset.files), f"{'text' if names == ['text'] else 'source'} files")
    first = dataset.files[0].path
    noun = NOUNS.get(format or "", "rows")
    only = len(dataset.files) == 1
    if only and first.suffix in (".jsonl", ".ndjson") and first.stat().st_size <= COUNTED_BYTES:
        with first.open("rb") as lines:
            return f"{_counted(sum(1 for line in lines if line.strip()), noun)}, JSONL"
    try:
        rows = sample_rows(dataset, files=1, on_error="skip", stats=ReadStats())
    except UserError:
        return kinds
    number = round(rows.num_rows)
    files = "" if only else f" in {len(dataset.files):,} files"
    words = _counted(number, noun) if rows.is_whole else f"about {two_digits(number)} {noun}"
    return f"{words}{files}, {kinds}"


def _counted(number: int, noun: str) -> str:
    """ "1 conversation", "7,168 conversations"; nouns that a plural hides in keep it."""
    head, _, rest = noun.partition(" with ")
    head = counted(number, head)
    return f"{head} with {rest}" if rest else head


@lru_cache(maxsize=512)
def _described(path: str, _changed: float) -> str:
    try:
        facts = facts_of(path)
    except (UserError, OSError):
        return ""
    return facts.about


def described(path: str) -> str:
    """What a file or folder here holds; "" for one that no run trains on."""
    try:
        changed = Path(path).stat().st_mtime
    except OSError:
        return ""
    return _described(path, changed)


def data_here() -> list[str]:
    """Files and folders of the working folder that may be datasets, the newest first."""
    entries = list[tuple[float, str]]()
    for place in (Path(), Path("data")):
        with suppress(OSError):
            for entry in os.scandir(place):
                name = str(place / entry.name)
                with suppress(OSError):
                    if _may_be_data(entry):
                        entries.append((entry.stat().st_mtime, name))
    return [name for _, name in sorted(entries, reverse=True)][:MOST_ENTRIES]


def _may_be_data(entry: os.DirEntry[str]) -> bool:
    path = Path(entry.path)
    if entry.name.startswith(".") or entry.name.lower() in NO_DATA:
        return False
    if entry.is_file():
        is_data = suffix_of(path) in {*DATA, *TABLES, *TEXT}
        return is_data and not path.stem.lower().startswith(NO_DATA_FILES)
    return entry.is_dir() and _holds_data(path)


def _holds_data(folder: Path) -> bool:
    """Whether one of the first files of a folder is data; a model's files are none."""
    if any((folder / name).is_file() for name in (*MODEL_FILES, "pyvenv.cfg")):
        return False
    return any(suffix_of(path) in {*DATA, *TABLES, *TEXT} for path in islice(_files(folder), 200))


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root) / name for name in names)
