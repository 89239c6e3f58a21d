"""Episodes with tools whose teacher has another tokenizer, another template, or a demonstration in its prompt.

Oracles: the same tokens under other ids, the teacher's rendering of the whole conversation, an uninterrupted run.
"""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from episodes_for_tests import EDITS, GUESS, played, write_episodes
from rollouts_for_tests import assert_resumes_to_the_same_bits, completions, metrics, plan_of
from test_episodes import ADD, write_model_and_tools
from test_episodes import played as played_by_script
from test_form_episodes import PolicyOfForm, tokenizer_of

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer, as_message, chat_format
from bloomery.data.chat.turns import Turns
from bloomery.data.examples import Message
from bloomery.data.prepare.prepare import prepare
from bloomery.data.tokenizer.alignment import Span
from bloomery.data.tokenizer.roles import roles
from bloomery.data.tokenizer.tokenizer import JsonBackend, Tokenizer, load_tokenizer
from bloomery.model.io.weights import fresh_decoder, model_state, write_model
from bloomery.recipe.load import load_recipe
from bloomery.train.rl.teacher_episodes import TeacherEpisodes
from bloomery.train.rl.teacher_texts import teacher_texts
from ranks import fields, losses, on_ranks
from tool_templates import OTHER_FORMS, QWEN_XML_TEMPLATE

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def renumbered(tokenizer: Tokenizer) -> tuple[Tokenizer, list[int]]:
    """The same tokens under other ids, and the new id of each."""
    description = json.loads(tokenizer.json)
    vocab = description["model"]["vocab"]
    new_ids = list(range(tokenizer.vocab_size))
    for token, id_ in vocab.items():
        new_ids[id_] = (id_ + 3) % len(vocab)
        vocab[token] = new_ids[id_]
    for entry in description["added_tokens"]:
        entry["id"] = new_ids[entry["id"]]
    return loaded(description, tokenizer.config), new_ids


def loaded(description, config) -> Tokenizer:
    """As from a file."""
    control = {name for name in roles(description, config).values() if name}
    return Tokenizer(JsonBackend(description, "t", control), config)


