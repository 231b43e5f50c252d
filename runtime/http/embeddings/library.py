"""Embeddings, classes and scores for the library's Engine. Calls take the way of the HTTP routes, checks
included."""

from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct, to_builtins

from runtime.errors import InvalidRequest
from runtime.http.embeddings import embedding_response as responses
from runtime.http.embeddings.embeddings import embeddings, encode
from runtime.http.embeddings.pooling_requests import MAX_INPUTS
from runtime.http.embeddings.scores import classify, rerank, score
from runtime.http.streaming import sse
from runtime.http.streaming.exchange import Answer
from runtime.json_value import JsonDict
from runtime.service import Service

# one text or several, as texts or token ids
Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Serve = Callable[[Service, bytes], Answer]
T = TypeVar("T", bound=Struct)


class Classes(Struct, frozen=True):
    """The likeliest label of a text, and a number for each label (probabilities, where the classifier has
    them)."""

    label: str
    probs: np.ndarray


class Ranked(Struct, frozen=True):
    """A document and its relevance."""

    index: int  # in the list of documents
    score: float
    document: str


class Vectors(ABC):
    """The methods of an engine that return numbers. All raise InvalidRequest, Overloaded, Unavailable."""

    @property
    @abstractmethod
    def _service(self) -> Service:
        """What serves the engine's requests. Raises Unavailable where nothing does."""

    async def embed(
        self,
        texts: Texts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: int | None = None,
    ) -> np.ndarray:
        """float32 [size] for one text, [texts, size] for several. `truncate`: tokens to keep of longer texts;
        -1: as many as fit."""
        params = {
            "encoding_format": "base64",
            "dimensions": dimensions,
            "normalize": normalize,
            "truncate_prompt_tokens": truncate,
        }
        vectors = [
            np.frombuffer(b64decode(str(one.embedding)), "<f4")
            async for response in self._responses(embeddings, texts, params, responses.Embeddings)
            for one in response.data
        ]
        return vectors[0] if _is_one(texts) else np.stack(vectors)

    async def encode(self, texts: Texts, **params: object) -> JsonDict | list[JsonDict]:
        """The vector of a text, or of each of a list, as SGLang's Engine.encode gives it: {"embedding",
        "meta_info"}. A classifier's vector is its logits."""
        first = texts if isinstance(texts, str) else _listed(texts)[0]
        field = "text" if isinstance(first, str) else "input_ids"
        encoded: JsonDict | list[JsonDict] = to_builtins(
            await self._complete(encode, params | {field: texts})
        )
        return encoded

    async def classify(
        self, texts: Texts, *, use_activation: bool | None = None, truncate: int | None = None
    ) -> Classes | list[Classes]:
        """The classes of one text, or of each."""
        params = {"use_activation": use_activation, "truncate_prompt_tokens": truncate}
        classes = [
            Classes(one.label, np.array(one.probs, np.float32))
            async for response in self._responses(classify, texts, params, responses.Classes)
            for one in response.data
        ]
        return classes[0] if _is_one(texts) else classes

    async def score(
        self,
        text_1: str | Sequence[str] | None = None,
        text_2: str | Sequence[str] | None = None,
        *,
        use_activation: bool | None = None,
        truncate: int | None = None,
        **labels: object,
    ) -> float | list[float] | list[list[float]]:
        """How well texts match: one number for two texts, otherwise a list. For a model that generates, in
        SGLang's form (`query`, `items`, `label_token_ids`, `apply_softmax`, `item_first`): a list of numbers
        for each item."""
        if labels:
            return (await self._answer(score, labels, responses.LabelScores)).scores
        response = await self._answer(
            score,
            {
                "text_1": text_1,
                "text_2": text_2,
                "use_activation": use_activation,
                "truncate_prompt_tokens": truncate,
            },
            responses.Scores,
        )
        scores = [one.score for one in response.data]
        return scores[0] if isinstance(text_1, str) and isinstance(text_2, str) else scores

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, truncate: int | None = None
    ) -> list[Ranked]:
        """The documents by relevance, the best first."""
        response = await self._answer(
            rerank,
            {"query": query, "documents": documents, "top_n": top_n, "truncate_prompt_tokens": truncate},
            responses.Ranking,
        )
        return [Ranked(one.index, one.relevance_score, documents[one.index]) for one in response.results]

    async def _responses(
        self, serve: Serve, texts: Texts, params: Mapping[str, object], kind: type[T]
    ) -> AsyncIterator[T]:
        """The responses for all texts in order; many texts take several requests."""
        inputs = [texts] if _is_one(texts) else _listed(texts)
        for at in range(0, len(inputs), MAX_INPUTS):
            yield await self._answer(serve, {**params, "input": inputs[at : at + MAX_INPUTS]}, kind)

    async def _answer(self, serve: Serve, body: Mapping[str, object], kind: type[T]) -> T:
        answer = await self._complete(serve, body)
        assert isinstance(answer, kind)
        return answer

    async def _complete(self, serve: Serve, body: Mapping[str, object]) -> object:
        return await serve(self._service, sse.encode(body)).complete()


def _is_one(texts: Texts) -> bool:
    return isinstance(texts, str) or isinstance(_listed(texts)[0], int)


def _listed(texts: Texts) -> list[object]:
    """The texts as a list. Raises InvalidRequest for none."""
    listed = list(texts)
    if not listed:
        raise InvalidRequest("there is no text", param="input")
    return listed
