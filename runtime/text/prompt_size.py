"""How long a prompt is before it is tokenized."""

from runtime.json_value import chars_within
from runtime.messages.requests import Chat, Embeds, Infill, Pair, Prompt, Text, Tokens


def num_chars(prompt: Prompt, enough: int) -> int:
    """Characters of a prompt (each token id counts as one), or some number above `enough` when there are
    more."""
    match prompt:
        case Tokens(ids=ids):
            return len(ids)
        case Embeds():
            return enough + 1
        case Text(text=text):
            return len(text)
        case Pair(text=text, second=second):
            return len(text) + len(second)
        case Infill(prefix=prefix, suffix=suffix):
            return len(prefix) + len(suffix)
        case Chat():
            return chars_within([prompt.messages, prompt.tools, prompt.template_args], enough)
