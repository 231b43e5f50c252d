"""Which of the tokens that a step found for a block are put in their places (--dllm-algorithm).

Each algorithm is its settings, by the names of --dllm-algorithm-config, and a pure function of a block and of
what was sampled at its places. The mask is never sampled, so each step that has masks fills one at least.
"""

from collections.abc import Sequence
from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.cache.block import Block

Share = A[float, Meta(ge=0, le=1)]
BlockSize = A[int, Meta(ge=1, le=1024)]
MAX_EDIT_STEPS = 4096


def confident(masked: list[int], confidences: Sequence[float], threshold: float) -> list[int]:
    """The places of `masked` whose tokens are likelier than `threshold`; where none is, the likeliest one."""
    sure = [place for place in masked if confidences[place] > threshold]
    return sure or [max(masked, key=confidences.__getitem__)]


class LowConfidence(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Masks are filled in as soon as their tokens are likely enough, and stay."""

    threshold: Share = 0.95  # above which a token is put in its place
    block_size: BlockSize | None = None  # tokens of a block; None: the model's

    @property
    def repeat_penalty(self) -> float:
        """What the logit of the token before a place loses: nothing."""
        return 0.0

    def fill(self, block: Block, mask_id: int, found: Sequence[int], confidences: Sequence[float]) -> bool:
        """Puts tokens in their places. -> whether the block is complete"""
        masked = [place for place, token in enumerate(block.tokens) if token == mask_id]
        filled = confident(masked, confidences, self.threshold)
        for place in filled:
            block.tokens[place] = found[place]
        return len(filled) == len(masked)


class JointThreshold(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Masks are filled in as in LowConfidence, and tokens of the answer give way to likely other ones until
    none does, or for a number of steps behind the last mask."""

    threshold: Share = 0.5  # above which a mask becomes a token
    edit_threshold: Share = 0.0  # above which a token becomes another one
    max_post_edit_steps: A[int, Meta(ge=0, le=MAX_EDIT_STEPS)] = 16  # steps without a mask
    penalty_lambda: A[float, Meta(ge=0, le=1e4)] = 0.0  # taken from the logit of the token before a place
    block_size: BlockSize | None = None  # tokens of a block; None: the model's

    @property
    def repeat_penalty(self) -> float:
        """What the logit of the token before a place loses."""
        return self.penalty_lambda

    def fill(self, block: Block, mask_id: int, found: Sequence[int], confidences: Sequence[float]) -> bool:
        """Puts tokens in their places. -> whether the block is complete"""
        tokens = block.tokens
        masked = [place for place, token in enumerate(tokens) if token == mask_id]
        if not masked:
            block.num_edits += 1
            if block.num_edits > self.max_post_edit_steps:
                return True
        changed = confident(masked, confidences, self.threshold) if masked else []
        changed += [
            place
            for place in range(block.num_given, len(tokens))
            if tokens[place] not in (mask_id, found[place]) and confidences[place] > self.edit_threshold
        ]
        for place in changed:
            tokens[place] = found[place]
        return not changed


Algorithm = LowConfidence | JointThreshold
ALGORITHMS: dict[str, type[LowConfidence] | type[JointThreshold]] = {
    "LowConfidence": LowConfidence,
    "JointThreshold": JointThreshold,
}


class Diffusion(Struct, frozen=True, kw_only=True):
    """How the scheduler fills in the blocks of a diffusion model."""

    algorithm: Algorithm
    size: int  # tokens of a block
    mask_id: int
