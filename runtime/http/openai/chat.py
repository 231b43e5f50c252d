"""POST /v1/chat/completions"""

import time
from typing import Any

import msgspec

from runtime.errors import InvalidRequest, RequestError
from runtime.http import sse
from runtime.http.constraint import constraint_of
from runtime.http.errors import decode, error_object
from runtime.http.exchange import Answer, Output
from runtime.http.openai.envelope import Envelope, finish_fields, usage_of
from runtime.http.openai.logprobs import chat_logprobs
from runtime.http.openai.messages import chat_prompt
from runtime.http.openai.models import check_model
from runtime.http.openai.sampling import sampling_params
from runtime.http.openai.types import ChatBody, refuse_later
from runtime.http.salts import salts
from runtime.messages import Ask
from runtime.parsing.events import Content, Event
from runtime.request import Delta, TokenLogprob
from runtime.service import Service

CHUNK = ".chunk"  # ends the object name of a chunk
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "prompt": "messages", "input_ids": "messages",
         "include_stop": "include_stop_str_in_output"}

_decoder = msgspec.json.Decoder(ChatBody)


def chat(service: Service, body: bytes) -> Answer:
    """Raises RequestError."""
    wish = decode(body, _decoder)
    check_model(service.card, wish.model)
    envelope = Envelope("chatcmpl", "chat.completion", service.card.name, wish.n or 1, wish.stream_options)
    ask, _, names = prepare(service, wish, envelope.id)
    return Answer(service, [ask], ChatDialect(service, envelope), is_stream=bool(wish.stream), names=names)


class Plain:
    """The parser of answers that are nothing but text."""

    def feed(self, piece: str) -> list[Event]:
        return [Content(piece)] if piece else []

    def flush(self) -> list[Event]:
        return []


def prepare(service: Service, wish: ChatBody, id: str) -> tuple[Ask, Plain, dict[str, str]]:
    """-> what to ask, what reads the answer, and the client's names of our fields. Raises RequestError."""
    arrival_s = time.monotonic()
    refuse_later(wish)
    if wish.top_logprobs is not None and not wish.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    names = NAMES if wish.max_completion_tokens is None else NAMES | {"max_new_tokens": "max_completion_tokens"}
    rule, where = constraint_of(wish)
    params = sampling_params(wish, service.card.sampling_defaults, names, constraint=rule, max_new_tokens=wish.max_completion_tokens,
                             logprobs=wish.logprobs, top_logprobs=wish.top_logprobs)
    ask = Ask(id=id, prompt=chat_prompt(wish), params=params, arrival_s=arrival_s, priority=wish.priority, cache_salt=salts(wish, 1)[0])
    return ask, Plain(), names | where


class ChatDialect:
    """Messages, or chunks whose first brings the role and whose last brings the finish reason."""

    def __init__(self, service: Service, envelope: Envelope) -> None:
        self.service = service
        self.envelope = envelope
        self.around: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands before and after the text

    def events(self, choice: int, delta: Delta) -> bytes:
        self.envelope.meter.add(choice, delta)
        around = self.around.get(choice)
        if around is None:
            self.around[choice] = around = self.envelope.around(lambda text: _choice(choice, {"content": text}), CHUNK)
            head = self.envelope.chunk(_choice(choice, {"role": "assistant", "content": ""}), CHUNK)
        else:
            head = b""
        if delta.finish is None and delta.logprobs is None and not self.envelope.is_continuous:
            return head + around[0] + sse.encode(delta.text) + around[1] if delta.text else head
        text = {"content": delta.text} if delta.text else {}
        fields = _choice(choice, text) | {"logprobs": self._logprobs(delta.logprobs)} | finish_fields(delta.finish)
        return head + self.envelope.chunk(fields, CHUNK)

    def tail(self) -> bytes:
        return self.envelope.tail(CHUNK)

    def failure(self, error: RequestError) -> bytes:
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": output.text}, "logprobs": self._logprobs(output.logprobs or None)}
            | finish_fields(output.finish)
            for i, output in enumerate(outputs)
        ]
        return self.envelope.head() | {"choices": choices, "usage": usage_of(outputs, len(outputs))}

    def _logprobs(self, tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if tokens is None else chat_logprobs(tokens, self.service.token_bytes)


def _choice(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
