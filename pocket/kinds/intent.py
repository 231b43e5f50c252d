"""What a kind of request to a tool consists of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pocket.kinds.results import Result, Values


@dataclass(frozen=True)
class Param:
    """A parameter: the names it goes by, its JSON type and its descriptions."""

    names: tuple[str, ...]
    kind: str = "string"
    hints: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Intent:
    """Something users ask for that one tool does."""

    topic: str
    area: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    values: Callable[[random.Random], Values]
    result: Result
    pair_ask: str = ""
