"""What a parser makes of an answer."""

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text that the model thought before it answered."""

    text: str


class CallBegin(Struct, frozen=True):
    """A call of a function; `index` counts from 0. Everything about call `index` comes before call `index +
    1` begins."""

    index: int
    name: str
    id: str | None = None  # where the format has ids of its own that the model wants to see again


class Arguments(Struct, frozen=True):
    """The next piece of the arguments of a call, which joined are a JSON object, unless the answer was cut
    off or the model erred."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """The call is written to its end. Missing where the answer was cut off or went wrong in the middle of the
    arguments."""

    index: int


Event = Content | Reasoning | CallBegin | Arguments | CallEnd
