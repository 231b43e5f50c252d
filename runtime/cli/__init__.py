"""The command line: `runtime COMMAND ...`. A command is a module of this package with `run(argv) -> exit
code`.

Exit codes: 0 done, 1 a check found something, 2 the command or its options cannot work (one line each on
stderr), 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from runtime import __version__
from runtime.errors import OptionsError, StartError
from runtime.shutdown import end_at_once_on_signals

# command -> its module (imported only when called: --help must be quick) and what it does
COMMANDS = {
    "serve": (
        "runtime.cli.serve",
        "serve a model over HTTP; without --model-path the small one inside this package",
    ),
    "route": ("runtime.cli.route", "spread requests over several servers"),
    "chat": ("runtime.cli.chat", "talk to a running server, or start one, in this terminal"),
    "options": ("runtime.cli.options", "list every option with its status"),
    "check": ("runtime.cli.check", "explain the options in force, plan memory, examine this machine"),
    "shard": (
        "runtime.cli.shard",
        "write what each rank reads of a checkpoint to files of its own (--load-format sharded_state)",
    ),
    "translate": (
        "runtime.cli.translate",
        "turn a command line of vLLM, SGLang, llama.cpp, Ollama and others into ours",
    ),
    "completion": ("runtime.cli.completion", "print a completion script for bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"runtime {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"runtime: {words[0]} is no command; {_meant(words[0])}", file=sys.stderr)
        return 2
    return _guarded(words[0], words[1:])


def open_standard_streams() -> None:
    """Opens those of descriptors 0 to 2 that were closed when this process began (`2>&-`) on /dev/null. Else
    the next sockets get these numbers, and what libraries print goes to clients."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this
            setattr(sys, name, open(number, mode, closefd=False))


def usage() -> str:
    """The text of `runtime --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: runtime COMMAND ...",
            "",
            *lines,
            "",
            "`runtime COMMAND --help` says more; `runtime --version` the version.",
        ]
    )


def _meant(word: str) -> str:
    from difflib import get_close_matches  # for the refusal alone: starts are quick

    near = get_close_matches(word, COMMANDS, n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"


def _guarded(command: str, words: Sequence[str]) -> int:
    """Errors that the user can mend become one line each; everything else keeps its stack, it is our bug."""
    if command == "serve":
        end_at_once_on_signals()  # before its imports: an exception that Ctrl-C raised in one could get lost
    try:
        return int(import_module(COMMANDS[command][0]).run(words))
    except OptionsError as error:
        for problem in error.problems:
            print(f"runtime {command}: {problem}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"runtime {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has enough: `runtime options | head`
        sys.stderr.close()
        return 0
