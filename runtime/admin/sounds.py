"""Sounds of transcriptions: loaded, and brought in line with what was said of them."""

import numpy as np
from msgspec import structs

from runtime.actors.replicas import Replicas
from runtime.actors.text_pipeline import TextPipeline
from runtime.messages.media import AlignmentFacts, AlignSound, Media, MediaValues

NOT_KEPT = -1  # names no encoding


class Sounds:
    """The SoundControls protocol (service.py)."""

    def __init__(self, text: TextPipeline, replicas: Replicas) -> None:
        self._text, self._replicas = text, replicas
        self.load = text.load

    async def align(
        self, sound: Media, token_ids: list[int], num_given: int, facts: AlignmentFacts, tenant: str
    ) -> np.ndarray:
        """See SoundControls.align. The sound is prepared and encoded once more only where what was made of it
        for the transcription has been dropped."""
        num_positions = facts.num_positions(len(sound.values))
        prepared = await self._text.prepare(sound, tenant)
        media = MediaValues(
            id=NOT_KEPT,
            values=prepared.values.ravel(),
            shape=prepared.values.shape,
            grid=prepared.grid,
            num_rows=len(prepared.positions),
        )
        command = AlignSound(
            id=0,  # given where it is sent
            media=media,
            token_ids=np.array(token_ids, np.int32),
            num_given=num_given,
            num_positions=num_positions,
            heads=list(facts.heads),
            filter_width=facts.filter_width,
        )
        namespace = self._text.namespace_of(tenant)
        for replica in self._replicas:
            encodings = None if replica.scheduler is None else replica.scheduler.planner.encodings
            if encodings is not None and (id := encodings.find(namespace, prepared.digest)) is not None:
                command = structs.replace(command, media=structs.replace(media, id=id))
                return await replica.commands.encode(command)
        return await self._replicas.encode(command)
