"""Reward functions in their workers: answers, and everything that people write by mistake."""

import time

import pytest

from bloomery.core.errors import UserError
from bloomery.infer.completions import Completion, Episode
from bloomery.train.failures import Stopped
from bloomery.train.rl import rewards as rewards_module
from bloomery.train.rl.rewards import Rewards, WorkerReward
from bloomery.train.rl.verifiers import verifier_of

GOOD = """
import math
print("loaded")

def score(prompts, completions, completion_ids, answer, **_):
    print("called")
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]

def lengths(completion_ids, **_):
    return [len(ids) for ids in completion_ids]

def hangs(**_):
    import time
    time.sleep(60)

def raises(**_):
    return [1 / 0]

def texts(completions, **_):
    return ["good"] * len(completions)

def not_a_number(completions, **_):
    return [math.nan] * len(completions)

def too_few(**_):
    return [1.0]

def abstains(completions, **_):
    return [None] * len(completions)

def one_number(**_):
    return 1.0

def other_column(prompts, completions, level, **_):
    return [0.0] * len(completions)

def dies(**_):
    import os
    os._exit(3)

def floods(**_):
    return [len(b"x" * 2**40)]

def forks(completions, **_):
    import os
    if os.fork() == 0:
        os._exit(0)
    return [1.0] * len(completions)

def shouts(completions, **_):
    print("x" * 10_000_000)
    return [2.0] * len(completions)
"""


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(GOOD)

    def of(function, **settings):
        job = {"file": str(file), "function": function}
        return WorkerReward(name=settings.pop("name", function), job=job, **settings)

    return of


def score(*sources, columns=None):
    with Rewards(sources) as rewards:
        return rewards.score(
            ["1+1=", "2+2=", "3+3="],
            ["2", "5", "6"],
            [[2, 0], [5, 0], [6, 0, 0]],
            {"answer": ["2", "4", None]} if columns is None else columns,
        )


def test_rewards_add_up_by_weight_and_none_abstains(source):
    scored = score(source("score", weight=2.0), source("lengths", weight=0.5))
    assert scored.by_name == {"score": [1.0, 0.0, None], "lengths": [2.0, 2.0, 3.0]}
    assert scored.totals == (3.0, 1.0, 1.5)


def test_a_sum_that_is_no_number_is_refused_and_is_no_abstention(source):
    with pytest.raises(UserError, match="1e\\+308") as refused:
        score(source("lengths", weight=1e308), source("score", weight=1e308))
    assert "lengths" in refused.value.problem and "weight" in refused.value.fix


ODD = """
import json, os, socket, struct, sys

def empties(completions, prompts, **_):
    answer = [float(len(text)) for text in completions]
    completions.clear()
    prompts.clear()
    return answer

def counts_after_emptying(completions, **_):
    completions.clear()
    return [1.0 for _ in completions]

def huge(completions, **_):
    return [10**400] * len(completions)

def some_huge(completions, **_):
    return [10**400, *[1.0] * (len(completions) - 1)]

class Raising:
    def tolist(self):
        raise RuntimeError("no list")
    def item(self):
        raise RuntimeError("no item")

def no_list(**_):
    return Raising()

def no_item(completions, **_):
    return [Raising()] * len(completions)

def arrays(completions, **_):
    import numpy
    return [numpy.ones(2)] * len(completions)

def unprintable(**_):
    class Odd(Exception):
        def __str__(self):
            raise ValueError
    raise Odd

def as_bytearray(completions, **_):
    return bytearray(len(completions))

def as_bytes(completions, **_):
    return b"\\x01" * len(completions)

def answer(entry):
    text = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    os.write(int(sys.argv[1]), struct.pack("<IQ", len(text), 0) + text)

def forges(completions, **_):
    answer({"rewards": [1.0, 2.0], "skipped": []})
    return [0.0] * len(completions)

def forges_texts(completions, **_):
    answer({"rewards": ["a"] * len(completions), "skipped": []})
    return [0.0] * len(completions)

def forges_a_list(completions, **_):
    answer([1.0])
    return [0.0] * len(completions)

def forges_no_json(completions, **_):
    answer(b"no json")
    return [0.0] * len(completions)
"""


