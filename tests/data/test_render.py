"""What is learned of a conversation: transformers, TRL's own markers and hand-written turns say what is right."""

import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import chat_tokenizers
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bloomery.core.errors import UserError
from bloomery.data.chat import render
from bloomery.data.chat.render import Renderer, TemplateProcess, as_turn, chat_format
from bloomery.data.examples import BadRow, Example, Message
from bloomery.data.sources.formats import read_example
from bloomery.data.tokenizer.templates import BUILTIN, builtin_template
from bloomery.data.tokenizer.tokenizer import load_tokenizer

trl = pytest.importorskip("trl")
TRL = Path(trl.__file__).parent / "chat_templates"
SYSTEM = Message("system", "be kind")


@pytest.fixture(scope="module", autouse=True)
def one_process_a_template():
    """To start one takes longer than all that a test renders in it."""
    processes: dict[str, TemplateProcess] = {}

    def shared(template, names, enders):
        key = json.dumps([template.text, template.origin, names, enders])
        process = processes.setdefault(key, TemplateProcess(template, names, enders))
        return SimpleNamespace(read=process.read, error=process.error, close=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "TemplateProcess", shared)
        yield
    for process in processes.values():
        process.close()


def user(text):
    return Message("user", text)


def reply(text, **fields):
    return Message("assistant", text, **fields)


CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "add_up", "arguments": {"a": 1}},
}
TOOL = {
    "type": "function",
    "function": {"name": "add_up", "description": "d", "parameters": {"type": "object"}},
}
TALKS = {
    "one": (user("hi"), reply("hello there")),
    "system": (SYSTEM, user("hi"), reply("the quick brown fox")),
    "two": (user("hi"), reply("hello"), user("what"), reply("lazy dog")),
    "equal": (user("dog"), reply("dog"), user("dog"), reply("dog")),
    "white space": (user(" hi\n"), reply("  the quick \n"), user("x"), reply("\n\ndog")),
    "markup": (
        user("[INST] <s> is it"),
        reply("user\nhello"),
        user("assistant\n"),
        reply("é 🎈 日本"),
    ),
}
CALLING = (
    user("add"),
    reply("", calls=(CALL,)),
    Message("tool", "2"),
    reply("two"),
    user("ok"),
    reply("fine"),
)


def chat(*messages, **fields):
    return Example("a.jsonl:3", "chat", (), (messages,), **fields)


def encode(example, template, train_on="assistant", tokenizer=None):
    tokenizer = tokenizer or chat_tokenizers.ours()
    with Renderer(tokenizer, template=template, train_on=train_on) as renderer:
        return tokenizer, renderer.encode(example)


def trained_text(example, template, train_on="assistant", tokenizer=None):
    """The text of each stretch of learned tokens, of each answer."""
    tokenizer, sequences = encode(example, template, train_on, tokenizer)
    answer_texts = []
    for sequence in sequences:
        assert len(sequence.ids) == len(sequence.loss_mask)
        stretches = groupby(
            zip(sequence.ids, sequence.loss_mask, strict=True), key=lambda pair: pair[1]
        )
        answer_texts.append(
            [tokenizer.decode([token for token, _ in pairs]) for flag, pairs in stretches if flag]
        )
    return answer_texts


