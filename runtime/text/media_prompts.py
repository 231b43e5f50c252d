"""Prompts with images, videos and sounds: placeholders become the tokens that stand for a file."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, RequestError
from runtime.media_kind import NAMES
from runtime.messages.media import Media, MediaInput, MediaKind, MediaSource
from runtime.messages.requests import GenerateRequest


class MediaLoader(Protocol):
    """Fetches and decodes files that clients named."""

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """The files, in the order of `sources`. Raises RequestError, naming `MediaSource.param`."""
        ...


class Prepared(Struct, frozen=True, kw_only=True):
    """A file as the model's encoder takes it, and the tokens that stand for it."""

    kind: MediaKind
    digest: bytes  # as in MediaInput.digest
    values: np.ndarray  # as in MediaInput.values
    token_ids: list[int]  # in place of its placeholder in the prompt
    positions: np.ndarray  # int32: which of these take a row of the encoding each, in order
    grid: tuple[int, int, int] = (1, 1, 1)  # as in MediaInput.grid
    token_grid: tuple[int, int, int] | tuple[()] = ()  # as in MediaInput.token_grid


class SoundLimits(Struct, frozen=True, kw_only=True):
    """Sounds that a model takes."""

    rate: int  # samples a second
    max_s: float  # seconds of the longest


class MediaProcessor(Protocol):
    """Prepares files for the encoder of one family."""

    placeholder_id: int  # the token that stands for a file before the prompt is expanded

    @property
    def sounds(self) -> SoundLimits | None:
        """Sounds that the model takes; None: it takes none."""
        ...

    def prepare(self, media: Media) -> Prepared:
        """One file. Thread-safe. Raises InvalidRequest, naming `Media.param`, for a kind or size that the
        model does not take."""
        ...


class MediaPrompts:
    """Prompts of one model that takes images or sounds."""

    def __init__(self, processor: MediaProcessor, loader: MediaLoader) -> None:
        self.loader = loader
        self._processor = processor

    def expand(
        self, prompt_ids: list[int], media: Sequence[Media]
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """The prompt with the tokens of its files, and these as the ranks take them. Thread-safe. Raises
        InvalidRequest."""
        prepared = [self._processor.prepare(one) for one in media]
        return expand(prompt_ids, self._processor.placeholder_id, prepared)


def check_kind(media: Media, kinds: frozenset[MediaKind]) -> None:
    """Raises InvalidRequest for a file of none of the kinds that a model takes."""
    if media.kind not in kinds:
        taken = " and ".join([NAMES[kind] for kind in sorted(kinds)])
        raise InvalidRequest(
            f"{media.param}: this model takes {taken}, and no {NAMES[media.kind]}; leave it out",
            param=media.param,
        )


async def load_media(prompts: MediaPrompts | None, request: GenerateRequest) -> list[Media]:
    """The files that a request's prompt shows, or none. `prompts` None: the model takes text alone. Raises
    RequestError: InvalidRequest for requests that may have no files, InternalFault for unexpected errors."""
    if not request.media:
        return []
    param = request.media[0].param
    if prompts is None:
        raise InvalidRequest(
            f"{param}: this server takes text alone; leave images, videos and sounds out", param=param
        )
    if request.before is not None or request.pools:
        raise InvalidRequest(
            f"{param}: images, videos and sounds are not possible in sessions and embeddings; leave them out",
            param=param,
        )
    try:
        return await prompts.loader.load(request.media)
    except RequestError:
        raise
    except Exception:
        log.get("tokenizer").exception("media could not be loaded", request=request.id, exc_info=True)
        raise InternalFault(
            f"{param} could not be loaded; the server's log has the details under {request.id}"
        ) from None


def expand(
    prompt_ids: list[int], placeholder_id: int, prepared: Sequence[Prepared]
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """The prompt with the tokens of each file in place of its placeholder, in order. Raises InvalidRequest
    where there are not as many placeholders as files."""
    places = [place for place, token in enumerate(prompt_ids) if token == placeholder_id]
    if len(places) != len(prepared):
        raise InvalidRequest(
            f"the prompt has {len(places)} placeholders for {len(prepared)} images, videos and sounds; give "
            "one for each, or let the chat template place them",
            param="media",
        )
    ids: list[int] = []
    inputs: list[MediaInput] = []
    copied = 0
    for place, one in zip(places, prepared, strict=True):
        ids += prompt_ids[copied:place]
        inputs.append(
            MediaInput(
                kind=one.kind,
                digest=one.digest,
                start=len(ids),
                positions=one.positions,
                values=one.values,
                grid=one.grid,
                token_grid=one.token_grid,
            )
        )
        ids += one.token_ids
        copied = place + 1
    return ids + prompt_ids[copied:], tuple(inputs)
