"""A process that imports what ranks of a device need before it is known which rank it is: `python -m
runtime.ranks.worker --early FD --import DEVICE --parent PID`, started by actors/early_process.py.

The socket FD brings one ForkRequest (ranks/forks.py): the arguments and descriptors of a rank.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress

from runtime.errors import StartError
from runtime.ranks.forks import receive_arguments
from runtime.ranks.open_executor import import_device
from runtime.ranks.own_process import bind_to_parent


def await_rank(words: Sequence[str]) -> list[str] | None:
    """Imports, and waits. -> the arguments of a rank; None: none come, or the parent has ended"""
    parser = argparse.ArgumentParser(prog="runtime.ranks.worker")
    parser.add_argument("--early", type=int, required=True)
    parser.add_argument("--import", dest="imports", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(words)
    if not bind_to_parent(args.parent, "early-rank"):
        return None
    with suppress(StartError, ImportError, OSError):  # the rank tries again, and reports it
        import_device(args.imports)
    return receive_arguments(args.early)
