"""Chat templates with the constructs of published ones, without {% generation %} marks.

Each has what its name tells and little more, so that no template of others is copied here.
"""

from __future__ import annotations

# Drops the reasoning of turns before the last question, and writes an empty block after it.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.reasoning_content | default('', true) %}
        {%- if '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] %}
        {%- endif %}
        {{- '<|begin|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role in ('system', 'user', 'tool') %}
        {{- '<|begin|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{% endif %}
"""
# Ends the last answer otherwise, and looks at the messages that follow.
GPT_OSS = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set later = namespace(any=false) %}
        {%- for following in messages[loop.index:] %}
            {%- if following.role == 'assistant' %}{% set later.any = true %}{% endif %}
        {%- endfor %}
        {%- if message.thinking and not later.any %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=' + call.name + '<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
# Ends the text where it does not ask for an answer.
PHI = """\
{% for message in messages %}\
{% if message['role'] in ('system', 'user', 'assistant') %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
# Writes system and tools before the last question, numbers the loop, and asks for nothing.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{% set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for index in range(turns | length) %}
    {%- set message = turns[index] %}
    {%- if message.role == 'user' %}
        {%- set is_last = turns[index + 1:] | selectattr('role', 'equalto', 'user') | list == [] %}
        {%- if is_last and tools %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
        {{- '[INST]' + (system + '\\n\\n' if is_last and system else '') }}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls is defined %}
        {{- '[CALLS]' + (message.tool_calls | map(attribute='function') | list | tojson) }}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content + '[/RESULT]' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""
# Opens a block of reasoning in the prompt, which is in no turn.
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<user>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<assistant>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant><think>\\n' }}{% endif %}
"""
# Asks for an answer at the end of every text.
COMMAND = """\
{%- for message in messages %}
    {{- '<turn><' + message.role + '>' + message.content + '</turn>' }}
{%- endfor -%}
<turn><assistant>"""
# Writes the last answer after the loop, and names in headers.
NAMES = """\
{%- set rest = messages[:-1] if messages[-1].role == 'assistant' else messages %}
{%- for message in rest %}
    {{- '<|' + (message.name or message.role) + '|><|text|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if messages[-1].role == 'assistant' %}
    {{- '<|' + (messages[-1].name or 'assistant') + '|><|text|>' + messages[-1].content }}
    {{- '<|end|>' }}
{%- elif add_generation_prompt %}
    {{- '<|assistant|><|text|>' }}
{%- endif %}
"""
# Writes its own instructions where the first message of a loop begins.
FIRST = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|begin|>system\\nHelp.<|end|>\\n' }}
    {%- endif %}
    {{- '<|begin|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{% endif %}
"""
