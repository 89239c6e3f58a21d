"""Every feature that the support matrix calls tested trains on two ranks as on one. Oracle: one rank."""

from pathlib import Path
from typing import Any

import pytest
from plans_for_tests import tiny_config, tiny_plan
from structured_runs import write_answers

from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.families.presets import read_config
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.plan.rules.support import AXES, FEATURES
from bloomery.recipe.schema import Distill, Kto, Lora, Peft, Preference, Quantize, Reward, Sft, SimPo
from foreign_models import saved_model
from ranks import fields, losses, on_ranks, train

CONFIG = tiny_config(vocab_size=512)
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]}
IA3 = {"method": "ia3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
ADALORA = {"method": "adalora", "init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 5}
HALF = 1e-3
# By feature: (kind of data, changes of the plan, tolerance of the losses); a feature may have several.
CASES: dict[str, list[tuple[str, dict[str, Any], float]]] = {
    "objective pretrain": [("text", {}, 1e-5)],
    "objective sft": [("chat", {"objective": Sft(kind="sft")}, 1e-5)],
    "objective dpo, ipo, simpo, orpo": [
        ("pairs", {"objective": Preference(kind="dpo", beta=0.5)}, 1e-5),
        ("pairs", {"objective": Preference(kind="dpo", beta=0.5), "adapter": Lora(**LORA)}, 1e-5),
        ("pairs", {"objective": SimPo(kind="simpo")}, 1e-5),
    ],
    "objective kto": [("kto", {"objective": Kto(kind="kto", beta=0.5)}, 1e-5)],
    "objective reward": [("pairs", {"objective": Reward(kind="reward"), "head": "values"}, 1e-5)],
    "objective distill": [("text", {"objective": "distill"}, 1e-5)],
    "adapter lora": [("text", {"adapter": Lora(**LORA)}, 1e-5),
                     ("text", {"adapter": Lora(**LORA | {"modules_to_save": ["norms"]})}, 1e-5)],
    "adapter dora": [("text", {"adapter": Lora(**LORA | {"kind": "dora"})}, 1e-5)],
    "adapter pissa": [("text", {"adapter": Lora(**LORA | {"init": "pissa"})}, 1e-5)],
    "PEFT methods": [("text", {"adapter": Peft(kind="peft", **IA3)}, 1e-5),
                     ("text", {"adapter": Peft(kind="peft", **ADALORA)}, 1e-5)],
    "quantize nf4, int8": [("text", {"adapter": Lora(**LORA), "quantize": Quantize(kind=kind)}, 1e-5)
                           for kind in ("nf4", "int8")],
    "train.precision bfloat16": [("text", {"train": {"precision": "bfloat16"}}, HALF),
                                 ("text", {"train": {"precision": "bfloat16"}, "adapter": Lora(**LORA)}, HALF)],
    "train.precision bfloat16-pure": [("text", {"train": {"precision": "bfloat16-pure"}}, HALF)],
    "train.precision float16": [("text", {"train": {"precision": "float16"}}, HALF)],
    "train.activation_checkpointing": [("text", {"train": {"activation_checkpointing": mode}}, 1e-5)
                                       for mode in ("full", "selective")],
    "train.compile": [("text", {"train": {"compile": True}}, 1e-5)],
    "optimizer.stochastic_rounding, adafactor": [
        ("text", {"optimizer": {"kind": "adafactor", "stochastic_rounding": True},
                  "train": {"precision": "bfloat16-pure"}}, HALF)],
    "train.offload_activations": [("text", {"train": {"offload_activations": True}}, 1e-5)],  # no effect on a CPU
    "model.load_with=transformers": [("text", {"foreign": "phi"}, 1e-5)],
}  # fmt: skip
IN_TEST_RANKS = {"optimizer adamw", "optimizer muon", "optimizer adafactor", "optimizer.state_dtype int8, bfloat16",
                 "optimizer.stochastic_rounding, adamw", "optimizer.paged, offload"}  # fmt: skip
REFUSED = {one.name for one in FEATURES if all(one.reason(axis) for axis in AXES)}
CELLS = [
    pytest.param(feature, axis, *case, id=f"{feature.name}-{axis}-{number}",
                 marks=[pytest.mark.soak] if feature.name == "train.compile" else [])
    for feature in FEATURES for axis in AXES if not feature.reason(axis)
    for number, case in enumerate(CASES.get(feature.name, []))
]  # fmt: skip


@pytest.fixture(scope="session")
def folders(prepared, tmp_path_factory) -> dict[str, Path]:
    made = {"text": prepared, "base": tmp_path_factory.mktemp("base"), "teacher": tmp_path_factory.mktemp("teacher")}
    for kind in ("chat", "pairs", "kto"):
        made[kind] = write_answers(tmp_path_factory.mktemp(kind) / "prepared", prepared, kind)
    for name, seed in (("base", 3), ("teacher", 7)):
        write_model(model_state(fresh_decoder(CONFIG, seed=seed)), CONFIG, made[name])
        load_tokenizer(prepared).save(made[name])
    made["phi"] = tmp_path_factory.mktemp("phi")
    saved_model("phi", made["phi"], vocab_size=300)
    return made


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The run of one rank, once per plan."""
    known: dict[str, list[Any]] = {}

    def of(plan) -> list[Any]:
        key = plan.model_dump_json()
        if key not in known:
            known[key] = train(plan, tmp_path_factory.mktemp("alone"))
        return known[key]

    return of


def plan_of(folders: dict[str, Path], data: str, changes: dict[str, Any]):
    changes = dict(changes)
    sections = {name: changes.pop(name) for name in ("train", "optimizer") if name in changes}
    sections["train"] = {"steps": 3} | sections.get("train", {})
    if "precision" in sections["train"]:  # at 0.01 the rounding of half precision grows tenfold within three steps
        sections["optimizer"] = {"learning_rate": 0.003} | sections.get("optimizer", {})
    config, foreign = CONFIG, changes.pop("foreign", None)
    if head := changes.pop("head", None):
        config = tiny_config(vocab_size=512, head=head)
    if foreign is not None:
        config = read_config(folders[foreign], "transformers")
    if changes.get("objective") == "distill":
        changes["objective"] = Distill(kind="distill", teacher=str(folders["teacher"]), kd_ratio=0.5)
    if "adapter" in changes or foreign is not None:
        sections["model"] = {"source": folders[foreign or "base"]}
    return tiny_plan(folders[data], config=config, **sections).model_copy(update=changes)


def test_every_cell_is_refused_or_has_a_case() -> None:
    assert CASES.keys() | IN_TEST_RANKS | REFUSED == {one.name for one in FEATURES}
    assert all(bool(one.reason("shard")) >= bool(one.reason("replicate")) for one in FEATURES)


@pytest.mark.parametrize(("feature", "axis", "data", "changes", "near"), CELLS)
def test_two_ranks_train_as_one_does(folders, alone, tmp_path, feature, axis, data, changes, near) -> None:
    plan = plan_of(folders, data, changes)
    one, two = alone(plan), train(on_ranks(plan, **{axis: 2}), tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), rel=0, abs=near)
    norms = [next(event["grad_norm"] for event in fields(run, "StepDone")) for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if near == 1e-5 else 0.05)
    scored = [[event["loss"] for event in fields(run, "EvalDone")] for run in (one, two)]
    assert scored[1] == pytest.approx(scored[0], abs=near)
