"""The inputs of a step's forward: its tokens, their positions and places in the cache, and attention's
rows."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import AttentionPlan, Device, ForwardBatch, PageLoads
from runtime.devices.cross_batch import CrossBatch
from runtime.layers.attention.bidirectional import plan_bidirectional
from runtime.layers.parallel.context_parallel import TokenPart
from runtime.layers.sampling.verify import Accepted
from runtime.layers.upload import Packed, PackedUpload, upload, upload_int64
from runtime.messages.steps import StepPlan
from runtime.ranks import side_by_side
from runtime.ranks.drafting.own_rows import Drafted
from runtime.ranks.encoded_media import EncodedMedia
from runtime.ranks.group_rows import GroupRows
from runtime.ranks.host_slots import HostSlots
from runtime.ranks.prompt_parts import open_part
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.sample_rows import tree_parents
from runtime.ranks.slots import Slots
from runtime.ranks.two_batches import can_cut, in_two, num_first


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Where a step's tokens come from, on the way to the device."""

    slots: Packed  # int64 [n]: rows that begin with their slot's last token
    given: Packed | None  # int64 [m], tokens of the plan; None: it has none
    last_at: Packed | None = None  # int64 [n], where last tokens stand in the step; None: in front
    given_at: Packed | None = None  # int64 [m], where those of the plan stand


