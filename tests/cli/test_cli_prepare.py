"""`prepare` and `tokenizer` as a person types them."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.errors import UserError
from bloomery.train.sealed import seal

RECIPE = """
model: {preset: go-coder-tiny}
tokenizer: {train: {vocab_size: 50000}}
data: {path: text, sequence_length: 32, validation: 20%, layout: padded}
"""


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text").mkdir()
    for index in range(20):
        (tmp_path / "text" / f"{index}.txt").write_text(
            f"number {index} and some words beside it, {index * index}\n" * (1 + index)
        )
    (tmp_path / "text" / "copy.txt").write_text((tmp_path / "text" / "7.txt").read_text())
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*words: str) -> str:
    result = CliRunner().invoke(cli, list(words), catch_exceptions=False, standalone_mode=False)
    return result.output


def test_prepare_sums_up_and_checks(workshop):
    output = typed("prepare", "small.yaml", "--check")
    assert "for validation" in output
    assert "the text has no more to merge; 50,000 were asked for" in output
    assert "tokens are cut off" in output
    assert "repeated   1 of" in output
    assert "repeat an earlier one word for word" in output
    folder = next((workshop / "prepared").iterdir())
    assert folder.name.startswith("small-")
    assert str(folder.relative_to(workshop)) in output
    assert "making tokens" not in typed("prepare", "small.yaml")  # done already


def test_preview_shows_documents_tokens_and_what_is_cut(workshop):
    output = typed("prepare", "small.yaml", "--preview", "3")
    assert output.count("tokens ·") == 3
    assert "0.txt" in output
    assert "<s>|" in output
    assert "tokens cut off" in output
    folder = next((workshop / "prepared").iterdir())
    assert not list(folder.glob("*.bin"))
    typed("prepare", "small.yaml")
    assert "0.txt" in typed("prepare", "small.yaml", "--preview", "1")  # of a finished folder too


def test_tokenizer_is_trained_once_and_inspected(workshop):
    first = typed("tokenizer", "train", "small.yaml")
    folder = next((workshop / "prepared").iterdir())
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert typed("prepare", "small.yaml").count(first.splitlines()[-2].split(" · ")[1]) == 1
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    output = typed("tokenizer", "inspect", str(folder), "--text", "words 世")
    assert "9 bytes in" in output
    assert "'世'" in output
    assert "bos 1 · eos 2 · pad 3 · unk 0" in output
    run, checkpoint = workshop / "runs/one", workshop / "runs/one/checkpoints/step-00000001"
    shutil.copytree(folder, checkpoint, ignore=shutil.ignore_patterns("manifest.json"))
    seal(checkpoint)
    (run / "recipe.yaml").touch()
    assert typed("tokenizer", "inspect", "last", "--text", "words 世") == output


def test_mistakes_are_sentences(workshop):
    with pytest.raises(UserError, match="less than one sequence"):
        typed("prepare", "small.yaml", "data.layout=packed", "data.sequence_length=100000")
    with pytest.raises(UserError, match="holds neither"):
        typed("tokenizer", "inspect", "text", "--text", "a")
    with pytest.raises(UserError, match="there is no run 'lost'"):
        typed("tokenizer", "inspect", "lost", "--text", "a")
