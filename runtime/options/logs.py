"""What the server says about itself."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Amount, Count, Group, option, planned, superseded


class Logs(Group, frozen=True, kw_only=True):
    """Logging"""

    log_level: A[Literal["debug", "info", "warning", "error", "critical"], option("Least severe line that is logged.")] = "info"
    log_format: A[Literal["text", "json"], option("Lines for people, or one JSON object each.")] = "text"
    log_level_http: A[str | None, planned("Least severe line of the HTTP server's access log.")] = None
    log_requests: A[bool, planned("Log requests and answers.")] = False
    log_requests_level: A[Literal[0, 1, 2, 3], planned(
        "How much of a request is logged: metadata, parameters, the beginning of the text, or all.")] = 2
    log_requests_format: A[Literal["text", "json"], planned("Form of the logged requests.")] = "text"
    log_requests_target: A[tuple[str, ...] | None, planned("Where logged requests go: the standard output, or folders.")] = None
    uvicorn_access_log_exclude_prefixes: A[tuple[str, ...], planned("Paths that the access log leaves out.")] = ()
    crash_dump_folder: A[str | None, planned("Folder where the last requests are kept when a rank dies.")] = None
    show_time_cost: A[bool, superseded(
        "Log how long the phases of start-up take.", "each phase of start-up always has a line with its time.")] = False
    gc_warning_threshold_secs: A[Amount, planned("Warn when a garbage collection takes longer.")] = 0.0
    decode_log_interval: A[Count, planned("Decode steps between two log lines about load and speed.")] = 40
    enable_request_time_stats_logging: A[bool, planned("Log the times of each request's phases when it ends.")] = False
