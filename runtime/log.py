"""Log lines: structlog, as text or JSON, on stderr. Silent until `setup` is called, as in an application that
uses the library.

    log = runtime.log.get("scheduler")
    log.info("ready", pages=1024)
    with phase("weights"): ...          one line at the end, with its time

The chain of processors is our own: structlog's defaults and the root logger of `logging` belong to the
application. It is imported with the first logger, so that a process of our own may do so its way before
(`import_structlog`).
"""

import logging
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "exception": 40, "critical": 50}
SILENT = 100
CLEAR = "\r\x1b[K"  # takes away what the cursor's line has


class Output:
    """Level, stream and form of log lines. There is one for the process; loggers made earlier follow it."""

    def __init__(self) -> None:
        self.level = SILENT
        self.stream: TextIO | None = None
        self.renderers: tuple[Processor, ...] = ()
        self.over = ""  # the line on the terminal that the next one is written over
        self.is_terminal = False
        self.num_lost = 0  # lines that could not be written since the last one that was

    def write(self, line: str) -> None:
        """Writes a rendered line. One that cannot be written (a full disk, a pipe whose reader has gone) is
        lost and counted: it must fail neither a request nor a start."""
        if self.over:
            line = f"{CLEAR}{line}\n{self.over}"
        try:
            print(line, end="" if self.over else "\n", file=self.stream or sys.stderr, flush=True)
        except OSError:
            self.num_lost += 1
            return
        if self.num_lost:
            lost, self.num_lost = self.num_lost, 0
            get("log").warning("lines were lost: they could not be written", lines=lost)

    def overwrite(self, line: str) -> None:
        """Writes a line that the next one takes the place of; an empty one takes it away."""
        if self.is_terminal and line != self.over:
            self.over = line
            with suppress(OSError):  # the terminal has gone
                print(f"{CLEAR}{line}", end="", file=self.stream or sys.stderr, flush=True)

    debug = info = warning = error = exception = critical = write


_output = Output()


def setup(level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
    """Writes lines of `level` and above, as `text` for people or one `json` object each; to stderr unless
    `stream` is given."""
    _output.level = LEVELS[level]
    _output.stream = stream
    is_terminal = (stream or sys.stderr).isatty()
    _output.renderers = _json() if format == "json" else _text(is_terminal)
    _output.is_terminal = is_terminal and format == "text" and level in ("debug", "info")


def level() -> str:
    """The lowest level that is written."""
    return next((name for name, number in LEVELS.items() if number == _output.level), "silent")


def set_level(name: str) -> None:
    """Writes lines of this level and above from now on, in the form of `setup`. Nothing where there was no
    `setup`: the lines are then the application's."""
    if _output.level != SILENT:
        _output.level = LEVELS[name]


class _Forward(logging.Handler):
    """Writes what libraries log as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        line = getattr(get(record.name), level if level in LEVELS else "info")
        stack = {"exc_info": record.exc_info} if record.exc_info else {}
        line("logging", message=record.getMessage(), **stack)


def take_logging() -> None:
    """Writes what libraries log with `logging`, from warnings on, in the form of `setup`. For a process of
    our own, not for an application that uses the library."""
    root = logging.getLogger()
    if not any(isinstance(handler, _Forward) for handler in root.handlers):
        root.addHandler(_Forward())
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each broken form


def write_stack(error: BaseException | None = None) -> None:
    """Writes the stack of `error`, or of the one that is being handled, to stderr, whatever `setup` chose.
    Does nothing where stderr cannot be written to."""
    with suppress(OSError):
        traceback.print_exception(error or sys.exception(), file=sys.stderr)


def silence() -> None:
    """Writes no lines any more, as before `setup`."""
    _output.level = SILENT
    _output.stream = None
    _output.is_terminal = False


def is_terminal() -> bool:
    """Whether lines of level info go to a terminal, as text."""
    return _output.is_terminal


def overwrite(text: str) -> None:
    """On a terminal, one line at the bottom that the next call writes over, with log lines going on above it;
    an empty one takes it away. Elsewhere nothing."""
    _output.overwrite(text[: shutil.get_terminal_size().columns - 1])


def import_structlog() -> None:
    """Imports structlog without `rich`, which it takes where it is installed, for traces of errors in a form
    that is not ours: a third of the modules that it brings. For a process of our own: an application's
    structlog keeps what it has."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # `import rich` raises ModuleNotFoundError
    try:
        import_module("structlog")
    finally:
        del sys.modules["rich"]


def get(name: str) -> "structlog.BoundLogger":
    """A structlog logger whose lines carry `part=name`."""
    import structlog

    return structlog.wrap_logger(
        _output,
        processors=[_drop_below, structlog.processors.add_log_level, _render],
        wrapper_class=structlog.BoundLogger,
        part=name,
    )


@contextmanager
def phase(name: str, **facts: object) -> Iterator[None]:
    """Logs one line with the seconds that the phase took; nothing when it fails, as the error is logged."""
    begin = time.monotonic()
    yield
    get("start").info(name, seconds=round(time.monotonic() - begin, 3), **facts)


def _json() -> tuple["Processor", ...]:
    import structlog

    return (
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    )


def _text(colors: bool) -> tuple["Processor", ...]:
    import structlog

    return (
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _printable,
        structlog.dev.ConsoleRenderer(
            colors=colors, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        ),
    )


def _printable(logger: "WrappedLogger", method: str, event: "EventDict") -> "EventDict":
    """Control characters are written as escapes: a client's text makes no lines and moves no cursor."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join([c if c.isprintable() else repr(c)[1:-1] for c in value])
    return event


def _drop_below(logger: "WrappedLogger", method: str, event: "EventDict") -> "EventDict":
    if LEVELS[method] < _output.level:
        import structlog

        raise structlog.DropEvent
    if method == "exception":
        event.setdefault("exc_info", True)
    return event


def _render(logger: "WrappedLogger", method: str, event: "EventDict") -> object:
    """The chain that `setup` chose last, so that loggers made before it follow."""
    out = event
    for renderer in _output.renderers:
        out = renderer(logger, method, out)
    return out
