"""Chat templates with tools, which write calls as those of released models do."""

from dataclasses import dataclass

# As Qwen's do: a number by `string`, and an object by `tojson`.
QWEN_XML_TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }} as <tool_call>\n<function=example>\n</function>\n</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>
{%- else %}<|im_start|>{{ m.role }}\n{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "" if loop.first and not m.content else "\n" }}<tool_call>
{{ "<function=" + c.function.name + ">\n" }}
{%- for key, value in c.function.arguments.items() -%}
{{ "<parameter=" + key + ">\n" }}{{ value | tojson if value is mapping else value | string }}{{ "\n</parameter>\n" }}
{%- endfor -%}
{{ "</function>\n</tool_call>" }}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM_TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }} as <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
{%- endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>
{%- else %}<|im_start|>{{ m.role }}\n{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "\n<tool_call>" + c.function.name + "\n" }}
{%- for key, value in c.function.arguments.items() -%}
{{ "<arg_key>" + key + "</arg_key>\n<arg_value>" }}
{{- value if value is string else value | tojson }}{{ "</arg_value>\n" }}
{%- endfor -%}
{{ "</tool_call>" }}
{%- endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MINISTRAL_TEMPLATE = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""
LFM_TEMPLATE = """{%- if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "<|tool_call_start|>[" if loop.first else ", " }}{{ c.function.name }}(
{%- for key, value in c.function.arguments.items() %}{{ ", " if not loop.first else "" }}{{ key }}=
{%- if value is string %}'{{ value }}'{% else %}{{ value | string }}{% endif %}{% endfor %})
{%- if loop.last %}]<|tool_call_end|>{% endif %}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OLMO_TEMPLATE = """{%- if tools %}<|im_start|>system\n<functions>{{ tools | tojson }}</functions><|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ "environment" if m.role == "tool" else m.role }}\n{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "<function_calls>" if loop.first else "\n" }}{{ c.function.name }}(
{%- for key, value in c.function.arguments.items() %}{{ ", " if not loop.first else "" }}{{ key }}=
{{- value | tojson }}{% endfor %})
{%- if loop.last %}</function_calls>{% endif %}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA_TEMPLATE = """{{ bos_token }}{%- macro value_text(value) -%}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is boolean %}{{ "true" if value else "false" }}
{%- elif value is mapping %}{ {%- for k, v in value.items() %}{{ k }}:{{ value_text(v) }}{{
"," if not loop.last }}{% endfor -%} }
{%- elif value is sequence %}[{% for v in value %}{{ value_text(v) }}{{ "," if not loop.last }}{% endfor %}]
{%- else %}{{ value }}{% endif %}
{%- endmacro -%}
{% if tools %}<|turn>system\n{% for t in tools %}<|tool>declaration:{{ t.function.name }}<tool|>{%
endfor %}<turn|>\n{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|tool_response>response:{{ m.name }}{value:{{ value_text(m.content) }}}<tool_response|>
{%- else %}{% if not (loop.index0 and messages[loop.index0 - 1].role == "tool") %}<|turn>{{
"model" if m.role == "assistant" else m.role }}\n{% endif %}
{%- for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{
{%- for k, v in c.function.arguments.items() %}{{ k }}:{{ value_text(v) }}{{ "," if not loop.last }}{% endfor -%}
}<tool_call|>{% endfor %}{{ m.content or "" }}
{%- if m.tool_calls %}{{ "<|tool_response>" if loop.last }}{% else %}<turn|>\n{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}<|turn>model\n{% endif %}"""
FUNCTION_GEMMA_TEMPLATE = (
    GEMMA_TEMPLATE.replace('<|"|>', "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
)
# The header of an answer is its role alone: channel and recipient are the model's to write.
GPT_OSS_TEMPLATE = """<|start|>system<|message|>a model<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {
{%- for t in tools %}type {{ t.function.name }} = (_: any) => any; {% endfor %}}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{
m.content | tojson }}<|end|>
{%- elif m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{
f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def _deepseek(before: str, after: str, end: str, between: str) -> str:
    """As those for DeepSeek's models that ship with servers: their own ones name no tools."""
    return (
        "{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}{% endif %}{% for m in messages %}"
        '{% if m.role == "user" %}<｜User｜>{{ m.content }}'
        '{% elif m.role == "tool" %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>'
        "{% else %}{% if messages[loop.index0 - 1].role == 'user' %}<｜Assistant｜>{% endif %}{{ m.content or '' }}"
        '{% for c in m.tool_calls or [] %}{{ "<｜tool▁calls▁begin｜>" if loop.first else "'
        + between
        + '" }}{{ "'
        + before
        + '" + c.function.name + "'
        + after
        + '" + c.function.arguments + "'
        + end
        + '" }}{{ "<｜tool▁calls▁end｜>" if loop.last }}{% endfor %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}'
        '{% if add_generation_prompt and messages[-1].role != "tool" %}<｜Assistant｜>{% endif %}'
    )


DEEPSEEK_TEMPLATE = _deepseek(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\\n```json\\n",
    "\\n```<｜tool▁call▁end｜>",
    "\\n",
)
DEEPSEEK_31_TEMPLATE = _deepseek(
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ""
)
KIMI_TEMPLATE = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ "system" if m.role == "tool" else m.role }}|>{{ m.name or m.role }}<|im_middle|>
{%- if m.role == "tool" %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "<|tool_calls_section_begin|>" if loop.first }}<|tool_call_begin|>{{
c.id }}<|tool_call_argument_begin|>
{{- c.function.arguments | tojson }}<|tool_call_end|>{{
"<|tool_calls_section_end|>" if loop.last }}{% endfor %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
MINIMAX_TEMPLATE = """]~!b[]~b]system\na model{% if tools %}\n<tools>{{ tools | tojson }}</tools>{% endif %}[e~[\n
{%- for m in messages %}
{%- if m.role == "tool" %}]~b]tool\n<response>{{ m.content }}</response>[e~[\n
{%- else %}]~b]{{ "ai" if m.role == "assistant" else m.role }}\n{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "\n<minimax:tool_call>\n" if loop.first -}}
<invoke name="{{ c.function.name }}">{{ "\n" }}
{%- for k, v in c.function.arguments.items() -%}
<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>{{ "\n" }}
{%- endfor %}</invoke>{{ "\n</minimax:tool_call>" if loop.last else "\n" }}{% endfor %}[e~[\n
{%- endif %}{% endfor %}{% if add_generation_prompt %}]~b]ai\n{% endif %}"""
MISTRAL_32_TEMPLATE = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}[TOOL_RESULTS][CALL_ID]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif -%}
[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""
SEED_TEMPLATE = QWEN_XML_TEMPLATE.replace("tool_call>", "seed:tool_call>")
NEMOTRON_TEMPLATE = """{% if tools %}<SPECIAL_10>System\n<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>\n{%
endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<SPECIAL_11>User\n<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>\n
{%- else %}<SPECIAL_11>{{ m.role }}\n{{ m.content or "" }}
{%- for c in m.tool_calls or [] %}{{ "<TOOLCALL>[" if loop.first }}{"name": "{{
c.function.name }}", "arguments": {{ c.function.arguments | tojson -}} }
{{- "]</TOOLCALL>" if loop.last else ", " }}{% endfor %}\n<SPECIAL_12>\n{% endif %}{% endfor %}
{%- if add_generation_prompt %}<SPECIAL_11>assistant\n{% endif %}"""
PYTHONIC_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}\n{%
if tools and loop.first %}{{ tools | tojson }}\n{% endif %}
{%- if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ", " if not loop.last }}{% endfor %})
{{- ", " if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

# As the encoding that DeepSeek publishes as a program for V3.2, without thoughts.
DSML_TEMPLATE = """{{ bos_token }}{% if tools %}## Tools{{ "\\n\\n" }}<functions>
{%- for t in tools %}{{ "\\n" + t.function | tojson }}{% endfor %}{{ "\\n" }}</functions>{{ "\\n" }}{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}<｜User｜>{{ m.content }}<｜Assistant｜></think>
{%- elif m.role == "tool" %}
{{- "\\n\\n<function_results>" if messages[loop.index0 - 1].role != "tool" }}
{{- "\\n<result>" + m.content + "</result>" }}
{{- "\\n</function_results>\\n\\n</think>" if loop.last or messages[loop.index0 + 1].role != "tool" }}
{%- else %}{{ m.content or "" }}
{%- if m.tool_calls %}{{ "\\n\\n<｜DSML｜function_calls>\\n" }}
{%- for c in m.tool_calls %}<｜DSML｜invoke name="{{ c.function.name }}">{{ "\\n" }}
{%- for k, v in c.function.arguments.items() -%}
<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">
{{- v if v is string else v | tojson }}</｜DSML｜parameter>{{ "\\n" }}
{%- endfor %}{{ "\\n" if not c.function.arguments }}</｜DSML｜invoke>{{ "\\n" }}
{%- endfor %}</｜DSML｜function_calls>{% endif %}<｜end▁of▁sentence｜>
{%- endif %}{% endfor %}"""
DSML_4_TEMPLATE = DSML_TEMPLATE.replace("function_calls>", "tool_calls>")
# As Command R7B's and Command A's: ids are numbers that the template counts.
COHERE_TEMPLATE = """{{ bos_token }}{% if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{
tools | tojson }}<|END_OF_TURN_TOKEN|>{% endif %}
{%- set count = namespace(calls=0, results=0) %}
{%- for m in messages %}
{%- if m.role == "user" %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>
{%- elif m.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}
{{- "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\\n" }}
{%- endif %}
{{- '    {"tool_call_id": "' ~ count.results ~ '", "results": {"0": ' ~ m.content | tojson }}}, "is_error": null}
{%- set count.results = count.results + 1 %}
{{- "\\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>" if loop.last or messages[loop.index0 + 1].role != "tool"
else ",\\n" }}
{%- else %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
{%- if m.tool_calls %}{{ "<|START_ACTION|>[\\n" }}
{%- for c in m.tool_calls %}
{{- '    {"tool_call_id": "' ~ count.calls ~ '", "tool_name": "' ~ c.function.name ~ '", "parameters": ' }}
{{- c.function.arguments | tojson }}}{{ "\\n" if loop.last else ",\\n" }}
{%- set count.calls = count.calls + 1 %}{% endfor %}]<|END_ACTION|>
{%- else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""


@dataclass(frozen=True)
class OtherForm:
    """A form that has tokens of its own. `end`: what ends an answer that calls a tool; `call`: of the tool `add`."""

    template: str
    call: str
    end: str
    marks: tuple[str, ...]


_DEEPSEEK_MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
_DEEPSEEK_MARKS += (
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
)
_DSML_CALL = """\n\n<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">%s</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="false">%s</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
_DSML_MARKS = ("｜DSML｜", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_COHERE_MARKS = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>")
_COHERE_MARKS += ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
_KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
)
_KIMI_MARKS += ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_GEMMA_MARKS = ("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>")
OTHER_FORMS = {
    "Gemma 4": OtherForm(
        GEMMA_TEMPLATE,
        "<|tool_call>call:add{a:%s,b:%s}<tool_call|>",
        "<|tool_response>",
        (*_GEMMA_MARKS, "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "FunctionGemma": OtherForm(
        FUNCTION_GEMMA_TEMPLATE,
        "<start_function_call>call:add{a:%s,b:%s}<end_function_call>",
        "<|tool_response>",
        (*_GEMMA_MARKS, "<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gpt-oss": OtherForm(
        GPT_OSS_TEMPLATE,
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": %s, "b": %s}',
        "<|call|>",
        (
            "<|start|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
        ),
    ),
    "DeepSeek V3 and R1": OtherForm(
        DEEPSEEK_TEMPLATE,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": %s, "b": %s}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜end▁of▁sentence｜>",
        _DEEPSEEK_MARKS,
    ),
    "DeepSeek V3.1": OtherForm(
        DEEPSEEK_31_TEMPLATE,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": %s, "b": %s}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜end▁of▁sentence｜>",
        _DEEPSEEK_MARKS,
    ),
    "DeepSeek V3.2": OtherForm(
        DSML_TEMPLATE, _DSML_CALL, "<｜end▁of▁sentence｜>", _DSML_MARKS
    ),
    "DeepSeek V4": OtherForm(
        DSML_4_TEMPLATE,
        _DSML_CALL.replace("function_calls", "tool_calls"),
        "<｜end▁of▁sentence｜>",
        _DSML_MARKS,
    ),
    "Cohere Command R7B and A": OtherForm(
        COHERE_TEMPLATE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": %s, "b": %s}}\n]'
        "<|END_ACTION|>",
        "<|END_OF_TURN_TOKEN|>",
        _COHERE_MARKS,
    ),
    "Kimi K2": OtherForm(
        KIMI_TEMPLATE,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": %s, "b": %s}<|tool_call_end|><|tool_calls_section_end|>',
        "<|im_end|>",
        _KIMI_MARKS,
    ),
    "MiniMax M2": OtherForm(
        MINIMAX_TEMPLATE,
        '\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">%s</parameter>\n<parameter name="b">%s'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "[e~[",
        ("[e~[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "Mistral Small 3.2": OtherForm(
        MISTRAL_32_TEMPLATE,
        '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": %s, "b": %s}',
        "</s>",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]", "</s>"),
    ),
    "GLM 4.5 and later": OtherForm(
        GLM_TEMPLATE,
        "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n<arg_key>b</arg_key>\n<arg_value>%s"
        "</arg_value>\n</tool_call>",
        "<|observation|>",
        (
            "<|observation|>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    "Nemotron Nano 2": OtherForm(
        NEMOTRON_TEMPLATE,
        '<TOOLCALL>[{"name": "add", "arguments": {"a": %s, "b": %s}}]</TOOLCALL>',
        "<SPECIAL_12>",
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    "Seed-OSS": OtherForm(
        SEED_TEMPLATE,
        "<seed:tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n<parameter=b>\n%s\n</parameter>\n"
        "</function>\n</seed:tool_call>",
        "<|im_end|>",
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "Llama 3.2 with calls as in Python": OtherForm(
        PYTHONIC_TEMPLATE, "[add(a=%s, b=%s)]", "<|im_end|>", ()
    ),
}
