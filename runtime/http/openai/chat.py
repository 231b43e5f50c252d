"""POST /v1/chat/completions, and the preparation of a chat that the other APIs share."""

import time
from uuid import uuid4

import msgspec
from msgspec import structs

from runtime.errors import InvalidRequest, RequestError
from runtime.http.errors import OpenAIError, decode, error_object
from runtime.http.fields.bootstrap import transfer_of
from runtime.http.fields.cache_salt import salts
from runtime.http.fields.constraint import constraint_of
from runtime.http.fields.hidden_states import last
from runtime.http.fields.media import MediaParts
from runtime.http.fields.model import adapters_of, response_model
from runtime.http.fields.replica import replica_of
from runtime.http.fields.request_id import request_ids
from runtime.http.fields.routed_experts import extension
from runtime.http.fields.thinking import thinking_limit
from runtime.http.openai.completion_request import ChatBody
from runtime.http.openai.completion_request import Reasoning as ReasoningOptions
from runtime.http.openai.completion_response import ChatChunk, ChatCompletion
from runtime.http.openai.custom_tools import as_custom, custom_tools, grammars_of, input_of, with_functions
from runtime.http.openai.envelope import Envelope, finish_fields, usage_of
from runtime.http.openai.logprobs import chat_logprobs, prompt_logprobs
from runtime.http.openai.messages import chat_prompt, predicted_text, with_video_sounds
from runtime.http.openai.parameters import refuse
from runtime.http.openai.sampling import REPORTS, sampling_params
from runtime.http.openai.tools import (
    TextGrammars,
    calls_or,
    required_calls,
    requires_call,
    strict_calls,
    tools_of,
    with_allowed_tools,
)
from runtime.http.operation import HELLO, Operation
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.answer_reader import ReaderSettings, events_of
from runtime.http.streaming.exchange import Answer
from runtime.json_value import Fields
from runtime.messages.constraint import Rule
from runtime.messages.requests import Delta, Finish, GenerateRequest, TokenLogprob, Tokens
from runtime.messages.sampling import Free, ThinkingLimit
from runtime.parsing.channel_parser import CHANNEL_FORMATS
from runtime.parsing.detect import AnswerFormats, markers_of
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from runtime.parsing.schema_types import Tools
from runtime.service import ModelCard, Service

CHUNK = ".chunk"  # suffix of the object name of a chunk
NAMES = REPORTS | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt": "messages",
    "input_ids": "messages",
    "include_stop": "include_stop_str_in_output",
    "logprob_ids": "logprob_token_ids",
    "id": "rid",
}
# alternative names, used where the client used them
OR = {"max_new_tokens": "max_completion_tokens", "input_ids": "input_ids", "id": "request_id"}

_decoder = msgspec.json.Decoder(ChatBody)


def chat(service: Service, content: bytes) -> Answer:
    """The answer to a chat completion request. Raises RequestError."""
    body = decode(content, _decoder)
    (rid,) = request_ids(body.rid, 1) if body.rid is not None else (body.request_id,)
    name = response_model(service.card, body.model)
    envelope = Envelope(
        "chatcmpl", "chat.completion", name, 1, body.stream_options, rid, service.card.cache_report
    )
    request, reading, names = prepare(service, body, envelope.id)
    envelope.meter.n = request.params.n
    answer_format = ChatAnswerFormat(service, envelope, body, is_text=reading is None)
    answer = Answer(
        service, [request], answer_format, is_stream=bool(body.stream), names=names, reading=reading
    )
    answer.interval = body.stream_interval or 1
    return answer