@pytest.fixture
def odd(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    return lambda name: WorkerReward(
        name=name, job={"file": str(tmp_path / "odd.py"), "function": name}
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("counts_after_emptying", "returned 0 numbers for 3 completions"),
        ("huge", "an integer beyond 1e308 for completion 0"),
        ("no_list", "whose tolist() failed: RuntimeError: no list"),
        ("no_item", "whose item() failed (RuntimeError: no item"),
        ("arrays", "ndarray, whose item() failed"),
        ("unprintable", "Odd: its text cannot be read"),
        ("as_bytes", "returned bytes, not a list"),
        ("as_bytearray", "returned bytearray, not a list"),
        ("forges", "answered with something else than its rewards"),
        ("forges_texts", "answered with something else than its rewards"),
        ("forges_a_list", "answered with something else than its rewards"),
        ("forges_no_json", "answered with something else than its rewards"),
    ],
)
def test_an_odd_answer_is_told_and_is_no_end_of_the_process(odd, function, words):
    with pytest.raises(UserError) as refused:
        score(odd(function))
    assert words in refused.value.problem
    assert "ended its process" not in refused.value.problem
    assert "memory" not in refused.value.fix


def test_a_function_may_spoil_the_lists_that_it_is_given(odd):
    assert score(odd("empties")).totals == (1.0, 1.0, 1.0)


def test_a_number_that_is_too_large_is_skipped_where_rows_are(odd):
    with Rewards([odd("some_huge")], on_error="skip") as rewards:
        scored = rewards.score(["a", "b"], ["1", "2"], [[1], [2]], {})
    assert scored.by_name["some_huge"] == [None, 1.0]
    assert "beyond 1e308" in scored.skipped[0]


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids"])
def test_a_column_named_like_an_argument_is_to_be_renamed_before_anything_is_drawn(source, column):
    with (
        pytest.raises(UserError, match=f"column {column}") as refused,
        Rewards([source("lengths")], columns=["answer", column]) as rewards,
    ):
        rewards.start()
    assert "rename the column" in refused.value.fix


def test_a_file_beside_a_reward_that_hides_a_package_is_named(tmp_path):
    (tmp_path / "safetensors_helper.py").write_text("")
    (tmp_path / "pluggy.py").write_text("")
    (tmp_path / "mine.py").write_text(
        "import safetensors_helper\nfrom pluggy import HookspecMarker\n"
    )
    job = {"file": str(tmp_path / "mine.py"), "function": "score"}
    with pytest.raises(UserError, match="ImportError") as refused:
        score(WorkerReward(name="mine", job=job))
    assert "pluggy.py, which hides the package pluggy" in refused.value.fix


def test_a_worker_serves_many_calls_and_ends_with_the_block(source):
    with Rewards([source("lengths")]) as rewards:
        for count in (1, 3, 2):
            ids = [[1] * (number + 1) for number in range(count)]
            scored = rewards.score(["?"] * count, [""] * count, ids, {})
            assert scored.totals == tuple(float(number + 1) for number in range(count))
        (child,) = rewards._children.values()
    assert child._process.poll() is not None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", ["ZeroDivisionError", "line ", "'1+1='"]),
        ("texts", ["returned str, not a number, for completion 0", "'1+1='"]),
        ("not_a_number", ["returned nan for completion 0", "'1+1='"]),
        ("too_few", ["returned 1 numbers for 3 completions", "'1+1='"]),
        ("abstains", ["returned None", "none of 3 completions", "'1+1='"]),
        ("one_number", ["returned float, not a list", "'1+1='"]),
        ("dies", ["ended its process", "exit code 3", "'1+1='"]),
        ("missing", ["no function missing"]),
        ("other_column", ["failed", "level"]),
        ("floods", ["MemoryError"]),
    ],
)
def test_a_mistake_is_one_sentence_with_the_function(source, function, words):
    with pytest.raises(UserError) as refused:
        score(source(function))
    for word in (function, *words):
        assert word in refused.value.problem
    assert refused.value.fix and "\n" not in refused.value.problem


