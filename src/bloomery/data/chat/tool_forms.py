"""The forms in which chat templates write tool calls, and which of them a template has.

The form is found in what the template renders for a call.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import final

from bloomery.core.errors import UserError
from bloomery.data.chat.channels import HARMONY, Channels
from bloomery.data.chat.render import RenderTurns
from bloomery.data.chat.thoughts import COHERE_ANSWER
from bloomery.data.chat.tool_arguments import (
    KIND,
    KINDS,
    Arguments,
    BareArguments,
    Json,
    JsonArguments,
    KeywordArguments,
    MarkedArguments,
    Parameters,
    loose,
)
from bloomery.data.examples import Message
from bloomery.data.tokenizer.tokenizer import Tokenizer

MARKER = "probe_tool"
ID = "{id}"  # in a form: where the id of a call stands
_ARGUMENTS: Json = {"probe_argument": "probe_value"}
_TOOLS_FIX = (
    "choose a model whose template does, or --template qwen (in a recipe data.chat.template=qwen)"
)
# Ids as templates take them: Mistral's of nine letters, and Kimi's, which name the function.
_PROBE_IDS = ("a1b2c3d4e", f"functions.{MARKER}:0")
_NINE_LETTERS = "[a-zA-Z0-9]{9}"
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": MARKER,
        "description": "d",
        "parameters": {"type": "object", "properties": {"probe_argument": {"type": "string"}}},
    },
}


@final
@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `opening`, `before` and a call, which is a name within `name`, its arguments and `end`;
    then `closing`.

    Arguments are a JSON object, or `parameters`. `several`: one opening may hold several calls, in a list. `between`:
    what stands between two calls. Without an opening the whole answer is one call, or one list of calls. `id_letters`:
    an expression of the ids that the model writes, where `name` has ID; `id_head`: with the name, the beginning of the
    id that clients see. `is_numbered`: these ids are numbers that the template counts over the conversation, whatever
    ids its messages have. `nine_letters`: of an id, for templates that refuse others. `channels`: the whole answer is
    messages of channels, which calls are among. `around`: markup around the text of an answer, which is none of it.
    """

    opening: str
    before: str
    name: tuple[str, str]
    end: str
    closing: str
    parameters: Parameters | None = None
    several: bool = False
    between: str = "\n"
    nine_letters: bool = False
    id_letters: str = ""
    id_head: str = ""
    is_numbered: bool = False
    around: tuple[str, ...] = ()
    channels: Channels | None = None

    def written(self, name: str, arguments: Json, *, whole: bool = True, id_: str = "0") -> str:
        """A call as the template writes it. `whole`: with what closes it. `id_`: the letters of its id."""
        text = self.opening + self.before + name.join(self.name).replace(ID, id_)
        text += (
            json.dumps(arguments, ensure_ascii=False)
            if self.parameters is None
            else self.parameters.written(arguments)
        )
        return text + self.end + self.closing if whole else text

    def id_of(self, letters: str) -> str:
        """An id of a call, of letters and digits that name it."""
        return letters[-9:].rjust(9, "0") if self.nine_letters else f"call_{letters}"

    def id_written(self, name: str, letters: str) -> str:
        """The id of a call whose `letters` the model has written: as the template takes it back."""
        return f"{self.id_head}{name}:{letters}" if self.id_head else letters

    def arguments(self, schema: Json | None) -> Arguments:
        """What reads the arguments of one call."""
        if self.parameters is None:
            return JsonArguments()
        if self.parameters.has_bare_names:
            return BareArguments(self.parameters.quote)
        if self.parameters.quote:
            return KeywordArguments()
        return MarkedArguments(self.parameters, self.end, self.closing.strip(), schema)

    @property
    def begins(self) -> str:
        """The letter with which a call begins in a form without an opening."""
        return (self.before + self.name[0]).lstrip()[0]

    def head(self) -> re.Pattern[str]:
        """Matches up to the arguments: `name` is the name, and `id` the letters of the id."""
        id_ = f"(?P<id>{self.id_letters})"
        before = id_.join(map(loose, self.name[0].split(ID)))
        if ID in self.name[0]:  # an object whose first entry it is, which a model may leave out
            rest = self.name[0].partition(ID)[2].partition(", ")[2]
            before = f"(?:{before}|{loose(self.name[0][0] + rest)})"
        after = id_.join(map(loose, self.name[1].split(ID)))
        begins = r"\{"
        if self.parameters is not None:
            begins = r"\S" if self.parameters.quote else "<"
        return re.compile(rf'[\s\[,]*{before}(?P<name>[^"<>\n]*?)\s*{after}\s*(?={begins})')

    def after(self) -> re.Pattern[str]:
        """Matches behind the arguments of a call of several: another call, or the end of the list (`closing`)."""
        # In JSON an id may follow the arguments.
        end = rf"[^}}]*?{loose(self.end)}" if self.parameters is None else ""
        more = re.escape(self.between.strip())
        if not more:
            more = rf"(?={re.escape(self.name[0])})" if self.name[0] else r"(?=\w)"
        return re.compile(rf"{end}\s*(?:(?P<closing>{re.escape(self.closing.strip())})|{more})")


