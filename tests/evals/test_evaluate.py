"""What `eval` says, against sums by hand over every logit."""

import json
import math

import numpy as np
import pytest
import torch

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.training import train_tokenizer
from bloomery.evals.evaluate import TokenizedText, evaluate, evaluate_texts, read_texts
from bloomery.facts.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.recipe.schema import TrainTokenizer

PROSE = "The quick brown fox jumps over the lazy dog; naïve café, 日本語.\n" * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    spec = TrainTokenizer(vocab_size=300)
    return train_tokenizer(iter([PROSE] * 3), spec, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def decoder(tokenizer):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=512,
    )
    torch.manual_seed(0)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def nats_by_hand(decoder, ids):
    with torch.no_grad():
        logits = decoder(torch.tensor([ids[:-1]])).head[0].double()
    return -torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].sum().item()


def file_of(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_is_one_document_and_every_token_is_scored(decoder, tokenizer, tmp_path):
    path = file_of(tmp_path, "a.txt", PROSE)
    result, notes = evaluate(decoder, tokenizer, path)
    ids = tokenizer.encode(PROSE)
    nats = nats_by_hand(decoder, [tokenizer.bos_id, *ids])
    assert result.tokens == len(ids) and result.bytes == len(PROSE.encode()) and notes == []
    assert math.isclose(result.loss, nats / len(ids), rel_tol=1e-5)
    assert math.isclose(result.perplexity, math.exp(nats / len(ids)), rel_tol=1e-4)
    assert math.isclose(
        result.bits_per_byte, nats / math.log(2) / len(PROSE.encode()), rel_tol=1e-5
    )


def test_without_bos_the_first_token_and_its_bytes_are_left_out(decoder, tokenizer, tmp_path):
    result, _ = evaluate(decoder, tokenizer, file_of(tmp_path, "a.txt", PROSE), bos=False)
    ids = tokenizer.encode(PROSE)
    assert result.tokens == len(ids) - 1
    assert result.bytes == len(PROSE.encode()) - len(tokenizer.decode(ids[:1]).encode())
    assert math.isclose(result.loss, nats_by_hand(decoder, ids) / (len(ids) - 1), rel_tol=1e-5)


def test_a_long_text_says_that_it_was_scored_in_windows(decoder, tokenizer, tmp_path):
    path = file_of(tmp_path, "long.txt", PROSE * 40)
    result, notes = evaluate(decoder, tokenizer, path)
    assert result.tokens == len(tokenizer.encode(PROSE * 40)) > 512
    assert (
        "longer than the context of 512 tokens and scored in half-overlapping windows" in notes[0]
    )


def test_the_mean_is_over_tokens_not_over_documents(decoder, tokenizer, tmp_path):
    """And not the Go coder guide's `mean loss x batch / tokens`, which divides by the length twice."""
    rows = ["ab", PROSE * 2]
    path = file_of(
        tmp_path, "rows.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows)
    )
    result, _ = evaluate(decoder, tokenizer, path)
    documents = [[tokenizer.bos_id, *tokenizer.encode(row)] for row in rows]
    sums = [nats_by_hand(decoder, ids) for ids in documents]
    counts = [len(ids) - 1 for ids in documents]
    assert math.isclose(result.loss, sum(sums) / sum(counts), rel_tol=1e-5)
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    guide = sum(mean * 1 for mean in means) / sum(len(ids) for ids in documents)
    assert math.exp(guide) < 1.5 < result.perplexity
    assert not math.isclose(sum(means) / 2, result.loss, rel_tol=1e-3)


def test_folders_globs_and_single_files_are_the_same_text(decoder, tokenizer, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("one\n\ntwo\n" + name)
    (folder / "c.py").write_text("x = 1\n")
    whole, _ = evaluate(decoder, tokenizer, folder)
    texts, _ = evaluate(decoder, tokenizer, folder / "*.txt")
    first, _ = evaluate(decoder, tokenizer, folder / "a.txt")
    code, _ = evaluate(decoder, tokenizer, folder / "c.py")
    assert texts.tokens == 2 * first.tokens and whole.tokens == texts.tokens + code.tokens
    assert whole.bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_the_bytes_of_an_unprintable_text_are_its_own(decoder, tokenizer, tmp_path):
    text = "🙂\x01é\r\n\t"
    path = tmp_path / "b.txt"
    path.write_bytes(text.encode())
    result, _ = evaluate(decoder, tokenizer, path)
    assert (
        result.bytes
        == len(text.encode())
        == int(tokenizer.token_bytes()[tokenizer.encode(text)].sum())
    )


@pytest.mark.parametrize("text", ["", "a"])
def test_nothing_to_score_is_one_sentence(decoder, tokenizer, tmp_path, text):
    with pytest.raises(UserError):
        evaluate(decoder, tokenizer, file_of(tmp_path, "empty.txt", text), bos=False)


def test_a_missing_file_is_one_sentence(decoder, tokenizer, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        evaluate(decoder, tokenizer, tmp_path / "nowhere.txt")


def test_damaged_weights_are_no_number(decoder, tokenizer):
    config = decoder.config
    broken = Decoder(config)
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.fill_(math.nan)
    with pytest.raises(UserError, match="not a finite number"):
        evaluate_texts(broken, [TokenizedText([1, 2, 3], 3)], where="x")


def test_tokens_that_somebody_else_made_are_scored_as_they_are(decoder, tokenizer, tmp_path):
    ids = tokenizer.encode(PROSE)
    path = file_of(tmp_path, "rows.jsonl", json.dumps({"input_ids": ids}) + "\n")
    (text,) = read_texts(path, tokenizer)
    assert text.tokens == [tokenizer.bos_id, *ids] and text.bytes == len(PROSE.encode())
    assert np.isclose(
        evaluate(decoder, tokenizer, path)[0].loss, nats_by_hand(decoder, text.tokens) / len(ids)
    )


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA:\n{% else %}{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)


def chat_by_hand(decoder, tokenizer, turns):
    """Nats, tokens and bytes of the answers, each with its end token, after all that stands before it."""
    ids, nats, tokens, size = [], 0.0, 0, 0
    for question, answer in turns:
        ids += tokenizer.encode(f"Q: {question}\nA:\n")
        learned = [*tokenizer.encode(answer), tokenizer.eos_id]
        nats += nats_by_hand(decoder, ids + learned) - nats_by_hand(decoder, ids)
        ids, tokens, size = ids + learned, tokens + len(learned), size + len(answer.encode())
    return nats, tokens, size


def test_of_conversations_the_answers_are_scored(decoder, tokenizer, tmp_path):
    talks = [[("the dog", "jumps."), ("fox?", "naïve")], [("brown", "lazy")]]
    roles = ("user", "assistant")
    said = [[turn for pair in talk for turn in zip(roles, pair, strict=True)] for talk in talks]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in talk]}
        for talk in said
    ]
    path = file_of(tmp_path, "talk.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    result, notes = evaluate(decoder, tokenizer, path, template=TEMPLATE)
    sums = [chat_by_hand(decoder, tokenizer, talk) for talk in talks]
    nats, tokens, size = (sum(column) for column in zip(*sums, strict=True))
    assert (result.tokens, result.bytes) == (tokens, size)
    assert math.isclose(result.loss, nats / tokens, rel_tol=1e-5)
    assert math.isclose(result.bits_per_byte, nats / math.log(2) / size, rel_tol=1e-5)
    assert f"assistant tokens of 2 conversations, {tokens} of " in notes[0]


def test_of_pairs_the_chosen_answers_are_scored_and_of_marked_ones_the_desirable(
    decoder, tokenizer, tmp_path
):
    pair = {"prompt": "the dog\n", "chosen": "jumps", "rejected": "lazy lazy"}
    marked = [
        {"prompt": "the dog\n", "completion": c, "label": c == "jumps"}
        for c in ("jumps", "lazy lazy")
    ]
    pairs, kto = file_of(tmp_path, "a.jsonl", json.dumps(pair)), tmp_path / "b.jsonl"
    kto.write_text("".join(json.dumps(row) + "\n" for row in marked))
    asked, answer = tokenizer.encode("the dog\n"), [*tokenizer.encode("jumps"), tokenizer.eos_id]
    start = [tokenizer.bos_id, *asked]
    nats = nats_by_hand(decoder, start + answer) - nats_by_hand(decoder, start)
    told = {pairs: "the chosen response of 1 pair", kto: "1 desirable response"}
    for path, said in told.items():
        result, notes = evaluate(decoder, tokenizer, path)
        assert notes[0].startswith(f"scored: {said}, {len(answer)} of ")
        assert result.tokens == len(answer) and math.isclose(
            result.loss, nats / len(answer), rel_tol=1e-5
        )


def test_the_validation_split_of_conversations_is_scored_as_it_was_prepared(
    decoder, tokenizer, tmp_path, monkeypatch
):
    from bloomery.data.prepare.prepare import prepare
    from bloomery.recipe.load import load_recipe

    monkeypatch.chdir(tmp_path)
    tokenizer.save(tmp_path / "words")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"the {n}"},
                {"role": "assistant", "content": f"fox {n}"},
            ]
        }
        for n in range(60)
    ]
    file_of(tmp_path, "talk.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "objective.kind=sft",
        "data.path=talk.jsonl",
        "data.validation=20%",
        "tokenizer.from=words",
        "data.sequence_length=64",
    ]
    loaded = load_recipe("go-coder-tiny", [*words, f"data.chat.template={json.dumps(TEMPLATE)}"])
    manifest = prepare(loaded, tmp_path / "prepared")
    result, notes = evaluate(decoder, tokenizer, tmp_path / "prepared")
    assert result.tokens == manifest.validation.loss_tokens and manifest.validation.documents > 3
    assert f"{manifest.validation.documents} conversations" in notes[0]
