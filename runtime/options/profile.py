"""Profiles: settings for a known model on known hardware, each with its reason, in YAML files of this package
or of the user.

    about: DeepSeek-R1 on one Atlas 800I A3
    source: where the figures come from
    options:
      tensor-parallel-size: {value: 16, why: one rank for each die}
    when_given:
      speculative-draft-model-path:
        speculative-algorithm: {value: EAGLE3, why: two tokens and more a step}
    later:
      disaggregation-mode: {value: decode, why: prompts are computed elsewhere}

`options` are in force, and those of `when_given` where the option above them is given, which no profile can
know; `later` are known to help, and refused by this version. A test checks this for the files of this
package.
"""

from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from runtime.errors import OptionsError
from runtime.options.declare import Value
from runtime.options.table import by_flag, by_name, canonical
from runtime.regular_file import read_text

T = TypeVar("T")
FOLDER = Path(__file__).parent / "profiles"


class Line(Struct, frozen=True, forbid_unknown_fields=True):
    """One setting of a profile, with its reason."""

    value: Value
    why: str


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """A profile file. Options are keyed by field name."""

    about: str
    options: dict[str, Line]
    source: str = ""
    when_given: dict[str, dict[str, Line]] = {}  # by option that the user gives, what is in force with it
    later: dict[str, Line] = {}


def names() -> list[str]:
    """Names of the profiles in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def read_profile(name: str) -> Profile:
    """A profile of this package by name, or a file. Raises OptionsError."""
    import yaml  # slow to import, and needed for profiles only

    path = FOLDER / f"{name}.yaml" if name in names() else Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise OptionsError(
            [f"--profile {name} is neither a profile of this version ({', '.join(names())}) nor a .yaml file"]
        )
    try:
        profile = msgspec.convert(yaml.safe_load(read_text(path)), Profile)
    except OSError as error:
        raise OptionsError([f"--profile {name} cannot be read: {error.strerror or error}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionsError([f"--profile {name} is no profile: {' '.join(str(error).split())}"]) from None
    return Profile(
        about=profile.about,
        source=profile.source,
        options=_by_name(name, profile.options),
        when_given={
            given: _by_name(name, lines) for given, lines in _by_name(name, profile.when_given).items()
        },
        later=_by_name(name, profile.later),
    )


def _by_name(profile: str, lines: dict[str, T]) -> dict[str, T]:
    rows = {name: by_flag().get(canonical(f"--{name}")) for name in lines}
    unknown = [
        name
        for name, row in rows.items()
        if row is None or row.name not in by_name() or row.name in ("config", "profile")
    ]
    if unknown:
        raise OptionsError([f"--profile {profile}: {', '.join(unknown)} is no option that a profile can set"])
    return {row.name: lines[name] for name, row in rows.items() if row is not None}
