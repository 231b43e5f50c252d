"""Answers of /v1/audio/transcriptions and /v1/audio/translations."""

import math
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.errors import RequestError
from runtime.http.errors import error_object
from runtime.http.openai.audio.segments import Segment, Window, segments, srt, vtt
from runtime.http.openai.audio.words import Word
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer
from runtime.messages.requests import Delta
from runtime.service import Service


class DurationUsage(Struct, frozen=True):
    """What a request costs: seconds of sound."""

    seconds: int
    type: Literal["duration"] = "duration"


class Transcription(Struct, frozen=True):
    """The answer in the format json."""

    text: str
    usage: DurationUsage


class VerboseTranscription(Struct, frozen=True, kw_only=True):
    """The answer in the format verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[Segment] | UnsetType = UNSET  # unless words alone were asked for
    words: list[Word] | UnsetType = UNSET  # where they were asked for
    usage: DurationUsage


class TextDelta(Struct, frozen=True):
    """An event of a stream: more text."""

    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class TokenUsage(Struct, frozen=True):
    """What a stream costs: tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class TextDone(Struct, frozen=True):
    """The last event of a stream: all text."""

    text: str
    usage: TokenUsage
    type: Literal["transcript.text.done"] = "transcript.text.done"


class SoundFacts(Struct, frozen=True, kw_only=True):
    """What is known of a request when its windows are transcribed."""

    task: Literal["transcribe", "translate"]
    language: str
    temperature: float
    windows_s: list[tuple[float, float]]  # begin and end
    first_timestamp: int
    is_timed: bool  # answers have timestamps

    @property
    def duration_s(self) -> float:
        """Seconds of the sound."""
        return self.windows_s[-1][1]

    @property
    def usage(self) -> DurationUsage:
        """What the request costs."""
        return DurationUsage(math.ceil(self.duration_s))


class AudioAnswerFormat:
    """Texts of a sound's windows, one choice each, as one text. A stream has the text of a window when all
    windows before it are complete."""

    def __init__(self, service: Service, facts: SoundFacts, answer_type: type[Struct]) -> None:
        self.answer_type: object = answer_type
        self._service, self._facts = service, facts
        self._waiting: dict[int, list[Delta]] = {}
        self._current = 0  # the window whose text is sent
        self._text = ""
        self._tokens = [0, 0]  # of prompts, and of answers

    def events(self, choice: int, delta: Delta) -> bytes:
        """The event of what is new in the present window; empty for deltas of later ones."""
        self._waiting.setdefault(choice, []).append(delta)
        text = ""
        while deltas := self._waiting.pop(self._current, []):
            text += "".join([one.text for one in deltas])
            if (finish := deltas[-1].finish) is None:
                break
            self._tokens[0] += finish.prompt_tokens
            self._tokens[1] += finish.completion_tokens
            self._current += 1
        text = text if self._text else text.lstrip()
        self._text += text
        return sse.event(TextDelta(text)) if text else b""

    def tail(self) -> bytes:
        """The event with all text."""
        prompt, answer = self._tokens
        return sse.event(TextDone(self._text.rstrip(), TokenUsage(prompt, answer, prompt + answer)))

    def failure(self, error: RequestError) -> bytes:
        """The last event of a stream that failed."""
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> Struct:
        """The answer in one piece."""
        facts = self._facts
        if not facts.is_timed:
            return Transcription("".join([output.text for output in outputs]).strip(), facts.usage)
        parts = [
            Window(begin_s=begin, end_s=end, token_ids=output.token_ids, logprobs=output.logprobs)
            for (begin, end), output in zip(facts.windows_s, outputs, strict=True)
        ]
        found = segments(parts, facts.first_timestamp, self._decode, facts.temperature)
        return VerboseTranscription(
            task=facts.task,
            language=facts.language,
            duration=round(facts.duration_s, 2),
            text="".join([one.text for one in found]).strip(),
            segments=found,
            usage=facts.usage,
        )

    def _decode(self, token_ids: list[int]) -> str:
        return self._service.decode(token_ids, skip_special=True)


PlainFormat = Literal["text", "srt", "vtt"]
TYPES: dict[PlainFormat, str] = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}


def plain_text(kind: PlainFormat, answer: object) -> str:
    """An answer as text, or as subtitles."""
    if isinstance(answer, VerboseTranscription):
        assert answer.segments is not UNSET, "subtitles are asked for without words"
        return srt(answer.segments) if kind == "srt" else vtt(answer.segments)
    assert isinstance(answer, Transcription)
    return f"{answer.text}\n"


Respond = Callable[[object], Awaitable[Response]]  # from a whole answer; raises RequestError


class WholeAnswer:
    """ASGI application that sends what `respond` makes of an answer when that is complete."""

    def __init__(self, answer: Answer, respond: Respond) -> None:
        self._answer, self._respond = answer, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends when the client leaves. Raises RequestError."""
        found: list[Response] = []
        failed: list[RequestError] = []
        async with anyio.create_task_group() as tasks:

            async def complete() -> None:
                try:
                    found.append(await self._respond(await self._answer.complete()))
                except RequestError as error:
                    failed.append(error)
                tasks.cancel_scope.cancel()

            tasks.start_soon(complete)
            tasks.start_soon(_until_disconnect, receive, tasks.cancel_scope.cancel)
        if failed:
            raise failed[0]
        if found:
            await found[0](scope, receive, send)


def plain(kind: PlainFormat) -> Respond:
    """Answers as plain text."""

    async def respond(answer: object) -> Response:
        return Response(plain_text(kind, answer), media_type=TYPES[kind])

    return respond


async def _until_disconnect(receive: Receive, leave: Callable[[], None | Awaitable[None]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
