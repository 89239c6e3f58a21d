"""A teacher's probabilities: by hand, as TRL has them, in chunks, and through a run."""

import pytest
import torch
import torch.nn.functional as F
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, Run
from test_step import batch
from torch.testing import assert_close

from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.model.divergence import Divergence, DivergenceMeasure, Teacher
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import EvalDone, StepDone
from bloomery.recipe.objectives import Distill
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.distillation import distillation
from bloomery.train.objectives.losses import means
from bloomery.train.objectives.teacher import TeacherPlan, meta_teacher, teacher_attention
from bloomery.train.step import compute_loss, train_step
from device_for_tests import DEVICE
from models_for_tests import make_model


def models(vocab_size: int = 97):
    student = fresh_decoder(tiny_config(), seed=0, dtype=torch.float64, attention="mask")
    teacher = fresh_decoder(
        tiny_config(
            hidden_size=48,
            num_layers=3,
            initializer_range=0.3,
            final_softcap=5.0,
            vocab_size=vocab_size,
        ),
        seed=1,
        dtype=torch.float64,
        attention="mask",
    )
    return student, teacher.eval().requires_grad_(False)


def logits(model, inputs):
    output = model(inputs.tokens, positions_BT=inputs.positions, documents_BT=inputs.documents)
    return output.head


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_and_its_gradient_are_those_of_whole_logits(chunk, temperature):
    student, teacher = models()
    inputs = batch(3)
    keys = Distill(kind="distill", teacher="", temperature=temperature, kd_ratio=0.3)
    loss = compute_loss(
        student, inputs, distillation(keys, teacher, chunk=chunk), precision="float32"
    )
    loss.total.backward()
    gradients = [parameter.grad.clone() for parameter in student.parameters()]
    student.zero_grad()
    student_logits = logits(student, inputs).flatten(0, 1)
    teacher_logits = logits(teacher, inputs).flatten(0, 1)
    divergences = F.kl_div(
        F.log_softmax(student_logits / temperature, -1),
        F.log_softmax(teacher_logits / temperature, -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    nats = F.cross_entropy(student_logits, inputs.labels.flatten(), reduction="none")
    weights = inputs.loss_mask.flatten()
    expected = ((0.3 * temperature**2 * divergences + 0.7 * nats) * weights).sum()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-9)
    metrics = {
        "kl": (divergences * weights).sum() / weights.sum(),
        "nats": (nats * weights).sum() / weights.sum(),
    }
    assert means(loss.metrics) == pytest.approx(
        {name: value.item() for name, value in metrics.items()}
    )
    expected.backward()
    assert_close(gradients, [parameter.grad for parameter in student.parameters()])


def test_it_agrees_with_trl():
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = models()
    inputs = batch(3)
    keys = Distill(kind="distill", teacher="", temperature=1.7, kd_ratio=1.0)
    our_loss = compute_loss(
        student, inputs, distillation(keys, teacher, chunk=7), precision="float32"
    )
    labels = torch.where(inputs.loss_mask > 0, inputs.labels, -100)
    their_loss = gkd.GKDTrainer.generalized_jsd_loss(
        logits(student, inputs), logits(teacher, inputs), labels=labels, beta=0, temperature=1.7
    )
    # TRL leaves out the square of the temperature
    assert (our_loss.total / our_loss.count).item() == pytest.approx(
        their_loss.item() * 1.7**2, rel=1e-4
    )


def test_a_teacher_whose_embeddings_are_padded_further_is_a_teacher_all_the_same():
    student, teacher = models(vocab_size=128)
    inputs = batch(2)
    keys = Distill(kind="distill", teacher="", kd_ratio=1.0)
    loss = compute_loss(student, inputs, distillation(keys, teacher, chunk=7), precision="float32")
    teacher_logprobs = F.log_softmax(logits(teacher, inputs)[..., :97], -1)
    divergences = F.kl_div(
        F.log_softmax(logits(student, inputs), -1),
        teacher_logprobs,
        reduction="none",
        log_target=True,
    ).sum(-1)
    assert loss.total.item() == pytest.approx(
        (divergences * inputs.loss_mask).sum().item(), rel=1e-9
    )


def test_whole_logits_never_exist():
    student, teacher = models()
    row_counts = []

    class RowCounter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (97,):
                row_counts.append(result.shape[0])
            return result

    with RowCounter():
        head = distillation(Distill(kind="distill", teacher=""), teacher, chunk=4)
        compute_loss(student, batch(3), head, precision="float32").total.backward()
    # rows of weights (97 columns of the transposed ones) or of a chunk, never the 96 positions
    assert max(row_counts) <= 48
    assert isinstance(head.head(batch(1)), Divergence)


def test_accumulation_takes_the_step_of_one_large_batch():
    from test_step import halves, model_and_optimizer, weights

    teacher = models()[1].float().to(DEVICE)
    keys = Distill(kind="distill", teacher="", temperature=2.0)
    results = []
    for batches in ([batch(5)], halves(batch(5))):
        learner, plan = model_and_optimizer()
        results.append(
            (
                train_step(
                    learner, batches, distillation(keys, teacher, chunk=9), plan=plan, lr_scale=1.0
                ),
                learner,
            )
        )
    (single_step, learner_of_one), (accumulated_step, accumulating_learner) = results
    assert single_step.loss == pytest.approx(accumulated_step.loss, rel=1e-6)
    assert single_step.metrics == pytest.approx(accumulated_step.metrics, rel=1e-5)
    assert_close(weights(learner_of_one), weights(accumulating_learner), atol=2e-5, rtol=0)


def test_a_run_learns_from_its_teacher(prepared, tmp_path):
    folder = tmp_path / "teacher"
    folder.mkdir()
    load_tokenizer(prepared).save(folder)
    write_model(model_state(fresh_decoder(CONFIG, seed=7)), CONFIG, folder)
    keys = Distill(kind="distill", teacher=str(folder), kd_ratio=1.0)
    sections = {
        "train": {"steps": 10},
        "eval": {"every_steps": 5},
        "checkpoint": {"every_steps": 10},
    }
    run = Run(
        tiny_plan(prepared, config=CONFIG, **sections).model_copy(update={"objective": keys}),
        tmp_path / "run",
    )
    first_step = run.of(StepDone)[0]
    last_step = run.of(StepDone)[-1]
    assert first_step.loss == pytest.approx(first_step.metrics["kl"], rel=1e-5)
    assert last_step.metrics["kl"] < 0.7 * first_step.metrics["kl"]
    evaluation = run.of(EvalDone)[-1]
    assert evaluation.metrics["kl"] < first_step.metrics["kl"]
    assert evaluation.perplexity is evaluation.bits_per_byte is None


def test_a_teacher_of_other_words_is_refused(prepared, tmp_path):
    make_model(tmp_path)
    keys = Distill(kind="distill", teacher=str(tmp_path))
    with pytest.raises(UserError, match="the teacher has"):
        build_objective(tiny_plan(prepared).model_copy(update={"objective": keys}))


def test_finite_differences():
    student, teacher = models()
    inputs = batch(1)
    places = slice(13, 22)
    labels = inputs.labels[:, places]
    loss_mask = inputs.loss_mask[:, places]
    assert 5 < loss_mask.sum() < 9  # a chunk of five and a part of one
    measure = DivergenceMeasure("forward_kl", 1.3)
    teaching = Teacher(lambda places: hidden.flatten(0, 1)[places], teacher.lm_head, 5.0)
    head = Divergence(labels, loss_mask, 5, measure, teaching)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 9, 48, dtype=torch.float64, generator=generator)
    states = torch.randn(1, 9, 32, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda states: head(states, student.lm_head, None), (states,))


