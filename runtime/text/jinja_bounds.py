"""What an operation of a template may make: checked before it is made.

Each check takes the operands, and raises TemplateRuntimeError with what the template does.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from itertools import islice
from typing import TypeVar

from jinja2 import TemplateRuntimeError

T = TypeVar("T")

MAX_WIDTH = 1 << 20  # characters or items that one operation may make of a short value
MAX_TEXT = 1 << 24  # characters or items of texts and lists that are joined
MAX_PAD = 4096  # width of padding and of formats
MAX_BITS = 1 << 14  # of a number
_WIDE = re.compile(r"[0-9]{5}|\*")  # a width in a format: five digits, or one that is given apart
_NESTED = re.compile(r"\{[^{}]*\{")  # a field whose format has a field
_PERCENT = re.compile(r"%[^a-zA-Z%]*[a-zA-Z%]")


def check_width(width: object) -> None:
    """A width, an indentation or a number of digits."""
    size = len(width) if isinstance(width, str) else abs(width) if isinstance(width, int | float) else 0
    if not size <= MAX_PAD:
        raise TemplateRuntimeError(f"it pads or rounds to more than {MAX_PAD} places")


def join(parts: Iterable[str]) -> str:
    """The joined texts."""
    kept, room = [], MAX_TEXT
    for part in parts:
        room -= len(part)
        if room < 0:
            raise TemplateRuntimeError(f"it joins texts to more than {MAX_TEXT} characters")
        kept.append(part)
    return "".join(kept)


def check_sum(left: object, right: object) -> None:
    """`left + right`"""
    if _length(left) + _length(right) > MAX_TEXT:
        raise TemplateRuntimeError(f"it adds values to more than {MAX_TEXT} items")


def check_product(left: object, right: object) -> None:
    """`left * right`"""
    if _length(left) * _times(right) + _length(right) * _times(left) > MAX_WIDTH:
        raise TemplateRuntimeError(f"it repeats a value to more than {MAX_WIDTH} items")
    if _bits(left) + _bits(right) > MAX_BITS:
        raise TemplateRuntimeError("it takes a product of large numbers")


def check_power(left: object, right: object) -> None:
    """`left ** right`"""
    if not (_is_small(left) and _is_small(right)):
        raise TemplateRuntimeError("it takes a power of large numbers")


def check_percent(left: object, right: object) -> None:
    """`left % right`, which is a format where `left` is a text."""
    if isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        if any(_WIDE.search(field) for field in _PERCENT.findall(text)):
            raise TemplateRuntimeError("it formats a value to a width of five digits")


def check_format(text: str) -> None:
    """`text.format(...)`"""
    if _WIDE.search(text) or _NESTED.search(text):
        raise TemplateRuntimeError("it formats a value to a width of five digits, or to one that is computed")


def check_method(method: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """A call of a method of a text or a number; other functions are free."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, str | bytes) and (check := METHODS.get(name)) is not None:
        check(owner, *args, **kwargs)
    elif isinstance(owner, int | type) and name in ("to_bytes", "from_bytes"):
        raise TemplateRuntimeError(f"it calls {name}, which templates may not")


def checked(function: Callable[..., T], check: Callable[..., None]) -> Callable[..., T]:
    """A filter that checks its arguments first. What Jinja passes before them stays first."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    def filter(*args: object, **kwargs: object) -> T:
        check(*args[passed:], **kwargs)
        return function(*args, **kwargs)

    return update_wrapper(filter, function)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _times(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _is_small(value: object) -> bool:
    return not isinstance(value, int) or abs(value) <= 1024


def _check_pad(value: object, width: object = 0, *_: object, **more: object) -> None:
    for one in (width, *more.values()):
        check_width(one)


def _check_indent(value: object, width: int | str = 4, *_: object, **__: object) -> None:
    check_width(width)
    text = str(value)
    size = len(width) if isinstance(width, str) else int(width)
    if len(text) + text.count("\n") * size > MAX_TEXT:
        raise TemplateRuntimeError(f"it indents a text to more than {MAX_TEXT} characters")


def _check_tabs(text: str | bytes, tabsize: object = 8) -> None:
    check_width(tabsize)
    tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
    if len(text) + tabs * _times(tabsize) > MAX_TEXT:
        raise TemplateRuntimeError(f"it expands tabs to more than {MAX_TEXT} characters")


def _check_replaced(text: object, old: object = "", new: object = "", *_: object, **__: object) -> None:
    text, old, new = str(text), str(old), str(new)
    if len(text) + text.count(old) * len(new) > MAX_TEXT:
        raise TemplateRuntimeError(f"it replaces parts of a text to more than {MAX_TEXT} characters")


def _check_joined(separator: str | bytes, values: object = (), *_: object) -> None:
    if isinstance(values, str | bytes | list | tuple) and values:
        room = MAX_TEXT - len(separator) * len(values)
        for value in values:
            room -= _length(value)
        if room < 0:
            raise TemplateRuntimeError(f"it joins texts to more than {MAX_TEXT} characters")


def _check_join(values: object, d: object = "", *_: object, **__: object) -> None:
    _check_joined(str(d), values)


def _check_wrapped(
    value: object, width: object = 79, _: object = True, wrapstring: object = None, *more: object
) -> None:
    text = str(value)
    if len(text) * _length(wrapstring or "\n") // max(1, _times(width)) > MAX_WIDTH:
        raise TemplateRuntimeError(f"it wraps a text to more than {MAX_WIDTH} characters")


def _check_count(value: object, count: object = 0, *_: object, **__: object) -> None:
    if _times(count) > MAX_WIDTH:
        raise TemplateRuntimeError(f"it makes a list of more than {MAX_WIDTH} items")


def _check_translated(*_: object) -> None:
    raise TemplateRuntimeError("it calls translate, which templates may not")


def _check_format_filter(value: object, *args: object, **kwargs: object) -> None:
    check_percent(str(value), args or kwargs)


def _check_sum_filter(iterable: object, attribute: object = None, start: object = 0, **_: object) -> None:
    if not isinstance(start, int | float):
        raise TemplateRuntimeError("it sums what are no numbers")
    if isinstance(iterable, list | tuple) and any(_length(one) for one in islice(iterable, MAX_WIDTH)):
        raise TemplateRuntimeError("it sums what are no numbers")


BINARY = {"+": check_sum, "*": check_product, "**": check_power, "%": check_percent}
METHODS: dict[str, Callable[..., None]] = {
    "ljust": _check_pad,
    "rjust": _check_pad,
    "center": _check_pad,
    "zfill": _check_pad,
    "expandtabs": _check_tabs,
    "replace": _check_replaced,
    "join": _check_joined,
    "translate": _check_translated,
}
FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_pad,
    "indent": _check_indent,
    "round": lambda value, precision=0, *_, **__: check_width(precision),
    "batch": _check_count,
    "slice": _check_count,
    "format": _check_format_filter,
    "replace": _check_replaced,
    "join": _check_join,
    "sum": _check_sum_filter,
    "wordwrap": _check_wrapped,
}
