"""Splits that the names of files and folders state: train, validation and test. Evaluation splits are never trained on.

As in datasets of the Hub: `train.jsonl`, `data/test-00000-of-00002.parquet`, `validation/part1.jsonl`, `chats_val.csv`.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from bloomery.core.errors import UserError

Kind = Literal["train", "validation", "test"]
_VALIDATION = ("validation", "valid", "val", "dev", "eval", "evaluation")  # the likeliest first
_WORDS: dict[str, Kind] = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(_VALIDATION, "validation"),
    "test": "test",
    "testing": "test",
}
_ANY = re.compile("|".join(_WORDS), re.IGNORECASE)
# How datasets of the Hub number the files of a split.
_SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?(?=\.)")


@dataclass(frozen=True)
class FileSplit:
    """The split of one file. `plain`: its name, or that of its folder, is the word alone, as in `test.jsonl`; other
    names, such as `test_cases.jsonl`, count only next to the files that they were split from (`rest`: the other words).
    """

    name: str
    kind: Kind
    plain: bool
    rest: str = ""


def stem_of(name: str) -> str:
    """The name of a file without folder, shard number and suffixes: "train" of data/train-00000-of-00002.parquet."""
    return _SHARD.sub("", PurePath(name).name).partition(".")[0]


def is_sharded(name: str) -> bool:
    return "-of-" in name and _SHARD.search(PurePath(name).name) is not None


def split_of(name: str) -> FileSplit | None:
    """The split that the path of a file below its dataset states; None without one. The file's own name counts before
    those of its folders, and a name that is the word alone before one that only holds it.
    """
    if _ANY.search(name) is None:  # of most files in a large folder
        return None
    parts = [stem_of(name), *reversed(PurePath(name).parts[:-1])]
    splits = [split for part in parts if (split := _split_in(part)) is not None]
    return next((split for split in splits if split.plain), splits[0] if splits else None)


def _split_in(part: str) -> FileSplit | None:
    terms = re.findall("[a-z]+", part.lower())
    if len(terms) == 1 and terms[0] in _WORDS:
        return FileSplit(terms[0], _WORDS[terms[0]], plain=True)
    if terms and terms[0] in _WORDS:  # test_prefs, validation-matched: splits of their own
        return FileSplit(part, _WORDS[terms[0]], plain=False, rest=" ".join(terms[1:]))
    if terms and terms[-1] in _WORDS:
        return FileSplit(terms[-1], _WORDS[terms[-1]], plain=False, rest=" ".join(terms[:-1]))
    return None


@dataclass(frozen=True)
class Division:
    """The files of a dataset to train on, and the others by the name of their split."""

    train: list[str]
    others: dict[str, list[str]]


def divide(
    names: Sequence[str], *, texts: Collection[str], where: str, by_glob: bool = False
) -> Division:
    """The splits among data files of one dataset. `texts`: those that are plain texts, whose names count only where one
    of them is called train. `by_glob`: a glob named these files.

    Names alone never empty a dataset: files of one evaluation split, without others, are trained on, as they were
    asked for. Raises UserError for several evaluation splits alone, and for several splits of which none is train.
    """
    splits = {name: split for name in names if (split := split_of(name)) is not None}
    if not any(split.kind == "train" for name, split in splits.items() if name in texts):
        splits = {name: split for name, split in splits.items() if name not in texts}
    named_train = any(split.kind == "train" for split in splits.values())
    joined = any(not split.plain for split in splits.values())
    stems = (
        {" ".join(re.findall("[a-z]+", stem_of(name).lower())) for name in names}
        if joined
        else set[str]()
    )
    other_splits = {
        name: split.name
        for name, split in splits.items()
        if split.kind != "train" and (split.plain or named_train or split.rest in stems)
    }
    train = [name for name in names if name not in other_splits]
    if not train:
        evaluated = sorted(set(other_splits.values()))
        if len(evaluated) > 1:
            problem = f"no file to train on: all are of evaluation splits ({', '.join(evaluated)})"
            fix = f'to train on one of them, name it: data.glob="*{evaluated[0]}*"'
            raise UserError(problem, where=f"data.path: {where}", fix=fix)
        return Division(list(names), {})
    if not by_glob:
        train, extra = _main_split(train, other_splits, where)
        other_splits |= extra
    others_by_split: dict[str, list[str]] = {}
    for name in names:
        if name in other_splits:
            others_by_split.setdefault(other_splits[name], []).append(name)
    return Division(train, others_by_split)


def _main_split(
    train: list[str], other_splits: dict[str, str], where: str
) -> tuple[list[str], dict[str, str]]:
    """Of sharded files, those of the split called train, and the other splits. Raises UserError where several splits
    are next to an evaluation split, and none is called train.
    """
    sharded = {name: stem_of(name) for name in train if is_sharded(name)}
    if any("train" in name and stem_of(name) == "train" for name in train):
        extra = {name: stem for name, stem in sharded.items() if stem != "train"}
        return [name for name in train if name not in extra], extra
    candidates = sorted(set(sharded.values()))
    if other_splits and len(candidates) > 1 and len(sharded) == len(train):
        every = sorted({*candidates, *other_splits.values()})
        problem = f"none of its splits is called train: {', '.join(every)}"
        likeliest = [name for name in candidates if name.startswith("train")] or candidates
        raise UserError(problem, where=f"data.path: {where}", fix=_named_splits(likeliest))
    return train, {}


# What ends the name of a split for one kind of objective, as in ultrachat_200k and ultrafeedback_binarized.
_OBJECTIVES = {"sft": "sft", "prefs": "dpo and other pairs", "gen": "prompts: grpo"}


def _named_splits(splits: Sequence[str]) -> str:
    """The fix that names splits, those with a known kind of objective first, each with it."""
    kinds = {split: _OBJECTIVES.get(split.rpartition("_")[2], "") for split in splits}
    known = [split for kind in _OBJECTIVES.values() for split in splits if kinds[split] == kind]
    globs = [f'data.glob="{split}-*" ({kinds[split]})' for split in known]
    return "name one: " + (" or ".join(globs) or f'data.glob="{splits[0]}-*"')


def validation_split(splits: Iterable[str]) -> str | None:
    """The name of the validation split among a dataset's splits; "test" is not one."""
    begins = {split: re.split(r"[_.-]", split)[0] for split in sorted(splits)}
    ranked = [
        split
        for usual_name in _VALIDATION
        for split in (usual_name, *begins)
        if begins.get(split) == usual_name
    ]
    return ranked[0] if ranked else None
