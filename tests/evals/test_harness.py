"""lm-evaluation-harness on our decoder, against its own `hf` model on the same weights: local tasks, no download."""

import json
import math

import pytest
import torch
from click.testing import CliRunner

from bloomery.cli.eval import command
from bloomery.core.errors import UserError
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.evals.harness import (
    HarnessSettings,
    adapter,
    refuse_without_harness,
    run_harness,
)
from bloomery.model.io.weights import load_decoder, model_state, write_model
from models_for_tests import make_model

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
except ImportError:
    lm_eval = None

needs_harness = pytest.mark.skipif(
    lm_eval is None, reason="lm-evaluation-harness is not installed (extra lm-eval)"
)
ROWS = [
    {
        "question": "def f(x)",
        "choices": ["return x", "für Größe", "on"],
        "answer": 0,
        "text": "def f(x):\n" * 40,
    },
    {
        "question": "naïve",
        "choices": ["café", "x + 1", "so"],
        "answer": 1,
        "text": "naïve café, 東京 🙂🙃 and so on",
    },
    {"question": "für", "choices": ["Größe", "f(x)", "return"], "answer": 2, "text": "x"},
    {"question": "so", "choices": ["on", "x", "café und so"], "answer": 0, "text": "return x + 1 "},
]
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "local_write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "local_corpus": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\n\n"], max_gen_toks: 12}
metric_list: [{metric: bleu}, {metric: chrf}, {metric: chrf++}, {metric: ter}]
""",
    "local_classes": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer % 2}}"
doc_to_choice: ["yes", "no"]
metric_list: [{metric: acc}, {metric: f1}, {metric: mcc}]
""",
    "local_words": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: word_perplexity}]
""",
    "local_filters": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e", "\n\n"], max_gen_toks: 12}
filter_list:
  - {name: first, filter: [{function: take_first}]}
  - {name: word, filter: [{function: regex, regex_pattern: '(\\w+)'}, {function: take_first}]}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    decoder = load_decoder(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    write_model(model_state(decoder), decoder.config, folder)
    return folder


@pytest.fixture(scope="module")
def both(model):
    theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=3)
    return adapter(load_decoder(model), load_tokenizer(model)), theirs


def asked(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=n)
        for n, each in enumerate(arguments)
    ]


@needs_harness
def test_log_likelihoods_equal_those_of_hf(both):
    pairs = [(row["question"], f" {choice}") for row in ROWS for choice in row["choices"]]
    pairs += [
        ("", "def f(x)"),
        ("return x  ", "+ 1"),
        ("def f(x):\n" * 60, " return"),
        ("a <s> b", " c"),
    ]
    found, expected = (one.loglikelihood(asked("loglikelihood", *pairs)) for one in both)
    for (logprob, greedy), (their_logprob, their_greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(their_logprob, abs=1e-4) and greedy == their_greedy


@needs_harness
def test_rolling_log_likelihoods_equal_those_of_hf(both):
    texts = [(row["text"],) for row in ROWS]
    ours, theirs = (
        one.loglikelihood_rolling(asked("loglikelihood_rolling", *texts)) for one in both
    )
    assert ours == pytest.approx(theirs, abs=2e-3, rel=1e-5) and min(ours) < -100


@needs_harness
def test_completions_equal_those_of_hf(both):
    requests = [(row["question"], {"until": ["e", "\n"], "max_gen_toks": 16}) for row in ROWS]
    requests.append(("def f(x):\n" * 60, {"until": [], "max_gen_toks": 5}))
    requests.append(("x", {"max_gen_toks": 30, "do_sample": False}))
    ours, theirs = (one.generate_until(asked("generate_until", *requests)) for one in both)
    assert ours == theirs and any(ours)


def task_files(folder):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    return folder


@needs_harness
@pytest.mark.soak  # 10 s: the harness indexes its thousands of tasks
def test_the_figures_of_whole_tasks_equal_those_of_hf(model, both, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, names = task_files(tmp_path), tuple(TASKS)
    settings = HarnessSettings(tasks=names, include_path=folder)
    scores = run_harness(load_decoder(model), load_tokenizer(model), settings=settings).scores
    found = {one.metric: one for one in scores}
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    theirs = lm_eval.simple_evaluate(
        model=both[1], tasks=list(names), task_manager=manager, bootstrap_iters=0
    )
    expected = {}
    for task, results in theirs["results"].items():
        for key, value in results.items():
            metric, _, filter_name = key.partition(",")
            if isinstance(value, float | int) and filter_name and not metric.endswith("_stderr"):
                name = f"{task}.{metric}"
                expected[f"{name}.{filter_name}" if task == "local_filters" else name] = value
    assert found.keys() == expected.keys() and len(found) == 16
    for name, one in found.items():
        estimate = one.estimate()
        assert math.isclose(estimate.value, expected[name], rel_tol=1e-5), name
        assert (estimate.low, estimate.high) != (None, None), name
        assert estimate.low <= estimate.value <= estimate.high, name
    words = [
        str(model),
        "--lm-eval",
        "local_choice",
        "--include-path",
        str(folder),
        "-d",
        "cpu",
        "--json",
    ]
    printed = CliRunner().invoke(command, [*words, "--against", str(model)])
    assert printed.exit_code == 0, printed.output
    shown = json.loads(printed.stdout[printed.stdout.index("{\n") :])
    assert shown["kind"] == "lm-eval" and shown["results"][0]["difference"]["p_value"] == 1.0


@needs_harness
def test_a_metric_of_all_documents_is_that_of_the_harness(model, tmp_path, monkeypatch):
    """Also on the command line, with items that are tuples of texts, and of numpy's numbers."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = task_files(tmp_path)
    words = [str(model), "--include-path", str(folder), "-d", "cpu"]
    tasks = "local_corpus,local_classes"
    asked = [*words, "--lm-eval", tasks, "--against", str(model), "--json"]
    printed = CliRunner().invoke(command, [*asked, "--outputs", str(tmp_path / "items.jsonl")])
    assert printed.exit_code == 0, printed.output
    results = {
        result["metric"]: result
        for result in json.loads(printed.stdout[printed.stdout.index("{\n") :])["results"]
    }
    for metric in ("bleu", "chrf", "chrf++", "ter"):
        result = results[f"local_corpus.{metric}"]
        assert result["model"]["interval"] == "bootstrap"
        assert result["difference"]["value"] == 0 and result["difference"]["p_value"] is None
        assert (result["difference"]["low"], result["difference"]["high"]) == (0, 0)
    assert results["local_classes.acc"]["difference"]["test"] == "mcnemar-exact"
    table = CliRunner().invoke(command, [*words, "--lm-eval", tasks, "--against", str(model)])
    assert "no test: a metric of all items together" in table.output


@needs_harness
def test_settings_that_are_not_supported_are_named(both):
    with pytest.raises(UserError, match="num_beams"):
        both[0].generate_until(asked("generate_until", ("a", {"num_beams": 2})))
    with pytest.raises(UserError, match="context is"):
        both[0].generate_until(asked("generate_until", ("a", {"max_gen_toks": 5000})))


@pytest.mark.skipif(lm_eval is not None, reason="lm-evaluation-harness is installed")
def test_a_missing_harness_is_named_with_its_extra():
    with pytest.raises(UserError) as caught:
        refuse_without_harness()
    assert "lm-eval>=0.4.9" in caught.value.fix and caught.value.where == "--lm-eval"
