"""`runtime route --worker-urls URL ...`: a reverse proxy that spreads requests over servers."""

import argparse
from collections.abc import Callable, Sequence
from math import isfinite

from runtime import log
from runtime.errors import InvalidRequest, StartError
from runtime.routing.policies import POLICIES, PolicySettings
from runtime.routing.workers import RouteSettings

NUMBERS: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    # option -> type, smallest, largest, what it is
    "request-timeout-secs": (float, 0.001, 1e7, "longest time without a byte from a server"),
    "retry-max-retries": (int, 0, 1000, "attempts at other servers, before the first byte"),
    "max-payload-size": (int, 1, 2**40, "bytes of a request's body"),
    "health-check-interval-secs": (float, 0.001, 1e7, "time between two checks of a server"),
    "health-check-timeout-secs": (float, 0.001, 1e7, "time that a check may take"),
    "health-failure-threshold": (int, 1, 1000, "failed checks or requests in a row that eject a server"),
}
LIMITS: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    "cache-threshold": (float, 0, 1, "cache_aware: share of the prompt that a server must know"),
    "balance-abs-threshold": (int, 0, 2**31, "cache_aware: difference of loads, and"),
    "balance-rel-threshold": (float, 1, 1e9, "cache_aware: ratio of loads, above which least load decides"),
    "max-tree-size": (int, 1, 2**28, "cache_aware: blocks of 64 bytes that are remembered"),
}


def run(argv: Sequence[str]) -> int:
    """Routes until a signal ends it. Raises StartError for options that cannot work."""
    parsed = _parser().parse_args(argv)
    if parsed.pd_disaggregation:
        raise StartError(
            "--pd-disaggregation is not done: prompts and answers are computed by the same server; "
            "leave it out and give --worker-urls"
        )
    if not parsed.worker_urls:
        raise StartError("--worker-urls is missing; give the URLs of servers, as http://HOST:PORT")
    values = {name: getattr(parsed, name.replace("-", "_")) for name in (*NUMBERS, *LIMITS)}
    settings = RouteSettings(
        policy=parsed.policy,
        limits=PolicySettings(**{name.replace("-", "_"): values[name] for name in LIMITS}),
        **{name.replace("-", "_"): values[name] for name in NUMBERS},
    )
    from runtime.routing import router  # here, so that --help answers at once

    log.setup(parsed.log_level, parsed.log_format)

    try:
        return router.run(parsed.worker_urls, settings, parsed.host, parsed.port, parsed.admin_api_key)
    except InvalidRequest as error:
        raise StartError(f"--worker-urls: {error.message}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="runtime route",
        allow_abbrev=False,
        description="Spread requests over servers. docs/routing.md says more.",
    )
    parser.add_argument("--worker-urls", nargs="+", metavar="URL", help="servers, as http://HOST:PORT")
    parser.add_argument("--policy", choices=POLICIES, default=RouteSettings().policy)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_number(int, 0, 65535), default=30080, help="0: a free one")
    parser.add_argument(
        "--admin-api-key", metavar="KEY", help="opens /workers; needed unless --host is local"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--pd-disaggregation", action="store_true", help="refused: not done")
    for table, defaults in ((NUMBERS, RouteSettings()), (LIMITS, PolicySettings())):
        for name, (kind, least, most, about) in table.items():
            default = getattr(defaults, name.replace("-", "_"))
            parser.add_argument(
                f"--{name}",
                type=_number(kind, least, most),
                default=default,
                metavar="N",
                help=f"{about} (default: {default})",
            )
    return parser


def _number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """A number within limits, for argparse."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is no number of type {kind.__name__}") from None
        if not isfinite(value) or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least:g} and {most:g}")
        return value

    return read
