"""The loss mask of conversations: the characters of assistant turns, for any chat template, and their tokens.

A template does not report where it writes a response. So the conversation is rendered a second time, with marks around
every content: characters that no text contains. Where both renderings are equal except for the marks, the place of each
content is exact. The template text between two contents is split with two more renderings: of the turns before the
response with the generation prompt, for its begin, and of the turns up to the response, for its end.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

Turn = dict[str, Any]
Span = tuple[int, int]
_PLANES = (0x100000, 0xF0000)  # Unicode's private planes: 65,534 characters each
# Marks of a turn: around its content, and after the name of its last call.
_OPEN, _CLOSE, _CALL = range(3)
MAX_TURNS = 0xFFF0 // 3
# The marks of `{% generation %}`, at the top of a plane.
_BEGINS = 0xFFF8
_ENDS = 0xFFF9
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?$")
_KEPT = 4096  # pieces of template kept
_SHORT = 512  # characters of such a piece


class Unclear(Exception):
    """The loss mask cannot be determined, with the reason."""


class Render(Protocol):
    """Renders turns with the template. Raises the errors of the template."""

    def __call__(self, turns: Sequence[Turn], *, prompt: bool = False) -> str: ...


class Refused(Exception):
    """The template raised an error of its own."""


@dataclass(frozen=True)
class Marked:
    """A rendering without its marks, and the marks with their places, in order."""

    text: str
    marks: tuple[tuple[int, int], ...]

    def place(self, mark: int, *, nth: int | None = None) -> int:
        """The index of a mark. A call's name may occur more than once; `nth` selects one."""
        indices = self._indices.get(mark, [])
        part = "the call" if mark % 3 == _CALL else "the content"
        if not indices:
            raise Unclear(f"the template does not write {part} of turn {mark // 3 + 1}")
        if len(indices) > 1 and (nth is None or nth >= len(indices) or mark % 3 != _CALL):
            raise Unclear(f"the template writes {part} of turn {mark // 3 + 1} twice")
        return indices[nth or 0]

    def last_of(self, beginning: "Marked") -> int:
        """The index of the last mark of a rendering of the first turns alone."""
        names = [name for name, _ in beginning.marks]
        return self.place(names[-1], nth=names.count(names[-1]) - 1)

    def once(self, mark: int | None) -> bool:
        return mark is not None and len(self._indices.get(mark, [])) == 1

    @cached_property
    def _indices(self) -> dict[int, list[int]]:
        indices: dict[int, list[int]] = {}
        for index, (mark, _) in enumerate(self.marks):
            indices.setdefault(mark, []).append(index)
        return indices

    def places(self, mark: int) -> list[int]:
        """The places of a mark in the text."""
        return [self.marks[index][1] for index in self._indices.get(mark, [])]

    def after(self, index: int) -> str:
        """The text between a mark and the next one, or the end."""
        end = self.marks[index + 1][1] if index + 1 < len(self.marks) else len(self.text)
        return self.text[self.marks[index][1] : end]


@cache
def _pattern(plane: int) -> re.Pattern[str]:
    return re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]")


def free_plane(turns: Iterable[Turn], tools: object) -> int:
    """A plane of Unicode that these turns do not use. Raises Unclear when there is none."""
    json_text = json.dumps([*turns, tools], ensure_ascii=False)
    if json_text.isascii():
        return _PLANES[0]
    for plane in _PLANES:
        if not _pattern(plane).search(json_text):
            return plane
    raise Unclear(
        "the conversation uses both private planes of Unicode, whose characters mark its turns"
    )


def unmarked(text: str, plane: int) -> Marked:
    parts = []
    marks = []
    start = 0
    length = 0
    for match in _pattern(plane).finditer(text):
        parts.append(text[start : match.start()])
        length += match.start() - start
        marks.append((ord(match[0]) - plane, length))
        start = match.end()
    return Marked("".join((*parts, text[start:])), tuple(marks))


def _with_marks(turns: Sequence[Turn], plane: int, both_edges: bool) -> list[Turn]:
    return [_with_mark(turn, index, plane, both_edges) for index, turn in enumerate(turns)]


def _with_mark(turn: Turn, index: int, plane: int, both_edges: bool) -> Turn:
    """Marks are inside the white space at the edges, so that templates trim it as without marks."""
    content = turn["content"]
    first_mark = plane + 3 * index
    core = content.strip()
    if core:  # an empty content stays empty, as templates test for it
        start = content.index(core)
        leading_space = content[:start]
        trailing_space = content[start + len(core) :]
        opened = chr(first_mark + _OPEN) if both_edges else ""
        turn = {
            **turn,
            "content": f"{leading_space}{opened}{core}{chr(first_mark + _CLOSE)}{trailing_space}",
        }
    if turn.get("tool_calls"):
        *earlier_calls, last_call = turn["tool_calls"]
        function = last_call["function"]
        marked = {
            **last_call,
            "function": {**function, "name": function["name"] + chr(first_mark + _CALL)},
        }
        turn = {**turn, "tool_calls": [*earlier_calls, marked]}
    return turn


