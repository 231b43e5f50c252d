"""The values that a field of a body may have, for errors that name them."""

import re
from collections.abc import Iterator
from functools import cache

from msgspec import inspect

MAX_VALUES = 40  # that an error names
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")  # of a path: an item, or the name of a field


def permitted_values(kind: object, path: str) -> list[str]:
    """The values that the field at `path` (messages[0].role) of a body of type `kind` may have; none where
    they are not a list of at most MAX_VALUES."""
    types = list(_plain(_type_info(kind)))
    for step in _STEP.findall(path):
        types = [plain for one in types for inner in _inside(one, step) for plain in _plain(inner)]
    found: list[str] = []
    for one in types:
        if isinstance(one, inspect.LiteralType):
            found += map(str, one.values)
        elif isinstance(one, inspect.EnumType):
            found += [str(member.value) for member in one.cls]
    return found if len(found) <= MAX_VALUES else []


@cache
def _type_info(kind: object) -> inspect.Type:
    return inspect.type_info(kind)


def _plain(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The alternatives of a union, without the descriptions around types."""
    match kind:
        case inspect.Metadata():
            yield from _plain(kind.type)
        case inspect.UnionType():
            for one in kind.types:
                yield from _plain(one)
        case _:
            yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The type of the field `step` of a struct, or of the items of a container."""
    match kind:
        case inspect.StructType():
            if step == kind.tag_field:
                yield inspect.LiteralType((kind.tag,))
            yield from (field.type for field in kind.fields if field.encode_name == step)
        case inspect.ListType() | inspect.VarTupleType():
            yield kind.item_type
        case inspect.DictType():
            yield kind.value_type
