"""POST /v1/responses: the items become a chat request, and the answer becomes items."""

import time
from collections.abc import Callable, Mapping
from typing import Self

import msgspec
from msgspec import structs

from runtime.errors import InvalidRequest, RequestError
from runtime.http.errors import decode, renamed
from runtime.http.fields.model import adapter_named, response_model
from runtime.http.fields.sampling import SAMPLING_FIELDS
from runtime.http.openai import chat
from runtime.http.openai.completion_request import ChatBody, Reasoning
from runtime.http.openai.conversations.store import ConversationStore, StoredConversation
from runtime.http.openai.envelope import Meter
from runtime.http.openai.files import new_id
from runtime.http.openai.logprobs import chat_logprobs
from runtime.http.openai.responses import tools
from runtime.http.openai.responses.items import Item, items_of, messages_of
from runtime.http.openai.responses.response_object import Response
from runtime.http.openai.responses.response_request import LOGPROBS, ResponseBody, TextOptions, check
from runtime.http.openai.responses.store import ResponseStore, StoredResponse
from runtime.http.openai.responses.writer import Payload, Writer
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.answer_reader import events_of
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.sse import typed_events
from runtime.json_value import Fields
from runtime.messages.media import EncodedText
from runtime.messages.requests import Delta, Finish, FinishReason, TokenLogprob
from runtime.service import Service

# field of the request -> its name in /v1/chat/completions
RENAMED = {"max_output_tokens": "max_completion_tokens"}
SAME = (
    *SAMPLING_FIELDS,
    "seed",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "extra_key",
    "include_stop_str_in_output",
    "structured_outputs",
    "enable_thinking",
    "parallel_tool_calls",
    "stream",
    "model",
)
NAMES = {"max_new_tokens": "max_output_tokens", "prompt": "input", "input_ids": "input", "messages": "input"}

_decoder = msgspec.json.Decoder(ResponseBody)


def read_response(content: bytes) -> ResponseBody:
    """The body of a request. Raises InvalidRequest."""
    return decode(content, _decoder)


