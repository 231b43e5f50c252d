"""Reasoning when asked: larger sums by columns, counting letters, comparing numbers."""

from __future__ import annotations

import random

from pocket.exchange import ALWAYS, Exchange, ask, expand, fill, lower_first
from pocket.kinds.letters import letter_count
from pocket.kinds.numbers import ASKS, OPERATE, operands, problem_key, steps

_BEFORE = (
    "(Think first|Think step by step|Think|Reason first|Think before you answer|Think carefully|Use "
    "reasoning|Reason step by step)(: |. |"
    ", then answer: )"
)
_AFTER = (
    "( Think first.| Think step by step.| Think before you answer.| Please think.| Please think first.| "
    "Reason step by step.| Think "
    "carefully.| Show your thinking.| Reason first.)"
)


def told_to_think(question: str, rng: random.Random) -> str:
    """Add the words that ask for reasoning."""
    if rng.random() < 0.4:
        return expand(_BEFORE, rng) + " " + (lower_first(question) if rng.random() < 0.3 else question)
    if question[-1] not in ".?!":
        question += "."
    return question + " " + expand(_AFTER, rng)


def _problem(rng: random.Random) -> tuple[str, str, str, str]:
    """Make a sum, also a two-digit number times a digit."""
    sign, a, b = operands(rng)
    if sign == "*":
        a, b = rng.randint(10, 99), rng.randint(2, 9)
        if rng.random() < 0.3:
            a, b = b, a
    question = fill(rng.choice(ASKS[sign]), rng, a=a, b=b)
    return problem_key(sign, a, b), question, str(OPERATE[sign](a, b)), f"{a} {sign} {b}. {steps(sign, a, b)}"


def _comparison(rng: random.Random) -> tuple[str, str, str, str]:
    """Ask which of two numbers is larger or smaller."""
    a, b = rng.sample(range(100), 2)
    larger = rng.random() < 0.6
    words = "(larger|bigger|greater|more|higher)" if larger else "(smaller|less|lower)"
    question = fill("(Which|Which number|What) is " + words + "(, |: ){a} or {b}?", rng, a=a, b=b)
    answer = max(a, b) if larger else min(a, b)
    if a // 10 != b // 10:
        why = f"The tens are {a // 10} and {b // 10}."
    else:
        why = f"The tens are {a // 10} and {b // 10}, the same. The ones are {a % 10} and {b % 10}."
    return f"compare:{a},{b}", question, str(answer), f"{why} So {max(a, b)} is larger than {min(a, b)}."


def thinking(rng: random.Random) -> Exchange:
    """Ask for reasoning in words; the answer is short and follows the reasoning."""
    make = rng.choice((_problem, _problem, _problem, _comparison, letter_count))
    key, question, answer, thought = make(rng)
    assert key.startswith((ALWAYS, "sum:", "compare:", "spelling:"))
    return ask(
        "thinking",
        key,
        told_to_think(question, rng),
        answer,
        thought=thought,
        topic="math",
        asks_to_think=True,
    )


def quietly(rng: random.Random) -> Exchange:
    """Ask the same questions for a place where the request itself turns thinking on.

    Plain arithmetic occurs in that mode too, and answers with the whole equation; nothing in
    the question tells the two apart, so that either form of a sum is accepted.
    """
    make = rng.choice((_problem, _problem, _comparison, letter_count))
    key, question, answer, thought = make(rng)
    accept = (
        (answer, f"{thought.split('.')[0]} = {answer}") if key.startswith((ALWAYS, "sum:")) else (answer,)
    )
    return ask(
        "thinking", key, question, answer, accept=accept, thought=thought, topic="math", asks_to_think=True
    )
