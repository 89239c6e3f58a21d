"""Pictures beside what else a run can do: pairs, a quantized base, and ranks of which one has no picture."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from plans_for_tests import tiny_plan
from runs_of_the_loop import Run
from transformers import AutoModelForImageTextToText

from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.data.pictures.encoder import saved_vision
from bloomery.facts.pictures import vision_of
from bloomery.model.configs import read_config
from bloomery.model.io.stored import vision_tensors
from bloomery.recipe.objectives import Distill, Kto, OrPo, Preference, Reward, Sft, SimPo
from bloomery.recipe.schema import Lora, NoAdapter, Quantize
from bloomery.train.objectives.teacher import teacher_vision
from bloomery.train.state import build_state
from pictures_for_tests import BLUE, RED, TEXT, prepared_rows, row, save_base
from ranks import losses, on_ranks, train

ADAPTER = Lora(kind="lora", rank=8, alpha=16.0, target_modules=["q_proj", "down_proj"])
BETA = 0.5


def pair(*parts, chosen, rejected):
    answers = {"chosen": chosen, "rejected": rejected}
    sides = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    return {"prompt": [{"role": "user", "content": list(parts)}], **sides}


PAIRS = [
    pair(RED, TEXT, chosen="red", rejected="something blue"),
    pair(TEXT, BLUE, chosen="blue", rejected="no color"),
]
MARKED = [
    {
        "prompt": [{"role": "user", "content": [picture, TEXT]}],
        "completion": [{"role": "assistant", "content": answer}],
        "label": answer == "red",
    }
    for picture, answer in ((RED, "red"), (BLUE, "a green one"))
]
ROWS = [row(RED, TEXT), row(TEXT, answer="which?"), row(BLUE, TEXT, answer="blue")] * 6


def plan_of(folder, prepared, *, objective, quantize=None, adapter=ADAPTER, **sections):
    base = folder / "base"
    config = read_config(base)
    plan = tiny_plan(
        prepared,
        config=replace(config, head="values") if objective.spec.values else config,
        **{
            "model": {"source": base},
            "data": {"sequence_length": 256, "layout": "padded"},
            "optimizer": {"warmup_steps": 0},
            **sections,
        },
    )
    changes = {"adapter": adapter, "objective": objective}
    if quantize is not None:
        changes["quantize"] = Quantize(kind=quantize)
    return plan.model_copy(update=changes)


def log_probability(model, tokens, labels, mask, inputs):
    """Of the marked labels of one text with one picture."""
    token = vision_of(model.config.to_dict()).image_token_id
    is_gemma = model.config.model_type == "gemma3"
    name = "token_type_ids" if is_gemma else "mm_token_type_ids"
    types = {name: (tokens == token).long()[None]}
    with torch.no_grad():
        logits = model(input_ids=tokens[None], **inputs, **types).logits[0]
    losses_T = F.cross_entropy(logits, labels, reduction="none")
    return -(losses_T * mask).sum()


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_dpo_has_the_loss_of_the_whole_model_of_transformers(kind, tmp_path):
    """By hand, with the adapter after the first step: before it, every pair loses ln 2."""
    prepared = prepared_rows(tmp_path, PAIRS * 4, kind=kind, weights=True, objective="dpo")
    plan = plan_of(
        tmp_path,
        prepared,
        objective=Preference(kind="dpo", beta=BETA),
        train={"steps": 2, "micro_batch_size": 2, "accumulation": 1, "tokens_per_step": 512},
        checkpoint={"every_steps": 1},
        eval={"every_steps": None},
    )
    run = Run(plan, tmp_path / "run")
    assert run.losses()[1] == pytest.approx(0.6931472, abs=1e-6)

    loader = Loader(prepared, sequence_length=256, layout="padded", seed=plan.train.seed)
    batch = loader.batch(Cursor(plan.train.seed, 2), 2)
    base = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    ).eval()
    tuned = PeftModel.from_pretrained(base, run.checkpoint(1)).eval()

    num_texts = int(batch.sequences.max()) + 1
    assert num_texts == 4
    # The answers of a pair have one picture, which the tower reads once.
    taken = batch.pictures.taken.chunk(num_texts)
    assert batch.pictures.num_tokens == 2 * len(taken[0])
    numbers = [int(tokens[0]) // len(tokens) for tokens in taken]
    pictures = {name: value.chunk(2) for name, value in batch.pictures.inputs.items()}
    pictures.pop("num_crops", None)
    gains = []
    for number in range(num_texts):
        is_here = batch.sequences == number
        text = (batch.tokens[is_here], batch.labels[is_here], batch.loss_mask[is_here])
        inputs = {name: parts[numbers[number]] for name, parts in pictures.items()}
        gain = log_probability(tuned, *text, inputs)
        with tuned.disable_adapter():
            gain = gain - log_probability(tuned, *text, inputs)
        gains.append(gain)
    margins = torch.stack(gains[::2]) - torch.stack(gains[1::2])
    expected = -F.logsigmoid(BETA * margins).mean()
    assert abs(expected.item() - 0.6931472) > 1e-3
    assert run.losses()[2] == pytest.approx(expected.item(), abs=1e-5)


IN_FULL = [
    (Preference(kind="ipo", beta=BETA), PAIRS),
    (SimPo(kind="simpo"), PAIRS),
    (OrPo(kind="orpo"), PAIRS),
    (Reward(kind="reward"), PAIRS),
    (Kto(kind="kto"), MARKED),
    (Sft(kind="sft"), [ROWS[0], ROWS[2]]),
]


def whole_logits(folder, batch):
    """Of transformers' model in the folder, for rows of one document each."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    token = vision_of(model.config.to_dict()).image_token_id
    name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    inputs = {key: value for key, value in batch.pictures.inputs.items() if key != "num_crops"}
    mask = (batch.documents >= 0).long()
    types = {name: (batch.tokens == token).long()}
    with torch.no_grad():
        return model(input_ids=batch.tokens, attention_mask=mask, **inputs, **types).logits


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_a_teacher_sees_the_pictures_with_its_own_tower(kind, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS[:3], kind=kind, weights=True)
    teacher = tmp_path / "teacher"
    save_base(kind, teacher, weights=True, seed=1)
    plan = plan_of(
        tmp_path,
        prepared,
        objective=Distill(kind="distill", teacher=str(teacher), temperature=2.0, kd_ratio=1.0),
        train={"steps": 1, "micro_batch_size": 3, "accumulation": 1, "tokens_per_step": 768},
        eval={"every_steps": None},
    )
    loss = Run(plan, tmp_path / "run").losses()[1]

    loader = Loader(prepared, sequence_length=256, layout="padded", seed=plan.train.seed)
    batch = loader.batch(Cursor(plan.train.seed, 0), 3)
    student, taught = (
        F.log_softmax(whole_logits(folder, batch)[batch.loss_mask > 0] / 2.0, -1)
        for folder in (tmp_path / "base", teacher)
    )
    divergence = F.kl_div(student, taught, log_target=True, reduction="batchmean")
    assert divergence > 1e-3
    assert loss == pytest.approx(4.0 * divergence.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("smolvlm", "in another way than the model"), (None, "the teacher reads text alone")],
)
def test_a_teacher_that_sees_no_such_pictures_is_refused(kind, message, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS[:3], kind="qwen3_vl")
    source = saved_vision(prepared)
    save_base(kind or "qwen3_vl", tmp_path / "teacher")
    if kind is None:
        config = tmp_path / "teacher" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text())["text_config"]))
    with pytest.raises(UserError, match=message):
        teacher_vision(tmp_path / "teacher", source)


