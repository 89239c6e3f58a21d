"""Words on the command line and in recipes that nobody means, and numbers that no machine has."""

import json
import resource
import time
from pathlib import Path

import pytest
from command_line import assert_clear, here, write_workshop

TOKEN = "AbCdEfGhIjKlMnOpQrStUvWx"


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    write_workshop(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bounded():
    """Four seconds of this process's own work and 1 GiB more than it had, to refuse."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    spent = time.process_time() - began
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert spent < 4 and more < 2**30, (spent, more)


ODD = {
    "a home of nobody": (
        ("train", "tiny.yaml", "--run-dir", "~nobodyhere/x"),
        2,
        "no such user: 'nobodyhere'",
    ),
    "an export to nobody": (
        ("export", "last", "--to", "hf", "--out", "~nobodyhere/x"),
        2,
        "no such user: 'nobodyhere'",
    ),
    "a run folder without a name": (
        ("train", "tiny.yaml", "--run-dir", ""),
        2,
        "the path is empty",
    ),
    "a model without a name": (("download", ""), 1, "an empty name"),
    "a run without a name": (("resume", ""), 2, "no run ''"),
    "a model of no name": (("eval", "", "--data", "text"), 2, "no run ''"),
    "data of nobody": (("train", "tiny.yaml", "data.path=~nobodyhere/x"), 1, "~nobodyhere/x"),
    "a claim of ages": (("plan", "tiny.yaml", "claims.duration=1e308"), 2, "claims.duration"),
    "a length of ages": (
        ("plan", "tiny.yaml", "train.epochs=1e300"),
        2,
        "is not a number of epochs",
    ),
    "a step of everything": (
        ("plan", "tiny.yaml", "train.tokens_per_step=1e300"),
        2,
        "is not a count",
    ),
    "rows of one token": (("plan", "tiny.yaml", "data.sequence_length=1"), 2, "must be at least 2"),
    "a key in the depths": (
        ("plan", "tiny.yaml", ".".join(["a"] * 1000) + "=1"),
        2,
        "more than 32 levels",
    ),
    "a name with a token": (
        ("plan", "tiny.yaml", f"name=run_hf_{TOKEN}ABCDEFGHIJ"),
        2,
        "an access token",
    ),
    "a hook with a token": (
        (
            "plan",
            "tiny.yaml",
            f"logging.trackers=[{{command: 'curl -H \"Authorization: Bearer hf_{TOKEN}\" x.org'}}]",
        ),
        2,
        "an access token",
    ),
    "a hook with a password": (
        ("plan", "tiny.yaml", "logging.trackers=[{command: curl -d api_key=abcdef123 x.org}]"),
        2,
        "an access token",
    ),
}


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_odd_words_are_one_sentence_and_leave_nothing(case, workshop):
    words, code, said = case
    before = sorted(workshop.rglob("*"))
    assert_clear(here(*words), code=code, mentions=[said])
    assert sorted(workshop.rglob("*")) == before


def test_a_recipe_of_a_hundred_thousand_keys_is_told_as_one(workshop, bounded):
    Path("big.yaml").write_text(
        Path("tiny.yaml").read_text() + "".join(f"k{at}: 1\n" for at in range(100_000))
    )
    assert_clear(
        here("plan", "big.yaml"), code=2, mentions=["more than 5,000 values", "a data file?"]
    )


def test_a_recipe_of_thousands_of_mistakes_tells_the_first(workshop, bounded):
    Path("wrong.yaml").write_text(
        Path("tiny.yaml").read_text() + "".join(f"k{at}: 1\n" for at in range(4000))
    )
    result = here("plan", "wrong.yaml")
    assert (
        result.code == 2
        and "many mistakes, the first 25" in result.err
        and len(result.err.splitlines()) < 30
    )


RECORDS = ["cpu_cores", "memory_bytes", "memory_free_bytes", "disk_free_bytes"]


@pytest.mark.parametrize("key", RECORDS)
def test_a_machine_of_400_digits_is_no_machine(key, workshop):
    record = {
        "system": "Linux",
        "cpu_name": "x",
        "cpu_cores": 2,
        "memory_bytes": 2**34,
        "memory_free_bytes": 2**33,
        "disk_free_bytes": 2**40,
        key: 10**400,
    }
    software = {"python": "3.11.7"}
    Path("m.json").write_text(
        json.dumps({"accelerators": [], "host": record, "software": software})
    )
    assert_clear(
        here("doctor", "--machine", "m.json"), code=2, mentions=["not a machine record", key]
    )


HOSTILE = "a\x1b]0;owned\x07\x1b[31m\u202e"


def test_names_and_errors_never_reach_the_terminal_raw(workshop):
    lines = (("train", HOSTILE), ("resume", HOSTILE), (HOSTILE,), ("plan", "tiny.yaml", HOSTILE))
    for words in (*lines, ("plan", "tiny.yaml", f"data.path={HOSTILE}")):
        result = here(*words)
        assert not {*result.err, *result.out} & {"\x1b", "\x07", "\u202e"}, words
    Path(f"runs/{HOSTILE}").mkdir(parents=True)
    Path(f"runs/{HOSTILE}/recipe.yaml").write_text("")
    assert not {*here("runs").out} & {"\x1b", "\x07", "\u202e"}
