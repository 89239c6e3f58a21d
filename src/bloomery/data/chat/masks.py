"""Which characters of a rendered conversation its assistant wrote, for any template; which tokens hold them.

A template says nothing about where it put an answer. So every content gets marks around it, characters that no text
uses, and the conversation is rendered again: where both renderings agree but for the marks, contents are found
exactly. What stands between two contents is then split by asking the template itself: rendered up to the question with
its prompt for an answer, it shows where the answer begins; rendered up to the answer, where the answer's turn ends.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

Turn = dict[str, Any]
Span = tuple[int, int]
_PLANES = (0x100000, 0xF0000)  # Unicode's private planes: 65,534 characters each
_OPEN, _CLOSE, _CALL = range(3)  # marks of a turn: around its content, and behind the name of its last call
MAX_TURNS = 0xFFF0 // 3
_BEGINS, _ENDS = 0xFFF8, 0xFFF9  # the marks of `{% generation %}`, at the top of a plane
_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?$")
_KEPT = 4096  # pieces of template that are remembered
_SHORT = 512  # characters of such a piece


class Unclear(Exception):
    """The template cannot be told what it learned; says why."""


class Render(Protocol):
    """The template at work. Raises what the template raises."""

    def __call__(self, turns: Sequence[Turn], *, prompt: bool = False) -> str: ...


class Refused(Exception):
    """The template raised an error of its own."""


@dataclass(frozen=True)
class Marked:
    """A rendering without its marks, and the marks with where they stood, in order."""

    text: str
    marks: tuple[tuple[int, int], ...]

    def place(self, mark: int, *, nth: int | None = None) -> int:
        """Which of the marks is this one. A call's name may stand in more than one place; `nth` says in which."""
        found = self._indices.get(mark, [])
        what = "the call in" if mark % 3 == _CALL else "what is said in"
        if not found:
            raise Unclear(f"the template leaves {what} turn {mark // 3 + 1} out")
        if len(found) > 1 and (nth is None or nth >= len(found) or mark % 3 != _CALL):
            raise Unclear(f"the template writes {what} turn {mark // 3 + 1} twice")
        return found[nth or 0]

    def last_of(self, beginning: "Marked") -> int:
        """Which of the marks is the last one of a rendering of the first turns alone."""
        names = [name for name, _ in beginning.marks]
        return self.place(names[-1], nth=names.count(names[-1]) - 1)

    def once(self, mark: int | None) -> bool:
        return mark is not None and len(self._indices.get(mark, [])) == 1

    @cached_property
    def _indices(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, (mark, _) in enumerate(self.marks):
            found.setdefault(mark, []).append(index)
        return found

    def places(self, mark: int) -> list[int]:
        """Where in the text a mark stood."""
        return [self.marks[index][1] for index in self._indices.get(mark, [])]

    def after(self, index: int) -> str:
        """What stands between a mark and the next one, or the end."""
        end = self.marks[index + 1][1] if index + 1 < len(self.marks) else len(self.text)
        return self.text[self.marks[index][1] : end]


@dataclass
class Memory:
    """How pieces of template between two contents were split before: a piece is split alike each time."""

    cuts: dict[tuple[str, ...], int] = field(default_factory=dict)

    def keep(self, key: tuple[str, ...], cut: int) -> None:
        if len(self.cuts) < _KEPT and len(key[-1]) <= _SHORT:
            self.cuts[key] = cut


@cache
def _pattern(plane: int) -> re.Pattern[str]:
    return re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]")


def free_plane(turns: Iterable[Turn], tools: object) -> int:
    """A plane of Unicode that these turns do not use. Raises Unclear when there is none."""
    whole = json.dumps([*turns, tools], ensure_ascii=False)
    if whole.isascii():
        return _PLANES[0]
    for plane in _PLANES:
        if not _pattern(plane).search(whole):
            return plane
    raise Unclear("the conversation uses both private planes of Unicode, whose characters mark its turns")


def unmarked(text: str, plane: int) -> Marked:
    parts, marks, start, length = [], [], 0, 0
    for match in _pattern(plane).finditer(text):
        parts.append(text[start : match.start()])
        length += match.start() - start
        marks.append((ord(match[0]) - plane, length))
        start = match.end()
    return Marked("".join((*parts, text[start:])), tuple(marks))


def _with_marks(turns: Sequence[Turn], plane: int, both: bool) -> list[Turn]:
    return [_with_mark(turn, index, plane, both) for index, turn in enumerate(turns)]