def test_a_teacher_whose_processor_scales_otherwise_is_refused(tmp_path):
    prepared = prepared_rows(tmp_path, ROWS[:3], kind="gemma3")
    file = tmp_path / "base" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    assert teacher_vision(tmp_path / "base", saved_vision(prepared)).kind == "gemma3"
    file.write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    with pytest.raises(UserError, match="in another way than the model"):
        teacher_vision(tmp_path / "base", saved_vision(prepared))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("objective", "rows"), IN_FULL, ids=[objective.kind for objective, _ in IN_FULL]
)
def test_pictures_matter_and_are_alone_as_together(objective, rows, tmp_path):
    """In full, and in the second step: before the first, a model is its own reference."""

    def second_loss(name, *, together, color="blue"):
        folder = tmp_path / name
        folder.mkdir()
        prepared = prepared_rows(
            folder, rows, kind="qwen3_vl", weights=True, objective=objective.kind, blue=color
        )
        size = 2 if together else 1
        plan = plan_of(
            folder,
            prepared,
            objective=objective,
            adapter=ADAPTER if objective.spec.values else NoAdapter(),
            train={
                "steps": 2,
                "micro_batch_size": size,
                "accumulation": 2 // size,
                "tokens_per_step": 512,
            },
            eval={"every_steps": None},
        )
        return Run(plan, folder / "run").losses()[2]

    together = second_loss("together", together=True)
    assert second_loss("alone", together=False) == pytest.approx(together, abs=2e-6)
    assert abs(second_loss("green", together=True, color="green") - together) > 2e-5


