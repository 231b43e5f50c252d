"""Makes drafts of the rows of a plan that have none, and follows what the target computes.

    propose   before the target's forward: entries that are pending, which give the first draft of a row, then
              a pass for each further draft
    follow    behind it: entries of what prompts and decodes have computed. Of verify rows only tokens and
              states are kept: their entries are made when drafts are proposed again

A draft is sampled as the target will sample the token at its place: with the same parameters and the same
random number. So a draft model of the target's own distribution is always right, at any temperature.
Penalties, biases, grammars and the like change the target's logits only.

Entries of drafts that are rejected are overwritten before anything attends to them. Wrong or missing entries
cost accepted drafts, and change no token.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import Device, ForwardBatch, PageLoads
from runtime.devices.decoder_spec import Forwarded
from runtime.devices.facts import DeviceFacts
from runtime.devices.operands import LogitsOps
from runtime.layers.sampling.sampler import clean, host_uniform
from runtime.layers.upload import upload, upload_int64
from runtime.messages.speculation import Speculation
from runtime.messages.steps import Admit, Samples, StepPlan
from runtime.ranks.drafting.draft_states import DraftStates
from runtime.ranks.drafting.head_network import HeadsInTurn
from runtime.ranks.drafting.network import Computed, Network
from runtime.ranks.drafting.own_rows import Drafted, OwnRows, own_rows, with_trees
from runtime.ranks.drafting.pending import Pending
from runtime.ranks.drafting.ragged import Ragged
from runtime.ranks.drafting.trees import Trees
from runtime.ranks.sample_rows import SampleRows
from runtime.ranks.sampled import Sampled
from runtime.ranks.slots import Slots

NO_PLACES = np.empty(0, np.int64)


def has_trees(speculation: Speculation, facts: DeviceFacts) -> bool:
    """Whether drafts of a draft model are trees: chains where attention takes no trees."""
    return speculation.topk > 1 and facts.has_tree_attention


class DraftRunner:
    """The draft model of one rank, over the slots and pages of its target."""

    def __init__(
        self,
        device: Device,
        network: Network,
        slots: Slots,
        kv: list[tuple[Tensor, ...]],
        page_size: int,
        speculation: Speculation,
        dtype: torch.dtype,
        logits_ops: LogitsOps,
        recurrent: DraftStates | None = None,
    ) -> None:
        """`kv`: keys and values of the draft model's layers; `dtype`: of hidden states; `recurrent`: states
        of its recurrent layers, None: it has none."""
        self.device = device
        self._network: Network | None = network
        self.slots = slots
        self.kv = kv
        self.page_size = page_size
        self.logits_ops = logits_ops
        self.recurrent = recurrent
        self.is_host = device.torch_device.type == "cpu"  # the host knows at once what the device computes
        self.branches = speculation.topk if has_trees(speculation, device.facts) else 1
        self.num_levels = speculation.num_steps
        depth = speculation.max_drafts + 1
        self.pending = Pending(
            slots.padding + 1, depth, network.num_remade, network.width, dtype, device.torch_device
        )

    @property
    def network(self) -> Network:
        """The draft model. There is none while weights are released."""
        assert self._network is not None, "a draft while the weights are released"
        return self._network

    @network.setter
    def network(self, network: Network | None) -> None:
        """Replaces the draft model, or with None drops it."""
        self._network = network

    def release_pages(self) -> None:
        """Drops the caches of its layers."""
        if self._network is not None:
            self._network.forget()
        self.kv.clear()
        if self.recurrent is not None:
            self.recurrent.memory.release()

    def admit(self, admits: list[Admit]) -> None:
        """Slots are taken by other sequences, whose cached pages have entries."""
        slots, lengths = [admit.slot for admit in admits], [admit.length for admit in admits]
        self.pending.admit(np.array(slots, np.int64), np.array(lengths, np.int64))
        if self.recurrent is not None and slots:
            self.recurrent.admit(slots)

    # ── before the target's forward ───────────────────────────────────────────────────────────────────────

    def propose(
        self, plan: StepPlan, starts: np.ndarray, loads: PageLoads | None, first_layer: int
    ) -> tuple[StepPlan, Drafted | None]:
        """Makes the drafts that a plan leaves to the ranks. -> the plan with them, or where the host does not
        know them yet, the plan as it is and the drafts.

        `starts`, int64 [R]: the length of each row's slot; `loads`: pages on their way from host memory, in
        which this model's layers come from `first_layer` on.
        """
        rows = own_rows(plan)
        if rows is None:
            return plan, None
        if loads is not None:
            for index in range(len(self.kv)):
                loads.wait(first_layer + index)
        slots = plan.slots[rows.rows]
        if self.branches > 1:
            trees = Trees(self, rows, slots, starts[rows.rows])
            return with_trees(plan, rows, *trees.grown(self.num_levels, self.branches)), None
        drafted = Drafted(rows, rows.picked(self.chains(rows, slots, starts[rows.rows])))
        if self.is_host or self.slots.contextual.intersection(slots.tolist()):
            return drafted.known(plan), None
        return plan, drafted

    def chains(self, rows: OwnRows, slots: np.ndarray, starts: np.ndarray) -> Tensor:
        """A chain of drafts for each of `V` rows, int64 [V, any]; of a row those count that it is to have."""
        if isinstance(self.network, HeadsInTurn):
            return chains_in_turn(self, self.network, slots, starts)
        at = starts - self.network.shift  # the entry that gives the first draft
        found: Computed | None
        found, tokens, _ = self.catch_up(slots, starts)
        is_made_again = self.network.shift > 0 or self.recurrent is not None  # what drafts give, if accepted
        self.pending.reached(slots, at + (1 if is_made_again else rows.counts))
        if self.recurrent is not None:
            self.recurrent.look_ahead(slots[rows.counts > 1])
        drafts = torch.empty(len(slots), int(rows.counts.max()), dtype=torch.int64, device=tokens.device)
        active = np.arange(len(slots))
        for depth in range(drafts.shape[1]):
            assert found is not None, "it samples"
            tokens = self.sampled(found.logits, slots[active], starts[active] + depth + 1)
            tokens = tokens if self.network.ids is None else self.network.ids[tokens]
            drafts[upload_int64(active, tokens.device), depth] = tokens
            goes_on = np.flatnonzero(rows.counts[active] > depth + 1)
            if not len(goes_on):
                break
            active, index = active[goes_on], upload_int64(goes_on, tokens.device)
            found = self.compute(
                slots[active],
                at[active] + depth + 1,
                np.ones(len(active), np.int64),
                tokens[index],
                None if found.states is None else found.states[index],
                np.arange(len(active)),
                is_ahead=True,
            )
        return drafts

    def catch_up(self, slots: np.ndarray, starts: np.ndarray) -> tuple[Computed, Tensor, Tensor]:
        """Makes pending entries. -> what the last one of each slot gives, and the token and the state that it
        is made of"""
        end = starts - self.network.shift + 1
        counts = self.pending.counts(slots, end, 1)
        tokens, states = self.pending.taken(slots, counts)
        last = counts.cumsum() - 1
        found = self.compute(slots, end - counts, counts, tokens, states, last)
        assert found is not None, "it samples"
        index = upload_int64(last, tokens.device)
        return found, tokens[index], states[index]

    def sampled(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> Tensor:
        """A token of the draft model for each row of logits, int64 [N], as the target samples it at position
        `lengths`; the same on all ranks with these slots."""
        collectives, torch_device = self.device.group_ranks, self.device.torch_device
        if collectives.rank:
            return collectives.broadcast(torch.empty(len(slots), dtype=torch.int64, device=torch_device))
        if self.logits_ops.needs_finite:
            clean(logits)
        inputs = None
        if self.slots.needs.is_random[slots].any():
            inputs = self.slots.sampling_inputs(
                upload_int64(slots, torch_device),
                upload(host_uniform(self.slots.seeds[slots], lengths), torch_device),
                *self.slots.needs.filters(slots),
            )
        return collectives.broadcast(self.logits_ops.choose(logits, inputs))

    # ── behind it ─────────────────────────────────────────────────────────────────────────────────────────

    def before(self, plan: StepPlan) -> tuple[np.ndarray, Tensor]:
        """What `follow` must know of a captured step and is gone behind it: lengths and last tokens."""
        index = upload_int64(plan.slots, self.device.torch_device)
        return self.slots.lengths.starts(plan.slots), self.slots.last_token[index]

    def follow(
        self, plan: StepPlan, starts: np.ndarray, token_ids: Tensor, forwarded: Forwarded, sampled: Sampled
    ) -> None:
        """Takes in a step that the target has computed of `token_ids`, int64 [T]. `starts`: as for `propose`;
        slots have moved on."""
        given = self.network.given(forwarded)
        is_plain = plan.samples != int(Samples.ALL)
        if is_plain.any():
            self.extend(plan, starts, token_ids, given, np.flatnonzero(is_plain))
        if sampled.rows is not None and sampled.rows.drafts is not None:
            verified = sampled.rows.rows[sampled.rows.verified]
            self.flush(plan.slots[verified], starts[verified])
            self.keep(plan.slots[verified], given, sampled, sampled.rows)

    def extend(
        self, plan: StepPlan, starts: np.ndarray, token_ids: Tensor, hidden: Tensor, rows: np.ndarray
    ) -> None:
        """Makes entries of what rows without drafts have computed, as far as the tokens of these are known,
        and of what was pending before them."""
        shift, torch_device = self.network.shift, self.device.torch_device
        counts = plan.counts.astype(np.int64)
        begins = (counts.cumsum() - counts)[rows]
        slots, counts, starts = plan.slots[rows], counts[rows], starts[rows]
        before = self.pending.counts(slots, starts - shift + 1, 1 - shift)
        # a row's first token is the last pending one; without any it has no entry where states are needed
        totals = counts + before - 1
        index = Ragged(totals)
        is_before = index.column < (before - 1)[index.row]
        tokens = torch.empty(len(index.row), dtype=torch.int64, device=torch_device)
        states = None
        kept_tokens, kept_states = self.pending.taken(slots, before)
        if is_before.any():
            kept = Ragged(before)
            is_kept = kept.column < (before - 1)[kept.row]
            places = upload_int64(np.flatnonzero(is_before), torch_device)
            tokens[places] = kept_tokens[upload_int64(np.flatnonzero(is_kept), torch_device)]
        own = np.flatnonzero(~is_before)
        source = begins[index.row[own]] + index.column[own] - before[index.row[own]] + 1
        tokens[upload_int64(own, torch_device)] = token_ids[upload_int64(source, torch_device)]
        if shift:
            states = torch.empty(
                len(tokens), self.network.width, dtype=kept_states.dtype, device=torch_device
            )
            is_kept = index.column < before[index.row]
            states[upload_int64(np.flatnonzero(is_kept), torch_device)] = kept_states
            if len(own := np.flatnonzero(~is_kept)):
                source = begins[index.row[own]] + index.column[own] - before[index.row[own]]
                given = hidden[upload_int64(source, torch_device)]
                states[upload_int64(own, torch_device)] = self.network.states_of(given).to(states.dtype)
        has_entries = totals > 0
        if has_entries.any():
            first = starts - shift + 1 - before
            self.compute(
                slots[has_entries], first[has_entries], totals[has_entries], tokens, states, NO_PLACES
            )
        last = None
        if shift:
            last = self.network.states_of(hidden[upload_int64(begins + counts - 1, torch_device)])
        self.pending.put_before(slots, totals, tokens, states)
        self.pending.put_last(slots, self.slots.last_token[upload_int64(slots, torch_device)], last)
        self.pending.reached(slots, starts + counts - shift)

    def flush(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """Makes entries of what is pending in rows that verify drafts of others: there is room for one step's
        tokens."""
        ends = starts - self.network.shift + 1
        counts = self.pending.counts(slots, ends, 0)
        slots, ends, counts = (each[counts > 0] for each in (slots, ends, counts))
        if len(slots):
            self.compute(slots, ends - counts, counts, *self.pending.taken(slots, counts), NO_PLACES)
            self.pending.reached(slots, ends)

    def keep(self, slots: np.ndarray, hidden: Tensor, sampled: Sampled, rows: SampleRows) -> None:
        """Keeps the last tokens that verify rows have brought, and the states of those before them."""
        assert rows.drafts is not None and sampled.num_accepted is not None, "verify rows have drafts"
        torch_device = self.device.torch_device
        column = self.pending.columns(sampled.num_accepted)
        node = column.clamp_min(0)
        node = node if sampled.path is None else sampled.path.gather(1, node)
        place = upload_int64(rows.drafts.first, torch_device).unsqueeze(1) + node
        states = None
        if self.network.shift:
            given = hidden[upload_int64(rows.places, torch_device)[place.flatten()]]
            states = self.network.states_of(given).view(*place.shape, -1)
        self.pending.append(slots, column, sampled.tokens[place], states)

    # ── a pass ────────────────────────────────────────────────────────────────────────────────────────────

    def compute(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        tokens: Tensor,
        states: Tensor | None,
        samples: np.ndarray,
        depths: np.ndarray | None = None,
        parents: dict[int, np.ndarray] | None = None,
        *,
        is_ahead: bool = False,
    ) -> Computed | None:
        """Makes `counts` entries from `starts` on for each slot. `depths`, int64 [T], and `parents`
        (AttentionRows): of rows that are trees; `is_ahead`: of drafts, which may be rejected."""
        batch = self.batch(slots, starts, counts, tokens)
        if self.recurrent is not None:
            batch = replace(batch, states=self.recurrent.rows(slots, counts, is_ahead=is_ahead))
        if parents is not None and depths is not None:
            rows = AttentionRows(0, slots, starts, counts.astype(np.int32), parents)
            tables = self.slots.page_tables[:1]
            batch = replace(
                batch,
                positions=rotary_positions(self, slots, counts, np.repeat(starts, counts) + depths),
                attention=self.device.ops.plan_attention(rows, tables, self.page_size, self.network.windows),
                is_decode=False,
            )
        return self.network.compute(batch, states if self.network.shift else None, samples)

    def batch(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, tokens: Tensor
    ) -> ForwardBatch:
        """The pass as the layers see it: all of them have the pages of the first pool."""
        index = Ragged(counts)
        is_decode = bool((counts == 1).all())
        torch_device, tables = self.device.torch_device, self.slots.page_tables[:1]
        host_places = starts[index.row] + index.column
        places = upload_int64(host_places, torch_device)
        token_slots = upload_int64(slots[index.row], torch_device)
        pages = tables[:, token_slots, places // self.page_size].long()
        locations = (pages * self.page_size + places % self.page_size).unbind()
        positions = places
        if self.network.has_token_grids and self.slots.grids.has_any:
            positions = rotary_positions(self, slots, counts, host_places)
        rows = AttentionRows(
            len(slots) if is_decode else 0, slots, starts.astype(np.int64), counts.astype(np.int32)
        )
        plan = self.device.ops.plan_attention(rows, tables, self.page_size, self.network.windows)
        return ForwardBatch(tokens, positions, locations, self.kv, plan, is_decode=is_decode)


def rotary_positions(
    runner: DraftRunner, slots: np.ndarray, counts: np.ndarray, places: np.ndarray
) -> Tensor:
    """Positions of entries at `places`, int64 [T], of which each slot has `counts` in turn: int64 [T], or
    [T, 3] where some are of tokens in grids and the draft model rotates by these."""
    if runner.network.has_token_grids and runner.slots.grids.has_any:
        places = runner.slots.grids.positions(slots, counts, places)
    return upload_int64(places.ravel(), runner.device.torch_device).view(places.shape)


def chains_in_turn(
    runner: DraftRunner, network: HeadsInTurn, slots: np.ndarray, starts: np.ndarray
) -> Tensor:
    """A draft of each head for each of `V` slots, int64 [V, heads], whose lengths are `starts`."""
    counts = runner.pending.counts(slots, starts, 1)
    tokens, states = runner.pending.taken(slots, counts)
    batch = runner.batch(slots, starts - counts, counts, tokens)
    runner.pending.reached(slots, starts)
    return network.drafts(
        batch,
        states,
        counts.cumsum() - 1,
        lambda logits, number: runner.sampled(logits, slots, starts + number + 1),
    )
