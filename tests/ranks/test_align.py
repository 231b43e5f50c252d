"""Which encoding of a sound its transcription is brought in line with."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.messages.media import AlignSound, Encode, MediaValues
from runtime.models.vision.slices import Slices
from runtime.models.whisper import Whisper
from runtime.ranks import align as module
from runtime.ranks.encoded_media import EncodedMedia

CPU = torch.device("cpu")


class Encoder:
    """Counts what it encodes: sounds of two positions of four numbers."""

    num_encoded = 0

    def slices(self, media: list[MediaValues]) -> Slices[list[torch.Tensor]]:
        self.num_encoded += len(media)
        yield 1.0
        return [torch.full((1, 8), float(one.values[0])) for one in media]


def command(id: int) -> AlignSound:
    sound = MediaValues(id=id, values=np.ones(6, np.float32), shape=(2, 3), grid=(1, 1, 1), num_rows=1)
    ids = np.array([5, 6], np.int32)
    return AlignSound(
        id=3, media=sound, token_ids=ids, num_given=1, num_positions=2, heads=[(0, 0)], filter_width=1
    )


def test_a_sound_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded again only where its encoding is not there any more."""
    monkeypatch.setattr(module, "alignment", lambda model, ranks, ids, sound, heads, **_: sound)
    model: Any = Whisper.__new__(Whisper)
    model.media_encoder, model.hidden_size = (encoder := Encoder()), 4
    device: Any = SimpleNamespace(scatters_tokens=False, head_ranks=None, torch_device=CPU)
    kept = EncodedMedia(CPU)
    kept.encode(Encode(dropped=[], media=[command(7).media]), encoder)  # type: ignore[arg-type]
    first = module.align(device, model, kept, command(7))
    assert encoder.num_encoded == 1 and first.rows.tolist() == [1.0] * 8 and first.num_rows == 2
    for rows, id in ((kept, -1), (None, 7)):
        assert module.align(device, model, rows, command(id)).rows.tolist() == first.rows.tolist()
    kept.encode(Encode(dropped=[7], media=[]), encoder)  # type: ignore[arg-type]
    module.align(device, model, kept, command(7))
    assert encoder.num_encoded == 4
