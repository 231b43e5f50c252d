"""The answers of gpt-oss (harmony): messages in channels, each with a header.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Analysis is reasoning; a message to a function is a call of it; everything else is content. The recipient may also stand in the role,
`assistant to=functions.NAME`. A text without headers is content as it stands.
"""

import re
from collections.abc import Iterator

from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.parsing.reader import Read, Reader, markers
from runtime.parsing.typed import is_json

HEADS = ("<|start|>", "<|channel|>")
MESSAGE = "<|message|>"
FINAL = "<|channel|>final<|message|>"  # behind this stands the answer proper
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MODELS = "gpt-oss"
MAX_HEADER = 512  # characters

_FUNCTION = re.compile(r"to=(?:functions\.)?([\w.\-$]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelParser:
    """Like answer.Parser. `separates`: analysis is told from content; `calls`: messages to functions are calls."""

    def __init__(self, separates: bool = True, calls: bool = True) -> None:
        self.num_calls = 0
        self._separates = separates
        self._calls = calls
        self._reader = Reader()
        self._events: list[Event] = []
        self._arguments = ""  # of the call that is open
        self._run = self._answer()
        next(self._run)

    def feed(self, piece: str) -> list[Event]:
        self._reader.add(piece)
        next(self._run, None)
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        self._reader.is_final = True
        return self.feed("")

    def _answer(self) -> Iterator[None]:
        reader = self._reader
        while True:
            marker = yield from self._body(Content, HEADS)
            while marker in HEADS:
                header = yield from self._header(marker)
                if header is None:
                    self._emit(Content, marker)
                    marker = yield from self._body(Content, HEADS)
                else:
                    marker = yield from self._message(header)
            if reader.is_final and reader.at == len(reader.text):
                return

    def _header(self, marker: str) -> Read[str | None]:
        """The header up to <|message|>, both read; None if it is none, and then only `marker` is."""
        reader = self._reader
        begin = reader.at
        stops = markers(MESSAGE)
        while True:
            at, end = stops.find(reader.text, reader.at, reader.is_final)
            if at - begin > MAX_HEADER or (reader.is_final and not end):
                return None
            if end:
                header = marker + reader.text[begin:at]
                reader.at = at + len(end)
                return header
            yield

    def _message(self, header: str) -> Read[str]:
        """A message, up to the marker that ends it or begins the next, which is read and given back; "" at the end of the answer."""
        recipient = _FUNCTION.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None and self._calls:
            index = self.num_calls
            self.num_calls += 1
            self._events.append(CallBegin(index, recipient[1]))
            self._arguments = ""
            marker = yield from self._body(index, ENDS + HEADS)
            if marker or is_json(self._arguments):  # <|call|> ends the answer too, and is then not part of its text
                self._events.append(CallEnd(index))
            return marker
        is_thought = channel is not None and channel[1] == "analysis" and self._separates
        return (yield from self._body(Reasoning if is_thought else Content, ENDS + HEADS))

    def _body(self, kind: type[Content] | type[Reasoning] | int, ends: tuple[str, ...]) -> Read[str]:
        reader, stops = self._reader, markers(*ends)
        while True:
            at, marker = stops.find(reader.text, reader.at, reader.is_final)
            self._emit(kind, reader.text[reader.at:at])
            reader.at = at + len(marker)
            reader.forget()
            if marker or reader.is_final:
                return marker
            yield

    def _emit(self, kind: type[Content] | type[Reasoning] | int, text: str) -> None:
        if not text:
            return
        events = self._events
        last = events[-1] if events else None
        if isinstance(kind, int):
            self._arguments += text
            events.append(Arguments(kind, text))
        elif isinstance(last, kind):
            events[-1] = kind(last.text + text)
        else:
            events.append(kind(text))
