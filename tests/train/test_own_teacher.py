"""The model as its own teacher, which is told more: against a computation by hand, and through runs."""

import json
from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_plan
from rollouts_for_tests import assert_resumes_to_the_same_bits, metrics, plan_of, write_recipe
from test_distillation import logits, models
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.facts.prompt_templates import filled, template_fields
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.heads import ScoreSettings
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.recipe.objectives import Grpo, OnPolicyDistill
from bloomery.recipe.schema import Lora
from bloomery.train.objectives.distillation import on_policy_distill
from bloomery.train.objectives.objective import ObjectiveInputs, Scoring
from bloomery.train.objectives.policies import policy
from bloomery.train.rl.rollout import Rollout, RolloutSample, pack, place_samples
from bloomery.train.state import build_state
from bloomery.train.step import compute_loss
from ranks import fields, losses, on_ranks, train


def samples(*, longer: int = 6) -> list[RolloutSample]:
    """Three completions of other lengths, of which the teacher has longer prompts."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 80, (count,), generator=generator).tolist())

    return [
        RolloutSample(
            ids(4),
            ids(length),
            (-0.5,) * length,
            advantage=0.5,
            has_loss=number != 1,
            given=((1, 3),) if number == 2 else (),
            teacher_prompt_ids=ids(longer + number),
        )
        for number, length in enumerate((5, 3, 6))
    ]


def one_by_one(student, teacher, samples: list[RolloutSample], beta: float) -> torch.Tensor:
    """The mean divergence of the sampled tokens: of each completion two forwards of it alone, after each prompt."""
    divergences = []
    for sample in samples:
        if not sample.has_loss:
            continue
        rows = []
        for model, prompt in ((student, sample.prompt_ids), (teacher, sample.teacher_prompt_ids)):
            ids = torch.tensor([[*prompt, *sample.completion_ids]])
            alone = Batch(
                ids,
                torch.zeros_like(ids),
                torch.zeros(ids.shape),
                torch.arange(ids.shape[1])[None],
                torch.zeros_like(ids),
            )
            logprobs = torch.log_softmax(logits(model, alone)[0].double(), -1)
            rows.append(logprobs[len(prompt) - 1 : -1])
        ours, theirs = rows[0], rows[1].detach()
        first, second = (ours, theirs) if beta == 1.0 else (theirs, ours)
        of_tokens = (first.exp() * (first - second)).sum(1)
        given = {place for start, end in sample.given for place in range(start, end)}
        divergences += [of_tokens[n] for n in range(len(of_tokens)) if n not in given]
    return torch.stack(divergences).mean()


def gradients(model) -> list[torch.Tensor]:
    taken = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    model.zero_grad()
    return taken


def objective_of(settings, load_teacher=lambda: None):
    scoring = Scoring(ScoreSettings(7))
    inputs = ObjectiveInputs(settings, "float32", scoring, None, SINGLE_RANK, load_teacher)
    return (policy if isinstance(settings, Grpo) else on_policy_distill)(inputs)


def loss_of(student, objective, rows: int = 1):
    """Of the samples packed into sequences: the sum over its count."""
    batches, _ = pack(samples(), length=32, rows=rows)
    count = sum(objective.count(batch) for batch in batches)
    if objective.before is not None:
        batches = objective.before(student, batches)
    total = 0.0
    for batch in batches:
        parts = compute_loss(student, batch, objective, precision="float32")
        (parts.total / count).backward()
        total += parts.total.item() / count
    return total


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("rows", [1, 2])
def test_another_model_that_is_told_more(divergence, rows):
    student, teacher = models()
    settings = OnPolicyDistill(kind="on_policy_distill", teacher="T", divergence=divergence)
    loss = loss_of(student, objective_of(settings, lambda: teacher), rows)
    ours = gradients(student)
    expected = one_by_one(student, teacher, samples(), 1.0 if divergence == "reverse_kl" else 0.0)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_close(ours, gradients(student), rtol=1e-4, atol=1e-6)


def test_the_model_itself_with_the_weights_of_the_moment():
    student, _ = models()
    settings = OnPolicyDistill(kind="on_policy_distill", teacher="live")
    loss = loss_of(student, objective_of(settings))
    ours = gradients(student)
    expected = one_by_one(student, student, samples(), 1.0)
    expected.backward()
    assert loss > 0
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_close(ours, gradients(student), rtol=1e-4, atol=1e-6)


def test_the_base_under_the_adapter():
    plan = tiny_plan().model_copy(update={"adapter": Lora(kind="lora", rank=4, alpha=8.0)})
    model = build_state(plan).model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    settings = OnPolicyDistill(kind="on_policy_distill", teacher="base")
    loss = loss_of(model, objective_of(settings))
    ours = gradients(model)

    class Base:
        """What `logits` asks of a model, without the adapter."""

        def __call__(self, *args, **kwargs):
            with adapters_disabled(model):
                return model(*args, **kwargs)

    expected = one_by_one(model, Base(), samples(), 1.0)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_close(ours, gradients(model), rtol=1e-4, atol=1e-6)


def test_a_teacher_that_is_told_nothing_else_has_the_same_tokens():
    plain = [replace(sample, teacher_prompt_ids=None) for sample in samples()]
    same = [replace(sample, teacher_prompt_ids=sample.prompt_ids) for sample in samples()]
    student, teacher = models()
    settings = OnPolicyDistill(kind="on_policy_distill", teacher="T")
    objective = objective_of(settings, lambda: teacher)
    totals = []
    for given in (plain, same):
        (batch,), _ = pack(given, length=40, rows=1)
        totals.append(compute_loss(student, batch, objective, precision="float32").total.item())
    assert totals[0] == totals[1]


def test_a_sequence_has_room_for_both():
    (first, second, third) = samples(longer=20)
    assert [place.row for place in place_samples([first, second, third], length=30, rows=3)] == [
        0,
        1,
        2,
    ]
    short = [replace(sample, teacher_prompt_ids=(5,)) for sample in (first, second)]
    assert [place.start for place in place_samples(short, length=30, rows=2)] == [0, 9]


def test_a_checkpoint_keeps_the_prompts_of_the_teacher():
    rollout = Rollout(3, 2, 3, tuple(samples()))
    again = Rollout.of(rollout.tensors(), rollout.scalars())
    assert [sample.teacher_prompt_ids for sample in again.samples] == [
        sample.teacher_prompt_ids for sample in samples()
    ]


def test_fields_of_a_template():
    assert template_fields("{prompt}{{x}} {answer}", where="k") == ["prompt", "answer"]
    assert filled("{{a}} {prompt}", {"prompt": "{p}"}, where="k") == "{a} {p}"
    for template, problem in {
        "{prompt": "brace alone",
        "{prompt.__class__}": "no name of a column",
        "{0}": "no name of a column",
        "{prompt!r}": "no name of a column",
    }.items():
        with pytest.raises(UserError, match=problem):
            template_fields(template, where="k")
    with pytest.raises(UserError, match="no solution; it has answer, prompt"):
        filled("{solution}", {"prompt": "", "answer": ""}, where="k")


# Runs

TOLD = "objective.teacher_prompt_template='{answer}! {prompt}'"
LORA = "adapter={kind: lora, rank: 4}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("own"))


def plan_with(recipe, *edits):
    """Of a model with large weights, which a prompt makes a difference to."""
    objective = "objective={kind: on_policy_distill, teacher: base, num_generations: 2, max_completion_length: 8}"
    return plan_of(recipe, objective, "rewards=[]", TOLD, "model.initializer_range=0.15", *edits)


CASES = {
    "base": (LORA,),
    "live": ("objective.teacher=live",),
    "live, several steps": ("objective.teacher=live", "objective.num_iterations=2"),
    "base, rewards": (
        LORA,
        "objective={kind: grpo, teacher: base, max_completion_length: 8, num_generations: 2}",
        "rewards=[{python: 'my_rewards.py:spaces'}]",
        TOLD,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case):
    events = assert_resumes_to_the_same_bits(plan_with(recipe, *CASES[case]), tmp_path)
    assert metrics(events)[1]["divergence"] > 0
    assert fields(events, "EvalDone")[-1]["metrics"]["divergence"] > 0


def test_a_model_takes_over_what_it_is_told(recipe, tmp_path):
    edits = (LORA, "train.max_steps=25", "optimizer.learning_rate=5e-3")
    steps = metrics(train(plan_with(recipe, *edits), tmp_path))
    assert steps[25]["divergence"] < 0.7 * steps[1]["divergence"]


@pytest.mark.parametrize("case", ["base", "live"])
def test_two_ranks_train_as_one(recipe, tmp_path, case):
    edits = (*CASES[case], "train.max_steps=3")
    alone = train(plan_with(recipe, *edits), tmp_path / "alone")
    for axis in ("replicate", "shard"):
        both = train(on_ranks(plan_with(recipe, *edits), **{axis: 2}), tmp_path / axis)
        assert losses(both) == pytest.approx(losses(alone), rel=1e-5)


def test_the_teachers_prompt_is_formatted_as_that_of_the_model(recipe, tmp_path):
    from bloomery.data.prompts import Prompts
    from bloomery.train.rl.teacher_prompts import TeacherPrompts

    tokenizer = load_tokenizer(recipe / "prepared")
    prompts = Prompts(recipe / "prepared", seed=0)
    with TeacherPrompts("{prompt}", recipe / "prepared", tokenizer, longest=40) as unchanged:
        for number in range(5):
            assert list(unchanged.ids_of(prompts[number])) == prompts[number].ids.tolist()
    with TeacherPrompts("{answer}! {prompt}", recipe / "prepared", tokenizer, longest=40) as told:
        prompt = prompts[0]
        text = f"<s>{json.dumps(prompt.columns['answer'])}! {prompt.text}"
        assert tokenizer.decode(list(told.ids_of(prompt))) == text


REFUSED = {
    "nothing to learn": ("objective.teacher_prompt_template=null", LORA),
    "is not its start": (),
    "no solution; it has answer, prompt": (LORA, "objective.teacher_prompt_template='{solution}'"),
    "and room for": (LORA, f"objective.teacher_prompt_template='{'{prompt}' * 7}'"),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_does_not_fit_is_said(recipe, tmp_path, problem):
    with pytest.raises(UserError, match=problem):
        train(plan_with(recipe, *REFUSED[problem]), tmp_path)


def test_the_plan_names_it(recipe):
    plan = plan_with(recipe, LORA)
    assert ("objective.teacher", "its own teacher") in [(c.key, c.value) for c in plan.choices]
    other = plan_of(recipe, LORA)
    assert plan.memory.parts["teacher"] < 0.1 * other.memory.parts["weights"]
