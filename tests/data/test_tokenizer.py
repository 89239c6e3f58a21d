"""Nothing is lost, nothing is added, and other people's files cannot take the process down."""

import itertools
import json
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from bloomery.core.errors import UserError
from bloomery.data.sources.builtin import stdlib_files
from bloomery.data.tokenizer import fast_bpe as words
from bloomery.data.tokenizer import training as tokenizer_training
from bloomery.data.tokenizer.fast_bpe import ascii_pattern
from bloomery.data.tokenizer.sentencepiece import PROBES
from bloomery.data.tokenizer.tokenizer import SPECIAL, JsonBackend, Tokenizer, load_tokenizer
from bloomery.data.tokenizer.training import LONGEST_WORD, bounded, train_tokenizer
from bloomery.recipe.schema import TrainTokenizer

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SNIPPETS = [
    "def ",
    "x",
    "\n",
    "\n    ",
    "  ",
    "\t",
    "'s",
    "it's",
    "123",
    "<PR_TITLE>",
    "<s>",
    "</s>",
    "é",
    "世界",
    "\x85",
    "\x1c",
]
SNIPPETS += ["\r\n", "!?", "🎈", "\u200b", "\u2028", "\u3000"]
CODE_LIKE = st.lists(st.sampled_from(SNIPPETS), max_size=30).map("".join)


def code() -> list[str]:
    return [file.path.read_text(encoding="utf-8") for file in stdlib_files()[:60]]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    spec = TrainTokenizer(
        kind=request.param, vocab_size=800, special_tokens=["<PR_TITLE>", "<PR_BODY>"]
    )
    return train_tokenizer(iter(code()[:10]), spec, folder), folder


def test_special_tokens_have_the_ids_of_the_go_coder_guide(trained):
    tokenizer, _ = trained
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, 3)
    assert tokenizer.encode("<PR_TITLE><PR_BODY>") == [4, 5]
    assert tokenizer.vocab_size == 800


@settings(deadline=None, max_examples=80)
@given(text=ANY_TEXT | CODE_LIKE)
def test_any_text_comes_back(trained, text):
    tokenizer, _ = trained
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert b"".join(map(tokenizer.spelled, ids)) == text.encode()
    assert tokenizer.unk_id not in ids
    assert tokenizer.encode_array(text).tolist() == ids


def test_text_cannot_spell_control_tokens(trained):
    tokenizer, _ = trained
    assert not {0, 1, 2, 3} & set(tokenizer.encode("<s>a</s><pad><unk>"))
    assert tokenizer.encode("<s>", special=True) == [1]


def test_auto_tokenizer_opens_what_is_saved(trained):
    transformers = pytest.importorskip("transformers")
    tokenizer, folder = trained
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return '<PR_TITLE>' + x  # größer\n"
    assert library_tokenizer(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert library_tokenizer(text).input_ids == [1, *tokenizer.encode(text)]
    assert library_tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        library_tokenizer.bos_token_id,
        library_tokenizer.eos_token_id,
        library_tokenizer.pad_token_id,
        library_tokenizer.unk_token_id,
    ) == (
        1,
        2,
        3,
        0,
    )


def test_save_and_load_give_the_same_tokenizer(trained, tmp_path):
    tokenizer, folder = trained
    loaded_tokenizer = load_tokenizer(folder)
    loaded_tokenizer.save(tmp_path)
    resaved_tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.hash == loaded_tokenizer.hash == resaved_tokenizer.hash
    assert (
        resaved_tokenizer.bos_id,
        resaved_tokenizer.eos_id,
        resaved_tokenizer.pad_id,
        resaved_tokenizer.unk_id,
    ) == (1, 2, 3, 0)


def test_training_bpe_is_deterministic(tmp_path):
    spec = TrainTokenizer(vocab_size=600)
    first_tokenizer = train_tokenizer(iter(code()[:10]), spec, tmp_path / "a")
    assert first_tokenizer.hash == train_tokenizer(iter(code()[:10]), spec, tmp_path / "b").hash


