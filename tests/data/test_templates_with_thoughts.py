"""Masks of templates that write thoughts: by hand for five shapes of template, and as TRL's training templates mark."""

import json
import re
from pathlib import Path

import chat_tokenizers
import pytest
import trl
from chat_tokenizers import SPECIAL

from bloomery.core.errors import UserError
from bloomery.data.chat.sandbox_worker import Template
from bloomery.data.prepare.prepare import prepare, prepared_folder
from bloomery.data.tokenizer.templates import ChatTemplate, with_variables
from bloomery.data.tokenizer.tokenizer import load_tokenizer

TRL = Path(trl.__file__).parent / "chat_templates"
GPT_OSS = ("<|start|>", "<|return|>", "<|call|>")
GLM = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
TOKENS = (*SPECIAL, *GPT_OSS, *GLM, *DEEPSEEK, "<turn|>", "<|eot|>", "<|eom|>")
ENDERS = re.compile("|".join(map(re.escape, TOKENS)))

# Written for these tests, after the published templates of each family.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}\
{%- endif %}{%- endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
# Qwen3.5 and later: the prompt opens the thought, unless it is told not to.
QWEN35 = QWEN3.replace("(loop.last or m.reasoning_content)", "true").replace(
    "{%- endif %}\n{%- endif %}", "{%- else %}{{- '<think>\\n' }}{%- endif %}\n{%- endif %}"
)
GLM4 = """\
[gMASK]<sop>{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}\
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{{- '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}
{{- '\\n<think>' + (m.reasoning_content if m.reasoning_content and loop.index0 > ns.last else '') + '</think>' }}
{%- endif %}
{{- '\\n' + m.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n<think></think>' }}{%- endif %}{%- endif %}"""
HARMONY = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if loop.last and m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}\
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
DEEPSEEK_V3 = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- else %}{{- '<｜Assistant｜>' }}
{%- if thinking is defined and thinking and loop.last and m.reasoning_content %}
{{- '<think>' + m.reasoning_content }}{%- endif %}
{{- '</think>' + m.content + '<｜end▁of▁sentence｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<｜Assistant｜>' + ('<think>' if thinking is defined and thinking else '</think>') }}\
{%- endif %}"""


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def reply(text: str, thought: str | None = None) -> dict:
    thoughts = {} if thought is None else {"reasoning_content": thought, "thinking": thought}
    return {"role": "assistant", "content": text, **thoughts}


TALKS = {
    "one": [user("q1"), reply("a1", "t1")],
    "without": [user("q1"), reply("a1"), user("q2"), reply("a2")],
    "both": [user("q1"), reply("a1", "t1"), user("q2"), reply("a2", "t2")],
    "first alone": [user("q1"), reply("a1", "t1"), user("q2"), reply("a2")],
}
END, STOP, RETURN = "<|im_end|>", "<|user|>", "<|return|>"
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
EOS = "<｜end▁of▁sentence｜>"
# template, its variables -> what is trained on of each talk, in the order of TALKS.
EXPECTED = {
    "qwen3": (
        QWEN3,
        {},
        [f"<think>\nt1\n</think>\n\na1{END}"],
        [f"a1{END}", f"<think>\n\n</think>\n\na2{END}"],
        [f"a1{END}", f"<think>\nt2\n</think>\n\na2{END}"],
        [f"a1{END}", f"<think>\n\n</think>\n\na2{END}"],
    ),
    # The prompt has the empty thought: the model writes what is behind it.
    "qwen3, not thinking": (
        QWEN3,
        {"enable_thinking": False},
        [f"<think>\nt1\n</think>\n\na1{END}"],
        [f"a1{END}", f"a2{END}"],
        [f"a1{END}", f"<think>\nt2\n</think>\n\na2{END}"],
        [f"a1{END}", f"a2{END}"],
    ),
    "qwen3.5": (
        QWEN35,
        {},
        [f"t1\n</think>\n\na1{END}"],
        [f"a1{END}", f"\n</think>\n\na2{END}"],
        [f"a1{END}", f"t2\n</think>\n\na2{END}"],
        [f"a1{END}", f"\n</think>\n\na2{END}"],
    ),
    "qwen3.5, not thinking": (
        QWEN35,
        {"enable_thinking": False},
        [f"<think>\nt1\n</think>\n\na1{END}"],
        [f"a1{END}", f"a2{END}"],
        [f"a1{END}", f"<think>\nt2\n</think>\n\na2{END}"],
        [f"a1{END}", f"a2{END}"],
    ),
    # No end is written: the token that begins the next turn ends the response, behind the last one, too.
    "glm": (
        GLM4,
        {},
        [f"\n<think>t1</think>\na1{STOP}"],
        [f"\n<think></think>\na1{STOP}", f"\n<think></think>\na2{STOP}"],
        [f"\n<think></think>\na1{STOP}", f"\n<think>t2</think>\na2{STOP}"],
        [f"\n<think></think>\na1{STOP}", f"\n<think></think>\na2{STOP}"],
    ),
    "glm, not thinking": (
        GLM4,
        {"enable_thinking": False},
        [f"<think>t1</think>\na1{STOP}"],
        [f"\na1{STOP}", f"\na2{STOP}"],
        [f"\na1{STOP}", f"<think>t2</think>\na2{STOP}"],
        [f"\na1{STOP}", f"\na2{STOP}"],
    ),
    "gpt-oss": (
        HARMONY,
        {},
        [f"{ANALYSIS}t1<|end|><|start|>assistant{FINAL}a1{RETURN}"],
        [f"{FINAL}a1<|end|>", f"{FINAL}a2{RETURN}"],
        [f"{FINAL}a1<|end|>", f"{ANALYSIS}t2<|end|><|start|>assistant{FINAL}a2{RETURN}"],
        [f"{FINAL}a1<|end|>", f"{FINAL}a2{RETURN}"],
    ),
    "deepseek": (
        DEEPSEEK_V3,
        {},
        [f"a1{EOS}"],
        [f"a1{EOS}", f"a2{EOS}"],
        [f"a1{EOS}", f"a2{EOS}"],
        [f"a1{EOS}", f"a2{EOS}"],
    ),
    "deepseek, thinking": (
        DEEPSEEK_V3,
        {"thinking": True},
        [f"t1</think>a1{EOS}"],
        [f"</think>a1{EOS}", f"</think>a2{EOS}"],
        [f"</think>a1{EOS}", f"t2</think>a2{EOS}"],
        [f"</think>a1{EOS}", f"</think>a2{EOS}"],
    ),
}


def trained(text: str, talk: list[dict], **variables: bool) -> tuple[list[str], str]:
    """What is trained on, and the whole text."""
    template = with_variables(ChatTemplate(text, "of the test"), variables)
    compiled = Template(template.text, {"bos_token": "<s>", "eos_token": "</s>"}, ENDERS)
    turns = [index for index, turn in enumerate(talk) if turn["role"] == "assistant"]
    answer = compiled.read({"messages": talk, "tools": [], "train_on": turns})
    return [answer["text"][start:end] for start, end in answer["spans"]], answer["text"]


@pytest.mark.parametrize("name", EXPECTED)
def test_masks_by_hand(name: str) -> None:
    text, variables, *expected = EXPECTED[name]
    for talk, spans in zip(TALKS.values(), expected, strict=True):
        assert trained(text, talk, **variables)[0] == spans


# Families with thoughts, of which TRL has a template that marks by hand what is generated.
FAMILIES = (
    "deepseekv3",
    "glm4moe",
    "gptoss",
    "muse_glimmer",
    "nemotron_3_nano",
    "qwen3_5_think",
    "qwen3_8",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_are_those_of_training_templates_that_write_the_same_text(name: str) -> None:
    """TRL's templates also keep thoughts of earlier turns: those texts differ, and are not compared."""
    compiled = [
        Template((TRL / file).read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, ENDERS)
        for file in (f"{name}.jinja", f"{name}_training.jinja")
    ]
    num_compared = 0
    for talk in TALKS.values():
        turns = [index for index, turn in enumerate(talk) if turn["role"] == "assistant"]
        job = {"messages": talk, "tools": [], "train_on": turns}
        ours, theirs = (template.read(job) for template in compiled)
        if ours["text"].rstrip() != theirs["text"].rstrip():
            continue
        num_compared += 1
        for our_span, their_span in zip(ours["spans"], theirs["spans"], strict=True):
            our_text = ours["text"][slice(*our_span)].rstrip()
            their_text = theirs["text"][slice(*their_span)].rstrip()
            # Some of theirs end behind the newline; where the prompt opens a thought, theirs begin before it, and in
            # two families before the header that the prompt ends with.
            assert their_text.endswith(our_text)
            header = their_text.removesuffix(our_text).strip()
            assert re.fullmatch(
                r"(<think>(\s*</think>)?|<｜Assistant｜>|<\|start\|>assistant)?", header
            )
    assert num_compared >= 1


