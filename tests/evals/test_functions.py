"""Function tasks: the library's own functions pass them, wrong ones do not, and pass@k counts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bloomery.cli.eval import command
from bloomery.core.errors import UserError
from bloomery.core.sandbox.programs import (
    Limits,
    program_of,
    refuse_without_sandbox,
    run_program,
)
from bloomery.evals import items
from bloomery.evals.items import (
    PACKAGED,
    Item,
    Settings,
    Task,
    passes,
    read_task,
    refuse_settings,
    scores_of,
    solve,
)
from bloomery.evals.statistics import pass_at_k

HOME = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox():
    try:
        refuse_without_sandbox()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="docstrings are those of Python 3.11")
def test_the_packaged_tasks_are_those_of_the_library():
    script = [sys.executable, str(HOME / "scripts" / "mine_functions.py"), "--check"]
    found = subprocess.run(script, capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "as written" in found.stdout, found.stdout + found.stderr


def test_the_library_passes_its_tasks_and_no_task_is_empty(sandbox):
    """All tasks in one program: a sandbox each takes a quarter of a second."""
    items = read_task(PACKAGED).items
    assert len(items) >= 60 and len({item.name for item in items}) == len(items)
    program, test = "", ""
    for number, item in enumerate(items):
        compile(item.prompt + "    pass", item.name, "exec")
        module, _, name = item.name.rpartition(".")
        program += f"import {module}\nright{number} = {module}.{name}\n"
        test += f"{item.test}\ncheck{number} = check\n"
    program += "def wrong(*a, **k):\n    return None\n"
    program += f"right = [globals()[f'right{{n}}'] for n in range({len(items)})]\n"
    test += """
def check(right):
    for number, function in enumerate(right):
        test = globals()[f"check{number}"]
        test(function)
        try:
            test(wrong)
        except (AssertionError, TypeError):
            continue
        assert False, number
"""
    limits = Limits(seconds=60, cpu_seconds=30)
    assert run_program(program, test=test, entry_point="right", limits=limits) is None


def test_a_solution_cannot_import_its_function(sandbox):
    item = next(item for item in read_task(PACKAGED).items if item.name == "statistics.median_low")
    body = "    data = sorted(data)\n    return data[(len(data) - 1) // 2]\n"
    assert passes(item, body, chat=False) is None
    cheat = "    import statistics\n    return statistics.median_low(data)\n"
    assert "ModuleNotFoundError" in passes(item, cheat, chat=False)
    wrong = "    return data[0]\n"
    assert "AssertionError" in passes(item, wrong, chat=False)


CHECK = "def check(c):\n    assert c(2) == 4\n"
ITEM = Item("f", "import math\ndef f(x):\n    '''Twice x.'''\n", "", entry_point="f", test=CHECK)


@pytest.mark.parametrize(
    ("completion", "chat", "right"),
    [
        ("    return x * 2", False, True),
        ("\n    return x * 2\n", False, True),
        ("    return x", False, False),
        ("Sure:\n```python\ndef f(x):\n    return math.floor(x * 2)\n```\nDone.", True, True),
        ("```\n    return 2 * x\n```", True, True),
        ("def f(x): return x + x", True, True),
        ("I cannot.", True, False),
    ],
)
def test_a_program_is_the_prompt_and_its_completion_or_a_code_block(completion, chat, right):
    program = program_of(completion, prompt=ITEM.prompt, entry_point=ITEM.entry_point, chat=chat)
    tested = f"{program}\n{CHECK}\ncheck(f)\n"
    if not right:
        with pytest.raises((AssertionError, SyntaxError)):
            exec(tested, {})
    else:
        exec(tested, {})


def test_pass_at_k_is_the_mean_over_items():
    scores = scores_of([0, 3, 10, 20], 20)
    assert [one.metric for one in scores] == ["pass@1", "pass@10", "pass@20"]
    for one, k in zip(scores, (1, 10, 20), strict=True):
        assert list(one.values) == [pass_at_k(20, count, k) for count in (0, 3, 10, 20)]
    assert (
        scores[0].estimate().interval == "bootstrap" and scores[2].estimate().interval == "wilson"
    )
    assert [one.metric for one in scores_of([1, 0], 1)] == ["pass@1"]


def test_programs_run_only_with_consent(model, tmp_path):
    found = (
        CliRunner()
        .invoke(command, [str(model), "--task", "stdlib-functions", "-d", "cpu"])
        .exception
    )
    assert isinstance(found, UserError) and found.code == 2 and "--run-code" in found.fix
    task = Task("t", "exact-match", ())
    for settings, flag in (
        (Settings(run_code=True), "--run-code"),
        (Settings(samples=2), "--samples"),
    ):
        with pytest.raises(UserError, match=flag):
            refuse_settings(task, settings)
    with pytest.raises(UserError, match="--shots"):
        refuse_settings(replace(task, kind="functions"), Settings(shots=1, run_code=True))


def test_samples_are_counted_from_the_models_text_to_the_page(
    model, tmp_path, monkeypatch, sandbox
):
    """The model's text is replaced by known programs; all else is real."""
    rows = [
        {
            "task_id": name,
            "prompt": f"def {name}(x):\n",
            "entry_point": name,
            "test": f"def check(c):\n    assert c(2) == {value}\n",
        }
        for name, value in (("twice", 4), ("next", 3))
    ]
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = ["    return 2 * x", "    return 1 / 0", "    return x * 2", *["    return x"] * 3]
    monkeypatch.setattr(items, "complete", lambda *_, **__: written)
    words = [str(model), "--task", str(path), "--samples", "3", "--run-code", "-d", "cpu", "--json"]
    found = CliRunner().invoke(command, words)
    assert found.exit_code == 0, found.output
    shown = json.loads(found.stdout)
    values = {one["metric"]: one["model"]["value"] for one in shown["results"]}
    assert (
        values == {"pass@1": pytest.approx(2 / 3 / 2), "pass@3": 0.5}
        and shown["kind"] == "functions"
    )


def test_a_prompt_begins_with_bos_unless_asked_not_to(loaded, sandbox, monkeypatch):
    decoder, tokenizer = loaded
    asked, task = (
        list[list[int]](),
        Task("t", "functions", (replace(ITEM, prompt="def f(x):", question=""),)),
    )
    monkeypatch.setattr(
        items, "complete", lambda _d, _t, all_, **_: [asked.append(all_[0].ids) or ""]
    )
    for bos in (True, False):
        solve(decoder, tokenizer, task, Settings(run_code=True, bos=bos, max_new_tokens=5))
    assert tokenizer.prefix and asked[0] == [*tokenizer.prefix, *asked[1]]


def test_the_models_own_text_is_run(loaded, tmp_path, sandbox):
    decoder, tokenizer = loaded
    item = replace(ITEM, prompt="def f(x):", question="def f(x):")
    task = Task("t", "functions", (item,))
    found = solve(
        decoder, tokenizer, task, Settings(run_code=True, samples=2, max_new_tokens=5, seed=1)
    )
    (output,) = found.outputs
    assert len(output["completions"]) == len(output["failures"]) == 2 and output["passed"] == 0
    assert [one.metric for one in found.scores] == ["pass@1", "pass@2"]
