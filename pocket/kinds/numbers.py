"""Counting and arithmetic.

Answers repeat the operands (`12 + 5 = 17`), which makes the sum itself independent of
how the question was worded.  Sums of single digits are always trained on, because the
reasoning of larger ones is built from them; larger ones are split by their operands.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable

from pocket.exchange import ALWAYS, Exchange, ask, fill, is_held_out, vary
from pocket.words import ANIMALS, FOODS, NAMES, proper

_COUNT = (
    "(Count|Please count|Can you count|Count up|I want you to count|Count for me) from {a} to {b}(.|!|)",
    "(Count|List|Write|Give me|Say|Print|Show) (|all |)(the |)numbers from {a} (to|up to) {b}(.|)",
    "(Start|Begin) at {a} and (count|go|keep counting) (to|until|till) {b}(.|)",
    "(Write|Give me|List) the numbers between {a} and {b}(, both included|)(.|)",
    "(Numbers|Counting) from {a} to {b}(.|, please.|)",
    "(What are|Tell me) the numbers from {a} to {b}(?|)",
)
_COUNT_FROM_ONE = (
    "(Count|Please count|Can you count|Count up) to {b}(.|!|)",
    "(Write|List|Give me) the (first {b} numbers|numbers up to {b})(.|)",
)
_COUNT_DOWN = (
    "(Count|Please count) (down|backwards|back) from {a} to {b}(.|)",
    "(Do|Give me|Start) a countdown from {a} to {b}(.|!|)",
    "(List|Write) the numbers from {a} down to {b}(.|)",
)
_COUNT_STEP = (
    "(Count|Please count|Go) from {a} to {b} (by|in steps of|in {s}s by|with step) {s}(.|)",
    "(Count|Write the numbers) (by|in steps of) {s} from {a} to {b}(.|)",
    "(Every {s} numbers|Steps of {s}|Step {s}) from {a} to {b}(.|, please.)",
)
_LINES = (
    " One (number |)per line.",
    " Put each (number |)on its own line.",
    " (Write|Use) one line for each.",
)

ASKS = {
    "+": (
        "(What is|What's|How much is|Calculate|Compute|Work out|Tell me|Solve|Evaluate) {a} (+|plus) "
        "{b}(?|.|)",
        "{a} (+|plus) {b}(| =|?| = ?| is what?| makes?| equals)",
        "(Add|Please add) {a} and {b}(.|)",
        "(What is|Give me|Find) the sum of {a} and {b}(?|)",
        "(Add|Please add) {b} to {a}(.|)",
        "(What do you get|How much do you get|What is it) (if|when) you add {a} and {b}?",
        "(I have|Take) {a} and (add|get) {b}(. How much is that|. What is the result|)?",
        "{a}+{b}(|=|=?)",
    ),
    "-": (
        "(What is|What's|How much is|Calculate|Compute|Work out|Tell me|Solve|Evaluate) {a} (-|minus) "
        "{b}(?|.|)",
        "{a} (-|minus) {b}(| =|?| = ?| is what?| makes?| equals)",
        "(Subtract|Take|Take away) {b} from {a}(.|)",
        "(What is|Give me|Find) the difference (between|of) {a} and {b}(?|)",
        "(What do you get|How much is left) (if|when) you (subtract|take) {b} from {a}?",
        "(I have|Take) {a} and (lose|take away|give away) {b}(. How much is that|. How many are left|)?",
        "{a}-{b}(|=|=?)",
    ),
    "*": (
        "(What is|What's|How much is|Calculate|Compute|Work out|Tell me|Solve|Evaluate) {a} "
        "(*|times|x|multiplied by) {b}(?|.|)",
        "{a} (*|times|x) {b}(| =|?| = ?| is what?| makes?| equals)",
        "(Multiply|Please multiply) {a} (by|and|with) {b}(.|)",
        "(What is|Give me|Find) the product of {a} and {b}(?|)",
        "(What do you get|How much do you get) (if|when) you multiply {a} (by|and) {b}?",
        "{a}*{b}(|=|=?)",
    ),
}
_STORIES = {
    "+": (
        (
            "{n} has {a} {t}s and (gets|buys|finds) {b} more. How many {t}s does {n} have(| now)?",
            "{n} has {c} {t}s",
        ),
        (
            "There are {a} {t}s in a basket. {n} (adds|puts in) {b} more. How many {t}s are there(| now)?",
            "there are {c} {t}s",
        ),
        (
            "{n} sees {a} {t}s in the morning and {b} in the evening. How many {t}s (is that|are that) in "
            "all?",
            "that makes {c} {t}s",
        ),
    ),
    "-": (
        (
            "{n} has {a} {t}s and (loses|gives away|sells) {b}( of them|). How many {t}s does {n} have(| "
            "left| now)?",
            "{n} has {c} {t}s",
        ),
        (
            "There are {a} {t}s in a (box|basket). {n} takes {b}( of them|). How many {t}s are (left|there "
            "now)?",
            "there are {c} {t}s",
        ),
    ),
    "*": (
        (
            "{n} has {a} boxes with {b} {t}s (each|in each). How many {t}s (are there|does {n} have)?",
            "there are {c} {t}s",
        ),
        (
            "(A box holds|There are) {b} {t}s( in a box|). How many {t}s are in {a} boxes?",
            "there are {c} {t}s",
        ),
    ),
}
_COUNTED = [
    w
    for w in ANIMALS + FOODS
    if w[-1] not in "yshfx" and w not in {"mouse", "goose", "sheep", "fish", "deer"}
]
OPERATE: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def counting(rng: random.Random) -> Exchange:
    """Count up, down or by steps between two numbers."""
    roll = rng.random()
    step = 1
    patterns: tuple[str, ...]
    if roll < 0.2:
        start, stop, patterns = 1, rng.randint(2, 40), _COUNT_FROM_ONE
        if rng.random() < 0.15:
            stop = rng.choice((50, 60, 75, 80, 100))
    elif roll < 0.55:
        start = rng.randint(0, 95)
        stop, patterns = min(100, start + rng.randint(2, 16)), _COUNT
    elif roll < 0.8:
        start = rng.randint(3, 60)
        stop, step, patterns = max(0, start - rng.randint(2, 16)), -1, _COUNT_DOWN
        if rng.random() < 0.3:
            start, stop = rng.randint(3, 20), rng.choice((0, 1))
    else:
        step, patterns = rng.choice((2, 2, 3, 5, 5, 10, 10)), _COUNT_STEP
        start = rng.choice((0, step, rng.randint(0, 40)))
        stop = start + step * rng.randint(2, 12)
    numbers = [str(n) for n in range(start, stop + (1 if step > 0 else -1), step)]
    question = fill(rng.choice(patterns), rng, a=start, b=stop, s=step)
    separator = ", "
    if rng.random() < 0.12:
        question, separator = question.rstrip(".!?") + "." + fill(rng.choice(_LINES), rng), "\n"
    if rng.random() < 0.05 and patterns is _COUNT_FROM_ONE:
        question = fill("(Count|Please count) from 1 to {b}(.|)", rng, b=stop)
    how = "up" if step > 0 else "down"
    size = f" by {abs(step)}" if abs(step) > 1 else ""
    thought = f"I count {how} from {start} to {stop}{size}."
    return ask(
        "counting", f"{start},{stop},{step}", vary(question, rng), separator.join(numbers), thought=thought
    )


def operands(rng: random.Random) -> tuple[str, int, int]:
    """Pick a small problem: two-digit sums and differences, or the table up to 12."""
    sign = rng.choice("++--*")
    if sign == "*":
        return sign, rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.25:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
    elif rng.random() < 0.3:
        a, b = rng.randint(0, 99), rng.randint(0, 9)
    else:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
    if sign == "-" and a < b and rng.random() < 0.8:
        a, b = b, a
    return sign, a, b


def problem_key(sign: str, a: int, b: int) -> str:
    """Name a problem for the split; problems of single digits are always trained on."""
    return f"{ALWAYS if max(a, b) < 10 else 'sum:'}{a}{sign}{b}"


def steps(sign: str, a: int, b: int) -> str:
    """Write the column method down, digit by digit."""
    if sign == "-" and a < b:
        return f"{a} is smaller than {b}, so the result is negative. " + steps("-", b, a)
    result = OPERATE[sign](a, b)
    if max(a, b) < 10 or min(a, b) < 0:
        return f"{a} {sign} {b} = {result}."
    a1, a0, b1, b0 = a // 10, a % 10, b // 10, b % 10
    if sign == "+":
        ones, carry = a0 + b0, (a0 + b0) // 10
        tail = f" + {carry}" if carry else ""
        return f"Ones: {a0} + {b0} = {ones}. Tens: {a1} + {b1}{tail} = {a1 + b1 + carry}."
    if sign == "-":
        borrow = int(a0 < b0)
        tail = f" - {borrow}" if borrow else ""
        ones = a0 + 10 * borrow
        return f"Ones: {ones} - {b0} = {ones - b0}. Tens: {a1} - {b1}{tail} = {a1 - b1 - borrow}."
    if b > 9:
        a1, a0, b0 = b1, b0, a
        if a > 9:
            return f"{a} * {b} = {result}."
    carry = a0 * b0 // 10
    tail = f" + {carry}" if carry else ""
    return f"Ones: {a0} * {b0} = {a0 * b0}. Tens: {a1} * {b0}{tail} = {a1 * b0 + carry}."


def problems(rng: random.Random) -> Exchange:
    """Ask for several results at once; this is practice only and uses no held-out problem."""
    asked: list[str] = []
    solved: list[str] = []
    size = rng.randint(3, 9)
    while len(asked) < size:
        sign, a, b = operands(rng)
        if rng.random() < 0.3:
            a, b = a % 10, b % 10
        if not is_held_out(problem_key(sign, a, b)):
            asked.append(f"{a} {sign} {b}")
            solved.append(f"{a} {sign} {b} = {OPERATE[sign](a, b)}")
    question = fill(
        "(Compute|Calculate|Solve|What is|What are|Work out)(:|) {p}(.|)", rng, p=", ".join(asked)
    )
    return ask(
        "arithmetic",
        ALWAYS + "list",
        vary(question, rng),
        ", ".join(solved),
        thought="One after the other.",
        topic="math",
    )


def arithmetic(rng: random.Random) -> Exchange:
    """Ask for one sum, difference or product, bare or inside a little story."""
    if rng.random() < 0.35:
        return problems(rng)
    sign, a, b = operands(rng)
    answer = f"{a} {sign} {b} = {OPERATE[sign](a, b)}"
    key = problem_key(sign, a, b)
    if rng.random() < 0.2 and min(a, b) > 1 and (sign != "-" or a - b > 1):
        pattern, ending = rng.choice(_STORIES[sign])
        name, thing = proper(rng, NAMES), rng.choice(_COUNTED)
        question = fill(pattern, rng, n=name, t=thing, a=a, b=b)
        answer += ", so " + fill(ending, rng, n=name, t=thing, c=OPERATE[sign](a, b)) + "."
        return ask("arithmetic", key, question, answer, thought=steps(sign, a, b), topic="math")
    question = fill(rng.choice(ASKS[sign]), rng, a=a, b=b)
    return ask("arithmetic", key, vary(question, rng), answer, thought=steps(sign, a, b), topic="math")
