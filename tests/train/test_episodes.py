"""Completions of several turns: ids, masks and what goes on between answers, with a policy that follows a script."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_tool_functions import FILE, plan

from bloomery.core.errors import UserError
from bloomery.data.chat.render import Renderer
from bloomery.data.prompts import Prompt
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.infer.completions import Completion
from bloomery.infer.sampling import Sampling
from bloomery.train.rl import episodes as episodes_module
from bloomery.train.rl.advantages import CompletionAdvantages
from bloomery.train.rl.episodes import EpisodeSampler
from bloomery.train.rl.rollout import Rollout, RolloutSample, pack
from bloomery.train.rl.rollout_source import _sample_of
from bloomery.train.rl.scoring import of_environment, reward_entries
from bloomery.train.rl.tools import RecordedCalls
from models_for_tests import make_chat_model
from tool_templates import QWEN_XML_TEMPLATE

TOKENS = ("<tool_call>", "</tool_call>")
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": %s, "b": %s}}\n</tool_call>'
STEP = '<tool_call>\n{"name": "step", "arguments": {"by": %s}}\n</tool_call>'


def write_model_and_tools(folder: Path) -> Path:
    """The folder with a chat model whose template names tools, and with tools in `user_tools.py`."""
    make_chat_model(folder, *TOKENS)
    tokenizer = load_tokenizer(folder)
    tokenizer.config["eos_token"] = "<|im_end|>"
    tokenizer.config["chat_template"] = (
        Path(episodes_module.__file__)
        .parents[2]
        .joinpath("data/tokenizer/templates/qwen.jinja")
        .read_text()
    )
    tokenizer.save(folder)
    (folder / "user_tools.py").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model_and_tools(tmp_path_factory.mktemp("episodes") / "chat")


@pytest.fixture
def tokenizer(folder) -> Tokenizer:
    return load_tokenizer(folder)


class Policy:
    """Answers by a script: of each episode its answers in turn. It remembers what it was given."""

    end = "<|im_end|>"

    def __init__(self, tokenizer, script: dict[tuple[int, int], list[str]]):
        self.tokenizer = tokenizer
        self.script = {place: list(answers) for place, answers in script.items()}
        self.seen: list[list[list[int]]] = []

    def __call__(
        self, decoder, prompts, num_generations, sampling, uniforms, *, slots, limits, past, on_step
    ):
        assert num_generations == 1 and past is None
        self.seen.append([list(ids) for ids in prompts])
        texts = [Completion(number, 0) for number in range(len(prompts))]
        # The random numbers name the episodes that are asked.
        numbers = uniforms(texts).tolist()
        for text, place, limit in zip(texts, self._places(numbers), limits, strict=True):
            answer = self.script[place].pop(0)
            ids = [*self.tokenizer.encode(answer, special=True), self.tokenizer.id_of(self.end)]
            text.truncated = len(ids) > limit
            text.ids = ids[:limit]
            text.logps = [-0.5] * len(text.ids)
        return texts

    def _places(self, numbers):
        waiting = [place for place, answers in self.script.items() if answers]
        assert len(numbers) <= len(waiting)
        return sorted(waiting)[: len(numbers)]


def played(
    monkeypatch,
    folder,
    tokenizer,
    script,
    *,
    tools=("add",),
    environment=None,
    longest=2000,
    new_tokens=400,
    max_turns=4,
    recorded=None,
    prompts=None,
):
    policy = Policy(tokenizer, script)
    monkeypatch.setattr(episodes_module, "sample_completions", policy)
    given = plan(folder / "user_tools.py", *tools, environment=environment)
    given = given.model_copy(update={"max_turns": max_turns})
    prompts = prompts or [
        Prompt(np.array([1]), "", [{"role": "user", "content": "What is 1 + 2?"}], {"start": 3})
    ]
    with EpisodeSampler(given, tokenizer, longest=longest) as sampler:
        completions = sampler.sample(
            SimpleNamespace(step=None),
            prompts,
            max(number for _, number in script) + 1,
            Sampling(max_new_tokens=new_tokens, stop_ids=(tokenizer.id_of("<|im_end|>"),)),
            lambda prompt, number: 1000 * prompt + number,
            slots=8,
            recorded=recorded or RecordedCalls(None),
        )
    return completions, policy


def test_ids_are_those_of_the_template_and_only_answers_have_a_loss(monkeypatch, folder, tokenizer):
    answers = [f"I add. {ADD % (1, 2)}", "It is 3."]
    (text,), policy = played(monkeypatch, folder, tokenizer, {(0, 0): answers})
    episode = text.episode
    # The whole conversation, as the template writes it at once: this tokenizer reads its answers as they were written.
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
            ],
        },
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tools = schemas(folder)
    whole = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    ours = tokenizer.decode(episode.prompt_ids + text.ids)
    assert ours == whole.replace("I add.\n<tool_call>", "I add. <tool_call>").removesuffix("\n")
    assert policy.seen[1] == [episode.prompt_ids + text.ids[: episode.given[0][1]]]
    # Sampled are both answers with the tokens that end them, and nothing else.
    ((start, end),) = episode.given
    sampled = [id_ for place, id_ in enumerate(text.ids) if not start <= place < end]
    end_id = tokenizer.id_of("<|im_end|>")
    assert sampled == [
        id_ for answer in answers for id_ in [*tokenizer.encode(answer, special=True), end_id]
    ]
    assert text.logps == [0.0 if start <= place < end else -0.5 for place in range(len(text.ids))]
    assert text.num_sampled == len(sampled) and not text.truncated
    assert (episode.turns, episode.calls, episode.failed, episode.reward) == (2, 1, 0, None)
    assert [turn["role"] for turn in episode.messages] == ["assistant", "tool", "assistant"]


def schemas(folder):
    from bloomery.train.rl.tools import Tools

    with Tools(plan(folder / "user_tools.py", "add")) as tools:
        return tools.schemas


def test_what_a_turn_adds_is_what_trl_adds(monkeypatch, folder, tokenizer):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    transformers = pytest.importorskip("transformers")
    (text,), _ = played(
        monkeypatch, folder, tokenizer, {(0, 0): [ADD % (1, 2) + "\n" + ADD % (5, 5), "3 and 10"]}
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    fake = type(
        "Trainer",
        (),
        {
            "processing_class": theirs,
            "chat_template": None,
            "chat_template_kwargs": {},
            "_tokenizer": theirs,
            "_is_vlm": False,
            "tools": None,
        },
    )()
    results = [{"role": "tool", "name": "add", "content": content} for content in ("3", "10")]
    suffix = trainer.GRPOTrainer._get_tool_suffix_ids(fake, results)
    ((start, end),) = text.episode.given
    assert text.ids[start:end] == suffix


def test_calls_as_markup_are_called_with_values_of_the_tools_types(monkeypatch, folder, tokenizer):
    tokenizer.config["chat_template"] = QWEN_XML_TEMPLATE
    parameter = "<parameter=%s>\n%s\n</parameter>\n"
    call = f"{parameter % ('a', 1)}{parameter % ('b', 2)}</function>\n</tool_call>"
    answers = [f"<tool_call>\n<function=add>\n{call}", "It is 3."]
    (text,), policy = played(monkeypatch, folder, tokenizer, {(0, 0): answers})
    assert text.episode.calls == 1 and text.episode.failed == 0
    called, told, _ = text.episode.messages
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert told["content"] == "3"
    ((start, end),) = text.episode.given
    assert tokenizer.decode(text.ids[start:end]) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert policy.seen[1] == [text.episode.prompt_ids + text.ids[:end]]


def test_an_error_goes_back_to_the_model(monkeypatch, folder, tokenizer):
    script = {
        (0, 0): ['<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>', "sorry"],
        (0, 1): ['<tool_call>\n{"name": "add", "arguments": {"a": 1', "sorry"],
    }
    texts, _ = played(monkeypatch, folder, tokenizer, script)
    told = [
        [turn["content"] for turn in text.episode.messages if turn["role"] == "tool"]
        for text in texts
    ]
    assert "there is no tool 'sub'" in told[0][0] and "no JSON" in told[1][0]
    assert [text.episode.failed for text in texts] == [1, 1]


def test_a_result_that_leaves_no_room_is_not_given(monkeypatch, folder, tokenizer):
    script = {(0, 0): ['<tool_call>\n{"name": "flood_text", "arguments": {}}\n</tool_call>']}
    (text,), _ = played(monkeypatch, folder, tokenizer, script, tools=("flood_text",))
    assert text.episode.given == [] and text.ids[-1] == tokenizer.id_of("<|im_end|>")
    assert [turn["role"] for turn in text.episode.messages] == ["assistant"]


def test_the_last_answers_calls_are_not_called(monkeypatch, folder, tokenizer):
    script = {(0, 0): [ADD % (1, 2)] * 3}
    (text,), _ = played(monkeypatch, folder, tokenizer, script, max_turns=3)
    assert (text.episode.turns, text.episode.calls) == (3, 2)


def test_an_answer_that_is_cut_off_calls_nothing(monkeypatch, folder, tokenizer):
    answer = ADD % (1, 2) + " and more text"
    length = len(tokenizer.encode(answer, special=True))
    (text,), _ = played(monkeypatch, folder, tokenizer, {(0, 0): [answer]}, new_tokens=length - 2)
    assert text.truncated and text.episode.calls == 0 and len(text.ids) == length - 2


def test_an_answer_that_ends_like_a_text_calls_nothing(monkeypatch, folder, tokenizer):
    """The template ends a turn with another token: after this one, nothing that it writes would follow."""
    end_of_text = tokenizer.id_of("</s>")
    assert end_of_text is not None
    script = {(0, 0): [ADD % (1, 2)]}
    monkeypatch.setattr(Policy, "end", "</s>")
    (text,), _ = played(monkeypatch, folder, tokenizer, script)
    assert text.ids[-1] == end_of_text
    assert (text.episode.turns, text.episode.calls, text.episode.given) == (1, 0, [])


def test_a_template_whose_turns_nothing_ends_is_refused(monkeypatch, folder, tokenizer):
    template = tokenizer.config["chat_template"]
    tokenizer.config["chat_template"] = template.replace("<|im_end|>", "<|end|>")
    with pytest.raises(UserError, match="no token that ends an answer"):
        played(monkeypatch, folder, tokenizer, {(0, 0): ["a"]})


def test_tools_that_a_row_names_are_refused(monkeypatch, folder, tokenizer):
    """No function answers them, and the model would not be told of them."""
    turns = [{"role": "user", "content": "a"}]
    prompts = [Prompt(np.array([1]), "a", turns, {"tools": [{"name": "search"}]})]
    with pytest.raises(UserError, match="tools of its own"):
        played(monkeypatch, folder, tokenizer, {(0, 0): ["a"]}, prompts=prompts)


def test_an_environment_begins_each_episode_and_rewards_it(monkeypatch, folder, tokenizer):
    script = {(0, 0): [STEP % 4, "done"], (0, 1): ["nothing"], (0, 2): [STEP % 1, STEP % 2, "done"]}
    texts, policy = played(monkeypatch, folder, tokenizer, script, tools=(), environment="Counter")
    assert "What is 1 + 2? Begin at 3.<|im_end|>" in tokenizer.decode(policy.seen[0][0])
    assert [text.episode.reward for text in texts] == [0.7, 0.3, 0.6]
    assert of_environment(texts) == {"environment": (1.0, [0.7, 0.3, 0.6])}
    prompt = Prompt(np.array([1]), "", [{"role": "user", "content": ""}], {})
    entries = reward_entries(tokenizer, [prompt], texts)
    assert entries.texts == ["done", "nothing", "done"]
    assert [completion[-1]["content"] for completion in entries.completions] == entries.texts
    assert [len(completion) for completion in entries.completions] == [3, 1, 5]


def test_results_of_functions_are_read_after_a_kill(monkeypatch, folder, tokenizer, tmp_path):
    path = tmp_path / "calls.jsonl"
    script = {(0, 0): ['<tool_call>\n{"name": "draw", "arguments": {}}\n</tool_call>', "so"]}
    first, _ = played(
        monkeypatch, folder, tokenizer, script, tools=("draw",), recorded=RecordedCalls(path)
    )
    (folder / "user_tools.py").write_text(
        FILE.replace("return random.random()", "return 'called again'")
    )
    try:
        again, _ = played(
            monkeypatch, folder, tokenizer, script, tools=("draw",), recorded=RecordedCalls(path)
        )
        without, _ = played(monkeypatch, folder, tokenizer, script, tools=("draw",))
    finally:
        (folder / "user_tools.py").write_text(FILE)
    assert again[0].ids == first[0].ids and again[0].episode == first[0].episode
    assert "called again" in tokenizer.decode(without[0].ids)


def test_a_template_without_tools_is_refused(folder, tokenizer):
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with (
        pytest.raises(UserError, match="takes no tools"),
        EpisodeSampler(plan(folder / "user_tools.py", "add"), tokenizer, longest=10),
    ):
        pass


def test_a_template_that_writes_the_past_another_way_is_refused(tokenizer):
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}<|im_end|>"
        "{% endfor %}"
    )
    from bloomery.data.examples import Message

    turns = (Message("user", "a"), Message("assistant", "b"))
    with (
        Renderer(tokenizer, template=None, train_on="assistant") as renderer,
        pytest.raises(UserError, match="in another way once it follows"),
    ):
        renderer.continued(turns, [Message("tool", "c")], (), "<|im_end|>")


THINKING = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and (loop.last or KEPT) %}<think>
{{ m.reasoning_content or '' }}
</think>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_thinks_only_in_the_last_answer_goes_on(monkeypatch, folder, tokenizer):
    """As Qwen3's: an empty thought is written into the last answer alone, and thoughts stay while tools are used."""
    tokenizer.config["chat_template"] = THINKING.replace("KEPT", "m.reasoning_content")
    (text,), _ = played(monkeypatch, folder, tokenizer, {(0, 0): [ADD % (1, 2), "3"]})
    ((start, end),) = text.episode.given
    given = tokenizer.decode(text.ids[start:end])
    assert given == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_thoughts_is_refused_before_anything_is_sampled(
    monkeypatch, folder, tokenizer
):
    tokenizer.config["chat_template"] = THINKING.replace("KEPT", "false")
    with pytest.raises(UserError, match="in another way once it follows"):
        played(monkeypatch, folder, tokenizer, {(0, 0): []})  # a policy that is asked fails


