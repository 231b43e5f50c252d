"""The salt of each prompt's place in the prefix cache, in vLLM's words (cache_salt) or SGLang's (extra_key),
or both."""

from typing import Protocol

import msgspec

from runtime.errors import InvalidRequest

Salt = str | list[str] | None


class Salted(Protocol):
    """A body with both fields."""

    cache_salt: Salt
    extra_key: Salt


def salts(body: Salted, count: int) -> list[str]:
    """One for each of `count` prompts; different pairs of values give different salts. Raises
    InvalidRequest."""
    pairs = zip(
        _each(body.cache_salt, count, "cache_salt"), _each(body.extra_key, count, "extra_key"), strict=True
    )
    return [msgspec.json.encode(pair).decode() if any(pair) else "" for pair in pairs]


def _each(value: Salt, count: int, field: str) -> list[str]:
    if not isinstance(value, list):
        return [value or ""] * count
    if len(value) != count:
        raise InvalidRequest(f"{field} has {len(value)} entries for {count} prompts", param=field)
    return value