@pytest.mark.parametrize("function", ["forks", "shouts"])
def test_forks_and_floods_of_output_harm_nobody(source, function):
    assert len(score(source(function)).totals) == 3


def test_a_reward_that_hangs_is_ended_by_its_timeout(source):
    start = time.monotonic()
    with pytest.raises(UserError, match="hangs did not answer within 1 s"):
        score(source("hangs", timeout=1.0))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def score(:", "SyntaxError"),
        ("import nothing_like_it", "ModuleNotFoundError"),
        (None, "no file"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_so(tmp_path, content, words):
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=words):
        score(WorkerReward(name="broken", job={"file": str(file), "function": "score"}))


def test_a_file_that_never_loads_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards_module, "START_SECONDS", 1.0)
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(UserError, match="slow did not load within 1 s"):
        score(WorkerReward(name="slow", job={"file": str(file), "function": "score"}))


@pytest.mark.parametrize(
    ("name", "settings", "completion", "expected", "reward"),
    [
        ("exact_match", {}, " Paris\n", "Paris", 1.0),
        ("exact_match", {}, "Paris.", "Paris", 0.0),
        ("math", {}, r"so \boxed{1,234}", "1234", 1.0),
        ("math", {}, "3 apples and 4 more are 7.", "7", 1.0),
        ("math", {}, "0.5", "1/2", 1.0),
        ("math", {}, "0.51", "1/2", 0.0),
        ("math", {}, "none", "4", 0.0),
        ("math", {}, "#### 72", "She sold 48+24 = 72\n#### 72", 1.0),
        ("regex", {"pattern": r"<a>(.*)</a>"}, "<a>x</a>", "x", 1.0),
        ("regex", {"pattern": r"<a>(.*)</a>"}, "<a>y</a>", "x", 0.0),
        ("length", {"max_characters": 4}, "abcd", None, 1.0),
        ("length", {"max_characters": 4}, "abcdef", None, 0.5),
    ],
)
def test_verifiers_by_hand(name, settings, completion, expected, reward):
    column = {} if expected is None else {"column": "answer"}
    verify = verifier_of(name, settings | column)
    columns = {} if expected is None else {"answer": [expected]}
    assert verify(prompts=["?"], completions=[completion], **columns) == [reward]
    message = [{"role": "assistant", "content": completion}]
    assert verify(prompts=["?"], completions=[message], **columns) == [reward]


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (100, 100), (7, 1)])
def test_the_punishment_of_long_completions_is_that_of_trl(longest, cache):
    other_rewards = pytest.importorskip("trl.rewards.other_rewards")
    lengths = list(range(130))
    ids = [[1] * length for length in lengths]
    settings = {"max_completion_len": longest, "soft_punish_cache": cache}
    texts = ["x"] * len(ids)
    ours = verifier_of("soft_overlong", settings)(
        prompts=texts, completions=texts, completion_ids=ids
    )
    theirs = other_rewards.get_soft_overlong_punishment(longest, cache)(ids)
    assert ours == pytest.approx(theirs, abs=1e-15) and min(ours) == -1.0


def test_results_of_tools_are_no_part_of_a_length():
    """Of 6 tokens 4 were sampled; another reward has all."""
    job = {
        "verifier": "soft_overlong",
        "settings": {"max_completion_len": 6, "soft_punish_cache": 4},
    }
    completion = Completion(0, 0, [1, 2, 3, 4, 5, 6])
    completion.episode = Episode([], [[2, 4]], [], 1, 1, 0, None)
    assert completion.sampled_ids == [1, 2, 5, 6] and completion.num_sampled == 4
    with Rewards([WorkerReward(name="long", job=job)]) as rewards:
        scored = rewards.score(
            ["?"], ["x"], [completion.ids], {}, sampled_ids=[completion.sampled_ids]
        )
    assert scored.by_name["long"] == [-0.5]


def verified(verifier, *, on_error="stop", completions, columns, prompts=None, **settings):
    job = {"verifier": verifier, "settings": {"column": "answer"} | settings}
    with Rewards([WorkerReward(name="v", job=job)], on_error=on_error) as rewards:
        return rewards.score(
            prompts or ["?"] * len(completions), completions, [[0]] * len(completions), columns
        )


