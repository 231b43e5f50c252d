"""What became of each request, for whoever keeps account: logs, files, histograms (metrics/request_log.py).
Nothing of it exists where nobody does.

    submit ─► Records.watch ─► began(record) ... the request's sink, which is looked at ... ended(record), once
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Protocol

import msgspec

from runtime.errors import RequestError
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

BEGINNING = 2048  # characters of a text at level 2
HIDDEN = "(hidden)"


@dataclass(slots=True)
class Record:
    """One request. Times are of the monotonic clock, but `began_at`."""

    request: GenerateRequest
    began_at: float = field(default_factory=time)
    began_s: float = field(default_factory=monotonic)
    first_s: float | None = None  # when its first token came
    ended_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasons: list[str] = field(default_factory=list)  # one for each sequence that has ended
    error: str = ""  # its class
    texts: dict[int, list[str]] = field(default_factory=dict)  # of each sequence

    def figures(self) -> dict[str, Any]:
        """How it ended, in numbers."""
        end_s = monotonic() if self.ended_s is None else self.ended_s
        found: dict[str, Any] = {
            "finish_reasons": self.reasons,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "e2e_s": round(end_s - self.began_s, 6),
        }
        if self.first_s is not None:
            found["ttft_s"] = round(self.first_s - self.began_s, 6)
        return found | ({"error": self.error} if self.error else {})

    def asked(self, level: int) -> dict[str, Any]:
        """What was asked. Level 0: what it is; 1: and its parameters, without texts; 2: and the beginnings of
        texts; 3: all of them.

        Salts and sessions, by which others could be found, are on no level.
        """
        request = self.request
        found: dict[str, Any] = {"rid": request.id, "prompt": type(request.prompt).__name__.lower()}
        if request.adapter:
            found["adapter"] = request.adapter
        if request.priority is not None:
            found["priority"] = request.priority
        if level >= 1:
            params = msgspec.to_builtins(request.params)
            found["sampling_params"] = (
                params if level >= 2 else {name: plain(value) for name, value in params.items()}
            )
        if level >= 2:
            found["input"] = shown(request.prompt, level)
        return found

    def answered(self, level: int) -> dict[str, Any]:
        if level < 2:
            return self.figures()
        return self.figures() | {
            "output": [clipped("".join(parts), level) for _, parts in sorted(self.texts.items())]
        }


def plain(value: Any) -> Any:
    """Numbers and such; of all that may hold words only that it is there."""
    return value if isinstance(value, bool | int | float) or value is None else HIDDEN


def clipped(text: str, level: int) -> str:
    return text if level >= 3 or len(text) <= BEGINNING else text[:BEGINNING] + "..."


def shown(prompt: Prompt, level: int) -> Any:
    """Texts are cut after their beginning; so are token ids."""
    match prompt:
        case Text(text=text):
            return clipped(text, level)
        case Tokens(ids=ids):
            return ids if level >= 3 else ids[:BEGINNING]
        case Embeds(ids=ids):
            return {"embeds": True, "ids": ids if level >= 3 or ids is None else ids[:BEGINNING]}
        case Chat(messages=messages, tools=tools):
            asked = {"messages": messages} | ({"tools": tools} if tools else {})
            return clipped(as_json(asked), level)
        case Infill(prefix=first, suffix=second) | Pair(text=first, second=second):
            return [clipped(first, level), clipped(second, level)]


def as_json(value: Any) -> str:
    """Whatever a library's user has put into a prompt."""
    try:
        return msgspec.json.encode(value, enc_hook=repr).decode()
    except UnicodeEncodeError:  # half a pair of surrogates
        return json.dumps(value, default=repr)


class RequestObserver(Protocol):
    """Who keeps account. Called on the event loop: must not wait or raise."""

    def began(self, record: Record) -> None: ...

    def ended(self, record: Record) -> None: ...


class Watched:
    """A sink that notes what passes."""

    def __init__(self, sink: Sink, record: Record, records: "Records", *, keeps_texts: bool) -> None:
        self._sink = sink
        self._records = records
        self._keeps_texts = keeps_texts
        self.record = record

    def push(self, delta: Delta) -> None:
        record = self.record
        if record.first_s is None:
            record.first_s = monotonic()
        if self._keeps_texts and delta.text:
            record.texts.setdefault(delta.index, []).append(delta.text)
        if (finish := delta.finish) is not None:
            record.reasons.append(finish.reason.value)
            record.prompt_tokens, record.cached_tokens = finish.prompt_tokens, finish.cached_tokens
            record.completion_tokens += finish.completion_tokens
            if len(record.reasons) == record.request.params.n:
                self._records.end(record)
        self._sink.push(delta)

    def fail(self, error: RequestError) -> None:
        self.record.error = type(error).__name__
        self._records.end(self.record)
        self._sink.fail(error)


class Records:
    """The open requests' records."""

    def __init__(self, keepers: Sequence[RequestObserver], *, keeps_texts: bool) -> None:
        self._keepers = keepers
        self._keeps_texts = keeps_texts
        self._open: dict[str, Record] = {}

    @property
    def open(self) -> list[Record]:
        return list(self._open.values())

    def watch(self, request: GenerateRequest, sink: Sink) -> Sink:
        """The sink to give in place of this one."""
        return Watched(sink, Record(request), self, keeps_texts=self._keeps_texts) if self._keepers else sink

    def begin(self, sink: Sink) -> None:
        """The request was taken in."""
        if isinstance(sink, Watched):
            self._open[sink.record.request.id] = sink.record
            for observer in self._keepers:
                observer.began(sink.record)

    def left(self, request_id: str) -> None:
        """It leaves; if its end does not come with that, its client has left."""
        if (record := self._open.pop(request_id, None)) is not None:
            asyncio.get_running_loop().call_soon(self._gone, record)

    def _gone(self, record: Record) -> None:
        if record.ended_s is None:
            record.reasons.append("abort")
            self.end(record)

    def end(self, record: Record) -> None:
        if record.ended_s is not None:
            return
        record.ended_s = monotonic()
        for observer in self._keepers:
            observer.ended(record)
