"""Routes of SGLang that change settings while the server runs: what is logged, and options."""

from typing import Literal

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.http.operation import Operation
from runtime.json_value import Fields, JsonValue
from runtime.service import LogChange, Service

LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class LoggingBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /configure_logging. What is left out stays as it is."""

    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None
    log_requests_format: Literal["text", "json"] | None = None
    log_level: LogLevel | None = None
    # refused unless they ask for nothing
    dump_requests_folder: str | None = None
    dump_requests_exclude_meta_keys: list[str] | None = None
    crash_dump_folder: str | None = None
    # accepted without effect: there is no such dump
    dump_requests_threshold: int | None = None


class LoggingShown(Struct, frozen=True, forbid_unknown_fields=True):
    """The response of /configure_logging: what holds now."""

    log_requests: bool
    log_requests_level: int
    log_requests_format: str
    log_level: str


class StateBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /set_internal_state."""

    server_args: dict[str, JsonValue] = {}


REMEDIES = {
    "dump_requests_folder": "start the server with --log-requests-target FOLDER, and set log_requests",
    "dump_requests_exclude_meta_keys": "log_requests_level decides how much is written",
    "crash_dump_folder": "start the server with --crash-dump-folder",
}


async def configure_logging(service: Service, body: LoggingBody) -> Fields:
    """Changes what is logged. Raises InvalidRequest."""
    for name, remedy in REMEDIES.items():
        if getattr(body, name):
            raise InvalidRequest(f"{name} can't be set while the server runs: {remedy}", param=name)
    change = LogChange(
        log_requests=body.log_requests,
        log_requests_level=body.log_requests_level,
        log_requests_format=body.log_requests_format,
        log_level=body.log_level,
    )
    now = service.control.configure_logging(change)
    return {name: getattr(now, name) for name in LoggingShown.__struct_fields__}


async def set_internal_state(service: Service, body: StateBody) -> list[bool]:
    """Accepts options that have these values already. None of the options that SGLang changes here has
    another value at which this server could run. Raises InvalidRequest."""
    options = service.server_info()["options"]
    for name, value in body.server_args.items():
        option = options.get(name)
        current = option.get("value") if isinstance(option, dict) else option
        if name not in options or current != value:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequest(
                f"{name} can't be changed while the server runs"
                + (f"; it is {current!r}, restart with {flag}" if name in options else ""),
                param=f"server_args.{name}",
            )
    return [True]


OPERATIONS = (
    Operation(
        "GET POST",
        "/configure_logging",
        "Change what is logged",
        body=LoggingBody,
        example={"log_requests": True, "log_requests_level": 1},
        answers=(LoggingShown,),
        call=configure_logging,
    ),
    Operation(
        "POST PUT",
        "/set_internal_state",
        "Check options against those in force",
        body=StateBody,
        answers=(list[bool],),
        call=set_internal_state,
    ),
)
