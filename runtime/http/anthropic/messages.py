"""POST /v1/messages and /v1/messages/count_tokens: chats in Anthropic's form."""

from uuid import uuid4

import msgspec
from msgspec import to_builtins

from runtime.errors import InvalidRequest, RequestError
from runtime.http.anthropic.convert import NAMES, chat_body
from runtime.http.anthropic.message_request import Adaptive, CountBody, Enabled, MessagesBody
from runtime.http.anthropic.message_response import Message, MessageEvent, TokenCount
from runtime.http.anthropic.writer import Payload, Writer
from runtime.http.errors import AnthropicError, anthropic_error, decode, renamed
from runtime.http.fields.media import MediaParts
from runtime.http.fields.media_usage import media_fields
from runtime.http.fields.model import adapter_named, response_model
from runtime.http.fields.thinking import has_budgets
from runtime.http.openai import chat
from runtime.http.openai.messages import chat_prompt
from runtime.http.operation import HELLO, Operation
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.answer_reader import events_of
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.sse import typed_events
from runtime.json_value import Fields
from runtime.messages.media import MediaUsage
from runtime.messages.requests import Delta, Finish, FinishReason
from runtime.parsing.events import Event, Reasoning
from runtime.service import Service

_body = msgspec.json.Decoder(MessagesBody)


def messages(service: Service, content: bytes) -> Answer:
    """The answer to a Messages request. Raises RequestError."""
    body = decode(content, _body)
    message_id, chat_request = f"msg_{uuid4().hex}", chat_body(body)
    chat_request.lora_path = adapter_named(service.card, body.model)
    # clients send budgets to every model; those whose reasoning is not known here have none
    if isinstance(body.thinking, Enabled) and has_budgets(service.card.formats):
        chat_request.thinking_token_budget = body.thinking.budget_tokens
    try:
        request, reading, names = chat.prepare(service, chat_request, message_id)
    except RequestError as error:
        raise renamed(error, NAMES) from None
    is_stream = bool(body.stream)
    omits = isinstance(body.thinking, Enabled | Adaptive) and body.thinking.display == "omitted"
    answer_format = MessageAnswerFormat(
        message_id,
        response_model(service.card, body.model),
        body.max_tokens,
        is_stream=is_stream,
        omits_reasoning=omits,
        reports_edits=body.context_management is not None,
        stops=tuple(body.stop_sequences or ()),
    )
    return Answer(
        service, [request], answer_format, is_stream=is_stream, names=names | NAMES, reading=reading
    )


async def count_tokens(service: Service, body: CountBody) -> Fields:
    """The number of tokens of a prompt. Raises RequestError."""
    adapter_named(service.card, body.model)
    try:
        media = MediaParts(service.card.limits.media_kinds)
        prompt = chat_prompt(chat_body(body), media)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    return {"input_tokens": len(await service.control.tokenize(prompt, media.sources))}


class MessageAnswerFormat:
    """A message, or the events of its stream."""

    answer_type = Message

    def __init__(
        self,
        message_id: str,
        model: str,
        max_tokens: int,
        *,
        is_stream: bool = False,
        omits_reasoning: bool = False,
        reports_edits: bool = False,
        stops: tuple[str, ...] = (),
    ) -> None:
        """`reports_edits`: the request has context_management; `stops`: its stop sequences."""
        # edits are not listed: it is not known how many tokens they left out
        self.edits: Payload = {"context_management": {"applied_edits": []}} if reports_edits else {}
        self.stops = stops
        content: list[Payload] = []
        self.message: Payload = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": usage(0, 0, 0, 0),
        } | self.edits
        self.max_tokens = max_tokens
        self.omits_reasoning = omits_reasoning
        self.reasoning_tokens = 0
        self.writer = Writer(content, is_stream=is_stream)
        self.finish: Finish | None = None
        self.has_begun = False

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        head = b"" if self.has_begun else self._begin(delta)
        return head + typed_events(self.writer.add(self._read(delta)))

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        payloads = self.writer.close()
        self._end()
        stop_fields = {
            name: self.message[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")
        }
        return typed_events(
            [
                *payloads,
                {"type": "message_delta", "delta": stop_fields, "usage": self.message["usage"]} | self.edits,
                {"type": "message_stop"},
            ]
        )

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        return typed_events([to_builtins(anthropic_error(error))])

    def body(self, outputs: list[Output]) -> Payload:
        """The answer in one piece."""
        (output,) = outputs
        self.writer.add(self._read(output.as_delta()))
        self.writer.close()
        self._end()
        return self.message

    def _begin(self, delta: Delta) -> bytes:
        self.has_begun = True
        self.message["usage"] = usage(delta.prompt_tokens, delta.cached_tokens, len(delta.token_ids), 0)
        return typed_events([{"type": "message_start", "message": self.message | {"content": []}}])

    def _read(self, delta: Delta) -> list[Event]:
        self.finish = delta.finish or self.finish
        self.reasoning_tokens += delta.reasoning_tokens
        events = events_of(delta)
        return (
            [event for event in events if not isinstance(event, Reasoning)]
            if self.omits_reasoning
            else events
        )

    def _end(self) -> None:
        end = self.finish
        assert end is not None
        self.message["usage"] = usage(
            end.prompt_tokens, end.cached_tokens, end.completion_tokens, self.reasoning_tokens, end.media
        )
        is_matched = end.reason is FinishReason.STOP and end.matched in self.stops
        if end.reason is FinishReason.LENGTH:
            reason = (
                "max_tokens" if end.completion_tokens >= self.max_tokens else "model_context_window_exceeded"
            )
        elif self.writer.has_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if is_matched else "end_turn"
        self.message |= {
            "stop_reason": reason,
            "stop_sequence": end.matched if reason == "stop_sequence" else None,
        }


def usage(
    prompt_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    reasoning_tokens: int,
    media: MediaUsage | None = None,
) -> Payload:
    """The `usage` object. Input tokens are those that were not cached."""
    details = media_fields([media])
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
        "service_tier": "standard",
    } | ({"input_tokens_details": details} if details else {})


OPERATIONS = (
    Operation(
        "POST",
        "/v1/messages",
        "Answer a conversation",
        body=MessagesBody,
        example={"model": "default", "max_tokens": 16, "messages": HELLO},
        answers=(Message,),
        events=(MessageEvent, AnthropicError),
        media="sse",
        serve=messages,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of what would be asked",
        body=CountBody,
        example={"model": "default", "messages": HELLO},
        answers=(TokenCount,),
        call=count_tokens,
    ),
)