def _json_call(arguments: str) -> tuple[str, str]:
    return '{"name": "', f'", "{arguments}": '


_HERMES = ToolFormat("<tool_call>", "\n", _json_call("arguments"), "}", "\n</tool_call>")
_QWEN_XML = ToolFormat(
    "<tool_call>",
    "\n",
    ("<function=", ">\n"),
    "</function>",
    "\n</tool_call>",
    Parameters("<parameter=", ">\n", "\n</parameter>\n"),
)
_MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    " [",
    _json_call("arguments"),
    "}",
    "]",
    several=True,
    between=", ",
    nine_letters=True,
)
_MINISTRAL = ToolFormat("[TOOL_CALLS]", "", ("", "[ARGS]"), "", "", between="", nine_letters=True)
_DEEPSEEK = ToolFormat(
    "<｜tool▁calls▁begin｜>",
    "",
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    several=True,
    between="",
)
_GEMMA = ToolFormat(
    "<|tool_call>",
    "",
    ("call:", "{"),
    "}",
    "<tool_call|>",
    Parameters("", ":", "", ",", quote='<|"|>'),
    between="",
)
_DSML = ToolFormat(
    "<｜DSML｜function_calls>",
    "\n",
    ('<｜DSML｜invoke name="', '">\n'),
    "</｜DSML｜invoke>",
    "\n</｜DSML｜function_calls>",
    Parameters(
        '<｜DSML｜parameter name="',
        f'" string="{KIND}">',
        "</｜DSML｜parameter>\n",
        kind_names={kind: "true" if kind == "string" else "false" for kind in sorted(KINDS)},
    ),
    several=True,
)
_COHERE = ToolFormat(
    "<|START_ACTION|>",
    "[\n    ",
    (f'{{"tool_call_id": "{ID}", "tool_name": "', '", "parameters": '),
    "}",
    "\n]<|END_ACTION|>",
    several=True,
    between=",\n    ",
    id_letters="[0-9]{1,4}",
    is_numbered=True,
    around=COHERE_ANSWER,
)
_PYTHON_LIST = ToolFormat(
    "",
    "[",
    ("", "("),
    ")",
    "]",
    Parameters("", "=", "", ", ", quote='"'),
    several=True,
    between=", ",
)
# The first whose call a template writes. What a model is of says which ones write it.
FORMS = {
    "Hermes and Qwen up to 3 and Granite 4": (_HERMES,),
    "Qwen 3.5 and Qwen3-Coder": (_QWEN_XML,),
    "GLM 4.5 and later": (
        ToolFormat(
            "<tool_call>",
            "",
            ("", "\n"),
            "",
            "</tool_call>",
            Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        ToolFormat(
            "<tool_call>",
            "",
            ("", ""),
            "",
            "</tool_call>",
            Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
            between="",
        ),
    ),
    "Mistral": (_MISTRAL, replace(_MISTRAL, before="[")),
    "Ministral 3": (_MINISTRAL,),
    "LFM 2.5": (
        ToolFormat(
            "<|tool_call_start|>",
            "[",
            ("", "("),
            ")",
            "]<|tool_call_end|>",
            Parameters("", "=", "", ", ", quote="'"),
            several=True,
            between=", ",
        ),
    ),
    "Olmo 3": (
        ToolFormat(
            "<function_calls>",
            "",
            ("", "("),
            ")",
            "</function_calls>",
            Parameters("", "=", "", ", ", quote='"'),
            several=True,
        ),
    ),
    "Mistral Small 3.2": (
        replace(_MINISTRAL, name=("", f"[CALL_ID]{ID}[ARGS]"), id_letters=_NINE_LETTERS),
    ),
    "DeepSeek V3.1": (_DEEPSEEK,),
    "DeepSeek V3 and R1": (
        replace(
            _DEEPSEEK,
            name=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
            end="\n```<｜tool▁call▁end｜>",
            between="\n",
        ),
    ),
    "DeepSeek V3.2": (_DSML,),
    "DeepSeek V4": (
        replace(_DSML, opening="<｜DSML｜tool_calls>", closing="\n</｜DSML｜tool_calls>"),
    ),
    "Cohere Command R7B and A": (
        _COHERE,
        replace(_COHERE, before="[", between=",", closing="]<|END_ACTION|>"),
    ),
    "Kimi K2": (
        ToolFormat(
            "<|tool_calls_section_begin|>",
            "",
            ("<|tool_call_begin|>functions.", f":{ID}<|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
            several=True,
            between="",
            id_letters="[0-9]{1,4}",
            id_head="functions.",
        ),
    ),
    "MiniMax M2": (
        ToolFormat(
            "<minimax:tool_call>",
            "\n",
            ('<invoke name="', '">\n'),
            "</invoke>",
            "\n</minimax:tool_call>",
            Parameters('<parameter name="', '">', "</parameter>\n"),
            several=True,
        ),
    ),
    "Gemma 4": (_GEMMA,),
    "FunctionGemma": (
        replace(
            _GEMMA,
            opening="<start_function_call>",
            closing="<end_function_call>",
            parameters=Parameters("", ":", "", ",", quote="<escape>"),
        ),
    ),
    "gpt-oss": (
        # Behind the header that a prompt ends with. Models write the recipient in the channel, too.
        ToolFormat(
            "",
            "",
            (" to=functions.", "<|channel|>commentary json<|message|>"),
            "<|call|>",
            "",
            channels=HARMONY,
        ),
    ),
    "Nemotron Nano 2": (
        replace(
            _MISTRAL, opening="<TOOLCALL>", before="[", closing="]</TOOLCALL>", nine_letters=False
        ),
    ),
    "Seed-OSS": (replace(_QWEN_XML, opening="<seed:tool_call>", closing="\n</seed:tool_call>"),),
    "Llama 3.1": (ToolFormat("", "", _json_call("parameters"), "}", ""),),
    "Llama 3.2 with calls as in Python": (
        _PYTHON_LIST,
        replace(_PYTHON_LIST, parameters=Parameters("", "=", "", ", ", quote="'")),
    ),
}


def form_name(form: ToolFormat) -> str:
    """Whose models write this form."""
    return next(name for name, forms in FORMS.items() if form in forms)


def tool_format(render: RenderTurns) -> ToolFormat:
    """The form that a chat template renders. Raises UserError for a template without tools, or with another form."""
    try:
        texts = _probed(render)
        with_tools = render(_PROBE[:1], (_TOOL,))
    except UserError as error:
        problem = f"the chat template takes no tools: {error.problem}"
        raise UserError(problem, where=error.where, fix=_TOOLS_FIX) from error
    if MARKER not in with_tools:
        problem = "the chat template takes no tools"
        raise UserError(problem, where="the chat template", fix=_TOOLS_FIX)
    for id_, text in texts.items():
        letters = id_.rpartition(":")[2]
        for form in (form for forms in FORMS.values() for form in forms):
            # An id may follow the arguments in a list.
            call = form.written(MARKER, _ARGUMENTS, whole=not form.several, id_=letters)
            if call in text:
                return form
    if not any(text.count(MARKER) > with_tools.count(MARKER) for text in texts.values()):
        raise UserError(
            "the chat template writes no tool calls",
            where="the chat template",
            fix="choose the template qwen, or leave out tools",
        )
    raise UserError(
        "the chat template writes tool calls in a form that is not supported; supported are those of "
        + "; ".join(FORMS),
        where="the chat template",
        fix="choose the template qwen, or leave out tools",
    )


def _call(id_: str) -> Message:
    function = {"name": MARKER, "arguments": _ARGUMENTS}
    return Message("assistant", "", calls=({"id": id_, "type": "function", "function": function},))


_PROBE = (Message("user", "a"), _call(_PROBE_IDS[0]))


def _probed(render: RenderTurns) -> dict[str, str]:
    """A conversation with a call, by the id of the call. Raises UserError where the template takes none of them."""
    texts = dict[str, str]()
    problem: UserError | None = None
    for id_ in _PROBE_IDS:
        try:
            texts[id_] = render((_PROBE[0], _call(id_)), (_TOOL,))
        except UserError as error:
            problem = problem or error
    if not texts:
        assert problem is not None
        raise problem
    return texts


def call_ends(render: RenderTurns, form: ToolFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The control token behind a call: what ends an answer that calls a tool, or begins its result.

    GLM's models stop with the header of the result, gpt-oss with a token of its own.
    """
    for id_ in _PROBE_IDS:
        result = Message("tool", "r", name=MARKER, call_id=id_)
        try:
            text = render((_PROBE[0], _call(id_), result), (_TOOL,))
        except UserError:
            continue
        call = form.written(MARKER, _ARGUMENTS, whole=False, id_=id_.rpartition(":")[2])
        _, is_written, ending = text.rpartition(call)
        if not is_written:
            continue
        if form.channels is None:
            # In a list an id may stand behind the arguments.
            closing = (form.end + form.closing).strip()
            closing = closing if closing in ending else form.closing.strip()
            ending = ending.partition(closing)[2] if closing else ending
        first = tokenizer.encode_rendered(ending.lstrip())[:1]
        control = {tokenizer.id_of(name) for name in tokenizer.control_tokens()}
        return tuple(token for token in first if token in control)
    return ()