class PreparedResponse:
    """A checked request: the chat request that it becomes, and the response object without output."""

    @classmethod
    async def read(
        cls, service: Service, store: ResponseStore, conversations: ConversationStore, body: ResponseBody
    ) -> Self:
        """The request with the conversation that it continues. Raises RequestError."""
        adapter = adapter_named(service.card, body.model)
        check(body)
        context: list[Item] = []
        conversation = None
        if (before := body.previous_response_id) is not None:
            context = (await store.find(before, service.tenant, "previous_response_id")).conversation
        if (named := body.conversation_id) is not None:
            conversation = await conversations.open(named, service.tenant, "conversation")
            context = [*conversation.items]
        made = cls(service, body, context, adapter, conversation)
        if conversation is not None:
            conversations.check_number(conversation, len(made.input))
        return made

    def __init__(
        self,
        service: Service,
        body: ResponseBody,
        context: list[Item],
        adapter: str,
        conversation: StoredConversation | None = None,
    ) -> None:
        """Raises RequestError."""
        self.body = body
        self.owner = service.tenant.name
        self.context = context
        self.conversation = conversation
        self.input = [] if body.input is None else items_of(body.input)
        self.chat = chat_body(self.body, [*self.context, *self.input])
        self.chat.lora_path = adapter
        self.response = response_object(self.body, response_model(service.card, self.body.model))
        self.texts: Mapping[str, EncodedText] = {}  # what marks in the input stand for (http/cut_body.py)

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored."""
        return self.body.store is not False

    def record(self) -> StoredResponse:
        """The response as it is stored now."""
        return StoredResponse(self.response, self.context, self.input, self.owner)


def chat_body(body: ResponseBody, items: list[Item]) -> ChatBody:
    """The chat request for a list of items. Raises InvalidRequest."""
    fields: Fields = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    fields |= {
        theirs: value for ours, theirs in RENAMED.items() if (value := getattr(body, ours)) is not None
    }
    fields["messages"] = messages_of(body.instructions, items)
    if chat_tools := tools.chat_tools(body.tools):
        fields["tools"] = chat_tools
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning is not None:
        fields["reasoning"] = Reasoning(body.reasoning.effort, max_tokens=body.reasoning.max_tokens)
    if (text_format := (body.text or TextOptions()).format) is not None and text_format.type != "text":
        fields["response_format"] = _chat_format(msgspec.to_builtins(text_format))
    if LOGPROBS in (body.include or ()) or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return ChatBody(**fields)


def _choice(choice: str | Fields) -> str | Fields:
    """tool_choice as /v1/chat/completions has it. Raises InvalidRequest."""
    if isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function" | "custom":
            return _named(choice)
        case "allowed_tools":
            given = choice.get("tools")
            some = tools.served(
                [one for one in (given if isinstance(given, list) else ()) if isinstance(one, dict)]
            )
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": choice.get("mode"), "tools": [_named(one) for one in some]},
            }
    raise InvalidRequest(
        "tool_choice of this type is not served here; auto, none, required, functions and allowed_tools are",
        param="tool_choice",
    )


def _named(choice: Fields) -> Fields:
    name = choice.get("name")
    named = tools.model_name(name, choice.get("namespace")) if isinstance(name, str) else name
    return {"type": "function", "function": {"name": named}}


def _chat_format(text_format: Fields) -> Fields:
    kind = text_format.pop("type")
    return (
        {"type": kind}
        if kind != "json_schema"
        else {"type": kind, kind: {k: v for k, v in text_format.items() if v is not None}}
    )


def response_object(body: ResponseBody, model: str) -> Payload:
    """The response object before there is output."""
    text = structs.asdict(body.text) if body.text is not None else {}
    text["format"] = (
        msgspec.to_builtins(text["format"]) if text.get("format") is not None else {"type": "text"}
    )
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.served(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


Store = Callable[[PreparedResponse], None]
"""Takes a response when it is complete, or has failed."""


def answer(service: Service, prepared: PreparedResponse, store: Store) -> Answer:
    """Raises RequestError. `store` gets the response at its end."""
    return answer_as(service, prepared, ResponseAnswerFormat(service, prepared, store))


def answer_as(service: Service, prepared: PreparedResponse, answer_format: "ResponseAnswerFormat") -> Answer:
    """The answer to a request in a certain format. Raises RequestError."""
    try:
        request, reading, names = chat.prepare(service, prepared.chat, prepared.response["id"])
    except RequestError as error:
        raise renamed(error, {theirs: ours for ours, theirs in RENAMED.items()}) from None
    return Answer(
        service,
        [request],
        answer_format,
        is_stream=bool(prepared.body.stream),
        names=names | NAMES,
        reading=reading,
    )


class ResponseAnswerFormat:
    """One response object, or the events of its growth."""

    answer_type = Response

    def __init__(self, service: Service, prepared: PreparedResponse, store: Store) -> None:
        self.service = service
        self.prepared = prepared
        self.store = store
        self.writer = Writer(prepared.response, tools.by_model_name(prepared.body.tools))
        self.meter = Meter(1, service.card.cache_report)
        self.finish: Finish | None = None
        self.has_begun = False

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        payloads = [] if self.has_begun else self.writer.begin()
        self.has_begun = True
        return typed_events(payloads + self._add(delta))

    def queued(self) -> bytes:
        """The first events of a background response."""
        return typed_events(self.writer.queue())

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        return typed_events(self._end())

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        payloads = self.writer.fail("server_error", error.message)
        self.store(self.prepared)
        return typed_events(payloads)

    def body(self, outputs: list[Output]) -> Payload:
        """The answer in one piece."""
        (output,) = outputs
        self._add(output.as_delta())
        self._end()
        return self.prepared.response

    def _add(self, delta: Delta) -> list[Payload]:
        self.meter.add(0, delta)
        self.finish = delta.finish or self.finish
        return self.writer.add(events_of(delta), self._logprobs(delta.logprobs))

    def _end(self) -> list[Payload]:
        usage = self.meter.usage()
        is_cut = self.finish is not None and self.finish.reason == FinishReason.LENGTH
        payloads = self.writer.end(
            is_cut=is_cut,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        )
        self.store(self.prepared)
        return payloads

    def _logprobs(self, tokens: list[TokenLogprob] | None) -> list[Payload]:
        return [] if tokens is None else chat_logprobs(tokens, self.service.token_bytes)["content"].made()