def _last_mark(turn: Turn, index: int) -> int | None:
    """The last of the marks that a turn gets."""
    if turn.get("tool_calls"):
        return 3 * index + _CALL
    return 3 * index + _CLOSE if turn["content"].strip() else None


@dataclass
class RenderedConversation:
    """One conversation under a template: where its assistant turns begin and end."""

    render: Render
    turns: Sequence[Turn]
    tools: list[dict[str, Any]] | None
    enders: re.Pattern[str]  # the tokenizer's special tokens, any of which may end a turn
    # Where pieces of template between two contents were split before: equal pieces are split
    # equally.
    cuts: dict[tuple[str, ...], int]

    def __post_init__(self) -> None:
        """Raises Unclear for a conversation of too many turns."""
        if len(self.turns) > MAX_TURNS:
            raise Unclear(
                f"the conversation has {len(self.turns):,} turns, and {MAX_TURNS:,} is the limit"
            )
        self.plane = free_plane(self.turns, self.tools)
        self.text = self.render(self.turns)
        self._marked: Marked | None = None
        self._both = True

    def spans(self, turns: Sequence[int]) -> list[Span]:
        """Characters to train on, of the turns with these numbers. Raises Unclear."""
        self._mark()
        try:
            spans = [
                self._marked_span(turn) if self._marked else self._plain_span(turn)
                for turn in turns
            ]
        except Refused as error:
            raise Unclear(f"of the first turns alone, {error}") from error
        for (_, previous_end), (start, end) in zip([(0, 0), *spans], spans, strict=False):
            if not previous_end <= start <= end:
                raise Unclear("the template changes the order of turns")
        return spans

    def _mark(self) -> None:
        # A mark before a content changes templates that test how it begins: then only the end is
        # marked.
        for both_edges in (True, False):
            try:
                marked = unmarked(
                    self.render(_with_marks(self.turns, self.plane, both_edges)), self.plane
                )
            except Refused:
                continue
            if marked.text == self.text:
                self._marked = marked
                self._both = both_edges
                return

    def _prefix(self, count: int, *, prompt: bool) -> Marked:
        """The first turns alone, with marks."""
        turns = self.turns[:count]
        marked = unmarked(
            self.render(_with_marks(turns, self.plane, self._both), prompt=prompt), self.plane
        )
        if marked.text != self.render(turns, prompt=prompt):
            raise Unclear("the template writes the first turns alone differently")
        return marked

    def _marked_span(self, turn: int) -> Span:
        assert self._marked is not None
        start = self._start(turn)
        end = self._end(turn, start)
        if self.turns[turn]["content"].strip():
            # Some templates omit the content of turns with calls: `place` refuses those.
            self._marked.place(3 * turn + _CLOSE)
        positions = [
            *self._marked.places(3 * turn + _OPEN),
            *self._marked.places(3 * turn + _CLOSE),
        ]
        if self.turns[turn].get("tool_calls"):
            positions.append(self._marked.marks[self._marked.place(3 * turn + _CALL, nth=0)][1])
        if not all(start <= position <= end for position in positions):
            raise Unclear(f"turn {turn + 1} is not where the template's generation prompt ends")
        return start, end

    def _keep(self, key: tuple[str, ...], cut: int) -> None:
        """Equal pieces are split equally."""
        if len(self.cuts) < _KEPT and len(key[-1]) <= _SHORT:
            self.cuts[key] = cut

    def _start(self, turn: int) -> int:
        """The place after the generation prompt."""
        assert self._marked is not None
        key: tuple[str, ...] | None = None
        previous_mark = _last_mark(self.turns[turn - 1], turn - 1) if turn and self._both else None
        if previous_mark is not None and self._marked.once(previous_mark):
            index = self._marked.place(previous_mark)
            key = ("start", self.turns[turn - 1]["role"], self._marked.after(index))
            if key in self.cuts:
                return self._marked.marks[index][1] + self.cuts[key]
        try:
            prompt = self._prefix(turn, prompt=True)
            if not prompt.marks:
                return _agreed(prompt.text, self.text)
        except (Refused, Unclear):
            if turn:
                raise
            # There is no turn before it: its content alone is trained on.
            return self._marked.marks[self._marked.place(_OPEN)][1]
        index = self._marked.last_of(prompt)
        cut = _agreed(prompt.after(len(prompt.marks) - 1), self._marked.after(index))
        if key is not None and prompt.marks[-1][0] == previous_mark:
            self._keep(key, cut)
        return self._marked.marks[index][1] + cut

    def _end(self, turn: int, start: int) -> int:
        """The place after the last special token of the turn; without one, after the template's text."""
        assert self._marked is not None
        is_last = turn == len(self.turns) - 1
        key: tuple[str, ...] | None = None
        mark = _last_mark(self.turns[turn], turn)
        if mark is not None and self._marked.once(mark):
            continuation = self._marked.after(self._marked.place(mark))
            # The template's text after the name of a call, without the arguments of the call.
            beyond = continuation
            if calls := self.turns[turn].get("tool_calls"):
                arguments = json.dumps(calls[-1]["function"]["arguments"], ensure_ascii=False)
                beyond = continuation.replace(arguments, "\0", 1)
            key = ("last" if is_last else "end", beyond) if self._both else None
            if key in self.cuts:  # counted from the end, as the arguments of calls differ in length
                return self._marked.places(mark)[0] + len(continuation) - self.cuts[key]
        rendering = self._marked if is_last else self._prefix(turn + 1, prompt=False)
        if not rendering.marks:
            raise Unclear("the template does not write the first turns")
        index = self._marked.last_of(rendering)
        # A turn without any mark has none after its header.
        header = max(0, start - self._marked.marks[index][1])
        continuation = self._marked.after(index)
        cut = self._ended(rendering.after(len(rendering.marks) - 1), continuation, header)
        if key is not None and rendering.marks[-1][0] == mark:
            self._keep(key, len(continuation) - cut)
        return self._marked.marks[index][1] + cut

    def _ended(self, alone: str, continuation: str, header: int = 0) -> int:
        """The end of a turn in `within`, given the end of the last turn, `alone`."""
        common = _common(alone, continuation)
        ends = [
            match.end() for match in self.enders.finditer(alone, header) if match.end() <= common
        ]
        if not ends and common < min(len(alone), len(continuation)):
            raise Unclear("the template ends the last turn differently")
        return ends[-1] if ends else max(header, len(alone[:common].rstrip()))

    def _plain_span(self, turn: int) -> Span:
        """Without marks: the rendering must begin with the rendering of its first turns."""
        prompt_text = self.render(self.turns[:turn], prompt=True)
        turn_text = self.render(self.turns[: turn + 1])
        start = len(prompt_text)
        if not self.text.startswith(prompt_text) or _common(turn_text, self.text) < start:
            raise Unclear("the template changes earlier turns when a conversation continues")
        end = start + self._ended(turn_text[start:], self.text[start:])
        if self.turns[turn]["content"].strip() not in self.text[start:end]:
            raise Unclear(f"the template changes the content of turn {turn + 1}")
        names = [call["function"]["name"] for call in self.turns[turn].get("tool_calls", ())]
        if not all(name in self.enders.sub("", self.text[start:end]) for name in names):
            raise Unclear(f"the template does not write the call of turn {turn + 1}")
        return start, end


