"""POST /api/embed and the older /api/embeddings: embeddings in Ollama's form."""

import time
from collections.abc import Callable
from typing import Annotated as A

import msgspec
from msgspec import Meta, Struct

from runtime.http.embeddings.embeddings import size_of
from runtime.http.embeddings.pooling_requests import Common, answer, embedding, new_id, pooling_of, prompts_of
from runtime.http.errors import decode
from runtime.http.ollama.ollama_request import Options
from runtime.http.ollama.ollama_response import Embedding, Embeddings
from runtime.http.ollama.serve import check_name
from runtime.http.operation import Operation
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer
from runtime.service import Service


class EmbedBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /api/embed."""

    model: str
    input: str | list[str]
    truncate: bool | None = None  # cut texts that are too long, unless false
    dimensions: A[int, Meta(ge=1)] | None = None
    options: Options | None = None  # accepted: nothing is sampled
    keep_alive: float | str | None = None


class EmbeddingsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /api/embeddings."""

    model: str
    prompt: str
    options: Options | None = None
    keep_alive: float | str | None = None


Write = Callable[[list[list[float]], int], Struct]  # the answer of vectors and the prompts' tokens

_embed = msgspec.json.Decoder(EmbedBody)
_embeddings = msgspec.json.Decoder(EmbeddingsBody)


def embed(service: Service, content: bytes) -> Answer:
    """The embeddings of texts. Raises RequestError."""
    begin_ns = time.monotonic_ns()
    body = decode(content, _embed)

    def write(vectors: list[list[float]], num_tokens: int) -> Embeddings:
        return Embeddings(
            body.model,
            vectors,
            total_duration=time.monotonic_ns() - begin_ns,
            load_duration=0,
            prompt_eval_count=num_tokens,
        )

    return _answer(service, body.model, body.input, body.dimensions, body.truncate is not False, write)


def embeddings(service: Service, content: bytes) -> Answer:
    """The embedding of one text. Raises RequestError."""
    body = decode(content, _embeddings)
    return _answer(service, body.model, body.prompt, None, True, lambda vectors, _: Embedding(vectors[0]))


def _answer(
    service: Service, model: str, texts: str | list[str], dimensions: int | None, cuts: bool, write: Write
) -> Answer:
    check_name(service.card, model)
    pooling = pooling_of(service, "embed")
    size = size_of(dimensions, pooling.size)

    def write_outputs(outputs: list[Output]) -> object:
        vectors = [embedding(output, size, is_normalised=True).tolist() for output in outputs]
        return write(
            vectors, sum(output.finish.prompt_tokens for output in outputs if output.finish is not None)
        )

    common = Common(truncate_prompt_tokens=-1 if cuts else None)
    return answer(service, prompts_of(texts), write_outputs, common=common, id=new_id("embed", common))


OPERATIONS = (
    Operation(
        "POST",
        "/api/embed",
        "Embeddings of texts",
        body=EmbedBody,
        example={"model": "default", "input": ["Hello!"]},
        answers=(Embeddings,),
        serve=embed,
    ),
    Operation(
        "POST",
        "/api/embeddings",
        "The embedding of a text, in an older form",
        body=EmbeddingsBody,
        example={"model": "default", "prompt": "Hello!"},
        answers=(Embedding,),
        serve=embeddings,
    ),
)