def test_a_quantized_base_has_the_tower_as_published(tmp_path):
    prepared = prepared_rows(tmp_path, [ROWS[0], ROWS[2]], kind="smolvlm", weights=True)
    plan = plan_of(
        tmp_path,
        prepared,
        objective=Sft(kind="sft"),
        quantize="nf4",
        train={"steps": 3, "micro_batch_size": 2, "accumulation": 1, "tokens_per_step": 512},
    )
    run = Run(plan, tmp_path / "run")
    assert run.losses()[3] < run.losses()[1]
    state = build_state(plan, resume_from=run.checkpoint(3))
    stored = vision_tensors(tmp_path / "base")
    tower = dict(state.model.vision.tower.named_parameters())
    assert tower.keys() == {name.removeprefix("model.") for name in stored}
    published = AutoModelForImageTextToText.from_pretrained(tmp_path / "base").model
    for name, parameter in tower.items():
        assert torch.equal(parameter, published.get_parameter(name)), name


@pytest.mark.soak
@pytest.mark.parametrize("name", ["dpo", "dpo in full", "distill"])
def test_over_shards_references_and_teachers_see_the_same(name, tmp_path):
    teacher = tmp_path / "teacher"
    save_base("qwen3_vl", teacher, weights=True, seed=1)
    objective = Preference(kind="dpo", beta=BETA)
    if name == "distill":
        objective = Distill(kind="distill", teacher=str(teacher), kd_ratio=1.0)
    rows = ROWS if name == "distill" else PAIRS * 6
    kind = "sft" if name == "distill" else "dpo"
    prepared = prepared_rows(tmp_path, rows, weights=True, objective=kind)
    plan = plan_of(
        tmp_path,
        prepared,
        objective=objective,
        adapter=NoAdapter() if name == "dpo in full" else ADAPTER,
        train={"steps": 4, "micro_batch_size": 1, "accumulation": 4, "tokens_per_step": 1024},
        eval={"every_steps": None},
    )
    alone, many = train(plan, tmp_path / "one"), train(on_ranks(plan, shard=2), tmp_path / "many")
    assert losses(many) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(alone)[4] != losses(alone)[1]


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_two_ranks_of_which_one_has_no_picture_train_as_one(kind, tmp_path):
    prepared = prepared_rows(tmp_path, ROWS, kind=kind, weights=True)
    plan = plan_of(
        tmp_path,
        prepared,
        objective=Sft(kind="sft"),
        train={"steps": 4, "micro_batch_size": 1, "accumulation": 4, "tokens_per_step": 1024},
        eval={"every_steps": None},
    )
    two = on_ranks(plan, replicate=2)
    has_pictures = []
    for rank in (0, 1):
        loader = Loader(
            prepared,
            sequence_length=256,
            layout="padded",
            seed=plan.train.seed,
            data_rank=rank,
            data_world=2,
        )
        size = two.train.micro_batch_size * 2
        cursors = [Cursor(plan.train.seed, first) for first in range(0, 16, size)]
        has_pictures.append([loader.batch(each, size).pictures is not None for each in cursors])
    assert any(one and not other for one, other in zip(*has_pictures, strict=True))
    assert any(other and not one for one, other in zip(*has_pictures, strict=True))

    alone, many = train(plan, tmp_path / "one"), train(two, tmp_path / "many")
    assert losses(many).keys() == {1, 2, 3, 4}
    assert losses(many) == pytest.approx(losses(alone), rel=0, abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "objective", "rows"),
    [
        ("gemma3", Sft(kind="sft"), ROWS),
        ("gemma4", Sft(kind="sft"), ROWS),
        ("qwen3_vl", Preference(kind="dpo", beta=BETA), PAIRS * 6),
    ],
)
def test_compiled_layers_lose_the_same(kind, objective, rows, tmp_path):
    prepared = prepared_rows(tmp_path, rows, kind=kind, weights=True, objective=objective.kind)
    steps = {"steps": 3, "micro_batch_size": 1, "accumulation": 3, "tokens_per_step": 768}
    by_mode = [
        Run(
            plan_of(
                tmp_path,
                prepared,
                objective=objective,
                train={**steps, "compile": is_compiled},
                eval={"every_steps": None},
            ),
            tmp_path / f"run-{is_compiled}",
        ).losses()
        for is_compiled in (False, True)
    ]
    assert by_mode[1] == pytest.approx(by_mode[0], rel=1e-5)
