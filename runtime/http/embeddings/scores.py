"""Scores of pairs of texts: /v1/score (vLLM's form, and SGLang's for models that generate), /v1/rerank (Jina,
Cohere, vLLM), /v1/classify.

A cross-encoder reads both texts at once; with an embedding model the score is the cosine of their vectors.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated as A

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct

from runtime.errors import InvalidRequest
from runtime.http.embeddings.embedding_response import (
    Class,
    Classes,
    LabelScores,
    Ranked,
    Ranking,
    Score,
    Scores,
)
from runtime.http.embeddings.embeddings import encode
from runtime.http.embeddings.pooling_requests import (
    MAX_INPUTS,
    Common,
    Inputs,
    Prompt,
    activated,
    answer,
    embedding,
    new_id,
    pooling_of,
    prompts_of,
    raw,
    softmax,
    usage,
)
from runtime.http.errors import decode
from runtime.http.native.native_response import Encoded
from runtime.http.operation import Operation
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer
from runtime.json_value import JsonValue
from runtime.messages.requests import Pair, Text, Tokens
from runtime.messages.sampling import MAX_TOP_LOGPROBS, SamplingParams, TokenId
from runtime.models.config.judge import judge_prompt
from runtime.service import Service

Texts = str | A[list[str], Meta(min_length=1)]
Scoring = Callable[[list[Output]], list[float]]


class TextDocument(Struct):
    """A document as an object; only its text is used."""

    text: str


class RerankBody(Common, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/rerank."""

    query: str
    documents: A[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: A[int, Meta(ge=0)] | None = None  # null, 0: all
    return_documents: bool | None = None
    max_tokens_per_doc: A[int, Meta(ge=1)] | None = None  # Cohere; here of query and document together
    use_activation: bool | None = None  # False: logits instead of probabilities
    activation: bool | None = None  # older name of use_activation
    instruct: str | None = None  # what relevance means, for a language model that judges


class ScoreBody(Common, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/score: two texts, one and several, or several pairs; or query and items with
    label_token_ids."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    instruct: str | None = None  # see RerankBody
    queries: Texts | None = None  # newer names of text_1 and text_2
    documents: Texts | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    # SGLang's form
    query: str | list[int] | None = None
    items: Inputs | None = None
    label_token_ids: A[list[TokenId], Meta(min_length=1, max_length=MAX_TOP_LOGPROBS)] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class ClassifyBody(Common, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/classify, in vLLM's form."""

    input: Inputs
    use_activation: bool | None = None
    activation: bool | None = None
    add_special_tokens: bool | None = None


class Form(Struct):
    """Fields that distinguish SGLang's form of /classify from vLLM's."""

    text: JsonValue = None
    input_ids: JsonValue = None


_rerank = msgspec.json.Decoder(RerankBody)
_score = msgspec.json.Decoder(ScoreBody)
_classify = msgspec.json.Decoder(ClassifyBody)
_form = msgspec.json.Decoder(Form)


def rerank(service: Service, content: bytes, *, returns_documents: bool = True) -> Answer:
    """Documents by relevance. Raises RequestError."""
    body = decode(content, _rerank)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    prompts, scores = _pairs(service, [body.query], texts, body)
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = body.max_tokens_per_doc
    id, with_documents = (
        new_id("rerank", body),
        returns_documents if body.return_documents is None else body.return_documents,
    )

    def write(outputs: list[Output]) -> Ranking:
        best = sorted(enumerate(scores(outputs)), key=lambda pair: -pair[1])[: body.top_n or None]
        results = [Ranked(i, score, {"text": texts[i]} if with_documents else UNSET) for i, score in best]
        return Ranking(
            id,
            service.card.name,
            results,
            usage(outputs),
            {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        )

    return answer(
        service,
        prompts,
        write,
        common=body,
        id=id,
        names={"truncate": "truncate_prompt_tokens", "prompt": "documents"},
    )


def score(service: Service, content: bytes) -> Answer:
    """Scores of pairs of texts. Raises RequestError."""
    body = decode(content, _score)
    if body.query is not None or body.items is not None:
        return _label_scores(service, body)
    first, second = body.text_1 or body.queries, body.text_2 or body.documents
    if first is None or second is None:
        raise InvalidRequest(
            "give text_1 and text_2, or query and items with label_token_ids", param="text_1"
        )
    queries, documents = ([one] if isinstance(one, str) else one for one in (first, second))
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"text_1 has {len(queries)} texts and text_2 has {len(documents)}; give one, or as many",
            param="text_1",
        )
    prompts, scores = _pairs(service, queries, documents, body)
    id = new_id("score", body)

    def write(outputs: list[Output]) -> Scores:
        data = [Score(i, one) for i, one in enumerate(scores(outputs))]
        return Scores(id, int(time.time()), service.card.name, data, usage(outputs))

    return answer(
        service,
        prompts,
        write,
        common=body,
        id=id,
        names={"truncate": "truncate_prompt_tokens", "prompt": "text_2"},
    )


def classify(service: Service, content: bytes) -> Answer:
    """Classes of texts. Raises RequestError."""
    form = decode(content, _form)
    if form.text is not None or form.input_ids is not None:
        pooling_of(service, "classify")
        return encode(service, content)
    body = decode(content, _classify)
    pooling, id, is_plain = pooling_of(service, "classify"), new_id("classify", body), _is_plain(body)

    def write(outputs: list[Output]) -> Classes:
        data = []
        for i, output in enumerate(outputs):
            numbers = raw(output) if is_plain else activated(output, pooling)
            label = pooling.labels[int(numbers.argmax())]
            data.append(Class(i, label, numbers.tolist(), len(numbers)))
        return Classes(id, int(time.time()), service.card.name, data, usage(outputs))

    prompts = prompts_of(body.input, add_special=body.add_special_tokens is not False)
    return answer(service, prompts, write, common=body, id=id)


def _is_plain(body: RerankBody | ScoreBody | ClassifyBody) -> bool:
    return body.use_activation is False or body.activation is False


def _pairs(
    service: Service, queries: list[str], documents: list[str], body: RerankBody | ScoreBody
) -> tuple[Sequence[Prompt], Scoring]:
    """The prompts for pairs of texts, and the function that makes scores of their outputs. One query may go
    with all documents. Raises InvalidRequest."""
    pooling, is_plain = pooling_of(service), _is_plain(body)
    if body.instruct is not None and not pooling.judge_ids:
        raise InvalidRequest("instruct needs a language model that judges; leave it out", param="instruct")
    if pooling.task == "embed":
        return [Text(text) for text in (*queries, *documents)], lambda outputs: _cosines(
            outputs, len(queries)
        )
    if pooling.size != 1:
        raise InvalidRequest(
            f"this model has {pooling.size} classes; scores need a model with one (see /v1/classify)"
        )
    queries = queries * len(documents) if len(queries) == 1 else queries
    zipped = zip(queries, documents, strict=True)
    pairs: Sequence[Prompt] = (
        [Text(judge_prompt(*pair, body.instruct), add_special=False) for pair in zipped]
        if pooling.judge_ids
        else [Pair(*pair) for pair in zipped]
    )
    if pooling.judge_ids and body.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "the prompt of a language model that judges ends with what it must say; shorten the documents",
            param="truncate_prompt_tokens",
        )
    return pairs, lambda outputs: [float((raw(o) if is_plain else activated(o, pooling))[0]) for o in outputs]


def _cosines(outputs: list[Output], num_queries: int) -> list[float]:
    vectors = np.stack([embedding(output, None, is_normalised=True) for output in outputs])
    return np.sum(vectors[:num_queries] * vectors[num_queries:], axis=1).tolist()


def _label_scores(service: Service, body: ScoreBody) -> Answer:
    """For each item, how likely each label token comes next after query and item. Raises InvalidRequest."""
    if service.card.pooling is not None:
        raise InvalidRequest(
            "query and items need a model that generates; this one takes text_1 and text_2", param="query"
        )
    if body.query is None or body.items is None or body.label_token_ids is None:
        raise InvalidRequest("query, items and label_token_ids go together", param="label_token_ids")
    labels, applies = body.label_token_ids, bool(body.apply_softmax)
    params = SamplingParams(
        max_new_tokens=1, temperature=0.0, ignore_eos=True, logprobs=True, logprob_ids=tuple(labels)
    )

    def write(outputs: list[Output]) -> LabelScores:
        results = [
            np.array([logprob for _, logprob in output.logprobs[0].picked])
            if output.logprobs
            else raw(output)
            for output in outputs
        ]
        scores = [(softmax(one) if applies else np.exp(one)).tolist() for one in results]
        return LabelScores(scores, service.card.name, usage(outputs))

    prompts = _joined(
        body.query, body.items, is_item_first=bool(body.item_first), is_apart=service.card.reads_items_apart
    )
    names = {"logprob_ids": "label_token_ids", "prompt": "items", "input_ids": "items"}
    return answer(service, prompts, write, common=body, id=new_id("score", body), params=params, names=names)


def _joined(query: str | list[int], items: Inputs, *, is_item_first: bool, is_apart: bool) -> list[Prompt]:
    """The query with each item, as texts or as token ids. With the query first, all prompts share its cached
    pages."""
    parts = prompts_of(items, "items")
    joined: list[Prompt] = []
    for part in parts:
        if isinstance(query, str) and isinstance(part, Text):
            first, second = (part.text, query) if is_item_first else (query, part.text)
            joined.append(Pair(first, second) if is_apart else Text(first + second))
        elif isinstance(query, list) and isinstance(part, Tokens):
            joined.append(Tokens(part.ids + query if is_item_first else query + part.ids))
        else:
            raise InvalidRequest("query and items must both be texts, or both token ids", param="items")
    return joined


OPERATIONS = (
    *[
        Operation(
            "POST",
            prefix + "/score",
            "How two texts go together, or how likely labels follow query and item",
            body=ScoreBody,
            example={"text_1": "A fruit", "text_2": ["apple", "truck"]},
            answers=(Scores, LabelScores),
            serve=score,
        )
        for prefix in ("", "/v1")
    ],
    *[
        Operation(
            "POST",
            prefix + "/rerank",
            "Documents in the order in which they answer a query",
            body=RerankBody,
            example={"query": "A fruit", "documents": ["apple", "truck"]},
            answers=(Ranking,),
            serve=partial(rerank, returns_documents=False) if prefix == "/v2" else rerank,
        )
        for prefix in ("", "/v1", "/v2")
    ],
    *[
        Operation(
            "POST",
            prefix + "/classify",
            "Classes of texts",
            body=ClassifyBody,
            example={"input": "Hello!"},
            answers=(Classes, Encoded, list[Encoded]),
            serve=classify,
        )
        for prefix in ("", "/v1")
    ],
)