def reference(messages, template, kind="bytes", tools=None):
    library = chat_tokenizers.theirs(kind, template)
    return library.apply_chat_template(
        [as_turn(message) for message in messages],
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


MARKED = [
    "llama3",
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "gemma3",
    "phi3",
    "lfm2_v2",
    "deepseekv3",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_tokens_and_flags_are_those_of_transformers_where_the_template_has_markers(name, kind):
    template = (TRL / f"{name}_training.jinja").read_text()
    tokenizer = chat_tokenizers.ours(kind, template)
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        for messages in TALKS.values():
            expected = reference(messages, template, kind)
            (sequence,) = renderer.encode(chat(*messages))
            assert sequence.ids == expected["input_ids"]
            assert sequence.loss_mask == [bool(flag) for flag in expected["assistant_masks"]]


UNMARKED = [
    "llama3",
    "qwen2_5",
    "qwen3_instruct_2507",
    "qwen3_vl",
    "gemma",
    "gemma3",
    "phi3",
    "lfm2",
    "nemotron_3_nano",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNMARKED)
def test_a_template_without_markers_learns_the_tokens_of_trl_s_marked_one(name):
    """But for white space behind the end token, and headers that some of TRL's markers take in."""
    plain_template, marked_template = (
        (TRL / f"{file}.jinja").read_text() for file in (name, f"{name}_training")
    )
    with (
        Renderer(
            chat_tokenizers.ours(), template=plain_template, train_on="assistant"
        ) as plain_renderer,
        Renderer(
            chat_tokenizers.ours(), template=marked_template, train_on="assistant"
        ) as marked_renderer,
    ):
        for messages in TALKS.values():
            if name == "gemma" and messages[0] is SYSTEM:
                continue  # refuses system messages
            (plain_sequence,), (marked_sequence,) = (
                renderer.encode(chat(*messages)) for renderer in (plain_renderer, marked_renderer)
            )
            assert plain_sequence.ids == marked_sequence.ids
            extra_tokens = [
                token
                for token, plain_flag, marked_flag in zip(
                    plain_sequence.ids,
                    plain_sequence.loss_mask,
                    marked_sequence.loss_mask,
                    strict=True,
                )
                if plain_flag != marked_flag
            ]
            assert chat_tokenizers.ours().decode(extra_tokens).strip() == ""
            assert sum(plain_sequence.loss_mask) > len(messages) // 2


END = {
    "chatml": "<|im_end|>",
    "qwen": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "llama2": "</s>",
    "mistral": "</s>",
}
BY_HAND = {
    "chatml": ["  the quick \n<|im_end|>", "\n\ndog<|im_end|>"],
    "qwen": ["  the quick \n<|im_end|>", "\n\ndog<|im_end|>"],
    "llama3": ["the quick<|eot_id|>", "dog<|eot_id|>"],
    "gemma": ["the quick<end_of_turn>", "dog<end_of_turn>"],
    "llama2": [" the quick </s>", " dog </s>"],
    "mistral": [" the quick</s>", " dog</s>"],
}


@pytest.mark.parametrize("name", BUILTIN)
def test_an_answer_and_its_end_token_are_learned_and_no_header(name):
    assert trained_text(chat(*TALKS["white space"]), name) == [BY_HAND[name]]


@pytest.mark.parametrize("name", BUILTIN)
def test_train_on_last_learns_the_last_answer_and_all_learns_everything(name):
    assert trained_text(chat(*TALKS["white space"]), name, "last") == [BY_HAND[name][-1:]]
    _, (sequence,) = encode(chat(*TALKS["two"]), name, "all")
    assert all(sequence.loss_mask)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("name", ["llama2", "llama3", "mistral", "gemma"])
def test_the_begin_token_is_written_once(name, kind):
    tokenizer = chat_tokenizers.ours(kind)
    _, (sequence,) = encode(chat(*TALKS["one"]), name, tokenizer=tokenizer)
    assert sequence.ids.count(tokenizer.bos_id) == 1 and sequence.ids[0] == tokenizer.bos_id


WORDS = st.text(
    st.sampled_from("abz .\n\t<>[]/|é日🎈\U000f0001'\"{}%"), min_size=1, max_size=12
).filter(str.strip)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4)


SHARED, BUSY = HealthCheck.function_scoped_fixture, HealthCheck.too_slow


@settings(max_examples=30, deadline=None, suppress_health_check=[SHARED, BUSY])
@given(pairs=TURNS, system=st.none() | WORDS)
def test_what_is_learned_reads_as_the_answers(renderers, pairs, system):
    messages = [] if system is None else [Message("system", system)]
    for question, answer in pairs:
        messages += [user(question), reply(answer)]
    for name, renderer in renderers.items():
        tokenizer = chat_tokenizers.ours()
        (sequence,) = renderer.encode(chat(*messages))
        stretches = groupby(
            zip(sequence.ids, sequence.loss_mask, strict=True), key=lambda pair: pair[1]
        )
        answer_texts = [
            tokenizer.decode([token for token, _ in group]) for flag, group in stretches if flag
        ]
        keeps_white_space = name in ("chatml", "qwen")
        expected = [(answer if keeps_white_space else answer.strip()) for _, answer in pairs]
        assert [
            text.removesuffix(END[name])
            if keeps_white_space
            else text.removesuffix(END[name]).strip()
            for text in answer_texts
        ] == expected
        assert all(text.endswith(END[name]) for text in answer_texts)


@pytest.fixture(scope="module")
def renderers():
    named_renderers = {
        name: Renderer(chat_tokenizers.ours(), template=name, train_on="assistant")
        for name in BUILTIN
    }
    yield named_renderers
    for renderer in named_renderers.values():
        renderer.close()


@pytest.mark.parametrize(
    ("name", "file"), [("llama3", "llama3"), ("qwen", "qwen2_5"), ("gemma", "gemma3")]
)
def test_built_in_templates_write_what_the_models_own_do(name, file):
    """TRL ships what the models' repositories hold."""
    builtin, published = builtin_template(name), (TRL / f"{file}.jinja").read_text()
    for messages in TALKS.values():
        assert text(messages, builtin) == text(messages, published)
    if name == "qwen":
        assert text(CALLING, builtin, [TOOL]) == text(CALLING, published, [TOOL])
        two_results = (*CALLING[:2], Message("tool", "2"), *CALLING[2:])
        assert text(two_results, builtin, [TOOL]) == text(two_results, published, [TOOL])


def text(messages, template, tools=None, prompt=False):
    library = chat_tokenizers.theirs(template=template)
    turns = [as_turn(message) for message in messages]
    return library.apply_chat_template(
        turns, tools=tools, tokenize=False, add_generation_prompt=prompt
    )


def test_built_in_templates_write_their_published_formats():
    talk = (SYSTEM, *TALKS["two"])
    assert text(talk, builtin_template("llama2")) == (
        "<s>[INST] <<SYS>>\nbe kind\n<</SYS>>\n\nhi [/INST] hello </s><s>[INST] what [/INST] lazy dog </s>"
    )
    assert text(talk, builtin_template("mistral")) == (
        "<s>[INST] be kind\n\nhi[/INST] hello</s>[INST] what[/INST] lazy dog</s>"
    )
    assert text(talk, builtin_template("chatml")) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\nlazy dog<|im_end|>\n"
    )