def test_a_schema_of_each_row_judges_its_completions():
    schemas = [{"type": "integer"}, '{"type": "string"}', None, {"type": "integer"}]
    completions = ["3", '"x"', "3", "[]"]
    scored = verified("json_schema", completions=completions, columns={"answer": schemas})
    assert scored.by_name["v"] == [1.0, 1.0, None, 0.0]
    one = verified(
        "json_schema",
        completions=['{"b": 1, "a": 2}', "{}"],
        columns={},
        column=None,
        json_schema={"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]},
    )
    assert one.by_name["v"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("verifier", "answer", "words"),
    [
        ("json_schema", "{", "no JSON schema"),
        ("json_schema", {"not": {}}, "not supported"),
        ("json_schema", 3, "an object"),
        ("unit_tests", "assert (", "no Python"),
        ("length", "many", "'many'"),
    ],
)
def test_a_row_that_cannot_be_judged_stops_or_is_skipped(verifier, answer, words):
    good = {"json_schema": {"type": "integer"}, "unit_tests": None, "length": 5}[verifier]
    case = dict(
        completions=["3", "3"],
        columns={"answer": [good, answer]},
        prompts=["fine", "the bad one"],
        program_seconds=1.0,
        program_memory=2**28,
    )
    with pytest.raises(UserError) as refusal:
        verified(verifier, **case)
    assert "cannot score the prompt 'the bad one'" in refusal.value.problem
    assert words in refusal.value.problem
    assert "data.on_error=skip" in refusal.value.fix
    if good is not None:
        scored = verified(verifier, on_error="skip", **case)
        assert scored.by_name["v"] == [1.0, None]
        assert len(scored.skipped) == 1 and "'the bad one'" in scored.skipped[0]


def test_a_column_that_the_dataset_lacks_is_said_before_anything_is_drawn(source):
    for reward in (
        source("score"),
        WorkerReward(name="v", job={"verifier": "math", "settings": {"column": "answer"}}),
    ):
        with Rewards([reward], columns=["question"]) as rewards:
            with pytest.raises(UserError, match="no column answer") as refusal:
                rewards.start()
            assert "question" in refusal.value.fix
    with Rewards([source("score"), source("raises")], columns=["answer"]) as rewards:
        rewards.start()


def test_workers_run_at_the_same_time(tmp_path):
    """Each of the two waits in its function until the other is in its own."""
    file = tmp_path / "waiting.py"
    file.write_text(
        "import os, time\nfrom pathlib import Path\n"
        "def f(prompts, **_):\n"
        f"    Path({str(tmp_path)!r}, f'{{os.getpid()}}.here').touch()\n"
        "    end = time.monotonic() + 30\n"
        f"    while len(list(Path({str(tmp_path)!r}).glob('*.here'))) < 2 and time.monotonic() < end:\n"
        "        time.sleep(0.01)\n"
        "    return [float(time.monotonic() < end)] * len(prompts)\n"
    )
    sources = [
        WorkerReward(name=name, job={"file": str(file), "function": "f"}) for name in ("a", "b")
    ]
    with Rewards(sources) as rewards:
        rewards.start()
        scores = rewards.score(["?"], [""], [[0]], {})
        assert scores.totals == (2.0,)


def test_a_copy_that_forked_answers_nothing(tmp_path):
    """Both processes return from the function; the second answer would be taken for that of the next call."""
    file = tmp_path / "forking.py"
    file.write_text(
        "import os\ndef f(prompts, **_):\n    return [float(prompts[0]) + (100 if os.fork() == 0 else 0)]\n"
    )
    with Rewards([WorkerReward(name="f", job={"file": str(file), "function": "f"})]) as rewards:
        for number in range(5):
            assert rewards.score([str(number)], [""], [[0]], {}).totals == (float(number),)
            time.sleep(0.05)


def test_a_stop_does_not_wait_for_a_reward(source):
    with Rewards([source("hangs")], stop=lambda: True) as rewards:
        start_time = time.monotonic()
        with pytest.raises(Stopped):
            rewards.score(["?"], [""], [[0]], {})
        assert time.monotonic() - start_time < 30
