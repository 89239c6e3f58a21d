"""A teacher with another tokenizer: spans by enumeration, the estimator of a sampled token, templates, and runs."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from plans_for_tests import tiny_config
from rollouts_for_tests import assert_resumes_to_the_same_bits, metrics, plan_of, write_recipe
from test_own_teacher import gradients
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.data.prepare.prepare import prepare
from bloomery.data.prompts import Prompts
from bloomery.data.tokenizer.alignment import Span
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer, load_tokenizer
from bloomery.model.heads import ScoreSettings
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.recipe.load import load_recipe
from bloomery.recipe.objectives import OnPolicyDistill
from bloomery.train.objectives.distillation import on_policy_distill
from bloomery.train.objectives.objective import ObjectiveInputs, Scoring
from bloomery.train.rl.rollout import Rollout, RolloutSample, pack
from bloomery.train.rl.teacher_prompts import TeacherPrompts
from bloomery.train.rl.teacher_texts import TeacherTexts, teacher_texts
from bloomery.train.step import compute_loss
from ranks import fields, losses, on_ranks, train

LETTERS = "abc"
PAIRS = ["".join(pair) for pair in product(LETTERS, repeat=2)]


def letters_tokenizer(*merged: str, letters: str = LETTERS + "\n", special=()) -> Tokenizer:
    """Of letters, and of these pairs of letters."""
    entries = [*special, *letters, *merged]
    library = Library(
        models.BPE(
            vocab={entry: number for number, entry in enumerate(entries)},
            merges=[(pair[0], pair[1]) for pair in merged],
        )
    )
    library.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    library.decoder = decoders.Fuse()
    description = json.loads(library.to_str())
    description["added_tokens"] = [
        {
            "id": number,
            "content": name,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, name in enumerate(special)
    ]
    config = {"eos_token": "</s>", "bos_token": "<s>"} if special else {}
    return Tokenizer(JsonBackend(description, "letters", set(special)), config)


def decoder(vocab_size: int, seed: int):
    config = tiny_config(vocab_size=vocab_size, initializer_range=0.4, tie_embeddings=False)
    return fresh_decoder(config, seed=seed, dtype=torch.float64, attention="mask")


def objective_of(teacher, *, spans: bool = True, temperature: float = 1.0):
    keys = OnPolicyDistill(
        kind="on_policy_distill", teacher="T", estimator="sampled", temperature=temperature
    )
    scoring = Scoring(ScoreSettings(7))
    inputs = ObjectiveInputs(
        keys, "float32", scoring, None, SINGLE_RANK, lambda: teacher, aligns_texts=spans
    )
    return on_policy_distill(inputs)


def loss_of(student, objective, samples, rows: int = 2):
    """The summed loss of the samples, packed into sequences, and its count; the gradient is in the student."""
    batches, _ = pack(samples, length=24, rows=rows)
    count = sum(map(objective.count, batches))
    if objective.before is not None:
        batches = objective.before(student, batches)
    total = 0.0
    for batch in batches:
        parts = compute_loss(student, batch, objective, precision="float32")
        parts.total.backward()
        total += parts.total.item()
    return total, count


def read(texts: TeacherTexts, prompt, completion, teacher_prompt) -> RolloutSample:
    return RolloutSample(
        tuple(prompt),
        tuple(completion),
        (0.0,) * len(completion),
        teacher_prompt_ids=tuple(teacher_prompt),
        teacher_completion=texts.read(completion, room=20),
    )


def logprobs(model, ids, temperature):
    """[T, V], of the token after each."""
    logits = model(torch.tensor([ids])).head[0]
    return torch.log_softmax(logits / temperature, -1)


# The estimator


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_mean_over_all_continuations_is_the_divergence_of_spans(temperature):
    """Two letters of the student are one token of the teacher: nine continuations, each with its probability."""
    student_tokenizer = letters_tokenizer()
    teacher_tokenizer = letters_tokenizer(*PAIRS)
    texts = TeacherTexts(
        student=student_tokenizer, teacher=teacher_tokenizer, stop_ids=(), end_id=None
    )
    # The student writes letters alone: its vocabulary has no other entry.
    student = decoder(len(LETTERS), seed=0)
    teacher = decoder(teacher_tokenizer.vocab_size, seed=1).requires_grad_(False)
    prompt = student_tokenizer.encode("cab")
    teacher_prompt = teacher_tokenizer.encode("cab")

    # By hand: KL of the distributions of both over two letters.
    first = logprobs(student, prompt, temperature)[-1]
    teacher_logps = logprobs(teacher, teacher_prompt, temperature)[-1]
    divergence = torch.zeros(())
    weights = {}
    for one, two in product(range(len(LETTERS)), repeat=2):
        logp = first[one] + logprobs(student, [*prompt, one], temperature)[-1, two]
        pair = teacher_tokenizer.id_of(LETTERS[one] + LETTERS[two])
        divergence = divergence + logp.exp() * (logp - teacher_logps[pair])
        weights[one, two] = logp.detach().exp().item()
    divergence.backward()
    expected = gradients(student)
    assert sum(weights.values()) == pytest.approx(1)

    # Of every continuation the loss of its one span, times its probability.
    objective = objective_of(teacher, temperature=temperature)
    total = 0.0
    means = [torch.zeros_like(gradient) for gradient in expected]
    for completion, weight in weights.items():
        sample = read(texts, prompt, completion, teacher_prompt)
        assert sample.teacher_completion.spans == (Span(0, 2, 0, 1),)
        loss, count = loss_of(student, objective, [sample])
        assert count == 2
        total += weight * loss
        for mean, gradient in zip(means, gradients(student), strict=True):
            mean += weight * gradient
    assert total == pytest.approx(divergence.item(), rel=1e-6)
    assert_close(means, expected, rtol=1e-5, atol=1e-8)


SPECIAL = ("<s>", "</s>")


def renumbered(tokenizer: Tokenizer) -> tuple[Tokenizer, torch.Tensor]:
    """The same tokens under other ids, and the former id of each."""
    description = json.loads(tokenizer.json)
    vocab = description["model"]["vocab"]
    size = len(vocab)
    description["model"]["vocab"] = {token: (id_ + 3) % size for token, id_ in vocab.items()}
    for entry in description["added_tokens"]:
        entry["id"] = (entry["id"] + 3) % size
    former = (torch.arange(size) - 3) % size
    return Tokenizer(JsonBackend(description, "t", set(SPECIAL)), tokenizer.config), former


def renumbered_model(model, former):
    """The same model of the renumbered tokens."""
    other = decoder(len(former), seed=5)
    state = dict(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][former]
    other.load_state_dict(state)
    return other.requires_grad_(False)


@pytest.fixture(scope="module")
def tokenizers():
    student = letters_tokenizer("ab", "bc", special=SPECIAL)
    return student, *renumbered(student)


def samples_of(texts, teacher_tokenizer, *, plain: bool = False) -> list[RolloutSample]:
    """Completions that end, and one that was cut off; `plain`: as a teacher with the same tokenizer reads them."""
    student = texts.student
    samples = []
    for number, text in enumerate(("abcab", "cc", "", "bcbca")):
        ids = [*student.encode(text), *([student.eos_id] if number < 3 else [])]
        prompt = student.encode("acb"[number % 3])
        sample = read(texts, prompt, ids, teacher_tokenizer.encode("acb"[number % 3]))
        samples.append(
            replace(sample, teacher_prompt_ids=None, teacher_completion=None) if plain else sample
        )
    return samples


@pytest.mark.parametrize("rows", [1, 2])
def test_one_token_per_span_is_the_estimator_of_a_sampled_token(tokenizers, rows):
    student_tokenizer, teacher_tokenizer, former = tokenizers
    texts = teacher_texts(
        student_tokenizer, teacher_tokenizer, turns=False, stop_ids=(student_tokenizer.eos_id,)
    )
    size = student_tokenizer.vocab_size
    student, teacher = decoder(size, seed=0), decoder(size, seed=1).requires_grad_(False)
    plain = samples_of(texts, teacher_tokenizer, plain=True)
    expected = loss_of(student, objective_of(teacher, spans=False), plain, rows)
    expected_gradients = gradients(student)
    samples = samples_of(texts, teacher_tokenizer)
    found = loss_of(student, objective_of(renumbered_model(teacher, former)), samples, rows)
    assert found[1] == expected[1] == 4 + 3 + 1 + 3
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_close(gradients(student), expected_gradients, rtol=1e-5, atol=1e-8)


def test_a_teacher_that_writes_the_same_texts_teaches_nothing(tokenizers):
    student_tokenizer, teacher_tokenizer, former = tokenizers
    texts = teacher_texts(
        student_tokenizer, teacher_tokenizer, turns=False, stop_ids=(student_tokenizer.eos_id,)
    )
    student = decoder(student_tokenizer.vocab_size, seed=0)
    samples = samples_of(texts, teacher_tokenizer)
    total, count = loss_of(student, objective_of(renumbered_model(student, former)), samples)
    assert count > 0
    assert total == pytest.approx(0, abs=1e-6)  # logits are float32
    assert max(float(gradient.abs().max()) for gradient in gradients(student)) < 1e-5


def test_another_spelling_than_the_tokenizers_own_is_left_out(tokenizers):
    """A teacher has one probability of the text, of which each spelling of the student would have a share."""
    student_tokenizer, teacher_tokenizer, _ = tokenizers
    texts = teacher_texts(
        student_tokenizer, teacher_tokenizer, turns=False, stop_ids=(student_tokenizer.eos_id,)
    )
    a, b, c = (student_tokenizer.id_of(letter) for letter in LETTERS)
    completion = texts.read([c, a, b, c, student_tokenizer.eos_id], room=9)
    assert completion.spans == (Span(0, 1, 0, 1), Span(3, 4, 2, 3), Span(4, 5, 3, 4))
    assert teacher_tokenizer.decode(list(completion.ids)) == "cabc</s>"


def test_no_more_is_read_than_there_is_room_for(tokenizers):
    student_tokenizer, teacher_tokenizer, _ = tokenizers
    texts = teacher_texts(
        student_tokenizer, teacher_tokenizer, turns=False, stop_ids=(student_tokenizer.eos_id,)
    )
    ids = [*student_tokenizer.encode("cccc"), student_tokenizer.eos_id]
    assert len(texts.read(ids, room=5).spans) == 5
    assert len(texts.read(ids, room=4).spans) == 3
    assert texts.read(ids, room=0).spans == ()


# Checkpoints and runs


def test_a_checkpoint_keeps_what_the_teacher_reads(tokenizers):
    student_tokenizer, teacher_tokenizer, _ = tokenizers
    texts = teacher_texts(
        student_tokenizer, teacher_tokenizer, turns=False, stop_ids=(student_tokenizer.eos_id,)
    )
    rollout = Rollout(3, 2, 3, tuple(samples_of(texts, teacher_tokenizer)))
    assert Rollout.of(rollout.tensors(), rollout.scalars()) == rollout


WRITTEN = "".join(map(chr, range(32, 127))) + "\n"


def write_both(folder: Path, *edits: str) -> Path:
    """A student of letters in a recipe with these edits, and a teacher with merges of its own."""
    student = letters_tokenizer("de", "x)", letters=WRITTEN, special=SPECIAL)
    student.save(folder / "student")
    write_recipe(folder, f"tokenizer={{from: {folder / 'student'}}}", *edits)
    merged = ("re", "f ", "ee", "  ", "qz")
    teacher = letters_tokenizer(*merged, letters="\n" + WRITTEN[:-1], special=SPECIAL)
    teacher.save(folder / "teacher")
    config = replace(
        plan_with(
            folder,
            "objective.teacher=live",
            "objective.teacher_prompt_template='! {prompt}'",
            *edits,
        ).model.config,
        num_layers=3,
        initializer_range=0.2,
        vocab_size=teacher.vocab_size,
    )
    write_model(model_state(fresh_decoder(config, seed=7)), config, folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_both(tmp_path_factory.mktemp("spans"))


def plan_with(folder, *edits):
    objective = (
        f"objective={{kind: on_policy_distill, teacher: {folder / 'teacher'}, num_generations: 2,"
        " max_completion_length: 8, estimator: sampled}"
    )
    return plan_of(
        folder, f"tokenizer={{from: {folder / 'student'}}}", objective, "rewards=[]", *edits
    )


CASES = {
    "alone": (),
    "told more": ("objective.teacher_prompt_template='{answer}! {prompt}'",),
    "streamed": ("objective.teacher_stream=layers",),
    "with rewards": (
        "objective.kind=grpo",
        "rewards=[{python: 'my_rewards.py:spaces'}]",
        "objective.teacher_kl_coef=0.5",
        "objective.entropy_coef=0.01",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    recipe, tmp_path, monkeypatch, case
):
    monkeypatch.chdir(recipe)  # the path of its reward is relative
    whole = assert_resumes_to_the_same_bits(plan_with(recipe, *CASES[case]), tmp_path)
    (evaluated, *_) = fields(whole, "EvalDone")
    assert evaluated["metrics"]["divergence"] > 0
    assert 0.5 < evaluated["metrics"]["aligned"] <= 1
    assert 0.5 < metrics(whole)[1]["aligned"] <= 1


def test_a_run_comes_closer_to_its_teacher(recipe, tmp_path):
    edits = ("train.max_steps=25", "optimizer.learning_rate=5e-3", "eval.every=25 steps")
    events = train(plan_with(recipe, *edits), tmp_path)
    assert losses(events)[25] < 0.7 * losses(events)[1]
    assert fields(events, "EvalDone")[-1]["loss"] < 0.8 * losses(events)[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_two_ranks_train_as_one(recipe, tmp_path, axis):
    edits = ("train.max_steps=3",)
    alone = train(plan_with(recipe, *edits), tmp_path / "alone")
    both = train(on_ranks(plan_with(recipe, *edits), **{axis: 2}), tmp_path / "both")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.parametrize("place", ["objective.teacher_stream=layers", "parallel.scoring_devices=1"])
def test_a_teacher_in_another_place_gives_the_same_losses(recipe, tmp_path, place):
    edits = ("train.max_steps=3",)
    resident = train(plan_with(recipe, *edits), tmp_path / "resident")
    elsewhere = train(plan_with(recipe, *edits, place), tmp_path / "elsewhere")
    assert losses(elsewhere) == losses(resident)
    assert metrics(elsewhere) == metrics(resident)


TEMPLATE = """{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
THINKS = """{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>
{% endfor %}{% if add_generation_prompt %}[assistant] {% if thinks is undefined or thinks %}hm {% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def chat(recipe, tmp_path_factory):
    """The same models with chat templates of their own, and conversations as prompts."""
    folder = tmp_path_factory.mktemp("chat")
    for name, template in (("student", TEMPLATE), ("teacher", THINKS)):
        shutil.copytree(recipe / name, folder / name)
        (folder / name / "chat_template.jinja").write_text(template)
    for name in ("rl.yaml", "my_rewards.py"):
        shutil.copy(recipe / name, folder / name)
    rows = [
        {"prompt": [{"role": "user", "content": f"def f{number}(x)"}], "answer": number}
        for number in range(60)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    student = f"tokenizer={{from: {folder / 'student'}}}"
    prepare(load_recipe(str(folder / "rl.yaml"), [student]), folder / "prepared")
    return folder


def test_conversations_are_formatted_by_the_template_of_each(chat, tmp_path):
    silent = "objective.teacher_template_kwargs={thinks: false}"
    events = train(plan_with(chat, silent, "train.max_steps=2"), tmp_path)
    assert 0.5 < metrics(events)[1]["aligned"] <= 1
    teacher = load_tokenizer(chat / "teacher")
    prompt = Prompts(chat / "prepared", seed=0)[0]
    content = prompt.messages[0]["content"]
    for variables, header in (({}, "[assistant] hm "), ({"thinks": False}, "[assistant] ")):
        with TeacherPrompts(
            None, chat / "prepared", teacher, longest=48, variables=variables
        ) as prompts:
            ids = prompts.ids_of(prompt)
        assert teacher.decode(list(ids)) == f"[user] {content}</s>\n{header}"


def test_a_variable_that_the_teachers_template_lacks_is_named(chat, tmp_path):
    with pytest.raises(UserError, match="has no variable 'loud'") as error:
        train(plan_with(chat, "objective.teacher_template_kwargs={loud: true}"), tmp_path)
    assert error.value.where == "objective.teacher_template_kwargs"


# The plan


def test_the_plan_says_how_much_of_the_prompts_both_read_alike(recipe):
    plan = plan_with(recipe)
    (choice,) = [choice for choice in plan.choices if choice.value == "spans of text"]
    assert choice.key == "objective.estimator"
    assert plan.dataset.alignment.aligned == plan.dataset.alignment.tokens > 0
    assert 0 < plan.dataset.alignment.alone < plan.dataset.alignment.tokens
    assert plan.memory.parts["teacher"] > 0


def test_whole_vocabularies_of_other_tokens_are_refused(recipe):
    with pytest.raises(UserError, match=r"another tokenizer: id 2 is") as error:
        plan_with(recipe, "objective.estimator=full")
    assert "objective.estimator=sampled" in error.value.fix


def test_the_teacher_is_loaded_for_spans_alone(recipe):
    from bloomery.train.objectives.teacher import TeacherPlan, load_teacher

    plan = TeacherPlan.of(plan_with(recipe))
    assert plan.aligns_texts
    assert load_tokenizer(plan.folder).hash != load_tokenizer(plan.prepared).hash
    load_teacher(plan)
    with pytest.raises(UserError, match="another tokenizer"):
        load_teacher(replace(plan, aligns_texts=False))
