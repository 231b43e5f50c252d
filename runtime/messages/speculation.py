"""What scheduler and ranks must know of speculative decoding."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

MAX_CAPTURED_TOKENS = 512  # of a verify step that is a graph; larger ones are computed longer than launched

Algorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"]


class Ngram(Struct, frozen=True, kw_only=True, array_like=True):
    """How drafts are found in past text; lengths in tokens."""

    min_window: int = 1  # shortest end of a sequence that is looked up
    max_window: int = 12  # longest
    min_breadth: int = 1  # branches of a draft, at least and at most
    max_breadth: int = 10
    match_type: Literal["BFS", "PROB"] = "BFS"  # branches by recency, or by frequency
    branch_length: int = 18  # longest continuation that a lookup finds
    capacity: int = 10_000_000  # tokens that are remembered


class DraftModel(Struct, frozen=True, kw_only=True, array_like=True):
    """The model that makes drafts on the ranks; None: as the target model's."""

    path: str | None = None  # None: layers of the target model's checkpoint
    load_format: str | None = None
    quantization: str | None = None  # "unquant": none, whatever the target's is
    config_file: str | None = None  # read in place of config.json
    token_map: str | None = None
    is_multi_layer: bool = False


class Speculation(Struct, frozen=True, kw_only=True, array_like=True):
    """Speculative decoding in force."""

    algorithm: Algorithm
    num_steps: int  # passes of the draft model for one draft
    topk: int  # branches at each position
    num_draft_tokens: int  # that a step verifies of a sequence, its last token among them
    ngram: Ngram = Ngram()
    draft_model: DraftModel = DraftModel()
    accept_single: float = 1.0  # a draft of at least this probability is accepted; 1.0: exact
    accept_acc: float = 1.0  # probabilities of drafts are divided by it; 1.0: exact

    @property
    def max_drafts(self) -> int:
        """Drafts of a verify row, at most."""
        return self.num_draft_tokens - 1

    def captured_widths(self, size: int) -> tuple[int, ...]:
        """Query tokens of a row for which steps of `size` rows are captured, rising: the most that a row may
        have, half of it, a quarter ... With a draft model also 1, as that follows decode rows too."""
        widths, width = set[int](), self.num_draft_tokens
        while width > 1:
            widths.add(width)
            width = (width + 1) // 2 if width > 2 else 1
        if not any(size * width <= MAX_CAPTURED_TOKENS for width in widths):
            return ()
        if self.is_own:
            widths.add(1)
        return tuple(sorted(width for width in widths if size * width <= MAX_CAPTURED_TOKENS))

    def captured_sizes(self, sizes: Iterable[int]) -> list[int]:
        """Those of the `sizes`, numbers of rows, for which steps that verify are captured."""
        return [size for size in sizes if self.captured_widths(size)]

    @property
    def is_own(self) -> bool:
        """Whether the ranks make the drafts."""
        return self.algorithm != "NGRAM"

    @property
    def ends_in_target(self) -> bool:
        """Whether the draft model's logits may be of the target's head."""
        return self.has_heads and self.algorithm != "EAGLE3"

    @property
    def has_heads(self) -> bool:
        """Whether heads make the drafts, which continue the model's hidden states and share its embedding."""
        return self.is_own and self.algorithm != "STANDALONE"
