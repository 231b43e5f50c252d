"""What the routes of embedding models and classifiers share: inputs become one request each, results are
numbers.

The inputs of an HTTP request run in parallel, in as few steps as they fit, and are returned in their order.
"""

import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Annotated as A
from typing import Literal
from uuid import uuid4

import numpy as np
from msgspec import Meta, Struct, convert

from runtime.errors import InvalidRequest, RequestError
from runtime.http.fields.media_usage import media_fields
from runtime.http.fields.model import check_model
from runtime.http.openai.completion_response import CachedTokens, Usage
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer
from runtime.json_value import JsonValue
from runtime.messages.media import MediaSource
from runtime.messages.requests import Chat, Delta, GenerateRequest, Pair, Text, Tokens
from runtime.messages.sampling import CacheSalt, Priority, SamplingParams
from runtime.models.config.pooling import Pooling
from runtime.service import Service

MAX_INPUTS = 4_096
NAMES = {"truncate": "truncate_prompt_tokens", "prompt": "input", "input_ids": "input"}

# a text, texts, token ids, or lists of token ids
Inputs = str | A[list[str | int | list[int]], Meta(min_length=1)]
Truncate = A[int, Meta(ge=-1, le=2**31 - 1)]
Prompt = Text | Tokens | Pair | Chat


class Common(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all these requests share."""

    model: str | None = None
    user: str | None = None  # accepted without effect
    # tokens to keep from the start; -1: as many as the model takes
    truncate_prompt_tokens: Truncate | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    request_id: A[str, Meta(min_length=1, max_length=256)] | None = None


class PooledAnswerFormat:
    """Answers in one piece, never streamed: `write` makes the answer from the outputs."""

    answer_type: object = JsonValue

    def __init__(self, write: Callable[[list[Output]], object]) -> None:
        self._write = write

    def events(self, choice: int, delta: Delta) -> bytes:
        """Not called: answers are not streamed."""
        raise AssertionError("vectors are not streamed")

    def tail(self) -> bytes:
        """Not called: answers are not streamed."""
        raise AssertionError("vectors are not streamed")

    def failure(self, error: RequestError) -> bytes:
        """Not called: answers are not streamed."""
        raise AssertionError("vectors are not streamed")

    def body(self, outputs: list[Output]) -> object:
        """The answer that `write` makes of the outputs."""
        return self._write(outputs)


def answer(
    service: Service,
    prompts: Sequence[Prompt],
    write: Callable[[list[Output]], object],
    *,
    common: Common,
    id: str,
    params: SamplingParams | None = None,
    names: dict[str, str] = NAMES,
    media: Sequence[tuple[MediaSource, ...]] = (),
) -> Answer:
    """One request for each prompt: of a model that pools, or with `params` of one that generates. `media`: of
    each prompt its files; (): there are none. Raises InvalidRequest."""
    check_model(service.card, common.model)
    if len(prompts) > MAX_INPUTS:
        raise InvalidRequest(
            f"there are {len(prompts)} inputs; the most is {MAX_INPUTS}", param=names.get("prompt")
        )
    arrival_s, pools = time.monotonic(), params is None
    truncate = common.truncate_prompt_tokens
    if truncate == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    requests = [
        GenerateRequest(
            id=id if len(prompts) == 1 else f"{id}-{i}",
            prompt=prompt,
            params=params or SamplingParams(),
            arrival_s=arrival_s,
            pools=pools,
            truncate=truncate,
            priority=common.priority,
            cache_salt=common.cache_salt or "",
            media=media[i] if media else (),
        )
        for i, prompt in enumerate(prompts)
    ]
    return Answer(service, requests, PooledAnswerFormat(write), is_stream=False, names=names)


def pooling_of(service: Service, task: Literal["embed", "classify"] | None = None) -> Pooling:
    """The model's pooling. Raises InvalidRequest where the model does something else than `task`."""
    pooling = service.card.pooling
    if pooling is None:
        raise InvalidRequest(
            "this model generates text; vectors and scores need an embedding model (--is-embedding) "
            "or a classifier"
        )
    if task not in (None, pooling.task):
        raise InvalidRequest(
            "this model classifies; it makes no embeddings"
            if pooling.task == "classify"
            else "this model makes embeddings; it has no classes"
        )
    return pooling


def prompts_of(
    inputs: str | Sequence[str | int | list[int]], field: str = "input", *, add_special: bool = True
) -> list[Text | Tokens]:
    """The prompts of an input field. Raises InvalidRequest."""
    if isinstance(inputs, str):
        return [Text(inputs, add_special)]
    if all(isinstance(one, int) for one in inputs):
        return [Tokens(inputs)]  # type: ignore[arg-type]
    if all(isinstance(one, str) for one in inputs):
        return [Text(one, add_special) for one in inputs]  # type: ignore[arg-type]
    if all(isinstance(one, list) for one in inputs):
        return [Tokens(one) for one in inputs]  # type: ignore[arg-type]
    raise InvalidRequest(
        f"{field} mixes kinds; give texts only, token ids only, or lists of token ids only", param=field
    )


def new_id(prefix: str, common: Common) -> str:
    """The client's request id, or a new one."""
    return common.request_id or f"{prefix}-{uuid4().hex}"


def usage(outputs: list[Output]) -> Usage:
    """The `usage` object of all outputs."""
    count = sum(output.finish.prompt_tokens for output in outputs if output.finish is not None)
    cached = sum(output.finish.cached_tokens for output in outputs if output.finish is not None)
    media = [output.finish.media for output in outputs if output.finish is not None]
    return Usage(
        prompt_tokens=count,
        completion_tokens=0,
        total_tokens=count,
        prompt_tokens_details=convert({"cached_tokens": cached} | media_fields(media), CachedTokens),
    )


def raw(output: Output) -> np.ndarray:
    """The model's output, float32. Raises InvalidRequest for an aborted input."""
    if output.vector is None:
        raise InvalidRequest("the request was aborted")
    return output.vector


def embedding(output: Output, size: int | None, *, is_normalised: bool) -> np.ndarray:
    """The first `size` numbers of the output, normalized to length 1 with `is_normalised`."""
    vector = raw(output)[:size]
    if not is_normalised:
        return vector
    return vector / max(float(np.sqrt(vector @ vector)), 1e-12)


def activated(output: Output, pooling: Pooling) -> np.ndarray:
    """Probabilities of a classifier; its logits where it has no activation."""
    logits = raw(output)
    if pooling.activation == "sigmoid":
        return 0.5 * (1 + np.tanh(0.5 * logits))
    return softmax(logits) if pooling.activation == "softmax" else logits


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis of a vector."""
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def written(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    """A vector as a list of numbers, or as base64 of little-endian float32."""
    return b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
