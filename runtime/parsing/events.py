"""The events that a parser makes of an answer."""

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallBegin(Struct, frozen=True):
    """The beginning of a function call. `index` counts from 0. All events of call `index` come before call
    `index + 1` begins."""

    index: int
    name: str
    id: str | None = None  # where the format has ids of its own that the model wants to see again


class Arguments(Struct, frozen=True):
    """The next delta of a call's arguments. Joined they are a JSON object, unless the answer was cut off or
    the model made an error."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """The end of a call. It is missing where the answer was cut off or went wrong within the arguments."""

    index: int


Event = Content | Reasoning | CallBegin | Arguments | CallEnd
