"""A step while it is planned, and what is remembered of it until its result comes."""

from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.scheduling.drafts import Verified
from runtime.scheduling.encode_costs import MadePart
from runtime.scheduling.hidden_states import Part
from runtime.scheduling.logprobs import PromptPart
from runtime.scheduling.step_costs import Work

MAX_EMBEDS = 1 << 21  # numbers of prompts' embeddings in one step: 8 MiB, of which each rank takes a copy


class Flight(Struct, frozen=True):
    """What is remembered of a submitted step."""

    step: int
    computed: list[Sequence]  # of each row
    sampled: list[Sequence]  # of each row that samples
    prompt_parts: dict[int, PromptPart]  # by slot
    work: Work | None  # where its time is of interest
    shown: list[Part] = []  # hidden states that it brings, in row order
    routed: list[Part] = []  # the same of routed experts
    verified: list[Verified] = []
    num_drafts: int | None = None  # to be verified, in a step of nothing else; None: other steps
    encoded: list[MadePart] = []  # what is made before it of encodings of images, videos and sounds

    @property
    def concerned(self) -> list[Sequence]:
        """The sequences for which ranks do anything in this step."""
        return self.computed + [one.sequence for one in self.encoded]


class Fill(Struct):
    """The known tokens of one step while they are handed out: `left` of all, `long_left` of them for long
    prompts."""

    left: int
    long_left: int
    rows: dict[int, tuple[Sequence, int]]  # by sequence id: with the row's first position, in row order
    embeds_left: int = MAX_EMBEDS