def _with_mark(turn: Turn, index: int, plane: int, both: bool) -> Turn:
    """Marks stand inside of white space at the edges, so that a template that trims trims as before."""
    content, first = turn["content"], plane + 3 * index
    core = content.strip()
    if core:  # an empty content stays empty: templates ask
        start = content.index(core)
        before, after = content[:start], content[start + len(core) :]
        opened = chr(first + _OPEN) if both else ""
        turn = {**turn, "content": f"{before}{opened}{core}{chr(first + _CLOSE)}{after}"}
    if turn.get("tool_calls"):
        *others, last = turn["tool_calls"]
        function = last["function"]
        marked = {**last, "function": {**function, "name": function["name"] + chr(first + _CALL)}}
        turn = {**turn, "tool_calls": [*others, marked]}
    return turn


def _last_mark(turn: Turn, index: int) -> int | None:
    """The last of the marks that a turn gets."""
    if turn.get("tool_calls"):
        return 3 * index + _CALL
    return 3 * index + _CLOSE if turn["content"].strip() else None


def _without_arguments(turn: Turn, within: str) -> str:
    """What the template writes behind the name of a call, without what changes from call to call."""
    if not turn.get("tool_calls"):
        return within
    arguments = json.dumps(turn["tool_calls"][-1]["function"]["arguments"], ensure_ascii=False)
    return within.replace(arguments, "\0", 1)