def test_remembered_words_have_the_ids_of_the_library_on_real_code(trained):
    tokenizer, _ = trained
    for text in code()[::3]:
        assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def with_pattern(folder: Path, pattern: str, normalizer: dict[str, str] | None) -> Tokenizer:
    """The trained tokenizer with another way of cutting words."""
    description = json.loads((folder / "tokenizer.json").read_text())
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    description["normalizer"] = normalizer
    (folder / "other.json").write_text(json.dumps(description))
    return load_tokenizer(folder / "other.json")


@pytest.fixture(scope="module")
def qwen_tokenizer(trained) -> Tokenizer:
    return with_pattern(trained[1], QWEN, {"type": "NFC"})


@settings(deadline=None, max_examples=80)
@given(text=ANY_TEXT | CODE_LIKE)
def test_remembered_words_of_other_patterns_have_the_ids_of_the_library(qwen_tokenizer, text):
    assert qwen_tokenizer.encode_array(text).tolist() == qwen_tokenizer.encode(text)


def test_patterns_without_an_ascii_form_are_left_to_the_library():
    assert ascii_pattern(r" ?\p{L}+") == r" ?[a-zA-Z]+"
    for pattern in (r"\p{Lu}+", r"[[a-z]&&[^b]]", r"\X"):
        with pytest.raises(ValueError, match="no ASCII form"):
            ascii_pattern(pattern)


def path_of_broken_tokenizer(trained, change) -> Path:
    _, folder = trained
    description = json.loads((folder / "tokenizer.json").read_text())
    change(description)
    path = folder / "broken" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(description))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> tuple[Tokenizer, Path]:
    folder = tmp_path_factory.mktemp("bpe")
    return train_tokenizer(iter(code()[:5]), TrainTokenizer(vocab_size=400), folder), folder


BROKEN = {
    "duplicate id": (
        lambda d: d["model"]["vocab"].update({"zzz": 17}),
        "id 17 belongs to two tokens",
    ),
    "huge id": (lambda d: d["model"]["vocab"].update({"zzz": 2**40}), "invalid id"),
    "negative id": (lambda d: d["model"]["vocab"].update({"zzz": -1}), "invalid id"),
    "two ids": (lambda d: d["added_tokens"][0].update(id=9), "has two ids"),
    "merge of nothing": (
        lambda d: d["model"]["merges"].append(["qqq", "zzz"]),
        "not a valid tokenizer",
    ),
    "no model": (lambda d: d.pop("model"), "not a valid tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tokenizer_files_are_refused(bpe, case):
    change, problem = BROKEN[case]
    with pytest.raises(UserError, match=problem):
        load_tokenizer(path_of_broken_tokenizer(bpe, change))


def test_truncated_missing_and_garbage_files_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0')
    with pytest.raises(UserError, match="is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "garbage.model").write_bytes(b"\x00garbage" * 40)
    with pytest.raises(UserError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path / "garbage.model")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"no tokenizer\.json or SentencePiece"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path / "nothing.json")


def test_padding_that_would_abort_the_process_is_dropped(bpe):
    padding = {
        "strategy": {"Fixed": 2**40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path = path_of_broken_tokenizer(bpe, lambda d: d.update(padding=padding, truncation=truncation))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("import sys\n") == bpe[0].encode("import sys\n")
    assert tokenizer.hash == bpe[0].hash


def test_a_panic_of_the_library_is_a_user_error(bpe):
    """A pattern that backtracks without end makes the library raise PanicException, which is no Exception."""
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    path = path_of_broken_tokenizer(
        bpe, lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [pattern]})
    )
    tokenizer = load_tokenizer(path)
    with pytest.raises(UserError, match="the tokenizer failed on a text"):
        tokenizer.encode("a" * 5000 + "b")


def test_vocabulary_smaller_than_bytes_is_refused(tmp_path):
    with pytest.raises(UserError, match="below 260"):
        train_tokenizer(iter(["a"]), TrainTokenizer(vocab_size=100), tmp_path)


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sp")
    (folder / "text.txt").write_text(
        "\n".join(line for text in code()[:8] for line in text.splitlines() if line.strip())
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=600,
        byte_fallback=True,
        minloglevel=2,
    )
    return folder / "m.model"


def test_pieces_spell_the_bytes_of_a_text(piece_model):
    tokenizer = load_tokenizer(piece_model)
    for text in ("größer 世界 🎈", "two  spaces "):
        token_bytes = [tokenizer.spelled(token) for token in tokenizer.encode(text)]
        # SentencePiece writes a space before a text, and one for several.
        assert b"".join(token_bytes).decode() == " " + " ".join(text.split())
    balloon_bytes = [tokenizer.spelled(token) for token in tokenizer.encode("🎈")]
    assert [len(part) for part in balloon_bytes[-4:]] == [1, 1, 1, 1]


def test_ids_of_a_sentencepiece_model_are_those_of_its_library(piece_model, tmp_path):
    import sentencepiece

    processor, tokenizer = (
        sentencepiece.SentencePieceProcessor(model_file=str(piece_model)),
        load_tokenizer(piece_model),
    )
    for text in [*code()[:4], "größer 世界 🎈", "", "  two  spaces "]:
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.encode_array(text).tolist() == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == processor.decode(processor.encode(text))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.pad_id) == (
        1,
        2,
        0,
        None,
    )
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).hash == tokenizer.hash


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("remove_spaces", [True, False])
def test_auto_tokenizer_cuts_like_sentencepiece(tmp_path, kind, rule, remove_spaces):
    sentencepiece, transformers = (
        pytest.importorskip("sentencepiece"),
        pytest.importorskip("transformers"),
    )
    (tmp_path / "text.txt").write_text(
        "\n".join(line for text in code()[:8] for line in text.splitlines() if line.strip())
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=450,
        byte_fallback=True,
        minloglevel=2,
        model_type=kind,
        normalization_rule_name=rule,
        remove_extra_whitespaces=remove_spaces,
        user_defined_symbols=["<PR_TITLE>"],
    )
    tokenizer = load_tokenizer(tmp_path / "m.model")
    tokenizer.save(tmp_path / "out")
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*code()[:4], *PROBES]:
        plain = text.replace("<s>", "")  # transformers reads control tokens out of a text
        assert library_tokenizer(plain, add_special_tokens=False).input_ids == tokenizer.encode(
            plain
        )
    assert (library_tokenizer.bos_token_id, library_tokenizer.eos_token_id) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
    )


