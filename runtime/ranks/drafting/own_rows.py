"""Rows of a plan whose drafts the ranks make themselves, and what they have made."""

from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from torch import Tensor

from runtime.layers.sampling.verify import DraftRows
from runtime.layers.upload import upload_int64
from runtime.messages.steps import OWN_DRAFT, Samples, StepPlan
from runtime.ranks.sample_rows import SampleRows


@dataclass(frozen=True, slots=True)
class OwnRows:
    """`V` verify rows with `D` own drafts in all, at least one in each."""

    rows: np.ndarray  # int64 [V]: of the plan
    counts: np.ndarray  # int64 [V]: drafts of each
    places: np.ndarray  # int64 [D]: where these stand among the plan's token_ids, row after row

    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [D]: of each draft its row among the V, and its place among the row's drafts."""
        begins = self.counts.cumsum() - self.counts
        return np.repeat(np.arange(len(self.rows)), self.counts), np.arange(len(self.places)) - np.repeat(
            begins, self.counts
        )

    def picked(self, chains: Tensor) -> Tensor:
        """int64 [D]: of chains [V, any] the drafts that each row is to have, row after row."""
        own, place = self.cells()
        return chains[upload_int64(own, chains.device), upload_int64(place, chains.device)]


def own_rows(plan: StepPlan) -> OwnRows | None:
    """None: the ranks make no drafts in this step."""
    if not plan.num_verifies:
        return None
    verifies = np.arange(plan.num_decodes, plan.num_decodes + plan.num_verifies)
    counts = plan.counts[verifies].astype(np.int64) - 1
    begins = counts.cumsum() - counts
    is_own = (plan.samples[verifies] == int(Samples.ALL)) & (plan.token_ids[begins] == OWN_DRAFT)
    if not is_own.any():
        return None
    places = np.flatnonzero(np.repeat(is_own, counts))
    return OwnRows(verifies[is_own], counts[is_own], places)


def with_trees(plan: StepPlan, rows: OwnRows, tokens: np.ndarray, parents: np.ndarray) -> StepPlan:
    """The plan with trees of drafts, int32 [D]; rows of other drafts keep theirs."""
    token_ids = plan.token_ids.copy()
    token_ids[rows.places] = tokens
    if plan.draft_parents is not None:
        draft_parents = plan.draft_parents.copy()
    else:  # chains
        counts = plan.counts[plan.num_decodes : plan.num_decodes + plan.num_verifies].astype(np.int64) - 1
        begins = counts.cumsum() - counts
        draft_parents = (np.arange(counts.sum()) - np.repeat(begins, counts)).astype(np.int32)
    draft_parents[rows.places] = parents
    return structs.replace(plan, token_ids=token_ids, draft_parents=draft_parents)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Chains of drafts, on the device."""

    rows: OwnRows
    tokens: Tensor  # int64 [D]

    def known(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts in it. Waits for them."""
        token_ids = plan.token_ids.copy()
        token_ids[self.rows.places] = self.tokens.cpu().numpy()
        return structs.replace(plan, token_ids=token_ids)

    def put(self, token_ids: Tensor) -> None:
        """Writes them over the token ids of a plan, int64 on the device."""
        token_ids[upload_int64(self.rows.places, token_ids.device)] = self.tokens

    def put_rows(self, rows: SampleRows) -> SampleRows:
        """Sample rows in which the drafts are known to the device."""
        drafts = rows.drafts
        assert drafts is not None, "own drafts are sampled after"
        return replace(rows, drafts=replace(drafts, on_device=self._tokens_of(drafts, rows)))

    def _tokens_of(self, drafts: DraftRows, rows: SampleRows) -> Tensor:
        tokens = upload_int64(drafts.tokens, self.tokens.device)
        index = np.searchsorted(rows.rows[rows.verified], self.rows.rows)
        own, node = self.rows.cells()
        places = [upload_int64(each, self.tokens.device) for each in (index[own], node + 1)]
        return tokens.index_put((places[0], places[1]), self.tokens)