def test_a_variable_is_a_default_that_a_request_may_set() -> None:
    template = with_variables(ChatTemplate(QWEN3, "mine"), {"enable_thinking": False})
    assert with_variables(template, {"enable_thinking": False}) == template
    compiled = Template(template.text, {}, ENDERS)
    talk = [user("q")]
    quiet = compiled.render(talk, None, prompt=True)
    assert quiet.endswith("<think>\n\n</think>\n\n")
    assert compiled.render(talk, None, prompt=True, variables={"enable_thinking": True}) == (
        Template(QWEN3, {}, ENDERS).render(talk, None, prompt=True)
    )
    indented = with_variables(ChatTemplate("\n {{ x }}", "mine"), {"x": 'a"\\ü'})
    assert Template(indented.text, {}, ENDERS).render([], None) == '\n a"\\ü'


@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt", "a b", "other"])
def test_a_variable_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="variable"):
        with_variables(ChatTemplate(QWEN3, "mine"), {name: True})


def test_a_prepared_dataset_keeps_the_template_with_its_defaults(tmp_path: Path, recipe_of) -> None:
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": TALKS["both"]}) + "\n") * 20)
    chat_tokenizers.ours("bytes", QWEN3).save(tmp_path / "tokenizer")

    def recipe(**chat: object):
        return recipe_of(
            tokenizer={"from": str(tmp_path / "tokenizer")},
            objective="sft",
            path=str(tmp_path / "rows.jsonl"),
            chat=chat,
            sequence_length=256,
        )

    quiet = recipe(template_kwargs={"enable_thinking": False})
    assert prepared_folder(quiet, tmp_path) != prepared_folder(recipe(), tmp_path)
    prepare(quiet, tmp_path / "prepared")
    template = load_tokenizer(tmp_path / "prepared").config["chat_template"]
    prompt = Template(template, {}, ENDERS).render(TALKS["one"][:1], None, prompt=True)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert QWEN3.endswith(template[-200:])