@dataclass(frozen=True, slots=True)
class PackedPlaces:
    """The slots and positions of a step's tokens, on the way to the device."""

    slots: Packed  # int64 [T]
    positions: Packed  # int64 [T]

    def locations(self, slots: Slots, page_size: int) -> tuple[Tensor, ...]:
        """Where these tokens are in the cache, int64 [T] for each pool."""
        if slots.host is not None:
            return slots.host.locations(self.slots.array, self.positions.array, page_size)
        tables, positions = slots.page_tables, self.positions.tensor
        pages = tables[:, self.slots.tensor, positions // page_size].long()
        return (pages * page_size + positions % page_size).unbind()


class StepInputs:
    """Makes the batch of a step that is launched kernel by kernel. Reads nothing from the device."""

    def __init__(
        self,
        device: Device,
        slots: Slots,
        kv: list[tuple[Tensor, ...]],
        page_size: int,
        windows: tuple[int, ...],
        states: RecurrentStates | None = None,
        media: EncodedMedia | None = None,
        sees_whole_images: bool = False,
    ) -> None:
        """`kv`: keys and values of each layer, empty without attention over pages; `windows`: the layers'
        sliding windows; `states`: of recurrent layers, None without them; `media`: encodings, None for a
        model of text alone; `sees_whole_images`: the tokens of an image attend to all of them."""
        self.device = device
        self.media = media
        self.sees_whole_images = sees_whole_images
        self.slots = slots
        self.kv = kv
        self.page_size = page_size
        self.windows = windows
        self.states = states

    def batch(
        self,
        plan: StepPlan,
        starts: np.ndarray,
        page_loads: PageLoads | None,
        drafted: Drafted | None = None,
        groups: GroupRows | None = None,
        upload: PackedUpload | None = None,
    ) -> ForwardBatch:
        """`starts`, int64 [R]: the length of each row's slot before the step; `drafted`: in place of drafts
        that the plan leaves to the ranks; `groups`: what the step has of attention groups, None: one;
        `upload`: what else travels with the step."""
        upload = upload or PackedUpload(self.device.torch_device)
        is_decode = plan.num_decodes == len(plan.slots)
        host = self.slots.host
        if is_decode and host is not None and self.kv:
            return self._decode_batch(plan, starts, page_loads, host, groups)
        counts = plan.counts.astype(np.int64)
        begins = counts.cumsum() - counts
        host_positions = starts if is_decode else _positions(starts, begins, counts)
        sent_tokens = self.pack_tokens(plan, begins, upload)
        if self.states is not None and not self.kv:  # no layer has attention
            sent = upload.int64(host_positions)
            token_ids = self.token_ids(sent_tokens, drafted)
            batch = ForwardBatch(token_ids, sent.tensor, (), self.kv, None, embeds=self.embeds(plan))
            batch = replace(batch, is_decode=is_decode, states=self.states.rows(plan))
            rows = self._rows(plan, starts, begins, None)
            return self._with_attention(batch, rows, len(plan.slots), groups)
        if not self.kv:  # an encoder
            second_at = self.slots.second_at[plan.slots].repeat(counts)
            types = upload.int64((second_at > 0) & (host_positions >= second_at))
            sent = upload.int64(host_positions)
            return ForwardBatch(
                self.token_ids(sent_tokens, drafted),
                sent.tensor,
                (),
                self.kv,
                plan_bidirectional(counts, upload.torch_device),
                types.tensor,
                page_loads,
                self.embeds(plan),
            )
        places = PackedPlaces(upload.int64(np.repeat(plan.slots, counts)), upload.int64(host_positions))
        trees = tree_parents(plan) or None
        of_rotary = host_positions
        if trees:
            assert self.device.facts.has_tree_attention, f"{self.device.facts.name} attends to no trees"
            of_rotary = _tree_positions(host_positions, begins, trees)
        if self.slots.grids.has_any:
            of_rotary = self.slots.grids.positions(plan.slots, counts, of_rotary)
        rotary = places.positions if of_rotary is host_positions else upload.int64(of_rotary)
        rows = self._rows(plan, starts, begins, trees)
        rows = replace(rows, packed=upload.add(rows.stacked()))
        upload.send()
        positions, token_ids = rotary.tensor, self.token_ids(sent_tokens, drafted)
        locations = places.locations(self.slots, self.page_size)
        batch = ForwardBatch(
            token_ids,
            positions,
            locations,
            self.kv,
            None,
            page_loads=page_loads,
            embeds=self.embeds(plan),
            is_decode=is_decode,
            states=None if self.states is None else self.states.rows(plan),
            cross=self.cross(plan),
        )
        return self._with_attention(batch, rows, plan.num_decodes + plan.num_verifies, groups)

    def _rows(
        self, plan: StepPlan, starts: np.ndarray, begins: np.ndarray, trees: dict[int, np.ndarray] | None
    ) -> AttentionRows:
        """The step's rows, whose tokens begin at `begins` in it and at `starts` in their slots, int64 [R]."""
        spans = image_spans(plan, begins) if self.sees_whole_images else None
        size = 0 if plan.blocks is None else plan.blocks.size
        return AttentionRows(
            plan.num_decodes, plan.slots, starts, plan.counts, trees, spans=spans, block_size=size
        )

    def part_of(self, rows: AttentionRows, num_whole: int) -> tuple[TokenPart | None, AttentionRows]:
        """This rank's part of a step where ranks share prompts, and its rows; else None, and all rows. The
        first `num_whole` rows are in all parts."""
        split, attention = self.device.prompt_split, self.device.attention
        if split is None or attention is None or num_whole == len(rows.slots):
            return None, rows
        opened = open_part(attention.parts, split, rows, num_whole, self.device.torch_device)
        return opened or (None, rows)

    def _decode_batch(
        self,
        plan: StepPlan,
        starts: np.ndarray,
        page_loads: PageLoads | None,
        host: HostSlots,
        groups: GroupRows | None,
    ) -> ForwardBatch:
        """`batch` of rows that all decode, where the host computes."""
        rows = AttentionRows(plan.num_decodes, plan.slots, starts, plan.counts)
        batch = ForwardBatch(
            host.last_tokens(plan.slots),
            torch.from_numpy(self.slots.grids.shifted(plan.slots, starts)),
            host.locations(plan.slots, starts, self.page_size),
            self.kv,
            None,
            page_loads=page_loads,
            embeds=self.embeds(plan),
            is_decode=True,
            states=None if self.states is None else self.states.rows(plan),
            cross=self.cross(plan),
        )
        return self._with_attention(batch, rows, len(plan.slots), groups)

    def cross(self, plan: StepPlan) -> CrossBatch | None:
        """What layers that attend to sounds need; None: the model has none."""
        if self.slots.cross is None:
            return None
        new = None if plan.media is None or self.media is None else self.media.rows(plan.media)
        return self.slots.cross.batch(plan, new)

    def _with_attention(
        self, batch: ForwardBatch, rows: AttentionRows, num_whole: int, groups: GroupRows | None
    ) -> ForwardBatch:
        """The batch with its plan of attention, or as two micro-batches with theirs. `num_whole`: see
        `part_of`."""
        overlap, first = self.device.overlap, 0
        if groups is not None:
            first = groups.first_on(self.device)
        elif self.device.partitions is not None and can_cut(batch, rows):
            first = side_by_side.num_first(rows.counts, num_whole)
        elif overlap.two_batches and can_cut(batch, rows):
            first = num_first(rows.counts, overlap.threshold)
        if first:
            batch = in_two(batch, rows, num_whole, first, self._plan_halves)
        else:
            part, own = self.part_of(rows, num_whole)
            batch = replace(batch, part=part, attention=self._plan_attention(own))
        return batch if groups is None else groups.put_into(batch, self.device)

    def _plan_halves(
        self, halves: tuple[AttentionRows, ...], num_whole: tuple[int, ...]
    ) -> list[tuple[TokenPart | None, AttentionPlan | None]]:
        """Parts and plans of attention of two micro-batches. Either both are divided into parts or none is,
        because both must call the same collectives."""
        found = [self.part_of(rows, count) for rows, count in zip(halves, num_whole, strict=True)]
        if any(part is None for part, _ in found):
            found = [(None, rows) for rows in halves]
        return [(part, self._plan_attention(rows)) for part, rows in found]

    def _plan_attention(self, rows: AttentionRows) -> AttentionPlan | None:
        """None: no layer has attention over pages."""
        if not self.kv:
            return None
        return self.device.ops.plan_attention(rows, self.slots.page_tables, self.page_size, self.windows)

    def pack_tokens(self, plan: StepPlan, begins: np.ndarray, upload: PackedUpload) -> "PackedTokens":
        """What `token_ids` reads; a row's first token stands at `begins`, int64 [R]."""
        num_from_slots = plan.num_decodes + plan.num_verifies
        slots, given = upload.int64(plan.slots[:num_from_slots]), upload.int64(plan.token_ids)
        if not len(plan.token_ids) or not plan.num_verifies:
            return PackedTokens(slots, given if len(plan.token_ids) else None)
        is_given = np.ones(num_from_slots + len(plan.token_ids), bool)
        is_given[begins[:num_from_slots]] = False
        return PackedTokens(
            slots, given, upload.int64(begins[:num_from_slots]), upload.int64(np.flatnonzero(is_given))
        )

    def token_ids(self, packed: "PackedTokens", drafted: Drafted | None = None) -> Tensor:
        """int64 [T]: last tokens of slots, drafts and tokens of the plan."""
        last = self.slots.last_token.index_select(0, packed.slots.tensor)
        if packed.given is None:
            return last
        given = packed.given.tensor
        if drafted is not None:
            drafted.put(given)
        if packed.last_at is None or packed.given_at is None:
            return torch.cat((last, given))
        token_ids = torch.empty(len(last) + len(given), dtype=torch.int64, device=last.device)
        token_ids[packed.last_at.tensor] = last
        token_ids[packed.given_at.tensor] = given
        return token_ids

    def embeds(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Places of tokens whose embeddings the plan gives or that take rows of encodings, int64 [E], and
        these, [E, hidden]."""
        if plan.media is not None and self.media is not None and self.slots.cross is None:
            return self.media.rows(plan.media)
        if plan.embed_places is None or plan.embeds is None:
            return None
        rows = upload(plan.embeds.copy(), self.device.torch_device)  # a ring's arrays may be read-only
        return upload_int64(plan.embed_places, self.device.torch_device), rows.view(
            len(plan.embed_places), -1
        )

    def keep_paths(self, pools: list[int], slots: np.ndarray, starts: np.ndarray, accepted: Accepted) -> None:
        """Moves the keys and values of accepted paths of trees to consecutive positions from `starts` on.
        `pools`: of each layer, which page table is its own."""
        assert accepted.path is not None, "a chain's are consecutive"
        torch_device = self.device.torch_device
        nodes = torch.arange(accepted.path.shape[1], device=torch_device)
        is_kept = (nodes > 0) & (nodes < accepted.num.unsqueeze(1))
        begin, index = (
            upload_int64(starts, torch_device).unsqueeze(1),
            upload_int64(slots, torch_device).unsqueeze(1),
        )
        copies = []
        for table in self.slots.page_tables:
            source, target = (
                table[index, at // self.page_size].long() * self.page_size + at % self.page_size
                for at in (
                    (begin + place).clamp_max(table.shape[1] * self.page_size - 1)
                    for place in (accepted.path, nodes)
                )
            )
            # what is not moved stands for the padding page
            copies.append([torch.where(is_kept, at, 0).flatten() for at in (source, target)])
        for pair, pool in zip(self.kv, pools, strict=True):
            source, target = copies[pool]
            for cache in pair:
                raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
                raw.index_copy_(0, target, raw.index_select(0, source))


def _positions(starts: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Positions of all tokens in their sequences, int64 [T]."""
    positions = np.repeat(starts - begins, counts)
    positions += np.arange(len(positions))
    return positions


def image_spans(plan: StepPlan, begins: np.ndarray) -> dict[int, np.ndarray] | None:
    """`AttentionRows.spans` of a step: each image whose rows it takes, as far as the step computes it, which
    is to its end (scheduling/encodings.py). `begins`, int64 [R]: the first token of each row."""
    if plan.media is None:
        return None
    ends = plan.media.counts.astype(np.int64).cumsum()
    firsts, lasts = plan.media.places[ends - plan.media.counts], plan.media.places[ends - 1]
    rows = np.searchsorted(begins, firsts, side="right") - 1
    spans = np.stack((firsts, lasts + 1), axis=1) - begins[rows, None]
    return {row: spans[rows == row] for row in set(rows.tolist())}


def _tree_positions(positions: np.ndarray, begins: np.ndarray, trees: dict[int, np.ndarray]) -> np.ndarray:
    """Positions of tokens in their sequences, where the nodes of a tree stand at their depths: int64 [T]."""
    positions = positions.copy()
    for row, parents in trees.items():
        begin = begins[row]
        for node, parent in enumerate(parents.tolist()):
            if node:
                positions[begin + node] = positions[begin + parent] + 1
    return positions
