"""The arguments of a call as an object, for dialects that do not write them as text."""

from typing import Any

import msgspec


def object_of(arguments: str) -> dict[str, Any]:
    """Of a call that was cut off, or went wrong, there are none: half an object means nothing."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
