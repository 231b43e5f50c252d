"""POST /generate: the native API, in SGLang's form. A list of prompts gives a list of answers; stream events
have all text so far."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from runtime.errors import InvalidRequest, RequestError
from runtime.http.errors import OpenAIError, convert, decode, error_object
from runtime.http.fields import hidden_states as hidden
from runtime.http.fields.cache_salt import salts
from runtime.http.fields.cached_tokens import tiers
from runtime.http.fields.constraint import constraint_of
from runtime.http.fields.model import adapters_of
from runtime.http.fields.processor import processor_of
from runtime.http.fields.request_id import request_ids
from runtime.http.native.generate_request import (
    LATER,
    GenerateBody,
    HiddenOptions,
    SamplingBody,
    refuse_later,
)
from runtime.http.native.native_response import Generated
from runtime.http.native.prompts import prompts_of
from runtime.http.operation import Operation
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output, silenced
from runtime.http.streaming.exchange import Answer
from runtime.messages.requests import Delta, Finish, FinishReason, GenerateRequest, TokenLogprob
from runtime.messages.sampling import SamplingParams
from runtime.service import Service

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 128  # as in SGLang

_decoder = msgspec.json.Decoder(GenerateBody)
_SAME = (
    "n",
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_regex",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
_NAMES = {name: f"sampling_params.{name}" for name in _SAME} | {
    "seed": "sampling_params.sampling_seed",
    "include_stop": "sampling_params.no_stop_trim",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_ids": "token_ids_logprob",
    "hidden_states": "return_hidden_states",
}


class LogprobOptions(msgspec.Struct, frozen=True):
    """Which log probabilities the answers to one prompt have. `start` -1: none of the prompt."""

    is_on: bool
    start: int
    num_top: int
    ids: list[int] | None = None


def generate(service: Service, content: bytes, *, is_disjoint: bool = False) -> Answer:
    """The answer to a generate request. Stream events have all text so far, or with `is_disjoint` the new
    text only. Raises RequestError."""
    arrival_s = time.monotonic()
    body = decode(content, _decoder)
    refuse_later(body, LATER)
    prompts, field, is_batch = prompts_of(body)
    count = len(prompts)
    if body.session_params is not None and count > 1:
        raise InvalidRequest("a session takes one prompt at a time", param="session_params")
    sampling = _each(body.sampling_params, SamplingBody(), count, "sampling_params")
    logprobs = [
        LogprobOptions(*one)
        for one in zip(
            _each(body.return_logprob, False, count, "return_logprob"),
            _each(body.logprob_start_len, -1, count, "logprob_start_len"),
            _each(body.top_logprobs_num, 0, count, "top_logprobs_num"),
            _token_id_lists(body.token_ids_logprob, count),
            strict=True,
        )
    ]
    shown: Sequence[HiddenOptions] = _each(body.return_hidden_states, False, count, "return_hidden_states")
    params = [
        _params(*options, service.card.preferred, body.custom_logit_processor)
        for options in zip(sampling, logprobs, shown, strict=True)
    ]
    silent = [one.max_new_tokens == 0 for one in sampling]
    if body.session_params is not None and silent[0]:
        raise InvalidRequest(
            "a session goes on from answers, so max_new_tokens must be 1 at least",
            param="sampling_params.max_new_tokens",
        )
    constraint_names = constraint_of(sampling[0], "sampling_params.")[1]
    ids = [uuid4().hex for _ in range(count)] if body.rid is None else request_ids(body.rid, count)
    requests = [
        GenerateRequest(
            id=id,
            prompt=prompt,
            params=one,
            arrival_s=arrival_s,
            priority=body.priority,
            cache_salt=salt,
            adapter=adapter,
            session=body.session_params,
            timeout_s=body.timeout,
            queue_timeout_s=body.queue_timeout,
        )
        for id, prompt, one, salt, adapter in zip(
            ids,
            prompts,
            params,
            salts(body, count),
            adapters_of(service.card, None, body.lora_path, count),
            strict=True,
        )
    ]
    answer_format = GenerateAnswerFormat(
        service,
        requests,
        logprobs,
        silent,
        is_batch=is_batch,
        with_texts=bool(body.return_text_in_logprobs),
        is_disjoint=is_disjoint,
    )
    names = (
        _NAMES
        | constraint_names
        | {"prompt": field}
        | ({} if field == "input_embeds" else {"input_ids": field})
    )
    return Answer(service, requests, answer_format, is_stream=bool(body.stream), names=names)


def _each(value: T | list[T] | None, default: T, count: int, field: str) -> Sequence[T]:
    """One value for each prompt."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise InvalidRequest(f"{field} has {len(value)} entries for {count} prompts", param=field)
    return value


