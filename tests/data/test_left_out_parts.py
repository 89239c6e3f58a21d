"""What a chat template leaves out of conversations is counted and said; the words of a rendering say what is right."""

import json
import re
from collections import Counter
from pathlib import Path

import chat_tokenizers
import pytest

from bloomery.data.chat import written
from bloomery.data.chat.render import Renderer
from bloomery.data.prepare.prepare import prepare
from bloomery.data.shards import read_manifest
from bloomery.data.sources.formats import read_example
from bloomery.data.tokenizer.templates import NOT_OWN
from bloomery.hardware.machine import Host, Machine, Software
from bloomery.plan.advise import advise
from bloomery.plan.gather import facts_of, guessed, left_out_parts
from bloomery.plan.page import page
from bloomery.plan.resolve import resolve

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "tools0word",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
EARLIER = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content and loop.last %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}</s>\n{% endfor %}"
    + PROMPT
)
EVERYTHING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ m.name or '' }}: "
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}</s>\n{% endfor %}" + PROMPT
)
NO_SYSTEM = EVERYTHING.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
)
NO_RESULTS = EVERYTHING.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
TEMPLATES = {
    "earlier reasoning": EARLIER,
    "nothing": EVERYTHING,
    "system messages": NO_SYSTEM,
    "tool results": NO_RESULTS,
    "in capitals": EVERYTHING.replace("{{ m.content }}", "{{ m.content | upper }}"),
    "quoted": EVERYTHING.replace("{{ m.content }}", "{{ m.content | tojson }}"),
}
published = pytest.importorskip("trl").__file__
for stem in ("qwen3", "llama3_1", "gemma3", "phi3", "lfm2", "cohere2"):
    TEMPLATES[stem] = (Path(published).parent / "chat_templates" / f"{stem}.jinja").read_text()


def machine() -> Machine:
    host = Host(
        system="Linux",
        cpu_name="a CPU",
        cpu_cores=2,
        cpu_flags=("avx2",),
        memory_bytes=2**35,
        memory_free_bytes=2**34,
        disk_free_bytes=2**36,
        compiler="/usr/bin/g++",
    )
    software = Software(python="3.12.4", torch="2.13.0+cpu", build="cpu")
    return Machine(accelerators=(), host=host, software=software)


def call(name: str) -> dict:
    function = {"name": name, "arguments": {"x": 1}}
    return {"type": "function", "id": "abcdefghi", "function": function}


def rows() -> list[dict]:
    """Conversations in which every part has a word of its own, of the form part + number + "word"."""
    count = iter(range(10_000))

    def word(part: str) -> str:
        return f"{part}{next(count)}word"

    def user(**fields: str) -> dict:
        return {"role": "user", "content": word("user"), **fields}

    def answer(**fields: object) -> dict:
        return {"role": "assistant", "content": word("assistant"), **fields}

    def thought() -> dict[str, str]:
        return {"reasoning_content": word("reasoning")}

    system = {"role": "system", "content": word("system")}
    inline = f"<think>\n{word('reasoning')}\n</think>\n\n{word('assistant')}"
    result = {"role": "tool", "content": word("tool"), "tool_call_id": "abcdefghi"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call(word("calls"))]}
    return [
        {"messages": [user(), answer(**thought())]},
        {"messages": [user(), answer(**thought()), user(), answer(**thought()), user(), answer()]},
        {"messages": [system, user(name=word("name")), answer()]},
        {"messages": [user(), {"role": "assistant", "content": inline}, user(), answer()]},
        {"messages": [user(), calling, result, answer()], "tools": TOOLS},
        {"messages": [user(), answer()], "tools": TOOLS},
    ]


def parts_of_row(row: dict) -> list[tuple[str, str]]:
    """The parts of a row with their words."""
    text = json.dumps(row["messages"]).replace("\\n", " ")
    names = [*written.NAMES]
    parts_of_messages = [(name, word) for name in names for word in set(_words(text, name))]
    return [*parts_of_messages, *([("tools", "tools0word")] if row.get("tools") else [])]


def _words(text: str, part: str) -> list[str]:
    return re.findall(rf"(?<![a-z]){part}\d+word", text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_that_the_rendering_lacks_are_counted(name):
    tokenizer = chat_tokenizers.ours()
    left_out, parts = Counter[str](), Counter[str]()
    with Renderer(tokenizer, template=TEMPLATES[name], train_on="all") as renderer:
        for row in rows():
            example = read_example(row, format="messages", columns={}, where="a.jsonl:1")
            try:
                text = renderer.rendered(example.responses[0], example.tools).lower()
            except Exception:
                continue
            renderer.encode_batch([example])
            for part, word in parts_of_row(row):
                parts[part] += 1
                left_out[part] += word not in text
        counts = renderer.take_parts()
    assert counts == {part: (left_out[part], number) for part, number in parts.items()}
    assert renderer.take_parts() == {}
    if name == "nothing":
        assert written.notes(counts) == []
    if name == "earlier reasoning":
        assert counts["reasoning"] == (2, 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_counts_left_out_parts_over_the_dataset(tmp_path, recipe_of, workers):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in rows()]
    path.write_text(
        "".join(f"{line.replace('word', f'{n}word')}\n" for n in range(20) for line in lines)
    )
    loaded_recipe = recipe_of(
        tokenizer={"train": {"vocab_size": 300, "special_tokens": ["<|im_start|>"]}},
        objective="sft",
        path=str(path),
        chat={"template": EARLIER},
        sequence_length=256,
        validation="10%",
        num_proc=workers,
        on_error="skip",
    )
    prepare(loaded_recipe, tmp_path / "prepared")
    manifest = read_manifest(tmp_path / "prepared")
    assert dict(manifest.template_parts)["reasoning"] == (40, 80)
    assert "leaves out reasoning of assistant turns: 40 of 80 (50%)" in left_out_parts(
        loaded_recipe.recipe, manifest
    )


def test_prepare_and_plan_warn_of_a_template_that_replaces_the_tokenizer_s_own(tmp_path, recipe_of):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    tokenizer = chat_tokenizers.ours("bytes", EVERYTHING)
    tokenizer.save(tmp_path / "tokenizer")
    for template, replaces in ((EARLIER, True), (None, False)):
        chat = {} if template is None else {"template": template}
        loaded_recipe = recipe_of(
            tokenizer={"from": str(tmp_path / "tokenizer")},
            objective="sft",
            path=str(path),
            chat=chat,
            sequence_length=256,
        )
        dataset_guess = guessed(loaded_recipe.recipe)
        assert dataset_guess is not None and dataset_guess.template.endswith(NOT_OWN) == replaces
        reasoning_notes = [
            note for note in left_out_parts(loaded_recipe.recipe) if "reasoning" in note
        ]
        assert bool(reasoning_notes) == (template == EARLIER), (
            "by the first rows, before anything is prepared"
        )
        folder = tmp_path / f"prepared {replaces}"
        prepare(loaded_recipe, folder)
        manifest = read_manifest(folder)
        assert manifest.template == dataset_guess.template
        # Also on the page of the plan, and as a warning.
        facts = facts_of(loaded_recipe, machine(), prepared=folder, dataset=dataset_guess)
        report = advise(loaded_recipe, resolve(loaded_recipe, facts), facts)
        assert any(NOT_OWN in warning for warning in report.warnings) == replaces
        lines = page(report, machine(), source="x", commands=["plan"])
        assert any(line.strip().startswith("chat template") for line in lines)