def test_a_packaged_template_without_tools_names_one_with_them(monkeypatch, folder, tokenizer):
    templates = Path(episodes_module.__file__).parents[2] / "data/tokenizer/templates"
    tokenizer.config["chat_template"] = (templates / "llama3.jinja").read_text()
    with pytest.raises(UserError, match="takes no tools") as refused:
        played(monkeypatch, folder, tokenizer, {(0, 0): []})
    assert "template=qwen" in refused.value.fix and "gemma" not in refused.value.fix


def test_markup_in_a_result_stays_text(monkeypatch, folder, tokenizer):
    turns_of = episodes_module.Turns
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        from bloomery.data.chat.tools import ToolCall

        turns = turns_of(renderer, tokenizer, schemas(folder))
        end_id = tokenizer.id_of("<|im_end|>")
        ids = turns.given([ToolCall("add", "{}", "call_0")], ["<|im_end|>3"], end_id)
    assert ids.count(end_id) == 1  # of the tool's turn, and none that the result wrote


def test_given_tokens_have_no_loss_in_micro_batches_and_checkpoints():
    sample = RolloutSample((1, 2, 3), (4, 5, 6, 7, 8), (0.0,) * 5, given=((1, 3),), advantage=1.0)
    other = RolloutSample((1,), (2, 3), (0.0, 0.0), advantage=2.0)
    (batch,), _ = pack([sample, other], length=16, rows=1)
    loss_labels = batch.labels[0][batch.loss_mask[0] != 0].tolist()
    assert loss_labels == [4, 7, 8, 2, 3]
    rollout = Rollout(0, 1, 1, (sample, other))
    again = Rollout.of(rollout.tensors(), rollout.scalars())
    assert [each.given for each in again.samples] == [((1, 3),), ()]
    completion = Completion(0, 0, [4, 5], [-1.0, 0.0])
    prompt = Prompt(np.array([1, 2]), "", None, {})
    assert _sample_of(completion, prompt, prompt_number=0).given == ()


def test_the_divergence_of_an_episode_is_a_mean_over_its_sampled_tokens():
    class Scores:
        """Given tokens have no loss, and so a log-probability of 0."""

        def logps(self, samples, shape, *, of_reference=False):
            return [[-2.0 if of_reference else -1.0, 0.0, 0.0, 0.0, -1.0] for _ in samples]

    sample = RolloutSample((1,), (4, 5, 6, 7, 8), (0.0,) * 5, given=((1, 4),))
    judge = CompletionAdvantages(Scores(), "leave_one_out", 2, reward_beta=0.1).judge
    judged = judge([sample] * 2, [1.0, 0.0], [False] * 2, num_steps=1, shape=None)
    assert judged.metrics["kl"] == pytest.approx(1.0 / 2)
