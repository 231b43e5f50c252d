"""Prompts whose tokens all see each other (PaliGemma): an image and the text behind it are one file.

transformers' processor writes the image, the token that begins texts, the text and a newline. All of these
take rows, and the digest is of all of them, so that pages are shared by equal prompts alone.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from runtime.messages.media import MediaInput, MediaKind
from runtime.messages.packed_arrays import pack, unpack
from runtime.models.config.transformers_media import TransformersEncoder
from runtime.text.media_prompts import Prepared
from runtime.text.transformers_processor import TransformersProcessor, placeholders
from runtime.text.vocabulary import Vocabulary

NEWLINE = "\n"


class PrefixProcessor(TransformersProcessor):
    """See TransformersProcessor, and WritesPrompts."""

    def __init__(
        self,
        folder: Path,
        texts: Mapping[MediaKind, str],
        ids: Mapping[MediaKind, int],
        row_id: int,
        vocabulary: Vocabulary,
    ) -> None:
        """`row_id`: the token of an image's rows."""
        super().__init__(folder, texts, ids)
        self._row_id, self._bos_id = row_id, vocabulary.bos_id
        self._newline = vocabulary.encode(NEWLINE, add_special=False)

    def written(
        self, prompt_ids: list[int], prepared: Sequence[Prepared]
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """See WritesPrompts. There are as many placeholders as images."""
        begin = [] if self._bos_id is None else [self._bos_id]
        ids: list[int] = []
        images = iter(prepared)
        pending = len(prepared)
        for place, token in enumerate(prompt_ids):
            if token == self.placeholder_ids[MediaKind.IMAGE]:
                ids += [id for id in next(images).token_ids if id == self._row_id]
                pending -= 1
                ids += [] if pending else begin
            elif place or token != self._bos_id:
                ids.append(token)
        ids += self._newline
        pixels = np.concatenate([unpack(one.values)["pixel_values"] for one in prepared])
        packed = pack({"input_ids": np.array(ids, np.int64), "pixel_values": pixels})
        whole = MediaInput(
            kind=MediaKind.IMAGE,
            digest=sha256(packed).digest(),
            start=0,
            positions=np.arange(len(ids), dtype=np.int32),
            values=np.frombuffer(packed, np.float32),
        )
        return ids, (whole,)


def open_transformers_media(
    folder: Path, encoder: TransformersEncoder, vocabulary: Vocabulary
) -> TransformersProcessor:
    """What prepares the images and sounds of a model that transformers computes. Raises ModelError where no
    token stands for them."""
    texts, ids = placeholders(folder, encoder, vocabulary)
    if not encoder.is_prompt_wide:
        return TransformersProcessor(folder, texts, ids, has_token_grids=encoder.has_token_grids)
    row_id = dict(encoder.row_ids)[MediaKind.IMAGE]
    return PrefixProcessor(folder, texts, ids, row_id, vocabulary)
