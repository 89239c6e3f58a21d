"""Tasks on tiny models: scores against sums over every logit, and completions against one text at a time."""

import json
from dataclasses import asdict

import pytest
import torch
from click.testing import CliRunner

from bloomery.cli.eval import command
from bloomery.core.errors import UserError
from bloomery.evals.items import (
    TaskSettings,
    ask,
    complete_prompts,
    encode_pair,
    extracted,
    read_task,
)
from bloomery.evals.tasks import Named, compare_on_texts, evaluate_task
from bloomery.infer.generate import TextRequest, continued
from bloomery.infer.load import Use
from bloomery.infer.sampling import Sampling
from bloomery.model import compiled_step
from bloomery.monitor.events import TaskDone, read_events
from bloomery.report import write_report
from bloomery.train.evaluation import scoring
from bloomery.train.evaluation.scoring import score_continuations
from models_for_tests import make_run

CPU = Use("cpu")
ROWS = [
    {"question": "def f(x)", "choices": ["return x", "für Größe", "and so on"], "answer": 0},
    {"question": "naïve", "choices": ["café", "东", "x + 1"], "answer": "B"},
    {"prompt": "return x ", "choices": ["+ 1", "on"], "answer": "on"},
    {"question": "für", "choices": ["Größe", "f(x)"], "answer": 1},
]


def task_file(folder, rows, name="task.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def by_hand(decoder, context, continuation):
    with torch.no_grad():
        shares = decoder(torch.tensor([context + continuation])).head[0].double().log_softmax(-1)
    at = range(len(context) - 1, len(context) + len(continuation) - 1)
    logprob = sum(
        float(shares[place, token]) for place, token in zip(at, continuation, strict=True)
    )
    return logprob, all(
        int(shares[place].argmax()) == token for place, token in zip(at, continuation, strict=True)
    )


def test_likelihoods_equal_one_forward_each(loaded, monkeypatch):
    decoder, _ = loaded
    monkeypatch.setattr(scoring, "_TOKENS_A_FORWARD_OF_CPU", 40)
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", 1000)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (90,), generator=random).tolist()
    pairs = [(ids[: 3 + n], ids[40 : 41 + n % 4]) for n in range(12)]
    pairs += [(ids[:6], [token]) for token in (5, 6, 7)]  # which share a row
    with torch.no_grad():
        likeliest = int(decoder(torch.tensor([ids[:6]])).head[0, -1].argmax())
    pairs.append((ids[:6], [likeliest]))
    found = score_continuations(decoder, pairs)
    for pair, one in zip(pairs, found, strict=True):
        logprob, greedy = by_hand(decoder, *pair)
        assert one.logprob == pytest.approx(logprob, abs=1e-4) and one.greedy == greedy
    assert found[-1].greedy and not any(one.greedy for one in found[-4:-1])


def test_a_context_is_cut_at_its_start(loaded):
    decoder, _ = loaded
    most = decoder.config.max_positions
    ids = torch.randint(0, 300, (most + 40,), generator=torch.Generator().manual_seed(1)).tolist()
    (found,) = score_continuations(decoder, [(ids, [7, 8, 9])])
    kept = [*ids, 7, 8, 9][-most - 1 :]
    with torch.no_grad():
        shares = decoder(torch.tensor([kept[:-1]])).head[0].double().log_softmax(-1)
    expected = sum(float(shares[most - 3 + n, token]) for n, token in enumerate((7, 8, 9)))
    assert found.logprob == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UserError, match="longer than the context"):
        score_continuations(decoder, [([1], list(range(most + 1)))])


@pytest.mark.parametrize("shots", [0, 1])
def test_multiple_choice_is_scored_as_lm_eval_defines_it(loaded, tmp_path, shots):
    decoder, tokenizer = loaded
    task = read_task(task_file(tmp_path, ROWS))
    assert [item.right for item in task.items] == [0, 1, 1, 1]
    found = ask(decoder, tokenizer, task, TaskSettings(shots=shots))
    before = "Question: def f(x)\nAnswer: return x\n\n" if shots else ""
    right, normed = [], []
    for row, item in list(zip(ROWS, task.items, strict=True))[shots:]:
        prompt = before + (
            row["prompt"] if "prompt" in row else f"Question: {row['question']}\nAnswer:"
        )
        sums = []
        for choice in row["choices"]:
            context, continuation = encode_pair(
                tokenizer, prompt, choice if prompt.endswith(" ") else f" {choice}"
            )
            sums.append(by_hand(decoder, context, continuation)[0])
        right.append(max(range(len(sums)), key=sums.__getitem__) == item.right)
        per_letter = [nats / len(choice) for nats, choice in zip(sums, row["choices"], strict=True)]
        normed.append(max(range(len(sums)), key=per_letter.__getitem__) == item.right)
    assert [bool(one) for one in found.scores[0].values] == right and found.scores[
        0
    ].metric == "acc"
    assert [bool(one) for one in found.scores[1].values] == normed and found.scores[
        1
    ].metric == "acc_norm"


