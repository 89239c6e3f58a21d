"""The report: complete, honest about what is missing, and harmless whatever a run's texts hold."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import runs_for_tests
from bloomery.core.errors import UserError
from bloomery.hardware.machine import Accelerator, Host, Machine, Software
from bloomery.monitor.events import (
    EvalDone,
    EventLog,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Warned,
)
from bloomery.report import Bars, write_report
from bloomery.report.charts import (
    Mark,
    Series,
    bar_chart,
    downsample,
    line_chart,
    prose,
    ticks,
)
from bloomery.report.record import (
    measured_claims,
    read_run_record,
    repeated_steps,
    reported,
    whole_view,
)

CANARY = "hf_CanaryCanaryCanaryCanary1234567890"
VOID = {"meta", "br", "hr"}


def step_done(step, loss=2.0, time=None, **changes):
    figures = {
        "tokens": step * 1000,
        "tokens_per_second": 500.0,
        "sequences_per_second": 1.0,
        "step_seconds": 2.0,
        "data_wait_seconds": 0.1,
        "memory_gib": 3.5,
    }
    return runs_for_tests.step_done(step, loss, time, **(figures | changes))


def exam(step, perplexity):
    loss = float(np.log(perplexity))
    return EvalDone(
        step=step,
        loss=loss,
        perplexity=perplexity,
        bits_per_byte=loss,
        tokens=10,
        seconds=1.0,
        time=step,
    )


STARTED = RunStarted(
    schema=2,
    version="0.1.0",
    parameters=124_000_000,
    steps=100,
    attention="sdpa",
    device="cpu",
    time=0.0,
)
RECIPE = """\
model: {preset: go-coder-tiny}
data: {path: corpus}
claims:
  tokens: 100k
  epochs: 3
  tokens_per_second: 5
  duration: 90s to 2m
  memory: 3 to 4 GiB
  perplexity: {50 steps: 50 to 100, 90%: 1 to 2, 80000 tokens: 30}
"""


def run_folder(tmp_path, events, recipe=RECIPE):
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe)
    with EventLog(folder / "events.jsonl") as emit:
        for event in events:
            emit(event)
    return folder


def whole_run():
    yield STARTED
    for step in range(1, 101):
        yield step_done(step, 2 + 5 / step)
        if step in (50, 80):
            yield exam(step, 60.0 if step == 50 else 40.0)
    yield RunEnded(step=100, status="done", time=100.0)


class Reader(HTMLParser):
    """Fails on unbalanced tags; collects them and the text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path):
    return Reader(path.read_text(encoding="utf-8"))


def test_the_report_of_a_whole_run(tmp_path):
    folder = run_folder(tmp_path, whole_run())
    machine = Machine(
        accelerators=(
            Accelerator(
                index=0, vendor="amd", name="RX 6700 XT", arch="gfx1031", memory_bytes=2**33
            ),
        ),
        host=Host(
            system="Linux",
            cpu_name="EPYC",
            cpu_cores=2,
            memory_bytes=2**34,
            memory_free_bytes=2**33,
            disk_free_bytes=1,
        ),
        software=Software(python="3.11.7", torch="2.13.0", build="cpu"),
    )
    (folder / "machine.json").write_text(machine.model_dump_json())
    bars = Bars(
        "Exam",
        [("gzip -9", 2.12), ("this model", 1.77)],
        "bits/byte",
        "Lower is better.",
        highlighted="this model",
    )
    page = read(write_report(folder, extras=[bars]))
    for words in (
        "100 of 100 steps",
        "gzip -9",
        "2.12 bits/byte",
        "RX 6700 XT · gfx1031",
        "bits per byte",
    ):
        assert words in page.text, words
    assert "bloomery train runs/demo/recipe.yaml --run-dir runs/demo-again" in page.text
    assert "Claims" in page.text and "Learning rate" in page.text and "Gradient norm" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 5


DIVERGED = EvalDone(step=1, loss=None, perplexity=None, bits_per_byte=None, tokens=1, seconds=1.0)
UNFINISHED = {
    "prepared only": [Phase(name="prepare", done=1, total=2)],
    "started": [STARTED],
    "one step": [STARTED, step_done(1)],
    "no finite loss": [STARTED, step_done(1, None), step_done(2, None)],
    "failed": [STARTED, step_done(1), RunEnded(step=1, status="failed", error="the disk is full")],
    "diverged exam": [STARTED, step_done(1), DIVERGED],
}


@pytest.mark.parametrize("events", UNFINISHED.values(), ids=UNFINISHED.keys())
def test_a_run_in_any_state_has_a_report(tmp_path, events):
    page = read(write_report(run_folder(tmp_path, events)))
    assert "nan" not in page.text.lower() and "0.0 nats" not in page.text


