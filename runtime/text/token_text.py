"""What each token adds to a text: a table, made once from the tokenizer's decoder.

Two families of decoders add up token by token, so a table can stand for them:

    ByteLevel                                      a token is bytes, written in the byte alphabet of GPT-2
    Replace(▁ → space), ByteFallback, Fuse, Strip  a token is text, or <0xNN> for one byte (SentencePiece)

A token's text is a str where the token is whole characters, and bytes where it may begin or end inside one.
In ByteLevel, invalid UTF-8 becomes U+FFFD for each maximal part, as Unicode recommends; in the SentencePiece
family U+FFFD for each byte, as SentencePiece does. (There, `tokenizers` turns a whole run of byte tokens into
U+FFFD when any of it is invalid. A stream cannot: valid characters of the run have been sent already.)
"""

from msgspec import Struct

from runtime.json_value import Fields, JsonValue

TokenText = str | bytes
SPACE_MARK = "\u2581"  # ▁


class TokenTexts(Struct, frozen=True):
    """Texts by token id. Skipped tokens and ids without a token have an empty text."""

    table: list[TokenText]
    replaces_each_byte: bool  # of invalid UTF-8, else each maximal part
    leading_spaces: int  # spaces dropped at the start of a text, if there are so many


class DecoderRule(Struct, frozen=True):
    """A decoder that adds up token by token."""

    is_byte_level: bool
    replaces_mark: bool = False
    has_byte_tokens: bool = False
    leading_spaces: int = 0


def decoder_rule(decoder: Fields | None) -> DecoderRule | None:
    """The rule of a decoder as tokenizer.json writes it; None where a table cannot stand for it."""
    match _steps(decoder):
        case [{"type": "ByteLevel"}]:
            return DecoderRule(is_byte_level=True)
        case [*steps]:
            return _sentencepiece_rule(steps)


def _steps(decoder: JsonValue) -> list[Fields]:
    match decoder:
        case {"type": "Sequence", "decoders": list(parts)}:
            return [step for part in parts for step in _steps(part)]
        case dict():
            return [decoder]
    return []


def _sentencepiece_rule(steps: list[Fields]) -> DecoderRule | None:
    """The order of steps matters: marks are replaced before bytes are joined, and only a fused text has one
    start to be stripped."""
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
            leading_spaces = 0
        case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(leading_spaces), "stop": 0}]:
            pass
        case [] if replaces:
            leading_spaces = 0
        case _:
            return None
    return DecoderRule(
        is_byte_level=False, replaces_mark=replaces, has_byte_tokens=has_bytes, leading_spaces=leading_spaces
    )


def make_token_texts(tokens: list[str | None], skipped: set[int], rule: DecoderRule) -> TokenTexts:
    """`tokens`: by id, as the vocabulary writes them, None where there is none. `skipped`: ids that add
    nothing."""
    to_text = _byte_level_text if rule.is_byte_level else _byte_fallback_text if rule.has_byte_tokens else str
    table: list[TokenText] = []
    for i, token in enumerate(tokens):
        if token is None or i in skipped:
            table.append("")
        else:
            table.append(to_text(token.replace(SPACE_MARK, " ") if rule.replaces_mark else token))
    return TokenTexts(table, not rule.is_byte_level, rule.leading_spaces)


def _byte_alphabet() -> dict[int, int]:
    """Character -> byte: printable Latin-1 characters stand for themselves, the others for 256, 257, ...
    (GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {b: b for b in printable} | {256 + i: b for i, b in enumerate(others)}


# Characters of Latin-1 that are not in the alphabet must not pass for bytes: they are sent outside Latin-1.
_ALPHABET = {code: 0xFFFD for code in range(256)} | _byte_alphabet()


def _byte_level_text(token: str) -> TokenText:
    try:
        data = token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not in the byte alphabet, so it is text as it stands: an added token
        return token
    return _shortest(data)


def _byte_fallback_text(token: str) -> TokenText:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return _shortest(bytes([int(token[3:5], 16)]))
        except ValueError:
            return token
    return token


def _shortest(data: bytes) -> TokenText:
    """A str where the bytes are whole characters, else the bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
