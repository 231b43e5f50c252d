"""Encodings that a rank makes in slices: equal to the bit to those that are made at once."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.cpu.device import open_device
from runtime.layers.weight import named_weights
from runtime.messages.media import Encode, MediaRows, MediaValues
from runtime.models.vision.open_encoder import MediaEncoder, open_encoder
from runtime.models.vision.slices import finish
from runtime.ranks.encoded_media import EncodedMedia
from tests.devices.drive import start_rank
from tests.models.towers import MORE_TOWERS, TOWERS

CPU = torch.device("cpu")
ALL = TOWERS | MORE_TOWERS
LAYERS = 2  # of each tower at least


def opened(name: str) -> tuple[MediaEncoder, list[MediaValues], list[torch.Tensor]]:
    """An encoder with random weights, two files that it takes, and their rows."""
    config, shape, grid = ALL[name]
    encoder = open_encoder(open_device(start_rank(""), 0, torch.float32), torch.float32, config)
    torch.manual_seed(0)
    for _, weight in named_weights(encoder):  # type: ignore[arg-type]
        weight.tensor.normal_(0, 0.2)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape, dtype=np.float32).ravel() for _ in range(2)]
    media = [
        MediaValues(id=i, values=one, shape=shape, grid=grid, num_rows=0) for i, one in enumerate(values)
    ]
    with torch.inference_mode():
        rows = [finish(encoder.slices([one]))[0] for one in media]
    assert not torch.equal(*rows) and rows[0].isfinite().all()
    found = [
        MediaValues(id=i, values=one, shape=shape, grid=grid, num_rows=len(rows[i]))
        for i, one in enumerate(values)
    ]
    return encoder, found, rows


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", ALL)
def test_every_tower_stops_behind_each_layer(name: str) -> None:
    """What is done grows up to the whole, and what comes of it does not depend on what runs in between."""
    encoder, media, rows = opened(name)
    slices, done = encoder.slices([media[0]]), [0.0]
    while True:
        try:
            done.append(next(slices))
        except StopIteration as end:
            (found,) = end.value
            break
        assert torch.equal(finish(encoder.slices([media[1]]))[0], rows[1])
    assert torch.equal(found, rows[0])
    assert len(done) > LAYERS and done == sorted(set(done)) and done[-1] == pytest.approx(1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("parts", [1, 3, 64])
def test_a_rank_makes_the_same_rows_in_slices(name: str, parts: int) -> None:
    encoder, media, rows = opened(name)
    kept = EncodedMedia(CPU)
    for index in range(parts):
        until = {0: (index + 1) / parts}
        assert kept.find(0) is None
        # another file comes on the way, and is made at once
        kept.encode(
            Encode(dropped=[1] if index else [], media=media if index == 0 else media[1:], until=until),
            encoder,
        )
        other = kept.find(1)
        assert other is not None and torch.equal(other, rows[1])
    count = np.array([len(rows[0])], np.int32)
    _, found = kept.rows(
        MediaRows(np.arange(count[0], dtype=np.int32), np.zeros(1, np.int32), 0 * count, count)
    )
    assert torch.equal(found, rows[0])


class Ranks:
    """Collectives of one of two ranks, which record what it brings."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.own: list[torch.Tensor] = []

    def all_reduce(self, table: torch.Tensor) -> torch.Tensor:
        self.own.append(table.clone())
        return table


def test_ranks_that_share_the_work_take_the_same_slices() -> None:
    """The first rank makes what is made in slices; both take part in the same exchanges."""
    encoder, media, rows = opened("windows")
    commands = [
        Encode(dropped=[], media=media[:1], until={0: 0.4}),
        Encode(dropped=[], media=media[1:], until={0: 0.6}),
        Encode(dropped=[], media=[], until={0: 1.0}),
    ]
    ranks: list[Any] = [Ranks(0), Ranks(1)]
    for rank in ranks:
        kept = EncodedMedia(CPU, rank)
        for command in commands:
            kept.encode(command, encoder)
    assert [len(rank.own) for rank in ranks] == [2, 2]
    for place, index in enumerate((1, 0)):
        assert torch.equal(ranks[0].own[place] + ranks[1].own[place], rows[index])
    assert ranks[0].own[1].any() and not ranks[1].own[1].any()


def test_what_is_dropped_on_the_way_is_freed() -> None:
    encoder, media, _ = opened("clip")
    kept, held = EncodedMedia(CPU), []
    original = encoder.slices

    def watched(given: list[MediaValues]) -> Any:
        try:
            return (yield from original(given))
        except GeneratorExit:
            held.append("closed")
            raise

    encoder.slices = watched  # type: ignore[method-assign,assignment]
    kept.encode(Encode(dropped=[], media=media[:1], until={0: 0.5}), encoder)
    kept.encode(Encode(dropped=[0], media=[]), encoder)
    assert held == ["closed"] and kept.find(0) is None
