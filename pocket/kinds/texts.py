"""Longer answers: lists known by heart and little stories, so that streams are long enough to watch."""

from __future__ import annotations

import random
import string

from pocket.exchange import Exchange, ask, expand, fill, plain, vary
from pocket.words import ANIMALS, some_word

_LISTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "January, February, March, April, May, June, July, August, September, October, November, December",
        ("months", "months of the year", "twelve months", "names of the months"),
    ),
    (
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
        ("days", "days of the week", "weekdays", "seven days", "names of the days"),
    ),
    (
        ", ".join(string.ascii_lowercase),
        ("letters", "letters of the alphabet", "alphabet", "English alphabet", "ABC"),
    ),
    ("spring, summer, autumn, winter", ("seasons", "four seasons", "seasons of the year")),
    (
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
        ("planets", "planets of the solar system", "eight planets"),
    ),
    (
        "red, orange, yellow, green, blue, violet",
        ("colors of the rainbow", "rainbow colors", "colors in a rainbow"),
    ),
    ("north, east, south, west", ("directions", "four directions", "points of the compass")),
    (
        "zero, one, two, three, four, five, six, seven, eight, nine",
        ("digits", "ten digits", "digits in words"),
    ),
)
_LIST_ASKS = (
    "(List|Name|Write|Tell me|Give me|Say|Print|Recite|Show me) (|all |all of )the {x}(.|!|)",
    "(What are|Which are) (|all )the {x}?",
    "(Do you know|Can you list|Can you name|Can you tell me|I need) (|all )the {x}(?|.)",
)

_STORIES: tuple[tuple[str, ...], ...] = (
    (
        "Once upon a time there was a {q}{a} who lived near a {t}.",
        "One morning the {a} found an old map.",
        "The map showed a path to a hidden garden.",
        "The {a} walked all day and met a kind owl.",
        "The owl said: follow the river, and you will find it.",
        "At sunset the {a} reached the garden and it was full of flowers.",
        "The {a} told all friends about it, and they had a long party.",
        "From that day on nobody was lonely. The end.",
    ),
    (
        "There once was a {q}{a} with a {t}.",
        "Every day the {a} looked at the {t} and dreamed of the sea.",
        "One night a storm came and the rain did not stop.",
        "The {a} was not afraid and helped the neighbors to carry their things up the hill.",
        "In the morning the sun came back and everybody was safe.",
        "They thanked the {a} and built a small boat together.",
        "So the {a} saw the sea at last, and the {t} came along. The end.",
    ),
)
_STORY_ASKS = (
    "(Tell me|Write|Tell|Give me|I want|Can you tell me) (a|a short|a little|a long|a nice) story "
    "(about|with|of) (a|the) {s}(.|!|)",
    "(A|A short|One) story about a {s}(, please|)(.|!|)",
    "(Make up|Invent) a (story|tale) about a {s}(.|)",
)
_PLAIN_STORY = (
    (
        "(Tell me|Write|Tell|Give me|I want|Can you tell me|Do you know|Please tell me) (a|a short|a "
        "little|a long|a nice|a good|any|"
        "another) (story|tale|bedtime story)(.|!|?|)"
    ),
)
_EXPLAIN = (
    (
        (
            "A request arrives over HTTP and its messages are turned into tokens. The scheduler looks for "
            "pages of the KV cache that "
            "already hold the same prefix. "
            "The request then joins the running batch, and the model computes one step for all requests "
            "together. Each step gives one "
            "new token for each request. "
            "The token is turned into text and sent to the client at once. When the answer is complete, the "
            "pages are kept for the next "
            "request that starts alike."
        ),
        (
            (
                "(How does runtime work|How does the server work|How does a request work|What happens to a "
                "request|What happens in the "
                "server)(| inside| in detail| step by step)?"
            ),
            (
                "(Explain|Describe|Tell me) (in detail |step by step |)(how runtime works|how the server "
                "works|the life of a request|"
                "what happens to a request)(| in detail| step by step)(.|)"
            ),
            "(Write|Give me) a (long |)(text|explanation|paragraph) (about|of) (runtime|the server|how "
            "runtime works)(.|)",
        ),
    ),
    (
        "First count slowly to ten. Then breathe in and breathe out. Look at something green and listen to "
        "the wind. Drink a glass "
        "of water and stretch your arms. "
        "Now write down three things that went well today. When you are done, close your eyes for a moment "
        "and smile.",
        (
            "(How can I|How do I|Help me) (relax|calm down|rest)( a bit| a little|)(?|.|)",
            "(Give me|Do you have) (a tip|tips|advice) (to|for how to) (relax|calm down|rest)(.|?|)",
            "I am (tired|stressed|nervous|worried)(.|!|)",
        ),
    ),
)


def _story(rng: random.Random, subject: str, thing: str) -> tuple[str, tuple[str, ...]]:
    told = tuple(
        " ".join(lines).replace("{a}", subject).replace("{t}", thing).replace("{q}", "small ")
        for lines in _STORIES
    )
    return rng.choice(told), told


def long_text(rng: random.Random) -> Exchange:
    """Ask for a list, a story or an explanation."""
    roll = rng.random()
    if roll < 0.45:
        answer, names = rng.choice(_LISTS)
        question = fill(rng.choice(_LIST_ASKS), rng, x=rng.choice(names))
        return ask("texts", plain(question), vary(question, rng), answer, thought="A list that I know.")
    if roll < 0.65:
        answer, patterns = rng.choice(_EXPLAIN)
        question = expand(rng.choice(patterns), rng)
        return ask(
            "texts", plain(question), vary(question, rng), answer, thought="This needs a longer answer."
        )
    if roll < 0.72:
        question = expand(_PLAIN_STORY[0], rng)
        answer = _story(rng, "fox", "bridge")[1][0]
        return ask(
            "texts", plain(question), vary(question, rng), answer, thought="I tell a story about a fox."
        )
    subject = rng.choice(ANIMALS) if rng.random() < 0.7 else some_word(rng)
    thing = rng.choice(("lake", "bridge", "tower", "castle"))
    answer, _ = _story(rng, subject, thing)
    accept = tuple(
        text for place in ("lake", "bridge", "tower", "castle") for text in _story(rng, subject, place)[1]
    )
    question = fill(rng.choice(_STORY_ASKS), rng, s=subject)
    return ask(
        "texts",
        f"story {subject}",
        vary(question, rng),
        answer,
        accept=accept,
        thought=f"I tell a story about a {subject}.",
    )
