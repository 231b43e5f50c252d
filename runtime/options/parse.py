"""From a command line, a YAML file or keyword arguments to Options. All problems are raised together.

    parsed = from_argv(["--port", "0", "--config", "server.yaml"])
    parsed.options.http.port     0
    parsed.sources["port"]       "flag --port"

Where an option is given several times, flags win over the file of --config, and that over the --profile.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args, get_origin

import msgspec
from msgspec import Struct

from runtime.errors import OptionsError
from runtime.options.compat.suggest import unknown
from runtime.options.config_file import read_config
from runtime.options.declare import REFUSED, Value
from runtime.options.profile import read_profile
from runtime.options.rules.checks import option_problems
from runtime.options.table import Row, by_flag, by_name, canonical, rows
from runtime.options.tree import Options


class ParsedOptions(Struct, frozen=True):
    """The given options, the source of each one that is not a default, and notices for the log at start."""

    options: Options
    sources: dict[str, str]  # by option name: "flag --x", "file server.yaml", "argument", "profile x"
    reasons: dict[str, str] = {}  # by option name, where the source gives one
    notices: list[str] = []


class Setting(Struct, frozen=True):
    """One value given to one option. `alias` is its name as written by the user."""

    row: Row
    value: Value
    alias: str
    source: str
    reason: str = ""


def from_argv(argv: Sequence[str]) -> ParsedOptions:
    """Reads flags, which a model may stand in front of, and the file of --config, whose values flags
    override. Raises OptionsError with every problem found."""
    problems: list[str] = []
    flags = list(_read_flags(argv, problems))
    files = [setting.value for setting in flags if setting.row.name == "config"]
    read = [setting for file in files for setting in _read_file(Path(file), problems)]
    return _gather([*read, *flags], problems)


def from_values(values: Mapping[str, object]) -> ParsedOptions:
    """Options by name, as the library takes them. Raises OptionsError with every problem found."""
    problems: list[str] = []
    return _gather(list(_named(values, "argument", "", problems)), problems)


def _from_profile(settings: list[Setting], problems: list[str], notices: list[str]) -> list[Setting]:
    """Settings of the profile that the given settings name; none if they name none."""
    named = [setting.value for setting in settings if setting.row.name == "profile" and setting.value]
    if not named:
        return []
    try:
        profile = read_profile(str(named[-1]))
    except OptionsError as error:
        problems.append(str(error))
        return []
    if profile.later:
        notices.append(f"profile {named[-1]} leaves out what is not here yet: {', '.join(profile.later)}")
    source, lines = f"profile {named[-1]}", dict(profile.options)
    given = {setting.row.name for setting in settings}
    for name, more in profile.when_given.items():
        if name in given:
            lines |= more
        else:
            notices.append(f"{source} goes on with {by_name()[name].flag}: {', '.join(more)}")
    return [
        Setting(by_name()[name], line.value, f"{name} of {source}", source, line.why)
        for name, line in lines.items()
    ]


def _read_flags(argv: Sequence[str], problems: list[str]) -> Iterator[Setting]:
    words = list(reversed(argv))
    if words and not words[-1].startswith("-"):  # the model in front of all options
        yield Setting(by_flag()["--model-path"], words.pop(), "MODEL", "argument MODEL")
    while words:
        word = words.pop()
        alias, equals, inline = word.partition("=")
        key = canonical(alias)
        row = by_flag().get(key)
        if row is not None:
            value = inline if equals else _take(row, words)
            if value is None:
                problems.append(f"{alias} needs a value: {row.type}")
            else:
                yield Setting(row, value, alias, f"flag {alias}")
        elif (
            key.startswith("--no-")
            and (row := by_flag().get("--" + key[5:]))
            and row.takes == "switch"
            and not equals
        ):
            yield Setting(row, False, alias, f"flag {alias}")
        else:
            problems.append(
                unknown(alias, "flag")
                if word.startswith("-")
                else f"{word} stands alone: a value follows its flag; a model is --model-path {word}"
            )
            _skip_values(words)


def _take(row: Row, words: list[str]) -> Value:
    """Pops the value of a flag from the reversed `words`; None where it is missing."""
    if row.takes == "switch":
        return words.pop() if words and words[-1].lower() in ("true", "false", "0", "1") else True
    if row.takes == "many":
        taken = []
        while words and not _is_flag(words[-1]):
            taken.append(words.pop())
        return taken or None
    return words.pop() if words and not _is_flag(words[-1]) else row.bare


def _is_flag(word: str) -> bool:
    """Whether a word begins an option; -1 is a value."""
    return word.startswith("--") or word.partition("=")[0] in by_flag()


def _skip_values(words: list[str]) -> None:
    """Drops the words after an unknown flag, which most likely are its values and not a second problem."""
    while words and not words[-1].startswith("-"):
        words.pop()


def _read_file(path: Path, problems: list[str]) -> list[Setting]:
    try:
        values = read_config(path)
    except OptionsError as error:
        problems += error.problems
        return []
    return list(_named(values, f"file {path.name}", f" in {path.name}", problems))


def _named(values: Mapping[str, object], source: str, where: str, problems: list[str]) -> Iterator[Setting]:
    """Settings by option name, spelt with dashes or underscores; aliases work as they do on the command
    line. `where` is the file, as the end of " in FILE"."""
    names: dict[str, str] = {}  # of those before, by option
    for key, value in values.items():
        row = by_flag().get(canonical(f"--{key}"))
        if row is None:
            problems.append(unknown(key, "option", where))
        elif row.name == "config":
            problems.append(f"config{where} has no effect there; it is an option of the command line alone")
        elif (other := names.setdefault(row.name, key)) != key:
            problems.append(f"{other} and {key}{where} are one option; keep one of them")
        elif value is not None or row.default is None:
            yield Setting(row, value, f"{key}{where}", source)
        else:
            problems.append(f"{key}{where} has no value; expected {row.type}")


def _gather(settings: list[Setting], problems: list[str]) -> ParsedOptions:
    tree: dict[str, dict[str, object]] = {}
    sources: dict[str, str] = {}
    reasons: dict[str, str] = {}
    notices: list[str] = []
    for setting in [*_from_profile(settings, problems, notices), *settings]:
        expanded = _expand(setting, notices)
        if expanded is None:
            continue
        if expanded.row.status == "superseded":
            notices.append(f"{expanded.alias} has no effect: {expanded.row.note}")
            continue
        if (problem := _refusal(expanded.row, expanded.alias)) is not None:
            if _asks_for_default(expanded):
                notices.append(f"{expanded.alias} {expanded.value} has no effect: it is what happens anyway")
                continue
            problems.append(problem)
        if _convert(expanded, tree, problems):
            sources[expanded.row.name], reasons[expanded.row.name] = expanded.source, setting.reason
    values = {row.name: tree.get(row.group, {}).get(row.name, row.default) for row in rows()}
    problems += option_problems(values)
    if problems:
        raise OptionsError(list(dict.fromkeys(problems)))
    return ParsedOptions(msgspec.convert(tree, Options), sources, reasons, list(dict.fromkeys(notices)))


def _expand(setting: Setting, notices: list[str]) -> Setting | None:
    """The setting that a foreign alias stands for; None where it asks for the default."""
    row = setting.row
    if not row.means:
        return setting
    own = by_flag()[row.means]
    value = row.values.get(str(setting.value).lower(), setting.value)
    if own.takes == "many" and isinstance(value, str):
        value = value.split(",")
    if value == own.default:
        notices.append(f"{setting.alias} {setting.value} asks for what is the default here")
        return None
    notices.append(f"{setting.alias} is {own.flag} here")
    return Setting(own, value, setting.alias, setting.source)


def _asks_for_default(setting: Setting) -> bool:
    """Whether the value of an option that is refused asks for nothing of it: `--rank-factor 0`."""
    if setting.row.status not in REFUSED or setting.row.takes == "switch":
        return False
    if str(setting.value) == str(setting.row.default):  # rows of other engines are not converted
        return True
    if setting.row.default is None and setting.value == "none":
        return True
    try:
        return bool(msgspec.convert(setting.value, setting.row.convert, strict=False) == setting.row.default)
    except (msgspec.ValidationError, ValueError, RecursionError):
        return False


def _refusal(row: Row, alias: str) -> str | None:
    if row.status == "refused":
        return f"{alias} is refused: {row.note}; leave it out"
    if row.status == "other-device":
        return (
            f"{alias} is an option of {row.device} devices, and nothing here implements it yet; leave it out"
        )
    return None


def _convert(setting: Setting, tree: dict[str, dict[str, object]], problems: list[str]) -> bool:
    """Puts the value into `tree` by group and name and returns True; or a sentence into `problems`, and
    returns False."""
    row, value = setting.row, setting.value
    try:
        if row.takes == "json" and isinstance(value, str):
            value = msgspec.json.decode(value)
        converted = msgspec.convert(value, row.convert, strict=False)
    # ValueError: surrogates; RecursionError: JSON of great depth
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if row.takes == "json" and isinstance(error, msgspec.ValidationError):
            problems.append(
                f"{setting.alias} {_show(row, value)} is not possible: {_first_lower(error)}; "
                f"{_json_example(row)}"
            )
            return False
        if row.takes == "json" and isinstance(error, msgspec.DecodeError):
            problems.append(
                f"{setting.alias} {_show(row, value)} is not JSON: {_first_lower(error)}; "
                f"{_json_example(row)}"
            )
            return False
        hint = "; a text like that is written in quotes" if _is_unquoted(row, value) else ""
        problems.append(f"{setting.alias} {_show(row, value)} is not possible; expected {row.type}{hint}")
        return False
    if converted in row.later:
        now = ", ".join(choice for choice in row.choices or () if choice not in row.later)
        problems.append(f"{setting.alias} {converted} is not here yet; choose one of {now}")
        return False
    tree.setdefault(row.group, {})[row.name] = converted
    return True


def _is_unquoted(row: Row, value: object) -> bool:
    """Whether a value is right as a text: YAML takes 123, yes and 2026-01-01 for something else."""
    texts = [str(part) for part in value] if isinstance(value, list) else str(value)
    try:
        msgspec.convert(texts, row.convert)
    except (msgspec.ValidationError, ValueError):
        return False
    return texts != value


def _first_lower(error: Exception) -> str:
    return str(error)[:1].lower() + str(error)[1:]


def _json_example(row: Row) -> str:
    """An example of valid JSON for an option, as the end of a sentence."""
    fields = _fields(row.convert)
    of = f" of {', '.join(fields)}" if fields else ""
    example = f'{{"{fields[0] if fields else "name"}": ...}}'
    if _is_list(row.convert):
        return f"give a list of objects{of} in quotes, like {row.flag} '[{example}]'"
    return f"give an object{of} in quotes, like {row.flag} '{example}'"


def _is_list(kind: object) -> bool:
    """Whether an option's type is a list, or may be one."""
    return get_origin(kind) is tuple or any(map(_is_list, get_args(kind)))


def _fields(kind: object) -> tuple[str, ...]:
    """Field names of the struct that an option's type is or contains; none where there is no struct."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind.__struct_fields__
    return next((fields for part in get_args(kind) if (fields := _fields(part))), ())


def _show(row: Row, value: object) -> str:
    if row.secret:
        return "(hidden)"
    if row.takes == "json" and not isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
