"""POST /generate: the native API, in SGLang's form. A list of prompts gives a list of answers; stream events
have all text so far."""

import time
from collections.abc import Sequence
from typing import TypeVar
from uuid import uuid4

import msgspec

from runtime.errors import InvalidRequest
from runtime.http.errors import OpenAIError, convert, decode
from runtime.http.fields.bootstrap import transfer_of
from runtime.http.fields.cache_salt import salts
from runtime.http.fields.constraint import constraint_of
from runtime.http.fields.media import media_of_prompts
from runtime.http.fields.model import adapters_of
from runtime.http.fields.replica import replica_of
from runtime.http.fields.request_id import request_ids
from runtime.http.fields.sampling import SAMPLING_FIELDS
from runtime.http.fields.thinking import thinking_limit
from runtime.http.native.generate_answer import GenerateAnswerFormat, LogprobOptions
from runtime.http.native.generate_request import (
    LATER,
    GenerateBody,
    HiddenOptions,
    SamplingBody,
    refuse_later,
)
from runtime.http.native.native_response import Generated
from runtime.http.native.prompts import NativePrompt, prompts_of
from runtime.http.operation import Operation
from runtime.http.streaming.exchange import Answer
from runtime.json_value import Fields
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.requests import GenerateRequest
from runtime.messages.sampling import Processor, SamplingParams, ThinkingLimit
from runtime.service import Service

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 128  # as in SGLang

# fields with media, in the order of GenerateRequest.media
_MEDIA = {"image_data": MediaKind.IMAGE, "video_data": MediaKind.VIDEO, "audio_data": MediaKind.AUDIO}
_decoder = msgspec.json.Decoder(GenerateBody)
_SAME = ("n", "max_new_tokens", "min_new_tokens", *SAMPLING_FIELDS)
_NAMES = {name: f"sampling_params.{name}" for name in _SAME} | {
    "seed": "sampling_params.sampling_seed",
    "include_stop": "sampling_params.no_stop_trim",
    "logprobs": "return_logprob",
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "logprob_ids": "token_ids_logprob",
    "hidden_states": "return_hidden_states",
    "routed_experts": "return_routed_experts",
}


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
    thinking = _thinking(service, body)
    params = [
        _params(*options, service.card.preferred, body, thinking)
        for options in zip(sampling, logprobs, shown, strict=True)
    ]
    silent = [one.max_new_tokens == 0 for one in sampling]
    if body.session_params is not None and silent[0]:
        raise InvalidRequest(
            "a session goes on from answers, so max_new_tokens must be 1 at least",
            param="sampling_params.max_new_tokens",
        )
    constraint_names = constraint_of(sampling[0], "sampling_params.")[1]
    media = _media(service, body, count, is_batch)
    requests = _requests(service, body, prompts, params, media, arrival_s)
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
    return Answer(
        service,
        requests,
        answer_format,
        is_stream=bool(body.stream),
        names=names,
        is_repeated=not is_disjoint,
    )


def _media(
    service: Service, body: GenerateBody, count: int, is_batch: bool
) -> Sequence[tuple[MediaSource, ...]]:
    fields = [(name, kind, getattr(body, name)) for name, kind in _MEDIA.items()]
    kinds, with_sounds = service.card.limits.media_kinds, bool(body.use_audio_in_video)
    return media_of_prompts(fields, count, is_batch, kinds, with_video_sounds=with_sounds)


def _thinking(service: Service, body: GenerateBody) -> ThinkingLimit | None:
    return thinking_limit(
        service.card.formats, body.max_thinking_tokens, "max_thinking_tokens", is_continued=True
    )


def _requests(
    service: Service,
    body: GenerateBody,
    prompts: Sequence[NativePrompt],
    params: Sequence[SamplingParams],
    media: Sequence[tuple[MediaSource, ...]],
    arrival_s: float,
) -> list[GenerateRequest]:
    ids = (
        [uuid4().hex for _ in range(len(prompts))]
        if body.rid is None
        else request_ids(body.rid, len(prompts))
    )
    return [
        GenerateRequest(
            id=id,
            prompt=prompt,
            params=one,
            arrival_s=arrival_s,
            priority=body.priority,
            replica=replica_of(body),
            cache_salt=salt,
            adapter=adapter,
            session=body.session_params,
            timeout_s=body.timeout,
            queue_timeout_s=body.queue_timeout,
            media=sources,
            transfer=transfer_of(body, len(prompts)),
        )
        for id, prompt, one, salt, adapter, sources in zip(
            ids,
            prompts,
            params,
            salts(body, len(prompts)),
            adapters_of(service.card, None, body.lora_path, len(prompts)),
            media,
            strict=True,
        )
    ]


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
    preferred: Fields,
    whole: GenerateBody,
    thinking: ThinkingLimit | None,
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
    if whole.return_routed_experts:
        values["routed_experts"] = whole.routed_experts_start_len or 0
    if whole.custom_logit_processor is not None:
        values["processor"] = _processor(whole.custom_logit_processor, body.custom_params)
    if thinking is not None:
        values["thinking"] = thinking
    rule, where = constraint_of(body, "sampling_params.")
    if rule is not None:
        values["constraint"] = rule
    return convert(values, SamplingParams, _NAMES | where)


def _processor(name: str, params: Fields | None) -> Processor:
    """The processor's name with its parameters. Raises InvalidRequest for a pickled one, as SGLang's clients
    send."""
    if name.lstrip().startswith("{"):
        raise InvalidRequest(
            "code that comes with a request is not run here; the operator names processors with "
            "--logit-processors, and requests choose one by its class name",
            param="custom_logit_processor",
        )
    return Processor(name, params or {})


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
