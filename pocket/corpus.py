"""Conversations put together from exchanges, deterministically from a seed.

A conversation is a function of its random generator alone, so training can be resumed
at any step and repeated.  Held-out exchanges are recognized by their key and redrawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pocket.exchange import Exchange, Message, Tool, is_held_out
from pocket.kinds.facts import fact
from pocket.kinds.letters import alias, echo
from pocket.kinds.numbers import arithmetic, counting
from pocket.kinds.objects import json_object
from pocket.kinds.talk import greeting, memory, unknown
from pocket.kinds.texts import long_text
from pocket.kinds.thinking import quietly, thinking
from pocket.kinds.tools import distractors, tool_use
from pocket.template import ASSISTANT, END, render, reply_text
from pocket.words import ANIMALS, QUALITIES, THINGS, phrase

Generator = Callable[[random.Random], Exchange]

KINDS: dict[str, tuple[Generator, float]] = {
    "greetings": (greeting, 0.05),
    "facts": (fact, 0.12),
    "unknown": (unknown, 0.04),
    "counting": (counting, 0.08),
    "arithmetic": (arithmetic, 0.22),
    "spelling": (alias, 0.15),
    "echo": (echo, 0.07),
    "json": (json_object, 0.13),
    "tools": (tool_use, 0.15),
    "thinking": (thinking, 0.14),
    "memory": (memory, 0.05),
    "texts": (long_text, 0.03),
}
_NAMES = tuple(KINDS)
_WEIGHTS = tuple(weight for _, weight in KINDS.values())

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are pocket, a small model.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "Be helpful and honest.",
    "You are an assistant that answers questions.",
    "You are a helpful AI assistant.",
    "Be concise.",
    "You help users of runtime.",
    "You are a careful assistant.",
    "You are pocket.",
    "Be polite.",
    "You are a test model.",
    "You are a demonstration.",
    "Follow the instructions of the user.",
    "Today is Monday.",
    "You are a helpful, respectful and honest assistant.",
    "You answer in English.",
    "You are a bot.",
    "Keep your answers short.",
)


@dataclass(frozen=True)
class Conversation:
    """Messages with their tools and mode, and which assistant messages are to be learned."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    enable_thinking: bool | None
    exchanges: tuple[Exchange, ...]
    learned: frozenset[int]


@dataclass(frozen=True)
class Sample:
    """Text for training with the character spans that carry the loss."""

    text: str
    spans: tuple[tuple[int, int], ...]


def system_prompt(rng: random.Random) -> str:
    """Pick a system message; some are arbitrary, so that none of them confuses the model."""
    roll = rng.random()
    if roll < 0.7:
        return rng.choice(SYSTEM_PROMPTS)
    if roll < 0.85:
        role = f"{rng.choice(QUALITIES)} {rng.choice(ANIMALS + THINGS)}"
        return f"You are a {role}. " + rng.choice(
            ("Always be kind.", "Never lie.", "Use simple words.", "Help people.", "Answer all questions.")
        )
    return " ".join(phrase(rng).capitalize() + "." for _ in range(rng.randint(1, 3)))


def draw(rng: random.Random, kind: str, *, held_out: bool = False, mode: bool | None = None) -> Exchange:
    """Draw an exchange of a kind from one side of the split."""
    generator = quietly if kind == "thinking" and mode else KINDS[kind][0]
    while True:
        exchange = generator(rng)
        if is_held_out(exchange.key) == held_out:
            return exchange


_AREAS = {
    **dict.fromkeys(("weather", "time", "search", "translate", "stock", "population"), "world"),
    **dict.fromkeys(("currency", "random"), "math"),
}


def _area(topic: str) -> str:
    """Name the wider field of a tool, in which other questions would also call for it."""
    return _AREAS.get(topic, topic)


def _exchanges(rng: random.Random, size: int, mode: bool | None) -> list[Exchange]:
    """Draw exchanges that do not contradict the tools of one another."""
    found: list[Exchange] = []
    while len(found) < size:
        kind = rng.choices(_NAMES, _WEIGHTS)[0]
        if kind == "thinking" and mode is False:
            continue
        exchange = draw(rng, kind, mode=mode)
        offered = {_area(e.topic) for e in found if e.tools}
        open_topics = {e.topic for e in found if not e.tools}
        if exchange.tools:
            if (
                len(offered) > 2
                or any(e.topic == exchange.topic for e in found)
                or _area(exchange.topic) in open_topics
            ):
                continue
            if _area(exchange.topic) == "math" and "math" in offered:
                continue
        elif exchange.topic in offered:
            continue
        found.append(exchange)
    return found


