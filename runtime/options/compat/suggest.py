"""What an unknown option most likely is: one of another server by its name there, or a misspelling."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from msgspec import Struct

from runtime.options.compat import vllm
from runtime.options.compat.engines import llama_cpp, lmdeploy, tgi
from runtime.options.compat.engines.table import Option
from runtime.options.declare import Value
from runtime.options.table import by_flag, canonical

CUTOFF = 0.6  # of difflib: names that have less in common are no misspellings of each other
THEIR_CUTOFF = 0.8  # of another server's names


class Foreign(Struct, frozen=True):
    """An option of another server: `ours` does its job here; "": nothing does, and `why` says
    what happens instead."""

    title: str  # of the server
    ours: str = ""
    why: str = ""

    def meaning(self) -> str:
        """What it is here, as the end of a sentence."""
        if self.ours:
            return f"here it is {self.ours} (`runtime translate` takes whole commands)"
        return f"it has no place here: {self.why}"


def unknown(alias: str, kind: str, where: str = "") -> str:
    """The refusal of an option that does not exist here, with what is most likely meant. `kind` is how it was
    given: a flag, or an option by its name. `where`: " in FILE"."""
    flag = canonical(alias if kind == "flag" else f"--{alias}")
    if (theirs := foreign().get(flag)) is not None:
        return f"{alias}{where} is {theirs.title}'s; {theirs.meaning()}"
    return f"{alias}{where} is no {kind} of this runtime; {_hint(flag, kind)}"


def _hint(flag: str, kind: str) -> str:
    ours = _nearest(flag, by_flag(), CUTOFF)
    theirs = _nearest(flag, [name for name, one in foreign().items() if one.ours], THEIR_CUTOFF)
    if theirs is not None and (ours is None or _likeness(flag, theirs) > _likeness(flag, ours)):
        return f"did you mean {foreign()[theirs].title}'s {theirs}? {foreign()[theirs].meaning()}"
    if ours is None:
        return "`runtime options` lists all"
    return f"did you mean {ours if kind == 'flag' else ours.lstrip('-')}?"


def _nearest(flag: str, names: Iterable[str], cutoff: float) -> str | None:
    near = difflib.get_close_matches(flag, [name for name in names if name[:2] == "--"], n=1, cutoff=cutoff)
    return near[0] if near else None


def _likeness(one: str, other: str) -> float:
    """How much two names have in common: 1 for equal ones."""
    return difflib.SequenceMatcher(None, other, one).ratio()


@cache
def foreign() -> Mapping[str, Foreign]:
    """Options of other servers that are none here, by flag; a name that several have is vLLM's first."""
    found: dict[str, Foreign] = {}
    for flag, one in (*_vllm(), *_tables()):
        if flag not in by_flag():
            found.setdefault(flag, one)
    return found


def _vllm() -> Iterator[tuple[str, Foreign]]:
    for flag, ours, _ in vllm.SAME:
        yield flag, Foreign("vLLM", ours)
    for flag, ours in vllm.JSON_LISTS.items():
        yield flag, Foreign("vLLM", ours)
    for flag, settings in vllm.SWITCHES.items():
        yield flag, _switch("vLLM", settings)
    for (flag, _), settings in vllm.CHOICES.items():
        if settings:
            yield flag, _switch("vLLM", settings)
    for flag, why in vllm.WITHOUT:
        yield flag, Foreign("vLLM", why=why)


def _tables() -> Iterator[tuple[str, Foreign]]:
    for engine in (llama_cpp.ENGINE, tgi.ENGINE, lmdeploy.ENGINE):
        for flag, option in engine.options.items():
            yield flag, _of_table(engine.title, option)


def _of_table(title: str, option: Option) -> Foreign:
    if option.flag:
        return Foreign(title, option.flag)
    if option.sampling:
        return Foreign(title, f"{option.sampling} of --preferred-sampling-params")
    if option.sets:
        return _switch(title, option.sets)
    return Foreign(title, why=option.note or "it is what happens anyway")


def _switch(title: str, settings: Sequence[tuple[str, Value]]) -> Foreign:
    """A switch that stands for settings of ours; none: it is what happens anyway."""
    words = [flag if value is True else f"{flag} {value}" for flag, value in settings]
    return Foreign(title, " ".join(words), "it is what happens anyway")
