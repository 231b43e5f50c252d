"""Reads answers as they come: which part of a text is thought, which is said, and which calls a tool.

What a delta says is written into it when it arrives, before deltas are held back or merged: an answer means
the same in a stream and in one piece, and the tokens of its thoughts are counted exactly.
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

TAIL_TOKENS = 32  # of the prompt, which tell whether the answer begins inside of thoughts


class Said(Protocol):
    """A delta, or an output."""

    text: str
    events: list[Event] | None


def events_of(said: Said) -> list[Event]:
    """What it says; text as it stands where nobody looks for more."""
    if said.events is not None:
        return said.events
    return [Content(said.text)] if said.text else []


class Reading(Struct, frozen=True, kw_only=True):
    """How the answers to one request are read."""

    service: Service
    formats: AnswerFormats
    tools: Tools  # schemas of the parameters; none: nothing is a call
    one_call: bool = False  # calls after the first are not told
    is_continued: bool = False
    is_required: bool = False  # the answer is a list of calls
    shows_reasoning: bool = True
    streams_reasoning: bool = True  # else they are told at once, when they are complete


class Reader:
    """Reads one answer."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.parser: Parser | ChannelParser | None = None
        self.silent = 0  # tokens that have said nothing so far
        self.is_thinking = False
        self.thought = ""  # held back until it is complete
        calls = reading.formats.tool_call_format
        self.call_id_length = 0 if calls is None else calls.call_id_length

    def read(self, delta: Delta) -> None:
        """Writes into the delta what it says."""
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
        """How many tokens of thoughts are known now. Tokens that say nothing, like markers, belong to what
        comes after them."""
        self.silent += count
        if not events:
            if not (is_end and self.is_thinking):
                return 0
        elif not any([isinstance(event, Reasoning) for event in events]):
            self.silent, self.is_thinking = 0, False
            return 0
        self.is_thinking = not events or isinstance(events[-1], Reasoning)
        count, self.silent = self.silent, 0
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
                self.thought += event.text
                continue
            self._tell(shown)
            shown.append(event)
        if is_end:
            self._tell(shown)
        return shown

    def _tell(self, shown: list[Event]) -> None:
        if self.thought and self.reading.shows_reasoning:
            shown.append(Reasoning(self.thought))
        self.thought = ""


def _with_id(event: Event, chars: int) -> Event:
    """Templates that take ids of one length only would refuse the conversation when it comes back."""
    return (
        structs.replace(event, id=uuid4().hex[:chars])
        if isinstance(event, CallBegin) and event.id is None
        else event
    )