def _token_id_lists(value: list[int | list[int]] | None, count: int) -> Sequence[list[int] | None]:
    """One list of token ids for all prompts, or one for each."""
    if value is None or all(isinstance(one, int) for one in value):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count or any(isinstance(one, int) for one in value):
        raise InvalidRequest(
            f"token_ids_logprob must be a list of token ids, or {count} lists of them",
            param="token_ids_logprob",
        )
    return value  # type: ignore[return-value]


def _params(
    body: SamplingBody,
    logprobs: LogprobOptions,
    shown: HiddenOptions,
    preferred: Mapping[str, Any],
    processor: str | None,
) -> SamplingParams:
    if logprobs.start < -1:
        raise InvalidRequest("logprob_start_len must be -1 or a position", param="logprob_start_len")
    values = dict(preferred) | {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    values.setdefault("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    if body.max_new_tokens == 0:  # the prompt alone; one token is computed and left out
        values["max_new_tokens"] = 1
    for name in ("stop", "stop_regex"):
        if isinstance(one := getattr(body, name), str):
            values[name] = [one] if one else []
    if body.sampling_seed is not None:
        values["seed"] = body.sampling_seed
    if body.no_stop_trim is not None:
        values["include_stop"] = body.no_stop_trim
    if logprobs.is_on:
        values |= {"logprobs": True, "top_logprobs": logprobs.num_top}
        if logprobs.start >= 0:
            values["prompt_logprobs"] = logprobs.num_top
        if logprobs.ids:
            values["logprob_ids"] = logprobs.ids
    if shown:
        values["hidden_states"] = "last" if shown == "last" else "all"
    if processor is not None:
        values["processor"] = processor_of(processor, body.custom_params)
    rule, where = constraint_of(body, "sampling_params.")
    if rule is not None:
        values["constraint"] = rule
    return convert(values, SamplingParams, _NAMES | where)


class GenerateAnswerFormat:
    """Answers {"text", "output_ids", "meta_info"}; the events of several answers have an `index`."""

    gives = Generated | list[Generated]

    def __init__(
        self,
        service: Service,
        requests: list[GenerateRequest],
        logprobs: Sequence[LogprobOptions],
        silent: Sequence[bool],
        *,
        is_batch: bool,
        with_texts: bool,
        is_disjoint: bool = False,
    ) -> None:
        """`silent`, for each request: nothing is generated for the client (max_new_tokens 0), only log
        probabilities."""
        self.service = service
        self.with_texts = with_texts
        self.is_disjoint = is_disjoint
        # request and log probability options of each choice
        self.choices = [
            options
            for options in zip(requests, logprobs, silent, strict=True)
            for _ in range(options[0].params.n)
        ]
        self.is_list = is_batch or len(self.choices) > 1
        self.outputs = [Output() for _ in self.choices]  # so far, of a stream

    def events(self, choice: int, delta: Delta) -> bytes:
        """The events for one delta; empty when it adds nothing."""
        delta = self.visible(choice, delta)
        self.outputs[choice].add(delta)
        answer = self._answer(choice, self.outputs[choice])
        if self.is_disjoint:
            answer |= {"text": delta.text, "output_ids": delta.token_ids}
            if delta.hidden and self.choices[choice][0].params.hidden_states == "all":
                answer["meta_info"]["hidden_states"] = hidden.as_json(
                    delta.hidden, begins=delta.prompt_ids is not None
                )
        return sse.event(answer | {"index": choice} if self.is_list else answer)

    def visible(self, choice: int, delta: Delta) -> Delta:
        """The part of a delta that the client sees."""
        return silenced(delta) if self.choices[choice][2] else delta

    def tail(self) -> bytes:
        """The last events of a stream that succeeded."""
        return sse.DONE

    def failure(self, error: RequestError) -> bytes:
        """The last events of a stream that failed."""
        return sse.event(error_object(error))

    def body(self, outputs: list[Output]) -> Any:
        """The answer in one piece."""
        for output, (_, _, is_silent) in zip(outputs, self.choices, strict=True):
            if is_silent:
                output.silence()
        answers = [self._answer(i, output) for i, output in enumerate(outputs)]
        return answers if self.is_list else answers[0]

    def _answer(self, choice: int, output: Output) -> dict[str, Any]:
        request, logprobs, _ = self.choices[choice]
        end = output.finish
        meta = {
            "id": request.id,
            "finish_reason": None if end is None else _finish_reason(end),
            "prompt_tokens": output.prompt_tokens if end is None else end.prompt_tokens,
            "completion_tokens": len(output.token_ids) if end is None else end.completion_tokens,
            "cached_tokens": output.cached_tokens if end is None else end.cached_tokens,
            "cached_tokens_details": self._tiers(output if end is None else end),
            "weight_version": self.service.card.weight_version,
            "e2e_latency": time.monotonic() - request.arrival_s,
        }
        if logprobs.is_on:
            meta |= self._logprobs("output", output.logprobs, logprobs)
            if logprobs.start >= 0:
                meta |= self._logprobs("input", output.prompt_logprobs[logprobs.start :], logprobs)
        if end is not None and request.params.hidden_states == "last":
            meta["hidden_states"] = hidden.last(output.hidden)
        elif end is not None and request.params.hidden_states is not None and not self.is_disjoint:
            meta["hidden_states"] = hidden.as_json(output.hidden)
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _tiers(self, output: Output | Finish) -> dict[str, Any] | None:
        """Sources of the cached tokens; None where nothing was cached, as in SGLang."""
        return (
            tiers(output.cached_tokens, [output.loaded], self.service.card.storage)
            if output.cached_tokens
            else None
        )

    def _logprobs(self, prefix: str, tokens: list[TokenLogprob], options: LogprobOptions) -> dict[str, Any]:
        fields: dict[str, Any] = {
            f"{prefix}_token_logprobs": [self._triple(token.token_id, token.logprob) for token in tokens]
        }
        if options.num_top:
            fields[f"{prefix}_top_logprobs"] = [self._triples(token.top) for token in tokens]
        if options.ids:
            fields[f"{prefix}_token_ids_logprobs"] = [self._triples(token.picked) for token in tokens]
        return fields

    def _triples(self, pairs: list[tuple[int, float]]) -> list[tuple[float | None, int, str | None]] | None:
        return [self._triple(*pair) for pair in pairs] or None

    def _triple(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token_id, self.service.decode([token_id]) if self.with_texts else None


def _finish_reason(end: Finish) -> dict[str, Any]:
    if end.reason is FinishReason.LENGTH:
        return {"type": "length", "length": end.completion_tokens}
    if end.reason is FinishReason.STOP:
        return {"type": "stop", "matched": end.matched}
    return {"type": "abort", "message": "the request was aborted"}


OPERATIONS = (
    Operation(
        "POST PUT",
        "/generate",
        "Continue one or several texts",
        body=GenerateBody,
        example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
        answers=(Generated, list[Generated]),
        events=(Generated, OpenAIError),
        media="sse",
        serve=generate,
    ),
)
