"""The options as rows of a flat table, read from the declarations; everything generated is made from it."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from msgspec import NODEFAULT, Struct, inspect, structs

from runtime.options.compat.aliases import OLD, TITLES, Alias
from runtime.options.compat.rtp_llm import RTP_LLM
from runtime.options.declare import Status, Value
from runtime.options.tree import Options

Takes = Literal["switch", "one", "many", "json"]


class Row(Struct, frozen=True, kw_only=True):
    """One option."""

    name: str  # of the field, and in YAML
    flag: str
    aliases: tuple[str, ...]
    group: str  # name of the field of Options
    title: str  # of the group
    type: str  # as shown in help: int|auto, low|high, str ...
    takes: Takes  # what follows the flag: nothing, one word, many, one word of JSON
    default: Value
    choices: tuple[str, ...] | None
    later: tuple[str, ...]  # choices that are refused for now
    status: Status
    device: str  # status other-device: whose option it is
    devices: tuple[str, ...] = ()  # statuses works and partial: the devices that it works on; none: all
    missing: str = ""  # status partial: what it lacks besides `later`
    bare: str | None = None  # value of the flag without a value; None: it needs one
    help: str
    note: str  # status superseded: what does it here; else why it differs from the reference
    secret: bool
    convert: object = Any  # the type that msgspec checks values against
    means: str = ""  # a foreign alias: the flag of ours that its value passes on to
    values: Mapping[str, Value] = {}  # a foreign alias: our value for each of their words

    @property
    def acts(self) -> bool:
        """Whether its value reaches the plan: it works, at least in part."""
        return self.status in ("works", "partial")


@cache
def rows() -> tuple[Row, ...]:
    """Every option in order of declaration."""
    groups = [(group.name, group.type) for group in structs.fields(Options)]
    fields = [(name, kind, field) for name, kind in groups for field in structs.fields(kind)]
    types = inspect.multi_type_info([field.type for _, _, field in fields])
    return tuple(
        _row(field, meta, name, (kind.__doc__ or "").strip())
        for (name, kind, field), meta in zip(fields, types, strict=True)
    )


@cache
def foreign_rows() -> tuple[Row, ...]:
    """Rows of old aliases and of those of other systems."""
    own = {flag: row for row in rows() for flag in (row.flag, *row.aliases)}
    return tuple(_foreign(alias, own.get(alias.means)) for alias in (*OLD, *RTP_LLM))


@cache
def by_flag() -> dict[str, Row]:
    """Row of every flag and alias, written with dashes."""
    table: dict[str, Row] = {}
    for row in (*rows(), *foreign_rows()):
        for flag in (row.flag, *row.aliases):
            key = canonical(flag)
            assert key not in table, f"{flag} names both {table[key].name} and {row.name}"
            table[key] = row
    return table


@cache
def by_name() -> dict[str, Row]:
    """Row of every own option, by the name of its field."""
    return {row.name: row for row in rows()}


def canonical(flag: str) -> str:
    """The flag with dashes only: dashes and underscores within a flag are the same."""
    return flag.replace("_", "-")


def _row(field: structs.FieldInfo, meta: inspect.Type, group: str, title: str) -> Row:
    assert isinstance(meta, inspect.Metadata) and meta.extra is not None, (
        f"{field.name} is declared without option(...)"
    )
    text, takes, choices = _describe(meta.type)
    default = field.default_factory() if field.default is NODEFAULT else field.default
    return Row(
        name=field.name,
        flag="--" + field.name.replace("_", "-"),
        aliases=meta.extra.get("aliases", ()),
        group=group,
        title=title,
        type=text,
        takes=takes,
        default=default,
        choices=choices,
        later=meta.extra.get("later", ()),
        status=meta.extra["status"],
        device=meta.extra.get("device", ""),
        devices=meta.extra.get("devices", ()),
        note=meta.extra.get("note", ""),
        help=(meta.extra_json_schema or {})["description"],
        secret=meta.extra.get("secret", False),
        missing=meta.extra.get("missing", ""),
        bare=meta.extra.get("bare"),
        convert=field.type,
    )


def _foreign(alias: Alias, own: Row | None) -> Row:
    """The row of an alias. One that stands for an option of ours has the status of that option, except that
    it is superseded where that one acts."""
    assert not alias.means or own, f"{alias.flag} means {alias.means}, which does not exist"
    is_switch = isinstance(alias.default, bool)
    kind = "bool" if is_switch else "int" if isinstance(alias.default, int) else "str"
    row = Row(
        name=alias.flag[2:].replace("-", "_"),
        flag=alias.flag,
        aliases=(),
        group=alias.group,
        title=TITLES[alias.group],
        type=kind,
        takes="switch" if is_switch else "one",
        default=alias.default,
        choices=None,
        later=(),
        status=alias.status,
        device=alias.device,
        help=alias.help,
        note=alias.note,
        secret=False,
        means=alias.means,
        values=alias.values,
    )
    if own is None:
        return row
    status: Status = "superseded" if own.acts else own.status
    return structs.replace(row, status=status, device=own.device, note=f"it is {own.flag} here")


def _describe(kind: inspect.Type) -> tuple[str, Takes, tuple[str, ...] | None]:
    """Text for people, what follows the flag, and the choices where it is one of a few words."""
    match kind:
        case inspect.Metadata():
            return _describe(kind.type)
        case inspect.BoolType():
            return "bool", "switch", None
        case inspect.LiteralType():
            words = sorted(map(str, kind.values), key=_order)
            return "|".join(words), "one", tuple(words)
        case (
            inspect.StructType()
            | inspect.DictType()
            | inspect.VarTupleType(item_type=inspect.DictType() | inspect.StructType())
        ):
            return "json", "json", None
        case inspect.ListType() | inspect.VarTupleType():
            return f"{_describe(kind.item_type)[0]} ...", "many", None
        case inspect.UnionType():
            return _describe_union(kind)
        case inspect.IntType() | inspect.FloatType():
            return _number(kind), "one", None
        case _:
            return "str", "one", None


def _describe_union(kind: inspect.UnionType) -> tuple[str, Takes, tuple[str, ...] | None]:
    parts = [_describe(part) for part in kind.types if not isinstance(part, inspect.NoneType)]
    order: list[Takes] = ["many", "json", "switch", "one"]
    takes = min((part[1] for part in parts), key=order.index)
    words = [part[2] for part in parts]
    choices = sorted({word for some in words for word in some or ()}, key=_order)
    if all(some is not None for some in words):
        return "|".join(choices), takes, tuple(choices)
    return "|".join(part[0] for part in parts), takes, None


def _order(word: str) -> tuple[bool, int, str]:
    """auto, then numbers by size, then words."""
    return word != "auto", int(word) if word.isdigit() else 2**31, word


def _number(kind: inspect.IntType | inspect.FloatType) -> str:
    """int >= 1, float in (0, 1]: a number's type with its limits."""
    text = "int" if isinstance(kind, inspect.IntType) else "float"
    bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
    return " ".join([text, *(f"{sign}{bound:g}" for sign, bound in bounds if bound is not None)])
