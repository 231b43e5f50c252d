"""A sequence: the tokens of one answer, and how far they are computed."""

from array import array
from typing import TYPE_CHECKING

from runtime.cache.media_keys import cache_ids
from runtime.messages.requests import NO_SOURCES, Request

if TYPE_CHECKING:
    from runtime.cache.block import Block
    from runtime.cache.node import Node
    from runtime.cache.states import SequenceState
    from runtime.cache.window import WindowSpan


class Sequence:
    """One of a request's `n` answers: prompt and generated tokens, and the pages that hold their keys and
    values.

    Invariant: 0 <= cached_len <= computed_len <= len(tokens) + in_flight and len(tokens) <= max_len.

    [0, cached_len)             came from the prefix cache when the sequence was last admitted
    [cached_len, computed_len)  keys and values written by steps that were submitted since
    [computed_len, len(tokens)) known tokens still to be computed
    in_flight                   tokens that submitted steps bring at least, not known here yet
    drafting                    tokens that they may bring beyond these, if drafts are accepted
    """

    __slots__ = (
        "id",
        "request",
        "index",
        "tokens",
        "prompt_len",
        "max_len",
        "cached_len",
        "computed_len",
        "in_flight",
        "pages",
        "slot",
        "node",
        "first_cached_len",
        "loaded_len",
        "is_finished",
        "stop_ids",
        "level",
        "match",
        "window",
        "state",
        "fetched_len",
        "first_sources",
        "drafting",
        "forced",
        "forced_at",
        "unfollowed",
        "draft_from",
        "sampled_at",
        "num_encoded",
        "encode_s",
        "block_size",
        "block",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        index: int,
        max_len: int,
        stop_ids: frozenset[int],
        block_size: int = 1,
    ) -> None:
        self.id = id
        self.request = request
        self.index = index
        self.tokens = cache_ids(request)  # media keys among them, in place of placeholders
        self.prompt_len = len(request.prompt_ids)
        self.max_len = max_len
        self.stop_ids = stop_ids  # the model's eos among them, unless ignored
        self.cached_len = 0
        self.computed_len = 0
        self.in_flight = 0
        self.drafting = 0
        self.forced: list[int] = []  # tokens that its grammar forces, from position `forced_at` on
        self.forced_at = 0
        self.draft_from = 0  # position of its last token from which on a drafter wants to be asked
        self.sampled_at = 0  # the latest step that samples a token of it, where steps share sequences out
        self.unfollowed = 0  # tokens of its pages that the draft model of the ranks has not computed
        self.pages: list[int] = []
        self.slot = -1
        self.node: Node | None = None  # deepest locked node of the prefix tree, while it runs
        self.window: WindowSpan | None = None  # its window pages, while it runs
        self.state: SequenceState | None = None  # its state slots, while it runs
        self.loaded_len = 0  # of cached_len: came back from host memory
        self.fetched_len = 0  # tokens whose pages were fetched from storage while it waited
        self.first_sources = NO_SOURCES  # at the first admission
        self.first_cached_len = -1  # cached tokens at the first admission; what usage reports
        self.num_encoded = 0  # encodings that were made for it
        self.encode_s = 0.0  # seconds of the encoder on these
        self.is_finished = False
        self.block_size = block_size  # tokens that a diffusion model fills in together; 1: another model
        self.block: Block | None = None  # the one behind `extend_len`; None: not begun
        # the lower, the sooner it is taken and the later it gives way: from the priority, or from ageing
        self.level = 0
        self.match: Node | None = (
            None  # deepest node that matched its tokens at the last look, while it waits
        )

    @property
    def num_generated(self) -> int:
        """Tokens that were generated so far."""
        return len(self.tokens) - self.prompt_len

    def text_ids(self, start: int, stop: int) -> "array[int]":
        """Tokens [start, stop), with placeholders where `tokens` has media keys: ids of the vocabulary."""
        if not self.request.media or start >= self.prompt_len:
            return self.tokens[start:stop]
        prompt = array("i", self.request.prompt_ids[start : min(stop, self.prompt_len)])
        return prompt + self.tokens[self.prompt_len : stop]

    @property
    def extend_len(self) -> int:
        """Known tokens whose keys and values are final once they are computed: those of whole blocks."""
        known = len(self.tokens)
        return known - known % self.block_size

    @property
    def is_decoding(self) -> bool:
        """Whether a submitted step has computed the prompt, so that its first own token exists or is in
        flight."""
        return len(self.tokens) + self.in_flight > self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt were requested and are not reported yet."""
        return self.request.params.prompt_logprobs is not None and len(self.tokens) == self.prompt_len

    @property
    def wants_prompt_hidden(self) -> bool:
        """Hidden states of the whole prompt: asked for, and not given yet."""
        return self.request.params.hidden_states == "all" and len(self.tokens) == self.prompt_len

    @property
    def wants_prompt_experts(self) -> bool:
        """Routed experts of the whole prompt: asked for, and not given yet."""
        return self.request.params.routed_experts is not None and len(self.tokens) == self.prompt_len

    @property
    def is_whole(self) -> bool:
        """Whether the whole prompt must be computed, whatever is cached: the client wants the logits,
        hidden states or experts of each token."""
        return self.wants_prompt_logprobs or self.wants_prompt_hidden or self.wants_prompt_experts
