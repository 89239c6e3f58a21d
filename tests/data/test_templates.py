"""Chat templates: where they come from, and what none of them can do."""

import json
import subprocess
import sys
import time
from pathlib import Path

import chat_tokenizers
import jinja2
import pytest

import bloomery
from bloomery.core.errors import UserError
from bloomery.data.chat import render
from bloomery.data.chat.render import Renderer
from bloomery.data.chat.sandbox_worker import environment
from bloomery.data.examples import BadRow, Example, Message
from bloomery.data.tokenizer.templates import BUILTIN, NOT_OWN, builtin_template, find_template
from bloomery.data.tokenizer.tokenizer import load_tokenizer

TALK = Example("a.jsonl:3", "chat", (), ((Message("user", "hi"), Message("assistant", "yo")),))
SIMPLE = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"


def folder_with(tmp_path, config=None, **files):
    chat_tokenizers.ours().save(tmp_path)
    saved_config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(saved_config | (config or {})))
    for name, content in files.items():
        path = tmp_path / (name.replace("__", "/") + ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return load_tokenizer(tmp_path)


def test_the_tokenizer_brings_its_own_template(tmp_path):
    template = find_template(None, folder_with(tmp_path, {"chat_template": "A"}).config)
    assert (template.text, template.origin) == ("A", "the tokenizer's own template")


def test_of_several_templates_the_default_is_taken_and_others_by_name(tmp_path):
    named_templates = [
        {"name": "default", "template": "A"},
        {"name": "tool_use", "template": "B"},
        {"name": "rag", "template": "C"},
    ]
    config = folder_with(tmp_path, {"chat_template": named_templates}).config
    assert find_template(None, config).text == "A" and find_template(None, config).tool_use == "B"
    assert find_template("rag", config).text == "C"
    with pytest.raises(UserError, match="several chat templates and no default: rag"):
        find_template(None, {"chat_template": named_templates[2:]})


def test_files_beside_the_tokenizer_come_before_its_configuration(tmp_path):
    tokenizer = folder_with(
        tmp_path, {"chat_template": "A"}, chat_template="B", additional_chat_templates__rag="C"
    )
    assert find_template(None, tokenizer.config).text == "B"
    assert find_template("rag", tokenizer.config).text == "C"


def test_transformers_finds_the_same_template_in_what_is_saved(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = folder_with(tmp_path / "a", None, chat_template=SIMPLE)
    tokenizer.save(tmp_path / "b")
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == SIMPLE


def test_a_template_is_given_by_file_name_or_text(tmp_path):
    (tmp_path / "mine.jinja").write_text("A")
    assert find_template(str(tmp_path / "mine.jinja"), {}).text == "A"
    assert find_template("{{ messages }}", {}).text == "{{ messages }}"
    for name in BUILTIN:
        assert find_template(name, {}).text == builtin_template(name)


def test_a_template_can_name_every_token_of_the_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    template = "{{ bos_token }}|{{ sep_token }}|{{ image_token }}|{{ boi_token }}|{{ mask_token }}|{{ pad_token }}"
    settings = {
        "sep_token": "</s>",
        "image_token": "<s>",
        "extra_special_tokens": {"boi_token": "</s>"},
        "chat_template": template,
    }
    tokenizer = folder_with(tmp_path, settings)
    turns = [{"role": "user", "content": "hi"}]
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with Renderer(tokenizer, template=None, train_on="all") as renderer:
        text = renderer.rendered([Message("user", "hi")])
    assert (
        text
        == library_tokenizer.apply_chat_template(turns, tokenize=False)
        == "<s>|</s>|<s>|</s>||"
    )


def test_a_template_that_replaces_the_tokenizer_s_own_is_named_so(tmp_path):
    tokenizer = folder_with(tmp_path, {"chat_template": SIMPLE})
    assert not find_template(None, tokenizer.config).replaces_own
    assert not find_template(SIMPLE, tokenizer.config).replaces_own, "the same text"
    for name in ("llama2", SIMPLE + "x"):
        template = find_template(name, tokenizer.config)
        assert template.replaces_own and template.description.endswith(NOT_OWN)
    assert find_template("llama2", {}).description == "the built-in template llama2"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (None, "has no chat template"),
        ("chatlm", "did you mean chatml?"),
        ("no/such.jinja", "file: 'no/such.jinja'"),
    ],
)
def test_an_unknown_template_is_refused_with_a_suggestion(name, problem):
    with pytest.raises(UserError, match=problem.replace("?", r"\?")) as caught:
        find_template(name, {})
    assert "chatml" in caught.value.fix and caught.value.where == "data.chat.template"


