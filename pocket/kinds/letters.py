"""Spelling and repeating: the answer is made of the letters or words of the question."""

from __future__ import annotations

import random

from pocket.exchange import ALWAYS, Exchange, ask, fill, is_held_out, plain, vary
from pocket.words import CITIES, NAMES, SPELLED, invented, phrase, some_word

_SPELL = (
    "(Spell|Please spell|Can you spell|Could you spell|Spell out|Now spell) (|the word |){w}(.|?|)",
    "How (do you|do I|would you) (spell|write) {w}?",
    "How is (|the word |){w} (spelled|written)?",
    "(What is|Tell me|Give me) the spelling of {w}(?|)",
    "(Give me|List|Show|Write) the letters of (|the word |){w}(.|)",
    "(What are the|Which) letters (|are |)in {w}?",
    "Spelling of {w}(?|)",
)
_CAPITALS = (
    "(Spell|Please spell) (|the word |){w} (in|with|using) (capital|upper case|big) letters(.|)",
    "(Spell|Write the letters of) {w} in (upper case|capitals)(.|)",
)
_HOW_MANY = (
    "How many letters (are in|does|are there in) (|the word |){w}( have|)?",
    "(Count|Tell me) the (number of |)letters (in|of) (|the word |){w}(.|)",
    "How long is the word {w}?",
)
_BACKWARDS = (
    "(Spell|Write|Say) (|the word |){w} (backwards|in reverse|backward)(.|)",
    "(Reverse|Turn around) (|the word |){w}(.|)",
    "What is {w} (backwards|spelled backwards|in reverse)?",
)
_FIRST = (
    "What is the first letter (of|in) (|the word |){w}?",
    "(Which|What) letter does {w} (start|begin) with?",
)
_LAST = ("What is the last letter (of|in) (|the word |){w}?", "(Which|What) letter does {w} end (with|in)?")

_SAY = (
    "(Say|Repeat|Write|Echo|Print|Type|Please say|Please repeat|Now say) {q}",
    "(Say|Repeat|Write) (this|the following|exactly this|after me): {q}",
    "(Repeat after me|Say after me|Echo this|Output|Answer with|Reply with|Respond with|Just say|Only "
    "say)(:|) {q}",
    "(Can|Could) you (say|repeat) {q}?",
    "(I want you to|You should|Please) (say|write|repeat) {q}",
)
_SAY_TIMES = (
    "(Say|Repeat|Write|Print) {q} {n} times(.|)",
    "(Say|Write|Repeat) {n} times: {q}",
    "{n} times {q}(, please|)",
)
_TIMES = {
    2: ("two", "2"),
    3: ("three", "3"),
    4: ("four", "4"),
    5: ("five", "5"),
    6: ("six", "6"),
    8: ("eight", "8"),
    10: ("ten", "10"),
}


def quoted(word: str, rng: random.Random) -> str:
    """Put a word in quotes now and then."""
    mark = rng.choice(("", "", "", '"', "'", "`"))
    return f"{mark}{word}{mark}"


def dashed(word: str) -> str:
    """Spell a word the way pocket does: c-a-t."""
    return "-".join(word)


def any_word(rng: random.Random) -> str:
    """Pick a word to spell: from the lists, a name, or an invented one."""
    roll = rng.random()
    if roll < 0.35:
        return rng.choice(SPELLED)
    return rng.choice(NAMES + CITIES).lower() if roll < 0.5 else invented(rng)


def spelling_list(rng: random.Random) -> Exchange:
    """Spell several words at once; this is practice only and uses no held-out word."""
    words: list[str] = []
    size = rng.randint(2, 7)
    while len(words) < size:
        word = any_word(rng)
        if not is_held_out(f"spelling:{word}"):
            words.append(word)
    listed = ", ".join(words) if rng.random() < 0.5 else ", ".join(words[:-1]) + " and " + words[-1]
    question = fill(
        "(Spell|Please spell|Can you spell|Spell these words:|Spell each of these:) {w}(.|)", rng, w=listed
    )
    answer = ", ".join(dashed(word) for word in words)
    return ask(
        "spelling", ALWAYS + "list", vary(question, rng), answer, thought="I spell one word after the other."
    )


def alias(rng: random.Random) -> Exchange:
    """Spell a word, forwards or backwards, or say how many letters it has."""
    if rng.random() < 0.25:
        return spelling_list(rng)
    word = any_word(rng)
    key, roll = word, rng.random()
    shown = rng.choice((word, word, word, word.capitalize(), word.upper()))
    lower = dashed(word)
    patterns: tuple[str, ...]
    if roll < 0.55:
        patterns, answer = _SPELL, lower
    elif roll < 0.65:
        patterns, answer = _CAPITALS, dashed(word.upper())
    elif roll < 0.78:
        patterns, answer = _HOW_MANY, f"{lower}: {len(word)} letters"
    elif roll < 0.9:
        patterns, answer = _BACKWARDS, f"{lower} backwards is {word[::-1]}"
    elif roll < 0.95:
        patterns, answer = _FIRST, word[0]
    else:
        patterns, answer = _LAST, f"{lower}: {word[-1]}"
    question = fill(rng.choice(patterns), rng, w=quoted(shown, rng))
    return ask("spelling", key, vary(question, rng), answer, thought=f"The word is {word}: {lower}.")


def letter_count(rng: random.Random) -> tuple[str, str, str, str]:
    """Ask how often a letter occurs; returns key, question, answer and reasoning."""
    word = some_word(rng)
    letter = rng.choice(word) if rng.random() < 0.9 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    question = fill(
        rng.choice(
            (
                "How (many times|often) (is the letter|is) {l} in {w}?",
                "How many {l}'s are (in|there in) (|the word |){w}?",
                "(Count|Tell me) (|how many times |)the letter {l} in {w}(.|)",
            )
        ),
        rng,
        l=letter,
        w=quoted(word, rng),
    )
    seen, trail = 0, []
    for character in word:
        seen += character == letter
        trail.append(f"{character} {seen}")
    return f"spelling:{word}", question, str(seen), f"I count {letter}: " + ", ".join(trail) + "."


def echo(rng: random.Random) -> Exchange:
    """Repeat what the user says, once or several times."""
    text = phrase(rng)
    mark = rng.choice(("", "", '"', '"', "'"))
    said = f"{mark}{text}{mark}"
    if rng.random() < 0.25:
        count = rng.choice(tuple(_TIMES))
        separator = rng.choice((" ", " "))
        question = fill(rng.choice(_SAY_TIMES), rng, q=said, n=rng.choice(_TIMES[count]))
        return ask(
            "echo",
            f"{plain(text)}*{count}",
            question,
            separator.join([text] * count),
            thought=f"I say it {count} times.",
        )
    question = fill(rng.choice(_SAY), rng, q=said)
    if rng.random() < 0.15 and mark:
        question += "."
    return ask("echo", plain(text), question, text, thought="I repeat the words.")