def _offer(rng: random.Random, exchanges: list[Exchange]) -> tuple[Tool, ...]:
    tools = [tool for exchange in exchanges for tool in exchange.tools]
    if tools or rng.random() < 0.08:
        taken = {tool["function"]["name"] for tool in tools}
        avoid = {e.topic for e in exchanges} | {_area(e.topic) for e in exchanges if _area(e.topic) == "math"}
        for extra in distractors(rng, rng.choice((0, 0, 0, 1, 1, 2)) + (0 if tools else 1), avoid):
            if extra["function"]["name"] not in taken:
                taken.add(extra["function"]["name"])
                tools.append(extra)
    rng.shuffle(tools)
    return tuple(tools)


def _reasoned(exchange: Exchange) -> Exchange:
    """Give every assistant message of an exchange a line of reasoning."""
    messages: list[Message] = []
    for i, message in enumerate(exchange.messages):
        if message["role"] == "assistant" and "reasoning_content" not in message:
            after_tool = messages[-1]["role"] == "tool"
            early = i + 1 < len(exchange.messages) and not message.get("tool_calls")
            thought = (
                "The tool has answered."
                if after_tool
                else "The user tells me something."
                if early
                else exchange.thought
            )
            message = {**message, "reasoning_content": thought}
        messages.append(message)
    return replace(exchange, messages=tuple(messages))


def assemble(rng: random.Random, exchanges: list[Exchange], mode: bool | None) -> Conversation:
    """Put exchanges into one conversation with tools and perhaps a system message."""
    tools = _offer(rng, exchanges)
    if mode:
        exchanges = [_reasoned(exchange) for exchange in exchanges]
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": system_prompt(rng)})
    for exchange in exchanges:
        messages.extend(exchange.messages)
    if mode is not None:
        start = len(messages) - len(exchanges[-1].messages)
        turns = [i for i in range(start, len(messages)) if messages[i]["role"] == "assistant"]
        messages = messages[: rng.choice(turns) + 1]
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    learned = {i for i in replies if "reasoning_content" not in messages[i]} | {replies[-1]}
    return Conversation(tuple(messages), tools, mode, tuple(exchanges), frozenset(learned))


def conversation(rng: random.Random) -> Conversation:
    """Make a training conversation."""
    roll = rng.random()
    mode = True if roll < 0.1 else False if roll < 0.2 else None
    size = rng.choices(
        (1, rng.randint(2, 4), rng.randint(5, 8), rng.randint(12, 24)), (0.3, 0.48, 0.19, 0.03)
    )[0]
    return assemble(rng, _exchanges(rng, size, mode), mode)


def held_out(rng: random.Random, kind: str) -> Conversation:
    """Make a conversation of one held-out exchange, whole, for the evaluation."""
    mode = True if kind == "thinking" and rng.random() < 0.5 else None
    exchange = draw(rng, kind, held_out=True, mode=mode)
    made = assemble(rng, [exchange], None)
    return replace(made, enable_thinking=mode)


def sample(made: Conversation) -> Sample:
    """Render a conversation for training."""
    prompt = render(
        list(made.messages[:-1]), list(made.tools), made.enable_thinking, add_generation_prompt=True
    )
    spans: list[tuple[int, int]] = []
    position = 0
    for i, message in enumerate(made.messages[:-1]):
        if message["role"] == "assistant":
            start = prompt.index(ASSISTANT, position) + len(ASSISTANT)
            position = prompt.index(END, start) + len(END)
            if i in made.learned:
                spans.append((start, position))
    text = prompt + reply_text(made.messages[-1])
    spans.append((len(prompt), len(text)))
    return Sample(text, tuple(spans))


def samples(seed: str) -> Iterator[Sample]:
    """Yield training samples without end."""
    rng = random.Random(seed)
    while True:
        yield sample(conversation(rng))
