"""The datasets that a new run may train on: what files and folders here hold, and for what. Does not import torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from bloomery.data.sources.questions import describes_row, likely_pair, likely_sides
from bloomery.data.sources.sampled_cells import SAMPLED_ROWS, first_rows, longest_cells
from bloomery.plan.dataset_size import sample_rows
from bloomery.recipe.schema import Source

SHOWN_ROWS = 3  # of a table whose columns are to be chosen
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
PURPOSE = {purpose.name: purpose for purpose in PURPOSES}
FORMAT_WORDS = {"parquet": "Parquet", "arrow": "Arrow", "text": "text", "code": "source code"}
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
    is for those that are missing. `columns`: of its first rows, and `texts` those of text. `questions`: the purposes
    for which columns must be chosen, as none of them has a usual name for it, each with its roles and their likeliest
    columns; `likeliest` is the first to ask for. `rows`: the first ones, where columns must be chosen. `problem`,
    `fix`: why no rows can be read as they are.
    """

    path: str
    about: str
    proposed: str = ""
    objective: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    questions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    likeliest: str = ""
    rows: tuple[Mapping[str, object], ...] = ()
    problem: str = ""
    fix: str = ""

    def roles_of(self, purpose: str) -> Mapping[str, str]:
        """The roles whose columns must be chosen for it, each with the likeliest one; none where the names say it."""
        return self.questions.get(purpose or self.proposed or self.likeliest, {})


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
    file = list_files(source, rows=True)[0]
    rows = first_rows(file, source.format, SAMPLED_ROWS)
    cells = longest_cells(rows)
    texts = tuple(name for name, value in cells.items() if isinstance(value, str) and value)
    facts = DataFacts(data, "", columns=tuple(cells), texts=texts)
    try:
        found = peek(source)
    except UserError as error:
        if _is_for(PURPOSE["rewards"], source, None):
            # Prompts without answers are for rewards, unless columns are chosen.
            lacks = {name: lack for name, lack in _LACKS.items() if name != "rewards"}
            facts = replace(facts, proposed="rewards", objective="grpo", lacks=lacks)
        else:
            problem, fix = harmless(error.problem), harmless(error.fix)
            facts = replace(facts, lacks=_LACKS, problem=problem, fix=fix)
        facts = _with_questions(facts, cells, rows)
        # Of rows that no name explains, their number is counted by any of their texts.
        any_text = {"text": texts[-1]} if facts.questions else {}
        return replace(facts, about=_about(source.model_copy(update={"columns": any_text}), None))
    format = None if found is None else found[0]
    lacks = {
        purpose.name: _LACKS[purpose.name]
        for purpose in PURPOSES
        if not _is_for(purpose, source, format)
    }
    proposed = next((purpose.name for purpose in PURPOSES if format in purpose.formats), "text")
    objective = "kto" if format == "kto" else PURPOSE[proposed].objective
    facts = replace(
        facts, about=_about(source, format), proposed=proposed, objective=objective, lacks=lacks
    )
    return _with_questions(facts, cells, rows)


def _with_questions(
    facts: DataFacts, cells: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> DataFacts:
    """With the purposes that the rows are for once columns are chosen."""
    meant = tuple(name for name in facts.texts if not describes_row(name))
    texts = meant if facts.proposed or len(meant) > 1 else facts.texts
    if len(texts) < 2:
        return facts
    prompt, response = likely_sides(texts, cells)
    questions: dict[str, Mapping[str, str]] = {
        "instructions": {"instruction": prompt, "output": response},
        "text": {"text": response},
        "rewards": {"prompt": prompt},
    }
    pair = likely_pair(texts, cells)
    if len(texts) > 2:
        roles = ("prompt", "chosen", "rejected")
        questions["preferences"] = dict(zip(roles, pair or texts, strict=False))
    questions = {name: columns for name, columns in questions.items() if name in facts.lacks}

    # Rows of prompts alone are for rewards, but seldom where another column has a text, too.
    likeliest = ""
    if facts.proposed in ("", "rewards"):
        likeliest = "preferences" if pair else "instructions"
    return replace(
        facts,
        proposed="" if likeliest else facts.proposed,
        objective="" if likeliest else facts.objective,
        questions=questions,
        likeliest=likeliest,
        lacks={name: lack for name, lack in facts.lacks.items() if name not in questions},
        rows=tuple(rows[:SHOWN_ROWS]) if questions else (),
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


def _about(source: Source, format: str | None) -> str:
    """How many rows of which kind, in which files."""
    is_text = format is None
    dataset = open_dataset(source, "any" if is_text else "sft")
    names = sorted({file.format for file in dataset.files})
    if set(names) <= {"text", "code"}:
        kinds = " and ".join({"text": "text", "code": "source"}[name] for name in names)
        return counted(len(dataset.files), f"{kinds} files")
    kinds = " and ".join(FORMAT_WORDS.get(name, name.upper()) for name in names[:2])
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
