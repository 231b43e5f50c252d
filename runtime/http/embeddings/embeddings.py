"""POST /v1/embeddings of OpenAI, /pooling of vLLM, /encode and the native /classify of SGLang."""

import re
import time
from typing import Annotated as A
from typing import Literal

import msgspec
from msgspec import Meta, Struct

from runtime.errors import InvalidRequest
from runtime.http.embeddings.embedding_response import Embedding, Embeddings, Pooled, PooledList
from runtime.http.embeddings.items import Embedded, EmbeddingMessage, Item, embedded
from runtime.http.embeddings.pooling_requests import (
    MAX_INPUTS,
    Common,
    activated,
    answer,
    embedding,
    new_id,
    pooling_of,
    prompts_of,
    raw,
    usage,
    written,
)
from runtime.http.errors import decode
from runtime.http.native.generate_request import Rid
from runtime.http.native.native_response import Encoded, FinishReason, MetaInfo
from runtime.http.operation import Operation
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer
from runtime.json_value import JsonValue
from runtime.messages.requests import Text, Tokens
from runtime.models.config.pooling import Pooling
from runtime.service import Service


class EmbeddingBody(Common, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings and /pooling."""

    input: str | A[list[Item], Meta(min_length=1)] | None = None
    messages: A[list[EmbeddingMessage], Meta(min_length=1)] | None = None  # in place of `input`, as in vLLM
    encoding_format: Literal["float", "base64"] | None = None
    # keep this many numbers, normalized again; for models trained for it
    dimensions: A[int, Meta(ge=1)] | None = None
    normalize: bool | None = None  # to length 1; null: as the model's folder says
    add_special_tokens: bool | None = None


class EncodeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /encode, in SGLang's form."""

    text: str | A[list[str], Meta(min_length=1)] | None = None
    input_ids: A[list[int | list[int]], Meta(min_length=1)] | None = None
    rid: Rid | None = None
    dimensions: A[int, Meta(ge=1)] | None = None
    sampling_params: JsonValue = None  # accepted without effect
    image_data: JsonValue = None


# of the prompts of all steps of a request, which are texts of their own until they are tokens
MAX_STEP_CHARS = 1 << 24

_embedding = msgspec.json.Decoder(EmbeddingBody)
_encode = msgspec.json.Decoder(EncodeBody)


def embeddings(service: Service, content: bytes) -> Answer:
    """The embeddings of texts. Raises RequestError."""
    body = decode(content, _embedding)
    pooling = pooling_of(service, "embed")
    size = size_of(body.dimensions, pooling.size)
    is_normalised = pooling.is_normalised if body.normalize is None else body.normalize

    def write(outputs: list[Output]) -> Embeddings:
        data = [
            Embedding(i, written(embedding(output, size, is_normalised=is_normalised), body.encoding_format))
            for i, output in enumerate(outputs)
        ]
        return Embeddings(data, service.card.name, usage(outputs))

    found = _embedded(body, service, pooling)
    return answer(service, found.prompts, write, common=body, id=new_id("embd", body), media=found.media)


def _embedded(body: EmbeddingBody, service: Service, pooling: Pooling) -> Embedded:
    kinds, add_special = service.card.limits.media_kinds, body.add_special_tokens is not False
    return embedded(
        body.input, body.messages, kinds, add_special=add_special, reads_chats=pooling.reads_chats
    )


def pooled(service: Service, content: bytes) -> Answer:
    """Embeddings, or the output of a classifier or a reward model. Raises RequestError."""
    body = decode(content, _embedding)
    pooling, id = pooling_of(service), new_id("pool", body)
    size = size_of(body.dimensions, pooling.size)
    is_normalised = pooling.is_normalised if body.normalize is None else body.normalize

    if pooling.step_token:
        return _steps(service, body, pooling, id)

    def write(outputs: list[Output]) -> PooledList:
        is_class = pooling.task == "classify"
        vectors = [
            activated(o, pooling) if is_class else embedding(o, size, is_normalised=is_normalised)
            for o in outputs
        ]
        data = [Pooled(i, written(vector, body.encoding_format)) for i, vector in enumerate(vectors)]
        return PooledList(id, int(time.time()), service.card.name, data, usage(outputs))

    found = _embedded(body, service, pooling)
    return answer(service, found.prompts, write, common=body, id=id, media=found.media)


def _steps(service: Service, body: EmbeddingBody, pooling: Pooling, id: str) -> Answer:
    """Probabilities for each step of each text. A step's are those of the token that ends it, which has seen
    the text so far: each beginning of a text is a prompt, and all of them share the pages of what they have
    in common. Raises InvalidRequest."""
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"there are {len(texts)} inputs; the most is {MAX_INPUTS}", param="input")
    ends = [_step_ends(text, pooling.step_token) if isinstance(text, str) else [] for text in texts]
    if not ends or not all(ends):
        raise InvalidRequest(
            f"this model scores the steps of texts: give texts with {pooling.step_token} behind each step",
            param="input",
        )

    num_chars = sum(end for positions in ends for end in positions)
    if num_chars > MAX_STEP_CHARS:
        raise InvalidRequest(
            f"the prompts of all steps have {num_chars} characters together, each with the steps before it; "
            f"the most is {MAX_STEP_CHARS}: send fewer or shorter texts in a request",
            param="input",
        )

    def write(outputs: list[Output]) -> PooledList:
        rest = iter(outputs)
        data = [
            Pooled(i, [activated(next(rest), pooling).tolist() for _ in positions])
            for i, positions in enumerate(ends)
        ]
        return PooledList(id, int(time.time()), service.card.name, data, usage(outputs))

    prompts = [
        Text(str(text)[:end], add_special=body.add_special_tokens is not False)
        for text, positions in zip(texts, ends, strict=True)
        for end in positions
    ]
    return answer(service, prompts, write, common=body, id=id)


