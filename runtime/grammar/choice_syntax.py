"""A choice among texts, in the syntaxes that backends read."""

import re

import msgspec

_PLAIN = re.compile(r"[A-Za-z0-9 ]")


def choices_as_ebnf(text: str) -> str:
    """GBNF for a JSON list of texts."""
    return "root ::= " + " | ".join(
        f'"{"".join(map(_letter, choice))}"' for choice in msgspec.json.decode(text)
    )


def choices_as_regex(text: str) -> str:
    """A regular expression for a JSON list of texts."""
    return "|".join(f"({''.join(map(_literal, choice))})" for choice in msgspec.json.decode(text))


def _letter(letter: str) -> str:
    return letter if _PLAIN.match(letter) else f"\\U{ord(letter):08x}"


def _literal(letter: str) -> str:
    """Escapes every character that could mean something in a pattern; characters beyond ASCII mean
    themselves."""
    if _PLAIN.match(letter) or not letter.isascii():
        return letter
    return f"\\{letter}" if letter.isprintable() else f"\\x{ord(letter):02x}"
