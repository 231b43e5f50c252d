"""One option of another server's command line as settings of ours; one reader for each server, and one that
reads the tables of engines/."""

import json
import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from runtime.messages.sampling import SamplingParams
from runtime.options.compat import vllm
from runtime.options.compat.container import System
from runtime.options.compat.engines.table import Engine, Option
from runtime.options.compat.invocation import ENGINES
from runtime.options.declare import Value
from runtime.options.table import by_flag, canonical

Setting = tuple[str, Value]

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


def flags(words: Sequence[str], engine: Engine) -> list[tuple[str, list[str]]]:
    """Each flag with the words that follow it; `--flag=value` is the same as `--flag value`. A model that has
    no flag gets --model-path: the first word, or the one behind the last option's value."""
    read: list[tuple[str, list[str]]] = []
    first: list[str] = []
    for word in words:
        if re.match(r"-[A-Za-z-]", word):
            flag, equals, inline = word.partition("=")
            read.append((flag, [inline] if equals else []))
        elif read:
            read[-1][1].append(word)
        else:
            first.append(word)
    if not engine.takes_model:
        return read
    if not first and read and len(read[-1][1]) == 2 and _takes_one(read[-1][0], engine):
        first = [read[-1][1].pop()]
    return [("--model-path", first[:1]), *read] if first else read


def _takes_one(flag: str, engine: Engine) -> bool:
    ours = engine.options.get(canonical(flag))
    name = ours.flag if ours else _VLLM_FLAGS.get(canonical(flag), canonical(flag))
    row = by_flag().get(name)
    return row is not None and row.takes == "one"


_VLLM_FLAGS = {theirs: ours for theirs, ours, _ in vllm.SAME}


def _ours(flag: str, values: list[str], notes: list[str]) -> Setting:
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
    if not values and row.bare is not None:
        return row.flag, row.bare
    if len(values) != 1:
        notes.append(f"{flag} takes one value, not {len(values)}")
    return row.flag, values[0] if values else ""


def _from_sglang(flag: str, values: list[str], notes: list[str]) -> Iterator[Setting]:
    if canonical(flag).startswith("--router-"):
        notes.append(f"{flag} is left out: there is no router; see docs/deploy.md for nginx in front")
    else:
        yield _ours(flag, values, notes)


def _from_rtp_llm(flag: str, values: list[str], notes: list[str]) -> Iterator[Setting]:
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
    yield _ours(flag, values, notes)


def _from_vllm(flag: str, values: list[str], notes: list[str]) -> Iterator[Setting]:
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
    elif key in same:
        ours, words = same[key]
        read = _length if key in vllm.LENGTHS else str
        meant = [str(words.get(word.lower(), read(word))) for word in values]
        yield _ours(ours, meant[:1] if ours == "--served-model-name" else meant, notes)
    elif key in vllm.JSON_LISTS:
        yield vllm.JSON_LISTS[key], _json_list(values)
    elif key in vllm.COMMON or key == "--model-path":
        yield from vllm.TURNED_ON.get(key, [])
        yield _ours(key, values, notes)
    else:
        notes.append(f"{flag} is left out: {without.get(key, 'it is unknown here')}")


def _draft_of_vllm(values: list[str], notes: list[str]) -> Iterator[Setting]:
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


def _from_table(system: System) -> Callable[[str, list[str], list[str]], Iterator[Setting]]:
    """The reader of an engine whose options are a table."""

    def read(flag: str, values: list[str], notes: list[str]) -> Iterator[Setting]:
        option = ENGINES[system].options.get(canonical(flag))
        if option is None:
            notes.append(f"{flag} is left out: it is unknown here")
        else:
            yield from _by_option(flag, option, values, notes)

    return read


def _by_option(flag: str, option: Option, values: list[str], notes: list[str]) -> Iterator[Setting]:
    """The settings that an option of a table stands for."""
    word = values[0].lower() if values else "true"
    if word in option.values:
        value = option.values[word]
        if value is None:
            notes.append(f"{flag} {word} is left out: it happens anyway")
        elif isinstance(value, tuple):
            yield from value
        else:
            yield from _set(option, value, flag, notes)
    elif option.sets and not option.flag:
        yield from option.sets if word not in ("false", "0", "off") else ()
    elif option.note:
        shown = f"{flag} {values[0]}" if values and option.values else flag
        notes.append(f"{shown} is left out: {option.note}")
    elif not values:
        notes.append(f"{flag} is left out: it has no value")
    elif option.read == "address":
        yield from _address(values[0])
    else:
        yield from option.sets
        yield from _set(option, _READ[option.read](values), flag, notes)


def _drafts(word: str) -> str:
    """Tokens to verify with so many drafts."""
    return str(int(word) + 1) if word.isdecimal() else word


def _set(option: Option, value: Value, flag: str, notes: list[str]) -> Iterator[Setting]:
    """A value of an option, or of a field of --preferred-sampling-params."""
    if not option.sampling:
        yield option.flag, value
        return
    try:
        fields = {option.sampling: json.loads(value) if isinstance(value, str) else value}
        msgspec.convert(fields, SamplingParams)
    except (msgspec.ValidationError, ValueError, RecursionError):
        notes.append(f"{flag} {value} is left out: requests may not have this value")
        return
    yield "--preferred-sampling-params", fields


def _address(word: str) -> Iterator[Setting]:
    """HOST, HOST:PORT, :PORT or a URL of them."""
    match = re.fullmatch(r"(?:\w+://)?(?P<host>\[[^\]]+\]|[^:/]*)(?::(?P<port>\d+))?/?", word)
    if match is not None and match["host"]:
        yield "--host", match["host"].strip("[]")
    if match is not None and match["port"]:
        yield "--port", match["port"]


def _length(word: str) -> str:
    """Lengths such as 8k (8000) and 8K (8192)."""
    match = LENGTH.fullmatch(word)
    return str(int(float(match[1]) * UNITS[match[2]])) if match else word


def _json_list(values: list[str]) -> list[Value]:
    """The items of a JSON list; the words themselves where they are none."""
    try:
        decoded = json.loads(" ".join(values))
    except (ValueError, RecursionError):
        return list(values)
    return decoded if isinstance(decoded, list) else list(values)


_READ: dict[str, Callable[[list[str]], Value]] = {
    "word": lambda values: values[0],
    "words": list,
    "commas": lambda values: [word for word in ",".join(values).split(",") if word],
    "first": lambda values: values[0].split(",")[0],
    "length": lambda values: _length(values[0]),
    "model": lambda values: values[0],
    "drafts": lambda values: _drafts(values[0]),
}
READERS: dict[System, Callable[[str, list[str], list[str]], Iterator[Setting]]] = {
    "sglang": _from_sglang,
    "rtp_llm": _from_rtp_llm,
    "vllm": _from_vllm,
    "llama_cpp": _from_table("llama_cpp"),
    "ollama": _from_table("ollama"),
    "tgi": _from_table("tgi"),
    "lmdeploy": _from_table("lmdeploy"),
}