def test_a_cut_log_and_broken_files_beside_it_still_make_a_report(tmp_path):
    folder = run_folder(tmp_path, whole_run())
    (folder / "plan.json").write_text("{")
    (folder / "machine.json").write_text("[]")
    (folder / "recipe.yaml").write_text("model: [")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "StepDone", "st')
    assert "100 of 100 steps" in read(write_report(folder)).text


def test_a_folder_without_events_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no events yet"):
        write_report(tmp_path)


def test_texts_of_a_run_are_never_markup_and_nothing_is_fetched(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'>&"
    folder = run_folder(
        tmp_path,
        [
            STARTED,
            step_done(1),
            Sampled(step=1, prompt=evil, completion=evil),
            Warned(reason=evil),
            Recovered(step=1, reason=evil, action=evil),
            RunEnded(status="failed", error=f"{evil}"),
        ],
        recipe=RECIPE + f"# {evil}\n",
    )
    path = write_report(folder, extras=[Bars(evil, [(evil, 1.0)], evil, evil)])
    page = read(path)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object"}
    assert all(
        not name.startswith("on") and name not in ("src", "href")
        for _, at in page.tags
        for name in at
    )
    assert page.text.count("<script>") >= 6
    assert not re.search(r"url\(|@import", path.read_text())
    policy = next(
        at["content"] for tag, at in page.tags if at.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_no_secret_and_no_home_folder_reaches_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("MY_API_KEY", "swordfish-of-mine")
    events = [STARTED, step_done(1), Sampled(step=1, prompt=CANARY, completion="swordfish-of-mine")]
    recipe = (
        RECIPE.replace("corpus", "/home/somebody/corpus") + f"# https://me:{CANARY}@example.org\n"
    )
    text = write_report(run_folder(tmp_path, events, recipe)).read_text()
    assert (
        CANARY not in text
        and "swordfish" not in text
        and "somebody" not in text
        and "~/corpus" in text
    )


def test_taking_out_a_secret_leaves_the_markup_whole(tmp_path):
    """A scrubber that ran over the finished page would eat the tag behind `password=`."""
    events = [
        STARTED,
        step_done(1),
        Sampled(step=1, prompt="password=", completion="x"),
        Warned(reason="secret: "),
    ]
    assert "password=" in read(write_report(run_folder(tmp_path, events))).text


def test_claims_are_judged_by_what_happened(tmp_path):
    record = read_run_record(run_folder(tmp_path, whole_run()))
    verdicts = {verdict.claim: verdict for verdict in measured_claims(record)}
    assert {claim: verdict.verdict for claim, verdict in verdicts.items()} == {
        "100,000 tokens": "ok",
        "3 epochs": "unknown",
        "5 tokens/s": "wrong",
        "90 s to 2 min": "ok",
        "3.22 to 4.29 GB": "ok",
        "perplexity 50 to 100 at 50 steps": "ok",
        "perplexity 1 to 2 at 90%": "unknown",
        "perplexity 30 at 80,000 tokens": "wrong",
    }
    assert verdicts["5 tokens/s"].reason == "500 tokens/s"


def test_claims_about_the_end_stay_open_before_it(tmp_path):
    record = read_run_record(run_folder(tmp_path, [STARTED, step_done(10)]))
    verdicts = {verdict.claim: verdict.verdict for verdict in measured_claims(record)}
    assert verdicts["100,000 tokens"] == verdicts["90 s to 2 min"] == "unknown"


def killed_run(again=2.0):
    return [
        STARTED,
        step_done(1),
        step_done(2),
        step_done(3),
        RunStarted(**{**vars(STARTED), "time": 9.0}),
        Resumed(step=1, path="c/step-1", seconds=1.5, time=10.0),
        step_done(2, again, time=11.0),
        step_done(3, time=12.0),
        step_done(4, None, time=13.0),
        Recovered(
            step=4, reason="not finite", action="back to step 1, and on with row 9", time=14.0
        ),
        step_done(2, 7.0, time=15.0),
        RunEnded(step=2, status="stopped", time=16.0),
    ]


def incidents_of(events):
    view = whole_view()
    view.add_all(events)
    return reported(view.incidents)


def test_incidents_are_read_off_the_events():
    told = [(incident.step, incident.kind) for incident in incidents_of(killed_run())]
    assert told == [(3, "kill"), (1, "resume"), (4, "skip"), (4, "rewind"), (2, "stop")]


def test_incidents_lie_after_the_beginning_though_the_clock_was_set_back():
    events = [
        replace(event, time=event.time - 3600 * (at > 4)) for at, event in enumerate(killed_run())
    ]
    told = [incident.seconds for incident in incidents_of(events)]
    assert told == sorted(told) and told[0] >= 0


def test_a_stop_is_not_a_kill():
    events = [
        STARTED,
        step_done(1),
        RunEnded(step=1, status="stopped", time=2.0),
        STARTED,
        Resumed(step=1, path="x"),
    ]
    assert [incident.kind for incident in incidents_of(events)] == ["stop", "resume"]


def test_repeated_steps_are_compared_to_the_last_bit_and_rewinds_are_not():
    same = repeated_steps(killed_run())
    assert (same.first, same.last, same.steps, same.different) == (2, 3, 2, 0)
    assert repeated_steps(killed_run(again=2.0000000000000004)).different == 1
    assert repeated_steps([STARTED, step_done(1)]) is None


def test_backticks_become_code_and_a_single_one_stays():
    assert prose("run `a <b>` now") == "run <code>a &lt;b&gt;</code> now"
    assert prose("it`s") == "it`s"


def test_a_worker_that_died_is_marked_on_the_curve_like_a_kill(tmp_path):
    events = [
        STARTED,
        step_done(1),
        step_done(2),
        RunEnded(step=2, status="failed", error="killed by `SIGKILL`", time=3.0),
    ]
    folder = run_folder(tmp_path, events)
    assert [(mark.step, mark.kind) for mark in read_run_record(folder).marks] == [(2, "kill")]
    told = write_report(folder).read_text()
    assert (
        "killed or failed" in told
        and "<code>SIGKILL</code>" in told
        and "`" not in told.partition("<body>")[2]
    )


def test_a_preference_run_has_charts_of_its_rewards_and_margin(tmp_path):
    figures = {"accuracy": 0.75, "margin": 0.5, "chosen_reward": 0.25, "rejected_reward": -0.25}
    steps = [step_done(step, metrics=figures) for step in (1, 2, 3)]
    folder = run_folder(
        tmp_path, [STARTED, *steps, replace(exam(3, 2.0), metrics={"margin": 0.75})]
    )
    told = write_report(folder).read_text()
    charts = re.findall(r'aria-label="([A-Z][^"]*) from step 1 to 3', told)
    assert charts[:4] == ["Loss", "Rewards", "Accuracy", "Margin"]
    assert "between 0.5 and 0.75 chosen reward - rejected reward" in told


def test_the_report_and_the_terminal_have_one_planned_time_and_one_of_the_run():
    from types import SimpleNamespace

    from bloomery.report import page

    plan = SimpleNamespace(
        step_seconds=SimpleNamespace(value=2.0),
        seconds=SimpleNamespace(value=104.0),
        parallel=None,
        trained_tokens_per_step=10,
        memory=SimpleNamespace(total=2**30),
    )
    summary = SimpleNamespace(training_seconds=149.0, peak_gib=1.0)
    record = SimpleNamespace(
        plan=plan, summary=summary, steps=[step_done(1)], state="done", tokens_per_second=5.0
    )
    assert ("training time, s", 104.0, 149.0) in page.planned_and_measured(record)


def test_both_axes_of_a_chart_have_a_name():
    drawn = line_chart(
        "Speed", [Series("speed", [(1, 2.0), (2, 3.0)])], unit="tokens/s", across="minute"
    )
    assert re.findall(r'class="axis[^>]*>([^<]*)<', drawn) == ["minute", "tokens/s"]


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 10.0, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(3.1, 3.2, 5) == pytest.approx([3.1, 3.12, 3.14, 3.16, 3.18, 3.2])
    assert ticks(1.0, 1.0, 5) == [1.0]


def test_thinning_loses_no_spike():
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    kept = downsample(points)
    assert len(kept) <= 800 and (54_321.0, 99.0) in kept and kept == sorted(kept)


def test_a_chart_names_its_range_and_its_marks():
    chart = line_chart(
        "Loss", [Series("x", [(1, 2.0), (5, 4.0)])], [Mark(3, "kill", "killed")], unit="nats"
    )
    assert (
        'aria-label="Loss from step 1 to 5, between 2 and 4 nats"' in chart
        and "step 3: killed" in chart
    )
    assert "not measured" in line_chart("Loss", [Series("x", [])])


def test_bars_are_proportional():
    widths = re.findall(
        r"width:([\d.]+)%", bar_chart(Bars("b", [("a", 1.0), ("b", 4.0), ("zero", 0.0)]))
    )
    assert widths == ["25.00", "100.00", "0.00"]


def test_evaluations_of_a_killed_run_are_the_last_told(tmp_path):
    folder = run_folder(
        tmp_path, [STARTED, step_done(1), exam(1, 9.0), Resumed(step=0, path=""), exam(1, 8.0)]
    )
    assert [event.perplexity for event in read_run_record(folder).evals] == [8.0]
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[2])["perplexity"] == 9.0
