"""A run on pictures is evaluated with them on its validation set; what would be scored blindly is refused."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run

from bloomery.cli import cli
from bloomery.core.errors import UserError
from bloomery.data.examples import PICTURE, Example, Message, pictures_of
from bloomery.data.shards import open_split
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.evaluate import evaluate_model
from bloomery.evals.picture_scores import _exchanged
from bloomery.model.configs import read_config
from bloomery.monitor.events import EvalDone
from bloomery.plan.store import write_plan
from bloomery.recipe.objectives import Preference, Sft
from bloomery.recipe.schema import Lora, NoAdapter
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row

LORA = Lora(kind="lora", rank=4, alpha=8.0, target_modules=["q_proj"])
ROWS = [row(RED, TEXT, answer=f"red {n}") for n in range(8)]
ROWS += [row(BLUE, TEXT, answer=f"blue {n}") for n in range(8)]


def trained(folder, kind, *, adapter=LORA, objective=None, rows=ROWS):
    objective = objective or Sft(kind="sft")
    prepared = prepared_rows(
        folder, rows, kind=kind, weights=True, validation=0.3, objective=objective.kind
    )
    base = folder / "base"
    plan = tiny_plan(
        prepared,
        config=read_config(base),
        model={"source": base},
        data={"sequence_length": 256},
        train={"steps": 2, "micro_batch_size": 2, "accumulation": 1, "tokens_per_step": 512},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 2},
    ).model_copy(update={"adapter": adapter, "objective": objective})
    run = Run(plan, folder / "run")
    write_plan(plan, run.folder / "plan.json")
    return run


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_run_has_the_loss_of_its_own_evaluation(kind, tmp_path):
    run = trained(tmp_path, kind)
    scores, (note,) = evaluate_model(run.folder, None, step="last")
    assert scores.loss == pytest.approx(run.of(EvalDone)[-1].loss, rel=1e-6)
    assert note.startswith("same as in training") and "--data" not in note


def held_out_rows(folder):
    """Those of the validation set, as rows beside the others."""
    split = open_split(folder / "prepared-stop", "validation")
    tokenizer = load_tokenizer(folder / "base")
    texts = [tokenizer.decode(split.document(number).tolist()) for number in range(len(split))]
    rows = [each for each in ROWS if any(each["messages"][1]["content"] in text for text in texts)]
    assert len(rows) == len(texts) > 1
    path = folder / "rows" / "held-out.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "smolvlm"])
def test_rows_are_scored_with_their_pictures_and_with_those_of_others(kind, tmp_path):
    """On the rows of the validation set the loss is that of training's evaluation, which computes packed sequences."""
    run = trained(tmp_path, kind)
    rows = held_out_rows(tmp_path)
    scores, notes = evaluate_model(run.folder, rows, step="last")
    assert scores.loss == pytest.approx(run.of(EvalDone)[-1].loss, rel=1e-5)
    assert 0 <= scores.right <= 1 and notes == []
    assert scores.control_loss is not None
    printed = CliRunner().invoke(
        cli, ["eval", str(run.folder), "--data", str(rows), "--step", "last", "-d", "cpu"]
    )
    assert printed.exit_code == 0, printed.output
    assert f"right      {scores.right:.1%} of {scores.conversations} conv" in printed.stdout
    assert (
        f"control    {scores.control_right:.1%} right, loss {scores.control_loss:.4f}"
        in printed.stdout
    )
    # Two pictures alone: those of others are those that swap their colors.
    shutil.move(tmp_path / "rows" / "red.png", tmp_path / "rows" / "other.png")
    shutil.move(tmp_path / "rows" / "blue.png", tmp_path / "rows" / "red.png")
    shutil.move(tmp_path / "rows" / "other.png", tmp_path / "rows" / "blue.png")
    swapped, _ = evaluate_model(run.folder, rows, step="last")
    assert swapped.loss != scores.loss
    lines = rows.read_text().splitlines()
    rows.write_text("".join(f"{line}\n" for line in lines if "red.png" in line))
    assert evaluate_model(run.folder, rows, step="last")[0].control_loss is None


def test_prompts_with_completions_are_scored_as_conversations_and_pairs_are_refused(tmp_path):
    run = trained(tmp_path, "gemma3")
    as_messages = [json.loads(line) for line in held_out_rows(tmp_path).read_text().splitlines()]
    turns = [row["messages"] for row in as_messages]
    for name, rows in (
        ("prompts", [{"prompt": each[:1], "completion": each[1:]} for each in turns]),
        (
            "pairs",
            [{"prompt": p, "chosen": [a], "rejected": [a | {"content": "no"}]} for *p, a in turns],
        ),
    ):
        (tmp_path / "rows" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    scores, _ = evaluate_model(run.folder, tmp_path / "rows" / "prompts.jsonl", step="last")
    assert scores.loss == pytest.approx(run.of(EvalDone)[-1].loss, rel=1e-5)
    with pytest.raises(UserError, match="this is a pair"):
        evaluate_model(run.folder, tmp_path / "rows" / "pairs.jsonl", step="last")


def test_the_control_gives_each_conversation_pictures_of_another():
    examples = [
        Example(
            f"row {n}",
            "chat",
            (),
            ((Message("user", PICTURE, pictures=(f"{n}.png",)), Message("assistant", "a")),),
        )
        for n in range(40)
    ]
    exchanged = _exchanged(examples)
    before = {example.source: pictures_of(example.responses[0]) for example in examples}
    after = {example.source: pictures_of(example.responses[0]) for example in exchanged}
    assert len(exchanged) >= 35  # a few keep their own by chance, and are left out
    assert all(before[source] != pictures for source, pictures in after.items())
    assert len(set(map(tuple, after.values()))) == len(after)
    assert _exchanged(examples[:1]) == []


def test_a_text_model_is_told_that_it_sees_nothing(tmp_path):
    run = trained(tmp_path, "gemma3")
    (tmp_path / "base" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="reads text, and no pictures"):
        evaluate_model(run.folder, tmp_path / "rows" / "train.jsonl", step="last")


def test_what_would_be_scored_without_its_pictures_is_refused(tmp_path):
    run = trained(tmp_path, "gemma3")
    with pytest.raises(UserError, match="has pictures, and would be scored without them"):
        evaluate_model(run.folder, tmp_path / "prepared-stop", step="last")
    with pytest.raises(UserError, match="the dataset has pictures"):
        evaluate_model(run.folder, None, step="last", bos=False)


def test_a_run_on_pairs_with_pictures_is_refused(tmp_path):
    pairs = [
        {
            "prompt": [{"role": "user", "content": [RED, TEXT]}],
            "chosen": [{"role": "assistant", "content": f"red {number}"}],
            "rejected": [{"role": "assistant", "content": "blue"}],
        }
        for number in range(12)
    ]
    run = trained(tmp_path, "gemma3", objective=Preference(kind="dpo", beta=0.5), rows=pairs)
    with pytest.raises(UserError, match="the dataset has pictures"):
        evaluate_model(run.folder, None, step="last")


def test_a_run_in_full_whose_base_is_gone_is_told_so(tmp_path):
    run = trained(tmp_path, "gemma3", adapter=NoAdapter())
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "base"))):
        evaluate_model(run.folder, None, step="last")
