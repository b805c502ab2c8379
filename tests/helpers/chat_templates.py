"""Published chat templates, and a tokenizer that has their tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, processors

from eagle3_jax.files.sources import bundled

# As published, without their branches for tools.
TEMPLATES = {
    "SmolLM2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{"
        " '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
        " Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' +"
        " message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{"
        " '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "Llama 3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
        " '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] |"
        " trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{%"
        " endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{"
        " '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "Llama 3.2": (
        """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
    ),
    "Qwen 2.5": (
        """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
    ),
    "Mistral": (
        """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""
    ),
    "Gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not"
        " supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user')"
        " != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate"
        " user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant')"
        " %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{"
        " '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{%"
        " endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    # No published one, but what published ones use: the tag of training, breaks, JSON, blocks on
    # lines of their own.
    "everything": (
        """\
    {% for message in messages %}
        {% if loop.index > 3 %}
            {% break %}
        {% endif %}
        {% generation %}
{{ message | tojson }} {{ {"b": ["<é>"], "a": none} | tojson(indent=2, sort_keys=True) }}
        {% endgeneration %}
    {% endfor %}
{{ pad_token }}{{ sep_token }}{{ image_token }}{{ documents is none }}{{ dict(a=1).a }}
"""
    ),
}
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "pad_token": None,
    "add_bos_token": True,
}


def with_bos() -> Tokenizer:
    """Returns the bundled tokenizer with the templates' tokens; by default it puts ``<s>`` first."""
    tokenizer = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
    tokenizer.add_special_tokens(
        ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>"]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
