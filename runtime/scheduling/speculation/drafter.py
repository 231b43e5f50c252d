"""Which drafter a server has."""

from runtime.messages.speculation import Speculation
from runtime.scheduling.drafts import Drafter
from runtime.scheduling.speculation.ngram import NgramDrafter
from runtime.scheduling.speculation.own import OwnDrafter


def open_drafter(speculation: Speculation | None, *, has_trees: bool = False) -> Drafter | None:
    """The drafter of `--speculative-algorithm`; None: only grammars have drafts. `has_trees`: the device
    attends to drafts that form trees."""
    if speculation is None or not speculation.max_drafts:
        return None
    if speculation.is_own:
        branches = speculation.topk if has_trees else 1
        return OwnDrafter(speculation.max_drafts, branches=branches, depth=speculation.num_steps)
    return NgramDrafter(speculation, has_trees=has_trees)
