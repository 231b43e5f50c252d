"""A record of each request, for logs, files and histograms (metrics/request_log.py). Without any of these, no
record is kept.

    submit ─► Records.watch ─► began(record) ... deltas pass the RecordingSink ... ended(record), once
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Protocol

import msgspec

from runtime.errors import RequestError
from runtime.json_value import JsonValue
from runtime.media_kind import MediaKind
from runtime.messages.media import MediaLoad, MediaUsage
from runtime.messages.requests import (
    Chat,
    Delta,
    Embeds,
    GenerateRequest,
    Infill,
    Pair,
    Prompt,
    Sink,
    Text,
    Tokens,
)

MAX_CHARS = 2048  # characters of a text, or token ids, at level 2
HIDDEN = "(hidden)"


@dataclass(slots=True)
class Record:
    """One request. Fields in `_s` are times of the monotonic clock."""

    request: GenerateRequest
    began_at: float = field(default_factory=time)  # unix seconds
    began_s: float = field(default_factory=monotonic)
    loads: list[tuple[MediaKind, MediaLoad]] = field(default_factory=list)  # of its files
    known_files: int = 0  # of its files came before, and were not loaded again
    tokenized_s: float | None = None  # when it went to the scheduler
    first_s: float | None = None  # time of the first token
    ended_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    reasons: list[str] = field(default_factory=list)  # one for each sequence that has ended
    media: MediaUsage | None = None  # of its images, videos and sounds
    error: str = ""  # class of the error that it failed with
    texts: dict[int, list[str]] = field(default_factory=dict)  # parts of the output text, by sequence index

    def metrics(self) -> dict[str, object]:
        """Token counts, latencies and how the request ended."""
        end_s = monotonic() if self.ended_s is None else self.ended_s
        fields: dict[str, object] = {
            "finish_reasons": self.reasons,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "e2e_s": round(end_s - self.began_s, 6),
        }
        if self.first_s is not None:
            fields["ttft_s"] = round(self.first_s - self.began_s, 6)
        if self.drafted_tokens:
            fields |= {"drafted_tokens": self.drafted_tokens, "accepted_drafts": self.accepted_drafts}
        if self.loads or self.known_files or self.media is not None:
            fields["media"] = self.media_fields()
        return fields | ({"error": self.error} if self.error else {})

    def media_fields(self) -> dict[str, object]:
        """Bytes and times of its files, and what the encoder did for them."""
        loads = [load for _, load in self.loads]
        fields: dict[str, object] = {
            "known_files": self.known_files,
            "bytes": sum([load.num_bytes for load in loads]),
            "fetch_s": round(max([load.fetched_s - load.begin_s for load in loads], default=0.0), 6),
            "decode_s": round(sum([load.end_s - load.decode_s for load in loads]), 6),
        }
        if (usage := self.media) is not None:
            fields |= {f"{kind.value}_tokens": count for kind, count in usage.tokens.items()}
            fields |= {"encoded": usage.num_encoded, "cached": usage.num_inputs - usage.num_encoded}
            fields["encode_s"] = round(usage.encode_s, 6)
        return fields

    def input_fields(self, level: int) -> dict[str, object]:
        """Fields about the input. Level 0: its id and type; 1: also parameters without texts; 2: also the
        beginnings of texts; 3: whole texts.

        Salts and sessions, which give access to other requests' data, are on no level.
        """
        request = self.request
        fields: dict[str, object] = {"rid": request.id, "prompt": type(request.prompt).__name__.lower()}
        if request.adapter:
            fields["adapter"] = request.adapter
        if request.priority is not None:
            fields["priority"] = request.priority
        if level >= 1:
            params = msgspec.to_builtins(request.params)
            fields["sampling_params"] = (
                params if level >= 2 else {name: plain(value) for name, value in params.items()}
            )
        if level >= 2:
            fields["input"] = prompt_fields(request.prompt, level)
        return fields

    def output_fields(self, level: int) -> dict[str, object]:
        """Fields about the output: its metrics; from level 2 on also the text, cut as `input_fields` cuts
        it."""
        if level < 2:
            return self.metrics()
        return self.metrics() | {
            "output": [clipped("".join(parts), level) for _, parts in sorted(self.texts.items())]
        }


def plain(value: object) -> JsonValue:
    """Numbers, booleans and None as they are; other values, which may contain text, are hidden."""
    return value if isinstance(value, bool | int | float) or value is None else HIDDEN


def clipped(text: str, level: int) -> str:
    """The text, cut at levels below 3."""
    return text if level >= 3 or len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."


def prompt_fields(prompt: Prompt, level: int) -> object:
    """A prompt for the log; texts and token ids are cut at levels below 3."""
    match prompt:
        case Text(text=text):
            return clipped(text, level)
        case Tokens(ids=ids):
            return ids if level >= 3 else ids[:MAX_CHARS]
        case Embeds(ids=ids):
            return {"embeds": True, "ids": ids if level >= 3 or ids is None else ids[:MAX_CHARS]}
        case Chat(messages=messages, tools=tools):
            chat = {"messages": messages} | ({"tools": tools} if tools else {})
            return clipped(as_json(chat), level)
        case Infill(prefix=first, suffix=second) | Pair(text=first, second=second):
            return [clipped(first, level), clipped(second, level)]


def as_json(value: object) -> str:
    """A value as JSON, even if it cannot be encoded: users of the library put anything into a prompt."""
    try:
        return msgspec.json.encode(value, enc_hook=repr).decode()
    except UnicodeEncodeError:  # half a pair of surrogates
        return json.dumps(value, default=repr)


class RequestObserver(Protocol):
    """Called on the event loop: must not wait or raise."""

    def began(self, record: Record) -> None:
        """A request was taken in."""
        ...

    def ended(self, record: Record) -> None:
        """A request has ended; called once for each."""
        ...


class RecordingSink:
    """A sink that updates a record from the deltas that it passes on."""

    def __init__(self, sink: Sink, record: Record, records: "Records", *, keeps_texts: bool) -> None:
        self._sink = sink
        self._records = records
        self._keeps_texts = keeps_texts
        self.record = record

    def push(self, delta: Delta) -> None:
        """Updates the record."""
        record = self.record
        if record.first_s is None:
            record.first_s = monotonic()
        if self._keeps_texts and delta.text:
            record.texts.setdefault(delta.index, []).append(delta.text)
        if (finish := delta.finish) is not None:
            record.reasons.append(finish.reason.value)
            record.prompt_tokens, record.cached_tokens = finish.prompt_tokens, finish.cached_tokens
            record.completion_tokens += finish.completion_tokens
            record.media = finish.media or record.media
            if finish.drafts is not None:
                record.drafted_tokens += finish.drafts.drafted
                record.accepted_drafts += finish.drafts.accepted
            if len(record.reasons) == record.request.params.n:
                self._records.end(record)
        self._sink.push(delta)

    def fail(self, error: RequestError) -> None:
        """Ends the record."""
        self.record.error = type(error).__name__
        self._records.end(self.record)
        self._sink.fail(error)


class Records:
    """The records of open requests, and the observers that are notified."""

    def __init__(self, observers: Sequence[RequestObserver], *, keeps_texts: bool) -> None:
        """`keeps_texts`: whether output text is recorded."""
        self._observers = observers
        self._keeps_texts = keeps_texts
        self._open: dict[str, Record] = {}

    def observe(self, observers: Sequence[RequestObserver], *, keeps_texts: bool) -> None:
        """Notifies `observers` from now on, in place of those before. Requests that came while there were
        none have no record."""
        self._observers = observers
        self._keeps_texts = keeps_texts

    def find(self, request_id: str) -> Record | None:
        """The record of an open request; None: it has none."""
        return self._open.get(request_id)

    @property
    def open(self) -> list[Record]:
        """Records of open requests."""
        return list(self._open.values())

    def watch(self, request: GenerateRequest, sink: Sink) -> Sink:
        """-> the sink to use in place of `sink`"""
        return (
            RecordingSink(sink, Record(request), self, keeps_texts=self._keeps_texts)
            if self._observers
            else sink
        )

    def begin(self, sink: Sink) -> None:
        """The request was taken in."""
        if isinstance(sink, RecordingSink):
            self._open[sink.record.request.id] = sink.record
            for observer in self._observers:
                observer.began(sink.record)

    def left(self, request_id: str) -> None:
        """A request was closed; if its last delta does not come now, it was aborted."""
        if (record := self._open.pop(request_id, None)) is not None:
            asyncio.get_running_loop().call_soon(self._gone, record)

    def _gone(self, record: Record) -> None:
        if record.ended_s is None:
            record.reasons.append("abort")
            self.end(record)

    def end(self, record: Record) -> None:
        """Notifies the observers, once."""
        if record.ended_s is not None:
            return
        record.ended_s = monotonic()
        for observer in self._observers:
            observer.ended(record)
