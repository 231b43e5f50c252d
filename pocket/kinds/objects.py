"""JSON on demand: the values come from the question, the keys too."""

from __future__ import annotations

import json
import random

from pocket.exchange import Exchange, ask, expand, fill, vary
from pocket.words import ANIMALS, CITIES, COLORS, FOODS, NAMES, QUALITIES, THINGS, invented, proper, some_word

_ASK = (
    "(Give me|Write|Return|Make|Create|Show|Print|I need|Generate|Produce|Send me|Build) (a JSON "
    "object|JSON|an object in JSON|a JSON "
    "document|a JSON)"
)
_FOR_PERSON = (
    _ASK + " with {k} for {v}(.|)",
    _ASK + " (for|of|about) {v} with (the keys|the fields|keys|fields|) {k}(.|)",
    "{v}: (write|give|return|make) (this|that|it) as JSON with {k}(.|)",
    "(Turn|Convert|Put) {v} into (a JSON object|JSON) with {k}(.|)",
    _ASK + " with (|the )(keys|fields|properties) {k}(:| and the values| and values) {v}(.|)",
)
_PAIRS = (
    _ASK + " (with|where|in which|that has|containing) {p}(.|)",
    _ASK + ": {p}(.|)",
    "(As JSON|In JSON|JSON|To JSON|JSON object): {p}(.|)",
    "(Write|Give me|Return|Show|Format|Encode) (this|the following) as (JSON|a JSON object): {p}(.|)",
    "(Turn|Convert|Put) {p} into (JSON|a JSON object)(.|)",
)
_LISTS = (
    "(Give me|Write|Return|Make|Create|Show) (a JSON list|a JSON array|a list in JSON|an array in JSON) "
    "(of|with|containing) {p}(.|)",
    "(As a JSON array|As a JSON list|JSON array|JSON list): {p}(.|)",
    "(Turn|Convert|Put) {p} into (a JSON array|a JSON list)(.|)",
)

_STRINGS: dict[str, tuple[str, ...]] = {
    "name": tuple(NAMES),
    "city": tuple(CITIES),
    "color": tuple(COLORS),
    "animal": tuple(ANIMALS),
    "food": tuple(FOODS),
    "item": tuple(THINGS),
    "friend": tuple(NAMES),
    "title": tuple(THINGS),
    "pet": tuple(ANIMALS),
    "mood": tuple(QUALITIES),
    "user": tuple(NAMES),
    "product": tuple(THINGS),
    "place": tuple(CITIES),
    "author": tuple(NAMES),
    "fruit": tuple(FOODS),
    "town": tuple(CITIES),
    "material": tuple(THINGS),
    "owner": tuple(NAMES),
    "status": ("open", "closed", "ready", "busy", "done", "new"),
    "size": ("small", "medium", "large"),
    "day": ("Monday", "Tuesday", "Friday", "Sunday"),
}
_NUMBERS = (
    "age",
    "price",
    "count",
    "year",
    "id",
    "score",
    "level",
    "width",
    "height",
    "weight",
    "total",
    "speed",
    "points",
    "port",
    "number",
    "amount",
)
_FLAGS = ("active", "ready", "open", "valid", "happy", "admin", "done", "visible", "new", "enabled")

Value = str | int | float | bool | list[str]


def number_for(key: str, rng: random.Random) -> int | float:
    """Pick a value that suits a numeric key."""
    if key == "year":
        return rng.randint(1900, 2030)
    if key in {"price", "score", "weight", "total"} and rng.random() < 0.25:
        return rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.75, 0.1, 0.9))
    if key in {"age", "level", "count", "points", "score"}:
        return rng.randint(0, 99)
    return rng.randint(0, rng.choice((9, 99, 999, 9999)))


