"""Runs that train what reads pictures: their gradients, checkpoints, adapters and ranks."""

import shutil

import pytest
import torch
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run, assert_resumes_bitwise, resumed_bitwise
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.evals.evaluate import evaluate_model
from bloomery.export.layouts import export, export_merged
from bloomery.facts.pictures import is_projector, vision_of
from bloomery.infer.forward import forward
from bloomery.infer.load import Use, load_used
from bloomery.infer.model_folder import find_model
from bloomery.infer.picture_prompts import open_eyes
from bloomery.model.configs import read_config
from bloomery.model.forward_input import ALL_LOGITS
from bloomery.monitor.events import EvalDone
from bloomery.plan.checkpoints import checkpoint_bytes
from bloomery.plan.resolve import local_facts, resolve
from bloomery.plan.store import write_plan
from bloomery.plan.types import VisionPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Lora, NoAdapter
from bloomery.train.state import build_state
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row
from ranks import losses, on_ranks, train

# Every second row has no picture, so that some micro-batches have none.
ROWS = [
    row(RED, TEXT, answer="red"),
    row(TEXT, answer="none"),
    row(BLUE, TEXT, answer="blue"),
    row(TEXT, answer="no"),
] * 4
LORA = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
STEPS = {"steps": 5, "micro_batch_size": 1, "accumulation": 3, "tokens_per_step": 768}


def plan_of(folder, prepared, *, vision=None, adapter=None, **sections):
    base = folder / "base"
    parts = {
        "model": {"source": base},
        "data": {"sequence_length": 256, "layout": "padded"},
        "train": STEPS,
        "eval": {"every_steps": None},
    }
    for name, changes in sections.items():
        parts[name] = parts.get(name, {}) | changes
    plan = tiny_plan(prepared, config=read_config(base), **parts)
    rates = {"learning_rate": 0.005, "projector_learning_rate": 0.01}
    return plan.model_copy(
        update={
            "adapter": NoAdapter() if adapter is None else Lora(**LORA | adapter),
            "vision": VisionPlan(**rates | (vision or {})),
        }
    )


FIRST_STAGE = {"train": "projector", "freeze_language_model": True}
RUNS = {
    "first stage": ({"vision": FIRST_STAGE}, {"projector"}),
    "tower": ({"vision": {"train": "tower"}}, {"tower", "text"}),
    "all": (
        {"vision": {"train": "all"}, "train": {"ema_decay": 0.5}},
        {"tower", "projector", "text"},
    ),
    "lora and projector": ({"vision": {"train": "projector"}, "adapter": {}}, {"projector"}),
    "lora on all": ({"adapter": {"vision": "all", "dropout": 0.1}}, set()),
    "recomputed": (
        {"vision": {"train": "all"}, "train": {"activation_checkpointing": "full"}},
        {"tower", "projector", "text"},
    ),
}


def part_of(kind, name):
    """Of a parameter of transformers' whole model."""
    if name.startswith(("lm_head.", "model.language_model.", "model.text_model.")):
        return "text"
    return "projector" if is_projector(kind, name) else "tower"


def stored(folder):
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl"])
def test_a_run_resumes_to_the_same_bits_and_frozen_parts_stay(name, kind, tmp_path):
    sections, trained = RUNS[name]
    prepared = prepared_rows(tmp_path, ROWS, kind=kind, weights=True)
    plan = plan_of(tmp_path, prepared, **sections)
    run = resumed_bitwise(plan, tmp_path)
    if "adapter" in sections:
        return
    base, tuned = stored(tmp_path / "base"), stored(run.checkpoint(5))
    assert base.keys() == tuned.keys()
    changed = {each for each, tensor in base.items() if not torch.equal(tensor, tuned[each])}
    assert {part_of(kind, each) for each in changed} == trained
    # What is added after the last layer of the language model reaches no token of an answer.
    last = "deepstack_merger_list.1." if kind == "qwen3_vl" else "nothing"
    same = [each for each in base.keys() - changed if part_of(kind, each) in trained]
    assert all(last in each for each in same), same


