"""What each token adds to a text: a table, made once from the tokenizer's decoder.

Two families of decoders are sums of their tokens, so a table can stand for them:

    ByteLevel                                      a token is bytes, written in the byte alphabet of GPT-2
    Replace(▁ → space), ByteFallback, Fuse, Strip  a token is text, or <0xNN> for one byte (SentencePiece)

A piece is a str where the token is whole characters, and bytes where it may begin or end inside one. In
ByteLevel, invalid UTF-8 becomes U+FFFD for each maximal part, as Unicode recommends; in the SentencePiece
family U+FFFD for each byte, as SentencePiece does. (There, `tokenizers` turns a whole run of byte tokens into
U+FFFD when any of it is invalid. A stream can't: characters of the run have left already, and are right.)
"""

from typing import Any

from msgspec import Struct

Piece = str | bytes
SPACE_MARK = "\u2581"  # ▁


class Pieces(Struct, frozen=True):
    """Pieces by token id. Tokens that are skipped and ids without a token have an empty piece."""

    table: list[Piece]
    replaces_each_byte: bool  # of invalid UTF-8, else each maximal part
    lead: int  # spaces dropped at the start of a text, if there are so many


class Rule(Struct, frozen=True):
    """A decoder that is a sum of its tokens."""

    is_byte_level: bool
    replaces_mark: bool = False
    has_byte_tokens: bool = False
    lead: int = 0


def rule_of(decoder: dict[str, Any] | None) -> Rule | None:
    """The rule of a decoder as tokenizer.json writes it; None when a table can't stand for it."""
    match _steps(decoder):
        case [{"type": "ByteLevel"}]:
            return Rule(is_byte_level=True)
        case [*steps]:
            return _sentencepiece_rule(steps)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _sentencepiece_rule(steps: list[dict[str, Any]]) -> Rule | None:
    """Order matters: marks are replaced before bytes are joined, and only a fused text has one start to be
    stripped."""
    rest = list(steps)
    replaces = (
        bool(rest)
        and rest[0]["type"] == "Replace"
        and rest[0]["pattern"] == {"String": SPACE_MARK}
        and rest[0]["content"] == " "
    )
    if replaces:
        rest.pop(0)
    has_bytes = bool(rest) and rest[0]["type"] == "ByteFallback"
    if has_bytes:
        rest.pop(0)
    match rest:
        case [{"type": "Fuse"}]:
            lead = 0
        case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(lead), "stop": 0}]:
            pass
        case [] if replaces:
            lead = 0
        case _:
            return None
    return Rule(is_byte_level=False, replaces_mark=replaces, has_byte_tokens=has_bytes, lead=lead)


def make_pieces(tokens: list[str | None], skipped: set[int], rule: Rule) -> Pieces:
    """`tokens`: by id, as the vocabulary writes them; None where there is none. `skipped`: ids that add
    nothing."""
    read = _byte_level_piece if rule.is_byte_level else _fallback_piece if rule.has_byte_tokens else str
    table: list[Piece] = []
    for i, token in enumerate(tokens):
        if token is None or i in skipped:
            table.append("")
        else:
            table.append(read(token.replace(SPACE_MARK, " ") if rule.replaces_mark else token))
    return Pieces(table, not rule.is_byte_level, rule.lead)


def _byte_alphabet() -> dict[int, int]:
    """Character -> byte: printable Latin-1 characters stand for themselves, the others for 256, 257, ...
    (GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {b: b for b in printable} | {256 + i: b for i, b in enumerate(others)}


# Characters of Latin-1 that are not in the alphabet must not pass for bytes: they are sent outside Latin-1.
_ALPHABET = {code: 0xFFFD for code in range(256)} | _byte_alphabet()


def _byte_level_piece(token: str) -> Piece:
    try:
        data = token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not in the byte alphabet, so it is text as it stands: an added token
        return token
    return _shortest(data)


def _fallback_piece(token: str) -> Piece:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return _shortest(bytes([int(token[3:5], 16)]))
        except ValueError:
            return token
    return token


def _shortest(data: bytes) -> Piece:
    """Text where the bytes are whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
