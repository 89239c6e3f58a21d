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
