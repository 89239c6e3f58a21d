"""Episodes in each form of tool calls: a policy by script calls a tool, errors go back to it, and masks are right."""

from pathlib import Path

import pytest
from test_episodes import Policy, played
from test_tool_functions import FILE

from bloomery.data.chat.render import Renderer
from bloomery.data.examples import Example, Message
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from models_for_tests import make_chat_model
from tool_templates import OTHER_FORMS

ADD = {
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


def tokenizer_of(folder: Path, name: str) -> Tokenizer:
    make_chat_model(folder / "chat", *OTHER_FORMS[name].marks, OTHER_FORMS[name].end)
    tokenizer = load_tokenizer(folder / "chat")
    tokenizer.config["chat_template"] = OTHER_FORMS[name].template
    (folder / "user_tools.py").write_text(FILE)
    return tokenizer


class PolicyOfForm(Policy):
    """Ends answers with a call as the form does, and others with the token that ends a turn."""

    def __init__(self, tokenizer: Tokenizer, script: dict, call_end: str) -> None:
        super().__init__(tokenizer, script)
        self.end = call_end


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_call_is_answered_and_errors_go_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    other = OTHER_FORMS[name]
    tokenizer = tokenizer_of(tmp_path, name)
    monkeypatch.setattr(
        "test_episodes.Policy", lambda tokens, script: PolicyOfForm(tokens, script, other.end)
    )
    good = other.call % (1, 2)
    unknown = good.replace("add", "sub")
    cut = good[: good.rindex("2")]
    mistyped = other.call % ('"x"' if "%s, " in other.call else "x", 2)
    script = {
        (0, number): [text, "so"] for number, text in enumerate((good, unknown, cut, mistyped))
    }
    texts, policy = played(monkeypatch, tmp_path, tokenizer, script)

    told = [text.episode.messages[1]["content"] for text in texts]
    assert told[0] == "3"
    assert "there is no tool 'sub'" in told[1]
    assert "no JSON" in told[2]
    assert "error" in told[3]
    assert [text.episode.failed for text in texts] == [0, 1, 1, 1]
    for text, begun in zip(texts, policy.seen[1], strict=True):
        # What the model goes on from is what it sampled, and the result as the template writes it.
        ((start, end),) = text.episode.given
        assert begun == text.episode.prompt_ids + text.ids[:end]
        answer = tokenizer.decode(text.ids[:start])
        assert answer.endswith(other.end)
        assert text.logps[start:end] == [0.0] * (end - start)
    assert "3" in tokenizer.decode(texts[0].ids[slice(*texts[0].episode.given[0])])


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_calls_in_datasets_have_labels_and_results_have_none(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(tmp_path, name)
    id_ = "functions.add:0" if name == "Kimi K2" else "a1b2c3d4e"
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    turns = (
        Message("user", "question"),
        Message("assistant", "", calls=({"id": id_, "type": "function", "function": function},)),
        Message("tool", "threeresult", name="add", call_id=id_),
        Message("assistant", "so it is"),
    )
    example = Example("rows", "chat", (), (turns,), tools=(ADD,))
    with Renderer(tokenizer, template=None, train_on="assistant") as renderer:
        (encoded,) = renderer.encode(example)
    learned = tokenizer.decode(
        [id_ for id_, mask in zip(encoded.ids, encoded.loss_mask, strict=True) if mask]
    )
    assert "add" in learned and "so it is" in learned
    assert OTHER_FORMS[name].end in learned
    assert "threeresult" not in learned and "question" not in learned
