"""`runtime translate COMMAND`: the command of another system as one of `runtime serve`."""

import argparse
import shlex
import sys
from collections.abc import Sequence

import msgspec

from runtime.errors import OptionsError
from runtime.options.compat.translate import translate

OWN = ("--yaml", "--json", "--only-working", "-h", "--help")


def run(argv: Sequence[str]) -> int:
    """Prints the command on stdout and a line for each change on stderr. Raises OptionsError for a command of
    no known system."""
    own, theirs = _split(argv)
    parser = argparse.ArgumentParser(
        prog="runtime translate",
        allow_abbrev=False,
        usage="runtime translate [--yaml | --json] [--only-working] COMMAND ...",
        description="Turn a command line of SGLang, vLLM, llama.cpp, Ollama, TGI, LMDeploy or RTP-LLM "
        "into one of `runtime serve`; `docker run` lines of them too. Without a command it is read from "
        "standard "
        "input, where it may have several lines.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--yaml", action="store_true", help="print a file for --config")
    form.add_argument(
        "--json", action="store_true", help="print an object: system, command, settings, environment, notes"
    )
    parser.add_argument(
        "--only-working", action="store_true", help="leave out options that this version refuses"
    )
    arguments = parser.parse_args(own)
    translation = translate(theirs or _read(), only_working=arguments.only_working)
    if arguments.json:
        fields = {
            "system": translation.system,
            "command": translation.words(),
            "settings": dict(translation.settings),
            "environment": translation.environment,
            "notes": translation.notes,
        }
        print(msgspec.json.encode(fields).decode())
        return 0
    print(translation.yaml() if arguments.yaml else translation.line() + "\n", end="")
    if arguments.yaml and translation.environment:
        print(f"# to set in the environment: {', '.join(translation.environment)}", file=sys.stderr)
    for note in translation.notes:
        print(f"# {note}", file=sys.stderr)
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own options, which come first, and the command to translate, also behind `--`."""
    words = list(argv)
    end = next((i for i, word in enumerate(words) if word not in OWN), len(words))
    return words[:end], words[end + 1 :] if words[end : end + 1] == ["--"] else words[end:]


def _read() -> list[str]:
    """The words of standard input; a line's end is a `;` unless it is within quotes or behind a backslash.
    Raises OptionsError."""
    if sys.stdin.isatty():
        raise OptionsError(["there is no command; give one, as in: runtime translate vllm serve MODEL"])
    words: list[str] = []
    rest = ""
    for line in sys.stdin.read().replace("\\\n", " ").splitlines():
        rest += line
        try:
            words += [*shlex.split(rest, comments=True), ";"]
            rest = ""
        except ValueError:  # a quotation that goes on in the next line
            rest += "\n"
    if rest:
        raise OptionsError(["the command on standard input cannot be read: a quotation has no end"])
    return words
