"""The parser of one answer: text in, events out."""

from collections.abc import Iterator

from msgspec import Struct

from runtime.parsing.call_syntax import CallSyntax, may_begin_call, skip_optional
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.parsing.reader import SPACE, Malformed, Markers, Read, Reader, markers
from runtime.parsing.schema_types import Tools

# characters of an answer that may be read for calls that are none; above, nothing more is looked for
MAX_REREAD = 2**18


class Section(Struct, frozen=True):
    """Where calls stand: between `begin` and `end`, or from `begin` on as long as calls follow."""

    begin: str
    end: str = ""
    optional_ends: tuple[str, ...] = ()  # skipped behind `end`, where they are there


class ToolCallFormat(Struct, frozen=True, kw_only=True):
    """How a model writes tool calls. Calls stand in sections, in any of `syntaxes`; calls with a beginning in
    `anywhere` may stand outside of sections as well."""

    syntaxes: tuple[CallSyntax, ...]
    sections: tuple[Section, ...] = ()
    anywhere: tuple[str, ...] = ()  # beginnings of calls that count wherever they stand
    # beginnings that count at the start of the answer, if the function exists
    at_start: tuple[str, ...] = ()
    # beginnings that count anywhere, with NAME in place of the name of an existing function
    known: tuple[str, ...] = ()
    dropped_markers: tuple[str, ...] = ()  # markers around the text of an answer, which are not reported
    separators: str = ",;"  # between calls, in addition to white space
    call_id_length: int = 0  # letters and digits of a call's id, where the template requires a length
    models: str = ""


class ReasoningFormat(Struct, frozen=True, kw_only=True):
    """How a model writes its reasoning."""

    begin: str = "<think>"
    end: str = "</think>"
    alternatives: tuple[tuple[str, str], ...] = ()  # other pairs of begin and end
    call_begins: tuple[str, ...] = ()  # beginnings of calls that end reasoning as well
    resumes: bool = False  # behind such a call, reasoning goes on up to `end`
    dropped_markers: tuple[str, ...] = ()  # as in ToolCallFormat
    is_forced: bool = False  # the answer begins inside reasoning, also where the prompt does not show it
    stays_in_content: bool = False  # reasoning is part of the content, with its markers
    models: str = ""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(begin, end) of reasoning, for each way to write it."""
        return ((self.begin, self.end), *self.alternatives)

    @property
    def begins(self) -> tuple[str, ...]:
        """Markers that begin reasoning."""
        return tuple([begin for begin, _ in self.pairs])

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end reasoning."""
        return tuple(dict.fromkeys([end for _, end in self.pairs]))

    def is_open(self, tail: str, is_continued: bool) -> bool:
        """Whether an answer begins inside reasoning. `tail`: the end of its prompt; `is_continued`: the
        prompt holds the beginning of the answer."""
        if is_continued:
            return max(map(tail.rfind, self.begins)) > max(map(tail.rfind, self.ends))
        tail = tail.rstrip(SPACE)
        begins = tuple([begin.rstrip(SPACE) for begin in self.begins])
        return tail.endswith(begins) or (self.is_forced and not tail.endswith(self.ends))