def prepare(
    service: Service, body: ChatBody, id: str
) -> tuple[GenerateRequest, ReaderSettings | None, dict[str, str]]:
    """The generation request of a chat, how its answer is parsed (None: as plain text), and the client's
    names of our fields, for error texts. Raises RequestError."""
    arrival_s = time.monotonic()
    refuse(body)
    customs = custom_tools(body.tools)
    body = with_allowed_tools(with_functions(body, customs))
    (adapter,) = adapters_of(service.card, body.model, body.lora_path, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    formats, tools = service.card.formats, tools_of(body)
    rule, where = _rule(body, tools, grammars_of(customs), service.card)
    reading = _reading(service, body, tools)
    names = NAMES | where | {name: given for name, given in OR.items() if getattr(body, given) is not None}
    params = sampling_params(
        body,
        service.card.sampling_defaults,
        names,
        constraint=rule,
        max_new_tokens=body.max_completion_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        thinking=_thinking(body, formats),
        **_constraint_after(formats, rule, is_required=requires_call(body)),
    )
    media = MediaParts(service.card.limits.media_kinds, with_video_sounds=with_video_sounds(body))
    prompt = chat_prompt(body, media) if body.input_ids is None else Tokens(body.input_ids)
    request = GenerateRequest(
        id=id,
        prompt=prompt,
        params=params,
        arrival_s=arrival_s,
        priority=body.priority,
        replica=replica_of(body),
        cache_salt=salts(body, 1)[0],
        adapter=adapter,
        marks=markers_of(formats.tool_calls if tools else None, formats.reasoning),
        prediction=predicted_text(body),
        media=tuple(media.sources),
        transfer=transfer_of(body),
    )
    return request, reading, names


def _rule(
    body: ChatBody, tools: Tools, grammars: TextGrammars, card: ModelCard
) -> tuple[Rule | None, dict[str, str]]:
    rule, where = constraint_of(body)
    form = card.formats.tool_calls
    if (required := required_calls(body, tools, grammars)) is None:
        if rule is not None:
            return calls_or(body, tools, form, rule, grammars), where
        if card.has_grammars and not body.ignore_eos:
            return strict_calls(body, tools, form, grammars), {"constraint": "tools"}
        return None, {}
    # clients send response_format with every request, and mean answers that are no calls
    if rule is not None and not where["constraint"].startswith("response_format"):
        raise InvalidRequest(
            f"tool_choice requires a call, and {where['constraint']} another form of the answer; "
            "give one of them",
            param="tool_choice",
        )
    return required, {"constraint": "tool_choice"}


def _reading(service: Service, body: ChatBody, tools: Tools) -> ReaderSettings | None:
    formats = service.card.formats
    if body.separate_reasoning is False:
        formats = structs.replace(formats, reasoning=None)
    if formats.reasoning is None and not requires_call(body) and not (tools and formats.tool_calls):
        return None
    return ReaderSettings(
        service=service,
        formats=formats,
        tools=tools,
        one_call=body.parallel_tool_calls is False,
        is_continued=bool(body.continue_final_message),
        is_required=requires_call(body),
        shows_reasoning=body.include_reasoning is not False,
        streams_reasoning=body.stream_reasoning is not False,
    )


def _thinking(body: ChatBody, formats: AnswerFormats) -> ThinkingLimit | None:
    """The limit of the answer's reasoning. Without a budget, a request for no reasoning is a limit of 0 where
    the model always reasons, whatever its template is told."""
    options = body.reasoning or ReasoningOptions()
    budget, field = body.thinking_token_budget, "thinking_token_budget"
    if budget is None and options.max_tokens is not None:
        budget, field = options.max_tokens, "reasoning.max_tokens"
    reasoning = formats.reasoning_format
    is_off = "none" in (body.reasoning_effort, options.effort) or options.enabled is False
    if budget is None and is_off and reasoning is not None and reasoning.is_forced:
        budget = 0
    return thinking_limit(formats, budget, field, is_continued=bool(body.continue_final_message))


def _constraint_after(
    formats: AnswerFormats, rule: Rule | None, *, is_required: bool
) -> dict[str, tuple[Free, ...]]:
    """SamplingParams.constraint_after of a model that reasons first: the texts after which the rule applies.
    The same whether reasoning is separated from the content or not."""
    if rule is None:
        return {}
    if formats.reasoning in CHANNEL_FORMATS:
        return {} if is_required else {"constraint_after": (Free(CHANNEL_FORMATS[formats.reasoning].final),)}
    if (reasoning := formats.reasoning_format) is None:
        return {}
    begun = tuple([Free(end, begin) for begin, end in reasoning.pairs])
    is_sure = formats.is_explicit or reasoning.is_forced
    return {"constraint_after": (*begun, *[Free(end) for end in reasoning.ends]) if is_sure else begun}


class ChatAnswerFormat:
    """Chat completions, or chunks of which the first has the role and the last the finish reason."""

    answer_type = ChatCompletion

    def __init__(
        self, service: Service, envelope: Envelope, request: ChatBody, *, is_text: bool = True
    ) -> None:
        """`is_text`: answers have neither reasoning nor tool calls."""
        self.service = service
        self.envelope = envelope
        self.request = request
        self.is_plain = not (envelope.is_continuous or request.logprobs or request.return_token_ids)
        self.is_text = is_text
        self.customs = custom_tools(request.tools)
        self.inputs: dict[tuple[int, int], str] = {}  # arguments of open custom calls, by choice and call
        self.begun: set[int] = set()  # choices whose first chunk is written
        self.callers: set[int] = set()  # choices that called a tool
        # by choice and field: the bytes of a chunk before and after its text
        self.around: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        self.envelope.meter.add(choice, delta)
        head = b"" if choice in self.begun else self._begin(choice, delta)
        if delta.finish is None and self.is_plain:
            if self.is_text:
                return head + self._text(choice, "content", delta.text) if delta.text else head
            return head + b"".join([self._event(choice, event) for event in events_of(delta)])
        deltas = [self._message_delta(choice, event) for event in events_of(delta)]
        if delta.finish is not None:  # calls that were cut off
            deltas += [self._input(*place) for place in list(self.inputs) if place[0] == choice]
        deltas = [message_delta for message_delta in deltas if message_delta]
        if not deltas or (delta.finish is not None and "tool_calls" in deltas[-1]):
            deltas.append({})
        if delta.hidden:  # sent with the last delta
            deltas[-1]["hidden_states"] = last(delta.hidden)
        chunks = [_choice(choice, message_delta) for message_delta in deltas]
        chunks[0] |= {"logprobs": self._logprobs(delta.logprobs)} | self._ids(delta.token_ids)
        chunks[-1] |= self._finish(choice, delta.finish)
        return head + self.envelope.chunks(chunks, CHUNK, **extension(delta.experts))

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        return self.envelope.tail(CHUNK)

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> Fields:
        """The answer in one piece."""
        first, request = outputs[0], self.request
        choices = [
            {
                "index": i,
                "message": self._message(i, output),
                "logprobs": self._logprobs(output.logprobs or None),
            }
            | self._finish(i, output.finish)
            | self._ids(output.token_ids)
            | self._prompt_ids(output.prompt_ids)
            | ({"hidden_states": last(output.hidden)} if output.hidden else {})
            for i, output in enumerate(outputs)
        ]
        more: Fields = {"prompt_token_ids": first.prompt_ids} if request.return_token_ids else {}
        if request.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(
                first.prompt_logprobs, self.service.token_bytes, request.prompt_logprobs
            )
        return (
            self.envelope.head()
            | {"choices": choices, "usage": usage_of(outputs, len(outputs), self.envelope.meter.report)}
            | more
            | extension(first.experts)
        )

    def _begin(self, choice: int, delta: Delta) -> bytes:
        self.begun.add(choice)
        fields = _choice(choice, {"role": "assistant", "content": ""}) | self._prompt_ids(delta.prompt_ids)
        return self.envelope.chunk(
            fields, CHUNK, prompt_token_ids=delta.prompt_ids if self.request.return_token_ids else None
        )

    def _event(self, choice: int, event: Event) -> bytes:
        match event:
            case Content(text=text):
                return self._text(choice, "content", text)
            case Reasoning(text=text):
                return self._text(choice, "reasoning_content", text)
        message_delta = self._message_delta(choice, event)
        return self.envelope.chunk(_choice(choice, message_delta), CHUNK) if message_delta else b""

    def _text(self, choice: int, field: str, text: str) -> bytes:
        around = self.around.get((choice, field))
        if around is None:
            self.around[choice, field] = around = self.envelope.around(
                lambda text: _choice(choice, {field: text}), CHUNK
            )
        return around[0] + sse.encode(text) + around[1]

    def _message_delta(self, choice: int, event: Event) -> Fields:
        """A parse event as the `delta` of a chunk; empty when it adds nothing."""
        match event:
            case Content(text=text):
                return {"content": text}
            case Reasoning(text=text):
                return {"reasoning_content": text}
            case CallBegin(index=index):
                self.callers.add(choice)
                call = _call(event)
                if event.name in self.customs:
                    self.inputs[choice, index] = ""
                    call = as_custom(call)
                return {"tool_calls": [{"index": index} | call]}
            case Arguments(index=index, text=text):
                if (choice, index) in self.inputs:  # sent at the end: it is a text within JSON
                    self.inputs[choice, index] += text
                    return {}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd(index=index) if (choice, index) in self.inputs:
                return self._input(choice, index)
        return {}

    def _input(self, choice: int, index: int) -> Fields:
        text = input_of(self.inputs.pop((choice, index)))
        return {"tool_calls": [{"index": index, "custom": {"input": text}}]}

    def _message(self, choice: int, output: Output) -> Fields:
        content = reasoning = ""
        calls: list[Fields] = []
        for event in events_of(output):
            match event:
                case Content(text=text):
                    content += text
                case Reasoning(text=text):
                    reasoning += text
                case CallBegin():
                    calls.append(_call(event))
                case Arguments(text=text):
                    calls[-1]["function"]["arguments"] += text
        message: Fields = {"role": "assistant", "content": content or (None if calls else "")}
        message |= {"refusal": None, "reasoning_content": reasoning} if reasoning else {"refusal": None}
        if calls:
            self.callers.add(choice)
            message["tool_calls"] = [
                as_custom(call) if call["function"]["name"] in self.customs else call for call in calls
            ]
        return message

    def _finish(self, choice: int, finish: Finish | None) -> Fields:
        fields = finish_fields(finish)
        calls = fields["finish_reason"] == "stop" and choice in self.callers
        return fields | {"finish_reason": "tool_calls"} if calls else fields

    def _ids(self, token_ids: list[int]) -> dict[str, list[int]]:
        return {"token_ids": token_ids} if self.request.return_token_ids else {}

    def _prompt_ids(self, prompt_ids: list[int] | None) -> Fields:
        return {"prompt_token_ids": prompt_ids} if self.request.return_prompt_token_ids else {}

    def _logprobs(self, tokens: list[TokenLogprob] | None) -> Fields | None:
        by_id = bool(self.request.return_tokens_as_token_ids)
        return None if tokens is None else chat_logprobs(tokens, self.service.token_bytes, by_id=by_id)


def _choice(index: int, delta: Fields) -> Fields:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(event: CallBegin) -> Fields:
    return {
        "id": event.id or f"call_{uuid4().hex}",
        "type": "function",
        "function": {"name": event.name, "arguments": ""},
    }


_WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation",
        body=ChatBody,
        example={"messages": HELLO, "tools": [{"type": "function", "function": _WEATHER}], "max_tokens": 16},
        answers=(ChatCompletion,),
        events=(ChatChunk, OpenAIError),
        media="sse",
        serve=chat,
    ),
)