def _step_ends(text: str, token: str) -> list[int]:
    """The positions behind each `token` of a text."""
    return [found.end() for found in re.finditer(re.escape(token), text)]


def encode(service: Service, content: bytes) -> Answer:
    """Embeddings in SGLang's form; of a classifier its logits. Raises RequestError."""
    arrival_s = time.monotonic()
    body = decode(content, _encode)
    if body.image_data not in (None, "", []):
        raise InvalidRequest("image_data is not served by this version yet; leave it out", param="image_data")
    pooling = pooling_of(service)
    size = size_of(body.dimensions, pooling.size)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    prompts: list[Text | Tokens] = prompts_of(
        body.text or body.input_ids or "", "text" if body.text is not None else "input_ids"
    )
    is_list = isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))
    common = Common(request_id=body.rid)
    id = new_id("encode", common)

    def write(outputs: list[Output]) -> Encoded | list[Encoded]:
        answers = []
        for i, output in enumerate(outputs):
            vector = (
                raw(output)
                if pooling.task == "classify"
                else embedding(output, size, is_normalised=pooling.is_normalised)
            )
            assert output.finish is not None
            meta = MetaInfo(
                id=id if len(outputs) == 1 else f"{id}-{i}",
                finish_reason=FinishReason(type="length", length=0),
                prompt_tokens=output.finish.prompt_tokens,
                cached_tokens=output.finish.cached_tokens,
                e2e_latency=time.monotonic() - arrival_s,
            )
            answers.append(Encoded(embedding=vector.tolist(), meta_info=meta))
        return answers if is_list else answers[0]

    return answer(
        service,
        prompts,
        write,
        common=common,
        id=id,
        names={"prompt": "text" if body.text is not None else "input_ids"},
    )


def size_of(body: int | None, size: int) -> int | None:
    """The size of each vector. Raises InvalidRequest when `dimensions` is above the model's size."""
    if body is not None and body > size:
        raise InvalidRequest(
            f"dimensions is {body}, but the model's vectors have {size} numbers", param="dimensions"
        )
    return body


OPERATIONS = (
    Operation(
        "POST",
        "/v1/embeddings",
        "Vectors of texts",
        body=EmbeddingBody,
        example={"input": "Hello!"},
        answers=(Embeddings,),
        serve=embeddings,
    ),
    Operation(
        "POST PUT",
        "/encode",
        "Vectors or plain scores of texts, in SGLang's form",
        body=EncodeBody,
        example={"text": "Hello!"},
        answers=(Encoded, list[Encoded]),
        serve=encode,
    ),
    Operation(
        "POST",
        "/pooling",
        "What the model makes of texts, in vLLM's form",
        body=EmbeddingBody,
        example={"input": "Hello!"},
        answers=(PooledList,),
        serve=pooled,
    ),
)
