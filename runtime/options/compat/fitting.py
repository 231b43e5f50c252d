"""Settings that `serve` takes: each value in the words that the option knows, and all of them through the
parser of `serve` itself."""

import json
import re
from collections.abc import Container

import msgspec

from runtime.errors import OptionsError
from runtime.options.declare import REFUSED, Value
from runtime.options.parse import from_argv
from runtime.options.table import Row

Settings = list[tuple[str, Value]]  # flags of ours with their values

# words that other systems have for a value, in lower case, by our flag
WORDS: dict[str, dict[str, str]] = {
    "--log-level": {"warn": "warning", "fatal": "critical", "trace": "debug", "notset": "debug"},
    "--log-level-http": {"warn": "warning", "fatal": "critical", "trace": "debug", "notset": "debug"},
    "--dtype": {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"},
    "--kv-cache-dtype": {"fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "fp16": "auto", "float16": "auto"},
    "--device": {"gpu": "cuda", "ascend": "npu"},
    "--quantization": {"none": "", "null": ""},
}
READ_FROM_FILES = frozenset(
    {"--config", "--profile"}
)  # files that need not be on the machine that translates


def words_of(flag: str, value: Value) -> list[str]:
    """One setting as words of a command line."""
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag[2:]]
    return [flag, *(_word(one) for one in (value if isinstance(value, list | tuple) else [value]))]


def fit(row: Row, value: Value) -> Value | None:
    """The value as the option takes it: as it is, or in the option's own words. None: there is no such
    value."""
    if row.takes == "switch":
        return value if isinstance(value, bool) else None
    candidates = [value]
    if isinstance(value, str):
        lower = value.lower()
        candidates += [WORDS.get(row.flag, {}).get(lower, lower)]
        candidates += [choice for choice in row.choices or () if choice.lower() == lower]
        if re.fullmatch(r"\d+\.0+", value):
            candidates.append(value.partition(".")[0])
    return next((one for one in candidates if _converts(row, one)), None)


def asks_for_default(row: Row, value: Value) -> bool:
    """Whether `serve` takes a refused option with this value, for it asks for nothing of it."""
    if row.status not in REFUSED or row.takes == "switch":
        return False
    try:
        return bool(_convert(row, value) == row.default)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False


def without_problems(settings: Settings, refused: Container[str], notes: list[str]) -> Settings:
    """The settings less those that `serve` would refuse to have together; a note has its sentence for each.

    `refused` are flags that this version refuses anyway, and says so; they are not asked about.
    """
    kept = list(settings)
    while True:
        asked = [one for one in kept if one[0] not in refused and one[0] not in READ_FROM_FILES]
        try:
            from_argv([word for flag, value in asked for word in words_of(flag, value)])
            return kept
        except OptionsError as error:
            flag, problem = _to_leave_out([flag for flag, _ in asked], error.problems)
        notes.append(f"{flag} is left out, for serve says: {problem}")
        kept = [one for one in kept if one[0] != flag]


def _to_leave_out(flags: list[str], problems: list[str]) -> tuple[str, str]:
    """The last flag that a problem names, and that problem; the last flag of all where none is named."""
    named = (
        (flag, problem)
        for flag in reversed(flags)
        for problem in problems
        if re.search(rf"{re.escape(flag)}(?![\w-])", problem)
    )
    return next(named, (flags[-1], problems[0]))


def _converts(row: Row, value: Value) -> bool:
    try:
        _convert(row, value)
    # ValueError: surrogates; RecursionError: JSON of great depth
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return value != "" or row.flag not in WORDS


def _convert(row: Row, value: Value) -> Value:
    """The value in the option's type. Raises msgspec.DecodeError, ValueError or RecursionError."""
    if row.takes == "json" and isinstance(value, str):
        value = msgspec.json.decode(value)
    return msgspec.convert(value, row.convert, strict=False)


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
