"""Built-in chat templates by name, for models that come without one (--chat-template NAME).

Written from the prompt formats that the models' authors publish; the markers are those of the models' own
tokenizers.
"""

from msgspec import Struct

from runtime.errors import OptionsError
from runtime.regular_file import read_text
from runtime.text.conversation_template import read_conversation

MAX_TEMPLATE_BYTES = 1 << 20
_SYSTEM_FIRST = """\
{%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' %}
{%- set turns = messages[1:] if messages and messages[0]['role'] == 'system' else messages %}
{%- for turn in turns %}
    {%- if turn['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('this template knows user and assistant, and system as the first message; not '
            + turn['role']) }}
    {%- endif %}
{%- endfor %}
"""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN = (
    """\
{%- if messages and messages[0]['role'] != 'system' %}{{
    '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
"""
    + CHATML
)

LLAMA_2 = (
    _SYSTEM_FIRST
    + """\
{%- for turn in turns %}
    {%- if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' }}
        {%- if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}
        {{- turn['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + turn['content'].strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
)

LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'].strip() + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = (
    _SYSTEM_FIRST
    + """\
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn['role'] == 'user' %}
        {{- '[INST] ' }}
        {%- if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}
        {{- turn['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + turn['content'].strip() + eos_token }}
    {%- endif %}
{%- endfor %}"""
)

VICUNA = (
    _SYSTEM_FIRST
    + """\
{{- system or "A chat between a curious user and an artificial intelligence assistant. \
The assistant gives helpful, detailed, and polite answers to the user's questions." }}
{%- for turn in turns %}
    {{- ' USER: ' + turn['content'] if turn['role'] == 'user'
        else ' ASSISTANT: ' + turn['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""
)

ALPACA = (
    _SYSTEM_FIRST
    + """\
{{- system or 'Below is an instruction that describes a task. \
Write a response that appropriately completes the request.' }}
{%- for turn in turns %}
    {{- '\\n\\n### Instruction:\\n' if turn['role'] == 'user' else '\\n\\n### Response:\\n' }}
    {{- turn['content'] + ('' if turn['role'] == 'user' else eos_token) }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}"""
)

GEMMA = (
    _SYSTEM_FIRST
    + """\
{{- bos_token }}
{%- for turn in turns %}
    {{- '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else 'user') + '\\n' }}
    {%- if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}
    {{- turn['content'].strip() + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
)

ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

PHI_3 = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

DEEPSEEK = (
    _SYSTEM_FIRST
    + """\
{{- bos_token + (system + '\\n\\n' if system else '') }}
{%- for turn in turns %}
    {{- 'User: ' + turn['content'] + '\\n\\n' if turn['role'] == 'user'
        else 'Assistant: ' + turn['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
)

TEMPLATES = {
    "alpaca": ALPACA,
    "chatml": CHATML,
    "deepseek": DEEPSEEK,
    "gemma-it": GEMMA,
    "llama-2": LLAMA_2,
    "llama-2-chat": LLAMA_2,
    "llama-3": LLAMA_3,
    "llama-3-instruct": LLAMA_3,
    "mistral": MISTRAL,
    "phi-3": PHI_3,
    "qwen": QWEN,
    "vicuna": VICUNA,
    "vicuna_v1.1": VICUNA,
    "zephyr": ZEPHYR,
}


class TemplateSources(Struct, frozen=True):
    """Chat templates as Jinja, by name, and texts that end an answer to any of them."""

    by_name: dict[str, str]
    stops: tuple[str, ...] = ()


def template_sources(sources: dict[str, str], choice: str, name: str | None) -> TemplateSources:
    """Chat templates by name: of `sources`, the tokenizer's own, all or the one called `name`; or the one
    that --chat-template names, `choice`. Raises OptionsError."""
    if name is not None:
        if name not in sources:
            raise OptionsError(
                [
                    f"--hf-chat-template-name {name}: the tokenizer has "
                    f"{', '.join(sorted(sources)) or 'no templates'}"
                ]
            )
        sources = {"default": sources[name]}
    if choice in TEMPLATES:
        return TemplateSources({"default": TEMPLATES[choice]})
    if choice == "auto":
        return TemplateSources(sources)
    source, stops = read_conversation(choice, _read_template(choice))
    return TemplateSources({"default": source}, stops)


def _read_template(path: str) -> str:
    try:
        return read_text(path, MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(
            [
                f"--chat-template {path} is none of {', '.join(TEMPLATES)}, and cannot be read as a file "
                f"({error}); "
                "name one of these, a Jinja file or a JSON file"
            ]
        ) from None