def pair(rng: random.Random) -> tuple[str, Value]:
    """Pick a key and a value of a kind that suits it."""
    roll = rng.random()
    if roll < 0.45:
        key = rng.choice(tuple(_STRINGS))
        return key, rng.choice(_STRINGS[key]) if rng.random() < 0.75 else rng.choice(
            (some_word(rng), invented(rng).capitalize())
        )
    if roll < 0.78:
        key = rng.choice(_NUMBERS)
        return key, number_for(key, rng)
    if roll < 0.88:
        return rng.choice(_FLAGS), rng.random() < 0.5
    key = some_word(rng)
    return key, rng.choice((some_word(rng), rng.randint(0, 99), rng.choice(NAMES)))


def joined(parts: list[str], rng: random.Random) -> str:
    """Join parts with commas and an `and`."""
    if len(parts) > 1 and rng.random() < 0.6:
        return ", ".join(parts[:-1]) + rng.choice((" and ", " and ", ", and ")) + parts[-1]
    return ", ".join(parts)


def shown(value: Value, rng: random.Random) -> str:
    """Write a value the way a person would in a sentence."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(value) + "]"
    return f'"{value}"' if isinstance(value, str) and rng.random() < 0.12 else str(value)


def _finish(rng: random.Random, question: str, value: object, thought: str) -> Exchange:
    answer = json.dumps(value, ensure_ascii=False)
    if rng.random() < 0.12:
        question = question.rstrip(".") + expand(
            "(. Only JSON|. Nothing else|. Just the JSON|. No explanation|. JSON only)(.|)", rng
        )
    return ask(
        "json", answer.lower().replace(":", " "), vary(question, rng, recase=False), answer, thought=thought
    )


def json_object(rng: random.Random) -> Exchange:
    """Ask for a JSON object or list in one of several forms."""
    roll = rng.random()
    if roll < 0.15:
        return json_list(rng)
    pairs: dict[str, Value] = {}
    size = rng.choice((1, 2, 2, 2, 3, 3, 4, 5))
    while len(pairs) < size:
        key, value = pair(rng)
        pairs[key] = value
    if roll < 0.25:
        pairs[rng.choice(("tags", "items", "colors", "friends", "list"))] = [
            some_word(rng) for _ in range(rng.randint(2, 4))
        ]
    if roll < 0.5:
        pairs.pop("name", None)
        pairs = {"name": proper(rng, NAMES), **dict(list(pairs.items())[: rng.choice((1, 1, 2, 3))])}
        keys = [f'"{k}"' if roll < 0.28 else k for k in pairs]
        values = [shown(v, rng) for v in pairs.values()]
        value_text = ", ".join(values) if rng.random() < 0.8 else joined(values, rng)
        question = fill(rng.choice(_FOR_PERSON), rng, k=joined(keys, rng), v=value_text)
    else:
        form = rng.choice(
            ("{k} {v}", "{k} = {v}", "{k}: {v}", "{k} is {v}", "{k} set to {v}", "the {k} {v}", "{k}={v}")
        )
        parts = [form.replace("{k}", k).replace("{v}", shown(v, rng)) for k, v in pairs.items()]
        question = fill(rng.choice(_PAIRS), rng, p=joined(parts, rng))
    thought = "I need a JSON object with " + ", ".join(pairs) + "."
    if rng.random() < 0.05:
        outer = rng.choice(("person", "user", "data", "result", "item"))
        question = question.rstrip(".") + fill(", (inside|nested under|under) the key {o}.", rng, o=outer)
        return _finish(rng, question, {outer: pairs}, thought)
    return _finish(rng, question, pairs, thought)


def json_list(rng: random.Random) -> Exchange:
    """Ask for a JSON list of words or of numbers."""
    if rng.random() < 0.35:
        start = rng.randint(0, 40)
        numbers = list(range(start, start + rng.randint(2, 9)))
        question = fill(rng.choice(_LISTS), rng, p=f"the numbers from {numbers[0]} to {numbers[-1]}")
        return _finish(rng, question, numbers, "I need a JSON list of numbers.")
    source = rng.choice((NAMES, CITIES, COLORS, FOODS, ANIMALS, THINGS))
    words = rng.sample(source, rng.randint(2, 5))
    return _finish(
        rng, fill(rng.choice(_LISTS), rng, p=joined(words, rng)), words, "I need a JSON list of words."
    )
