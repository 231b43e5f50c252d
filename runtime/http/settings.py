"""Settings of the HTTP API, made from the options."""

from pathlib import Path

from msgspec import Struct

from runtime.http.auth import Keys
from runtime.http.fields.headers import LabelHeader
from runtime.http.hosts import ANY_HOST, AllowedHosts
from runtime.http.key_file import names_of, read_key_file, read_secret
from runtime.http.unknown_fields import REFUSING, UnknownFields
from runtime.options.groups.http import is_loopback
from runtime.options.plan import Plan


class HttpSettings(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP API."""

    max_body_bytes: int = 16 * 2**20  # larger bodies are refused with 413
    max_total_body_bytes: int = 512 * 2**20  # of all requests at once; above, they are refused with 503
    allowed_hosts: AllowedHosts = ANY_HOST
    stream_interval: int = 1  # tokens in each event of a sequence
    stream_output: bool = False  # events of /generate carry new text only
    keys: Keys = Keys()
    cors_origins: tuple[str, ...] = ()  # pages of these origins may read answers
    access_level: str | None = None  # lowest level that the access log writes; None: no access log
    unknown_fields: UnknownFields = REFUSING
    unlogged_paths: tuple[str, ...] = ()  # path prefixes that the access log leaves out
    label_header: LabelHeader | None = None  # of labels for metrics; None: requests have none
    has_console: bool = True  # the page at /console is served


DEFAULT = HttpSettings()


def http_settings(plan: Plan, *, is_local: bool | None = None) -> HttpSettings:
    """The settings that the options make. `is_local`: only programs on this machine can connect; None: as
    --host says. Raises StartError for an --api-key-file that cannot be used."""
    is_checked = is_local is None or plan.why["allowed_hosts"].source != "derived"
    return HttpSettings(
        max_body_bytes=plan.http.max_body_bytes,
        max_total_body_bytes=plan.http.max_total_body_bytes,
        allowed_hosts=AllowedHosts(plan.http.allowed_hosts) if is_checked else ANY_HOST,
        stream_interval=plan.http.stream_interval,
        stream_output=plan.http.stream_output,
        keys=open_keys(plan, is_local=is_loopback(plan.http.host) if is_local is None else is_local),
        cors_origins=plan.http.cors_origins or (),
        access_level=plan.logs.log_level_http,
        unknown_fields=UnknownFields(plan.api.unknown_fields),
        unlogged_paths=plan.logs.uvicorn_access_log_exclude_prefixes,
        label_header=_label_header(plan),
        has_console=not plan.http.disable_console,
    )


def _label_header(plan: Plan) -> LabelHeader | None:
    allowed = plan.observe.tokenizer_metrics_allowed_custom_labels
    return LabelHeader(plan.observe.tokenizer_metrics_custom_labels_header, allowed) if allowed else None


def has_tenants(plan: Plan) -> bool:
    """Whether there are several tenants, which see only what is their own."""
    keys = plan.api.api_key
    is_one = keys is None or isinstance(keys, str) or len(set(keys)) <= 1
    return not is_one or plan.api.api_key_file is not None or plan.schedule.fair_share == "header"


def open_keys(plan: Plan, *, is_local: bool) -> Keys:
    """The keys that the options name. Raises StartError."""
    given = (plan.api.api_key,) if isinstance(plan.api.api_key, str) else plan.api.api_key or ()
    folder = None if plan.api.file_storage_path is None else Path(plan.api.file_storage_path)
    return Keys(
        names_of(given, read_secret(folder)) if given else {},
        plan.api.admin_api_key,
        named=None if plan.api.api_key_file is None else read_key_file(Path(plan.api.api_key_file)),
        is_local=is_local,
        by_header=plan.schedule.fair_share == "header",
        quota=plan.api.tenant_quota,
    )
