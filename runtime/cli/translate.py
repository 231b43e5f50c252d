"""`runtime translate -- COMMAND`: the command of another system as one of `runtime serve`."""

import argparse
import shlex
import sys
from collections.abc import Sequence

import msgspec

from runtime.errors import OptionsError
from runtime.options.compat.translate import translate


def run(argv: Sequence[str]) -> int:
    """Prints the command on stdout and a line for each change on stderr. Raises OptionsError for a command of
    no known system."""
    own, theirs = _split(argv)
    parser = argparse.ArgumentParser(
        prog="runtime translate",
        allow_abbrev=False,
        usage="runtime translate [--yaml | --json] [--only-working] -- COMMAND ...",
        description="Turn a server's command line of SGLang, vLLM or RTP-LLM into one of `runtime serve`. "
        "Without words after -- the command is read from standard input.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="print a file for --config")
    form.add_argument("--json", action="store_true", help="print an object: system, command, settings, notes")
    parser.add_argument(
        "--only-working", action="store_true", help="leave out options that this version refuses"
    )
    arguments, stray = parser.parse_known_args(own)
    if stray:
        raise OptionsError([f"put -- before the command: runtime translate -- {shlex.join(stray)}"])
    translation = translate(theirs or _read(), only_working=arguments.only_working)
    if arguments.json:
        print(
            msgspec.json.encode(
                {
                    "system": translation.system,
                    "command": translation.words(),
                    "settings": dict(translation.settings),
                    "notes": translation.notes,
                }
            ).decode()
        )
        return 0
    print(
        translation.yaml() if arguments.yaml else shlex.join(translation.words()),
        end="" if arguments.yaml else "\n",
    )
    for note in translation.notes:
        print(f"# {note}", file=sys.stderr)
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    return (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])


def _read() -> list[str]:
    if sys.stdin.isatty():
        raise OptionsError(
            ["there is no command; give it behind --, as in: runtime translate -- vllm serve MODEL"]
        )
    text = sys.stdin.read().replace("\\\n", " ")
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise OptionsError([f"the command on standard input cannot be read: {error}"]) from None
