"""Authentication: API keys, and which key each route needs.

    open      no key: health, metrics and the API's description, for probes, scrapers and browsers
    user      one of --api-key, if there are any: everything else
    admin     --admin-api-key: what changes the server for all its clients. Without that option, as a user,
              but only on a server that listens on this machine alone; others refuse such routes. Where
              no key is needed, pages of other sites are refused: a browser on this machine would send
              their forms here

A key comes as `Authorization: Bearer KEY`, or as `x-api-key: KEY` from Anthropic's clients. The admin key
opens all levels. The level of a route is decided by its declared path when the routes are put together, not
by comparing paths when a request comes.

The key that matched is the tenant of a request (messages/tenants.py), however its header was written.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import Forbidden, InvalidRequest, RequestError, Unauthorized
from runtime.http.body import respond_early
from runtime.http.errors import error_response, form_of
from runtime.http.key_file import names_of
from runtime.messages.tenants import ADMINISTRATOR, ANONYMOUS, DEFAULT_TENANT, Tenant

Level = Literal["open", "user", "admin"]

OPEN = frozenset(
    {
        "/",
        "/health",
        "/health_generate",
        "/ping",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/console",
        "/console/{name}",
    }
)
ADMIN = frozenset(
    {
        "/flush_cache",
        "/clear_hicache_storage_backend",
        "/disaggregation_mode",
        "/attach_hicache_storage_backend",
        "/detach_hicache_storage_backend",
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/open_requests",
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
        "/model_files",
        "/model_files/{name:path}",
    }
)
TENANT = "runtime.tenant"  # key of the ASGI scope: the Tenant of a request whose key was checked
TENANT_HEADER = b"x-tenant-id"
MAX_NAME_CHARS = 256  # of a tenant's name in that header


class Keys:
    """The keys that this server knows: which level of routes each opens, and whose it is.

    What is kept of a key is a digest under a secret of this process: keys are never printed, and how long the
    look-up takes says nothing about them.
    """

    __slots__ = (
        "_secret",
        "_tenants",
        "_fixed",
        "_is_apart",
        "_has_admin",
        "_is_local",
        "_by_header",
        "_quota",
    )

    def __init__(
        self,
        user: Iterable[str] | Mapping[str, str] = (),
        admin: str | None = None,
        *,
        named: Mapping[str, str] | None = None,
        is_local: bool = True,
        by_header: bool = False,
        quota: float = 1.0,
    ) -> None:
        """`user`: keys, or the tenant's name of each. `named`: the names of the keys in --api-key-file, whose
        tenants are kept apart even if there is one. `is_local`: only programs on this machine can connect.
        `by_header`: requests name their tenant in the header x-tenant-id. `quota`: as in Tenant.quota, where
        tenants are kept apart."""
        self._secret = os.urandom(32)
        self._has_admin = admin is not None
        self._is_local = is_local
        self._by_header = by_header
        self._quota = quota
        names = user if isinstance(user, Mapping) else names_of(user, self._secret)
        self._is_apart = named is not None or len(set(names.values())) > 1
        self._fixed = self._by_digest(names)
        if admin is not None:
            self._fixed[self._digest(admin.encode())] = ADMINISTRATOR
        self._tenants: dict[bytes, Tenant] = {}
        self.replace(named or {})

    def replace(self, named: Mapping[str, str]) -> None:
        """Takes the names of the keys in --api-key-file, in place of those before."""
        self._tenants = self._by_digest(named) | self._fixed

    def _by_digest(self, names: Mapping[str, str]) -> dict[bytes, Tenant]:
        quota = self._quota if self._is_apart else 1.0
        return {
            self._digest(key.encode()): Tenant(name, sees_all=not self._is_apart, quota=quota)
            for key, name in names.items()
        }

    def identify(self, level: Level, headers: Sequence[tuple[bytes, bytes]]) -> Tenant:
        """The tenant of a request with these headers, if it may use a route of this level. Raises
        Unauthorized, Forbidden, and InvalidRequest for a tenant's name that cannot be."""
        if level == "open":
            return ANONYMOUS
        has_user = len(self._tenants) > self._has_admin
        if level == "admin" and not self._has_admin:
            if not self._is_local:
                raise Forbidden(
                    "this route changes the server for everybody; it needs a server with --admin-api-key, or "
                    "one that listens on this machine alone"
                )
            if not has_user and (b"sec-fetch-site", b"cross-site") in headers:
                raise Forbidden(
                    "this route changes the server for everybody, and the request comes from a web page of "
                    "another site"
                )
        needs_admin = level == "admin" and self._has_admin
        tenant = self._find(headers)
        if (needs_admin and tenant is not ADMINISTRATOR) or (tenant is None and has_user):
            raise Unauthorized(
                f"give {'the admin key' if needs_admin else 'an API key'} of this server as `Authorization: "
                "Bearer KEY`; the one that came, if any, is not known here"
            )
        if self._by_header and tenant is not ADMINISTRATOR:
            return self._named(tenant, headers)
        return tenant or DEFAULT_TENANT

    def _find(self, headers: Sequence[tuple[bytes, bytes]]) -> Tenant | None:
        """The tenant of the first known key in the headers."""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                value = value[7:].strip()
            elif name != b"x-api-key":
                continue
            if (tenant := self._tenants.get(self._digest(value))) is not None:
                return tenant
        return None

    def _named(self, tenant: Tenant | None, headers: Sequence[tuple[bytes, bytes]]) -> Tenant:
        """The tenant that the header names: one of several keys names tenants of its own."""
        name = next((value for header, value in headers if header == TENANT_HEADER), b"").decode("latin-1")
        if len(name) > MAX_NAME_CHARS or name == ADMINISTRATOR.name:
            raise InvalidRequest(
                f"the header {TENANT_HEADER.decode()} has {len(name)} characters or is {ADMINISTRATOR.name}; "
                f"give a name of at most {MAX_NAME_CHARS}",
                param=TENANT_HEADER.decode(),
            )
        if tenant is not None and not tenant.sees_all:
            name = f"{tenant.name}/{name}" if name else tenant.name
        return Tenant(name, sees_all=False, quota=self._quota)

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret, digest_size=32).digest()


def level_of(path: str) -> Level:
    """The level of a route, by its declared path."""
    return "open" if path in OPEN else "admin" if path in ADMIN else "user"


def with_key_checks(routes: Sequence[BaseRoute], keys: Keys) -> Sequence[BaseRoute]:
    """`routes`, each of which checks the key of a request first from now on."""
    for route in routes:
        assert isinstance(route, Route | WebSocketRoute | Mount), f"{route} cannot check keys"
        route.app = _KeyCheck(route.app, keys, route.path)
    return routes


class _KeyCheck:
    """An application that requests reach only with a valid key."""

    def __init__(self, app: ASGIApp, keys: Keys, path: str) -> None:
        self.app = app
        self.keys = keys
        self.level = level_of(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope[TENANT] = self.keys.identify(self.level, scope["headers"])
        except RequestError as error:
            await refuse_early(error, scope, receive, send)
            return
        await self.app(scope, receive, send)


async def refuse_early(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request, or the opening of a WebSocket, with an error before its body has been read."""
    if scope["type"] == "websocket":  # closed before it was accepted: an answer 403
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
    else:
        await respond_early(error_response(error, form_of(scope)))(scope, receive, send)