def test_a_pair_is_the_whole_text_and_spaces_belong_to_the_answer(loaded):
    _, tokenizer = loaded
    for context, answer in (
        ("return x", " + 1"),
        ("return x ", "+ 1"),
        ("", "def"),
        ("für \n", "Größe"),
    ):
        before, after = encode_pair(tokenizer, context, answer)
        assert before[len(tokenizer.prefix) if context else 1 :] + after == tokenizer.encode(
            context + answer
        )
        assert tokenizer.decode(after).startswith(context[len(context.rstrip()) :])


def test_completions_in_slots_equal_one_at_a_time(loaded):
    decoder, tokenizer = loaded
    prompts = ["def f(x):", "für", "def f(x):\n    return", "naïve café and so", "x"]
    limits, stops = [3, 30, 9, 14, 20], [(), ("e",), (), ("\n", "a"), ()]
    settings = [
        Sampling(max_new_tokens=limit, temperature=0.7, seed=n) for n, limit in enumerate(limits)
    ]
    ids = [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    asked = [TextRequest(*each) for each in zip(ids, settings, stops, strict=True)]
    alone = [
        "".join(continued(decoder, tokenizer, one.ids, one.sampling, one.stops)) for one in asked
    ]
    assert (
        complete_prompts(decoder, tokenizer, asked, slots=2)
        == alone
        == complete_prompts(decoder, tokenizer, asked)
    )
    assert complete_prompts(decoder, tokenizer, []) == [] and len(set(alone)) > 2


def test_exact_match_takes_what_the_pattern_finds_last():
    assert extracted(" 42 \n", None) == "42"
    assert extracted("first 1, then #### 17.", r"#### (-?\d+)") == "17"
    assert extracted("1 or 2", r"\d") == "2" and extracted("none", r"\d") is None
    with pytest.raises(UserError, match="regular expression"):
        extracted("a", "(")


def test_exact_match_counts_what_the_model_writes(loaded, tmp_path):
    decoder, tokenizer = loaded
    texts = ["def f(x):", "für Größe", "so on"]
    ids = [tokenizer.prefix + tokenizer.encode(text) for text in texts]
    wrote = complete_prompts(
        decoder,
        tokenizer,
        [TextRequest(one, Sampling(max_new_tokens=4, temperature=0)) for one in ids],
    )
    rows = [
        {"prompt": texts[0], "answer": wrote[0]},
        {"prompt": texts[1], "answer": wrote[1] + "!"},
        {"prompt": texts[2], "answer": ["no", f" {wrote[2]} "]},
    ]
    task = read_task(task_file(tmp_path, rows))
    found = ask(decoder, tokenizer, task, TaskSettings(max_new_tokens=4, stop=("\0",)))
    assert task.kind == "exact-match" and list(found.scores[0].values) == [1.0, 0.0, 1.0]
    assert [one["completion"] for one in found.outputs] == wrote


THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}PROMPT{% endif %}{# </think> #}"
)


@pytest.mark.parametrize(
    ("prompt", "written"),
    [
        ("assistant: <think>\n", ["so\n</think>\n\n42", "42", "x</think>7"]),
        ("assistant: ", ["<think>so</think> 42", "<think>42", "7"]),
    ],
)
def test_thoughts_are_no_part_of_an_answer(loaded, tmp_path, monkeypatch, prompt, written):
    decoder, tokenizer = loaded
    (template := tmp_path / "thinks.jinja").write_text(THINKS.replace("PROMPT", prompt))
    task = read_task(task_file(tmp_path, [{"question": "q", "answer": "42"}] * 3))
    monkeypatch.setattr("bloomery.evals.items.complete_prompts", lambda *_: written)
    settings = TaskSettings(chat=True, template=str(template), max_new_tokens=4)
    found = ask(decoder, tokenizer, task, settings)
    assert list(found.scores[0].values) == [1.0, 0.0, 0.0]
    assert [output["answer"] for output in found.outputs] == ["42", None, "7"]
    assert any("1 of 3 completions end inside a thought" in note for note in found.notes)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"question": "a", "choices": ["x", "y"], "answer": 2}], "number of a choice"),
        ([{"question": "a", "choices": ["x", "y"], "answer": True}], "number of a choice"),
        ([{"question": "a", "choices": ["x"], "answer": 0}], "at least two"),
        ([{"question": "a", "answers": "b"}], "is it 'answers'"),
        ([{"question": 3, "answer": "b"}], "'question' is a text"),
        ([{"question": "a", "answer": None}], "an answer is"),
        (
            [
                {"question": "a", "choices": ["x", "y"], "answer": 0},
                {"question": "a", "answer": "x"},
            ],
            "choices are",
        ),
        ([{"prompt": "def f():", "entry_point": "f", "test": "x"}], "programs with tests"),
        ([], "no item"),
        (["text"], "is an object"),
    ],
)
def test_a_bad_row_is_named(tmp_path, rows, problem):
    with pytest.raises(UserError, match=problem) as caught:
        read_task(task_file(tmp_path, rows))
    assert "task.jsonl" in caught.value.where


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first", 1, 2, best=1)


