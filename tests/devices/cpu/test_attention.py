"""Attention by the kernels of every instruction set that this machine runs, against float64, and the same
bits whatever else a step has."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.kernels import library
from runtime.devices.cpu.kernels.levels import Level, supported_levels
from runtime.devices.cpu.latents import LatentAttention, PackedUp, pack_up
from runtime.devices.cpu.matrices import Threads
from runtime.devices.cpu.paged_attention import PagedAttention
from runtime.layers.attention.kv_dtype import store_as

BUILT = [level for level in supported_levels() if level.path.is_file()]
PAGE, LONGEST = 16, 1200
LENGTHS = (3, 700, 1100)  # tokens of the slots: less than a part of the keys, some parts
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Level:
    found: Level = request.param
    return found


def attention(level: Level, num_threads: int = 2) -> PagedAttention:
    return PagedAttention(Threads(library.Library(level), num_threads))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sequences:
    """Keys and values of the tokens of some slots, in pages that lie in no order. Their queries as well."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        pages = LONGEST // PAGE
        shape = (len(LENGTHS) * pages * PAGE + PAGE, kv_heads, dim)
        order = np.random.default_rng(3).permutation(len(LENGTHS) * pages) + 1
        self.tables = torch.from_numpy(order.reshape(1, len(LENGTHS), pages).astype(np.int32))
        # what no token has written is NaN: it may not be read
        self.keys, self.values = (torch.full(shape, torch.nan).to(dtype) for _ in range(2))
        self.queries = [random(length, heads, dim, seed=10 + i) for i, length in enumerate(LENGTHS)]
        for slot, length in enumerate(LENGTHS):
            for cache, seed in ((self.keys, 20 + slot), (self.values, 30 + slot)):
                store_as(random(length, kv_heads, dim, seed=seed), cache, self.locations(slot))

    def locations(self, slot: int) -> Tensor:
        """Where a slot's tokens are."""
        places = torch.arange(LENGTHS[slot])
        return self.tables[0, slot, places // PAGE].long() * PAGE + places % PAGE

    def attend(
        self, kernels: PagedAttention, scores: Scores, rows: Sequence[tuple[int, int, int]], block: int = 0
    ) -> list[Tensor]:
        """Results of rows (slot, first token, tokens) of one step."""
        slots, starts, counts = (np.array(column) for column in zip(*rows, strict=True))
        plan = AttentionRows(
            0, slots.astype(np.int32), starts.astype(np.int64), counts.astype(np.int32), block_size=block
        )
        step = CpuAttentionPlan(plan, self.tables, PAGE, (scores.window,), torch.float32)
        q = torch.cat([self.queries[slot][start : start + count] for slot, start, count in rows])
        assert kernels.takes(self.keys, step)
        return list(kernels.attend(q, self.keys, self.values, step, scores).split(counts.tolist()))

    def wanted(self, scores: Scores, slot: int, start: int, count: int, block: int = 1) -> Tensor:
        """Results of tokens of a slot, float64, by the definition."""
        keys, values = (
            cache.float()[self.locations(slot)].double().transpose(0, 1) for cache in (self.keys, self.values)
        )
        heads, kv_heads = self.queries[slot].shape[1], keys.shape[0]
        keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
        q = self.queries[slot][start : start + count].double().transpose(0, 1)
        products = torch.matmul(q, keys.transpose(1, 2)) * scores.scale
        if scores.cap:
            products = scores.cap * torch.tanh(products / scores.cap)
        distance = torch.arange(start, start + count)[:, None] - torch.arange(LENGTHS[slot])
        if scores.slopes is not None:
            products = products - scores.slopes.double()[:, None, None] * distance
        blocks = torch.arange(LENGTHS[slot]) // block
        hidden = blocks > blocks[start : start + count, None]
        if scores.window:
            hidden |= distance >= scores.window
        products = products.masked_fill(hidden, -torch.inf)
        if scores.sinks is not None:
            sinks = scores.sinks.double()[:, None, None].expand(heads, count, 1)
            products = torch.cat((products, sinks), 2)
        weights = products.softmax(2)[..., : LENGTHS[slot]]
        return torch.matmul(weights, values).transpose(0, 1)


def error_of(level: Level, dtype: torch.dtype) -> float:
    """The largest difference to allow: queries and weights meet bfloat16 caches in bfloat16 at some
    levels."""
    return 0.02 if dtype == torch.bfloat16 and level.name == "avx512_bf16" else 5e-6


SHAPES = [  # heads, heads of keys, numbers of a head, and what scores are made of
    (4, 2, 64, Scores(0.125)),
    (7, 1, 80, Scores(0.1, cap=5.0)),
    (6, 6, 20, Scores(0.2, window=300)),
    (4, 2, 72, Scores(0.1, window=7, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    (70, 1, 24, Scores(0.2)),
    (4, 4, 64, Scores(0.125, slopes=torch.tensor([0.25, 0.0625, 0.0, 0.003]))),
    (70, 2, 24, Scores(0.2, cap=8.0, slopes=torch.linspace(0.5, 0.001, 70))),
    (2, 1, 256, Scores(0.06, cap=20.0, window=500)),
    (2, 2, 576, Scores(0.04)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape[:3])))
def test_attention_is_its_definition(level: Level, shape: tuple[int, int, int, Scores]) -> None:
    """Prompts from their first token, or from a cached prefix, with decodes beside them."""
    *sizes, scores = shape
    steps = [(2, 1099, 1), (0, 0, 3), (1, 0, 40), (1, 490, 100), (2, 250, 9), (2, 767, 3)]
    for dtype in (torch.float32, torch.bfloat16):
        sequences = Sequences(*sizes, dtype)
        found = sequences.attend(attention(level), scores, steps)
        for (slot, start, count), got in zip(steps, found, strict=True):
            wanted = sequences.wanted(scores, slot, start, count)
            assert (got - wanted).abs().max() < error_of(level, dtype)


@pytest.mark.parametrize("block", [1, 4, 20])
def test_tokens_see_their_blocks(level: Level, block: int) -> None:
    """Rows of a diffusion model, across parts of the keys and tiles of queries, alone and together."""
    sequences, kernels = Sequences(4, 2, 64, torch.float32), attention(level)
    steps = [(2, 1080, 20), (1, 0, 240), (2, 500, 40), (1, 440, 200)]
    found = sequences.attend(kernels, Scores(0.125), steps, block)
    for (slot, start, count), got in zip(steps, found, strict=True):
        wanted = sequences.wanted(Scores(0.125), slot, start, count, block)
        assert (got - wanted).abs().max() < error_of(level, torch.float32)
        assert torch.equal(got, sequences.attend(kernels, Scores(0.125), [(slot, start, count)], block)[0])


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_caches_of_all_kinds(level: Level, dtype: torch.dtype) -> None:
    sequences, scores = Sequences(4, 2, 40, dtype), Scores(0.15)
    for slot, start, count in ((2, 1099, 1), (1, 600, 30)):
        (got,) = sequences.attend(attention(level), scores, [(slot, start, count)])
        wanted = sequences.wanted(scores, slot, start, count)
        assert (got - wanted).abs().max() < error_of(level, dtype)


@pytest.mark.parametrize("scores", [Scores(0.125), Scores(0.125, window=400)], ids=["full", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_bits_are_the_same_in_every_step(level: Level, dtype: torch.dtype, scores: Scores) -> None:
    """Alone, where parts of the keys are chunks of their own, and in company; with one thread and with three;
    a prompt cut anywhere, down to single tokens."""
    sequences = Sequences(6, 2, 48, dtype)
    one, two, many = attention(level, 1), attention(level, 2), attention(level, 3)
    whole = sequences.attend(one, scores, [(slot, 0, length) for slot, length in enumerate(LENGTHS)])
    for slot, cuts in ((2, (0, 1, 13, 256, 511, 900, 1099, 1100)), (1, (0, 300, 699, 700))):
        for begin, end in zip(cuts, cuts[1:], strict=False):
            row = (slot, begin, end - begin)
            for kernels in (one, two, many):
                assert torch.equal(sequences.attend(kernels, scores, [row])[0], whole[slot][begin:end])
            mixed = sequences.attend(two, scores, [(0, 2, 1), row, (1, 690, 1)])
            assert torch.equal(mixed[1], whole[slot][begin:end])
            assert torch.equal(mixed[0], whole[0][2:])


class LatentSequences(Sequences):
    """Latents and rotary keys of the tokens of some slots."""

    def __init__(self, heads: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.nope, self.rope, self.rank, self.value = sizes
        super().__init__(heads, 1, self.rank, torch.float32)
        self.latents, self.ropes = (
            torch.full((len(self.keys), 1, width), torch.nan).to(dtype) for width in (self.rank, self.rope)
        )
        for slot, length in enumerate(LENGTHS):
            for cache, seed in ((self.latents, 40 + slot), (self.ropes, 50 + slot)):
                store_as(random(length, 1, cache.shape[2], seed=seed), cache, self.locations(slot))
        self.queries = [
            random(length, heads, self.nope + self.rope, seed=60 + i) for i, length in enumerate(LENGTHS)
        ]
        self.up = random(heads, self.nope + self.value, self.rank, seed=70) / self.rank**0.5

    def attend_latents(
        self, kernels: LatentAttention, up: PackedUp, rows: Sequence[tuple[int, int, int]]
    ) -> list[Tensor]:
        """Results of rows (slot, first token, tokens) of one step."""
        slots, starts, counts = (np.array(column) for column in zip(*rows, strict=True))
        plan = AttentionRows(0, slots.astype(np.int32), starts.astype(np.int64), counts.astype(np.int32))
        step = CpuAttentionPlan(plan, self.tables, PAGE, (0,), torch.float32)
        q = torch.cat([self.queries[slot][start : start + count] for slot, start, count in rows])
        parts = q.split((self.nope, self.rope), 2)
        caches = self.latents, self.ropes
        assert kernels.takes(*caches, step)
        return list(kernels.attend(*parts, caches, up, step, 0.1).split(counts.tolist()))

    def wanted_latents(self, slot: int, start: int, count: int) -> Tensor:
        """Results of tokens of a slot, float64: keys and values are made from the latents."""
        places = self.locations(slot)
        latents, ropes = (x.float()[places, 0].double() for x in (self.latents, self.ropes))
        made = torch.einsum("hor,tr->hto", self.up.double(), latents)
        keys, values = made.split((self.nope, self.value), 2)
        keys = torch.cat((keys, ropes.expand(len(keys), -1, -1)), 2)
        q = self.queries[slot][start : start + count].double().transpose(0, 1)
        distance = torch.arange(start, start + count)[:, None] - torch.arange(LENGTHS[slot])
        products = torch.matmul(q, keys.transpose(1, 2)) * 0.1
        weights = products.masked_fill(distance < 0, -torch.inf).softmax(2)
        return torch.matmul(weights, values).transpose(0, 1)


@pytest.mark.parametrize(
    ("heads", "sizes"), [(4, (12, 8, 20, 40)), (70, (16, 8, 32, 16)), (3, (128, 64, 512, 128))], ids=str
)
def test_latent_attention_is_its_definition(
    level: Level, heads: int, sizes: tuple[int, int, int, int]
) -> None:
    """And the same bits alone, in company, with one thread and with more, and however a prompt is cut."""
    rows = [(2, 1099, 1), (0, 0, 3), (1, 640, 40)]
    for dtype in (torch.float32, torch.bfloat16):
        sequences = LatentSequences(heads, sizes, dtype)
        threads = [Threads(library.Library(level), count) for count in (1, 3)]
        up = pack_up(threads[0], sequences.up.to(dtype), sizes[0])
        one, many = (LatentAttention(each) for each in threads)
        found = sequences.attend_latents(one, up, rows)
        for (slot, start, count), got in zip(rows, found, strict=True):
            wanted = sequences.wanted_latents(slot, start, count)
            most = 1e-5 if dtype == torch.float32 else 0.02
            assert (got - wanted).abs().max() < most * wanted.abs().max()
        for kernels in (one, many):
            assert torch.equal(sequences.attend_latents(kernels, up, rows[:1])[0], found[0])
            parts = [sequences.attend_latents(kernels, up, [(1, *part)])[0] for part in ((640, 7), (647, 33))]
            assert torch.equal(torch.cat(parts), found[2])


def test_a_packed_projection_is_read_back(level: Level) -> None:
    """Trees of drafts are attended by torch, with the numbers that were packed."""
    up = random(3, 12 + 40, 20)
    found = pack_up(Threads(library.Library(level), 1), up, 12).unpacked(torch.float32)
    assert torch.equal(found.keys, up[:, :12])
    assert torch.equal(found.values, up[:, 12:].transpose(1, 2))