def test_ordinary_text_is_trained_on_whole():
    texts = [
        *code(),
        "ein Wort " + "a" * (LONGEST_WORD - 1),
        "=" * 900 + " " * 900,
        "\n\n  x" * 3000,
    ]
    assert [list(bounded(text)) for text in texts] == [[text] for text in texts]


@pytest.mark.parametrize(
    "word", ["acgt" * 2000, " " * 5000, "\n" * 5000, "の" * 3000, "=" * 4000, "é" * 1025]
)
def test_long_words_are_cut_and_nothing_is_lost(word):
    text = f"before it\n{word}\nand after it " * 3
    pieces = list(bounded(text))
    assert "".join(pieces) == text
    assert (
        max(
            len(word_of_piece)
            for piece in pieces
            for word_of_piece, _ in WORDS.pre_tokenize_str(piece)
        )
        <= 4 * LONGEST_WORD
    )


def test_a_child_trains_the_same_tokenizer(tmp_path, monkeypatch):
    spec, progress_reports = TrainTokenizer(vocab_size=400), []
    tokenizer = train_tokenizer(iter(code()[:5]), spec, tmp_path / "a")
    monkeypatch.setitem(tokenizer_training._AT_ONCE, "bpe", 100)
    tokenizer_of_child = train_tokenizer(
        iter(code()[:5]),
        spec,
        tmp_path / "b",
        lambda progress, total: progress_reports.append((progress, total)),
    )
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (
        tmp_path / "b/tokenizer.json"
    ).read_bytes()
    assert tokenizer.hash == tokenizer_of_child.hash and progress_reports


