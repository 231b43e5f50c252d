"""Response bodies of embeddings and scores. Answers are encoded as these types, and the OpenAPI document is
made of them."""

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from runtime.http.openai.completion_response import Usage
from runtime.json_value import JsonDict

Vector = list[float] | str  # or base64 of little-endian float32


class Embedding(Struct, forbid_unknown_fields=True):
    """The vector of input `index`."""

    index: int
    embedding: Vector
    object: Literal["embedding"] = "embedding"


class Embeddings(Struct, forbid_unknown_fields=True):
    """The response of /v1/embeddings."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class Pooled(Struct, forbid_unknown_fields=True):
    """The pooled output for input `index`."""

    index: int
    # as Vector; of a model that scores steps, a vector for each step
    data: Sequence[float | list[float]] | str
    object: Literal["pooling"] = "pooling"


class PooledList(Struct, forbid_unknown_fields=True):
    """The response of /pooling."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: Usage
    object: Literal["list"] = "list"


class Ranked(Struct, forbid_unknown_fields=True):
    """The relevance of document `index`."""

    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class Ranking(Struct, forbid_unknown_fields=True):
    """The response of /v1/rerank."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
    meta: JsonDict


class Score(Struct, forbid_unknown_fields=True):
    """The score of pair `index`."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Struct, forbid_unknown_fields=True):
    """The response of /v1/score for two texts."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"


class LabelScores(Struct, forbid_unknown_fields=True):
    """The response of /v1/score for query and items: for each item a number for each label."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: Literal["scoring"] = "scoring"


class Class(Struct, forbid_unknown_fields=True):
    """The class of input `index`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Struct, forbid_unknown_fields=True):
    """The response of /v1/classify."""

    id: str
    created: int
    model: str
    data: list[Class]
    usage: Usage
    object: Literal["list"] = "list"
