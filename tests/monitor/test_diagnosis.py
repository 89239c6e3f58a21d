"""Each cause of a slow run, from events that show it and nothing else; and that a cause is said once."""

from dataclasses import replace

import pytest

from bloomery.monitor import diagnosis
from bloomery.monitor.diagnosis import Diagnoser
from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Recovered,
    Resumed,
    RunStarted,
    Saved,
    StepHealth,
    Warned,
)
from bloomery.monitor.history import PlanFacts, history_of
from runs_for_tests import step_done

GPU = PlanFacts(
    device="cuda",
    sequence_length=1024,
    steps=1000,
    fused_attention=True,
    memory_limit_gib=11.0,
    step_seconds=(0.3, 0.6),
    learning_rate=1e-3,
    vocab_size=1000,
    tokens_per_step=8192,
)


def why_slow(events, facts):
    return tuple(map(str, diagnosis.why_slow(history_of(events), facts)))


def why_not_learning(events, facts):
    return tuple(map(str, diagnosis.why_not_learning(history_of(events), facts)))


def steady(steps=100, attention="blockwise", start=0, **changes):
    """A run without trouble: half a second a step, a loss that falls from ln 1000 to about 4."""
    begin = [
        RunStarted(
            schema=2,
            version="0",
            parameters=1,
            steps=1000,
            attention=attention,
            device="cuda",
            step=start,
        )
    ]
    losses = {step: 4.0 + 2.9 * 0.97**step for step in range(1, steps + 1)}
    return [
        *begin,
        *(step_done(s, **{"loss": losses[s], **changes}) for s in range(start + 1, steps + 1)),
    ]


def with_every(events, kind, every=1, **fields):
    """The events, with one of another kind after every so many steps."""
    due = [event.step > 0 and event.step % every == 0 for event in events]
    pairs = zip(events, due, strict=True)
    return [
        e
        for event, now in pairs
        for e in ((event, kind(step=event.step, **fields)) if now else (event,))
    ]


def test_nothing_is_said_of_a_steady_run():
    healthy = with_every(
        steady(), StepHealth, seconds=0.5, core_wait_seconds=0.01, update_ratio=1e-3, graphs=4
    )
    healthy = with_every(
        healthy,
        DeviceStats,
        device=0,
        temperature=85.0,
        clock_mhz=2400.0,
        throttled="",
        utilization=99.0,
    )
    assert why_slow(healthy, GPU) == () == why_not_learning(healthy, GPU)


def test_half_a_minute_is_judged_and_not_less():
    assert why_slow(steady(40, data_wait_seconds=0.4), GPU) == ()
    assert len(why_slow(steady(80, data_wait_seconds=0.4), GPU)) == 1


