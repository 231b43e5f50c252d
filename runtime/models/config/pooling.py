"""Pooling: what a model returns for a text when it does not generate: a vector, or a number for each of its
classes."""

from typing import Literal

from msgspec import Struct

from runtime.models.config.dense_modules import DenseModule

PoolingMode = Literal["last", "mean", "cls"]
Activation = Literal["softmax", "sigmoid", "none"]


class Pooling(Struct, frozen=True, kw_only=True):
    """How the vectors of a text's tokens become one result of `size` numbers."""

    task: Literal["embed", "classify"]
    mode: PoolingMode  # last: the last token's vector; mean: of all tokens; cls: the first token's vector
    size: int
    is_whole: bool  # a text must be computed in one step: no chunks, no cached prefixes
    dense: tuple[DenseModule, ...] = ()  # linear layers that vectors pass, before they are normalized
    is_normalised: bool = False  # embeddings are normalized to length 1
    labels: tuple[str, ...] = ()  # names of a classifier's classes
    activation: Activation = "none"  # makes probabilities of a classifier's logits
    # token ids of a language model that judges: the score is the logit of the first one for the token that
    # comes next, minus that of the second where there is one; none: the model has a head for its classes
    judge_ids: tuple[int, ...] = ()
    step_token: str = ""  # ends each step of an answer, of a model that scores steps; empty: it scores texts
    # images, videos and sounds stand in conversations, which the chat template renders; else each file is
    # embedded by itself
    reads_chats: bool = False
    has_inner_head: bool = False  # the head for classes has a hidden layer (reward models of Qwen 2.5)
