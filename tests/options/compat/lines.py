"""What every translated line is held to: the parser of `serve` takes it."""

import shlex

from runtime.errors import OptionsError
from runtime.options.compat.translate import Translation, translate
from runtime.options.parse import from_argv
from runtime.options.table import by_flag, canonical


def serve_takes(theirs: str) -> Translation:
    """The translation of a line. `serve` takes what works of it; of the rest it refuses nothing but options
    and choices that this version does not have."""
    from_argv(translate(shlex.split(theirs), only_working=True).words()[2:])
    translation = translate(shlex.split(theirs))
    try:
        from_argv(translation.words()[2:])
    except OptionsError as error:
        rows = {flag: (by_flag()[canonical(flag)], value) for flag, value in translation.settings}
        refused = [
            flag
            for flag, (row, value) in rows.items()
            if row.status in ("refused", "other-device") or str(value) in row.later
        ]
        assert all(any(flag in problem for flag in refused) for problem in error.problems), error.problems
        assert "--only-working" in translation.notes[-1]
    return translation