CASES = {
    "data": (
        steady(data_wait_seconds=0.2),
        GPU,
        "the steps wait for data (40% of step time, 200 ms per step)",
        "data.prefetch",
    ),
    "data with pictures": (
        steady(data_wait_seconds=0.2),
        replace(GPU, has_pictures=True),
        "the steps wait for data (40% of step time, 200 ms per step)",
        "store large pictures smaller",
    ),
    "crowded": (
        [
            e
            for s in steady()
            for e in (
                s,
                DeviceStats(
                    step=s.step,
                    device=0,
                    reserved_gib=10.5,
                    fragmentation=0.2,
                    alloc_retries=s.step,
                ),
            )
        ],
        GPU,
        "retries allocations (100 retries in 100 steps; 20% of 10.5 GiB",
        "train.micro_batch_size",
    ),
    "fallen back": (
        steady(attention="sdpa"),
        PlanFacts(**{**vars(GPU), "fused_attention": False}),
        "attention writes the full score matrix to memory (the math kernel of PyTorch stores 1,024 x 1,024 scores",
        "train.attention=blockwise",
    ),
    "math chosen": (
        steady(attention="math"),
        GPU,
        "the kernel math stores",
        "train.attention=auto",
    ),
    "throttled": (
        with_every(steady(), DeviceStats, device=1, temperature=104.0, throttled="temperature"),
        GPU,
        "thermal throttling of GPU 1 (reported in 100% of the samples (temperature), at up to 104 °C)",
        "rocm-smi --setpoweroverdrive",
    ),
    "clock": (
        [
            *with_every(
                steady(60),
                DeviceStats,
                device=0,
                temperature=70.0,
                clock_mhz=2400.0,
                utilization=99.0,
            ),
            *with_every(
                steady(100, start=60),
                DeviceStats,
                device=0,
                temperature=98.0,
                clock_mhz=1500.0,
                utilization=99.0,
            ),
        ],
        GPU,
        "clock fell from 2,400 to 1,500 MHz at 98 °C",
        "airflow",
    ),
    "cores": (
        with_every(steady(), StepHealth, every=2, seconds=1.0, core_wait_seconds=0.4),
        GPU,
        "waited for a core for 40% of 20 s",
        "OMP_NUM_THREADS=1",
    ),
    "compile": (
        [steady(1)[0], step_done(1, step_seconds=90.0), *steady(100, start=1)[1:]],
        PlanFacts(**{**vars(GPU), "compiled": True, "steps": 400}),
        "first step 90 s, all 400 steps 200 s",
        "train.compile=false",
    ),
    "recompiled": (
        [e for s in steady()[1:] for e in (s, StepHealth(step=s.step, graphs=4 + s.step))],
        GPU,
        "torch.compile recompiles again and again (24 graphs at the start, 104 at step 100)",
        "train.compile=false",
    ),
    "evaluations": (
        with_every(
            steady(),
            EvalDone,
            every=20,
            loss=4.0,
            perplexity=55.0,
            bits_per_byte=1.0,
            tokens=1,
            seconds=4.0,
        ),
        GPU,
        "evaluations take 29% of the run (20 of 70 s)",
        "eval.every",
    ),
    "saving": (
        with_every(steady(), Saved, every=20, path="x", bytes=1, seconds=4.0),
        PlanFacts(**{**vars(GPU), "saves_in_background": False}),
        "saving checkpoints takes 29% of the run (20 of 70 s)",
        "checkpoint.every",
    ),
    "recomputing": (
        steady(memory_gib=3.0),
        PlanFacts(**{**vars(GPU), "checkpointing": "full"}),
        "activation_checkpointing=full; peak memory 3.0 of 11.0 GiB",
        "bloomery plan RECIPE train.activation_checkpointing=none",
    ),
    "late": (
        steady(step_seconds=1.2),
        GPU,
        "for no measured reason (1.2 s per step, planned at most 0.6 s: 2.0 times as long)",
        "bloomery bench RECIPE",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cause_has_its_sentence_and_its_remedy(name):
    events, facts, sentence, fix = CASES[name]
    (said,) = why_slow(events, facts)
    assert sentence in said
    assert fix in said


def test_what_runs_in_the_background_is_not_waited_for():
    events = with_every(steady(), Saved, every=20, path="x", bytes=1, seconds=4.0)
    assert why_slow(events, GPU) == ()


def test_a_late_run_with_a_cause_blames_the_cause():
    said = why_slow(steady(step_seconds=1.2, data_wait_seconds=0.7), GPU)
    assert ["wait for data" in text for text in said] == [True, False]
    assert "no measured reason" not in said[1]


def test_a_clock_that_falls_in_an_idle_or_cool_card_is_no_news():
    for cool in (
        {"temperature": 60.0, "utilization": 99.0},
        {"temperature": 98.0, "utilization": 3.0},
    ):
        fast = with_every(steady(60), DeviceStats, device=0, clock_mhz=2400.0, **cool)
        slow = with_every(steady(100, start=60), DeviceStats, device=0, clock_mhz=900.0, **cool)
        assert why_slow([*fast, *slow], GPU) == ()


def learning(losses, facts=GPU, ratio=1e-3, **changes):
    """What is said of a run with these losses and vitals after each step."""
    rate = changes.pop("learning_rate", facts.learning_rate)
    steps = [step_done(s, loss, learning_rate=rate, **changes) for s, loss in enumerate(losses, 1)]
    begin = RunStarted(
        schema=2, version="0", parameters=1, steps=1000, attention="sdpa", device="cuda"
    )
    return why_not_learning([begin, *with_every(steps, StepHealth, update_ratio=ratio)], facts)


def test_a_first_loss_far_from_that_of_a_guess():
    (high,) = learning([14.0] * 5)
    assert "uniform guess (first loss 14.00, uniform over 1,000 tokens" in high
    (low,) = learning([1.0] * 5)
    assert "labels are leaking" in low and "attention mask" in low
    # weights that were trained before
    assert learning([1.0] * 5, PlanFacts(**{**vars(GPU), "fresh": False})) == ()


def test_an_exploding_gradient_is_told_from_one_that_is_absent():
    flat = [6.9] * 120
    steps = [
        step_done(s, 6.9, grad_norm=1.0 if s < 40 else 500.0, learning_rate=1e-3)
        for s in range(1, 121)
    ]
    (said,) = why_not_learning(steps, GPU)
    assert "the gradient explodes (gradient norm 1 in the first steps, 5e+02 now" in said
    assert "set train.max_grad_norm=1.0" in said
    (said,) = learning(flat, grad_norm=0.0)
    assert "no gradient flows back from the loss" in said
    (said,) = learning(flat, PlanFacts(**{**vars(GPU), "clip": 1.0}), grad_norm=50.0)
    assert "keeps 2.0% of it" in said and "set train.max_grad_norm=50" in said


def test_a_plateau_without_a_cause_says_so_and_names_the_text():
    crumbs = PlanFacts(**{**vars(GPU), "bytes_per_token": 1.1, "duplicates": 0.6})
    stuck, tokenizer, copies = learning([6.9] * 120, crumbs)
    assert "no measured reason" in stuck
    assert "1.1 bytes per token" in tokenizer and "60% of the documents" in copies


def test_a_warmup_longer_than_the_run():
    facts = PlanFacts(**{**vars(GPU), "steps": 100, "warmup_steps": 2000, "learning_rate": 1e-3})
    assert learning([6.9] * 100, facts, ratio=1e-5, learning_rate=5e-5)[0].startswith(
        "the learning rate is too low"
    )


def test_a_warmup_that_goes_on_is_waited_for():
    facts = PlanFacts(**{**vars(GPU), "steps": 100_000, "warmup_steps": 2000})
    assert learning([6.9] * 300, facts, ratio=1e-5, learning_rate=1e-5) == ()


def test_text_that_is_learned_by_heart():
    steps = [step_done(s, 6.9 * 0.99**s) for s in range(1, 401)]
    exams = {80: 4.0, 160: 3.0, 240: 3.2, 320: 3.5, 400: 3.9}
    events = [
        e
        for step in steps
        for e in (
            step,
            *(
                [
                    EvalDone(
                        step=step.step,
                        loss=exams[step.step],
                        perplexity=1.0,
                        bits_per_byte=1.0,
                        tokens=1,
                        seconds=0.0,
                    )
                ]
                if step.step in exams
                else []
            ),
        )
    ]
    (said,) = why_not_learning(events, PlanFacts(**{**vars(GPU), "text_tokens": 400_000}))
    assert "validation loss 3.00 at step 160, 3.90 now" in said and "8.2 epochs" in said
    assert "eval.early_stopping_patience=3" in said


def test_a_cause_is_said_once_also_over_a_resume():
    events = steady(100, data_wait_seconds=0.2)
    first = Diagnoser(lambda: GPU)
    told = [warned for event in events for warned in first.check(event)]
    assert [warned.cause for warned in told] == ["data"] and told[0].step == 100
    again = Diagnoser(lambda: GPU, [*events, *told])
    more = [Resumed(step=100, path="x"), *steady(300, start=100, data_wait_seconds=0.2)]
    assert [warned for event in more for warned in again.check(event)] == []


@pytest.mark.parametrize(
    "back", [Recovered(step=4, reason="nan", action="back"), Resumed(step=4, path="x")]
)
def test_steps_that_were_given_up_are_forgotten_whether_by_a_recovery_or_a_resume(back):
    """Steps 8 to 10 had no finite loss, so that steps and losses are not the same number."""
    first = [step_done(step, None if step >= 8 else 3.0) for step in range(1, 11)]
    ratios = {2: 0.1, 4: 0.1, 6: 5.0}
    told = [
        e
        for step in first
        for e in (
            step,
            *(StepHealth(step=s, update_ratio=ratios[s]) for s in ratios if s == step.step),
        )
    ]
    told = [
        *told,
        EvalDone(step=8, loss=9.0, perplexity=None, bits_per_byte=None, tokens=1, seconds=1.0),
    ]
    seen = history_of([*told, back])
    assert (seen.step, list(seen.losses), seen.evaluations) == (4, [3.0] * 4, {})
    assert (seen.largest_ratio, seen.path) == (0.1, pytest.approx(4 * 0.1))
    seen = history_of(
        [
            *told,
            back,
            *(step_done(step, 2.0) for step in range(5, 11)),
            StepHealth(step=6, update_ratio=0.1),
        ]
    )
    assert list(seen.losses) == [3.0] * 4 + [2.0] * 6
    assert [step.step for step in seen.recent] == list(range(1, 11))
    assert seen.path == pytest.approx(6 * 0.1)
    assert history_of([*told, Recovered(step=0, reason="oom", action="start")]).path == 0


def test_facts_are_asked_for_when_they_are_needed():
    asked = []
    diagnosis = Diagnoser(lambda: asked.append(1) or GPU)
    for event in steady(9):
        assert list(diagnosis.check(event)) == []
    assert asked == []
    list(diagnosis.check(step_done(10)))
    list(diagnosis.check(step_done(25)))
    assert asked == [1]


def test_a_warning_of_another_kind_silences_nothing():
    diagnosis = Diagnoser(lambda: GPU, [Warned(reason="x", cause="data-set")])
    assert [
        w.cause for event in steady(100, data_wait_seconds=0.2) for w in diagnosis.check(event)
    ] == ["data"]


def test_a_loss_that_is_not_of_text_may_stay_where_it_began():
    """Of pairs it begins at ln 2, and 0.67 may be all that there is to learn."""
    assert learning([6.9] * 120) != ()
    assert learning([6.9] * 120, replace(GPU, falls=False)) == ()