class Reader:
    """What a teacher reads of episodes with the tool `add`."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        self.student, self.teacher = student, teacher

    def __enter__(self):
        self.renderers = [
            Renderer(tokenizer, template=None, train_on="assistant")
            for tokenizer in (self.student, self.teacher)
        ]
        turns = [
            Turns(renderer, tokenizer, [TOOL])
            for renderer, tokenizer in zip(
                self.renderers, (self.student, self.teacher), strict=True
            )
        ]
        with chat_format(self.student, None) as form:
            stop_ids = form.stop_ids
        texts = teacher_texts(self.student, self.teacher, turns=True, stop_ids=stop_ids)
        self.turns = turns[1]
        self.episodes = TeacherEpisodes(texts, student=turns[0], teacher=turns[1])
        return self

    def __exit__(self, *_raised):
        for renderer in self.renderers:
            renderer.close()

    def read(self, text, room=2000):
        episode = text.episode
        return self.episodes.read(text.ids, episode.given, episode.messages, room=room)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OTHER_FORMS)
def test_the_same_tokens_under_other_ids_are_read_as_they_were_played(monkeypatch, tmp_path, name):
    """In each form of calls: the teacher's context is the model's, and each sampled token is a span."""
    form = OTHER_FORMS[name]
    student = tokenizer_of(tmp_path, name)
    monkeypatch.setattr(
        "test_episodes.Policy", lambda tokens, script: PolicyOfForm(tokens, script, form.end)
    )
    script = {(0, 0): [form.call % (1, 2), "It is 3."], (0, 1): ["I know: 3"]}
    texts, _ = played_by_script(monkeypatch, tmp_path, student, script)
    assert texts[0].episode.given
    teacher, new_ids = renumbered(student)
    with Reader(student, teacher) as reader:
        for text in texts:
            completion = reader.read(text)
            given = {place for span in text.episode.given for place in range(*span)}
            end = completion.spans[-1].end
            assert list(completion.ids) == [new_ids[id_] for id_ in text.ids[:end]]
            sampled = [place for place in range(end) if place not in given]
            assert completion.spans == tuple(Span(n, n + 1, n, n + 1) for n in sampled)
            # What ends a call may end no other answer: the last answer of this policy ends with that.
            assert end >= len(text.ids) - 1


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_model_and_tools(tmp_path_factory.mktemp("chat") / "chat")


def with_template(tokenizer, *replaced):
    template = tokenizer.config["chat_template"]
    for before, after in replaced:
        assert before in template
        template = template.replace(before, after)
    return loaded(json.loads(tokenizer.json), {**tokenizer.config, "chat_template": template})


def test_the_teacher_has_the_same_messages_by_its_own_template(monkeypatch, chat):
    student = load_tokenizer(chat)
    teacher = with_template(
        renumbered(student)[0],
        ("'<|im_start|>assistant\\n'", "'<|im_start|>model says:\\n'"),
        ("<tool_response>", "<the_result>"),
        ("You are Qwen", "You are the teacher"),
    )
    answers = [f"I add. {ADD % (1, 2)}\n{ADD % (4, 4)}", "It is 3, and 8."]
    (text,), _ = played_by_script(monkeypatch, chat, student, {(0, 0): answers})
    with Reader(student, teacher) as reader:
        opening = [as_message(turn) for turn in text.episode.opening]
        prompt_ids = reader.turns.prompt(opening)
        completion = reader.read(text)
    assert teacher.decode(prompt_ids).startswith("<|im_start|>system\nYou are the teacher")
    assert '"name": "add"' in teacher.decode(prompt_ids)
    assert teacher.decode(list(completion.ids)) == (
        f"{answers[0]}<|im_end|>\n<|im_start|>user\n<the_result>\n3\n</tool_response>\n<the_result>\n8"
        f"\n</tool_response><|im_end|>\n<|im_start|>model says:\n{answers[1]}<|im_end|>"
    )
    compared = [
        b"".join(map(student.spelled, text.ids[span.start : span.end]))
        for span in completion.spans
    ]
    theirs = [
        b"".join(map(teacher.spelled, completion.ids[span.other_start : span.other_end]))
        for span in completion.spans
    ]
    assert compared == theirs
    assert b"".join(compared).decode() == "<|im_end|>".join([*answers, ""])


def test_nothing_is_compared_behind_an_answer_that_the_teacher_cannot_read(monkeypatch, chat):
    student = load_tokenizer(chat)
    teacher, _ = renumbered(student)
    call = ADD % (1, 2)
    (text,), _ = played_by_script(monkeypatch, chat, student, {(0, 0): [call, "three"]})
    (first_end, _), *_ = text.episode.given
    # A byte that is no UTF-8, within the first answer.
    (byte, *_) = student.encode("世")
    at = student.encode(call, special=True).index(student.encode("add")[0])
    broken = replace(text, ids=[*text.ids[:at], byte, *text.ids[at + 1 :]])
    with Reader(student, teacher) as reader:
        assert reader.read(text).spans[-1].end == len(text.ids)
        assert reader.read(broken).spans[-1].end == at < first_end
        short = reader.read(text, room=first_end + 2)
    assert len(short.ids) <= first_end + 2
    assert short.spans[-1].end == first_end


def test_a_form_that_the_model_does_not_write_is_refused(chat, tmp_path):
    from bloomery.plan.teacher_tokenizer import refuse_other_calls

    student = load_tokenizer(chat)
    other = with_template(student)
    other.config["chat_template"] = QWEN_XML_TEMPLATE
    forms = []
    for tokenizer in (student, other):
        with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
            forms.append(Turns(renderer, tokenizer, [TOOL]).form)
    refuse_other_calls(forms[0], forms[0])
    with pytest.raises(UserError, match=r"as Qwen 3\.5 .* and the model's as Hermes") as error:
        refuse_other_calls(*forms)
    assert "data.chat.template" in error.value.fix


# Runs

DOUBLED = '''
def double(n: int) -> str:
    """Double a number.

    Args:
        n: a number
    """
    return f"{2 * n}"
'''
FUNCTION = ("rewards=[]", "tools=[{python: 'doubled.py:double'}]")
LONGER = ("data.sequence_length=512", "objective.max_completion_length=400")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Prompts, a game, and teachers: one with the tokenizer of the dataset, and the same one with other ids."""
    folder = tmp_path_factory.mktemp("episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_episodes(folder)
        (folder / "doubled.py").write_text(DOUBLED)
        shutil.rmtree(folder / "prepared")
        prepare(load_recipe(str(folder / "rl.yaml"), [*EDITS, *LONGER]), folder / "prepared")
        tokenizer = load_tokenizer(folder / "prepared")
        other, new_ids = renumbered(tokenizer)
        config = replace(plan_of(folder, *EDITS, *LONGER, *GUESS).model.config, initializer_range=0.2)
        state = model_state(fresh_decoder(config, seed=7))
        former = torch.tensor(new_ids).argsort()
        for name, kept in (("teacher", tokenizer), ("renumbered", other)):
            (folder / name).mkdir()
            kept.save(folder / name)
        write_model(state, config, folder / "teacher")
        moved = {
            name: tensor[former] if tensor.shape[:1] == (config.vocab_size,) else tensor
            for name, tensor in state.items()
        }
        write_model(moved, config, folder / "renumbered")
        yield folder


def plan_with(recipe, teacher, *edits, environment=GUESS):
    objective = (
        f"objective={{kind: on_policy_distill, teacher: {teacher}, num_generations: 2,"
        " estimator: sampled}"
    )
    return plan_of(recipe, objective, *EDITS, *LONGER, *environment, *edits)


@pytest.mark.parametrize("environment", [GUESS, FUNCTION], ids=["game", "function"])
def test_other_ids_give_the_numbers_of_the_same_ids(recipe, tmp_path, environment):
    tool = "guess" if environment is GUESS else "double"
    edits = ("train.max_steps=3",)
    runs = []
    for teacher in ("teacher", "renumbered"):
        plan = plan_with(recipe, teacher, *edits, environment=environment)
        runs.append(played(plan, tmp_path / teacher, recipe, tool=tool))
        assert plan.aligns_texts == (teacher == "renumbered")
        assert plan.memory.parts["teacher"] > 0
    rows = [row for of_file in completions(tmp_path / "renumbered").values() for row in of_file]
    assert any(row["given"] for row in rows)
    assert all(of_step["aligned"] == 1 for of_step in metrics(runs[1]).values())
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-6, abs=1e-6)
    assert fields(runs[1], "EvalDone")[-1]["metrics"]["aligned"] == 1


