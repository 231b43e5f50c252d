"""POST /v1/completions"""

import math
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct, structs

from runtime.errors import InvalidRequest, RequestError
from runtime.http.errors import OpenAIError, decode, error_object
from runtime.http.fields.bootstrap import transfer_of
from runtime.http.fields.cache_salt import salts
from runtime.http.fields.constraint import constraint_of
from runtime.http.fields.hidden_states import last
from runtime.http.fields.model import adapters_of, response_model
from runtime.http.fields.replica import replica_of
from runtime.http.fields.request_id import request_ids
from runtime.http.fields.routed_experts import extension
from runtime.http.fields.thinking import thinking_limit
from runtime.http.fields.token_ids import are_ids
from runtime.http.openai.completion_request import MAX_PROMPTS, CompletionBody
from runtime.http.openai.completion_response import Completion
from runtime.http.openai.envelope import Envelope, finish_fields, usage_of
from runtime.http.openai.logprobs import TextLogprobs, prompt_logprobs
from runtime.http.openai.parameters import refuse
from runtime.http.openai.sampling import REPORTS, sampling_params
from runtime.http.operation import Operation
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output, silenced
from runtime.http.streaming.exchange import Answer
from runtime.json_value import Fields
from runtime.messages.requests import Delta, GenerateRequest, Infill, Text, TokenLogprob, Tokens
from runtime.messages.sampling import ThinkingLimit
from runtime.service import ModelCard, Service

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
NAMES = REPORTS | {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "input_ids": "prompt",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "include_stop": "include_stop_str_in_output",
    "logprob_ids": "logprob_token_ids",
    "id": "rid",
}
# alternative names, used where the client used them
OR = {"n": "best_of", "prompt_logprobs": "prompt_logprobs", "id": "request_id"}

_decoder = msgspec.json.Decoder(CompletionBody)


def completions(service: Service, content: bytes) -> Answer:
    """The answer to a text completion request. Raises RequestError."""
    arrival_s = time.monotonic()
    body = decode(content, _decoder)
    refuse(body)
    prompts = _prompts(body)
    rule, where = constraint_of(body)
    options = _output_options(body, service.card.sampling_defaults.get("n", 1))
    names = NAMES | where | {name: given for name, given in OR.items() if getattr(body, given) is not None}
    params = sampling_params(
        body,
        service.card.sampling_defaults,
        names,
        n=options.num_sampled,
        max_new_tokens=_max_new_tokens(body, service, options),
        constraint=rule,
        logprobs=options.has_logprobs or options.is_best_of,
        top_logprobs=body.logprobs,
        prompt_logprobs=_prompt_width(body),
        thinking=_thinking(body, service.card),
    )
    rid = body.rid or body.request_id
    envelope = Envelope(
        "cmpl",
        "text_completion",
        response_model(service.card, body.model),
        params.n,
        body.stream_options,
        rid if isinstance(rid, str) else None,
        service.card.cache_report,
    )
    requests = [
        GenerateRequest(
            id=id,
            prompt=prompt,
            params=params,
            arrival_s=arrival_s,
            priority=body.priority,
            replica=replica_of(body),
            cache_salt=salt,
            adapter=adapter,
            transfer=transfer_of(body, len(prompts)),
        )
        for id, prompt, salt, adapter in zip(
            request_ids(rid or envelope.id, len(prompts)),
            prompts,
            salts(body, len(prompts)),
            adapters_of(service.card, body.model, body.lora_path, len(prompts)),
            strict=True,
        )
    ]
    echoes = [_text(service, prompt) for prompt in prompts] if body.echo else [""] * len(prompts)
    answer = Answer(
        service,
        requests,
        CompletionAnswerFormat(service, envelope, options, echoes),
        is_stream=bool(body.stream),
        names=names,
    )
    answer.interval = body.stream_interval or 1
    return answer


class OutputOptions(Struct, frozen=True):
    """What an answer contains in addition to the text, and how many choices are sampled and returned."""

    n: int
    num_sampled: int  # choices sampled for each prompt
    has_logprobs: bool
    width: int  # alternatives of each token
    prompt_width: int | None
    has_ids: bool
    by_id: bool  # tokens are named by their ids
    has_echo: bool
    is_prompt_only: bool

    @property
    def is_best_of(self) -> bool:
        """Whether more choices are sampled than returned."""
        return self.num_sampled > self.n

    @property
    def is_plain(self) -> bool:
        """Whether the chunks of a stream differ in their text only."""
        return not (self.has_logprobs or self.has_ids or self.is_prompt_only)


