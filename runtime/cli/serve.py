"""`runtime serve`: options → plan → server."""

from collections.abc import Sequence

from runtime.options.help import help_text
from runtime.options.parse import from_argv
from runtime.options.resolve import plan_for
from runtime.shutdown import end_at_once_on_signals


def run(argv: Sequence[str]) -> int:
    """Serves until a signal ends it. Raises StartError for what the user can mend."""
    for i, word in enumerate(argv):
        if word in ("-h", "--help"):
            print(f"usage: runtime serve [OPTION ...]\n\n{help_text(argv[i + 1 :])}")
            return 0
    end_at_once_on_signals()
    plan = plan_for(from_argv(argv))
    # imported here, so that --help and a wrong option answer at once
    from runtime.actors.early_ranks import open_early

    processes = open_early(plan)
    try:
        from runtime import server

        return server.run(plan, processes)
    finally:
        if processes is not None:
            processes.kill()  # if the server did not take them
