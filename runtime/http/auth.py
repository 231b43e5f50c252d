"""Authentication: API keys, and which key each route needs.

    open      no key: health, metrics and the API's description, for probes, scrapers and browsers
    user      one of --api-key, if there are any: everything else
    admin     --admin-api-key: what changes the server for all its clients. Without that option, as a user,
              but only on a server that listens on this machine alone; others refuse such routes. Where
              no key is needed, pages of other sites are refused: a browser on this machine would send
              their forms here

A key comes as `Authorization: Bearer KEY`, or as `x-api-key: KEY` from Anthropic's clients. The level of a
route is decided by its declared path when the routes are put together, not by comparing paths when a request
comes.
"""

from collections.abc import Iterable, Sequence
from hmac import compare_digest
from ipaddress import ip_address
from typing import Literal

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import Forbidden, RequestError, Unauthorized
from runtime.http.body import respond_early
from runtime.http.errors import error_response

Level = Literal["open", "user", "admin"]

OPEN = frozenset({"/", "/health", "/health_generate", "/ping", "/metrics", "/openapi.json", "/docs"})
ADMIN = frozenset(
    {
        "/flush_cache",
        "/clear_hicache_storage_backend",
        "/attach_hicache_storage_backend",
        "/detach_hicache_storage_backend",
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/set_internal_state",
        "/slow_down",
        "/freeze_gc",
        "/start_profile",
        "/stop_profile",
        "/configure_logging",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/weights_checker",
        "/update_weight_version",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_expert_distribution_record",
        "/stop_expert_distribution_record",
        "/dump_expert_distribution_record",
    }
)
ALL_INTERFACES = ("", "*")


class Keys:
    """The keys, which are never printed, and which level of routes each of them opens."""

    __slots__ = ("_user", "_admin", "_is_local")

    def __init__(self, user: Iterable[str] = (), admin: str | None = None, *, is_local: bool = True) -> None:
        """`is_local`: only programs on this machine can connect."""
        self._user = tuple(key.encode() for key in user)
        self._admin = () if admin is None else (admin.encode(),)
        self._is_local = is_local

    def check(self, level: Level, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Returns if a request with these headers may use a route of this level. Raises Unauthorized or
        Forbidden."""
        if level == "open":
            return
        wanted = self._user
        if level == "admin":
            if self._admin:
                wanted = self._admin
            elif not self._is_local:
                raise Forbidden(
                    "this route changes the server for everybody; it needs a server with --admin-api-key, or "
                    "one that listens on this machine alone"
                )
            if not wanted and (b"sec-fetch-site", b"cross-site") in headers:
                raise Forbidden(
                    "this route changes the server for everybody, and the request comes from a web page of "
                    "another site"
                )
        if wanted and not _has_one(wanted, headers):
            whose = "the admin key" if wanted is self._admin else "an API key"
            raise Unauthorized(
                f"give {whose} of this server as `Authorization: Bearer KEY`; the one that came, if any, is "
                "not known here"
            )


def level_of(path: str) -> Level:
    """The level of a route, by its declared path."""
    return "open" if path in OPEN else "admin" if path in ADMIN else "user"


def with_key_checks(routes: Sequence[BaseRoute], keys: Keys) -> Sequence[BaseRoute]:
    """The same routes, each of which checks the key of a request first."""
    for route in routes:
        assert isinstance(route, Route | WebSocketRoute | Mount), f"{route} cannot check keys"
        route.app = _KeyCheck(route.app, keys, route.path)
    return routes


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable from this machine only."""
    if host in ALL_INTERFACES:
        return False
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class _KeyCheck:
    """An application that requests reach only with a valid key."""

    def __init__(self, app: ASGIApp, keys: Keys, path: str) -> None:
        self.app = app
        self.keys = keys
        self.path = path
        self.level = level_of(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.keys.check(self.level, scope["headers"])
        except RequestError as error:
            if scope["type"] == "websocket":
                # before it was accepted: an answer 403
                await send({"type": "websocket.close", "code": 1008, "reason": ""})
            else:
                await respond_early(error_response(error, self.path))(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _has_one(wanted: tuple[bytes, ...], headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the headers have one of the keys. The time it takes depends only on the keys' lengths and
    number."""
    has_one = False
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            value = value[7:].strip()
        elif name != b"x-api-key":
            continue
        for key in wanted:
            has_one |= compare_digest(value, key)
    return has_one
