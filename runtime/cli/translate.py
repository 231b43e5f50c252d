"""`runtime translate COMMAND`: the command of another system as one of `runtime serve`."""

import argparse
import shlex
import sys
from collections.abc import Sequence

import msgspec

from runtime.errors import OptionsError
from runtime.options.compat.manifest import IS_YAML, containers
from runtime.options.compat.translate import Translation, translate

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
        "input: lines of a script, a manifest of Kubernetes or a compose file.",
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
    if len(theirs) == 1 and " " in theirs[0]:  # the whole command in quotes
        commands = _commands(theirs[0])
    else:
        commands = [theirs] if theirs else _read()
    translation = _translate(commands, arguments.only_working)
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


def _translate(commands: list[list[str]], only_working: bool) -> Translation:
    """The translation of the first command that starts a server. Raises OptionsError with what is wrong with
    each."""
    problems: list[str] = []
    for words in commands or [[]]:
        try:
            return translate(words, only_working=only_working)
        except OptionsError as error:
            problems += error.problems
    raise OptionsError(list(dict.fromkeys(problems)))


def _read() -> list[list[str]]:
    """The commands of standard input: its lines as one, whose ends are `;` unless within quotes or behind a
    backslash; of a manifest of Kubernetes or a compose file, one for each container. Raises OptionsError."""
    if sys.stdin.isatty():
        raise OptionsError(["there is no command; give one, as in: runtime translate vllm serve MODEL"])
    return _commands(sys.stdin.read())


def _commands(text: str) -> list[list[str]]:
    """The commands of a text; see `_read`."""
    if IS_YAML.search(text):
        return containers(text)
    words: list[str] = []
    rest = ""
    for line in text.replace("\\\n", " ").splitlines():
        rest += line
        try:
            words += [*shlex.split(rest, comments=True), ";"]
            rest = ""
        except ValueError:  # a quotation that goes on in the next line
            rest += "\n"
    if rest:
        raise OptionsError(["the command cannot be read: a quotation has no end"])
    return [words]
