"""The form of an engine's tables: what each of its options and environment variables is here.

OPTIONS = named({"-c --ctx-size": Option("--context-length"), "--mlock": left_out("...")})
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from runtime.options.declare import Value

# how the words behind a flag become our value:
#   word           the one word, after Option.values
#   words, commas  all words; the one word, split at commas
#   first          the first of several, also between commas
#   length         a number of tokens, such as 8k
#   model          a model, which may be a GGUF file or repository
#   drafts         a number of drafts: --speculative-num-draft-tokens counts the last token too
#   address        HOST, HOST:PORT or a URL: --host and --port
Read = Literal["word", "words", "commas", "first", "length", "model", "drafts", "address"]


class Option(Struct, frozen=True):
    """One option of another engine.

    `flag` is ours; "" where there is nothing of the kind, and `note` says why. `values` are our values for
    their words, in lower case: None for what happens anyway, a tuple for settings of other options. Other
    words pass on, or are left out where `note` says why. `sets` are settings of ours that a switch stands
    for, or that come before the one of `flag`. `sampling` names a field of --preferred-sampling-params.
    """

    flag: str = ""
    values: Mapping[str, Value] = {}
    read: Read = "word"
    note: str = ""
    sets: tuple[tuple[str, Value], ...] = ()
    sampling: str = ""


class Engine(Struct, frozen=True, kw_only=True):
    """What `runtime translate` knows of another server."""

    title: str  # as notes name it
    port: int  # where it listens by default
    everywhere: bool = False  # whether it listens on all interfaces by default
    options: Mapping[str, Option] = {}  # by flag with dashes
    variables: Mapping[str, str] = {}  # environment variable -> its flag
    takes_model: bool = False  # the first word that is no flag is the model
    splits_context: bool = False  # its context length is that of all sequences together
    notes: tuple[str, ...] = ()  # what every user of it must know


def named(table: Mapping[str, Option]) -> dict[str, Option]:
    """The table by single flags; its keys may hold several names with spaces between."""
    options: dict[str, Option] = {}
    for names, option in table.items():
        for name in names.split():
            assert name not in options, f"{name} is in the table twice"
            options[name] = option
    return options


def left_out(note: str) -> Option:
    """An option with nothing of the kind here, and why."""
    return Option(note=note)


def switch(*sets: tuple[str, Value]) -> Option:
    """A switch that stands for settings of ours."""
    return Option(sets=sets)


def sampling(name: str) -> Option:
    """A default of requests, which becomes a field of --preferred-sampling-params."""
    return Option(sampling=name)


FP8_PAGES = "pages are of the model's dtype, or fp8_e4m3 and fp8_e5m2"
QUANTIZED = "a quantised checkpoint says what it is, and docs/quantization.md which formats are read"
HAPPENS = left_out("it happens anyway")
PLACEHOLDER = "MODEL"  # stands in a command for a model that the user must name
