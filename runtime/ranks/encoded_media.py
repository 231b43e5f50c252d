"""Encodings of images, videos and sounds on a rank: made by Encode, and read by the steps that follow."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from runtime.devices.base import Collectives, Device
from runtime.layers.upload import upload_int64
from runtime.messages.media import Encode, MediaRows, MediaValues
from runtime.models.base import Model
from runtime.models.vision.open_encoder import MediaEncoder

BATCH_VALUES = 1 << 23  # most numbers that are encoded together: 24 images of 336 x 336


class EncodedMedia:
    """The rows that are kept on the device, by the ids of their encodings. The scheduler counts them
    (scheduling/encodings.py)."""

    def __init__(
        self, torch_device: torch.device, ranks: Collectives | None = None, *, group: int = 0
    ) -> None:
        """`ranks`: each encodes a share of what a command brings; None: this one encodes everything. `group`:
        the attention group of this rank."""
        self._torch_device, self._ranks, self._group = torch_device, ranks, group
        self._rows: dict[int, Tensor] = {}  # each [rows, hidden]

    def encode(self, command: Encode, encoder: MediaEncoder) -> None:
        """Drops what the command says, and encodes what it brings, if it is for this rank's group."""
        if command.group != self._group:
            return
        for id in command.dropped:
            self._rows.pop(id, None)
        if self._ranks is None:
            self._rows |= encoded(command.media, encoder)
        elif command.media:
            own = encoded(command.media[self._ranks.rank :: self._ranks.size], encoder)
            self._rows |= self._exchanged(command.media, own, encoder, self._ranks)

    def find(self, id: int) -> Tensor | None:
        """The rows of an encoding; None: they are not kept."""
        return self._rows.get(id)

    def _exchanged(
        self, media: Sequence[MediaValues], own: dict[int, Tensor], encoder: MediaEncoder, ranks: Collectives
    ) -> dict[int, Tensor]:
        """The rows of all `media`, of which each rank has made some: the sum of tables with zeros for the
        rest."""
        table = torch.zeros(
            sum(one.num_rows for one in media),
            encoder.output_size,
            dtype=encoder.dtype,
            device=self._torch_device,
        )
        parts = dict(
            zip([one.id for one in media], table.split([one.num_rows for one in media]), strict=True)
        )
        for id, rows in own.items():
            parts[id].copy_(rows)
        whole = ranks.all_reduce(table).split([one.num_rows for one in media])
        return {one.id: rows.clone() for one, rows in zip(media, whole, strict=True)}

    def rows(self, media: MediaRows) -> tuple[Tensor, Tensor]:
        """Places of the step's tokens that take rows, int64 [E], and these rows, [E, hidden]."""
        parts = [
            self._rows[id].narrow(0, begin, count)
            for id, begin, count in zip(
                media.ids.tolist(), media.begins.tolist(), media.counts.tolist(), strict=True
            )
        ]
        return upload_int64(media.places, self._torch_device), torch.cat(parts)


def encoded(media: Sequence[MediaValues], encoder: MediaEncoder) -> dict[int, Tensor]:
    """The rows of images by the ids of their encodings."""
    return {
        one.id: rows
        for batch in batches(media)
        for one, rows in zip(batch, encoder.encode(batch), strict=True)
    }


def open_media(device: Device, model: Model, *, shares: bool) -> EncodedMedia | None:
    """Where a rank keeps encodings; None: its model has no encoder. `shares`: each rank encodes a share."""
    if encoder_of(model) is None:
        return None
    ranks = device.group_ranks if shares and device.group_ranks.size > 1 else None
    group = device.attention.index if device.attention is not None and device.has_groups else 0
    return EncodedMedia(device.torch_device, ranks, group=group)


def encoder_of(model: Model) -> MediaEncoder | None:
    """The encoder of a model; None: it takes text alone, or another stage of a pipeline encodes."""
    encoder: MediaEncoder | None = getattr(model, "media_encoder", None)
    return encoder


def sees_whole_images(model: Model) -> bool:
    """Whether the tokens of an image attend to all of them."""
    found: bool = getattr(model, "sees_whole_images", False)
    return found


def batches(media: Sequence[MediaValues]) -> list[list[MediaValues]]:
    """What is encoded together: neighbours of one shape, up to BATCH_VALUES numbers."""
    found: list[list[MediaValues]] = []
    for (shape, _), same in groupby(media, key=lambda one: (one.shape, one.grid)):
        size = 1
        for length in shape:
            size *= length
        most, members = max(BATCH_VALUES // size, 1), list(same)
        found += [members[at : at + most] for at in range(0, len(members), most)]
    return found