def test_an_interrupted_training_ends_its_child(tmp_path, monkeypatch):
    monkeypatch.setitem(tokenizer_training._AT_ONCE, "bpe", 100)
    dna = random.Random(1).randbytes(2_000_000).translate(b"acgt" * 64).decode()

    def interrupted(progress: float, total: float) -> None:
        raise KeyboardInterrupt

    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    children_before = children.read_text().split() if children.exists() else []
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(iter([dna]), TrainTokenizer(), tmp_path, interrupted)
    assert time.monotonic() - started < 10 and not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError):  # of a text that cannot be read
        train_tokenizer((str(1 // (5 - n)) * 100 for n in range(9)), TrainTokenizer(), tmp_path)
    assert not children.exists() or set(children.read_text().split()) <= set(children_before)


@pytest.mark.parametrize("text", ["a" * 900_000, "\n" * 900_000], ids=["letters", "newlines"])
def test_one_word_of_a_megabyte_takes_no_longer_than_other_text(tmp_path, text):
    started_seconds = time.process_time() + sum(os.times()[2:4])
    train_tokenizer(iter([text]), TrainTokenizer(vocab_size=300), tmp_path)
    # uncut it was 26 s for a third of it
    assert time.process_time() + sum(os.times()[2:4]) - started_seconds < 8


LATER_PATTERNS = [words._LATER % "", words._LATER % "{1,3}", words.GPT2_PATTERN]


@pytest.fixture(scope="module")
def later_tokenizers(trained) -> dict[str, Tokenizer]:
    """The same merges behind the expressions of later models, and behind none that is known."""
    tokenizers = {}
    for number, pattern in enumerate([*LATER_PATTERNS, r"\p{L}+|\s|[^\p{L}\s]+"]):
        description = json.loads((trained[1] / "tokenizer.json").read_text())
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        steps = [
            split,
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ]
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        tokenizers[pattern] = Tokenizer(JsonBackend(description, str(number), set(SPECIAL)), {})
    return tokenizers


@pytest.mark.parametrize("pattern", LATER_PATTERNS)
@given(
    st.lists(
        st.sampled_from([*SNIPPETS, *["日本", "。", "é", " 's", "7", "\r\n", "\u00a0", "\u0301"]]),
        min_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_text_in_pieces_has_the_ids_of_the_whole(later_tokenizers, pattern, snippets):
    text, tokenizer = "".join(snippets), later_tokenizers[pattern]
    ends = words.word_ends(tokenizer._backend.description)
    assert ends is not None
    cuts = [0, *(match.start() for match in ends.finditer(text)), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
    ids = tokenizer.encode(text)
    assert [index for piece in pieces for index in tokenizer.encode(piece)] == ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "PIECE", 7)
        assert tokenizer.encode(text) == tokenizer.encode_array(text).tolist() == ids


def test_long_text_is_encoded_in_little_memory_or_refused(trained, later_tokenizers, monkeypatch):
    monkeypatch.setattr(words, "PIECE", 10_000)
    monkeypatch.setattr(words, "LONGEST_PIECE", 40_000)
    tokenizer, _ = trained
    for unit, ends in (
        ("a line of it\n", True),
        ("日本語のテキスト。\n", True),
        ("é ", True),
        ("x = [1];", False),
    ):
        text = unit * 20_000
        sizes = [len(piece.encode()) for piece in words.pieces(text, tokenizer._ends)]
        assert not ends or max(sizes) <= 40_000
        assert tokenizer.too_long(text) is None
        text_part = text[:100_000]
        assert (
            tokenizer.encode_array(text_part).tolist()
            == tokenizer._backend.encode_batch([text_part], special=False)[0]
        )
    for text in ("a" * 50_000, "日" * 50_000, "é" * 30_000 + " ok"):
        with pytest.raises(UserError, match="in one piece"):
            tokenizer.encode_array(text)
        assert "in one piece" in tokenizer.too_long(text).problem
        with pytest.raises(UserError, match="in one piece"):
            tokenizer.encode(text)
    tokenizer_of_unknown_pattern = later_tokenizers[r"\p{L}+|\s|[^\p{L}\s]+"]
    assert (
        tokenizer_of_unknown_pattern._ends is None
        and tokenizer_of_unknown_pattern.too_long("é b " * 20_000) is not None
    )
    remembers_words = tokenizer_of_unknown_pattern._fast is not None  # BPE, word by word
    assert (tokenizer_of_unknown_pattern.too_long("a b " * 20_000) is None) is remembers_words
    monkeypatch.setattr(words, "LONGEST_PLACED", 40_000)
    with pytest.raises(UserError, match="in one piece"):
        tokenizer.encode_places(["a b " * 20_000])
