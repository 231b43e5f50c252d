"""The type of JSON whose shape a client, a file or a model decides."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    JsonValue: TypeAlias = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
else:
    JsonValue = Any  # msgspec reads the types of fields while it runs, and knows no recursive ones

JsonDict: TypeAlias = dict[str, JsonValue]

# the fields of a Struct or an object that is yet to be made, or of a file that another program has written
# (config.json): what takes them checks them, or has their types
Fields: TypeAlias = dict[str, Any]
