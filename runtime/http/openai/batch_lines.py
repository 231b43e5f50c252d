"""The lines of a batch: those of its input file, and the answers in its output files. Everything here
blocks."""

from collections.abc import Generator
from pathlib import Path
from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

from runtime.errors import TooLarge
from runtime.http.errors import invalid, json_fault
from runtime.http.json_weight import UNWEIGHED_BYTES, check_weight_now, weight_of
from runtime.http.openai.stored.folder import is_regular, writing

MAX_LINE_BYTES = 16 * 2**20  # the default of --max-body-bytes


class LineError(Struct, frozen=True, kw_only=True):
    """What is wrong with a line of the input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Line(Struct, frozen=True):
    """A line of the input file. The body stays JSON, which the route decodes."""

    custom_id: A[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Answered(Struct, frozen=True):
    """The id in a line of an output file."""

    custom_id: str


class AnswerLine(Struct, frozen=True):
    """A line of an output file."""

    custom_id: str
    response: "LineResponse | None" = None
    error: LineError | None = None  # instead of a response: why the line was not answered


class LineResponse(Struct, frozen=True):
    """The HTTP response to a line."""

    status_code: int
    body: msgspec.Raw


_line = msgspec.json.Decoder(Line)
_answered = msgspec.json.Decoder(Answered)
_answer_line = msgspec.json.Decoder(AnswerLine)


class BrokenInput(Exception):
    """The input file of a batch is missing, or is not what it was when it was checked."""


NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError)


def line_error(
    number: int, raw: bytes, endpoint: str, seen: set[str], max_bytes: int = MAX_LINE_BYTES
) -> LineError | None:
    """What is wrong with a line of the input file; `seen` are the ids of those before it, `max_bytes` the
    most that a request may have."""
    if len(raw) > max_bytes:
        return LineError(
            code="line_too_large",
            message=f"the line has {len(raw)} bytes; this server takes {max_bytes} (--max-body-bytes)",
            line=number,
        )
    try:
        if len(raw) > UNWEIGHED_BYTES:
            check_weight_now(weight_of(raw), max_bytes)
    except TooLarge as error:
        return LineError(code="line_too_large", message=error.message, line=number)
    try:
        line = _line.decode(raw)
    except msgspec.ValidationError as error:
        wrong = invalid(error, Line, "the line")
        return LineError(code="invalid_json_line", message=wrong.message, line=number, param=wrong.param)
    except msgspec.DecodeError as error:
        return LineError(code="invalid_json_line", message=json_fault(raw, error), line=number)
    except UnicodeDecodeError:
        return LineError(code="invalid_json_line", message="the line is not UTF-8", line=number)
    except RecursionError:
        return LineError(
            code="invalid_json_line", message="the JSON is nested too deeply; nest it less", line=number
        )
    if line.url != endpoint:
        return LineError(
            code="mismatched_endpoint",
            message=f"url must be {endpoint}, as the batch says",
            line=number,
            param="url",
        )
    if line.custom_id in seen:
        return LineError(
            code="duplicate_custom_id",
            message="another line has this custom_id",
            line=number,
            param="custom_id",
        )
    seen.add(line.custom_id)
    return None


def lines_of(path: Path) -> Generator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers. Raises BrokenInput, OSError."""
    try:
        file = path.open("rb")
    except PermissionError:
        raise BrokenInput("the input file can't be read") from None
    with file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


def answered_in(path: Path) -> list[str]:
    """The custom ids of the whole answers in an output file."""
    if not is_regular(path):
        return []
    with path.open("rb") as file:
        names = [custom_id(raw) for raw in file if raw.endswith(b"\n")]
    return [name for name in names if name is not None]


def custom_id(raw: bytes) -> str | None:
    """The custom id in a line of an output file; None for a damaged line."""
    try:
        raw.decode()
        return _answered.decode(raw).custom_id
    except (*NOT_JSON, RecursionError):
        return None


def answer_line(raw: bytes) -> AnswerLine | None:
    """A line of an output file; None for a damaged one."""
    try:
        return _answer_line.decode(raw)
    except (*NOT_JSON, RecursionError):
        return None


def num_cut_off(path: Path) -> int:
    """Lines of an output file that say that the line of their request was not answered. Raises OSError."""
    if not is_regular(path):
        return 0
    with path.open("rb") as file:
        return sum(line is not None and line.response is None for line in map(answer_line, file))


def checked_line(number: int, raw: bytes) -> Line:
    """A line of the input file that was checked before. Raises BrokenInput when it is no such line any
    more."""
    try:
        return _line.decode(raw)
    except (*NOT_JSON, RecursionError) as error:
        raise BrokenInput(f"line {number} of the input file is damaged: {error}") from None


def take_out(path: Path, bad: set[int]) -> Path:
    """Takes the lines with these numbers out of a file. Returns the path of the file that has them now.
    Raises OSError."""
    damaged, rest = (path.with_name(path.name + suffix) for suffix in ("-damaged-lines", "-rest.part"))
    for one in (damaged, rest):
        one.unlink(missing_ok=True)
    with path.open("rb") as file, writing(damaged) as damaged_file, writing(rest) as rest_file:
        for number, raw in enumerate(file):
            (damaged_file if number in bad else rest_file).write(raw)
    rest.replace(path)
    return damaged
