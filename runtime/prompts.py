"""What a client may give as a prompt, before it is tokens. Part of the messages (messages.py)."""

from typing import Any

from msgspec import Struct


class Text(Struct, frozen=True, tag=True):
    """A prompt as text. `add_special` adds what the tokenizer adds to a fresh text (a BOS token, mostly)."""

    text: str
    add_special: bool = True


class Tokens(Struct, frozen=True, tag=True):
    """A prompt as token ids."""

    ids: list[int]


class Chat(Struct, frozen=True, tag=True):
    """A conversation for the chat template: messages, tools and the template's own variables."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = {}
    continue_final: bool = False  # the last message is the beginning of the answer


class Infill(Struct, frozen=True, tag=True):
    """What stands before and after the text that is wanted, for the model's fill-in-the-middle format."""

    prefix: str
    suffix: str


class Pair(Struct, frozen=True, tag=True):
    """Two texts that are read apart: a model judges how they go together, or goes on from both."""

    text: str
    second: str


class Embeds(Struct, tag=True):
    """A prompt as embeddings, one row of numbers for each token. As JSON they are many times their size, so the tokenizer
    puts what it made of them in their place."""

    rows: Any  # a float32 array [tokens, hidden], anything that makes one, or each row as JSON (msgspec.Raw)
    ids: list[int] | None = None  # the tokens that they stand for, where there are any
