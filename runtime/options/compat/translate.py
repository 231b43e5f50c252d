"""A command line of SGLang, RTP-LLM or vLLM → one of `runtime serve`, with a sentence for each thing that
changes on the way.

Reads what people paste: leading VARIABLE=value words, the interpreter, line ends with backslashes. Pure:
words in, words out.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from runtime.errors import OptionsError
from runtime.options.compat import vllm
from runtime.options.compat.environment import ENVIRONMENT, RANK_VARIABLES
from runtime.options.declare import Value
from runtime.options.table import Row, by_flag, canonical

System = Literal["sglang", "rtp_llm", "vllm"]

# what the command of each system contains
COMMANDS: tuple[tuple[str, System], ...] = (
    (r"(.*/)?sglang|sglang(_router)?\..*", "sglang"),
    (r"(rtp_llm|maga_transformer)[./].*|(.*/)?rtp_llm", "rtp_llm"),
    (r"(.*/)?vllm|vllm\..*", "vllm"),
)
SHELL = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1", "2>"}  # what ends a command
VARIABLE_FLAGS = {
    variable: "--" + option.replace("_", "-") for option, (variable, _, _) in RANK_VARIABLES.items()
}
# RTP-LLM takes these from flags or from the environment; None: nothing of the kind is needed here
RTP_LLM_BASICS: dict[str, str | None] = {
    "--checkpoint-path": "--model-path",
    "--tokenizer-path": "--tokenizer-path",
    "--start-port": "--port",
    "--max-seq-len": "--context-length",
    "--act-type": "--dtype",
    "--seq-size-per-block": "--page-size",
    "--lora-info": "--lora-paths",
    "--model-type": None,
}
LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmM])")
UNITS = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


class Translation(Struct, frozen=True):
    """A translated command. `settings` are flags of ours in order, with their values; True stands for a
    switch."""

    system: System
    settings: list[tuple[str, Value]]
    notes: list[str]

    def words(self) -> list[str]:
        """The words of the command line, `runtime serve` first."""
        out = ["runtime", "serve"]
        for flag, value in self.settings:
            out += (
                [flag]
                if value is True
                else ["--no-" + flag[2:]]
                if value is False
                else [flag, *map(_word, _values(value))]
            )
        return out

    def yaml(self) -> str:
        """The settings as a --config file; every JSON value is a YAML value."""
        return "".join(
            f"{flag[2:]}: {json.dumps(_typed(value), ensure_ascii=False)}\n" for flag, value in self.settings
        )


def translate(words: Sequence[str], *, only_working: bool = False) -> Translation:
    """Translates a command of another system. `only_working` leaves out what this version refuses.

    Raises OptionsError when no known system's command is among `words`.
    """
    before, system, after = _split([word for word in words if word.strip() not in ("", "\\")])
    settings: list[tuple[str, Value]] = []
    notes: list[str] = []
    for theirs, values in _flags([*_environment(before, system, notes), *after]):
        for flag, value in READERS[system](theirs, values, notes):
            row = by_flag().get(canonical(flag))
            if row is None:
                notes.append(f"{theirs} is unknown here; left out")
            elif _is_kept(row, theirs, value, only_working, notes):
                settings.append((row.flag, value))
    return Translation(system, list(dict(settings).items()), list(dict.fromkeys(notes)))


def _is_kept(row: Row, alias: str, value: object, only_working: bool, notes: list[str]) -> bool:
    """Whether an option goes into the command; else, or if the server will refuse it, a note says why."""
    if canonical(alias) not in (row.flag, *row.aliases):
        alias = f"{alias} ({row.flag})"
    if row.status == "superseded":
        notes.append(f"{alias} is left out: {row.note}")
        return False
    if row.acts:
        if value not in row.later:
            return True
        reason = f"{value} is not here yet"
    elif row.status == "planned":
        reason = "is planned and not here yet"
    else:
        reason = f"is an option of {row.device} devices, which are not here yet"
    notes.append(f"{alias} {reason}" + ("; left out" if only_working else ""))
    return not only_working


def _split(words: list[str]) -> tuple[list[str], System, list[str]]:
    """The words before the command, whose command it is, and the words after it, up to the end of the
    command."""
    commands = [
        (i, system)
        for i, word in enumerate(words)
        for pattern, system in COMMANDS
        if re.fullmatch(pattern, word)
    ]
    if commands:
        # An image or a folder may have the name as well: the module that Python runs is the command.
        start, system = next((one for one in commands if words[one[0] - 1] == "-m"), commands[0])
        after = words[start + 1 :]
        after = after[: next((i for i, word in enumerate(after) if word in SHELL), len(after))]
        has_model = (
            system == "vllm" and after[:1] == ["serve"] and len(after) > 1 and not after[1].startswith("-")
        )
        return words[:start], system, ["--model-path", *after[1:]] if has_model else after
    raise OptionsError(
        [
            "no command of SGLang, RTP-LLM or vLLM is among the words; "
            "write runtime translate -- python -m sglang.launch_server ..., or vllm serve MODEL ..."
        ]
    )


def _environment(words: Sequence[str], system: System, notes: list[str]) -> list[str]:
    """Flags for VARIABLE=value words: variables of Ascend's libraries, and those that RTP-LLM reads as
    options. Others get a note, as there are no settings by environment."""
    out: list[str] = []
    counterparts = {setting.name.removeprefix("sysctl: "): setting.counterpart for setting in ENVIRONMENT}
    for word in words:
        name, equals, value = word.partition("=")
        flag = canonical("--" + name.lower())
        if not equals or not name.replace(".", "_").isidentifier():
            continue
        if name in VARIABLE_FLAGS:
            out += [VARIABLE_FLAGS[name], value]
        elif name in counterparts:
            notes.append(f"{name} is left out; its counterpart here: {counterparts[name]}")
        elif system == "rtp_llm" and (flag in by_flag() or flag in RTP_LLM_BASICS):
            out += [flag, value]
        else:
            notes.append(f"{name} is left out: the runtime takes no settings from the environment")
    return out


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words that follow it; `--flag=value` is the same as `--flag value`."""
    flag, values = "", list[str]()
    for word in words:
        if re.match(r"-[A-Za-z-]", word):
            if flag:
                yield flag, values
            flag, equals, inline = word.partition("=")
            values = [inline] if equals else []
        elif flag:
            values.append(word)
    if flag:
        yield flag, values


