"""Fields of a body that are not known here: refused, or on some routes and with --unknown-fields warn
ignored, with a `warning` header that names them and one line in the log for each.

A body is decoded as it came. Only one that is refused for an unknown field is made anew without it.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime import log
from runtime.http.errors import MAX_NAME_CHARS, OLLAMA, UnknownField
from runtime.json_value import JsonValue

T = TypeVar("T")
Policy = Literal["refuse", "warn"]

MAX_PLACES = 32  # where a body may have unknown fields, its top level being one
MAX_REREAD_BYTES = 1 << 20  # of a body that is made anew several times; a larger one twice at most
MAX_LOGGED = 256  # names that the log shows
MAX_HEADER_CHARS = 1000

_STEP = re.compile(r"\w+|\[\d+\]|\[\.\.\.\]")
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)


class UnknownFields:
    """What this server does with fields that it does not know."""

    def __init__(self, policy: Policy = "refuse") -> None:
        self.policy = policy
        self._logged: set[str] = set()
        self._log = log.get("http")

    def are_ignored(self, path: str) -> bool:
        """Whether the route ignores them. Ollama's do, as Ollama itself does."""
        return self.policy == "warn" or path.startswith(OLLAMA)

    def attempt(self, take: Callable[[bytes], T], body: bytes, path: str) -> tuple[T, list[str]]:
        """What `take` makes of the body of a request to `path`, and the fields that were left out. Raises
        what `take` raises; UnknownField only where unknown fields are refused, or stand in too many
        places."""
        ignored: list[str] = []
        for _ in range(min(MAX_PLACES, max(2, MAX_REREAD_BYTES // max(len(body), 1)))):
            try:
                return take(body), ignored
            except UnknownField as error:
                if not self.are_ignored(path) or (shorter := without(body, error)) is None:
                    raise
                body, names = shorter
                ignored += names
                self._report(names, path)
        return take(body), ignored

    def serving(self, serve: Callable[..., T], path: str) -> Callable[..., T]:
        """`serve`, a function of a service and a body, for callers that have no headers to answer with."""

        def leniently(service: object, body: bytes) -> T:
            return self.attempt(partial(serve, service), body, path)[0]

        return leniently

    def _report(self, names: list[str], path: str) -> None:
        for name in map(shown, names):
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                self._log.warning("a field that is not known here was ignored", field=name, path=path)


REFUSING = UnknownFields()


def without(body: bytes, error: UnknownField) -> tuple[bytes, list[str]] | None:
    """The body without the unknown field, and without all others at its top level. -> the body, and the paths
    of what is gone; None: the field was not found, or the body cannot be written again."""
    try:
        whole: JsonValue = msgspec.json.decode(body)
        names: list[str] = []
        if not error.parent and isinstance(whole, dict):
            names = [name for name in whole if name not in error.known] if error.known else [error.name]
            for name in names:
                whole.pop(name, None)
        else:
            found = [one for one in _objects(whole, _STEP.findall(error.parent)) if error.name in one]
            for one in found:
                del one[error.name]
            names = [f"{_INDEX.sub('[]', error.parent)}.{error.name}"] if found else []
        return (msgspec.json.encode(whole), names) if names else None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None


def _objects(value: JsonValue, steps: list[str]) -> Iterator[dict[str, JsonValue]]:
    """The objects at a path. Of a list all elements of the same `type` count as one place: clients
    that put a field into one message put it into each."""
    if not steps:
        if isinstance(value, dict):
            yield value
        return
    step, rest = steps[0], steps[1:]
    if step == "[...]":
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    elif step.startswith("["):
        inner = _alike(value, int(step[1:-1])) if isinstance(value, list) else []
    else:
        inner = [value[step]] if isinstance(value, dict) and step in value else []
    for one in inner:
        yield from _objects(one, rest)


def _alike(values: list[JsonValue], index: int) -> list[JsonValue]:
    def kind(value: JsonValue) -> object:
        return value.get("type") if isinstance(value, dict) else None

    return [value for value in values if kind(value) == kind(values[index])] if index < len(values) else []


def shown(name: str) -> str:
    """A client's name for a field as headers and the log have it."""
    return _UNSAFE.sub("?", name[:MAX_NAME_CHARS])


def warned(app: ASGIApp, ignored: list[str]) -> ASGIApp:
    """`app`, whose answer has a `warning` header where fields were ignored."""
    if not ignored:
        return app
    names = ", ".join(map(shown, ignored[:MAX_LOGGED]))[:MAX_HEADER_CHARS]
    header = (b"warning", f'299 - "unknown fields were ignored: {names}"'.encode("ascii"))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_warned(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await app(scope, receive, send_warned)

    return answer
