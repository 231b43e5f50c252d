"""Which part of a sound each token of its transcription goes with, as the ranks see it."""

from functools import partial

import numpy as np
from anyio.to_thread import run_sync

from runtime.actors.replicas import Replicas
from runtime.actors.text_pipeline import TextPipeline
from runtime.gil import giving_way
from runtime.messages.media import AlignmentFacts, Media, MediaValues


class SoundAlignment:
    """Prepares a sound once more and has the ranks of a replica look at it."""

    def __init__(self, text: TextPipeline, replicas: Replicas) -> None:
        self._text, self._replicas = text, replicas

    async def align(
        self, sound: Media, token_ids: list[int], num_given: int, facts: AlignmentFacts
    ) -> np.ndarray:
        """See Controls.align_sound."""
        assert self._text.media is not None, "a model that transcribes takes sounds"
        (prepared,) = await run_sync(giving_way, partial(self._text.media.prepare, [sound]))
        media = MediaValues(
            id=0,
            values=prepared.values.ravel(),
            shape=prepared.values.shape,
            grid=prepared.grid,
            num_rows=len(prepared.positions),
        )
        ids, positions = np.array(token_ids, np.int32), facts.num_positions(len(sound.values))
        return await self._replicas.align(media, ids, num_given, positions, facts)
