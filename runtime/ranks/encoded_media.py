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
from runtime.models.vision.slices import Slices, finish

BATCH_VALUES = 1 << 23  # most numbers that are encoded together: 24 images of 336 x 336


class Begun:
    """An encoding that is made over several commands."""

    def __init__(self, num_rows: int, slices: Slices[list[Tensor]] | None) -> None:
        """`slices`: what makes it; None: another rank does."""
        self.num_rows = num_rows
        self.rows: Tensor | None = None  # [num_rows, hidden] when it is made
        self._slices = slices
        self._done = 0.0  # part of the whole

    def advance(self, until: float) -> None:
        """Computes until this part of the whole is done, or all of it; layers are not divided."""
        while self._slices is not None and (self._done < until or until >= 1):
            try:
                self._done = next(self._slices)
            except StopIteration as end:
                (self.rows,) = end.value
                self._slices = None


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
        self._begun: dict[int, Begun] = {}  # encodings that are not complete, by id

    def encode(self, command: Encode, encoder: MediaEncoder) -> None:
        """Drops what the command says, encodes what it brings, and goes on with what was begun before. Does
        nothing where the command is for another group."""
        if command.group != self._group:
            return
        for id in command.dropped:
            self._rows.pop(id, None)
            self._begun.pop(id, None)
        whole = [one for one in command.media if one.id not in command.until]
        self._begin([one for one in command.media if one.id in command.until], encoder)
        done = self._advance(command.until)
        if self._ranks is None:
            own = encoded(whole, encoder)
        else:
            own = encoded(whole[self._ranks.rank :: self._ranks.size], encoder)
        own |= {id: one.rows for id, one in done.items() if one.rows is not None}
        if self._ranks is not None and (whole or done):
            sizes = {one.id: one.num_rows for one in whole} | {id: one.num_rows for id, one in done.items()}
            own = self._exchanged(sizes, own, encoder, self._ranks)
        self._rows |= own

    def _begin(self, media: Sequence[MediaValues], encoder: MediaEncoder) -> None:
        """Encodings that are made over several commands begin. Where ranks share the work the first one makes
        them, whose time is measured."""
        is_maker = self._ranks is None or self._ranks.rank == 0
        for one in media:
            self._begun[one.id] = Begun(one.num_rows, encoder.slices([one]) if is_maker else None)

    def _advance(self, until: dict[int, float]) -> dict[int, Begun]:
        """Brings encodings this far. -> those that are complete"""
        for id, part in until.items():
            self._begun[id].advance(part)
        return {id: self._begun.pop(id) for id, part in until.items() if part >= 1}

    def find(self, id: int) -> Tensor | None:
        """The rows of an encoding; None: they are not kept."""
        return self._rows.get(id)

    def _exchanged(
        self, sizes: dict[int, int], own: dict[int, Tensor], encoder: MediaEncoder, ranks: Collectives
    ) -> dict[int, Tensor]:
        """The rows of all encodings with their numbers of rows, of which each rank has made some (`own`): the
        sum of tables with zeros for the rest."""
        table = torch.zeros(
            sum(sizes.values()), encoder.output_size, dtype=encoder.dtype, device=self._torch_device
        )
        parts = dict(zip(sizes, table.split(list(sizes.values())), strict=True))
        for id, rows in own.items():
            parts[id].copy_(rows)
        whole = ranks.all_reduce(table).split(list(sizes.values()))
        return {id: rows.clone() for id, rows in zip(sizes, whole, strict=True)}

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
        for one, rows in zip(batch, finish(encoder.slices(batch)), strict=True)
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
