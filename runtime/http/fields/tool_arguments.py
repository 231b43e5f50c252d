"""The arguments of a tool call as an object, for APIs that do not write them as text."""

import msgspec


def object_of(arguments: str) -> dict[str, object]:
    """The arguments, parsed. Empty for a call that was cut off or is not valid JSON."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
