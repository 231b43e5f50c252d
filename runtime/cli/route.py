"""`runtime route --worker-urls URL ...`: a reverse proxy that spreads requests over servers."""

import argparse
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from msgspec import structs

from runtime import log
from runtime.errors import InvalidRequest, StartError
from runtime.routing.policies import POLICIES, PolicySettings
from runtime.routing.workers import RouteSettings

if TYPE_CHECKING:
    from runtime.routing.pairs import Pairs
    from runtime.routing.workers import Workers

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


BOOTSTRAP_PORT = 8998  # as --disaggregation-bootstrap-port
FOR_PAIRS = ("prefill", "decode", "prefill_policy", "decode_policy", "local_prompt_bytes")


def run(argv: Sequence[str]) -> int:
    """Routes until a signal ends it. Raises StartError for options that cannot work."""
    parsed = _parser().parse_args(argv)
    values = {name: getattr(parsed, name.replace("-", "_")) for name in (*NUMBERS, *LIMITS)}
    settings = RouteSettings(
        policy=parsed.policy,
        limits=PolicySettings(**{name.replace("-", "_"): values[name] for name in LIMITS}),
        **{name.replace("-", "_"): values[name] for name in NUMBERS},
    )
    workers = _pairs(parsed, settings) if parsed.pd_disaggregation else _workers(parsed, settings)
    from runtime.routing import router  # here, so that --help answers at once

    log.setup(parsed.log_level, parsed.log_format)
    return router.run(workers, parsed.host, parsed.port, parsed.admin_api_key)


def _workers(parsed: argparse.Namespace, settings: RouteSettings) -> "Workers":
    from runtime.routing.workers import Workers

    if any(getattr(parsed, name) for name in FOR_PAIRS):
        raise StartError(f"{', '.join(map(_flag, FOR_PAIRS))} need --pd-disaggregation; add it")
    if not parsed.worker_urls:
        raise StartError("--worker-urls is missing; give the URLs of servers, as http://HOST:PORT")
    try:
        return Workers(parsed.worker_urls, settings)
    except InvalidRequest as error:
        raise StartError(f"--worker-urls: {error.message}") from None


def _pairs(parsed: argparse.Namespace, settings: RouteSettings) -> "Pairs":
    from runtime.routing.pairs import Pairs, PairSettings
    from runtime.transfer.key import SERVERS_KEY

    if parsed.worker_urls:
        raise StartError("--worker-urls goes without --pd-disaggregation; give --prefill and --decode")
    if not (parsed.prefill and parsed.decode):
        raise StartError("--pd-disaggregation needs --prefill URL [PORT] and --decode URL; give both")
    prefill, decode = (
        structs.replace(settings, policy=policy or parsed.policy)
        for policy in (parsed.prefill_policy, parsed.decode_policy)
    )
    own = PairSettings(
        key=SERVERS_KEY.read(parsed.disaggregation_key_file), local_prompt_bytes=parsed.local_prompt_bytes
    )
    pairs = Pairs(prefill, decode, own)
    try:
        for url, *port in parsed.prefill:
            pairs.add(url, _port(port))
        for url in parsed.decode:
            pairs.add(url, None)
    except InvalidRequest as error:
        raise StartError(f"--prefill or --decode: {error.message}") from None
    return pairs


def _port(words: list[str]) -> int:
    """The bootstrap port of a prefill server, 8998 where none is given. Raises StartError."""
    if not words or words == ["none"]:
        return BOOTSTRAP_PORT
    if len(words) > 1 or not (words[0].isascii() and words[0].isdigit() and 0 < int(words[0]) < 65536):
        raise StartError(
            f"--prefill takes a URL and a port, not {' '.join(words)}; give it once for each server"
        )
    return int(words[0])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    _add_pairs(parser)
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


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and answers on different servers (docs/disaggregation.md)")
    group.add_argument("--pd-disaggregation", action="store_true", help="needs --prefill and --decode")
    group.add_argument(
        "--prefill",
        nargs="+",
        action="append",
        metavar=("URL", "PORT"),
        help=f"a server for prompts, and its bootstrap port (default: {BOOTSTRAP_PORT}); once for each",
    )
    group.add_argument("--decode", action="append", metavar="URL", help="a server for answers; once for each")
    group.add_argument("--prefill-policy", choices=POLICIES, help="default: that of --policy")
    group.add_argument("--decode-policy", choices=POLICIES, help="default: that of --policy")
    group.add_argument(
        "--disaggregation-key-file",
        metavar="FILE",
        help="the key that the servers have as well (else RUNTIME_DISAGGREGATION_KEY)",
    )
    group.add_argument(
        "--local-prompt-bytes",
        type=_number(int, 0, 2**40),
        default=0,
        metavar="N",
        help="shorter prompts go to a decode server alone (default: 0)",
    )


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
