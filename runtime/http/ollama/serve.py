"""POST /api/chat and /api/generate: chats and text completions in Ollama's form, as lines of JSON."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import uuid4

import msgspec
from msgspec import convert
from starlette.responses import Response

from runtime.errors import InvalidRequest, RequestError
from runtime.http.errors import ModelNotFound, OllamaError, decode, renamed
from runtime.http.fields.constraint import constraint_of
from runtime.http.fields.media_usage import media_fields
from runtime.http.fields.tool_arguments import object_of
from runtime.http.ollama.ollama_request import ChatBody, GenerateBody, Message, Shared
from runtime.http.ollama.ollama_response import ChatLine, GenerateLine
from runtime.http.ollama.options import SAME, fields_of, unloads
from runtime.http.openai import chat as openai
from runtime.http.openai import completion_request as types
from runtime.http.openai.logprobs import chat_logprobs
from runtime.http.openai.sampling import sampling_params
from runtime.http.operation import HELLO, Operation, json_response
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.answer_reader import ReaderSettings, events_of
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.sse import encode
from runtime.json_value import Fields
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.requests import Delta, Finish, FinishReason, GenerateRequest, Infill, Text, TokenLogprob
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Reasoning
from runtime.service import ModelCard, Service

Payload = Fields

HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LATEST = ":latest"  # tag that Ollama's clients append to names without one
NAMES = {name: f"options.{name}" for name in SAME} | {
    "max_tokens": "options.num_predict",
    "max_new_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "input_ids": "prompt",
}

_chat = msgspec.json.Decoder(ChatBody)
_generate = msgspec.json.Decoder(GenerateBody)


def chat(service: Service, content: bytes) -> Answer | Response:
    """The answer to a chat. Raises RequestError."""
    begin_ns = time.monotonic_ns()
    body = decode(content, _chat)
    check_name(service.card, body.model)
    writer = Writer(body.model, begin_ns, is_chat=True)
    if not body.messages:
        return _load(body, writer)
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    names = NAMES | {"prompt": "messages"}
    return _answer(service, body, writer, names, *_prepare(service, body, messages, names, tools=body.tools))


def generate(service: Service, content: bytes) -> Answer | Response:
    """The answer to a prompt. Raises RequestError."""
    begin_ns = time.monotonic_ns()
    body = decode(content, _generate)
    check_name(service.card, body.model)
    _refuse(body)
    writer = Writer(body.model, begin_ns, is_chat=False)
    if not body.prompt and not body.suffix and not body.images:
        return _load(body, writer)
    if not body.raw and not body.suffix:
        shown = _content(body.prompt or "", body.images, "images")
        system = [types.Message(role="system", content=body.system)] if body.system else []
        return _answer(
            service,
            body,
            writer,
            NAMES,
            *_prepare(service, body, [*system, types.Message(role="user", content=shown)], NAMES),
        )
    prompt = body.prompt or ""
    plain = types.CompletionBody(prompt=prompt, **fields_of(body))
    rule, where = constraint_of(plain)
    params = sampling_params(
        plain,
        service.card.sampling_defaults,
        NAMES,
        constraint=rule,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    request = GenerateRequest(
        id=_new_id(),
        prompt=Infill(prompt, body.suffix) if body.suffix else Text(prompt),
        params=params,
        arrival_s=time.monotonic(),
        adapter=check_name(service.card, body.model),
    )
    return _answer(service, body, writer, NAMES, request, None, where)


def check_name(card: ModelCard, name: str) -> str:
    """The adapter of that name; "": the base model, which "default" also means. Raises ModelNotFound."""
    if (bare := name.removesuffix(LATEST)) in card.adapters:
        return bare
    if name != "default" and name.removesuffix(LATEST) != card.name.removesuffix(LATEST):
        raise ModelNotFound(
            f"model '{name}' not found; this server has {', '.join((card.name, *card.adapters))}",
            param="model",
        )
    return ""


def _prepare(
    service: Service,
    body: Shared,
    messages: list[types.Message],
    names: dict[str, str],
    tools: list[Fields] | None = None,
) -> tuple[GenerateRequest, ReaderSettings | None, dict[str, str]]:
    args: Fields = {}
    if body.think is not None:
        args = {"enable_thinking": bool(body.think), "thinking": bool(body.think)}
    effort = body.think if isinstance(body.think, str) else None
    chat = types.ChatBody(
        messages=messages,
        tools=tools,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=effort,
        chat_template_kwargs=args,
        lora_path=check_name(service.card, body.model),
        **fields_of(body),
    )
    try:
        return openai.prepare(service, chat, _new_id())
    except RequestError as error:
        raise renamed(error, names) from None


def _answer(
    service: Service,
    body: Shared,
    writer: "Writer",
    names: dict[str, str],
    request: GenerateRequest,
    reading: ReaderSettings | None,
    more: dict[str, str],
) -> Answer:
    is_stream = body.stream is not False
    return Answer(
        service,
        [request],
        LinesAnswerFormat(service, writer),
        is_stream=is_stream,
        names=more | names,
        headers=HEADERS,
        reading=reading,
    )


def _message(message: Message, place: str) -> types.Message:
    calls = [
        types.ToolCall(types.Function(call.function.name, encode(call.function.arguments).decode()), call.id)
        for call in message.tool_calls or ()
    ]
    return types.Message(
        role=message.role,
        content=_content(message.content or "", message.images, f"{place}.images"),
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking,
    )


def _content(text: str, images: Sequence[str] | None, path: str) -> str | list[types.Part]:
    """A message's images, and then its text."""
    if not images:
        return text
    sources = [
        MediaSource(kind=MediaKind.IMAGE, param=f"{path}[{i}]", base64=data) for i, data in enumerate(images)
    ]
    parts: list[types.Part] = [types.SourcePart("image", source=source) for source in sources]
    return [*parts, types.Part("text", text)]


