"""Parses answers as they come: which part of a text is reasoning, which is content, and which calls a tool.

Events are written into a delta when it arrives, before deltas are kept back or merged: an answer means the
same in a stream and in one piece, and its reasoning tokens are counted exactly.
"""

from typing import Protocol
from uuid import uuid4

from msgspec import Struct, structs

from runtime.messages.requests import Delta
from runtime.parsing.answer_parser import Parser
from runtime.parsing.channel_parser import ChannelParser
from runtime.parsing.detect import AnswerFormats, open_parser
from runtime.parsing.events import CallBegin, Content, Event, Reasoning
from runtime.parsing.schema_types import Tools
from runtime.service import Service

TAIL_TOKENS = 32  # of the prompt's end, which show whether the answer begins with reasoning


class Readable(Protocol):
    """A delta, or a whole output."""

    text: str
    events: list[Event] | None


def events_of(answer: Readable) -> list[Event]:
    """The events of an answer or a part of it; where answers are not parsed, all text is content."""
    if answer.events is not None:
        return answer.events
    return [Content(answer.text)] if answer.text else []


class ReaderSettings(Struct, frozen=True, kw_only=True):
    """How the answers to one request are parsed."""

    service: Service
    formats: AnswerFormats
    tools: Tools  # schemas of the parameters; empty: no text is a call
    one_call: bool = False  # calls after the first are left out
    is_continued: bool = False
    is_required: bool = False  # the answer is a list of calls
    shows_reasoning: bool = True
    streams_reasoning: bool = True  # false: reasoning is one event, when it is complete


class AnswerReader:
    """Parses one answer."""

    def __init__(self, reading: ReaderSettings) -> None:
        self.reading = reading
        self.parser: Parser | ChannelParser | None = None
        self.num_uncounted = 0  # tokens since the last event
        self.is_thinking = False
        self.reasoning = ""  # kept back until it is complete
        calls = reading.formats.tool_call_format
        self.call_id_length = 0 if calls is None else calls.call_id_length

    def read(self, delta: Delta) -> None:
        """Parses the delta's text; sets its `events` and `reasoning_tokens`."""
        reading = self.reading
        if self.parser is None:
            tail = (
                reading.service.decode((delta.prompt_ids or [])[-TAIL_TOKENS:])
                if reading.formats.reasoning is not None
                else ""
            )
            self.parser = open_parser(
                reading.formats,
                reading.tools,
                tail,
                is_continued=reading.is_continued,
                is_required=reading.is_required,
            )
        events = self.parser.feed(delta.text) if delta.text else []
        if delta.finish is not None:
            events = events + self.parser.flush()
        if reading.formats.reasoning is not None:
            delta.reasoning_tokens = self._count(events, len(delta.token_ids), delta.finish is not None)
        delta.events = self._shown(events, delta.finish is not None)

    def _count(self, events: list[Event], count: int, is_end: bool) -> int:
        """How many more reasoning tokens are known now. Tokens without an event, like markers, count with the
        event after them."""
        self.num_uncounted += count
        if not events:
            if not (is_end and self.is_thinking):
                return 0
        elif not any([isinstance(event, Reasoning) for event in events]):
            self.num_uncounted, self.is_thinking = 0, False
            return 0
        self.is_thinking = not events or isinstance(events[-1], Reasoning)
        count, self.num_uncounted = self.num_uncounted, 0
        return count

    def _shown(self, events: list[Event], is_end: bool) -> list[Event]:
        reading = self.reading
        if reading.one_call:
            events = [event for event in events if not getattr(event, "index", 0)]
        if self.call_id_length:
            events = [_with_id(event, self.call_id_length) for event in events]
        if reading.shows_reasoning and reading.streams_reasoning:
            return events
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
                continue
            self._append_reasoning(shown)
            shown.append(event)
        if is_end:
            self._append_reasoning(shown)
        return shown

    def _append_reasoning(self, shown: list[Event]) -> None:
        if self.reasoning and self.reading.shows_reasoning:
            shown.append(Reasoning(self.reasoning))
        self.reasoning = ""


def _with_id(event: Event, chars: int) -> Event:
    """The event of a call with an id of `chars` characters: templates that take ids of one length only would
    refuse the conversation when it comes back."""
    return (
        structs.replace(event, id=uuid4().hex[:chars])
        if isinstance(event, CallBegin) and event.id is None
        else event
    )
