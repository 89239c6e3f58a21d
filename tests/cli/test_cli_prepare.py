"""`prepare` and `tokenizer` as a person types them."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.infer.model_folder import seal

RECIPE = """
model: {preset: go-coder-tiny}
tokenizer: {train: {vocab_size: 50000}}
data: {path: text, sequence_length: 32, validation: 20%, packing: false}
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
    assert "dataset too small for 50,000 tokens" in output
    assert "tokens truncated" in output
    assert "repeated   1 of" in output
    assert "are exact duplicates" in output
    folder = next((workshop / "prepared").iterdir())
    assert folder.name.startswith("small-")
    assert str(folder.relative_to(workshop)) in output
    assert "making tokens" not in typed("prepare", "small.yaml")  # done already


def test_each_of_several_sources_is_told_with_its_weight(workshop):
    sources = "data: {sources: [{path: text, glob: '1?.txt', weight: 2}, {path: text/3.txt}], sequence_length: 32}"
    (workshop / "mixed.yaml").write_text(RECIPE.split("data:")[0] + sources)
    output = typed("prepare", "mixed.yaml")
    first, second = output.partition("sources    ")[2].splitlines()[:2]
    assert first.startswith("text: 8 documents, ") and first.endswith(" tokens, 2 times per epoch")
    assert second.strip().startswith("text/3.txt: 1 document") and "times" not in second
    shown = typed("prepare", "mixed.yaml", "--preview", "2")
    assert "10.txt" in shown and "3.txt  " in shown.replace("13.txt", "")  # one of each