def _output_options(body: CompletionBody, preferred_n: int) -> OutputOptions:
    n = preferred_n if body.n is None else body.n
    num_sampled = n if body.best_of is None else body.best_of
    if num_sampled < n:
        raise InvalidRequest(f"best_of is {num_sampled}, less than n, which is {n}", param="best_of")
    if num_sampled > n and body.stream:
        raise InvalidRequest(
            "best_of above n can't be streamed: the best are known at the end only; leave stream out",
            param="best_of",
        )
    return OutputOptions(
        n=n,
        num_sampled=num_sampled,
        has_logprobs=body.logprobs is not None,
        width=body.logprobs or 0,
        prompt_width=body.prompt_logprobs,
        has_ids=bool(body.return_token_ids),
        by_id=bool(body.return_tokens_as_token_ids),
        has_echo=bool(body.echo),
        is_prompt_only=bool(body.echo) and body.max_tokens == 0,
    )


def _thinking(body: CompletionBody, card: ModelCard) -> ThinkingLimit | None:
    return thinking_limit(
        card.formats, body.thinking_token_budget, "thinking_token_budget", is_continued=True
    )


def _max_new_tokens(body: CompletionBody, service: Service, options: OutputOptions) -> int | None:
    if options.is_prompt_only:
        return 1  # the scheduler computes at least one token
    return (
        DEFAULT_MAX_TOKENS
        if body.max_tokens is None and "max_new_tokens" not in service.card.preferred
        else None
    )


def _prompt_width(body: CompletionBody) -> int | None:
    """Number of alternatives of each prompt token; None: no log probabilities of the prompt."""
    widths = [
        width for width in (body.logprobs if body.echo else None, body.prompt_logprobs) if width is not None
    ]
    return max(widths, default=None)


def _prompts(body: CompletionBody) -> list[Text | Tokens | Infill]:
    prompts = _plain_prompts(body.prompt)
    if body.return_routed_experts and len(prompts) > 1:
        raise InvalidRequest(
            "return_routed_experts is for one answer; give one prompt, or use /generate",
            param="return_routed_experts",
        )
    if body.add_special_tokens is False:
        prompts = [
            Text(prompt.text, add_special=False) if isinstance(prompt, Text) else prompt for prompt in prompts
        ]
    return [_infill(prompt, body.suffix) for prompt in prompts] if body.suffix else prompts


