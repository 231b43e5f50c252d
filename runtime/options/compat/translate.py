"""A command line of another server → one of `runtime serve`, with a sentence for each thing that changes on
the way.

Reads what people paste: leading VARIABLE=value words, the interpreter, line ends with backslashes, and
`docker run`. Pure: words in, words out. Every value that comes out is one that `serve` takes; options that
this version refuses stay in, for its answer says when they come, unless only what works is asked for.
"""

import json
import re
import shlex
from collections.abc import Sequence

from msgspec import Struct

from runtime.options.compat import container
from runtime.options.compat.container import System
from runtime.options.compat.engines import llama_cpp, ollama
from runtime.options.compat.engines.table import PLACEHOLDER
from runtime.options.compat.fitting import Settings, asks_for_default, fit, without_problems, words_of
from runtime.options.compat.invocation import Invocation, find
from runtime.options.compat.readers import READERS, RTP_LLM_BASICS, flags
from runtime.options.compat.variables import carry
from runtime.options.declare import Value
from runtime.options.table import Row, by_flag, canonical

SAMPLING = "--preferred-sampling-params"
# limits that SGLang has for all attention groups together, and this runtime for each
OF_ALL_GROUPS = ("--max-running-requests", "--chunked-prefill-size")
PLAIN_VARIABLE = re.compile(r"[\w@%+=:,./~-]*(\$(\w+|\{\w+\})[\w@%+=:,./-]*)+")


