"""Reads the options that only one device has. Torch-free.

StartRank.device_options holds them by name; each device declares its own in devices/<name>/options.py.
"""

from typing import TypeVar

import msgspec
from msgspec import Struct

from runtime.errors import StartError
from runtime.messages.ranks import StartRank

Options = TypeVar("Options", bound=Struct)


class NoOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a device that has none of its own."""


def read_options(start: StartRank, kind: type[Options]) -> Options:
    """The options of a device, whose Struct forbids unknown ones. Raises StartError for options that it does
    not have, and for values that it cannot use."""
    try:
        return msgspec.convert(start.device_options, kind)
    except msgspec.ValidationError as error:
        raise StartError(f"the {start.device} device cannot use its options: {error}") from error