def _ours(flag: str, values: list[str], notes: list[str]) -> tuple[str, Value]:
    """A flag that we know by this name, with the value that it has here."""
    row = by_flag().get(canonical(flag))
    if row is None:
        return flag, " ".join(values)
    if row.means:
        word = values[0].lower() if values else "true"
        value = row.values.get(word, values[0] if values else True)
        return row.means, value
    if row.takes == "switch":
        return row.flag, not (values and values[0].lower() in ("false", "0"))
    if row.takes == "many":
        return row.flag, values
    if len(values) != 1:
        notes.append(f"{flag} takes one value, not {len(values)}")
    return row.flag, values[0] if values else ""


def _from_sglang(flag: str, values: list[str], notes: list[str]) -> Iterator[tuple[str, Value]]:
    yield _ours(flag, values, notes)


def _from_rtp_llm(flag: str, values: list[str], notes: list[str]) -> Iterator[tuple[str, Value]]:
    key = canonical(flag)
    if key in RTP_LLM_BASICS:
        ours = RTP_LLM_BASICS[key]
        if ours is None:
            notes.append(f"{flag} is left out: config.json says it")
        else:
            yield _ours(ours, values, notes)
        return
    row = by_flag().get(key)
    if (
        row is not None
        and row.means
        and row.values.get((values or ["true"])[0].lower(), ...) == by_flag()[row.means].default
    ):
        notes.append(f"{flag} is left out: it asks for what is the default here")
        return
    yield _ours(flag, [word.lower() for word in values] if key == "--log-level" else values, notes)


def _from_vllm(flag: str, values: list[str], notes: list[str]) -> Iterator[tuple[str, Value]]:
    key = canonical(flag)
    same = {theirs: (ours, words) for theirs, ours, words in vllm.SAME}
    without = dict(vllm.WITHOUT)
    if key in vllm.SWITCHES:
        if not vllm.SWITCHES[key]:
            notes.append(f"{flag} is left out: it happens anyway, or there is nothing to turn off")
        yield from vllm.SWITCHES[key]
    elif (key, *values[:1]) in vllm.CHOICES:
        yield from vllm.CHOICES[key, values[0]]
    elif key == "--speculative-config":
        yield from _draft_of_vllm(values, notes)
    elif key == "--enable-expert-parallel":
        notes.append(
            f"{flag} spreads experts over all ranks: set --expert-parallel-size to the number of ranks"
        )
    elif key in same:
        ours, words = same[key]
        read = _length if key in vllm.LENGTHS else str
        meant = [str(words.get(word.lower(), read(word))) for word in values]
        yield _ours(ours, meant[:1] if ours == "--served-model-name" else meant, notes)
    elif key in vllm.COMMON or key == "--model-path":
        yield _ours(key, values, notes)
    else:
        notes.append(f"{flag} is left out: {without.get(key, 'it is unknown here')}")


def _draft_of_vllm(values: list[str], notes: list[str]) -> Iterator[tuple[str, Value]]:
    """vLLM describes speculation in one JSON object. Its number of tokens is without the one that the model
    adds."""
    try:
        config = json.loads(" ".join(values))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        notes.append("--speculative-config is left out: it is no JSON object")
        return
    method = vllm.DRAFT_METHODS.get(str(config.pop("method", "draft_model")))
    if method is None:
        notes.append("--speculative-config is left out: its method is unknown here")
        return
    yield "--speculative-algorithm", method
    tokens = config.pop("num_speculative_tokens", None)
    if isinstance(tokens, int):
        if method != "NGRAM":
            yield from (("--speculative-num-steps", tokens), ("--speculative-eagle-topk", 1))
        yield "--speculative-num-draft-tokens", tokens + 1
    for name, value in config.items():
        if name in vllm.DRAFT:
            yield vllm.DRAFT[name], value
        else:
            notes.append(f"{name} of --speculative-config is left out: it is unknown here")


READERS: dict[System, Callable[[str, list[str], list[str]], Iterator[tuple[str, Value]]]] = {
    "sglang": _from_sglang,
    "rtp_llm": _from_rtp_llm,
    "vllm": _from_vllm,
}


def _length(word: str) -> str:
    """vLLM writes lengths such as 8k (8000) and 8K (8192)."""
    match = LENGTH.fullmatch(word)
    return str(int(float(match[1]) * UNITS[match[2]])) if match else word


def _values(value: object) -> list[Value]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _word(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _typed(value: object) -> Value:
    """Words that look like numbers are numbers in YAML, unless a leading zero would be lost."""
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", value):
        return json.loads(value)
    return value
