"""The log of the server."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Amount, Count, Group, option, superseded


class Logs(Group, frozen=True, kw_only=True):
    """Logging"""

    log_level: A[
        Literal["debug", "info", "warning", "error", "critical"], option("Least severe line that is logged.")
    ] = "info"
    log_format: A[Literal["text", "json"], option("Lines for people, or one JSON object each.")] = "text"
    log_level_http: A[
        Literal["debug", "info", "warning", "error", "critical"] | None,
        option(
            "Least severe line of the access log: info all requests, warning those that were refused, "
            "error those that failed.",
            note="none unless it is given; the reference logs them as --log-level says",
        ),
    ] = None
    log_requests: A[bool, option("Log requests and answers.")] = False
    log_requests_level: A[
        Literal[0, 1, 2, 3],
        option(
            "How much of a request is logged: metadata, parameters, the beginning of the text, or all.",
            note="below 2 no words of clients are written anywhere; it holds for --crash-dump-folder too",
        ),
    ] = 2
    log_requests_format: A[Literal["text", "json"], option("Form of the logged requests.")] = "text"
    log_requests_target: A[
        tuple[str, ...] | None,
        option("Where logged requests go: stdout, or folders; none of it: to standard error, as the log."),
    ] = None
    uvicorn_access_log_exclude_prefixes: A[
        tuple[str, ...], option("Beginnings of paths that the access log leaves out.")
    ] = ()
    crash_dump_folder: A[
        str | None,
        option(
            "Folder where the requests of the last five minutes are written when a rank dies.",
            note="as JSON lines; see logs.md",
        ),
    ] = None
    show_time_cost: A[
        bool,
        superseded(
            "Log how long the phases of start-up take.",
            "each phase of start-up always has a line with its time.",
        ),
    ] = False
    gc_warning_threshold_secs: A[Amount, option("Warn when a garbage collection takes longer; 0: never.")] = (
        0.0
    )
    decode_log_interval: A[
        Count | None,
        option(
            "Steps between two log lines about load and speed.",
            note="none unless it is given; the reference has one every 40",
        ),
    ] = None
    enable_request_time_stats_logging: A[bool, option("Log the times of each request when it ends.")] = False
