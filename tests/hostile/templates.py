"""Chat templates that would fill the memory or never end, and what comes of each:
`python -m tests.hostile.templates` prints it as JSON, in a process whose memory is bounded."""

import json
import resource

from runtime.errors import InvalidRequest, ModelError
from runtime.messages.requests import Chat
from runtime.text.chat_template import ChatTemplates

NAMESPACE = "{% set ns = namespace(x='x') %}"
LOOP, END = "{% for i in range(60) %}", "{% endfor %}"
MEMORY_BYTES = 512 << 20  # of the process; each template would take gigabytes
BOMBS = {
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format in a variable": "{% set x = '%1000000000d' % 1 %}{{ x }}",
    "a width given apart": "{{ '%*d' % (1000000000, 1) }}",
    "a precision": "{{ '%.1000000000f' % 1 }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "fmt": "{{ '{:1000000000}'.format(1) }}",
    "fmt nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "fmt map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "times": "{{ 'x' * 10**9 }}",
    "times2": "{{ 1000000000 * 'x' }}",
    "list": "{{ [0] * 1000000000 }}",
    "pow": "{{ 10**10**9 }}",
    "square": "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "double": NAMESPACE + LOOP + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "double+": NAMESPACE + LOOP + "{% set ns.x = ns.x + ns.x %}" + END,
    "double list": "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = ns.x + ns.x %}" + END,
    "double set": NAMESPACE + LOOP + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}" + END,
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
    + NAMESPACE
    + LOOP
    + "{% set ns.x = m(ns.x) %}"
    + END,
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "center": "{{ 'x'|center(1000000000) }}",
    "center2": "{{ 'x'.center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "tabs": "{{ '\t\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\ny'|indent(1000000000) }}",
    "indent2": "{{ 'x\ny'|indent(width=1000000000) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "json": "{{ [1]|tojson(indent=1000000000) }}",
    "round": "{{ 1.5|round(1000000000, 'floor') }}",
    "replace": "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "replace2": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "join": "{{ ('y' * 1000000).join(['x'] * 1000000) }}",
    "join2": "{{ (['x'] * 1000000)|join('y' * 1000000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'x' * 1000000}) }}",
    "sum": "{{ (['x' * 1000000] * 1000000)|sum(start='') }}",
    "sumlist": "{{ ([[1] * 1000] * 100000)|sum(start=[]) }}",
    "recurse": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attr": "{{ ''.__class__.__mro__ }}",
}
# what cannot be compiled
NESTED = {
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a sum": "{{ 1 " + "+ 1 " * 20_000 + "}}",
    "length": "{{ 9 }}" * 300_000,
}


def outcome(source: str) -> str:
    """The refusal, or what a render made."""
    try:
        templates = ChatTemplates({"default": source}, {})
    except ModelError as error:
        return f"at start: {error}"
    try:
        return f"made {len(templates.render(Chat([{'role': 'user', 'content': 'hi'}])))} characters"
    except InvalidRequest as error:
        return f"refused: {error}"
    except MemoryError:
        return "took all memory"


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps({name: outcome(source) for name, source in (BOMBS | NESTED).items()}))
