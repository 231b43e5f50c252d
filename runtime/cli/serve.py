"""`runtime serve`: options → plan → server."""

import gc
from collections.abc import Sequence

from runtime.options.help import help_text
from runtime.options.parse import ParsedOptions, from_argv
from runtime.options.resolve import plan_for


def run(argv: Sequence[str]) -> int:
    """Serves until a signal ends it. Raises StartError for what the user can mend."""
    for i, word in enumerate(argv):
        if word in ("-h", "--help"):
            print(f"usage: runtime serve [OPTION ...]\n\n{help_text(argv[i + 1 :])}")
            return 0
    parsed = from_argv(argv)
    gc.disable()  # what a start imports is no garbage; the server enables it
    try:
        return _serve(parsed)
    finally:
        gc.enable()


def _serve(parsed: ParsedOptions) -> int:
    # imported here, so that --help and a wrong option answer at once
    from runtime import log
    from runtime.actors.early_ranks import open_early

    log.setup(parsed.options.logs.log_level, parsed.options.logs.log_format)
    plan = plan_for(parsed)

    if plan.parallel.node_rank:
        from runtime import node

        return node.run(plan)
    processes = open_early(plan)
    try:
        from runtime import server

        return server.run(plan, processes)
    finally:
        if processes is not None:
            processes.kill()  # if the server did not take them
