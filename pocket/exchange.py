"""The unit that the corpus is made of: one question and its right answer.

Every kind of conversation is generated as exchanges.  An exchange carries the key that
decides whether it may be trained on or is held out, so that a held-out question can
never slip into training through another door (a word problem, a thinking variant).
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

ALWAYS = "always:"
HELD_OUT_SHARE = 10

_CHOICE = re.compile(r"\(([^()]*)\)")
_SPACES = re.compile(r" {2,}")


@dataclass(frozen=True)
class Exchange:
    """A question, its answer, and what is needed to place and to check it."""

    kind: str
    key: str
    messages: tuple[Message, ...]
    accept: tuple[str, ...] = ()
    thought: str = ""
    tools: tuple[Tool, ...] = ()
    asks_to_think: bool = False
    topic: str = ""


def ask(
    kind: str,
    key: str,
    question: str,
    answer: str,
    *,
    accept: tuple[str, ...] = (),
    thought: str = "",
    topic: str = "",
    asks_to_think: bool = False,
) -> Exchange:
    """Make the common exchange: one user message and one assistant message."""
    reply: Message = {"role": "assistant", "content": answer}
    if asks_to_think:
        reply["reasoning_content"] = thought
    messages: tuple[Message, ...] = ({"role": "user", "content": question}, reply)
    full_key = key if ":" in key else f"{kind}:{key}"
    return Exchange(kind, full_key, messages, accept or (answer,), thought, (), asks_to_think, topic)


def is_held_out(key: str) -> bool:
    """Say on which side of the split a key falls; one key in ten is held out."""
    if key.startswith(ALWAYS):
        return False
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def plain(text: str) -> str:
    """Reduce a question to its words, so that punctuation and case share one key."""
    return " ".join(re.findall(r"\w+", text.lower()))


def expand(pattern: str, rng: random.Random) -> str:
    """Pick one way through a pattern such as `(What|Which) port( do you use|)?`."""
    while (match := _CHOICE.search(pattern)) is not None:
        picked = rng.choice(match.group(1).split("|"))
        pattern = pattern[: match.start()] + picked + pattern[match.end() :]
    return _SPACES.sub(" ", pattern).strip()


def fill(pattern: str, rng: random.Random, **slots: object) -> str:
    """Expand a pattern and then put the slots in, so that content is left untouched."""
    text = expand(pattern, rng)
    for name, value in slots.items():
        text = text.replace("{" + name + "}", str(value))
    return text


_BEFORE = (
    "Please ",
    "please ",
    "Hi, ",
    "Hi! ",
    "Hello, ",
    "Hey, ",
    "Hello! ",
    "OK, ",
    "Now ",
    "Can you help me? ",
    "pocket, ",
    "And now: ",
)
_AFTER = (" Please.", " Thanks!", " please", " Thank you.")


def lower_first(text: str) -> str:
    """Lower the first letter, except in an `I` or an acronym."""
    if len(text) > 1 and text[1].isupper() or text.startswith(("I ", "I'")):
        return text
    return text[:1].lower() + text[1:]


def vary(text: str, rng: random.Random, *, recase: bool = True) -> str:
    """Write a question the way people do: other case, less punctuation, more manners."""
    if rng.random() < 0.15:
        before = rng.choice(_BEFORE)
        text = before + (lower_first(text) if recase else text)
    if rng.random() < 0.06 and text[-1:] in ".?!":
        text += rng.choice(_AFTER)
    if rng.random() < 0.15 and text[-1:] in ".?!":
        text = text[:-1]
    if not recase:
        return text
    roll = rng.random()
    if roll < 0.12:
        return text.lower()
    if roll < 0.2:
        return lower_first(text)
    if roll < 0.22:
        return text.upper()
    return text