def test_a_demonstration_that_says_nothing_changes_nothing(recipe, tmp_path):
    runs = []
    for name, edits in (("plain", ()), ("told", ("objective.teacher_prompt_template='{prompt}'",))):
        plan = plan_with(recipe, "teacher", "objective.estimator=full", "train.max_steps=2", *edits)
        runs.append(played(plan, tmp_path / name, recipe))
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-6, abs=1e-6)


def test_a_teacher_that_is_the_model_teaches_nothing(recipe, tmp_path):
    """The model begins with the teacher's weights, and the teacher has them under other ids."""
    start = ("model={from: teacher}", "adapter={kind: lora, rank: 4}", "train.max_steps=2")
    events = played(plan_with(recipe, "renumbered", *start), tmp_path / "run", recipe)
    assert metrics(events)[1]["aligned"] == 1
    assert losses(events)[1] == pytest.approx(0, abs=1e-6)
    assert fields(events, "StepDone")[0]["grad_norm"] < 1e-5


TOLD = "objective.teacher_prompt_template='{answer}! {prompt}'"
CASES = {
    "another tokenizer": ("renumbered", ()),
    "another tokenizer, told more": ("renumbered", (TOLD,)),
    "told more": ("teacher", (TOLD, "objective.estimator=full")),
    "told more, with rewards": (
        "live",
        (
            "objective.kind=grpo",
            "rewards=[{python: 'my_rewards.py:spaces'}]",
            "objective.teacher_kl_coef=0.5",
            TOLD,
        ),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(recipe, tmp_path, case):
    teacher, edits = CASES[case]
    events = assert_resumes_to_the_same_bits(
        plan_with(recipe, teacher, *edits), tmp_path, train=partial(played, recipe=recipe)
    )
    held_out = fields(events, "EvalDone")[-1]["metrics"]
    assert held_out["divergence"] != 0
    assert 0 < held_out["agreement" if teacher != "renumbered" else "aligned"] <= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["another tokenizer", "told more"])
def test_two_ranks_train_as_one(recipe, tmp_path, case):
    teacher, edits = CASES[case]
    plan = plan_with(recipe, teacher, *edits, "train.max_steps=3")
    alone = played(plan, tmp_path / "alone", recipe)
    both = played(on_ranks(plan, replicate=2), tmp_path / "both", recipe)
    assert losses(both) == pytest.approx(losses(alone), abs=1e-5)


def test_a_demonstration_is_before_the_tools_are_called(recipe):
    """The teacher's prompt is the model's with the demonstration in the user's turn; what follows is the same."""
    from bloomery.data.prompts import Prompts
    from bloomery.infer.completions import Completion, Episode
    from bloomery.train.rl.rollout import RolloutSample
    from bloomery.train.rl.teacher_prompts import TeacherPrompts
    from bloomery.train.rl.teacher_reader import TeacherReader

    tokenizer = load_tokenizer(recipe / "prepared")
    prompts = Prompts(recipe / "prepared", seed=0)
    prompt = prompts[0]
    opening = [Message("user", f"{prompt.text} and more")]
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        turns = Turns(renderer, tokenizer, [TOOL])
        model_ids = turns.prompt(opening)
        told = [Message("user", f"{prompt.columns['answer']}! {opening[0].content}")]
        expected = turns.prompt(told)
        of_teacher = TeacherPrompts(
            "{answer}! {prompt}", recipe / "prepared", tokenizer, longest=400, chats=True
        )
        played_with = SimpleNamespace(tools=[TOOL], turns=turns)
        reader = TeacherReader(of_teacher, None, played_with, splits=[prompts], length=512)
        episode = Episode(
            model_ids, [[2, 4]], [], 2, 1, 0, opening=[{"role": "user", "content": opening[0].content}]
        )
        completion = Completion(0, 0, [5, 6, 7, 8, 9], [-1.0] * 5, episode=episode)
        sample = RolloutSample(
            tuple(model_ids), (5, 6, 7, 8, 9), (-1.0,) * 5, given=((2, 4),)
        )
        with reader:
            (taught,) = reader.read([sample], [prompt], [completion])
    assert list(taught.teacher_prompt_ids) == expected != model_ids
    assert taught.taught_ids == sample.completion_ids and taught.given == sample.given


REFUSED = {
    "another form of calls": ("as Qwen 3.5", QWEN_XML_TEMPLATE),
    "no tools": ("takes no tools", "{% for m in messages %}{{ m.content }}{% endfor %}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_by_the_plan(recipe, tmp_path, case):
    problem, template = REFUSED[case]
    shutil.copytree(recipe / "renumbered", tmp_path / "other")
    other = load_tokenizer(tmp_path / "other")
    other.config["chat_template"] = template
    other.save(tmp_path / "other")
    with pytest.raises(UserError, match=problem):
        plan_with(recipe, tmp_path / "other", environment=FUNCTION)