def _common(first: str, second: str) -> int:
    """The length of the common beginning."""
    if second.startswith(first):
        return len(first)
    shortest = 0
    longest = min(len(first), len(second))
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        shortest, longest = (
            (middle, longest) if first[:middle] == second[:middle] else (shortest, middle - 1)
        )
    return shortest


def _agreed(prompt: str, continuation: str) -> int:
    """Where a response begins in `within`, given the generation prompt. Thinking markup at its end belongs
    to the response where the template writes the turn without it.
    """
    header = _THOUGHT.sub("", prompt)
    for beginning in (prompt, header, header.rstrip()):
        if continuation.startswith(beginning):
            return len(beginning)
    raise Unclear("the template's generation prompt differs from the turns that it writes")


def generation_marks(plane: int) -> tuple[str, str]:
    """The marks for `{% generation %}` and `{% endgeneration %}`."""
    return chr(plane + _BEGINS), chr(plane + _ENDS)


def generated_spans(marked: Marked) -> list[Span]:
    """Characters between the marks of `{% generation %}`. Raises Unclear when they are not in pairs."""
    positions = [(mark, position) for mark, position in marked.marks if mark in (_BEGINS, _ENDS)]
    begins = positions[::2]
    ends = positions[1::2]
    if [mark for mark, _ in begins] != [_BEGINS] * len(ends) or any(
        mark != _ENDS for mark, _ in ends
    ):
        raise Unclear("the template's {% generation %} blocks are nested or incomplete")
    return [(start, end) for (_, start), (_, end) in zip(begins, ends, strict=True)]


def loss_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token has at least one character of a span; both in order."""
    mask = []
    index = 0
    for start, end in offsets:
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        mask.append(index < len(spans) and spans[index][0] < end and start < end)
    return mask
