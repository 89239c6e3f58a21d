"""One text under two tokenizers: spans have the same bytes under both, none could be shorter, and none is left out."""

import json

import pytest
from chat_tokenizers import ours
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.alignment import (
    Span,
    aligned_spans,
    continuing_ids,
    text_of,
    token_ends,
)
from bloomery.data.tokenizer.templates import find_template
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer
from bloomery.train.rl.teacher_texts import teacher_texts

TEXTS = st.lists(
    st.sampled_from(
        ["the ", "quick", " fox", "\n", "\n\n", "  ", "ü", "世界", "🎈", "x", "0", "."]
    ),
    max_size=12,
).map("".join)


def bytes_of(tokenizer, ids) -> bytes:
    return b"".join(map(tokenizer.spelled, ids))


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_a_text_behind_another_one_is_spelled_without_a_space_before_it(text):
    for kind in ("bytes", "pieces"):
        tokenizer = ours(kind)
        ids = continuing_ids(tokenizer, text)
        assert bytes_of(tokenizer, ids) == text.encode()
        # So it is behind all that no merge joins it with.
        for before in ("fox\n", "1", "x.", "z"):
            before_ids = tokenizer.encode(before)
            joined_ids = tokenizer.encode(before + text)
            if joined_ids[: len(before_ids)] == before_ids:
                assert joined_ids == [*before_ids, *ids]


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_spans_are_all_common_borders(text):
    first, second = ours("bytes"), ours("pieces")
    ids, other_ids = continuing_ids(first, text), continuing_ids(second, text)
    ends, other_ends = token_ends(first, ids), token_ends(second, other_ids)
    spans = aligned_spans(ends, other_ends)
    common = sorted(set(ends) & set(other_ends))
    assert [ends[span.end - 1] for span in spans] == common
    assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
    for span in spans:
        here = bytes_of(first, ids[span.start : span.end])
        assert here == bytes_of(second, other_ids[span.other_start : span.other_end]) != b""


def test_characters_that_both_split_are_joined():
    first, second = ours("bytes"), ours("pieces")
    ids, other_ids = continuing_ids(first, "世x"), continuing_ids(second, "世x")
    spans = aligned_spans(token_ends(first, ids), token_ends(second, other_ids))
    assert spans[-1] == Span(3, 4, 3, 4)  # three bytes, one by one under both, and a letter
    assert [span.end for span in spans] == [1, 2, 3, 4]


def test_a_text_ends_at_control_tokens_and_at_bytes_that_are_none():
    tokenizer = ours("bytes")
    the, end = tokenizer.encode("the"), tokenizer.id_of("<|im_end|>")
    assert text_of(tokenizer, [*the, end, *the]) == "the"
    (first_byte, *_) = tokenizer.encode("世")
    assert text_of(tokenizer, [*the, first_byte]) == "the"
    assert text_of(tokenizer, [*the, first_byte, *the]) == "the"
    assert text_of(tokenizer, [*the, 10_000]) == "the"  # a row of the embedding without a token


@pytest.mark.parametrize(("text", "spelled"), [("abc", "abc"), ("abe\u0301c", "ab"), ("", "")])
def test_a_normalization_ends_what_both_read(text, spelled):
    """e and an accent become one letter."""
    letters = {letter: number for number, letter in enumerate("abc\u00e9e\u0301\n")}
    library = Library(models.BPE(vocab=letters, merges=[]))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Fuse()
    tokenizer = Tokenizer(JsonBackend(json.loads(library.to_str()), "t", set()), {})
    assert bytes_of(tokenizer, continuing_ids(tokenizer, text)).decode() == spelled


def with_runs_of_spaces() -> Tokenizer:
    """As Gemma's: pieces of SentencePiece, with runs of its spaces and a control token among the added tokens."""
    pieces = [*"ab\u2581x0.\n", "\u2581\u2581", "\u2581\u2581\u2581"]
    library = Library(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("\u2581", "\u2581"), ("\u2581\u2581", "\u2581")],
        )
    )
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    library.add_tokens([AddedToken(piece, normalized=False) for piece in pieces[-2:]])
    library.add_special_tokens([AddedToken("<ab>", special=True)])
    return Tokenizer(JsonBackend(json.loads(library.to_str()), "t", set()), {})


def test_spaces_among_the_added_tokens_are_spaces():
    tokenizer = with_runs_of_spaces()
    text = "a   b  a"
    ids = continuing_ids(tokenizer, text)
    assert len(ids) == 5
    assert bytes_of(tokenizer, ids) == tokenizer.decode(ids).encode() == text.encode()
    assert tokenizer.token_bytes()[ids].tolist() == [1, 3, 1, 2, 1]
    assert text_of(tokenizer, ids) == text


def test_a_control_token_that_a_text_spells_out_ends_what_both_read():
    """The student's letters would be the end of a turn to the teacher."""
    tokenizer = with_runs_of_spaces()
    assert bytes_of(tokenizer, continuing_ids(tokenizer, "ab <ab> a")) == b"ab "


# Templates

CHATS = {
    "pieces, llama2": ("pieces", "llama2", "</s>"),
    "bytes, chatml": ("bytes", "chatml", "<|im_end|>"),
    "bytes, llama3": ("bytes", "llama3", "<|eot_id|>"),
}


@pytest.mark.parametrize("teacher", CHATS)
@pytest.mark.parametrize("student", CHATS)
def test_answers_begin_and_end_as_each_template_has_them(student, teacher):
    """Llama 2 writes a space before an answer, which is a part of its first token."""
    both = [
        ours(kind, find_template(template, {}).text, eos=end)
        for kind, template, end in (CHATS[student], CHATS[teacher])
    ]
    stop = both[0].id_of(CHATS[student][2])
    texts = teacher_texts(*both, turns=True, stop_ids=(stop,))
    space = " " if "llama2" in student else ""
    ids = [*continuing_ids(both[0], f"{space}the quick 世 fox"), stop]
    completion = texts.read(ids, room=99)
    teacher_space = " " if "llama2" in teacher else ""
    spelled = b"".join(map(both[1].spelled, completion.ids)).decode()
    assert spelled == f"{teacher_space}the quick 世 fox{CHATS[teacher][2]}"
    assert completion.spans[0].start == completion.spans[0].other_start == 0
    assert completion.spans[-1].end == len(ids)
    assert completion.spans[-1].other_end == len(completion.ids)


def test_a_teacher_of_conversations_has_a_template():
    with pytest.raises(UserError, match="no chat template"):
        teacher_texts(
            ours("bytes", find_template("chatml", {}).text), ours("pieces"), turns=True, stop_ids=()
        )
