"""Where the lines of a conversation come from: a script's standard input, or a person at a terminal."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, TextIO

PROMPT = "> "


class LineInput(Protocol):
    """Messages, one after the other."""

    is_person: bool  # who wants prompts and explanations

    def read(self) -> str | None:
        """The next message; None at the end of input. Raises KeyboardInterrupt when a person cancels it."""
        ...


class PipedInput:
    """Lines of a file or pipe."""

    is_person = False

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def read(self) -> str | None:
        """The next line; None at the end."""
        return self._lines.readline() or None


class EditedInput:
    """A person's lines, with editing, completion of commands, and a history that later conversations see.
    Alt+Enter starts a new line within a message."""

    is_person = True

    def __init__(self, history: Path | None, commands: Iterable[str], **terminal: object) -> None:
        """`history`: the file of earlier lines; None keeps none. `terminal`: input and output of
        prompt_toolkit, for tests."""
        from prompt_toolkit import PromptSession  # slow to import, and of use to people alone
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            key_bindings=keys,
            prompt_continuation="  ",
            **terminal,
        )

    def read(self) -> str | None:
        """The next message; None after Ctrl-D. Raises KeyboardInterrupt for Ctrl-C."""
        try:
            return self._session.prompt()
        except EOFError:
            return None


def history_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file of earlier lines, readable by its owner alone, below XDG_STATE_HOME; None where none can be
    written."""
    state = environment.get("XDG_STATE_HOME") or str(
        Path(environment.get("HOME", "/nonexistent"), ".local/state")
    )
    path = Path(state, "runtime", "chat_history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
