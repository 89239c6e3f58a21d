"""What `prepare --check` finds, each in a split that was made to have it."""

from pathlib import Path

import pytest
from structured import Text, write_structured

from bloomery.data.prepare.kinds import missing_markup
from bloomery.data.prepare.stats import DatasetCheck, check_dataset
from bloomery.data.shards import FileRecord, Manifest
from bloomery.data.tokenizer.templates import builtin_template
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from models_for_tests import make_tokenizer

BOS, EOS = 1, 2


def text(*tokens: int, loss_mask: int = 1) -> Text:
    return [(token, position >= len(tokens) - loss_mask) for position, token in enumerate(tokens)]


GOOD = text(BOS, 50, 51, EOS, loss_mask=2)


def check_of(
    folder: Path, texts: list[Text], kind: str = "chat", length: int = 32, marks=None, **ids
) -> DatasetCheck:
    split = write_structured(folder, [texts], kind, marks=marks)
    tokenizer = make_tokenizer(folder)
    empty_record = split.record.model_copy(update={"tokens": 0, "documents": 0, "parts": ()})
    special_ids = {"bos_id": BOS, "eos_id": EOS, "pad_id": 3, **ids}
    manifest = Manifest(
        recipe="r",
        identity="i",
        tokenizer_hash=tokenizer.hash,
        vocab_size=320,
        unk_id=0,
        kind=kind,
        dtype="uint16",
        shard_tokens=7,
        sources=(),
        train=split.record,
        validation=empty_record,
        **special_ids,
    )
    assert isinstance(manifest.train.bounds, FileRecord)
    return check_dataset(folder, manifest, tokenizer, sequence_length=length, layout="packed")


def test_a_small_dataset_without_a_validation_set_is_warned_of(tmp_path):
    check = check_of(tmp_path, [GOOD, text(BOS, 60, EOS)])
    assert check.warnings == (
        "no validation set: overfitting cannot be detected",
        "only 2 rows to train on: the model will memorize them; use a few hundred or more",
    )
    assert (check.units, check.duplicates, check.double_bos, check.missing_eos) == (2, 0, 0, 0)
    assert check.lengths == ((4, 2),)


@pytest.mark.parametrize(
    ("faulty_text", "warning_text"),
    [
        (text(BOS, BOS, 50, EOS), "with two BOS tokens (id 1)"),
        (text(BOS, 50, 51), "1 of 2 responses have no end token"),
        (text(BOS, 50, 51, loss_mask=0), "left out: 1 conversation with all labels masked; see"),
        (text(BOS, *range(50, 90), EOS), "left out: 1 conversation with all labels within"),
        (
            text(BOS, 50, *range(60, 99), EOS, loss_mask=40),
            "of the tokens are truncated: raise data.sequence_length",
        ),
        (GOOD, "50% of the conversations are exact duplicates"),
    ],
)
def test_each_fault_has_one_warning(tmp_path, faulty_text, warning_text):
    check = check_of(tmp_path, [GOOD, faulty_text])
    assert len([warning for warning in check.warnings if warning_text in warning]) == 1, (
        check.warnings
    )


def test_an_end_token_that_is_also_padding_is_warned_of(tmp_path):
    assert any(
        "is also the padding token" in warning
        for warning in check_of(tmp_path, [GOOD], pad_id=EOS).warnings
    )


def test_pairs_are_counted_as_pairs(tmp_path):
    other_text = text(BOS, 50, 52, EOS, loss_mask=2)
    check = check_of(tmp_path, [GOOD, other_text, GOOD, other_text, other_text, GOOD], "pairs")
    assert (check.units, check.duplicates) == (3, 1)


def test_markup_that_is_no_token_is_named(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert missing_markup(tokenizer, "chatml") == ["<|im_start|>", "<|im_end|>"]
    assert missing_markup(tokenizer, None) == []
    gemma_tokenizer = Tokenizer(
        tokenizer._backend, {**tokenizer.config, "chat_template": builtin_template("gemma")}
    )
    assert missing_markup(gemma_tokenizer, None) == ["<start_of_turn>", "<end_of_turn>"]


@pytest.mark.parametrize(
    ("marks", "warning_text"),
    [
        ([1, 1, 1, 1], "labeled desirable"),
        ([0, 0, 0, 0], "labeled undesirable"),
        ([1, 1, 0, 0], ""),
    ],
)
def test_answers_that_are_all_marked_alike(tmp_path, marks, warning_text):
    check = check_of(tmp_path, [GOOD, GOOD, text(BOS, 60, EOS), GOOD], "kto", marks=marks)
    assert [
        warning_text in warning for warning in check.warnings if "every response is" in warning
    ] == ([True] if warning_text else [])
