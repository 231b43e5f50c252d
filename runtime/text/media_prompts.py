"""Prompts with images, videos and sounds: placeholders become the tokens that stand for a file."""

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct, structs

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, RequestError
from runtime.media_kind import NAMES
from runtime.messages.media import Media, MediaInput, MediaKind, MediaSource, SoundLimits, TokenGrid
from runtime.messages.requests import GenerateRequest
from runtime.text.prepared_files import PreparedFiles
from runtime.text.texts_around import Around, with_texts_around
from runtime.text.vocabulary import Vocabulary

NOTHING: Mapping[tuple[int, int], int] = {}


class MediaLoader(Protocol):
    """Fetches and decodes files that clients named."""

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """The files, in the order of `sources`. Raises RequestError, naming `MediaSource.param`."""
        ...

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raises InvalidRequest where a request has too many files."""
        ...

    def hold(self, values: np.ndarray) -> None:
        """Counts an array that a file was prepared to as memory in use, until it is gone. Thread-safe."""
        ...


class Prepared(Struct, frozen=True, kw_only=True):
    """A file as the model's encoder takes it, and the tokens that stand for it."""

    kind: MediaKind
    digest: bytes  # as in MediaInput.digest
    values: np.ndarray  # as in MediaInput.values
    token_ids: list[int]  # in place of its placeholder in the prompt
    positions: np.ndarray  # int32: which of these take a row of the encoding each, in order
    grid: tuple[int, int, int] = (1, 1, 1)  # as in MediaInput.grid
    token_grids: tuple[TokenGrid, ...] = ()  # as in MediaInput.token_grids
    frame_step: float = 1.0  # as in MediaInput.frame_step
    # tokens before and behind the placeholder that are replaced with it, where it stands between both
    replaced: tuple[int, int] | tuple[()] = ()
    # texts before and behind its tokens and those of its parts, which are tokenised with the text around them
    around: Around = ()
    # tokens that would be one in a text, where they are neighbours at an end of `token_ids`, and that one
    joined: Mapping[tuple[int, int], int] = NOTHING
    # parts of the file that are encoded apart, whose tokens follow those of this one
    parts: "tuple[Prepared, ...]" = ()
    inner: tuple["Prepared", ...] = ()  # files whose rows other tokens of `token_ids` take


class MediaProcessor(Protocol):
    """Prepares files for the encoder of one family."""

    @property
    def placeholder_ids(self) -> Mapping[MediaKind, int]:
        """The tokens that stand for files before a prompt is expanded."""
        ...

    @property
    def sounds(self) -> SoundLimits | None:
        """Sounds that the model takes; None: it takes none."""
        ...

    @property
    def is_attended(self) -> bool:
        """Whether the model attends to a file apart from its prompt, which then has no placeholder: each
        request has one file."""
        ...

    def prepare(self, media: Media) -> Prepared:
        """One file. Thread-safe. Raises InvalidRequest, naming `Media.param`, for a kind or size that the
        model does not take."""
        ...


