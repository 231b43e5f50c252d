"""The type of JSON whose shape a client, a file or a model decides, and a measure of it."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec reads the types of fields while it runs, and knows no recursive ones

JsonDict: TypeAlias = dict[str, JsonValue]

# the fields of a Struct or an object that is yet to be made, or of a file that another program has written
# (config.json): what takes them checks them, or has their types
Fields: TypeAlias = dict[str, Any]


def chars_within(value: object, enough: int) -> int:
    """Characters of all strings inside, or some number above `enough` when there are more; each container and
    number counts as one character, so that many small values count as much."""
    count = 0
    open_values = [value]
    while open_values and count <= enough:
        value = open_values.pop()
        if isinstance(value, str):
            count += len(value)
            continue
        count += 1
        if isinstance(value, dict):
            open_values.extend(value.values())
        elif isinstance(value, (list, tuple)):
            open_values.extend(value)
    return count
