"""A model with the tokens of a dataset says the same about it as before."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer, load_tokenizer
from bloomery.export.vocabulary import cut, export_cut, made_of
from bloomery.model.io.weights import load_decoder
from models_for_tests import TEXT, make_model, make_tokenizer

WORDS = "def f(x):\n    return x + 1\n"


def test_a_token_is_made_as_the_library_makes_it() -> None:
    merges = [("a", "b"), ("c", "d"), ("ab", "c"), ("b", "c"), ("ab", "cd"), ("a", "bc")]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    assert made_of("abcd", ranks) == {"a", "b", "c", "d", "ab", "cd", "abcd"}
    assert made_of("abc", ranks) == {"a", "b", "c", "ab", "abc"}, "bc comes after ab"
    assert made_of("ax", ranks) == {"a", "x"}


def test_texts_of_the_dataset_keep_their_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    used = set(tokenizer.encode(WORDS))
    smaller, old = cut(tokenizer, used)
    assert [old[index] for index in smaller.encode(WORDS)] == tokenizer.encode(WORDS)
    assert smaller.vocab_size == len(old) < tokenizer.vocab_size and used <= set(old)
    assert {smaller.id_of(token) for token in ("<s>", "</s>", "<pad>", "<unk>")} == set(range(4))
    for text in TEXT[:2]:
        assert smaller.decode(smaller.encode(text)) == text
    assert [old[index] for index in smaller.encode("<s>x", special=True)] == tokenizer.encode(
        "<s>x", special=True
    )


def test_every_text_of_real_merges_keeps_its_tokens(tmp_path: Path) -> None:
    """All words of a larger tokenizer, each by itself, and pairs of equal neighbors."""
    texts = [*TEXT[:2], "aaaa aaa aa", "return return", "xx + 11 = 1111"]
    tokenizer = make_tokenizer(tmp_path)
    for text in texts:
        smaller, old = cut(tokenizer, set(tokenizer.encode(text)))
        assert [old[index] for index in smaller.encode(text)] == tokenizer.encode(text)


def test_a_unigram_vocabulary_is_cut() -> None:
    pieces = [
        ("<unk>", 0.0),
        ("▁a", -1.0),
        ("b", -2.0),
        ("ab", -1.5),
        ("▁", -3.0),
        ("a", -3.5),
        ("zz", -2.0),
    ]
    library = Library(models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = Tokenizer(JsonBackend(json.loads(library.to_str()), "here", set()), {})
    smaller, old = cut(tokenizer, set(tokenizer.encode("a ab")))
    assert [old[index] for index in smaller.encode("a ab")] == tokenizer.encode("a ab")
    assert 6 not in old and smaller.description["model"]["unk_id"] == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_smaller_model_computes_the_same(tmp_path: Path, family: str) -> None:
    source, data = make_model(tmp_path / "source", family), tmp_path / "data.txt"
    data.write_text(WORDS)
    done = export_cut(source, data, tmp_path / "out")
    before, after = load_tokenizer(source), load_tokenizer(done.folder)
    config = json.loads((done.folder / "config.json").read_text())
    assert config["vocab_size"] == after.vocab_size < before.vocab_size
    assert done.proofs[0].startswith(f"{after.vocab_size:,} of")
    _, old = cut(before, set(before.encode(WORDS)))
    tokens, again = torch.tensor([before.encode(WORDS)]), torch.tensor([after.encode(WORDS)])
    with torch.no_grad():
        expected = load_decoder(source)(tokens)[..., old]
        torch.testing.assert_close(load_decoder(done.folder)(again), expected, atol=1e-5, rtol=0)
        theirs = AutoModelForCausalLM.from_pretrained(
            done.folder, attn_implementation="eager"
        ).eval()
        torch.testing.assert_close(theirs(again).logits, expected, atol=1e-4, rtol=0)
    assert (
        AutoTokenizer.from_pretrained(done.folder)(WORDS, add_special_tokens=False).input_ids
        == again[0].tolist()
    )
    embedding = "model.embed_tokens.weight" if family == "llama" else "transformer.wte.weight"
    whole, part = (
        load_file(folder / "model.safetensors")[embedding] for folder in (source, done.folder)
    )
    assert part.equal(whole[old])
    assert (
        json.loads((done.folder / "generation_config.json").read_text())["eos_token_id"]
        == after.eos_id
    )


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = Tokenizer(JsonBackend(json.loads(library.to_str()), "here", set()), {})
    with pytest.raises(UserError, match="cannot be cut"):
        cut(tokenizer, {1})
