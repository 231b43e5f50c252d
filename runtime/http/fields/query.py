"""Query parameters that are numbers."""

import re

from starlette.requests import Request

from runtime.errors import InvalidRequest

_NUMBER = re.compile(r"[0-9]{1,18}")  # ASCII alone: "²" is a digit for str.isdigit, and none for int


def whole_number(value: str | None) -> int | None:
    """The number that the text is; None: it is not one, or too long to be one here."""
    return int(value) if value is not None and _NUMBER.fullmatch(value) else None


def limit_of(request: Request, most: int, default: int) -> int:
    """The parameter `limit`, from 1 to `most`. Raises InvalidRequest."""
    number = whole_number(request.query_params.get("limit", str(default)))
    if number is None or not 1 <= number <= most:
        raise InvalidRequest(f"limit must be a number from 1 to {most}", param="limit")
    return number