@pytest.mark.parametrize("name", BUILTIN)
def test_the_prompt_for_an_answer_is_what_training_put_before_it(name):
    tokenizer = chat_tokenizers.ours()
    with Renderer(tokenizer, template=name, train_on="assistant") as renderer:
        (sequence,) = renderer.encode(chat(*TALKS["one"]))
        prompt_ids = renderer.prompt(TALKS["one"][:1])
    assert prompt_ids == sequence.ids[: sequence.loss_mask.index(True)]


def test_calls_are_learned_and_results_of_tools_are_not():
    example = chat(*CALLING, tools=(TOOL,))
    call = '<tool_call>\n{"name": "add_up", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert trained_text(example, "qwen") == [[call, "two<|im_end|>", "fine<|im_end|>"]]
    published = (TRL / "qwen3.jinja").read_text()
    assert trained_text(example, published) == [
        [call, "two<|im_end|>", "<think>\n\n</think>\n\nfine<|im_end|>"]
    ]


def test_thoughts_of_the_last_answer_are_learned_as_the_template_writes_them():
    template = (TRL / "qwen3.jinja").read_text()
    talk = (user("hi"), reply("a", thinking="hm"), user("x"), reply("b", thinking="so"))
    assert trained_text(chat(*talk), template) == [
        ["a<|im_end|>", "<think>\nso\n</think>\n\nb<|im_end|>"]
    ]


def test_turns_of_weight_zero_are_not_learned():
    talk = (user("hi"), reply("hello", trained_on=False), user("what"), reply("dog"))
    assert trained_text(chat(*talk), "chatml") == [["dog<|im_end|>"]]
    marked_template = (TRL / "llama3_training.jinja").read_text()
    assert trained_text(chat(*talk), marked_template) == [["dog<|eot_id|>"]]


@pytest.mark.parametrize("kind", ["pair", "kto", "completion"])
def test_of_a_prompt_and_its_answers_only_answers_are_learned(kind):
    answers = ((reply("hello"),), (reply("dog"),))[: 2 if kind == "pair" else 1]
    example = Example("a.jsonl:3", kind, (user("hi"), reply("x"), user("what")), answers)
    assert (
        trained_text(example, "chatml") == [["hello<|im_end|>"], ["dog<|im_end|>"]][: len(answers)]
    )
    assert trained_text(example, "chatml", "last") == trained_text(example, "chatml")
    marked_template = (TRL / "qwen3_instruct_2507_training.jinja").read_text()
    assert (
        trained_text(example, marked_template)
        == [["hello<|im_end|>\n"], ["dog<|im_end|>\n"]][: len(answers)]
    )