def _plain_prompts(prompt: str | list[str | int | list[int]]) -> list[Text | Tokens | Infill]:
    if isinstance(prompt, str):
        return [Text(prompt)]
    if are_ids(prompt):
        return [Tokens(prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; the most is {MAX_PROMPTS}", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return [Text(text) for text in prompt]  # type: ignore[arg-type]
    if kinds == {list}:
        return [Tokens(ids) for ids in prompt]  # type: ignore[arg-type]
    raise InvalidRequest(
        "prompt mixes kinds; give texts only, token ids only, or lists of token ids only", param="prompt"
    )


def _infill(prompt: Text | Tokens | Infill, suffix: str) -> Infill:
    if not isinstance(prompt, Text):
        raise InvalidRequest("suffix goes with a prompt that is text, not token ids", param="suffix")
    return Infill(prompt.text, suffix)


def _text(service: Service, prompt: Text | Tokens | Infill) -> str:
    """The text that `echo` returns of a prompt. Raises InvalidRequest for ids that are no tokens."""
    if isinstance(prompt, Text):
        return prompt.text
    if isinstance(prompt, Infill):
        return prompt.prefix
    vocab_size = service.card.limits.vocab_size
    if any(not 0 <= token_id < vocab_size for token_id in prompt.ids):
        raise InvalidRequest(f"token ids must be in 0..{vocab_size - 1}", param="prompt")
    return service.decode(prompt.ids)


class CompletionAnswerFormat:
    """Text completions; with `echo` each begins with its prompt."""

    answer_type = Completion

    def __init__(
        self, service: Service, envelope: Envelope, options: OutputOptions, echoes: list[str]
    ) -> None:
        """`echoes`: for each prompt the text before its completions."""
        self.service = service
        self.envelope = envelope
        self.options = options
        self.echoes = echoes
        self.is_plain = options.is_plain and not envelope.is_continuous
        self.around: dict[
            int, tuple[bytes, bytes]
        ] = {}  # by choice: the bytes of a chunk before and after its text
        num_choices = options.num_sampled * len(echoes) if options.has_logprobs else 0
        self.logprobs = [
            TextLogprobs(service.token_bytes, options.width, by_id=options.by_id) for _ in range(num_choices)
        ]

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        around = self.around.get(choice)
        if around is not None and self.is_plain and delta.finish is None:  # most tokens
            self.envelope.meter.completion_tokens += len(delta.token_ids)
            return around[0] + sse.encode(delta.text) + around[1] if delta.text else b""
        if self.options.is_prompt_only:
            delta = structs.replace(silenced(delta), logprobs=None)
        self.envelope.meter.add(choice, delta)
        text = delta.text
        if around is None:
            self.around[choice] = around = self.envelope.around(lambda text: _choice(choice, text))
            text = self.echoes[choice // self.options.num_sampled] + text
        if delta.finish is None and self.is_plain:
            return around[0] + sse.encode(text) + around[1] if text else b""
        logprobs = self._logprobs(choice, delta.prompt_logprobs, delta.logprobs)
        ids = self._ids(delta.token_ids, delta.prompt_ids)
        more = ids | ({"hidden_states": last(delta.hidden)} if delta.hidden else {})
        return self.envelope.chunk(
            _choice(choice, text) | {"logprobs": logprobs} | more | finish_fields(delta.finish),
            **extension(delta.experts),
        )

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        return self.envelope.tail()

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> Fields:
        """The answer in one piece."""
        num_sampled = self.options.num_sampled
        if self.options.is_prompt_only:
            for output in outputs:
                output.silence()
                output.logprobs = []
        best = [
            choice for first in range(0, len(outputs), num_sampled) for choice in self._best(first, outputs)
        ]
        choices = [self._choice_of(index, choice, outputs) for index, choice in enumerate(best)]
        return (
            self.envelope.head()
            | {"choices": choices, "usage": usage_of(outputs, num_sampled, self.envelope.meter.report)}
            | extension(outputs[0].experts)
        )

    def _best(self, first: int, outputs: list[Output]) -> list[int]:
        """The choices to return of the prompt whose choices begin at `first`: all, or the likeliest."""
        choices = list(range(first, first + self.options.num_sampled))
        if self.options.is_best_of:
            choices.sort(key=lambda choice: mean_logprob(outputs[choice]), reverse=True)
        return choices[: self.options.n]

    def _choice_of(self, index: int, choice: int, outputs: list[Output]) -> Fields:
        output = outputs[choice]
        fields = _choice(index, self.echoes[choice // self.options.num_sampled] + output.text)
        fields["logprobs"] = self._logprobs(choice, output.prompt_logprobs, output.logprobs)
        if output.hidden:
            fields["hidden_states"] = last(output.hidden)
        if self.options.prompt_width is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                output.prompt_logprobs, self.service.token_bytes, self.options.prompt_width
            )
        return fields | self._ids(output.token_ids, output.prompt_ids) | finish_fields(output.finish)

    def _ids(self, token_ids: list[int], prompt_ids: list[int] | None) -> dict[str, list[int]]:
        if not self.options.has_ids:
            return {}
        return {"token_ids": token_ids} | ({"prompt_token_ids": prompt_ids} if prompt_ids else {})

    def _logprobs(
        self, choice: int, prompt: Sequence[TokenLogprob] | None, own: list[TokenLogprob] | None
    ) -> Fields | None:
        """`prompt` counts only where the text begins with the prompt."""
        if not self.options.has_logprobs:
            return None
        return self.logprobs[choice].add([*((prompt or ()) if self.options.has_echo else ()), *(own or ())])


def mean_logprob(output: Output) -> float:
    """Mean log probability of the tokens of an output; -inf for no tokens."""
    return (
        sum(token.logprob or 0.0 for token in output.logprobs) / len(output.logprobs)
        if output.logprobs
        else -math.inf
    )


def _choice(index: int, text: str) -> Fields:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text",
        body=CompletionBody,
        example={"prompt": "Once upon a time", "max_tokens": 16},
        answers=(Completion,),
        events=(Completion, OpenAIError),
        media="sse",
        serve=completions,
    ),
)
