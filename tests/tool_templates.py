"""Chat templates with tools, which write calls as those of released models do."""

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
