"""Which parts of a conversation a chat template leaves out: the reasoning of earlier turns, a system message, tools.

Every part of a conversation is replaced by a word of its own, and the words that the rendering lacks are what the
template leaves out. Conversations of one shape are rendered alike, so that each shape is tried once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
Tools = list[dict[str, Any]] | None
# For each kind of part: how many are left out, and of how many.
PartCounts = dict[str, tuple[int, int]]
_MAX_SHAPES = 4096  # shapes that are remembered
_THOUGHT_END = "</think>"

# What a part is called in a note.
NAMES = {
    "reasoning": "reasoning of assistant turns",
    "system": "system messages",
    "user": "user messages",
    "assistant": "assistant messages",
    "tool": "tool results",
    "calls": "turns' tool calls",
    "tools": "conversations' tools",
    "name": "names of turns",
}


class LeftOut:
    """Counts the parts that a template leaves out. `render`: turns and tools as text, "" where the template refuses."""

    def __init__(self, render: Callable[[list[Turn], Tools, bool], str]) -> None:
        self._render = render
        self._counts: dict[object, PartCounts] = {}

    def counts(self, turns: Sequence[Turn], tools: Tools, *, prompt: bool) -> PartCounts:
        """Of each kind of part that the conversation has, how many the template leaves out, and how many there are."""
        shape = (tuple(map(_shape, turns)), bool(tools), prompt)
        if shape not in self._counts:
            if len(self._counts) >= _MAX_SHAPES:
                self._counts.clear()
            self._counts[shape] = self._tried(turns, tools, prompt=prompt)
        return self._counts[shape]

    def _tried(self, turns: Sequence[Turn], tools: Tools, *, prompt: bool) -> PartCounts:
        words: list[tuple[str, str]] = []

        def word_for(part: str) -> str:
            words.append((part, f"bloomerypart{len(words)}x"))
            return words[-1][1]

        probe_turns = [_with_words(turn, word_for) for turn in turns]
        probe_tools = None
        if tools:
            word = word_for("tools")
            probe_tools = [_named(tool, word) for tool in tools]
        text = self._render(probe_turns, probe_tools, prompt).lower()
        if not text:  # the template refuses words in these places: nothing is known
            return {}
        counts: PartCounts = {}
        for part, word in words:
            num_left_out, num_parts = counts.get(part, (0, 0))
            counts[part] = num_left_out + (word not in text), num_parts + 1
        return counts


def _shape(turn: Turn) -> tuple[object, ...]:
    content = turn["content"]
    return (
        turn["role"],
        bool(content.strip()),
        _THOUGHT_END in content,
        bool(turn.get("reasoning_content")),
        len(turn.get("tool_calls", ())),
        bool(turn.get("name")),
    )


def _with_words(turn: Turn, word_for: Callable[[str], str]) -> Turn:
    """A copy of a turn with a word for each of its parts. A thought inside the content is a part of its own."""
    role = turn["role"]
    changed_turn = dict(turn)
    content = turn["content"]
    if _THOUGHT_END in content and role == "assistant":
        opening = "<think>\n" if "<think>" in content else ""
        thought = f"{opening}{word_for('reasoning')}\n{_THOUGHT_END}\n\n"
        is_answered = content.rpartition(_THOUGHT_END)[2].strip() != ""
        changed_turn["content"] = thought + (word_for(role) if is_answered else "")
    elif content.strip():
        changed_turn["content"] = word_for(role)
    if turn.get("reasoning_content"):
        word = word_for("reasoning")
        changed_turn |= {"reasoning_content": word, "thinking": word}
    if turn.get("tool_calls"):
        word = word_for("calls")
        changed_turn["tool_calls"] = [_named(call, word) for call in turn["tool_calls"]]
    # The name of a tool is in the call that it answers.
    if turn.get("name") and role != "tool":
        changed_turn["name"] = word_for("name")
    return changed_turn


def _named(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of a tool, or of a call, with another name of its function."""
    if isinstance(tool.get("function"), Mapping):
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}


def added(counts: PartCounts, more_counts: Mapping[str, Sequence[int]]) -> PartCounts:
    """The sums of both."""
    sums = dict(counts)
    for part, (num_left_out, num_parts) in more_counts.items():
        earlier_left_out, earlier_parts = sums.get(part, (0, 0))
        sums[part] = earlier_left_out + num_left_out, earlier_parts + num_parts
    return sums


def notes(counts: Mapping[str, Sequence[int]]) -> list[str]:
    """What the template does, for each kind of part that it leaves out."""
    return [
        f"leaves out {NAMES.get(part, part)}: {num_left_out:,} of {num_parts:,} "
        f"({num_left_out / num_parts:.0%})"
        for part, (num_left_out, num_parts) in counts.items()
        if num_left_out
    ]
