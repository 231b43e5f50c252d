"""`runtime serve`: options → plan → server."""

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.actors.early_process import EarlyProcess, open_early_process

if TYPE_CHECKING:
    from runtime.options.parse import ParsedOptions


def run(argv: Sequence[str]) -> int:
    """Serves until a signal ends it. Raises StartError for what the user can mend."""
    for i, word in enumerate(argv):
        if word in ("-h", "--help"):
            from runtime.options.help import help_text

            print(f"usage: runtime serve [MODEL] [OPTION ...]\n\n{help_text(argv[i + 1 :])}")
            return 0
    gc.disable()  # what a start imports is no garbage; the server enables it
    early = open_early_process(argv)
    try:
        from runtime.options.parse import from_argv

        return _serve(from_argv(argv), early)
    finally:
        gc.enable()
        if early is not None:
            early.close()


def _serve(parsed: "ParsedOptions", early: EarlyProcess | None) -> int:
    # imported here, so that --help and a wrong option answer at once
    from runtime import log
    from runtime.actors.early_ranks import open_early
    from runtime.options.resolve import plan_for

    log.import_structlog()
    log.setup(parsed.options.logs.log_level, parsed.options.logs.log_format)
    plan = plan_for(parsed)

    if plan.parallel.node_rank:
        from runtime import node

        return node.run(plan)
    processes = open_early(plan, early)
    try:
        from runtime import server

        return server.run(plan, processes)
    finally:
        if processes is not None:
            processes.kill()  # if the server did not take them