class Translation(Struct, frozen=True):
    """A translated command. `settings` are flags of ours in order, with their values; True stands for a
    switch. `environment` are variables that stand in front of the command."""

    system: System
    settings: Settings
    notes: list[str]
    environment: dict[str, str] = {}

    def words(self) -> list[str]:
        """The words of the command line, `runtime serve` first."""
        return [
            "runtime",
            "serve",
            *(word for flag, value in self.settings for word in words_of(flag, value)),
        ]

    def line(self) -> str:
        """The command line for a shell, with its variables in front."""
        variables = [f"{name}={_quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(_quote, self.words())])

    def yaml(self) -> str:
        """The settings as a --config file; every JSON value is a YAML value."""
        return "".join(
            f"{flag[2:]}: {json.dumps(_typed(value), ensure_ascii=False)}\n" for flag, value in self.settings
        )


def translate(words: Sequence[str], *, only_working: bool = False) -> Translation:
    """Translates a command of another system. `only_working` leaves out what this version refuses.

    Raises OptionsError when no known system's command is among `words`, or it starts no server.
    """
    invocation = find(words)
    engine = invocation.engine
    notes = [*invocation.notes, *engine.notes]
    carried = carry(invocation.variables, _engine_variables(invocation))
    notes += carried.notes
    collector = _Collector(invocation, notes, only_working, {}, [])
    for name, flag, value in carried.settings:
        collector.take(name, flag, value)
        if flag in collector.settings:
            notes.append(f"{name} is {flag} here")
    for theirs, values in [*carried.options, *flags(invocation.words, engine)]:
        for flag, value in READERS[invocation.system](theirs, values, notes):
            collector.take(theirs, flag, value)
    environment = dict(carried.kept) | _from_container(collector)
    _complete(collector)
    settings = without_problems(list(collector.settings.items()), collector.refused, notes)
    if refused := [flag for flag, _ in settings if flag in collector.refused]:
        notes.append(
            f"this version refuses {', '.join(refused)}: --only-working leaves that out"
            if len(refused) < 4
            else f"this version refuses {len(refused)} of these options: --only-working leaves them out"
        )
    return Translation(invocation.system, settings, list(dict.fromkeys(notes)), environment)


class _Collector(Struct):
    """The settings of a translation while it is made."""

    invocation: Invocation
    notes: list[str]
    only_working: bool
    settings: dict[str, Value]
    refused: list[str]  # flags among the settings that this version refuses

    def take(self, theirs: str, flag: str, value: Value) -> None:
        """Adds a setting, in the words of our option, or a note with the reason why not."""
        row = by_flag().get(canonical(flag))
        if row is None:
            self.notes.append(f"{theirs} is unknown here; left out")
            return
        if canonical(theirs) not in (row.flag, *row.aliases):
            theirs = f"{theirs} ({row.flag})"
        if row.status == "superseded":
            self.notes.append(f"{theirs} is left out: {row.note}")
            return
        if self.invocation.container is not None:
            value = container.outside(self.invocation.container, value)
        if row.flag == "--model-path":
            value = _model(str(value), self.invocation.system, self.notes)
        fitting = fit(row, value)
        if fitting is None:
            shown = "" if row.secret else f" {_shown(value)}"
            self.notes.append(f"{theirs}{shown} is left out: serve takes {row.type}")
        elif self._is_kept(row, theirs, fitting):
            merges = row.flag == SAMPLING and isinstance(fitting, dict)
            self.settings[row.flag] = self.settings.get(row.flag, {}) | fitting if merges else fitting

    def _is_kept(self, row: Row, theirs: str, value: Value) -> bool:
        """Whether an option goes into the command; if the server will refuse it, a note says why."""
        is_later = isinstance(value, str) and value in row.later
        if row.acts and not is_later:
            return True
        if asks_for_default(row, value):
            self.notes.append(f"{theirs} {_shown(value)} is left out: it is what happens anyway")
            return False
        if is_later:
            reason = f"{value} is not here yet"
        elif row.status == "refused":
            reason = f"is refused: {row.note}"
        else:
            reason = f"is an option of {row.device} devices, which are not here yet"
        self.notes.append(f"{theirs} {reason}" + ("; left out" if self.only_working else ""))
        if not self.only_working:
            self.refused.append(row.flag)
        return not self.only_working


def _engine_variables(invocation: Invocation) -> dict[str, str]:
    """Variables that the engine reads as options of its own."""
    if invocation.system != "rtp_llm":
        return dict(invocation.engine.variables)
    flags_of = {name: "--" + name.lower() for name in invocation.variables}
    return {
        name: flag
        for name, flag in flags_of.items()
        if canonical(flag) in by_flag() or canonical(flag) in RTP_LLM_BASICS
    }


def _from_container(collector: _Collector) -> dict[str, str]:
    """Brings the ports of a container to the settings; returns the variables that it stands for."""
    inside = collector.invocation.container
    if inside is None:
        return {}
    default = inside.image.port or collector.invocation.engine.port
    port = collector.settings.get("--port", default)
    settings, notes = container.published(inside, int(port))
    variables, more = container.devices(inside)
    collector.settings.update({"--port": str(port), **dict(settings)})
    collector.notes += [*notes, *more]
    return variables | container.caches(inside)


def _complete(collector: _Collector) -> None:
    """Adds what the command leaves to the engine's defaults, where ours differ."""
    engine, settings, notes = collector.invocation.engine, collector.settings, collector.notes
    if "--port" not in settings and engine.port != by_flag()["--port"].default:
        settings["--port"] = str(engine.port)
        notes.append(f"--port {engine.port} is {engine.title}'s default, kept for its clients")
    if engine.everywhere and "--host" not in settings:
        notes.append(
            f"{engine.title} listens on all interfaces by default, and this on the machine's own alone: add "
            "--host 0.0.0.0, and keys with --api-key-file, for clients elsewhere"
        )
    if "--model-path" not in settings:
        notes.append("no model is named: without --model-path the small one inside this package answers")
    _divide_context(collector)
    _divide_among_groups(collector)
    _name_next_token_layers(collector)


def _name_next_token_layers(collector: _Collector) -> None:
    """RTP-LLM drafts with next-token layers by the type EAGLE too: the family of the draft model says so."""
    settings = collector.settings
    kinds = [
        values[0]
        for flag, values in flags(collector.invocation.words, collector.invocation.engine)
        if canonical(flag) == "--sp-model-type" and values
    ]
    if settings.get("--speculative-algorithm") == "EAGLE" and any(kind.endswith("mtp") for kind in kinds):
        settings["--speculative-algorithm"] = "NEXTN"


def _divide_context(collector: _Collector) -> None:
    """llama-server's context is that of all slots together, where their number is given."""
    settings = collector.settings
    total, slots = settings.get("--context-length"), settings.get("--max-running-requests")
    if collector.invocation.engine.splits_context and total is not None and slots is not None:
        if str(total).isdigit() and str(slots).isdigit() and 1 < int(slots) <= int(total):
            settings["--context-length"] = str(int(total) // int(slots))
            collector.notes.append(f"--context-length is that of one sequence: {total} divided by {slots}")


def _divide_among_groups(collector: _Collector) -> None:
    """SGLang divides some limits by the number of attention groups, where there are several."""
    settings, groups = collector.settings, str(collector.settings.get("--data-parallel-size", ""))
    has_groups = collector.invocation.system == "sglang" and settings.get("--enable-dp-attention") is True
    if not has_groups or not groups.isdigit() or int(groups) < 2:
        return
    for flag in OF_ALL_GROUPS:
        total = str(settings.get(flag, ""))
        if total.isdigit():
            settings[flag] = str(max(1, int(total) // int(groups)))
            collector.notes.append(f"{flag} is that of one attention group: {total} divided by {groups}")


def _model(name: str, system: System, notes: list[str]) -> str:
    """The model that `name` stands for, as a path or on the hub; a placeholder where only its user
    knows it."""
    if system == "ollama" and not name.startswith(("hf.co/", "huggingface.co/", "/", ".")):
        family, _, tag = name.partition(":")
        size = tag.partition("-")[0]
        known = ollama.HUB.get(family if size in ("", "latest") else f"{family}:{size}")
        if known is not None:
            notes.append(f"{name} is {known} on the hub; the weights are not those of Ollama's GGUF file")
            return known
        notes.append(f"put the folder or the hub's name of {name} in place of {PLACEHOLDER}")
        return PLACEHOLDER
    if "gguf" not in name.lower() or name.lower().endswith(".gguf"):
        return name
    repository = re.sub(r"^(hf\.co|huggingface\.co)/", "", name).partition(":")[0]
    owner, slash, model = repository.partition("/")
    original = re.sub(r"-gguf$", "", model, flags=re.IGNORECASE)
    if slash and owner in llama_cpp.PUBLISHERS and original != model:
        notes.append(
            f"GGUF files of a hub are not downloaded yet: {owner}/{original} is the same model as it "
            "was published"
        )
        return f"{owner}/{original}"
    notes.append(
        f"GGUF files of a hub are not downloaded yet: put the file or folder of {name}, or the hub's name of "
        f"the same model in Hugging Face layout, in place of {PLACEHOLDER}"
    )
    return PLACEHOLDER


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _quote(word: str) -> str:
    """A word for a shell; variables such as $PWD/models stay variables, and ~/ is $HOME/."""
    if word.startswith("~/"):
        word = "$HOME" + word[1:]
    return f'"{word}"' if PLAIN_VARIABLE.fullmatch(word) else shlex.quote(word)


def _typed(value: object) -> Value:
    """Words that look like numbers are numbers in YAML, unless a leading zero would be lost."""
    if isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", value):
        return json.loads(value)
    return value
