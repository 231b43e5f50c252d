"""`runtime chat`: a conversation in the terminal, streamed from a server's /v1/chat/completions.

Without --url it talks to the server at the default address if one answers, else it starts one of its own for
the conversation. A script can pipe lines in; a person gets line editing and a history.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TextIO

from runtime.cli.chat_client import Chat
from runtime.cli.chat_server import await_started, own_server
from runtime.cli.line_input import EditedInput, LineInput, PipedInput, history_file
from runtime.errors import StartError

DEFAULT_URL = "http://127.0.0.1:30000"
KEYS = "Alt+Enter starts a new line, Ctrl-C stops an answer, Ctrl-D leaves."
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def run(argv: Sequence[str]) -> int:
    """Talks until /exit or the end of input. Raises StartError when there is no server and none can be
    started."""
    arguments, serve_arguments = _parse(argv)
    if serve_arguments and serve_arguments[0].startswith(("http://", "https://")):
        raise StartError(f"{serve_arguments[0]} stands alone; give the server as --url {serve_arguments[0]}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with ExitStack() as stack:
        api_key = os.environ.get("RUNTIME_API_KEY")
        url = arguments.url or DEFAULT_URL
        if not await_started(url, api_key).is_ready:
            if arguments.url:
                raise StartError(
                    f"no server answers at {url}; start one with `runtime serve`, or leave --url out"
                )
            url = stack.enter_context(own_server(serve_arguments))
        elif serve_arguments:
            raise StartError(
                f"{serve_arguments[0]} is for a server that chat starts itself, but one runs at {url} already"
            )
        chat = Chat(url, api_key, temperature=arguments.temperature, max_tokens=arguments.max_tokens)
        if arguments.system:
            chat.reset(arguments.system)
        is_person = sys.stdin.isatty() and sys.stdout.isatty()
        lines = EditedInput(history_file(), COMMANDS) if is_person else PipedInput(sys.stdin)
        converse(chat, lines, sys.stdout)
    return 0


def _leave(number: int, frame: object) -> None:
    """A signal unwinds the stack, so that a server of our own is stopped."""
    sys.exit(128 + number)


def converse(chat: Chat, lines: LineInput, out: TextIO) -> None:
    """Reads messages, obeys commands, prints answers."""
    if lines.is_person:
        print(
            f"{chat.model() or 'a model'} at {chat.url.geturl()}. /help lists the commands.\n{KEYS}", file=out
        )
    while True:
        try:
            line = lines.read()
        except KeyboardInterrupt:
            continue  # what was typed is dropped
        if line is None:
            return
        name, _, rest = line.strip().partition(" ")
        if not name:
            continue
        if not name.startswith("/"):
            _answer(chat, line.strip(), out, lines.is_person)
        elif name not in COMMANDS:
            print(f"{name} is no command: {', '.join(COMMANDS)}", file=out)
        elif name == "/exit":
            return
        else:
            COMMANDS[name][1](chat, rest.strip(), out, lines.is_person)


def _answer(chat: Chat, text: str, out: TextIO, is_person: bool) -> None:
    """Prints an answer as it comes. A person goes on after a failed or interrupted turn; a script stops."""
    is_dim = False
    try:
        for piece in chat.say(text):
            if is_person and piece.is_reasoning != is_dim:
                is_dim = piece.is_reasoning
                print(DIM if is_dim else f"{PLAIN}\n", end="", file=out)
            print(piece.text, end="", file=out, flush=True)
        print(PLAIN if is_dim else "", file=out, flush=True)
    except (StartError, KeyboardInterrupt) as error:
        if not is_person:
            raise
        print(f"{PLAIN}\n[{error or 'stopped'}]", file=out, flush=True)


def _help(chat: Chat, rest: str, out: TextIO, is_person: bool) -> None:
    for name, (about, _) in COMMANDS.items():
        print(f"  {name:<14} {about}", file=out)
    print(f"  {KEYS}", file=out)


def _system(chat: Chat, rest: str, out: TextIO, is_person: bool) -> None:
    chat.reset(rest)


def _reset(chat: Chat, rest: str, out: TextIO, is_person: bool) -> None:
    chat.reset()


def _retry(chat: Chat, rest: str, out: TextIO, is_person: bool) -> None:
    text = chat.take_back()
    if text is None:
        print("there is nothing to answer again", file=out)
    else:
        _answer(chat, text, out, is_person)


Command = Callable[[Chat, str, TextIO, bool], None]
COMMANDS: dict[str, tuple[str, Command]] = {
    "/system": ("TEXT sets the system message and begins anew", _system),
    "/reset": ("begins anew, with the same system message", _reset),
    "/retry": ("answers the last message once more", _retry),
    "/help": ("shows this", _help),
    "/exit": ("leaves", _help),  # which `converse` does itself
}


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="runtime chat",
        allow_abbrev=False,
        description=f"Chat in the terminal. Commands: {', '.join(COMMANDS)}. {KEYS}",
        epilog="Further options go to `runtime serve` when chat starts a server: --model-path DIR, ... "
        "An API key is read from RUNTIME_API_KEY.",
    )
    parser.add_argument(
        "--url", help=f"server to talk to (default: {DEFAULT_URL} if it answers, else a server of its own)"
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the model's)")
    parser.add_argument(
        "--max-tokens", type=int, help="longest answer in tokens (default: up to the context length)"
    )
    return parser.parse_known_args(argv)
