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
from bloomery.model.heads import Divergence, Teacher
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.monitor.events import EvalDone, StepDone
from bloomery.recipe.objectives import Distill
from bloomery.train.objectives.build import build_objective, distillation
from bloomery.train.objectives.distillation import TeacherPlan, meta_teacher, teacher_attention
from bloomery.train.objectives.losses import means
from bloomery.train.step import compute_loss, train_step
from models_for_tests import make_model


def models(vocab: int = 97):
    student = fresh_decoder(tiny_config(), seed=0, dtype=torch.float64, attention="mask")
    teacher = fresh_decoder(
        tiny_config(
            hidden_size=48, num_layers=3, initializer_range=0.3, final_softcap=5.0, vocab_size=vocab
        ),
        seed=1,
        dtype=torch.float64,
        attention="mask",
    )
    return student, teacher.eval().requires_grad_(False)


def logits(model, some):
    output = model(some.tokens, positions_BT=some.positions, documents_BT=some.documents)
    return output.head


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_and_its_gradient_are_those_of_whole_logits(chunk, temperature):
    student, teacher = models()
    some, asked = (
        batch(3),
        Distill(kind="distill", teacher="", temperature=temperature, kd_ratio=0.3),
    )
    ours = compute_loss(
        student, some, distillation(asked, teacher, chunk=chunk), precision="float32"
    )
    ours.total.backward()
    gradients = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()
    theirs, taught = logits(student, some).flatten(0, 1), logits(teacher, some).flatten(0, 1)
    each = F.kl_div(
        F.log_softmax(theirs / temperature, -1),
        F.log_softmax(taught / temperature, -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    nats, weights = (
        F.cross_entropy(theirs, some.labels.flatten(), reduction="none"),
        some.loss_mask.flatten(),
    )
    expected = ((0.3 * temperature**2 * each + 0.7 * nats) * weights).sum()
    assert ours.total.item() == pytest.approx(expected.item(), rel=1e-9)
    told = {
        "kl": (each * weights).sum() / weights.sum(),
        "nats": (nats * weights).sum() / weights.sum(),
    }
    assert means(ours.metrics) == pytest.approx(
        {name: value.item() for name, value in told.items()}
    )
    expected.backward()
    assert_close(gradients, [p.grad for p in student.parameters()])


def test_it_agrees_with_trl():
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = models()
    some, asked = batch(3), Distill(kind="distill", teacher="", temperature=1.7, kd_ratio=1.0)
    ours = compute_loss(student, some, distillation(asked, teacher, chunk=7), precision="float32")
    labels = torch.where(some.loss_mask > 0, some.labels, -100)
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        logits(student, some), logits(teacher, some), labels=labels, beta=0, temperature=1.7
    )
    # TRL leaves out the square of the temperature
    assert (ours.total / ours.count).item() == pytest.approx(theirs.item() * 1.7**2, rel=1e-4)


def test_a_teacher_whose_embeddings_are_padded_further_is_a_teacher_all_the_same():
    student, teacher = models(vocab=128)
    some, asked = batch(2), Distill(kind="distill", teacher="", kd_ratio=1.0)
    ours = compute_loss(student, some, distillation(asked, teacher, chunk=7), precision="float32")
    taught = F.log_softmax(logits(teacher, some)[..., :97], -1)
    each = F.kl_div(
        F.log_softmax(logits(student, some), -1), taught, reduction="none", log_target=True
    ).sum(-1)
    assert ours.total.item() == pytest.approx((each * some.loss_mask).sum().item(), rel=1e-9)


def test_whole_logits_never_exist():
    student, teacher = models()
    sizes = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (97,):
                sizes.append(out.shape[0])
            return out

    with Watched():
        head = distillation(Distill(kind="distill", teacher=""), teacher, chunk=4)
        compute_loss(student, batch(3), head, precision="float32").total.backward()
    # rows of weights (97 columns of the transposed ones) or of a chunk, never the 96 positions
    assert max(sizes) <= 48
    assert isinstance(head.head(batch(1)), Divergence)


def test_accumulation_takes_the_step_of_one_large_batch():
    from test_step import halves, model_and_optimizer, weights

    teacher = models()[1].float()
    asked, results = Distill(kind="distill", teacher="", temperature=2.0), []
    for batches in ([batch(5)], halves(batch(5))):
        who, plan = model_and_optimizer()
        results.append(
            (
                train_step(
                    who, batches, distillation(asked, teacher, chunk=9), plan=plan, lr_scale=1.0
                ),
                who,
            )
        )
    (one, ours), (two, theirs) = results
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.metrics == pytest.approx(two.metrics, rel=1e-5)
    assert_close(weights(ours), weights(theirs), atol=2e-5, rtol=0)


def test_a_run_learns_from_its_teacher(prepared, tmp_path):
    folder = tmp_path / "teacher"
    folder.mkdir()
    load_tokenizer(prepared).save(folder)
    write_model(model_state(fresh_decoder(CONFIG, seed=7)), CONFIG, folder)
    asked = Distill(kind="distill", teacher=str(folder), kd_ratio=1.0)
    parts = {"train": {"steps": 10}, "eval": {"every_steps": 5}, "checkpoint": {"every_steps": 10}}
    run = Run(
        tiny_plan(prepared, config=CONFIG, **parts).model_copy(update={"objective": asked}),
        tmp_path / "run",
    )
    first, last = run.of(StepDone)[0], run.of(StepDone)[-1]
    assert first.loss == pytest.approx(first.metrics["kl"], rel=1e-5)
    assert last.metrics["kl"] < 0.7 * first.metrics["kl"]
    exam = run.of(EvalDone)[-1]
    assert exam.metrics["kl"] < first.metrics["kl"]
    assert exam.perplexity is exam.bits_per_byte is None


def test_a_teacher_of_other_words_is_refused(prepared, tmp_path):
    make_model(tmp_path)
    asked = Distill(kind="distill", teacher=str(tmp_path))
    with pytest.raises(UserError, match="the teacher has"):
        build_objective(tiny_plan(prepared).model_copy(update={"objective": asked}))


def test_finite_differences():
    student, teacher = models()
    some, few = batch(1), slice(13, 22)
    labels, loss_mask = some.labels[:, few], some.loss_mask[:, few]
    assert 5 < loss_mask.sum() < 9  # a chunk of five and a part of one
    head = Divergence(labels, loss_mask, 5, 1.3, Teacher(lambda: hidden, teacher.lm_head, 5.0))
    numbers = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 9, 48, dtype=torch.float64, generator=numbers)
    states = torch.randn(1, 9, 32, dtype=torch.float64, generator=numbers).requires_grad_()
    assert torch.autograd.gradcheck(lambda states: head(states, student.lm_head, None), (states,))


def teacher_plan_of(plan, teacher: str) -> TeacherPlan:
    asked = Distill(kind="distill", teacher=teacher)
    return TeacherPlan.of(asked, plan.model, plan.data, plan.train)


def test_a_teacher_gets_an_attention_that_computes_what_it_needs(tmp_path):
    """The student's kernel knows neither its window nor its soft-cap."""
    run_plan = tiny_plan(model={"attention": "varlen"}, train={"device": "cuda"})
    plan = teacher_plan_of(run_plan, str(tmp_path))
    assert teacher_attention(tiny_config(), plan) == "varlen"
    assert teacher_attention(tiny_config(attention_softcap=30.0), plan) == "blockwise"
    short = tiny_config(positions="learned", max_positions=16)
    with pytest.raises(UserError, match="16 learned positions"):
        teacher_attention(short, plan)


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
