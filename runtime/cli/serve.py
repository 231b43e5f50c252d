"""`runtime serve`: options → plan → server."""

from collections.abc import Sequence

from runtime.options.given import from_argv
from runtime.options.plan import plan_for

USAGE = "usage: runtime serve [OPTION ...]"


def run(argv: Sequence[str]) -> int:
    """Serves until a signal ends it. Raises StartError for what the user can mend."""
    if any(word in ("-h", "--help") for word in argv):
        return _help([word for word in argv if not word.startswith("-")])
    plan = plan_for(from_argv(argv))
    from runtime import server  # here, so that --help and a wrong option answer at once

    return server.run(plan)


def _help(groups: Sequence[str]) -> int:
    from runtime.options.text import help_text

    print(f"{USAGE}\n\n{help_text(groups)}")
    return 0
