"""Answers that are messages, each with a header that names its recipient.

gpt-oss (harmony):

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Analysis is reasoning; a message to a function is a call of it; everything else is content. The recipient may
also stand in the role, `assistant to=functions.NAME`. A text without headers is content as it stands.

Muse:

     to=self<|message|>...<|eom|><|start|>assistant to=functions.NAME<|message|><atem:function_calls>...

Messages to self are reasoning, messages to user or commentary are content; others hold calls as markup, up to
</atem:function_calls>. The first header has no marker before it.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from runtime.parsing.answer_parser import Parser, ToolCallFormat
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.parsing.reader import Read, Reader, markers
from runtime.parsing.schema_types import Tools, is_json
from runtime.parsing.tool_call_formats import ATEM

MAX_HEADER = 512  # characters

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelFormat(Struct, frozen=True, kw_only=True):
    """How messages stand in an answer."""

    models: str
    header_begins: tuple[str, ...]  # markers that begin a header
    ends: tuple[str, ...]  # markers that end a message
    final: str  # header of the answer proper
    recipient: re.Pattern[str]  # in a header
    reasoning: str  # the channel, or the recipient, of reasoning
    non_tools: frozenset[str] = frozenset()  # recipients that are not tools
    at_start: str = ""  # an answer's first header may begin with this, behind white space
    calls: ToolCallFormat | None = None  # how messages to tools are written; None: they are the arguments
    message: str = "<|message|>"  # ends the header
    thinking: tuple[str, str] | None = None  # what begins reasoning and what ends it; None: it has no budget

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        return (*self.header_begins, *self.ends, self.message)


CHANNEL_FORMATS = {
    "gpt-oss": ChannelFormat(
        models="gpt-oss",
        header_begins=("<|start|>", "<|channel|>"),
        ends=("<|end|>", "<|return|>", "<|call|>"),
        reasoning="analysis",
        final="<|channel|>final<|message|>",
        recipient=re.compile(r"to=(?:functions\.)?([\w.\-$]+)"),
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    "muse": ChannelFormat(
        models="Muse",
        header_begins=("<|start|>",),
        ends=("<|eom|>", "<|eot|>"),
        reasoning="self",
        non_tools=frozenset({"user", "commentary"}),
        final="to=user<|message|>",
        recipient=re.compile(r"to=([^\s<]+)"),
        at_start="to=",
        calls=ATEM,
    ),
}


class ChannelParser:
    """As answer_parser.Parser. `separates`: reasoning is reported apart from content; `calls`: messages to
    tools are reported as calls."""

    def __init__(
        self, format: ChannelFormat, tools: Tools, separates: bool = True, calls: bool = True
    ) -> None:
        self.num_calls = 0
        self._framing = format
        self._tools = tools
        self._separates = separates
        self._calls = calls
        self._reader = Reader()
        self._events: list[Event] = []
        self._arguments = ""  # of the call that is open
        self._reading = self._read_answer()
        next(self._reading)

    def feed(self, piece: str) -> list[Event]:
        """The events of this delta."""
        self._reader.add(piece)
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def flush(self) -> list[Event]:
        """The events of the rest, at the end of the answer."""
        self._reader.is_final = True
        return self.feed("")

    def _read_answer(self) -> Iterator[None]:
        reader, header_begins = self._reader, self._framing.header_begins
        marker = ""
        if self._framing.at_start and (yield from self._begins_with_header()):
            header = yield from self._read_header("")
            marker = "" if header is None else (yield from self._read_message(header))
        while True:
            if marker not in header_begins:
                marker = yield from self._read_body(Content, header_begins)
            while marker in header_begins:
                header = yield from self._read_header(marker)
                if header is None:
                    self._emit(Content, marker)
                    marker = yield from self._read_body(Content, header_begins)
                else:
                    marker = yield from self._read_message(header)
            if reader.is_final and reader.at == len(reader.text):
                return

    def _begins_with_header(self) -> Read[bool]:
        """Whether the answer begins with a header without a marker; nothing is read."""
        reader = self._reader
        yield from reader.space()
        match = yield from reader.sees(self._framing.at_start)
        reader.at = 0
        return match

    def _read_header(self, marker: str) -> Read[str | None]:
        """The header up to the marker of its end, both read. None: there is no header, and only `marker` is
        read."""
        reader, message = self._reader, self._framing.message
        begin = reader.at
        stops = markers(message)
        while True:
            at, end = stops.find(reader.text, reader.at, reader.is_final)
            if at - begin > MAX_HEADER or (reader.is_final and not end):
                return None
            if end:
                header = marker + reader.text[begin:at]
                reader.at = at + len(end)
                return header
            yield

    def _read_message(self, header: str) -> Read[str]:
        """Reads a message. -> the marker that ends it or begins the next, read as well; "" at the end of the
        answer"""
        format = self._framing
        ends = format.ends + format.header_begins
        recipient, channel = format.recipient.search(header), _CHANNEL.search(header)
        targets = {match[1] for match in (recipient, channel) if match is not None}
        if (
            recipient is not None
            and self._calls
            and recipient[1] != format.reasoning
            and recipient[1] not in format.non_tools
        ):
            if format.calls is not None:
                return (yield from self._read_call_syntax(format.calls, ends))
            index = self.num_calls
            self.num_calls += 1
            self._events.append(CallBegin(index, recipient[1]))
            self._arguments = ""
            marker = yield from self._read_body(index, ends)
            if marker and not self._arguments.strip():
                self._events.append(Arguments(index, "{}"))
            # <|call|> ends the answer too, and is then not part of its text
            if marker or is_json(self._arguments):
                self._events.append(CallEnd(index))
            return marker
        return (
            yield from self._read_body(
                Reasoning if format.reasoning in targets and self._separates else Content, ends
            )
        )

    def _read_call_syntax(self, form: ToolCallFormat, ends: tuple[str, ...]) -> Read[str]:
        """Reads a message that holds calls in a format of their own."""
        parser = Parser(form, None, self._tools)
        parser.num_calls = self.num_calls
        reader, stops = self._reader, markers(*ends)
        while True:
            at, marker = stops.find(reader.text, reader.at, reader.is_final)
            text = reader.text[reader.at : at]
            reader.at = at + len(marker)
            reader.forget()
            self._forward(parser.feed(text) if text else [])
            if marker or reader.is_final:
                self._forward(parser.flush())
                self.num_calls = parser.num_calls
                return marker
            yield

    def _forward(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, CallBegin):
                self._events.append(CallBegin(event.index, self._tool_named(event.name), event.id))
            elif isinstance(event, Content | Reasoning):
                self._emit(type(event), event.text)
            else:
                self._events.append(event)

    def _tool_named(self, name: str) -> str:
        """The tool that is meant: some models write namespaces before its name, or the name twice."""
        if name in self._tools:
            return name
        leaf = name.rpartition(".")[2]
        match = [tool for tool in self._tools if tool.rpartition(".")[2] == leaf]
        return match[0] if len(match) == 1 else name

    def _read_body(self, kind: type[Content] | type[Reasoning] | int, ends: tuple[str, ...]) -> Read[str]:
        reader, stops = self._reader, markers(*ends)
        while True:
            at, marker = stops.find(reader.text, reader.at, reader.is_final)
            self._emit(kind, reader.text[reader.at : at])
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