TEXTS = [
    ("hello", " there"),
    ("hell", "o there"),
    ("the quick ", "brown"),
    ("a\n", "\nb"),
    ("<s>hi", " dog</s>"),
]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("prompt_answer", TEXTS)
def test_texts_are_cut_as_trl_cuts_them(kind, prompt_answer):
    from trl.data_utils import common_prefix_length  # SFTTrainer and DPOTrainer

    prompt, answer = prompt_answer
    library = chat_tokenizers.theirs(kind)
    answer_ended = answer if answer.endswith("</s>") else answer + "</s>"
    prompt_ids, text_ids = (library(text)["input_ids"] for text in (prompt, prompt + answer_ended))
    if prompt.startswith("<s>") and kind == "pieces":  # TRL writes the begin token twice
        prompt_ids, text_ids = prompt_ids[1:], text_ids[1:]
    start = common_prefix_length(prompt_ids, text_ids)
    for example_kind, count in (("completion", 1), ("pair", 2)):
        example = Example("a.jsonl:3", example_kind, prompt, (answer,) * count)
        for sequence in encode(example, None, tokenizer=chat_tokenizers.ours(kind))[1]:
            assert sequence.ids == text_ids
            assert sequence.loss_mask == [index >= start for index in range(len(text_ids))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MARKED)
def test_texts_of_a_prompt_and_an_answer_are_turns_where_there_is_a_template_whatever_the_format(
    name,
):
    template = (TRL / f"{name}_training.jinja").read_text()
    tokenizer = chat_tokenizers.ours(template=template)
    rows = {
        "completion": {"prompt": "hi", "completion": "hello there"},
        "alpaca": {"instruction": "hi", "output": "hello there"},
        "kto": {"prompt": "hi", "completion": "hello there", "label": True},
        "preference": {"prompt": "hi", "chosen": "hello there", "rejected": "dog"},
        "messages": {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello there"},
            ]
        },
    }
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        for format, row in rows.items():
            sequences = renderer.encode(
                read_example(row, format=format, columns={}, where="a.jsonl:3")
            )
            for sequence, answer in zip(sequences, ("hello there", "dog"), strict=False):
                expected = reference((user("hi"), reply(answer)), template)
                assert sequence.ids == expected["input_ids"], format
                assert sequence.loss_mask == [bool(flag) for flag in expected["assistant_masks"]], (
                    format
                )
            assert len(sequences) == (2 if format == "preference" else 1)


PLAIN = Example("a.jsonl:3", "completion", "hi", (" hello",))


@pytest.mark.parametrize(
    ("example", "renderer_settings"),
    [
        (PLAIN, {"template": "none"}),
        (PLAIN, {"template": "chatml", "verbatim": True}),
        (
            Example("a.jsonl:3", "pair", "Human: hi", (" hello", " dog"), implicit=True),
            {"template": "chatml"},
        ),
    ],
    ids=["the recipe says none", "pretraining", "whole texts"],
)
def test_verbatim_texts_are_not_formatted(example, renderer_settings):
    tokenizer = chat_tokenizers.ours(template=builtin_template("qwen"))
    with Renderer(tokenizer, train_on="assistant", **renderer_settings) as renderer:
        assert (
            renderer.encode(example) == encode(example, None, tokenizer=chat_tokenizers.ours())[1]
        )


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "begins with <|im_start|>"),
        ("  <s>hi", "begins with <s>"),
        (" \n", "empty turn"),
    ],
)
def test_a_prompt_that_is_formatted_already_is_not_formatted_twice(prompt, word):
    formatted_example = Example("a.jsonl:3", "completion", prompt, ("hello",))
    with Renderer(chat_tokenizers.ours(), template="chatml", train_on="assistant") as renderer:
        bad_row, plain_sequences = renderer.encode_batch([formatted_example, PLAIN])
    assert isinstance(bad_row, BadRow) and word in bad_row.problem and "a.jsonl:3" in bad_row.where
    assert not isinstance(plain_sequences, BadRow)