@runtime_checkable
class WritesPrompts(Protocol):
    """A MediaProcessor that writes prompts with files as a whole."""

    def written(
        self, prompt_ids: list[int], prepared: Sequence[Prepared]
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """The prompt, and what the ranks encode for it. Thread-safe."""
        ...


class MediaPrompts:
    """Prompts of one model that takes images or sounds."""

    def __init__(
        self,
        processor: MediaProcessor,
        loader: MediaLoader,
        vocabulary: Vocabulary,
        *,
        pools: bool = False,
        kept_bytes: int = 0,
    ) -> None:
        """`vocabulary`: makes tokens of texts around files. `pools`: the model makes vectors, each
        of a text alone or of a file alone. `kept_bytes`: of prepared files for later requests."""
        self.loader, self.pools = loader, pools
        self._processor, self._vocabulary = processor, vocabulary
        self.files = PreparedFiles[Prepared](kept_bytes)

    @property
    def is_attended(self) -> bool:
        """See MediaProcessor."""
        return self._processor.is_attended

    def prepare(self, media: list[Media], keys: Sequence[bytes] = ()) -> list[Prepared]:
        """The files as the encoder takes them; those that have `keys` are kept for later requests. `media` is
        empty then: the system takes milliseconds to take its memory back, in this thread. Thread-safe. Raises
        InvalidRequest."""
        fds = [os.dup(one.memory.fd) for one in media if one.memory is not None]
        try:
            prepared = [self._processor.prepare(one) for one in counted(media)]
        finally:
            media.clear()
            for fd in fds:  # what closes a memory last takes it back, and this lets other threads run
                os.close(fd)
        for one in prepared:
            for part in parts_of(one):
                self.loader.hold(part.values)
        for key, one in zip(keys, prepared, strict=False):  # there may be none
            self.files.add(key, one, sum([part.values.nbytes for part in parts_of(one)]))
        return prepared

    def expand(
        self, prompt_ids: list[int], prepared: Sequence[Prepared]
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """The prompt with the tokens of its files, and these as the ranks take them. Thread-safe. Raises
        InvalidRequest."""
        if self.is_attended:
            return prompt_ids, (attended(prompt_ids, prepared),)
        if self.pools:  # the file is all that there is
            prompt_ids = [self._processor.placeholder_ids[one.kind] for one in prepared]
        if isinstance(self._processor, WritesPrompts):
            check_counts(prompt_ids, self._processor.placeholder_ids, prepared)
            return self._processor.written(prompt_ids, prepared)
        ids = self._processor.placeholder_ids
        if any(one.around for one in prepared):
            check_counts(prompt_ids, ids, prepared)
            texts = {id: [one.around for one in prepared if one.kind is kind] for kind, id in ids.items()}
            prompt_ids = with_texts_around(prompt_ids, texts, self._vocabulary)
        return expand(prompt_ids, ids, prepared)


def parts_of(one: Prepared) -> tuple[Prepared, ...]:
    """A file, and what of it is encoded apart."""
    return one, *one.inner, *one.parts


def counted(media: Sequence[Media]) -> list[Media]:
    """The files of a prompt, with the number of its images and each one's place among those of its kind."""
    num_images = sum(one.kind is MediaKind.IMAGE for one in media)
    found: list[Media] = []
    for one in media:
        before = sum(other.kind is one.kind for other in found)
        found.append(structs.replace(one, num_images=num_images, kind_index=before))
    return found


def attended(prompt_ids: list[int], prepared: Sequence[Prepared]) -> MediaInput:
    """The file that a prompt's tokens attend to, from the first one on. Raises InvalidRequest."""
    if len(prepared) != 1 or not prompt_ids:
        raise InvalidRequest(
            "the model transcribes one sound a request; send it to /v1/audio/transcriptions", param="file"
        )
    (one,) = prepared
    return MediaInput(
        kind=one.kind,
        digest=one.digest,
        start=0,
        positions=one.positions,
        values=one.values,
        grid=one.grid,
        is_attended=True,
    )


def check_kind(media: Media, kinds: frozenset[MediaKind]) -> None:
    """Raises InvalidRequest for a file of none of the kinds that a model takes."""
    if media.kind not in kinds:
        taken = " and ".join([NAMES[kind] for kind in sorted(kinds)])
        raise InvalidRequest(
            f"{media.param}: this model takes {taken}, and no {NAMES[media.kind]}; leave it out",
            param=media.param,
        )


def check_media(prompts: MediaPrompts | None, request: GenerateRequest) -> MediaPrompts:
    """Raises InvalidRequest for a request that may not have the files that it has. `prompts` None: the model
    takes text alone."""
    param = request.media[0].param
    if prompts is None:
        raise InvalidRequest(
            f"{param}: this server takes text alone; leave images, videos and sounds out", param=param
        )
    if request.before is not None:
        raise InvalidRequest(
            f"{param}: images, videos and sounds are not possible in sessions; leave them out", param=param
        )
    prompts.loader.check(request.media)
    return prompts


async def load_media(prompts: MediaPrompts, request: GenerateRequest) -> list[Media]:
    """The files that a request's prompt shows. Raises RequestError: InternalFault for unexpected errors."""
    param = request.media[0].param
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
    prompt_ids: list[int], placeholder_ids: Mapping[MediaKind, int], prepared: Sequence[Prepared]
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """The prompt with the tokens of each file in place of its placeholder, in order among those of its kind.
    Raises InvalidRequest as check_counts."""
    kind_of = {token: kind for kind, token in placeholder_ids.items()}
    places = [(place, kind_of[token]) for place, token in enumerate(prompt_ids) if token in kind_of]
    check_counts(prompt_ids, placeholder_ids, prepared)
    files_of = {kind: iter([one for one in prepared if one.kind == kind]) for kind in placeholder_ids}
    ids: list[int] = []
    inputs: list[MediaInput] = []
    copied, joined = 0, NOTHING
    for place, kind in places:
        one = next(files_of[kind])
        begin, end = replaced(prompt_ids, place, one)
        append(ids, prompt_ids[copied:begin], joined)
        joined = one.joined
        start = append(ids, one.token_ids, joined)
        inputs += [as_input(part, start) for part in (one, *one.inner)]
        inputs += [as_input(part, append(ids, part.token_ids, joined)) for part in one.parts]
        copied = end
    append(ids, prompt_ids[copied:], joined)
    return ids, tuple(inputs)


def check_counts(
    prompt_ids: list[int], placeholder_ids: Mapping[MediaKind, int], prepared: Sequence[Prepared]
) -> None:
    """Raises InvalidRequest where there are not as many placeholders as files of a kind."""
    for kind, token in placeholder_ids.items():
        marks, files = prompt_ids.count(token), sum(one.kind == kind for one in prepared)
        if marks != files:
            raise InvalidRequest(
                f"the prompt has {marks} placeholders for {files} {NAMES[kind]}; give one for each, or let "
                "the chat template place them",
                param="media",
            )


def as_input(one: Prepared, start: int) -> MediaInput:
    """A file, or a part of it, whose first token is number `start` of the prompt, as the ranks take it."""
    return MediaInput(
        kind=one.kind,
        digest=one.digest,
        start=start,
        positions=one.positions,
        values=one.values,
        grid=one.grid,
        token_grids=one.token_grids,
        frame_step=one.frame_step,
    )


def append(ids: list[int], more: list[int], joined: Mapping[tuple[int, int], int]) -> int:
    """Adds tokens to those of a prompt; the first one becomes one with the last one, where `joined` has the
    pair. -> where the first one stands"""
    one = joined.get((ids[-1], more[0])) if ids and more else None
    if one is None:
        ids += more
    else:
        ids[-1:] = [one, *more[1:]]
    return len(ids) - len(more)


def replaced(prompt_ids: list[int], place: int, one: Prepared) -> tuple[int, int]:
    """The part of a prompt, from its first token to that behind its last, that a file's tokens replace: its
    placeholder at `place`, or that with the tokens around it."""
    around = list(one.replaced)
    if around and place and prompt_ids[place - 1 : place + 2 : 2] == around:
        return place - 1, place + 2
    return place, place + 1
