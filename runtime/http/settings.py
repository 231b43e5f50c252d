"""What the options say about the HTTP face."""

from msgspec import Struct

from runtime.http.auth import Keys, is_loopback
from runtime.options.plan import Plan


class HttpSettings(Struct, frozen=True, kw_only=True):
    """How requests are taken and answers given."""

    max_body_bytes: int = 16 * 2**20  # larger bodies are refused with 413
    tenant_is: str = "off"  # what makes a tenant: see origin.py
    stream_interval: int = 1  # tokens between two events of a sequence
    stream_output: bool = False  # native streams carry new text only
    keys: Keys = Keys()
    cors_origins: tuple[str, ...] = ()  # of pages whose scripts may read answers
    access_level: str | None = None  # least severe line of the access log; None: there is none
    unlogged_paths: tuple[str, ...] = ()  # beginnings of paths that it leaves out


DEFAULT = HttpSettings()


def http_settings(plan: Plan, *, is_local: bool | None = None) -> HttpSettings:
    """`is_local`: only programs on this machine can connect; unless told, --host says it."""
    user = (plan.api.api_key,) if isinstance(plan.api.api_key, str) else plan.api.api_key or ()
    keys = Keys(
        user, plan.api.admin_api_key, is_local=is_loopback(plan.http.host) if is_local is None else is_local
    )
    return HttpSettings(
        max_body_bytes=plan.http.max_body_bytes,
        tenant_is=plan.schedule.fair_share,
        stream_interval=plan.http.stream_interval,
        stream_output=plan.http.stream_output,
        keys=keys,
        cors_origins=plan.http.cors_origins or (),
        access_level=plan.logs.log_level_http,
        unlogged_paths=plan.logs.uvicorn_access_log_exclude_prefixes,
    )
