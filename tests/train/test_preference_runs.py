"""The loop over pairs and marked answers: learning, the reference, evaluation, resuming."""

import math

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors
from structured_runs import write_answers

from bloomery.core import Choice
from bloomery.data.order import Cursor
from bloomery.model.heads import LabelScores, ScoreSettings
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import (
    EvalDone,
    EventLog,
    Phase,
    StepDone,
    StepHealth,
    from_json,
    to_json,
)
from bloomery.plan.choices import reference_of
from bloomery.recipe.objectives import Kto, OrPo, Preference, Reward, Sft, SimPo
from bloomery.recipe.schema import Lora
from bloomery.train import set_up
from bloomery.train.batch_source import open_loader
from bloomery.train.loop import run
from bloomery.train.objectives import build as objectives
from bloomery.train.objectives import reference_files as reference
from bloomery.train.objectives.reference_files import reference_file

PLAIN = CONFIG.__class__(**vars(CONFIG) | {"residual_dropout": 0.0})
DPO = Preference(kind="dpo", beta=0.5)


@pytest.fixture(scope="module")
def answers(prepared, tmp_path_factory):
    made = {}

    def of(kind: str):
        if kind not in made:
            made[kind] = write_answers(tmp_path_factory.mktemp(kind) / "prepared", prepared, kind)
        return made[kind]

    return of


def plan_of(folder, asked, adapter=None, *, config=PLAIN, **sections):
    train = {"steps": 12} | sections.pop("train", {})
    parts = {
        "train": train,
        "checkpoint": {"every_steps": 6},
        "eval": {"every_steps": 6},
        **sections,
    }
    changes = {"objective": asked} | ({} if adapter is None else {"adapter": adapter})
    return tiny_plan(folder, config=config, **parts).model_copy(update=changes)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("chat", Sft(kind="sft")),
        ("pairs", DPO),
        ("pairs", Preference(kind="ipo", beta=0.5)),
        ("pairs", SimPo(kind="simpo")),
        ("pairs", OrPo(kind="orpo", beta=0.5)),
        ("kto", Kto(kind="kto", beta=0.5)),
        ("pairs", Reward(kind="reward")),
    ],
)
def test_a_run_lowers_its_held_out_loss(kind, asked, answers, tmp_path):
    values = isinstance(asked, Reward)
    config = PLAIN.__class__(**vars(PLAIN) | {"head": "values"}) if values else PLAIN
    made = Run(plan_of(answers(kind), asked, config=config), tmp_path / "run")
    first, last = made.of(EvalDone)[0], made.of(EvalDone)[-1]
    assert last.loss < made.of(StepDone)[0].loss
    assert last.loss <= first.loss
    assert (last.perplexity is None) == (kind != "chat")
    if kind != "chat":
        assert last.metrics["accuracy"] > 0.8
        assert last.bits_per_byte is None
    assert all(from_json(to_json(event)) == event for event in made.events)


def test_the_reference_is_computed_once_and_before_the_first_step(answers, tmp_path, monkeypatch):
    plan = plan_of(answers("pairs"), DPO)
    made = Run(plan, tmp_path / "run")
    # the model is its own reference yet
    assert made.of(StepDone)[0].loss == pytest.approx(math.log(2), rel=1e-6)
    told = [event for event in made.of(Phase) if event.name == "reference"]
    assert told[-1].done == told[-1].total > 0
    scores = reference_file(made.folder, "train")
    loader = open_loader(plan.data, "train", scores, seed=plan.train.seed)
    batch = loader.batch(Cursor(0, 0), 3)
    model = fresh_decoder(PLAIN, seed=0, attention="mask")
    head = LabelScores(batch.labels, batch.loss_mask, ScoreSettings(64))
    with torch.no_grad():
        expected = model(
            batch.tokens, positions_BT=batch.positions, documents_BT=batch.documents, head=head
        ).head
    torch.testing.assert_close(batch.extras["reference"], expected, atol=1e-5, rtol=0)


