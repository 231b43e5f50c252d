"""`runtime completion SHELL`: completion of commands, options and their choices, as a script for the shell.

bash: `runtime completion bash > ~/.local/share/bash-completion/completions/runtime`
zsh:  `runtime completion zsh > DIR/_runtime.zsh`, and `source` it in .zshrc
fish: `runtime completion fish > ~/.config/fish/completions/runtime.fish`
"""

import argparse
import shlex
from collections.abc import Sequence

from runtime.options.table import Row, rows

SHELLS = ("bash", "zsh", "fish")
SERVING = ("serve", "check", "chat")  # commands that take the options of a server

BASH = """\
_runtime() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$command" in {serving}) ;; *) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
    case "$before" in
{choices}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _runtime runtime
"""


def run(argv: Sequence[str]) -> int:
    """Prints the script."""
    parser = argparse.ArgumentParser(
        prog="runtime completion",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.partition("\n\n")[2],
    )
    parser.add_argument("shell", choices=SHELLS)
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for one of SHELLS."""
    from runtime.cli import COMMANDS  # which lists this module

    working = [row for row in rows() if row.acts]
    if shell == "fish":
        return _fish(working, {name: about for name, (_, about) in COMMANDS.items()})
    text = _bash(working, list(COMMANDS))
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def _bash(working: list[Row], commands: list[str]) -> str:
    choices = [
        f"        {'|'.join((row.flag, *row.aliases))}) "
        f'COMPREPLY=($(compgen -W "{" ".join(now)}" -- "$word")); return ;;'
        for row in working
        if (now := _choices(row))
    ]
    return BASH.format(
        commands=" ".join(commands),
        serving="|".join(SERVING),
        choices="\n".join(choices),
        flags=" ".join(flag for row in working for flag in (row.flag, *row.aliases)),
    )


def _fish(working: list[Row], commands: dict[str, str]) -> str:
    lines = [
        f"complete -c runtime -n __fish_use_subcommand -f -a {name} -d {shlex.quote(about)}"
        for name, about in commands.items()
    ]
    for row in working:
        given = (
            ""
            if row.takes == "switch"
            else f" -x -a {shlex.quote(' '.join(now))}"
            if (now := _choices(row))
            else " -r"
        )
        for flag in (row.flag, *row.aliases):
            long = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(
                f'complete -c runtime -n "__fish_seen_subcommand_from {" ".join(SERVING)}" {long}{given} '
                f"-d {shlex.quote(row.help.partition('. ')[0])}"
            )
    return "\n".join(lines) + "\n"


def _choices(row: Row) -> list[str]:
    """The values of an option that this version takes; empty where they cannot be listed."""
    return [choice for choice in row.choices or () if choice not in row.later]
