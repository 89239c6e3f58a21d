"""A made-up run: every kind of event, in the order in which a real one writes them."""

import math

from bloomery.monitor.events import (
    EvalDone,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    Warned,
)


def step_done(step, loss=2.0, time=None, **changes):
    figures = {
        "step": step,
        "time": float(step) if time is None else time,
        "loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": None if loss is None else 1.0,
        "tokens": step * 8192,
        "tokens_per_second": 16384.0,
        "sequences_per_second": 16.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.005,
        "memory_gib": 0.58,
    }
    return StepDone(**{**figures, **changes})


def made_up_run(steps=40, *, kill_at=25, saved_at=20, skipped=7):
    """Yields the events of a run that was killed once, skipped a step, and finished."""
    yield Phase(name="tokenizer", done=0, total=10, time=0.0)
    yield Phase(name="tokenizer", done=10, total=10, time=1.0)
    yield RunStarted(
        schema=2,
        version="0.1.0",
        parameters=1_705_000,
        steps=steps,
        attention="sdpa",
        device="cpu",
        time=2.0,
    )
    yield Warned(reason="training runs uncompiled: <no> compiler", time=2.0)
    clock, step, killed = 2.0, 0, False
    while step < steps:
        step, clock = step + 1, clock + 0.5
        yield step_done(step, None if step == skipped else 3 + 5 * math.exp(-step / 10), clock)
        if step == skipped:
            yield Recovered(
                step=step,
                reason="the loss was not finite",
                action="its update was skipped",
                time=clock,
            )
        if step % 10 == 0:
            loss = 3.2 + 5 * math.exp(-step / 10)
            exam = {
                "loss": loss,
                "perplexity": math.exp(loss),
                "bits_per_byte": loss / 3.4 / math.log(2),
            }
            yield EvalDone(step=step, tokens=1000, seconds=0.1, time=clock, **exam)
            yield Sampled(
                step=step,
                prompt="def f(",
                completion=f"x):\n    return <b>{step}</b>\n",
                time=clock,
            )
        if step % saved_at == 0:
            path = f"checkpoints/step-{step:08d}"
            yield Saved(step=step, path=path, bytes=2**20, seconds=0.3, best=True, time=clock)
        if step == kill_at and not killed:
            step, killed, clock = saved_at, True, clock + 3
            yield Resumed(step=step, path=f"checkpoints/step-{step:08d}", seconds=3.1, time=clock)
    yield RunEnded(step=steps, status="done", time=clock)
