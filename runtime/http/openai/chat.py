"""POST /v1/chat/completions"""

import time
from typing import Any

import msgspec

from runtime.errors import InvalidRequest, RequestError
from runtime.http import sse
from runtime.http.constraint import constraint_of
from runtime.http.errors import decode, error_object
from runtime.http.exchange import Answer, Output
from runtime.http.ids import ask_ids
from runtime.http.openai.envelope import Envelope, finish_fields, usage_of
from runtime.http.openai.logprobs import chat_logprobs, prompt_logprobs
from runtime.http.openai.messages import chat_prompt
from runtime.http.openai.models import check_model
from runtime.http.openai.parameters import refuse
from runtime.http.openai.sampling import sampling_params
from runtime.http.openai.types import ChatBody
from runtime.http.salts import salts
from runtime.messages import Ask, Tokens
from runtime.parsing.events import Content, Event
from runtime.request import Delta, TokenLogprob
from runtime.service import Service

CHUNK = ".chunk"  # ends the object name of a chunk
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "prompt": "messages", "input_ids": "messages",
         "include_stop": "include_stop_str_in_output", "logprob_ids": "logprob_token_ids", "id": "rid"}
OR = {"max_new_tokens": "max_completion_tokens", "input_ids": "input_ids", "id": "request_id"}  # other names, where the client used them

_decoder = msgspec.json.Decoder(ChatBody)


def chat(service: Service, body: bytes) -> Answer:
    """Raises RequestError."""
    wish = decode(body, _decoder)
    check_model(service.card, wish.model)
    (rid,) = ask_ids(wish.rid, 1) if wish.rid is not None else (wish.request_id,)
    envelope = Envelope("chatcmpl", "chat.completion", service.card.name, 1, wish.stream_options, rid)
    ask, _, names = prepare(service, wish, envelope.id)
    envelope.meter.n = ask.params.n
    answer = Answer(service, [ask], ChatDialect(service, envelope, wish), is_stream=bool(wish.stream), names=names)
    answer.interval = wish.stream_interval or 1
    return answer


class Plain:
    """The parser of answers that are nothing but text."""

    def feed(self, piece: str) -> list[Event]:
        return [Content(piece)] if piece else []

    def flush(self) -> list[Event]:
        return []


def prepare(service: Service, wish: ChatBody, id: str) -> tuple[Ask, Plain, dict[str, str]]:
    """-> what to ask, what reads the answer, and the client's names of our fields. Raises RequestError."""
    arrival_s = time.monotonic()
    refuse(wish)
    if wish.top_logprobs is not None and not wish.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    rule, where = constraint_of(wish)
    names = NAMES | where | {name: given for name, given in OR.items() if getattr(wish, given) is not None}
    params = sampling_params(wish, service.card.sampling_defaults, names, constraint=rule, max_new_tokens=wish.max_completion_tokens,
                             logprobs=wish.logprobs, top_logprobs=wish.top_logprobs, prompt_logprobs=wish.prompt_logprobs)
    prompt = chat_prompt(wish) if wish.input_ids is None else Tokens(wish.input_ids)
    ask = Ask(id=id, prompt=prompt, params=params, arrival_s=arrival_s, priority=wish.priority, cache_salt=salts(wish, 1)[0])
    return ask, Plain(), names


class ChatDialect:
    """Messages, or chunks whose first brings the role and whose last brings the finish reason."""

    def __init__(self, service: Service, envelope: Envelope, wish: ChatBody) -> None:
        self.service = service
        self.envelope = envelope
        self.wish = wish
        self.is_plain = not (envelope.is_continuous or wish.logprobs or wish.return_token_ids)
        self.around: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands before and after the text

    def events(self, choice: int, delta: Delta) -> bytes:
        self.envelope.meter.add(choice, delta)
        around = self.around.get(choice)
        if around is None:
            self.around[choice] = around = self.envelope.around(lambda text: _choice(choice, {"content": text}), CHUNK)
            fields = _choice(choice, {"role": "assistant", "content": ""}) | self._prompt_ids(delta.prompt_ids)
            head = self.envelope.chunk(fields, CHUNK, prompt_token_ids=delta.prompt_ids if self.wish.return_token_ids else None)
        else:
            head = b""
        if delta.finish is None and self.is_plain:
            return head + around[0] + sse.encode(delta.text) + around[1] if delta.text else head
        text = {"content": delta.text} if delta.text else {}
        fields = _choice(choice, text) | {"logprobs": self._logprobs(delta.logprobs)} | finish_fields(delta.finish)
        fields |= self._ids(delta.token_ids)
        return head + self.envelope.chunk(fields, CHUNK)

    def tail(self) -> bytes:
        return self.envelope.tail(CHUNK)

    def failure(self, error: RequestError) -> bytes:
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> dict[str, Any]:
        first, wish = outputs[0], self.wish
        choices = [
            {"index": i, "message": {"role": "assistant", "content": output.text}, "logprobs": self._logprobs(output.logprobs or None)}
            | finish_fields(output.finish) | self._ids(output.token_ids) | self._prompt_ids(output.prompt_ids)
            for i, output in enumerate(outputs)
        ]
        more: dict[str, Any] = {"prompt_token_ids": first.prompt_ids} if wish.return_token_ids else {}
        if wish.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, self.service.token_bytes, wish.prompt_logprobs)
        return self.envelope.head() | {"choices": choices, "usage": usage_of(outputs, len(outputs))} | more

    def _ids(self, token_ids: list[int]) -> dict[str, list[int]]:
        return {"token_ids": token_ids} if self.wish.return_token_ids else {}

    def _prompt_ids(self, prompt_ids: list[int] | None) -> dict[str, Any]:
        return {"prompt_token_ids": prompt_ids} if self.wish.return_prompt_token_ids else {}

    def _logprobs(self, tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
        by_id = bool(self.wish.return_tokens_as_token_ids)
        return None if tokens is None else chat_logprobs(tokens, self.service.token_bytes, by_id=by_id)


def _choice(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