def test_both_answers_of_a_pair_are_learned_from_the_same_token_on():
    _, (chosen_sequence, rejected_sequence) = encode(
        Example("a.jsonl:3", "pair", "hell", ("o there", " the")), None
    )
    assert chosen_sequence.loss_mask.index(True) == rejected_sequence.loss_mask.index(True)
    assert chosen_sequence.ids[-1] == rejected_sequence.ids[-1] == chat_tokenizers.ours().eos_id


def turn_loop(body):
    return (
        "{% for m in messages %}"
        + body
        + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )


STRANGE = {
    "cuts contents short": turn_loop("{{ m.role }}:{{ m.content[:3] }}</s>"),
    "writes in capitals": turn_loop("{{ m.role }}:{{ m.content | upper }}</s>"),
    "turns the order": turn_loop("{{ m.role }}:{{ m.content }}</s>").replace(
        "messages", "messages | reverse"
    ),
    "writes answers twice": turn_loop("{{ m.role }}:{{ m.content }}/{{ m.content }}</s>"),
    "leaves answers out": turn_loop("{{ m.role }}:{{ m.content if m.role == 'user' }}</s>"),
    "counts characters": turn_loop("{{ m.content | length }}{{ m.role }}:{{ m.content }}</s>"),
    "quotes": turn_loop("{{ m.role }}:{{ m.content | tojson }}</s>"),
    "asks otherwise": turn_loop("[{{ m.role }}]{{ m.content }}</s>"),
    "ends otherwise": turn_loop(
        "{{ m.role }}:{{ m.content }}{{ '</s>' if loop.last else '<|end|>' }}"
    ),
}
RIGHT = {
    "writes in capitals": ["HELLO THERE</s>", "LAZY DOG</s>"],
    "quotes": ['"hello there"</s>', '"lazy dog"</s>'],
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_template_is_understood_or_refused_and_never_taken_wrongly(name):
    talk = (user("hi"), reply("hello there"), user("what"), reply("lazy dog"))
    tokenizer = chat_tokenizers.ours()
    with Renderer(tokenizer, template=STRANGE[name], train_on="assistant") as renderer:
        (result,) = renderer.encode_batch([chat(*talk)])
    if isinstance(result, BadRow):
        assert "template" in result.problem and result.fix
        return
    (sequence,) = result
    stretches = groupby(
        zip(sequence.ids, sequence.loss_mask, strict=True), key=lambda pair: pair[1]
    )
    learned_texts = [
        tokenizer.decode([token for token, _ in group]) for flag, group in stretches if flag
    ]
    assert learned_texts == RIGHT[name]


def turns_of(
    assistant,
    tool="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
    prompt="<|im_start|>assistant\n",
):
    """A template in ChatML with its own way to write assistant turns, tool turns and the generation prompt."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% elif m.role == 'tool' %}"
        + tool
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}"
        + prompt
        + "{% endif %}"
    )


ANSWER = "<|im_start|>assistant\n{{ m.content }}"
WRITTEN_CALL = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
PLAIN_ANSWERS = ["[add_up]<|im_end|>", "two<|im_end|>", "fine<|im_end|>"]
# Templates whose generation prompt differs from the turns that they write, or whose last turn ends in another way.
UNEVEN = {
    "the prompt opens a thought": (
        turns_of(ANSWER + WRITTEN_CALL + "<|im_end|>\n", prompt="<|im_start|>assistant\n<think>\n"),
        PLAIN_ANSWERS,
    ),
    "the prompt closes a thought of another spelling": (
        turns_of(
            ANSWER + WRITTEN_CALL + "<|im_end|>\n",
            prompt="<|im_start|>assistant\n<seed:think></seed:think>",
        ),
        PLAIN_ANSWERS,
    ),
    "the prompt begins a thought that turns with reasoning have": (
        turns_of(
            "<|im_start|>assistant\n<|START_ACT|>{{ m.content }}" + WRITTEN_CALL + "<|im_end|>\n",
            prompt="<|im_start|>assistant\n<|START_THINKING|>",
        ),
        [f"<|START_ACT|>{answer}" for answer in PLAIN_ANSWERS],
    ),
    "a tool turn ends in another way before the prompt": (
        turns_of(
            ANSWER + WRITTEN_CALL + "<|im_end|>\n",
            tool="<|im_start|>tool\n{{ m.content }}{{ '' if loop.last else '\n' }}<|im_end|>",
        ),
        PLAIN_ANSWERS,
    ),
    "a response follows a tool result without a header": (
        turns_of(
            "{% if loop.previtem.role != 'tool' %}<|im_start|>assistant\n{% endif %}{{ m.content }}"
            + WRITTEN_CALL
            + "{% if not m.tool_calls %}<|im_end|>\n{% endif %}",
            tool="({{ m.content }})",
        ),
        ["[add_up]", "two<|im_end|>", "fine<|im_end|>"],
    ),
    "white space before the end of a turn that is not the last": (
        turns_of(
            ANSWER
            + WRITTEN_CALL
            + "{{ '' if loop.last else '\n' }}<|im_end|>{{ '\n\n' if loop.last }}"
        ),
        ["[add_up]\n<|im_end|>", "two\n<|im_end|>", "fine<|im_end|>"],
    ),
    "the id of a call where its result follows": (
        turns_of(
            ANSWER
            + "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ '' if loop.last and false else '' }}"
            + "{% if not m is sameas messages[-1] %} #{{ c.id }}{% endif %}]{% endfor %}<|im_end|>\n"
        ),
        ["[add_up #abcdefghi]<|im_end|>", "two<|im_end|>", "fine<|im_end|>"],
    ),
    "another token ends the last turn": (
        turns_of(
            ANSWER
            + WRITTEN_CALL
            + "{{ '</s>' if loop.last and not add_generation_prompt else '<|im_end|>' }}",
        ),
        ["[add_up]<|im_end|>", "two<|im_end|>", "fine</s>"],
    ),
}
REFUSED = {
    "the role has another name in the prompt": turns_of(
        "<|im_start|>model\n{{ m.content }}" + WRITTEN_CALL + "<|im_end|>\n"
    ),
    "every text ends with a prompt": turns_of(ANSWER + WRITTEN_CALL + "<|im_end|>\n", prompt="")
    + "<|im_start|>assistant\n",
    "every text ends with a prompt that opens a thought": turns_of(
        ANSWER + WRITTEN_CALL + "<|im_end|>\n", prompt=""
    )
    + "<|im_start|>assistant\n<think></think>",
    "another token ends the last turn, prompt or not": turns_of(
        ANSWER + WRITTEN_CALL + "{{ '</s>' if loop.last else '<|im_end|>' }}",
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_responses_are_found_where_the_prompt_differs_from_the_turns(name):
    template, answers = UNEVEN[name]
    assert trained_text(chat(*CALLING, tools=(TOOL,)), template) == [answers]
    # A response that reads as the prompt goes on is found, too.
    talk = (user("hi"), reply("<think>"), user("assistant"), reply("assistant\n"))
    (answer_texts,) = trained_text(chat(*talk), template)
    assert (
        len(answer_texts) == 2 and "<think>" in answer_texts[0] and "assistant" in answer_texts[1]
    )
    assert "<|im_start|>" not in "".join(answer_texts)


STOPS = {
    "chatml": ("chatml", ["<|im_end|>"]),
    "a response begins with a control token": (
        turns_of("<|im_start|>assistant\n<|eot_id|>{{ m.content }}<|im_end|>\n"),
        ["<|im_end|>"],
    ),
    "two tokens end a turn": (
        turns_of(ANSWER + "<|eot_id|><|im_end|>\n"),
        ["<|eot_id|>", "<|im_end|>"],
    ),
    "every text ends with a prompt": (
        turns_of(ANSWER + "<|im_end|>\n", prompt="") + "<|im_start|>assistant\n",
        ["<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_tokens_that_end_a_response_of_a_chat(name):
    template, stops = STOPS[name]
    tokenizer = chat_tokenizers.ours()
    with chat_format(tokenizer, template) as form:
        assert [tokenizer.decode([token]) for token in form.stop_ids] == stops


@pytest.mark.parametrize("name", REFUSED)
def test_templates_whose_responses_cannot_be_found_are_refused(name):
    with pytest.raises(UserError, match="template"):
        trained_text(chat(*CALLING, tools=(TOOL,)), REFUSED[name])


def test_a_conversation_may_hold_the_characters_of_the_marks():
    talk = (
        user("\U00100000\U00100001"),
        reply("a\U0010fffd"),
        user("\U00100003"),
        reply("\U00100004b"),
    )
    assert trained_text(chat(*talk), "chatml") == [
        ["a\U0010fffd<|im_end|>", "\U00100004b<|im_end|>"]
    ]
    talk_in_both_planes = (user("\U00100000"), reply("\U000f0000"))
    with pytest.raises(UserError, match="private planes"):
        trained_text(chat(*talk_in_both_planes), "chatml")


def test_a_thousand_turns_take_no_longer_than_the_limit():
    talk = [
        message for index in range(500) for message in (user(f"q {index}"), reply(f"a {index}"))
    ]
    (answer_texts,) = trained_text(chat(*talk), "chatml")
    assert answer_texts == [f"a {index}<|im_end|>" for index in range(500)]


def test_a_bad_conversation_does_not_stop_the_others_of_its_batch():
    good_chat, bad_chat = chat(*TALKS["two"]), chat(user("a"), user("b"), reply("c"))
    with Renderer(chat_tokenizers.ours(), template="llama2", train_on="assistant") as renderer:
        first_sequences, bad_row, third_sequences = renderer.encode_batch(
            [good_chat, bad_chat, good_chat]
        )
        with pytest.raises(UserError, match="alternate") as caught:
            renderer.encode(bad_chat)
    assert first_sequences == third_sequences and isinstance(bad_row, BadRow)
    assert bad_row.where == "a.jsonl:3" and "alternate" in bad_row.problem
    assert caught.value.where == "a.jsonl:3" and caught.value.fix


def test_markup_that_the_tokenizer_does_not_know_is_named():
    with Renderer(
        chat_tokenizers.ours(), template="{{ '<|im_start|><|nosuch|>' }}", train_on="all"
    ) as renderer:
        assert renderer.missing_tokens() == ["<|nosuch|>"]


def test_a_conversation_with_tools_takes_the_template_for_tools():
    plain_template, tool_template = (
        "{% for m in messages %}A{{ m.content }}{% endfor %}",
        "{% for m in messages %}B{{ m.content }}{% endfor %}",
    )
    named_templates = [
        {"name": "default", "template": plain_template},
        {"name": "tool_use", "template": tool_template},
    ]
    tokenizer = chat_tokenizers.ours(template=named_templates)
    with Renderer(tokenizer, template=None, train_on="all") as renderer:
        plain_sequences, tool_sequences = renderer.encode_batch(
            [chat(*TALKS["one"]), chat(*TALKS["one"], tools=(TOOL,))]
        )
    assert [
        tokenizer.decode(sequences[0].ids)[0] for sequences in (plain_sequences, tool_sequences)
    ] == ["A", "B"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_models_read_the_control_tokens_of_a_template(tmp_path, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(chat_tokenizers.TEXT.split("\n") * 30))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    _, (sequence,) = encode(chat(*TALKS["two"]), "llama2", tokenizer=tokenizer)
    assert sequence.ids.count(tokenizer.bos_id) == sequence.ids.count(tokenizer.eos_id) == 2
    learned_texts = [
        tokenizer.decode([token])
        for token, flag in zip(sequence.ids, sequence.loss_mask, strict=True)
        if flag
    ]
    assert "".join(learned_texts).replace(" ", "") == "hellolazydog"
    assert (
        sum(
            token == tokenizer.eos_id and flag
            for token, flag in zip(sequence.ids, sequence.loss_mask, strict=True)
        )
        == 2
    )


def test_calls_with_arguments_of_all_lengths_are_learned():
    arguments = [{"a": 10**index, "b": ["x"] * index} for index in range(30)]
    turns = [user("go")]
    for call_arguments in arguments:
        turns += [
            reply("", calls=({**CALL, "function": {"name": "add", "arguments": call_arguments}},)),
            Message("tool", "1"),
        ]
    (answer_texts,) = trained_text(chat(*turns, reply("done"), tools=(TOOL,)), "qwen")
    calls = (
        json.dumps({"name": "add", "arguments": call_arguments}) for call_arguments in arguments
    )
    assert answer_texts == [
        *(f"<tool_call>\n{call}\n</tool_call><|im_end|>" for call in calls),
        "done<|im_end|>",
    ]