def test_the_role_of_every_file_is_one_line(workshop):
    (workshop / "d").mkdir()
    for name, rows in {"train": 60, "validation": 8, "test": 5}.items():
        lines = [
            json.dumps({"text": f"{name} sentence number {row}, {row * row}"})
            for row in range(rows)
        ]
        if name == "train":  # repeats of the validation set
            lines += [
                json.dumps({"text": f"validation sentence number {row}, {row * row}"})
                for row in (1, 4)
            ]
        (workshop / "d" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    output = typed(
        "prepare",
        "small.yaml",
        "data.path=d",
        "data.glob=*.jsonl",
        "data.validation=auto",
        "--check",
    )
    roles = "training: d/train.jsonl; validation: d/validation.jsonl; left out: d/test.jsonl"
    assert f"files      {roles}\n" in output
    assert "dataset    60 documents for training, 8 for validation, 2 left out" in output
    assert (
        output.count(
            "warning    d/train.jsonl: 2 rows are also in the validation set; not trained on\n"
        )
        == 1
    )
    again = typed(
        "prepare", "small.yaml", "data.path=d", "data.glob=*.jsonl", "data.validation=auto"
    )
    assert roles in again and "d/train.jsonl: 2 rows are also" in again


def test_a_share_that_cannot_measure_is_raised_and_said(workshop):
    rows = [json.dumps({"text": f"number {row} has the square {row * row}"}) for row in range(200)]
    (workshop / "rows.jsonl").write_text("\n".join(rows) + "\n")
    output = typed("prepare", "small.yaml", "data.path=rows.jsonl", "data.validation=1%")
    assert "dataset    180 documents for training, 20 for validation" in output
    assert "validation 1% are too few to measure: up to 20 rows, or a fifth" in output
    (workshop / "two.jsonl").write_text("\n".join(rows[:2]) + "\n")
    output = typed("prepare", "small.yaml", "data.path=two.jsonl", "data.sequence_length=8")
    assert "warning    only 1 row to train on" in output


def test_preview_shows_documents_tokens_and_what_is_cut(workshop):
    output = typed("prepare", "small.yaml", "--preview", "3")
    assert output.count(" train · ") + output.count(" validation · ") == 3
    assert "0.txt" in output
    assert "<s>|" in output
    assert "tokens truncated" in output
    folder = next((workshop / "prepared").iterdir())
    assert not list(folder.glob("*.bin"))
    typed("prepare", "small.yaml")
    assert "0.txt" in typed("prepare", "small.yaml", "--preview", "1")  # of a finished folder too


CHAT = """
model: {preset: go-coder-tiny}
tokenizer: {train: {vocab_size: 320, special_tokens: ["<|im_start|>", "<|im_end|>"]}}
objective: {kind: %s}
data: {path: rows.jsonl, sequence_length: %d, validation: 0, chat: {template: chatml}}
"""


LONG = " ".join(str(n * n) for n in range(40, 80))


def talk(question: str, answer: str) -> dict:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_chat(folder: Path, rows: list[dict], objective: str = "sft", length: int = 64) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.yaml").write_text(CHAT % (objective, length))


def test_preview_shows_what_is_learned(workshop):
    write_chat(
        workshop,
        [talk("what?", "this \x1b[31m"), {"messages": [{"role": "asistant", "content": "a"}]}],
    )
    with pytest.raises(UserError, match="did you mean assistant"):
        typed("prepare", "chat.yaml", "--preview", "3")
    output = typed("prepare", "chat.yaml", "--preview", "3", "data.on_error=skip")
    (line,) = [
        line for line in output.splitlines() if "⟧" in line and not line.startswith("loss on")
    ]
    learned = line[line.index("⟦") + 1 : line.index("⟧")].replace("¦", "")
    assert learned == "this \\x1b[31m<|im_end|>"
    assert "what?" in output[: output.index("⟦")].replace("¦", "")
    assert "loss on: between ⟦ and ⟧" in output
    assert "\x1b" not in output


def test_preview_refuses_completions_that_fill_a_sequence(workshop):
    write_chat(workshop, [{"prompt": "2 + 2?", "answer": "4"}], objective="grpo", length=256)
    (workshop / "score.py").write_text("def score(prompts, completions, **columns): return []\n")
    with pytest.raises(UserError, match="leave no room for a prompt in sequences of 256"):
        typed("prepare", "chat.yaml", "rewards=[{python: score.py:score}]", "--preview", "1")


def test_preview_shows_both_sides_of_a_pair_and_what_is_left_out(workshop):
    write_chat(
        workshop, [{"prompt": LONG, "chosen": "yes, and " + LONG, "rejected": "no"}], "dpo", 24
    )
    output = typed("prepare", "chat.yaml", "--preview", "1")
    assert "rows.jsonl:1 (chosen)" in output
    assert "rows.jsonl:1 (rejected)" in output
    assert (
        output.count("left out: no loss tokens on one side of the pair after truncation to 24") == 2
    )


def test_check_tells_what_is_wrong_with_conversations(workshop):
    rows = [talk(f"question {n}?", f"answer {n}") for n in range(20)]
    rows += [talk("the same?", "the same")] * 3
    rows += [talk(LONG, "beyond the end")]
    rows += [{"messages": [rows[0]["messages"][0], {**rows[1]["messages"][1], "weight": 0}]}]
    write_chat(workshop, rows)
    output = typed("prepare", "chat.yaml", "--check")
    assert "dataset    25 conversations for training" in output
    assert "format     messages" in output
    assert "left out: 1 conversation, no loss tokens after truncation;" in output
    assert "left out: 1 conversation, all labels are masked\n" in output
    assert "repeated   2 of 25 conversations" in output
    assert "24 of 25 responses end with the template's own token" in output


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
        typed("prepare", "small.yaml", "data.packing=true", "data.sequence_length=100000")
    with pytest.raises(UserError, match=r"no tokenizer\.json or SentencePiece"):
        typed("tokenizer", "inspect", "text", "--text", "a")
    with pytest.raises(UserError, match="no run 'lost'"):
        typed("tokenizer", "inspect", "lost", "--text", "a")


@pytest.mark.parametrize("words", ["prepare", "prepare --preview 1", "tokenizer train"])
def test_a_missing_path_leaves_no_folder(workshop, words):
    before = sorted(workshop.rglob("*"))
    with pytest.raises(UserError, match="nowhere"):
        typed(*words.split(), "small.yaml", "data.path=nowhere")
    assert sorted(workshop.rglob("*")) == before


@pytest.mark.parametrize("content", ["\n\n\n", "text\n\n\n", '""\n""\n'])
def test_a_csv_of_blank_lines_is_an_error_about_its_file(workshop, content):
    (workshop / "blank.csv").write_text(content)
    with pytest.raises(UserError) as caught:
        typed("prepare", "small.yaml", "data.path=blank.csv", "data.glob=null")
    assert "blank.csv" in f"{caught.value.problem} {caught.value.where}"


def test_prompts_are_called_prompts(workshop):
    rows = [{"prompt": f"{n} + {n * n}", "answer": str(n + n * n), "level": n} for n in range(40)]
    (workshop / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "small.yaml",
        "data={path: rows.jsonl, sequence_length: 128, validation: 10%}",
        "objective={kind: grpo, max_completion_length: 64}",
    )
    output = typed("prepare", *words)
    assert "dataset    32 prompts for training, 8 for validation" in output
    assert "columns    answer, level" in output
    assert "documents" not in output
    assert "sequence" not in output
    assert "warning    the validation set has 8 prompts: its reward is noisy" in output
    shown = typed("prepare", *words, "--preview", "1")
    assert "train · prompt · " in shown
    assert "loss" not in shown
    # Prompts are prepared before there is a reward; a run needs one.
    for command in ("plan", "train"):
        with pytest.raises(UserError, match="grpo needs rewards") as refusal:
            typed(command, *words)
        fix = refusal.value.fix
        assert fix == "add a reward: rewards=[{verifier: exact_match, column: answer}]"
    assert "grpo" in typed("plan", *words, fix.removeprefix("add a reward: "))
