"""What tools send back, and what pocket says about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pocket.words import some_word

Values = list[Any]
Result = Callable[[random.Random, Values], tuple[dict[str, Any] | str, str]]

_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")


def weather(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
    """Report the weather in one of several shapes."""
    degrees, sky = rng.randint(-5, 35), rng.choice(_SKIES)
    shapes: tuple[dict[str, Any] | str, ...] = (
        {"temperature": degrees, "condition": sky},
        {"city": v[0], "temperature": degrees, "condition": sky},
        {"temp": degrees, "sky": sky},
        f"{degrees} degrees, {sky}",
        f"{sky}, {degrees} C",
    )
    return rng.choice(shapes), f"It is {degrees} degrees and {sky} in {v[0]}."


def local_time(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
    """Report a time of day."""
    now = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return rng.choice(({"time": now}, {"timezone": v[0], "time": now}, now)), f"It is {now} in {v[0]}."


def value(sign: str) -> Result:
    """Report the result of a sum, difference or product."""

    def result(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
        outcome = {"+": v[0] + v[1], "-": v[0] - v[1], "*": v[0] * v[1]}[sign]
        return rng.choice(
            ({"result": outcome}, {"value": outcome}, str(outcome))
        ), f"The result is {outcome}."

    return result


def expression(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
    """Report the value of an expression such as `3 + 4`."""
    a, sign, b = v[0].split(" ")
    return value(sign)(rng, [int(a), int(b)])


def found(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
    """Report something that was found."""
    what = f"{some_word(rng)} {some_word(rng)}"
    shapes: tuple[dict[str, Any] | str, ...] = ({"results": [what]}, {"result": what}, what)
    return rng.choice(shapes), f"I found: {what}."


def done(text: str) -> Result:
    """Report success; the slots of the text are the arguments."""

    def result(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
        answer = text
        for i, value in enumerate(v):
            answer = answer.replace("{" + str(i) + "}", str(value))
        shapes: tuple[dict[str, Any] | str, ...] = (
            {"status": "ok"},
            {"ok": True},
            "ok",
            "done",
            {"status": "success"},
        )
        return rng.choice(shapes), answer

    return result


def amount(key: str, text: str) -> Result:
    """Report a number under a key; `{r}` in the text is that number."""

    def result(rng: random.Random, v: Values) -> tuple[dict[str, Any] | str, str]:
        amount = rng.randint(1, 999)
        answer = text.replace("{r}", str(amount))
        for i, value in enumerate(v):
            answer = answer.replace("{" + str(i) + "}", str(value))
        return rng.choice(({key: amount}, str(amount))), answer

    return result