def teacher_plan_of(plan, teacher: str) -> TeacherPlan:
    keys = Distill(kind="distill", teacher=teacher)
    return TeacherPlan.of(plan.model_copy(update={"objective": keys}))


def test_a_teacher_gets_an_attention_that_computes_what_it_needs(tmp_path):
    """The student's kernel knows neither its window nor its soft-cap."""
    run_plan = tiny_plan(model={"attention": "varlen"}, train={"device": "cuda"})
    plan = teacher_plan_of(run_plan, str(tmp_path))
    assert teacher_attention(tiny_config(), plan) == "varlen"
    assert teacher_attention(tiny_config(attention_softcap=30.0), plan) == "blockwise"
    short_config = tiny_config(positions="learned", max_positions=16)
    with pytest.raises(UserError, match="16 learned positions"):
        teacher_attention(short_config, plan)


def test_a_teacher_that_is_simulated_has_the_attention_of_the_one_that_teaches(tmp_path):
    gemma = {
        "norm": "rms_unit_offset",
        "norm_placement": "both",
        "scale_embeddings": True,
        "activation": "gelu_tanh",
    }
    config = tiny_config(family="gemma2", qk_norm="none", attention_softcap=30.0, **gemma)
    write_model(model_state(fresh_decoder(config, seed=0)), config, tmp_path)
    plan = tiny_plan(model={"attention": "varlen"}, train={"device": "cuda"})
    with torch.device("meta"):
        assert meta_teacher(teacher_plan_of(plan, str(tmp_path))).model.backend == "blockwise"