def logits_of(theirs, batch):
    token = vision_of(theirs.config.to_dict()).image_token_id
    kinds = {}
    if theirs.config.model_type.startswith("qwen"):
        kinds = {"mm_token_type_ids": (batch.tokens == token).long()}
    if theirs.config.model_type == "gemma3":
        kinds = {"token_type_ids": (batch.tokens == token).long()}
    inputs = {name: value for name, value in batch.pictures.inputs.items() if name != "num_crops"}
    is_real = (batch.documents >= 0).long()
    with torch.no_grad():
        return theirs(input_ids=batch.tokens, attention_mask=is_real, **inputs, **kinds).logits


def opened(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


ADAPTERS = {
    "lora on all": {"adapter": {"vision": "all"}},
    "lora on the tower, projector in full": {
        "adapter": {"vision": "tower", "rank_pattern": {"q_proj": 2}},
        "vision": {"train": "projector"},
    },
    "tower in full": {"adapter": {}, "vision": {"train": "tower"}},
}
CASES = [
    ("smolvlm", "lora on all"),
    ("qwen3_vl", "lora on all"),
    ("qwen3_vl", "lora on the tower, projector in full"),
    ("gemma3", "lora on the tower, projector in full"),
    ("qwen3_5", "tower in full"),
    ("gemma3", "tower in full"),
    ("gemma4", "lora on all"),
    ("mistral3", "lora on all"),
    ("internvl", "lora on the tower, projector in full"),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_adapter_opens_in_peft_on_the_whole_model(kind, name, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind=kind, weights=True)
    plan = plan_of(tmp_path, prepared, **ADAPTERS[name])
    run = Run(plan, tmp_path / "run")
    state = build_state(plan, resume_from=run.checkpoint(5))
    state.model.eval()
    loader = Loader(prepared, sequence_length=256, layout="padded", seed=0)
    batches = [loader.batch(Cursor(0, first), 1) for first in range(4)]
    batch = next(each for each in batches if each.pictures is not None)
    with torch.no_grad():
        logits = forward(state.model, batch, ALL_LOGITS, precision="float32").head
    is_real = batch.documents >= 0
    base = opened(tmp_path / "base")
    before = logits_of(base, batch)
    tuned = PeftModel.from_pretrained(base, run.checkpoint(5)).eval()
    made = logits_of(tuned, batch)
    assert (made - before)[is_real].abs().max() > 1e-2
    assert_close(made[is_real], logits[is_real], atol=1e-4, rtol=1e-4)

    # Merged, it is a model of transformers; opened with its base, the same.
    merged = tmp_path / "merged"
    done = export_merged(find_model(run.checkpoint(5)), merged)
    assert any("that the adapter changes" in proof for proof in done.proofs)
    assert_close(logits_of(opened(merged), batch)[is_real], made[is_real], atol=1e-4, rtol=1e-4)
    files = find_model(run.checkpoint(5))
    decoder = load_used(files, Use("cpu"), dtype=torch.float32)
    open_eyes(decoder, files).close()
    with torch.no_grad():
        used = forward(decoder, batch, ALL_LOGITS, precision="float32").head
    assert_close(used[is_real], logits[is_real], atol=1e-5, rtol=1e-5)


def test_a_merge_that_rounds_away_what_reads_pictures_is_refused(tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind="smolvlm", weights=True)
    weights = tmp_path / "base" / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    plan = plan_of(tmp_path, prepared, adapter={"vision": "tower"}, train={"steps": 2})
    adapter = Run(plan, tmp_path / "run").checkpoint(2)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".vision_model." in name and ".lora_B" in name:
            tensor.fill_(1e-11)
    save_file(tensors, file, metadata={"format": "pt"})
    (adapter / "MANIFEST.json").unlink()  # of the file as it was saved
    with pytest.raises(UserError, match="reads pictures with the numbers of its base"):
        export_merged(find_model(adapter), tmp_path / "merged")
    export_merged(find_model(adapter), tmp_path / "merged", dtype="float32")
    merged = stored(tmp_path / "merged")
    changed = [n for n, tensor in halves.items() if not torch.equal(tensor.float(), merged[n])]
    assert any("vision_model" in name for name in changed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [{"train": "all"}, FIRST_STAGE])
def test_a_checkpoint_is_a_model_of_transformers_and_is_exported(stage, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind="smolvlm", weights=True)
    plan = plan_of(tmp_path, prepared, vision=stage)
    run = Run(plan, tmp_path / "run")
    state = build_state(plan, resume_from=run.checkpoint(5))
    batch = Loader(prepared, sequence_length=256, layout="padded", seed=0).batch(Cursor(0, 0), 4)
    with torch.no_grad():
        logits = forward(state.model, batch, ALL_LOGITS, precision="float32").head
    is_real = batch.documents >= 0
    shutil.copytree(run.checkpoint(5), tmp_path / "tuned")
    assert_close(
        logits_of(opened(tmp_path / "tuned"), batch)[is_real], logits[is_real], atol=1e-4, rtol=1e-4
    )
    before = logits_of(opened(tmp_path / "base"), batch)
    assert (before - logits)[is_real].abs().max() > 1e-2
    export(run.checkpoint(5), tmp_path / "exported", keeps_vision=True)
    exported, tuned = stored(tmp_path / "exported"), stored(run.checkpoint(5))
    assert exported.keys() == tuned.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in tuned.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["lora on all", "all"])
def test_eval_has_the_loss_of_the_runs_own_evaluation(name, tmp_path):
    rows = [row(color, TEXT, answer=f"{n}") for n in range(8) for color in (RED, BLUE)]
    prepared = prepared_rows(tmp_path, rows, kind="smolvlm", weights=True, validation=0.3)
    sections = {**RUNS, **ADAPTERS}[name]
    if name == "all":
        sections, _ = sections
    plan = plan_of(tmp_path, prepared, eval={"every_steps": 3}, **sections)
    run = Run(plan, tmp_path / "run")
    write_plan(plan, run.folder / "plan.json")
    scores, _ = evaluate_model(run.folder, None, step="last")
    assert scores.loss == pytest.approx(run.of(EvalDone)[-1].loss, rel=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl"])
def test_the_parts_have_their_own_learning_rates(kind, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind=kind, weights=True)
    plan = plan_of(tmp_path, prepared, vision={"train": "all"}, optimizer={"kind": "muon"})
    state = build_state(plan)
    names = {parameter: name for name, parameter in state.optimizer.named_parameters.items()}
    rates = {}
    for member in state.optimizer.members:
        for group in member.param_groups:
            for parameter in group["params"]:
                name = names.pop(parameter)
                is_text = name not in state.model.vision.trained
                part = "text" if is_text else part_of(kind, name)
                rates.setdefault(part, set()).add((type(member).__name__, group["peak"]))
    assert not names
    assert rates["tower"] == {("AdamW", 0.005)}
    assert rates["projector"] == {("AdamW", 0.01)}
    assert {rate for _, rate in rates["text"]} == {0.01, 0.02}, "AdamW's and Muon's"


def test_a_first_update_is_as_large_as_the_learning_rate_of_its_part(tmp_path):
    """Without decay, Adam's first update of a parameter is its learning rate."""
    prepared = prepared_rows(tmp_path, ROWS, kind="smolvlm", weights=True)
    plan = plan_of(
        tmp_path,
        prepared,
        vision={"train": "all", "learning_rate": 2e-4, "projector_learning_rate": 5e-3},
        optimizer={"weight_decay": 0.0, "warmup_steps": 0, "learning_rate": 1e-3},
        train={"steps": 1},
        checkpoint={"every_steps": 1},
    )
    run = Run(plan, tmp_path / "run")
    base, tuned = stored(tmp_path / "base"), stored(run.checkpoint(1))
    largest = {}
    for name, tensor in base.items():
        change = (tuned[name] - tensor).abs().max().item()
        part = part_of("smolvlm", name)
        largest[part] = max(change, largest.get(part, 0.0))
    assert largest == pytest.approx({"tower": 2e-4, "projector": 5e-3, "text": 1e-3}, rel=1e-3)


def one_and_two_ranks(folder, *, kind="smolvlm", axis="replicate", **sections):
    """A run of three steps on rows of which a few have pictures, on one rank and on two, must be the same."""
    rows = [row(RED, TEXT, answer="red"), *[row(TEXT, answer=f"none {n}") for n in range(3)]] * 3
    prepared = prepared_rows(folder, rows, kind=kind, weights=True)
    plan = plan_of(
        folder,
        prepared,
        **sections
        | {"train": {**STEPS, "steps": 3, "accumulation": 2, "tokens_per_step": 512}}
        | {"optimizer": {"eps": 1e-4}},  # rounding shows in updates by next to nothing
    )
    loader = Loader(prepared, sequence_length=256, layout="padded", seed=0)
    with_pictures = [
        [loader.batch(Cursor(0, 2 * step + rank), 1).pictures is not None for rank in range(2)]
        for step in range(3)
    ]
    assert [True, False] in with_pictures
    assert [False, False] in with_pictures, "the first stage: nothing has a gradient"
    one = train(plan, folder / "one")
    two = train(on_ranks(plan, **{axis: 2}), folder / "two")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    last = "checkpoints/step-00000003"
    ours, theirs = {}, {}
    for tensors, run in ((ours, "one"), (theirs, "two")):
        for file in (folder / run / last).glob("*model*.safetensors"):
            tensors |= load_file(file)
    assert ours.keys() == theirs.keys() and ours
    for name, tensor in ours.items():
        assert_close(theirs[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.soak
def test_layers_are_compiled_while_a_tower_is_trained(tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind="qwen3_vl", weights=True)
    by_mode = [
        Run(
            plan_of(
                tmp_path,
                prepared,
                vision={"train": "all"},
                train={**STEPS, "compile": is_compiled},
            ),
            tmp_path / f"run-{is_compiled}",
        ).losses()
        for is_compiled in (False, True)
    ]
    assert by_mode[1] == pytest.approx(by_mode[0], rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["first stage", "lora on the tower, projector in full", "all"])
def test_ranks_of_which_not_all_have_pictures_train_as_one(name, tmp_path):
    one_and_two_ranks(tmp_path, **(RUNS[name][0] if name in RUNS else ADAPTERS[name]))


UPPER_LAYER = {"target_modules": ["layers.1.self_attn.q_proj"], "vision": "tower"}


@pytest.mark.soak
def test_shards_resume_to_the_same_bits(tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind="smolvlm", weights=True)
    train_plan = {**STEPS, "steps": 4, "accumulation": 2, "tokens_per_step": 512}
    sections = {"train": train_plan, "checkpoint": {"every_steps": 2}}
    plan = plan_of(tmp_path, prepared, vision={"train": "all"}, **sections)
    assert_resumes_bitwise(on_ranks(plan, shard=2), tmp_path)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("smolvlm", {"vision": FIRST_STAGE}),
        ("qwen3_vl", {}),
        ("smolvlm", {"adapter": {}}),
        ("qwen3_vl", {"vision": {"train": "all"}}),
        ("smolvlm", {"adapter": UPPER_LAYER}),
        ("smolvlm", {"vision": {"train": "projector"}, "adapter": {"vision": "tower"}}),
    ],
)
def test_shards_train_as_one_with_a_tower_on_every_rank(kind, sections, tmp_path):
    one_and_two_ranks(tmp_path, kind=kind, axis="shard", **sections)


CHECKPOINTS = {
    "all, averaged": ("adapter.kind=none", "vision.train=all", "train.ema_decay=0.9"),
    "all, Muon": ("adapter.kind=none", "vision.train=all", "optimizer.kind=muon"),
    "LoRA of two bytes": ("adapter.kind=lora", "adapter.vision=all", "adapter.dtype=bfloat16"),
    "projector, int8": (
        *("adapter.kind=lora", "vision.train=projector", "optimizer.state_dtype=int8"),
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_plan_has_the_size_of_a_checkpoint(name, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS[::2], kind="smolvlm", weights=True)
    steps = ("train.max_steps=1", "train.precision=float32", "train.attention=mask")
    given = [f"data.prepared={prepared}", *steps, "checkpoint.every=1 steps", *CHECKPOINTS[name]]
    loaded = load_recipe(tmp_path / "recipe.yaml", given)
    plan = resolve(loaded, local_facts(loaded))
    saved = Run(plan, tmp_path / "run").checkpoint(1)
    tensors = [each for file in saved.glob("*.safetensors") for each in load_file(file).values()]
    assert checkpoint_bytes(plan) == pytest.approx(sum(each.nbytes for each in tensors), rel=0.005)