def test_a_comparison_is_printed_recorded_and_reported(run, model, tmp_path):
    task = task_file(tmp_path, ROWS)
    outputs = tmp_path / "outputs.jsonl"
    words = [
        str(run),
        "--task",
        str(task),
        "--against",
        str(model),
        "-d",
        "cpu",
        "--outputs",
        str(outputs),
    ]
    found = CliRunner().invoke(command, [*words, "--json"])
    assert found.exit_code == 0, found.output
    shown = json.loads(found.stdout)
    assert shown["kind"] == "multiple-choice" and shown["items"] == 4
    assert [one["metric"] for one in shown["results"]] == ["acc", "acc_norm"]
    assert shown["results"][0]["difference"]["test"] == "mcnemar-exact"
    events = [event for event in read_events(run / "events.jsonl") if isinstance(event, TaskDone)]
    assert [event.step for event in events] == [1, 1]
    for event, result in zip(events, shown["results"], strict=True):
        assert (event.metric, event.value, event.low) == (
            result["metric"],
            result["model"]["value"],
            result["model"]["low"],
        )
        assert event.p_value == result["difference"]["p_value"] and event.against == str(model)
    lines = [json.loads(line) for line in outputs.read_text().splitlines()]
    assert len(lines) == 4 and {"chosen", "against"} <= lines[0].keys()
    printed = CliRunner().invoke(command, words)
    assert printed.exit_code == 0 and "p = " in printed.stdout and "acc_norm" in printed.stdout
    page = write_report(run).read_text()
    assert page.count("task: acc") == 2 and f"{events[0].low:.1%} to {events[0].high:.1%}" in page


def test_texts_are_compared_by_document_also_with_other_tokenizers(run, model, tmp_path):
    rows = [
        {"text": text}
        for text in ("def f(x):\n    return x", "für Größe und so", "naïve café", "x = 1", "on")
    ]
    data = task_file(tmp_path, rows, "texts.jsonl")
    report = compare_on_texts(Named("ours", run), Named("theirs", model), data, use=CPU)
    (result,) = report.results
    assert report.kind == "text" and report.items == 5 and result.metric == "bits_per_byte"
    from bloomery.evals.evaluate import evaluate_model

    for folder, one in ((run, result.model), (model, result.against)):
        scores, _ = evaluate_model(folder, data, use=CPU)
        assert one.value == pytest.approx(scores.bits_per_byte, rel=1e-6)
    assert result.difference.test == "sign-flip-exact"
    assert result.difference.value == pytest.approx(result.model.value - result.against.value)
    same = (
        compare_on_texts(Named("ours", run), Named("ours", run), data, use=CPU)
        .results[0]
        .difference
    )
    assert same.p_value == 1.0 and same.value == 0.0


def test_a_comparison_on_one_text_has_no_interval_and_a_report(run, model, tmp_path):
    (tmp_path / "one.txt").write_text("def f(x):\n    return x\n" * 9)
    report = compare_on_texts(
        Named("ours", run), Named("theirs", model), tmp_path / "one.txt", use=CPU
    )
    assert report.results[0].model.low is None and report.results[0].difference.p_value is None
    assert f"{report.results[0].model.value:.4f}" in write_report(run).read_text()


def test_a_run_that_cannot_be_written_still_has_its_scores(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bloomery.monitor.events.EventLog.__call__", full)
    report = evaluate_task(Named("ours", run), task_file(tmp_path, ROWS), TaskSettings(), use=CPU)
    assert (
        "not recorded in the run: No space left on device" in report.notes
        and asdict(report)["results"]
    )


def test_completions_are_decoded_by_the_core_of_generate_and_choices_are_not(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(compiled_step, "LEAST", 0)  # tiny models answer before the code is compiled
    said = {}
    for name, rows in (
        ("choices", ROWS),
        ("written", [{"question": "def f(x)", "answer": "return x"}]),
    ):
        said[name] = []
        settings = TaskSettings(max_new_tokens=2)
        evaluate_task(
            Named("ours", run),
            task_file(tmp_path, rows),
            settings,
            use=CPU,
            on_load=said[name].append,
        )
    assert any("decoding" in line for line in said["written"])
    assert not any("decoding" in line for line in said["choices"])


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--shots", "2"], "--shots"),
        (["--outputs", "x"], "--outputs"),
        (["--task", "no-such.jsonl"], "no-such.jsonl"),
        (["--task", "a.jsonl", "--data", "b"], "--task"),
        (["--against", "B", "--extract", "x"], "--extract"),
        (["--lm-eval", "x", "--chat"], "--chat"),
        (["--task", "t", "--outputs", "no/such/a.jsonl"], "no/such"),
        (["--task", "t", "--include-path", "d"], "--include-path"),
    ],
)
def test_flags_that_do_not_fit_are_named(model, words, where):
    found = CliRunner().invoke(command, [str(model), *words]).exception
    assert isinstance(found, UserError) and found.code == 2 and where in found.where
