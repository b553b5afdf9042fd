"""Chat templates with the published forms of thoughts and tool calls, each as short as it can be."""

from fastjax.data.template import ChatTemplate

_BEGIN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% set f = call.function %}"
)
_END = (
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking %}<think>\n{% endif %}{% endif %}"
)
_ARGUMENTS = "{% for key, value in f.arguments.items() %}"
_HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
#: Form → the template's text of one call.
_CALLS = {
    "hermes": '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "coder": "\n<tool_call>\n<function={{ f.name }}>\n" + _ARGUMENTS + "<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm": "\n<tool_call>{{ f.name }}\n" + _ARGUMENTS + "<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>",
    "llama": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "mistral": '{{ \'[TOOL_CALLS] [\' if loop.first else \', \' }}{"name": "{{ f.name }}", "arguments": '
    "{{ f.arguments | tojson }}}{{ ']' if loop.last }}",
    "mistral, names first": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "deepseek": "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
    "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}",
    "gemma": "<|tool_call>call:{{ f.name }}{{ '{' }}"
    + _ARGUMENTS
    + "{{ ',' if not loop.first }}{{ key }}:{{ '<|\"|>' + value + '<|\"|>' if value is string else value | tojson }}"
    "{% endfor %}}<tool_call|>",
    "lfm": "{{ '<|tool_call_start|>[' if loop.first else ', ' }}{{ f.name }}("
    + _ARGUMENTS
    + "{{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}{% endfor %}){{ ']<|tool_call_end|>' if loop.last }}",
    "kimi": "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>functions.{{ f.name }}:"
    "{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "{% if loop.last %}<|tool_calls_section_end|>{% endif %}",
}
SOURCES = {form: _BEGIN + call + _END for form, call in _CALLS.items()} | {"harmony": _HARMONY}
"""Form → a template with it."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
"""Special tokens of these templates."""


def template(form):
    """A template, compiled."""
    return ChatTemplate(SOURCES[form], {}, ends=SPECIAL)