def test_a_binary_or_too_large_template_file_is_refused(tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.jinja").write_text("x" * 2**21)
    for name, problem in (("a", "not UTF-8"), ("b", "larger than 1,048,576 bytes")):
        with pytest.raises(UserError, match=problem):
            find_template(str(tmp_path / f"{name}.jinja"), {})


BAD = {
    "a syntax error": ("{% for m in messages %}\n{{ m.content", "line 2"),
    "a block that never ends": ("{% for m in messages %}", "end of template"),
    "a tag of nobody": ("{% import 'os' as os %}{% frobnicate %}", "frobnicate"),
    "a power of powers": ("{{ 9**(9**9) }}", "more than 0.5 seconds"),
    "a power that depends on the talk": (
        "{{ (messages | length + 7)**(9**9) }}",
        "more than 0.5 seconds",
    ),
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
        "more than 0.5 seconds",
    ),
    "a range beyond bounds": ("{% for a in range(10**9) %}{% endfor %}", "OverflowError"),
    "ten billion letters": ("{{ 'a' * 10**10 }}", "1 GiB"),
    "a text in the middle of nowhere": (
        "{{ messages[0].content.center(10**8) }}",
        "characters for one conversation",
    ),
    "a format of any width": ("{{ '%03000000000d' % 3 }}", "1 GiB"),
    "a macro that calls itself": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "endless recursion",
    ),
    "nested brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    "Python's insides": ("{{ ''.__class__.__mro__ }}", "forbidden attribute"),
    "insides of a helper": (
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "forbidden attribute",
    ),
    "insides by a filter": ("{{ (messages | attr('__class__')).__mro__ }}", "forbidden"),
    "insides by a format": (
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "forbidden attribute",
    ),
    "a change of the talk": ("{{ messages.append(1) }}", "forbidden attribute"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "a name of nothing": ("{{ messages[0].nothing.at.all }}", "undefined value"),
    "half a character": (r"{{ '\ud800' }}", r"half of a surrogate pair, \ud800"),
    "a number and a text": ("{{ 1 + messages[0].content }}", "TypeError"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BAD)
def test_no_template_harms_the_parent(name, monkeypatch):
    template, problem = BAD[name]
    if "seconds" in problem:
        monkeypatch.setattr(render, "CPU_SECONDS", 0.5)
    started = time.monotonic()
    with (
        Renderer(
            chat_tokenizers.ours(), template=template + "{{ '' }}", train_on="all"
        ) as renderer,
        pytest.raises(UserError) as caught,
    ):
        renderer.encode(TALK)
    assert problem in caught.value.problem
    assert caught.value.fix and caught.value.where == "the template in the recipe"
    assert "\n" not in caught.value.problem and len(caught.value.problem) < 400
    assert time.monotonic() - started < 20


BOOM = Example("a.jsonl:4", "chat", (), ((Message("user", "boom"), Message("assistant", "yo")),))
HANGS = (
    "{% if messages[0].content == 'boom' %}{{ (messages | length + 7)**(9**9) }}{% endif %}"
    + SIMPLE
)


def test_a_conversation_that_kills_the_process_does_not_stop_the_next_ones(monkeypatch):
    monkeypatch.setattr(render, "CPU_SECONDS", 0.2)
    with Renderer(chat_tokenizers.ours(), template=HANGS, train_on="all") as renderer:
        first_sequences, bad_row, third_sequences = renderer.encode_batch([TALK, BOOM, TALK])
    assert (
        isinstance(bad_row, BadRow)
        and "more than 0.2 seconds" in bad_row.problem
        and bad_row.where == "a.jsonl:4"
    )
    assert first_sequences == third_sequences and not isinstance(first_sequences, BadRow)


def test_a_template_that_refuses_in_half_characters_is_quoted():
    with Renderer(
        chat_tokenizers.ours(), template=r"{{ raise_exception('no \ud800.') }}", train_on="all"
    ) as renderer:
        (bad_row,) = renderer.encode_batch([TALK])
    assert isinstance(bad_row, BadRow) and bad_row.problem.endswith(
        r"it refuses the conversation: no \ud800"
    )


def test_a_template_that_kills_the_process_again_and_again_ends_the_run(monkeypatch):
    monkeypatch.setattr(render, "CPU_SECONDS", 0.2)
    with (
        Renderer(chat_tokenizers.ours(), template=HANGS, train_on="all") as renderer,
        pytest.raises(UserError, match=r"it took more than 0\.2 seconds"),
    ):
        renderer.encode_batch([BOOM] * 5)


def test_the_child_sees_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with Renderer(chat_tokenizers.ours(), template=SIMPLE, train_on="all") as renderer:
        renderer.encode(TALK)
        (process,) = renderer._processes.values()
        assert process._child is not None
        environment_of_child = Path(f"/proc/{process._child._process.pid}/environ").read_text()
    assert "secret" not in environment_of_child and "HF_" not in environment_of_child


def test_the_child_ends_with_its_parent(tmp_path):
    code = (
        "import os, pathlib, sys\n"
        "from bloomery.data.chat.render import Renderer\n"
        "from bloomery.data.examples import Message\n"
        "from bloomery.data.tokenizer.tokenizer import load_tokenizer\n"
        "renderer = Renderer(load_tokenizer(pathlib.Path(sys.argv[1])), template=sys.argv[2], train_on='all')\n"
        "renderer.prompt([Message('user', 'hi')])\n"
        "print(next(iter(renderer._processes.values()))._child._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    chat_tokenizers.ours().save(tmp_path)
    command = [sys.executable, "-c", code, tmp_path, SIMPLE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    pid = int(result.stdout)
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} outlived its parent")


def test_templates_mean_what_they_mean_in_transformers():
    """Filters and names that only transformers' environment has."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{{ messages | tojson }}{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true) }}\n"
        "  {% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{{ m.content }}{% break %}\n  {% endfor %}\n"
        "{{ strftime_now('%Y') }}{{ bos_token }}{% generation %}x{% endgeneration %}{{ tools is none }}{{ documents }}"
    )
    turns = [{"role": "user", "content": "a<b"}, {"role": "assistant", "content": "é"}]
    (expected,), _ = render_jinja_template([turns], chat_template=template, bos_token="<s>")
    with Renderer(chat_tokenizers.ours(), template=template, train_on="all") as renderer:
        talk = Example(
            "a:1", "chat", (), (tuple(Message(turn["role"], turn["content"]) for turn in turns),)
        )
        (sequence,) = renderer.encode(talk)
    assert chat_tokenizers.ours().decode(sequence.ids) == expected


def test_built_in_templates_compile_and_are_installed():
    folder = Path(bloomery.__file__).parent / "data/tokenizer/templates"
    assert {path.stem for path in folder.glob("*.jinja")} == set(BUILTIN)
    for name in BUILTIN:
        environment().from_string(builtin_template(name))
    with pytest.raises(jinja2.TemplateSyntaxError):
        environment().from_string("{% endgeneration %}")