class Parser:
    """The parser of one answer: feed it the deltas of the text, then `flush`. It is the CallSink of its
    syntaxes."""

    def __init__(
        self,
        format: ToolCallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Tools,
        is_open: bool = False,
    ) -> None:
        self.tools = tools
        self.num_calls = 0
        self._format = format
        self._reasoning = reasoning
        self._events: list[Event] = []
        self._reader = Reader()
        self._kind: type[Content] | type[Reasoning] = Content
        self._gap = ""  # white space that is reported with the next text
        self._drops_space = False  # white space before the next text is dropped
        self._is_fresh = True  # nothing stands before here, or only a call or reasoning
        self._is_first = True  # nothing at all stands before here
        self._resumes_reasoning = False  # a call stands within reasoning
        self._known = tuple(
            [
                begin.replace("NAME", name)
                for begin in (format.known if format is not None else ())
                for name in tools
            ]
        )
        self._dropped_markers = frozenset(
            (
                *(format.dropped_markers if format is not None else ()),
                *(reasoning.dropped_markers if reasoning is not None else ()),
            )
        )
        self._has_calls = False  # since the last marker
        self._requires_known = False  # only existing functions can be called here
        self._reread = 0  # characters that were held back and turned out not to be calls
        # while text that has none of these characters may leave as it is
        self._plain: frozenset[str] | None = None
        self._reading = self._read_answer(is_open)
        next(self._reading)
        if self._events:
            self._plain = None  # these events are reported with the first delta

    def feed(self, piece: str) -> list[Event]:
        """The events of this delta."""
        plain = self._plain
        if plain is not None and piece and piece[-1] not in SPACE and plain.isdisjoint(piece):
            if self._gap:
                piece, self._gap = self._gap + piece, ""
            return [self._kind(piece)]
        return self._advance(piece)

    def flush(self) -> list[Event]:
        """The events of the rest, at the end of the answer."""
        self._reader.is_final = True
        return self._advance("")

    def _advance(self, piece: str) -> list[Event]:
        self._reader.add(piece)
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    # ── CallSink ────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, name: str, id: str | None = None) -> None:
        """See CallSink.begin."""
        if self._requires_known and name not in self.tools:
            raise Malformed
        self._gap = ""
        self._has_calls = True
        self._is_first = False
        self._events.append(CallBegin(self.num_calls, name, id))
        self.num_calls += 1
        self._reader.forget()

    def arguments(self, text: str) -> None:
        """See CallSink.arguments."""
        events = self._events
        if events and isinstance(last := events[-1], Arguments):
            events[-1] = Arguments(last.index, last.text + text)
        else:
            events.append(Arguments(self.num_calls - 1, text))
        self._reader.forget()

    def end(self) -> None:
        """See CallSink.end."""
        self._events.append(CallEnd(self.num_calls - 1))
        self._reader.forget()

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────

    def _read_answer(self, is_open: bool) -> Iterator[None]:
        reader, reasoning = self._reader, self._reasoning
        if is_open and reasoning is not None:
            yield from self._skip_begin(reasoning)
            yield from self._read_reasoning(reasoning)
        while True:
            marker = yield from self._read_text(self._expected_markers())
            if not marker:
                return
            if reasoning is not None and marker in reasoning.begins:
                yield from self._read_reasoning(reasoning)
                continue
            if marker in self._dropped_markers:
                self._is_fresh = True
                continue
            self._has_calls = False
            try:
                yield from self._read_calls(marker)
            except Malformed:  # all that is read since the last `forget` is content, after all
                if not self._has_calls:
                    self._reread += reader.at
                    reader.at = len(marker)
                    self._emit_text(marker)
                else:
                    reader.at = 0
                    self._after_call()
            if self._resumes_reasoning and reasoning is not None:
                yield from self._read_reasoning(reasoning)

    def _expected_markers(self) -> Markers:
        """Markers that may follow text here."""
        texts: list[str] = []
        if self._reread > MAX_REREAD:
            return markers(*self._dropped_markers)
        texts += self._dropped_markers
        if (form := self._format) is not None:
            texts += [section.begin for section in form.sections]
            texts += form.anywhere
            texts += self._known
            if self._is_first:
                texts += form.at_start
        if self._reasoning is not None and self._is_fresh and not self._reasoning.stays_in_content:
            texts += self._reasoning.begins
        return markers(*dict.fromkeys(texts))

    def _read_text(self, ends: Markers) -> Read[str]:
        """Reports text up to one of `ends`, and reads the marker. -> the marker, or "" at the end of the
        answer"""
        reader = self._reader
        while True:
            was_fresh = self._is_fresh
            at, marker = ends.find(reader.text, reader.at, reader.is_final)
            text = reader.text[reader.at : at]
            if was_fresh and text.strip(SPACE):
                # some markers count at the start only: what stands behind this text is looked for again,
                # without them
                lead = len(text) - len(text.lstrip(SPACE)) + 1
                at, marker = reader.at + lead, ""
                text = text[:lead]
            reader.at = at
            reader.forget()
            self._emit_text(text)
            if marker:
                reader.at = len(marker)
                return marker
            if self._is_fresh != was_fresh:
                ends = self._expected_markers() if self._kind is Content else ends
                continue
            if reader.is_final and reader.at == len(reader.text):
                # white space at the end of content is content
                if self._gap and not self._drops_space and self._kind is Content:
                    self._events.append(Content(self._gap))
                self._gap = ""
                return ""
            if not reader.text and not self._is_fresh:
                self._plain = ends.firsts
            yield
            self._plain = None

    def _emit_text(self, text: str) -> None:
        """Reports text. White space at its end waits: it may stand next to a call."""
        text = self._gap + text
        body = text.rstrip(SPACE)
        self._gap = text[len(body) :]
        if not body:
            return
        if self._drops_space:
            body = body.lstrip(SPACE)
            self._drops_space = False
        self._is_fresh = False
        self._is_first = self._is_first and self._kind is Reasoning
        events = self._events
        if events and isinstance(last := events[-1], self._kind):
            events[-1] = self._kind(last.text + body)
        else:
            events.append(self._kind(body))

    def _after_call(self) -> None:
        """Sets the state behind a call or reasoning."""
        self._gap = ""
        self._drops_space = self._is_fresh = True

    def _skip_begin(self, reasoning: ReasoningFormat) -> Read[None]:
        """Reads an opening marker that the model writes although its reasoning is open already."""
        reader = self._reader
        yield from reader.space()
        for begin in sorted(reasoning.begins, key=len, reverse=True):
            if (yield from reader.sees(begin)):
                reader.forget()
                return
        reader.at = 0

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Read[None]:
        self._gap = ""
        if reasoning.stays_in_content:
            self._emit_text(reasoning.begin)
            return
        self._kind, self._drops_space, self._is_fresh = Reasoning, True, True
        calls = reasoning.call_begins if self._format is not None or not reasoning.resumes else ()
        marker = yield from self._read_text(markers(*reasoning.ends, *calls))
        self._resumes_reasoning = reasoning.resumes and marker in calls
        if marker in calls:
            self._reader.at -= len(marker)
        self._kind = Content
        self._after_call()

    def _read_calls(self, marker: str) -> Read[None]:
        """Reads what follows a marker of the format, which has been read."""
        form, reader = self._format, self._reader
        assert form is not None
        section = next((section for section in form.sections if section.begin == marker), None)
        if section is None:
            reader.at -= len(marker)
            self._requires_known = marker not in form.anywhere
        try:
            while (yield from self._read_call(form, section)):
                pass
        finally:
            self._requires_known = False

    def _read_call(self, form: ToolCallFormat, section: Section | None) -> Read[bool]:
        """Reads one call or list of calls. -> whether another may follow. Raises Malformed where there is
        none, and no call before it."""
        reader, has_previous = self._reader, self._has_calls
        if has_previous:
            reader.forget()
            self._after_call()
        yield from reader.space(form.separators if has_previous else "")
        if has_previous and section is not None and section.end and (yield from reader.sees(section.end)):
            yield from skip_optional(reader, section.optional_ends)
            return False
        syntax = yield from next_syntax(reader, form.syntaxes)
        if syntax is not None:
            yield from syntax.read(reader, self)
            return True
        if not has_previous:
            raise Malformed
        reader.at = 0
        return False


def next_syntax(reader: Reader, syntaxes: tuple[CallSyntax, ...]) -> Read[CallSyntax | None]:
    """The syntax of the call that comes next; None: no call comes next."""
    longest = max(len(begin) for syntax in syntaxes for begin in syntax.begins) or 1
    while True:
        rest = reader.text[reader.at : reader.at + longest]
        fits = [syntax for syntax in syntaxes if rest and may_begin_call(syntax, rest)]
        for syntax in fits:
            if any(rest.startswith(begin) for begin in syntax.begins):
                return syntax
            if not reader.is_final:
                break  # it may be this one, which comes before the others
        if reader.is_final or (rest and not fits):
            return None
        yield
