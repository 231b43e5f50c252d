"""How an option is declared: one field of a Struct, its type, limits, help and status on one line.

    page_size: A[Count | Auto, option("Tokens in one page of the cache.")] = "auto"

The field's name is the flag (`page_size` is `--page-size`), the type is what it takes, the default is the
default. Everything else is generated: command line, YAML reader, help, docs/options.md, JSON Schema. "Let the
runtime choose" is written `"auto"`; None means "none of it". Each option has one status:

    works         it does what its help says
    partial       it does so in part: choices that are not here yet are refused, its note says what is missing
    superseded    accepted; the runtime says at start what does this job here
    other-device  refused, naming the device that it is for
    refused       refused, and the note says why it will stay so, or what does this job here
"""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from runtime.json_value import JsonDict

Status = Literal["works", "partial", "superseded", "other-device", "refused"]
REFUSED: tuple[Status, ...] = ("refused",)  # whatever the device
Auto = Literal["auto"]

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Amount = Annotated[float, Meta(ge=0)]
Seconds = Amount
Json = JsonDict
Value: TypeAlias = Any  # of an option: its group declares the type, and it is checked when it is read


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all groups of options: unknown names are errors. A group's docstring is its title in help and
    docs."""


class Derived(Struct, frozen=True):
    """What "auto" stands for: the value that the runtime chose, and a clause that completes "because".

    Each group's module has one pure function for each option with "auto", named as the option. Its parameters
    are what the value depends on.
    """

    value: Value
    reason: str


def option(
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    note: str = "",
    later: tuple[str, ...] = (),
    missing: str = "",
    bare: str | None = None,
    secret: bool = False,
    devices: tuple[str, ...] = (),
) -> Meta:
    """An option that works, on all devices or on those that are named; it is partial with `later`, choices
    that are known and refused for now, or `missing`, what else it lacks. `bare`: the value
    of the flag without a value; `secret` values are never printed."""
    return _meta(
        "partial" if later or missing else "works",
        help,
        aliases=aliases,
        note=note,
        later=later,
        missing=missing,
        bare=bare,
        secret=secret,
        devices=devices,
    )


def refused(help: str, why: str, *, aliases: tuple[str, ...] = ()) -> Meta:
    """An option that is known and refused for good. `why`: a clause, also of what does this job here."""
    return _meta("refused", help, aliases=aliases, note=why)


def superseded(help: str, by: str) -> Meta:
    """An option that is accepted without effect. `by` is a whole sentence: what does its job here."""
    return _meta("superseded", help, note=by)


def on_device(device: str, help: str, *, aliases: tuple[str, ...] = (), note: str = "") -> Meta:
    """An option of another device than those that this version has; refused, naming `device`."""
    return _meta("other-device", help, aliases=aliases, note=note, device=device)


def _meta(status: Status, help: str, **extra: object) -> Meta:
    return Meta(
        description=help,
        extra={"status": status, **{k: v for k, v in extra.items() if v not in (None, (), False)}},
    )