def test_a_resumed_run_is_bitwise_the_undisturbed_one_with_and_without_its_reference(
    answers, tmp_path, monkeypatch
):
    plan = plan_of(answers("pairs"), DPO, config=CONFIG)
    whole = Run(plan, tmp_path / "whole")
    first = Run(plan, tmp_path / "halves", stop_after=6)
    assert first.outcome == "stopped"
    for name in ("train", "validation"):
        reference_file(first.folder, name).unlink()
    second = Run(plan, tmp_path / "halves", resume_from=first.checkpoint(6))
    assert second.losses() == {step: loss for step, loss in whole.losses().items() if step > 6}
    assert_same_tensors(second.tensors(12), whole.tensors(12))
    monkeypatch.setattr(reference, "batch_label_scores", None)  # it is there now
    third = Run(plan, tmp_path / "halves", resume_from=first.checkpoint(6))
    assert third.losses() == second.losses()


def test_a_run_may_be_stopped_while_its_reference_is_computed(answers, tmp_path):
    plan = plan_of(answers("pairs"), DPO)
    first = Run(plan, tmp_path / "run", stop_after=0)
    assert (first.outcome, first.of(StepDone)) == ("stopped", [])
    assert not reference_file(first.folder, "train").exists()
    assert Run(plan, tmp_path / "run").losses() == Run(plan, tmp_path / "whole").losses()


def test_a_killed_computation_of_the_reference_goes_on_where_it_was(answers, tmp_path, monkeypatch):
    plan = plan_of(answers("pairs"), DPO, eval={"every_steps": 6, "micro_batch_size": 2})
    batch_label_scores, calls = reference.batch_label_scores, []

    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return batch_label_scores(*args, **kwargs)

    monkeypatch.setattr(reference, "batch_label_scores", dying)
    with pytest.raises(KeyboardInterrupt):
        Run(plan, tmp_path / "run")
    assert not reference_file(tmp_path / "run", "train").exists()
    halves = Run(plan, tmp_path / "run")
    again = len(calls)
    calls.clear()
    calls.extend([1] * 10)
    whole = Run(plan, tmp_path / "whole")
    assert len(calls) - 10 == again - 1  # the one that died was repeated
    assert halves.losses() == whole.losses()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_adapters_take_their_reference_from_the_base(kind, answers, tmp_path, monkeypatch):
    folder = tmp_path / "base"
    folder.mkdir()
    write_model(model_state(fresh_decoder(PLAIN, seed=3)), PLAIN, folder)
    asked = DPO if kind == "dpo" else Kto(kind="kto", beta=0.5)
    prepared = answers("pairs" if kind == "dpo" else "kto")
    sections = {"model": {"source": folder}, "optimizer": {"learning_rate": 0.02}}
    plan = plan_of(prepared, asked, Lora(kind="lora", rank=4), **sections)
    disabled = Run(plan, tmp_path / "disabled")
    assert not reference_file(disabled.folder, "train").exists()
    # an adapter begins at zero
    assert {health.update_ratio for health in disabled.of(StepHealth)} == {None}
    assert disabled.of(StepDone)[-1].loss < disabled.of(StepDone)[0].loss
    for module in (set_up, objectives):
        monkeypatch.setattr(
            module,
            "reference_of",
            lambda *_: Choice("precomputed", "as of a model trained in full"),
        )
    precomputed = Run(plan, tmp_path / "precomputed")
    assert disabled.losses() == pytest.approx(precomputed.losses(), rel=1e-5)


def test_what_is_trained_beside_the_adapters_is_no_part_of_the_reference():
    kinds = [
        reference_of(DPO, Lora(kind="lora", modules_to_save=also), vision).value
        for also, vision in (([], "none"), (["lm_head"], "none"), ([], "projector"))
    ]
    assert kinds == ["adapters", "precomputed", "precomputed"]
    assert reference_of(SimPo(kind="simpo"), Lora(kind="lora"), "none").value == "none"


def test_an_exported_reward_model_opens_and_says_what_its_loss_is_of(answers, tmp_path):
    from bloomery.export.layouts import export

    pytest.importorskip("transformers")
    config = PLAIN.__class__(**vars(PLAIN) | {"head": "values"})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: {preset: go-coder-tiny}\ndata: {path: text}\n")
    plan = plan_of(answers("pairs"), Reward(kind="reward"), config=config)
    with EventLog(folder / "events.jsonl") as log:
        run(plan, run_dir=folder, emit=log, stop=lambda: False)
    exported = export(folder / "checkpoints" / "step-00000012", tmp_path / "out")
    assert "logits equal within" in str(exported)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "loss (per pair) | accuracy" in card
    assert "AutoModelForSequenceClassification" in card
    assert (
        "pipeline_tag: text-classification" in card and "preferences of its training data" in card
    )
