"""Observers of requests: the request log, files of request metrics, histograms of lengths, and dumps after a
crash.

Files are readable by the server's user alone. --log-requests-level decides how much of a request's text is
written (metrics/request_records.py).
"""

import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Literal

from msgspec import Struct

from runtime import log
from runtime.errors import RankDied, StartError
from runtime.json_value import Fields
from runtime.metrics import Metrics
from runtime.metrics.crash_dump import CrashDump
from runtime.metrics.line_writer import LineWriter
from runtime.metrics.request_labels import LabelledRequests
from runtime.metrics.request_records import Record, Records, RequestObserver, as_json
from runtime.metrics.traces import open_traces
from runtime.options.plan import Plan

Write = Callable[[Fields], None]  # writes the fields of a line


class Lines:
    """Writes lines to a stream, or to a file of the day or hour in a folder. Lines that cannot be written are
    lost; the first one is logged."""

    def __init__(self, target: str, name: str, stamp: str, writer: LineWriter, *, is_json: bool) -> None:
        """`target`: stdout, stderr or a folder, whose files `writer` writes; `stamp`: the strftime format in
        file names. Raises StartError."""
        self._name, self._stamp, self._is_json = name, stamp, is_json
        self._folder = None if target in ("stdout", "stderr") else Path(target)
        self._stream = sys.stdout if target == "stdout" else sys.stderr
        self._writer = writer
        self._has_failed = False
        if self._folder is not None:
            open_folder(self._folder)

    def write(self, fields: Fields) -> None:
        """Writes one line."""
        line = as_json(fields) if self._is_json else as_text(fields)
        if self._folder is not None:
            path = self._folder / f"{self._name}-{datetime.now():{self._stamp}}.log"
            self._writer.put(path, line + "\n")
            return
        try:
            print(line, file=self._stream, flush=True)
        except OSError as error:  # which must not fail a request
            if not self._has_failed:
                log.get("requests").warning(
                    "lines are lost: they cannot be written", target=self._stream.name, reason=error.strerror
                )
            self._has_failed = True


def open_folder(folder: Path) -> Path:
    """Makes a folder that can be written to, and returns it. Raises StartError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise StartError(f"{folder} cannot be written to: {error.strerror}; choose another folder") from None
    return folder


def as_text(fields: Fields) -> str:
    """The fields as one line of text, with values that may contain anything as JSON."""
    first = f"{fields['timestamp']} {fields.get('event', '')}".rstrip()
    rest = (
        f"{name}={value if isinstance(value, int | float) else as_json(value)}"
        for name, value in fields.items()
        if name not in ("timestamp", "event")
    )
    return " ".join((first, *rest))


def stamped(event: str, fields: Fields) -> Fields:
    """The fields of a line, with its time and event."""
    return {
        "timestamp": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "event": event,
    } | fields


class RequestLog:
    """--log-requests: a line when a request comes and one when it ends."""

    def __init__(self, level: int, writes: list[Write]) -> None:
        self._level = level
        self._writes = writes

    def began(self, record: Record) -> None:
        """Writes a line."""
        self._write(stamped("request.received", record.input_fields(self._level)))

    def ended(self, record: Record) -> None:
        """Writes a line."""
        self._write(
            stamped("request.finished", {"rid": record.request.id} | record.output_fields(self._level))
        )

    def _write(self, fields: Fields) -> None:
        for write in self._writes:
            write(fields)


class RequestMetrics:
    """--export-metrics-to-file, and --enable-request-time-stats-logging: a line for each request that has
    ended, of numbers without text."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def began(self, record: Record) -> None:
        """Does nothing."""

    def ended(self, record: Record) -> None:
        """Writes a line."""
        self._write(stamped("request.figures", record.input_fields(1) | record.metrics()))


class LengthHistograms:
    """--collect-tokens-histogram: lengths of prompts and answers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def began(self, record: Record) -> None:
        """Does nothing."""

    def ended(self, record: Record) -> None:
        """Observes both lengths."""
        if record.prompt_tokens:
            self._metrics.prompt_length.observe(record.prompt_tokens)
            self._metrics.answer_length.observe(record.completion_tokens)


class RequestLogSettings(Struct, frozen=True):
    """Whether requests are logged, how much of each (--log-requests-level), and in which form."""

    is_on: bool
    level: Literal[0, 1, 2, 3]
    format: Literal["text", "json"]


class RequestLogs:
    """The observers that the options ask for, and the records that they observe."""

    def __init__(self, plan: Plan, metrics: Metrics) -> None:
        """Raises StartError, OptionsError."""
        self._writer = LineWriter()
        self.crash = (
            None
            if plan.logs.crash_dump_folder is None
            else CrashDump(open_folder(Path(plan.logs.crash_dump_folder)), plan.logs.log_requests_level)
        )
        observers: list[RequestObserver] = [] if self.crash is None else [self.crash]
        self._targets = plan.logs.log_requests_target or ("stderr",)
        self.settings = RequestLogSettings(
            plan.logs.log_requests, plan.logs.log_requests_level, plan.logs.log_requests_format
        )
        self._crash_keeps_texts = self.crash is not None and plan.logs.log_requests_level >= 2
        if plan.observe.export_metrics_to_file:
            assert plan.observe.export_metrics_to_file_dir is not None  # a conflict says so
            observers.append(
                RequestMetrics(
                    Lines(
                        plan.observe.export_metrics_to_file_dir,
                        "request-metrics",
                        "%Y%m%d-%H",
                        self._writer,
                        is_json=True,
                    ).write
                )
            )
        if plan.logs.enable_request_time_stats_logging:
            observers.append(
                RequestMetrics(
                    lambda fields: log.get("requests").info(
                        fields["event"],
                        **{
                            name: value
                            for name, value in fields.items()
                            if name not in ("timestamp", "event", "sampling_params")
                        },
                    )
                )
            )
        self._traces = open_traces(plan.observe.otlp_traces_endpoint) if plan.observe.enable_trace else None
        if self._traces is not None:
            observers.append(self._traces)
        if plan.observe.collect_tokens_histogram:
            observers.append(LengthHistograms(metrics))
        if plan.observe.tokenizer_metrics_allowed_custom_labels:
            observers.append(LabelledRequests(plan.observe.tokenizer_metrics_allowed_custom_labels, metrics))
        self._others = observers
        self.records = Records([], keeps_texts=False)
        self.configure(self.settings)

    def configure(self, settings: RequestLogSettings) -> None:
        """Logs requests as `settings` say, from now on. Raises StartError where a folder of
        --log-requests-target cannot be written to."""
        logged: list[RequestObserver] = []
        if settings.is_on:
            is_json = settings.format == "json"
            lines = [
                Lines(target, "requests", "%Y%m%d", self._writer, is_json=is_json) for target in self._targets
            ]
            logged = [RequestLog(settings.level, [one.write for one in lines])]
        self.settings = settings
        self.records.observe(
            [*logged, *self._others],
            keeps_texts=self._crash_keeps_texts or (settings.is_on and settings.level >= 2),
        )

    def close(self, within_s: float) -> None:
        """Writes the lines and crash dumps that wait, for a short time, or `within_s`, at most. Blocking."""
        begin_s = monotonic()
        self._writer.close(within_s)
        if self._traces is not None:
            self._traces.close(within_s - (monotonic() - begin_s))
        if self.crash is not None:
            self.crash.close(within_s - (monotonic() - begin_s))

    def rank_died(self, died: RankDied) -> None:
        """A rank has died: writes the crash dump, where there is one."""
        if self.crash is not None:
            self.crash.dump(died, self.records.open)