def _refuse(body: GenerateBody) -> None:
    if body.images and (body.raw or body.suffix):
        raise InvalidRequest("images need the chat template; leave raw and suffix out", param="images")
    if body.raw and body.system:
        raise InvalidRequest("raw sends the prompt as it is, so there is no place for system", param="system")
    for name, remedy in (
        ("template", "start the server with --chat-template"),
        ("context", "send the conversation to /api/chat"),
        ("width", "only text is"),
        ("height", "only text is"),
        ("steps", "only text is"),
    ):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not served here; {remedy}", param=name)


def _load(body: Shared, writer: "Writer") -> Response:
    """The response to a request without a prompt, by which Ollama's clients load and unload a model. It says
    what Ollama says; the model stays loaded."""
    reason = "unload" if unloads(body) else "load"
    return json_response(
        convert(writer.line("", done=True, done_reason=reason), ChatLine if writer.is_chat else GenerateLine)
    )


def _new_id() -> str:
    return f"ollama-{uuid4().hex}"


class Writer:
    """The lines of one answer."""

    def __init__(self, model: str, begin_ns: int, *, is_chat: bool) -> None:
        """`begin_ns`: when the request came, on the monotonic clock."""
        self.model = model
        self.begin_ns = begin_ns
        self.first = 0  # ns, when the first output came
        self.is_chat = is_chat

    def line(
        self,
        content: str,
        *,
        done: bool = False,
        thinking: str = "",
        calls: list[Payload] | None = None,
        **more: object,
    ) -> Payload:
        """One line."""
        line: Payload = {"model": self.model, "created_at": datetime.now(UTC)}
        message_fields: Payload = (
            {"role": "assistant", "content": content} if self.is_chat else {"response": content}
        )
        if thinking:
            message_fields["thinking"] = thinking
        if calls:
            message_fields["tool_calls"] = calls
        return (
            line | ({"message": message_fields} if self.is_chat else message_fields) | {"done": done} | more
        )

    def ending(self, finish: Finish) -> Payload:
        """The fields of the last line: finish reason, durations and counts."""
        now = time.monotonic_ns()
        reason = "length" if finish.reason is FinishReason.LENGTH else "stop"
        details = media_fields([finish.media])
        return {
            "done_reason": reason,
            "total_duration": now - self.begin_ns,
            "load_duration": 0,
            "prompt_eval_count": finish.prompt_tokens,
            "prompt_eval_duration": self.first - self.begin_ns,
            "eval_count": finish.completion_tokens,
            "eval_duration": now - self.first,
        } | ({"prompt_eval_details": details} if details else {})


class LinesAnswerFormat:
    """An object, or lines of JSON: each has what is new, calls are complete, the last line has durations and
    counts."""

    def __init__(self, service: Service, writer: Writer) -> None:
        self.service = service
        self.writer = writer
        self.answer_type = ChatLine if writer.is_chat else GenerateLine
        self.calls: list[Payload] = []  # complete calls
        self.call: Payload = {}  # the open call
        self.arguments = ""  # of the open call
        self.finish: Finish | None = None

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        content, thinking, calls = self._read(delta)
        if not (content or thinking or calls or delta.logprobs):
            return b""
        return _line(
            self.writer.line(content, thinking=thinking, calls=calls, **self._logprobs(delta.logprobs))
        )

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        assert self.finish is not None
        return _line(self.writer.line("", done=True, **self.writer.ending(self.finish)))

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        return _line({"error": error.message})

    def body(self, outputs: list[Output]) -> Payload:
        """The answer in one piece."""
        (output,) = outputs
        self.writer.first = output.first_ns
        content, thinking, calls = self._read(output.as_delta())
        assert self.finish is not None
        return self.writer.line(
            content,
            done=True,
            thinking=thinking,
            calls=calls,
            **self._logprobs(output.logprobs or None),
            **self.writer.ending(self.finish),
        )

    def _read(self, delta: Delta) -> tuple[str, str, list[Payload]]:
        self.writer.first = self.writer.first or time.monotonic_ns()
        self.finish = delta.finish or self.finish
        content, thinking, done = "", "", len(self.calls)
        for event in events_of(delta):
            match event:
                case Content(text=text):
                    content += text
                case Reasoning(text=text):
                    thinking += text
                case CallBegin(index=index, name=name, id=call_id):
                    self.arguments = ""
                    self.call = {
                        "id": call_id or f"call_{uuid4().hex}",
                        "function": {"index": index, "name": name},
                    }
                case Arguments(text=text):
                    self.arguments += text
                case CallEnd():
                    self.call["function"]["arguments"] = object_of(self.arguments)
                    self.calls.append(self.call)
        return content, thinking, self.calls[done:]

    def _logprobs(self, tokens: list[TokenLogprob] | None) -> Payload:
        return (
            {} if tokens is None else {"logprobs": chat_logprobs(tokens, self.service.token_bytes)["content"]}
        )


def _line(payload: Payload) -> bytes:
    return encode(payload) + b"\n"


OPERATIONS = (
    Operation(
        "POST",
        "/api/chat",
        "Answer a conversation",
        body=ChatBody,
        example={"model": "default", "messages": HELLO, "options": {"num_predict": 16}},
        answers=(ChatLine,),
        events=(ChatLine, OllamaError),
        media="ndjson",
        serve=chat,
    ),
    Operation(
        "POST",
        "/api/generate",
        "Answer a prompt",
        body=GenerateBody,
        example={"model": "default", "prompt": "Hello!", "options": {"num_predict": 16}},
        answers=(GenerateLine,),
        events=(GenerateLine, OllamaError),
        media="ndjson",
        serve=generate,
    ),
)