@dataclass
class RenderedConversation:
    """One conversation under a template: where its assistant's turns begin and end."""

    render: Render
    turns: Sequence[Turn]
    tools: list[dict[str, Any]] | None
    enders: re.Pattern[str]  # the tokenizer's special tokens, any of which may end a turn
    memory: Memory

    def __post_init__(self) -> None:
        if len(self.turns) > MAX_TURNS:
            raise Unclear(f"the conversation has {len(self.turns):,} turns, and {MAX_TURNS:,} is the limit")
        self.plane = free_plane(self.turns, self.tools)
        self.text = self.render(self.turns)
        self._marked: Marked | None = None
        self._both = True

    def spans(self, loss_mask: Sequence[int]) -> list[Span]:
        """Characters that the turns with these numbers learn. Raises Unclear where that cannot be told."""
        self._mark()
        try:
            spans = [self._marked_span(turn) if self._marked else self._plain_span(turn) for turn in loss_mask]
        except Refused as error:
            raise Unclear(f"of a conversation cut short, {error}") from error
        for (_, before), (start, end) in zip([(0, 0), *spans], spans, strict=False):
            if not before <= start <= end:
                raise Unclear("the template changes the order of turns")
        return spans

    def _mark(self) -> None:
        for both in (True, False):  # a mark before a content spoils templates that ask how it begins
            try:
                marked = unmarked(self.render(_with_marks(self.turns, self.plane, both)), self.plane)
            except Refused:
                continue
            if marked.text == self.text:
                self._marked, self._both = marked, both
                return

    def _prefix(self, count: int, *, prompt: bool) -> Marked:
        """The first turns alone, marked as the whole is."""
        turns = self.turns[:count]
        marked = unmarked(self.render(_with_marks(turns, self.plane, self._both), prompt=prompt), self.plane)
        if marked.text != self.render(turns, prompt=prompt):
            raise Unclear("the template writes the beginning of a conversation in two ways")
        return marked

    def _marked_span(self, turn: int) -> Span:
        assert self._marked is not None
        start = self._start(turn)
        end = self._end(turn, start)
        if self.turns[turn]["content"].strip():
            self._marked.place(3 * turn + _CLOSE)  # some templates leave a content out beside calls
        places = [*self._marked.places(3 * turn + _OPEN), *self._marked.places(3 * turn + _CLOSE)]
        if self.turns[turn].get("tool_calls"):
            places.append(self._marked.marks[self._marked.place(3 * turn + _CALL, nth=0)][1])
        if not all(start <= place <= end for place in places):
            raise Unclear(f"turn {turn + 1} does not stand where the template asks for it")
        return start, end

    def _start(self, turn: int) -> int:
        """Behind what the template writes to ask for an answer."""
        assert self._marked is not None
        key: tuple[str, ...] | None = None
        before = _last_mark(self.turns[turn - 1], turn - 1) if turn and self._both else None
        if before is not None and self._marked.once(before):
            index = self._marked.place(before)
            key = ("start", self.turns[turn - 1]["role"], self._marked.after(index))
            if key in self.memory.cuts:
                return self._marked.marks[index][1] + self.memory.cuts[key]
        try:
            asked = self._prefix(turn, prompt=True)
            if not asked.marks:
                return _agreed(asked.text, self.text)
        except (Refused, Unclear):
            if turn:
                raise
            return self._marked.marks[self._marked.place(_OPEN)][1]  # nothing precedes it: its content alone is learned
        index = self._marked.last_of(asked)
        cut = _agreed(asked.after(len(asked.marks) - 1), self._marked.after(index))
        if key is not None and asked.marks[-1][0] == before:
            self.memory.keep(key, cut)
        return self._marked.marks[index][1] + cut

    def _end(self, turn: int, start: int) -> int:
        """Behind the last special token of the turn, or where the template has none, behind what it writes there."""
        assert self._marked is not None
        last = turn == len(self.turns) - 1
        key: tuple[str, ...] | None = None
        mark = _last_mark(self.turns[turn], turn)
        if mark is not None and self._marked.once(mark):
            within = self._marked.after(self._marked.place(mark))
            key = ("last" if last else "end", _without_arguments(self.turns[turn], within)) if self._both else None
            if key in self.memory.cuts:  # from the end: arguments of calls differ in length
                return self._marked.places(mark)[0] + len(within) - self.memory.cuts[key]
        whole = self._marked if last else self._prefix(turn + 1, prompt=False)
        if not whole.marks:
            raise Unclear("the template writes nothing of the first turns")
        index = self._marked.last_of(whole)
        header = max(0, start - self._marked.marks[index][1])  # a turn without any mark has none behind its header
        within = self._marked.after(index)
        cut = self._ended(whole.after(len(whole.marks) - 1), within, header)
        if key is not None and whole.marks[-1][0] == mark:
            self.memory.keep(key, len(within) - cut)
        return self._marked.marks[index][1] + cut

    def _ended(self, alone: str, within: str, header: int = 0) -> int:
        """The end of a turn in `within`, given how it ends where nothing follows."""
        common = _common(alone, within)
        found = [match.end() for match in self.enders.finditer(alone, header) if match.end() <= common]
        if not found and common < min(len(alone), len(within)):
            raise Unclear("the template ends a turn otherwise where another follows")
        return found[-1] if found else max(header, len(alone[:common].rstrip()))

    def _plain_span(self, turn: int) -> Span:
        """Without marks: the whole must begin with what the template writes of its beginning."""
        asked, told = self.render(self.turns[:turn], prompt=True), self.render(self.turns[: turn + 1])
        start = len(asked)
        if not self.text.startswith(asked) or _common(told, self.text) < start:
            raise Unclear("the template changes what it wrote before as a conversation goes on")
        end = start + self._ended(told[start:], self.text[start:])
        if self.turns[turn]["content"].strip() not in self.text[start:end]:
            raise Unclear(f"the template changes what turn {turn + 1} says")
        names = [call["function"]["name"] for call in self.turns[turn].get("tool_calls", ())]
        if not all(name in self.enders.sub("", self.text[start:end]) for name in names):
            raise Unclear(f"the template leaves out what turn {turn + 1} calls")
        return start, end


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _agreed(asked: str, within: str) -> int:
    """Where an answer begins in `within`, given what asks for one. What a template asks with beyond its header, an
    opened or skipped thought, is the answer's own where the template writes the turn without it.
    """
    header = _THOUGHT.sub("", asked)
    for beginning in (asked, header, header.rstrip()):
        if within.startswith(beginning):
            return len(beginning)
    raise Unclear("the template asks for an answer otherwise than it writes one")


def generation_marks(plane: int) -> tuple[str, str]:
    """What `{% generation %}` and `{% endgeneration %}` write."""
    return chr(plane + _BEGINS), chr(plane + _ENDS)


def generated_spans(marked: Marked) -> list[Span]:
    """Characters between the marks of `{% generation %}`. Raises Unclear when they are not in pairs."""
    places = [(mark, place) for mark, place in marked.marks if mark in (_BEGINS, _ENDS)]
    begins, ends = places[::2], places[1::2]
    if [mark for mark, _ in begins] != [_BEGINS] * len(ends) or any(mark != _ENDS for mark, _ in ends):
        raise Unclear("the template's {% generation %} blocks lie in each other, or one is cut")
    return [(start, end) for (_, start), (_, end) in zip(begins, ends, strict=True)]


def loss_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token holds at least one character of a span; both in order."""
    loss_mask, index = [], 0
    for start, end in offsets:
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        loss_mask.append(index < len(spans) and spans[index][0] < end and start < end)
    return loss_mask
