"""The loss mask of conversations: the characters of assistant turns, for any chat template, and their tokens.

A template does not report where it writes a response. So the conversation is rendered a second time, with marks around
every content: characters that no text contains. Where both renderings are equal except for the marks, the position of
each content is exact. The template text between two contents is split with two more renderings: of the turns before the
response with the generation prompt, for its start, and of the turns up to the response, for its end.
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
# What generation prompts open a response with, and turns without reasoning leave out: a thought, empty or open. Tags of
# Qwen, DeepSeek, Hunyuan, Seed and Cohere; Gemma 4; Apriel 1.6.
_THOUGHT = re.compile(
    r"(?:<[^<>\s/]*think[^<>\s]*>\s*(?:</?[^<>\s]*think[^<>\s]*>\s*)?"
    r"|<\|channel>thought\s*(?:<channel\|>\s*)?"
    r"|Here are my reasoning steps:\s*)$",
    re.IGNORECASE,
)
_MARKUP_AT_END = re.compile(r"(?:<[^<>\s]{1,60}>|\[/?[A-Z_]{1,40}\])$")
_MAX_CUTS = 4096  # pieces of template whose split is remembered
_MAX_PIECE = 512  # characters of such a piece


class Unclear(Exception):
    """The loss mask cannot be determined, with the reason."""


class Render(Protocol):
    """Renders turns with the template. Raises the errors of the template."""

    def __call__(self, turns: Sequence[Turn], *, prompt: bool = False) -> str: ...


class Refused(Exception):
    """The template raised an error of its own."""


@dataclass(frozen=True)
class Marked:
    """A rendering without its marks, and the marks with their positions in the text, in order."""

    text: str
    marks: tuple[tuple[int, int], ...]

    def index_of(self, mark: int, *, nth: int | None = None) -> int:
        """The index of a mark in `marks`. A call's name may occur more than once; `nth` selects one.

        Raises Unclear when the mark is missing or ambiguous.
        """
        indices = self._indices.get(mark, [])
        part = "the call" if mark % 3 == _CALL else "the content"
        if not indices:
            raise Unclear(f"the template does not write {part} of turn {mark // 3 + 1}")
        if len(indices) > 1 and (nth is None or nth >= len(indices) or mark % 3 != _CALL):
            raise Unclear(f"the template writes {part} of turn {mark // 3 + 1} twice")
        return indices[nth or 0]

    def last_of(self, beginning: "Marked") -> int:
        """The index here of the last mark in `beginning`, a rendering of the first turns alone."""
        beginning_marks = [mark for mark, _ in beginning.marks]
        last_mark = beginning_marks[-1]
        return self.index_of(last_mark, nth=beginning_marks.count(last_mark) - 1)

    def has_once(self, mark: int | None) -> bool:
        return mark is not None and len(self._indices.get(mark, [])) == 1

    @cached_property
    def _indices(self) -> dict[int, list[int]]:
        indices: dict[int, list[int]] = {}
        for index, (mark, _) in enumerate(self.marks):
            indices.setdefault(mark, []).append(index)
        return indices

    def positions(self, mark: int) -> list[int]:
        """The positions of a mark in the text."""
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
    """A rendering split into its text and its marks, which are characters of the plane."""
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
    """A copy of a turn with marks around its content (`both_edges`: else only after it) and after its last call's name.

    Marks are inside the white space at the edges, so that templates trim it as without marks.
    """
    marked_turn = dict(turn)
    first_mark = plane + 3 * index
    content = turn["content"]
    core = content.strip()
    if core:  # an empty content stays empty, as templates test for it
        start = content.index(core)
        leading_space = content[:start]
        trailing_space = content[start + len(core) :]
        open_mark = chr(first_mark + _OPEN) if both_edges else ""
        close_mark = chr(first_mark + _CLOSE)
        marked_turn["content"] = f"{leading_space}{open_mark}{core}{close_mark}{trailing_space}"
    if turn.get("tool_calls"):
        *earlier_calls, last_call = turn["tool_calls"]
        function = last_call["function"]
        name = function["name"]
        marked_name = name + chr(first_mark + _CALL)
        marked_call = {**last_call, "function": {**function, "name": marked_name}}
        # Kimi's templates write the id of a call, which names the function, and nothing else of it.
        if name in (call_id := last_call.get("id") or ""):
            marked_call["id"] = call_id.replace(name, marked_name)
        marked_turn["tool_calls"] = [*earlier_calls, marked_call]
    return marked_turn


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
    # Where pieces of template between two contents were split, in earlier conversations too.
    cuts: dict[tuple[str, ...], int]
    bos: str | None = None

    def __post_init__(self) -> None:
        """Raises Unclear for a conversation of too many turns."""
        if len(self.turns) > MAX_TURNS:
            raise Unclear(
                f"the conversation has {len(self.turns):,} turns, and {MAX_TURNS:,} is the limit"
            )
        self.plane = free_plane(self.turns, self.tools)
        self.text = self.render(self.turns)
        self._marked: Marked | None = None
        self._both_edges = True

    def spans(self, turns: Sequence[int]) -> list[Span]:
        """Characters to train on, of the turns with these numbers. Raises Unclear."""
        # Without a marked rendering, the renderings of the first turns alone must do.
        self._mark()
        try:
            if self._marked and turns and self._prompts_unasked(turns[0]):
                raise Unclear("the template writes a generation prompt where none is asked for")
            spans = [
                self._marked_span(turn) if self._marked else self._plain_span(turn)
                for turn in turns
            ]
        except Refused as error:
            raise Unclear(f"of the first turns alone, {error}") from error

        for (_, previous_end), (start, end) in zip([(0, 0), *spans], spans, strict=False):
            if not previous_end <= start <= end:
                raise Unclear("the template changes the order of turns")
        if spans and turns[-1] == len(self.turns) - 1:
            spans[-1] = self._with_stop(spans[-1])
        return spans

    def _with_stop(self, span: Span) -> Span:
        """The span of the conversation's last turn. Where the template writes no end behind it, the token that would
        begin a user turn is added to the text, and is trained on: GLM's models stop with it (TRL's `glm4moe_training`).
        """
        start, end = span
        if self._marked is None or not self._marked.marks or self.text[end:].strip():
            return span
        last_mark = self._marked.marks[-1][1]
        if self._has_end(self.text[max(start, last_mark) : end]):
            return span
        question = next((turn for turn in self.turns if turn["role"] == "user"), None)
        if question is None:
            return span
        try:
            continued = self._prefix(len(self.turns), prompt=False, following=question)
            following_text = continued.after(continued.last_of(self._marked))
        except (Refused, Unclear):
            return span
        if not following_text.startswith(self.text[last_mark:end]):
            return span
        stop = self._stop_at(following_text, end - last_mark)
        self.text = self.text[:end] + following_text[end - last_mark : stop]
        return start, len(self.text)

    def _has_end(self, template_text: str) -> bool:
        """Whether the template's text behind a turn ends with a special token: not with a tag that closes, such as that
        of a call.
        """
        tokens = [match[0] for match in self.enders.finditer(template_text)]
        return bool(tokens) and (tokens[-1] == "</s>" or not tokens[-1].startswith("</"))

    def _stop_at(self, continuation: str, cut: int) -> int:
        """The end of the special token that follows a turn without an end of its own; `cut` where there is none.

        A BOS token in front of a turn does not end the one before it.
        """
        token = re.compile(rf"\s*(?:{self.enders.pattern})").match(continuation, cut)
        return cut if token is None or token[0].strip() == self.bos else token.end()

    def _mark(self) -> None:
        """Renders the conversation with marks, and keeps the result where only the marks differ."""
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
                self._both_edges = both_edges
                return

    def _prefix(self, count: int, *, prompt: bool, following: Turn | None = None) -> Marked:
        """The rendering of the first turns alone, or with one behind them. Raises Unclear where marks change it."""
        turns = [*self.turns[:count], *([] if following is None else [following])]
        marked = unmarked(
            self.render(_with_marks(turns, self.plane, self._both_edges), prompt=prompt), self.plane
        )
        if marked.text != self.render(turns, prompt=prompt):
            raise Unclear("the template writes the first turns alone differently")
        return marked

    def _marked_span(self, turn: int) -> Span:
        assert self._marked is not None
        start = self._start(turn)
        end = self._end(turn, start)

        # The span must hold the content and the calls that it is for.
        if self.turns[turn]["content"].strip():
            # Some templates omit the content of turns with calls: `index_of` refuses those.
            self._marked.index_of(3 * turn + _CLOSE)
        positions = [
            *self._marked.positions(3 * turn + _OPEN),
            *self._marked.positions(3 * turn + _CLOSE),
        ]
        if self.turns[turn].get("tool_calls"):
            call_index = self._marked.index_of(3 * turn + _CALL, nth=0)
            positions.append(self._marked.marks[call_index][1])
        if not all(start <= position <= end for position in positions):
            raise Unclear(f"turn {turn + 1} is not where the template's generation prompt ends")
        return start, end

    def _remember(self, key: tuple[str, ...], cut: int) -> None:
        """Keeps where a piece of template was split: equal pieces are split equally, without another rendering."""
        if len(self.cuts) < _MAX_CUTS and len(key[-1]) <= _MAX_PIECE:
            self.cuts[key] = cut

    def _start(self, turn: int) -> int:
        """The position after the generation prompt."""
        assert self._marked is not None

        # The template's text since the turn before may have been split before.
        key: tuple[str, ...] | None = None
        previous_mark = None
        if turn and self._both_edges:
            previous_mark = _last_mark(self.turns[turn - 1], turn - 1)
        if previous_mark is not None and self._marked.has_once(previous_mark):
            index = self._marked.index_of(previous_mark)
            key = ("start", self.turns[turn - 1]["role"], self._marked.after(index))
            if key in self.cuts:
                return self._marked.marks[index][1] + self.cuts[key]

        # The turns before, with the generation prompt, end where the response begins.
        try:
            prompt = self._prefix(turn, prompt=True)
            if not prompt.marks:
                return _response_start(prompt.text, self.text)
        except (Refused, Unclear):
            if turn:
                raise
            # There is no turn before it: its content alone is trained on.
            return self._marked.marks[self._marked.index_of(_OPEN)][1]

        # Both renderings have the last mark of the prompt: what follows it is compared.
        index = self._marked.last_of(prompt)
        try:
            cut = _response_start(prompt.after(len(prompt.marks) - 1), self._marked.after(index))
        except Unclear:
            written_start = self._written_start(turn, self._marked.after(index))
            if written_start is None:
                raise
            cut = written_start
        if key is not None and prompt.marks[-1][0] == previous_mark:
            self._remember(key, cut)
        return self._marked.marks[index][1] + cut

    def _end(self, turn: int, start: int) -> int:
        """The position after the last special token of the turn; without one, after the template's text."""
        assert self._marked is not None
        is_last = turn == len(self.turns) - 1

        # The template's text after the turn may have been split before. After the name of a call it
        # is compared without the arguments of the call.
        key: tuple[str, ...] | None = None
        mark = _last_mark(self.turns[turn], turn)
        if mark is not None and self._marked.has_once(mark):
            marked_continuation = self._marked.after(self._marked.index_of(mark))
            template_text = marked_continuation
            if calls := self.turns[turn].get("tool_calls"):
                arguments = calls[-1]["function"]["arguments"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                template_text = marked_continuation.replace(arguments, "\0", 1)
            key = ("last" if is_last else "end", template_text) if self._both_edges else None
            if key in self.cuts:  # counted from the end, as the arguments of calls differ in length
                return self._marked.positions(mark)[0] + len(marked_continuation) - self.cuts[key]

        # The turns up to this one, as a conversation that ends here.
        rendering = self._marked if is_last else self._prefix(turn + 1, prompt=False)
        if not rendering.marks:
            raise Unclear("the template does not write the first turns")
        index = self._marked.last_of(rendering)
        # A turn without any mark has none after its header, in which no end is looked for.
        header_length = max(0, start - self._marked.marks[index][1])
        continuation = self._marked.after(index)
        last_turn_text = rendering.after(len(rendering.marks) - 1)
        try:
            cut = self._turn_end(last_turn_text, continuation, header_length)
        except Unclear:
            written_end = self._written_end(turn, last_turn_text, continuation, header_length)
            if written_end is None:
                raise
            cut = written_end
        # Where the template writes no end, the token that begins the next turn is what the model stops with.
        if not is_last and not self._has_end(continuation[header_length:cut]):
            cut = self._stop_at(continuation, cut)
        if key is not None and rendering.marks[-1][0] == mark:
            self._remember(key, len(continuation) - cut)
        return self._marked.marks[index][1] + cut

    def _generation_prompt(self, turn: int) -> tuple[str, str]:
        """What the template writes after the last content before a turn: where the conversation stops there, and what a
        generation prompt adds. Raises Unclear.
        """
        bare = self._prefix(turn, prompt=False)
        prompt = self._prefix(turn, prompt=True)
        if not prompt.marks or [mark for mark, _ in bare.marks] != [
            mark for mark, _ in prompt.marks
        ]:
            raise Unclear("the template's generation prompt changes the turns before it")
        bare_text = bare.after(len(bare.marks) - 1)
        prompt_text = prompt.after(len(prompt.marks) - 1)
        if not prompt_text.startswith(bare_text):
            raise Unclear("the template's generation prompt changes the turns before it")
        return bare_text, prompt_text[len(bare_text) :]

    def _prompts_unasked(self, turn: int) -> bool:
        """Whether the template ends every conversation with a generation prompt, which would pass for the end of the
        last response. Tried once per template.
        """
        key = ("prompts unasked",)
        question = next((turn for turn in self.turns[:turn] if turn["role"] == "user"), None)
        if question is None:
            return False
        if key not in self.cuts:
            self.cuts[key] = int(self._is_followed_by_prompt(turn, question))
        return bool(self.cuts[key])

    def _is_followed_by_prompt(self, turn: int, question: Turn) -> bool:
        """Whether text after this turn gives way to a user turn, in a template that knows no generation prompt."""
        try:
            bare_text, added_text = self._generation_prompt(turn)
            alone = self._prefix(turn + 1, prompt=False)
            continued = self._prefix(turn + 1, prompt=False, following=question)
        except (Refused, Unclear):
            return False
        if added_text or not bare_text.strip() or not alone.marks:
            return False
        last_text = alone.after(len(alone.marks) - 1)
        try:
            return not continued.after(continued.last_of(alone)).startswith(last_text.rstrip())
        except Unclear:
            return False

    def _written_start(self, turn: int, before_response: str) -> int | None:
        """Where a response begins in the text between two marks, for a template that ends the turn before it in another
        way when a generation prompt follows, or none when it cannot be proved.
        """
        assert self._marked is not None
        try:
            bare_text, added_text = self._generation_prompt(turn)
        except (Refused, Unclear):
            return None

        # The turn before ends equally but for white space, and then the generation prompt stands there once.
        for header in (added_text, _THOUGHT.sub("", added_text)):
            if header.strip() and before_response.count(header) == 1:
                position = before_response.index(header)
                if _without_space(before_response[:position]) == _without_space(bare_text):
                    return position + len(header)

        # Some templates write a response right behind what a tool returned, without a header: the content begins there.
        has_open_mark = self._both_edges and self._marked.has_once(3 * turn + _OPEN)
        if has_open_mark and before_response == bare_text:
            return len(before_response)
        return None

    def _written_end(
        self, turn: int, last_turn_text: str, continuation: str, header_length: int
    ) -> int | None:
        """Where a turn ends in `continuation`, for a template that writes the last turn of a conversation in another
        way; None when it cannot be proved. Arguments as of `_turn_end`.
        """
        # The same token ends the turn in both, and what is before it differs by white space and by what is inserted
        # where the conversation goes on, such as the id of a call.
        ends = list(self.enders.finditer(last_turn_text, header_length))
        last_end = ends[-1] if ends else _MARKUP_AT_END.search(last_turn_text.rstrip())
        if last_end is not None and continuation.count(last_end[0], header_length) == 1:
            position = continuation.index(last_end[0], header_length)
            text_before = _without_space(last_turn_text[: last_end.start()])
            continued_before = _without_space(continuation[:position])
            common_start = _common_length(text_before, continued_before)
            common_end = _common_length(text_before[::-1], continued_before[::-1])
            if common_start + common_end >= len(text_before):
                return position + len(last_end[0])

        # With a generation prompt behind the turn, the text before that prompt is the end of the turn.
        try:
            _, header = self._generation_prompt(turn)
            followed = self._prefix(turn + 1, prompt=True)
            if not followed.marks or not header.strip():
                return None
            followed_text = followed.after(len(followed.marks) - 1)
        except (Refused, Unclear):
            return None
        turn_end = followed_text.removesuffix(header)
        if (
            turn_end == followed_text
            or not turn_end.strip()
            or not continuation.startswith(turn_end)
        ):
            return None
        return max(header_length, len(turn_end.rstrip()))

    def _turn_end(self, last_turn_text: str, continuation: str, header_length: int = 0) -> int:
        """Where a turn ends in `continuation`, its text and all after it.

        `last_turn_text`: the same turn as the last one of a conversation. Only its special tokens after the first
        `header_length` characters end it.
        """
        common_length = _common_length(last_turn_text, continuation)
        ends = [
            match.end()
            for match in self.enders.finditer(last_turn_text, header_length)
            if match.end() <= common_length
        ]
        if ends:
            return ends[-1]
        if common_length < min(len(last_turn_text), len(continuation)):
            raise Unclear("the template ends the last turn differently")
        return max(header_length, len(last_turn_text[:common_length].rstrip()))

    def _plain_span(self, turn: int) -> Span:
        """The span of a turn without marks: the rendering must begin with the rendering of its first turns."""
        prompt_text = self.render(self.turns[:turn], prompt=True)
        turn_text = self.render(self.turns[: turn + 1])
        start = len(prompt_text)
        if not self.text.startswith(prompt_text) or _common_length(turn_text, self.text) < start:
            raise Unclear("the template changes earlier turns when a conversation continues")
        end = start + self._turn_end(turn_text[start:], self.text[start:])

        # Without marks nothing else shows that the span holds the content and the calls.
        if self.turns[turn]["content"].strip() not in self.text[start:end]:
            raise Unclear(f"the template changes the content of turn {turn + 1}")
        names = [call["function"]["name"] for call in self.turns[turn].get("tool_calls", ())]
        if not all(name in self.enders.sub("", self.text[start:end]) for name in names):
            raise Unclear(f"the template does not write the call of turn {turn + 1}")
        return start, end


def _without_space(text: str) -> str:
    return "".join(text.split())


def _common_length(text: str, other_text: str) -> int:
    """The length of the common beginning, by bisection: comparing slices is quicker than characters."""
    if other_text.startswith(text):
        return len(text)
    lower_bound = 0
    upper_bound = min(len(text), len(other_text))
    while lower_bound < upper_bound:
        middle = (lower_bound + upper_bound + 1) // 2
        if text[:middle] == other_text[:middle]:
            lower_bound = middle
        else:
            upper_bound = middle - 1
    return lower_bound


def _response_start(prompt: str, continuation: str) -> int:
    """Where a response begins in `continuation`, which follows the turns before, given the generation prompt.

    Thinking markup at the prompt's end belongs to the response where the template writes the turn without it.
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
    if [mark for mark, _ in positions] != [_BEGINS, _ENDS] * (len(positions) // 2):
        raise Unclear("the template's {% generation %} blocks are nested or incomplete")
    starts = positions[::2]
    ends = positions[1::2]
    return [(start, end) for (_, start), (_, end) in zip(starts, ends, strict=True)]


def loss_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token has at least one character of a span; both in order."""
    mask = []
    index = 0
    for start, end in offsets:
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        mask.append(index < len(spans) and spans[index][0] < end and start < end)
    return mask
