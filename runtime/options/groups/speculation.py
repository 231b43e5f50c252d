"""Speculative decoding: drafts that the model verifies several tokens at a time."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.messages import speculation as messages
from runtime.options.declare import Auto, Count, Derived, Group, Value, option, superseded
from runtime.options.groups.experts import MoeExchange, MoeRunner
from runtime.options.groups.model import LoadFormat
from runtime.options.groups.precision import Quantization


class Speculation(Group, frozen=True, kw_only=True):
    """Speculative decoding"""

    speculative_algorithm: A[
        messages.Algorithm | None,
        option("How drafts are made; NGRAM looks them up in past text, the others take a draft model."),
    ] = None
    speculative_draft_model_path: A[
        str | None, option("Folder of the draft model.", aliases=("--speculative-draft-model",))
    ] = None
    speculative_draft_model_revision: A[
        str | None,
        superseded(
            "Branch, tag or commit of the draft model.",
            "The draft model is a folder of this machine, which has one revision.",
        ),
    ] = None
    speculative_draft_load_format: A[
        LoadFormat | None,
        option("Where the draft model's weights come from.", note="by default as --load-format"),
    ] = None
    speculative_num_steps: A[Count | Auto, option("Forward passes of the draft model for one draft.")] = (
        "auto"
    )
    speculative_eagle_topk: A[Count | Auto, option("Branches that a draft takes at each position.")] = "auto"
    speculative_num_draft_tokens: A[
        A[int, Meta(ge=1, le=256)] | Auto,
        option(
            "Tokens of a sequence that the model verifies at once, at most: its last one, and drafts.",
            note="fewer where they pay less; 1 is without drafts",
        ),
    ] = "auto"
    speculative_accept_threshold_single: A[
        A[float, Meta(ge=0, le=1)],
        option(
            "Accept a draft whose probability is at least this, also where it is not what is sampled.",
            note="below 1 answers at temperatures above 0 are others than without drafts",
        ),
    ] = 1.0
    speculative_accept_threshold_acc: A[
        A[float, Meta(gt=0, le=1)],
        option(
            "Accept a draft of probability p with the probability min(1, p / this).",
            note="below 1 answers at temperatures above 0 are others than without drafts",
        ),
    ] = 1.0
    speculative_token_map: A[
        str | None,
        option("File of the tokens that a head guesses, written by torch.save.", note="of EAGLE and NEXTN"),
    ] = None
    speculative_attention_mode: A[
        Literal["prefill", "decode"],
        superseded(
            "Whether verification uses the kernels of prompts or of decodes.",
            "Rows that verify drafts take the kernels of prompts, which know rows of several tokens.",
        ),
    ] = "prefill"
    speculative_draft_attention_backend: A[
        str, superseded("Kernels of attention in the draft model.", "It takes those of --attention-backend.")
    ] = "auto"
    speculative_moe_runner_backend: A[
        MoeRunner | Auto,
        superseded("Kernels of experts in the draft model.", "It takes those of --moe-runner-backend."),
    ] = "auto"
    speculative_moe_a2a_backend: A[
        MoeExchange | Auto,
        superseded(
            "Exchange of tokens between experts in the draft model.",
            "Its experts are split over the ranks, and all ranks have all of its tokens.",
        ),
    ] = "auto"
    speculative_draft_model_quantization: A[
        Quantization | Literal["unquant"] | None,
        option("Format of the draft model's quantized weights.", note="by default as its files say"),
    ] = None
    decrypted_draft_config_file: A[
        str | None,
        option(
            "File with the decrypted config.json of the draft model's encrypted checkpoint.",
            note="read in place of config.json; the weights must be readable as they are",
        ),
    ] = None
    speculative_ngram_min_match_window_size: A[
        Count, option("Shortest text that an n-gram draft must match.")
    ] = 1
    speculative_ngram_max_match_window_size: A[
        Count, option("Longest text that an n-gram draft tries to match.")
    ] = 12
    speculative_ngram_min_bfs_breadth: A[Count, option("Fewest branches of an n-gram draft.")] = 1
    speculative_ngram_max_bfs_breadth: A[Count, option("Most branches of an n-gram draft.")] = 10
    speculative_ngram_match_type: A[
        Literal["BFS", "PROB"], option("Choose branches by recency or by frequency.")
    ] = "BFS"
    speculative_ngram_branch_length: A[Count, option("Longest branch that is remembered.")] = 18
    speculative_ngram_capacity: A[Count, option("Tokens that the n-gram memory holds.")] = 10_000_000
    enable_multi_layer_eagle: A[
        bool,
        option(
            "Draft with several next-token layers of the model, of which each makes one draft of a chain.",
            note="of NEXTN; as many as --speculative-num-steps",
        ),
    ] = False


# why one might want to change the default
ADVICE = "NGRAM makes answers faster that repeat prompts or earlier answers: edits of code, quotes, JSON"


class SpeculationPlan(Speculation, frozen=True, kw_only=True):
    """Speculative decoding in force."""

    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int

    @property
    def notice(self) -> str | None:
        """What speculation does with these options, where there is some."""
        match self.speculative_algorithm:
            case None:
                return None
            case "NGRAM":
                how = "looked up in prompts and answers, of one tenant and adapter at a time"
            case _:
                how = "made by the draft model on the ranks"
        is_exact = self.speculative_accept_threshold_single == self.speculative_accept_threshold_acc == 1
        effect = (
            "none of it changes a token"
            if is_exact
            else "the acceptance thresholds change tokens at temperatures above 0, and which ones depends on "
            "the load"
        )
        return (
            f"up to {self.speculative_num_draft_tokens - 1} tokens of a sequence are guessed for a step, "
            f"{how}; fewer or none where they are not expected to pay, and {effect}"
        )

    @property
    def in_force(self) -> messages.Speculation | None:
        """What scheduler and ranks must know; None: no speculation."""
        if self.speculative_algorithm is None:
            return None
        return messages.Speculation(
            algorithm=self.speculative_algorithm,
            num_steps=self.speculative_num_steps,
            topk=self.speculative_eagle_topk,
            num_draft_tokens=self.speculative_num_draft_tokens,
            ngram=messages.Ngram(
                min_window=self.speculative_ngram_min_match_window_size,
                max_window=self.speculative_ngram_max_match_window_size,
                min_breadth=self.speculative_ngram_min_bfs_breadth,
                max_breadth=self.speculative_ngram_max_bfs_breadth,
                match_type=self.speculative_ngram_match_type,
                branch_length=self.speculative_ngram_branch_length,
                capacity=self.speculative_ngram_capacity,
            ),
            draft_model=messages.DraftModel(
                path=self.speculative_draft_model_path,
                load_format=self.speculative_draft_load_format,
                quantization=self.speculative_draft_model_quantization,
                config_file=self.decrypted_draft_config_file,
                token_map=self.speculative_token_map,
                is_multi_layer=self.enable_multi_layer_eagle,
            ),
            accept_single=self.speculative_accept_threshold_single,
            accept_acc=self.speculative_accept_threshold_acc,
        )


def own_checkpoints(model_path: str) -> dict[Value, Derived]:
    """Values of --speculative-draft-model-path that mean the layers in the model's own checkpoint."""
    none = Derived(None, "that is the model itself, whose next-token layers make the drafts")
    return dict.fromkeys((model_path, model_path.rstrip("/"), model_path.rstrip("/") + "/"), none)


def speculative_num_steps(algorithm: str | None, num_tokens: int | Auto) -> Derived:
    """Passes of a draft model; looking drafts up takes none."""
    if algorithm in (None, "NGRAM"):
        return Derived(0, "no draft model runs")
    if num_tokens != "auto":
        return Derived(num_tokens - 1, "that makes a chain of --speculative-num-draft-tokens")
    return Derived(3, "of three drafts in a chain most are accepted, of later ones few")


def speculative_eagle_topk(algorithm: str | None, ngram_breadth: int) -> Derived:
    """One branch: chains pay where a step computes many sequences."""
    if algorithm == "NGRAM":
        return Derived(ngram_breadth, "that is --speculative-ngram-max-bfs-breadth")
    return Derived(1, "a chain wastes least where many sequences share a step")


def speculative_num_draft_tokens(algorithm: str | None, num_steps: int, ngram_window: int) -> Derived:
    """The default of --speculative-num-draft-tokens: as many as are likely to be accepted at best."""
    if algorithm is None:
        return Derived(1, "there are no drafts")
    if algorithm == "NGRAM":
        return Derived(max(2, ngram_window), "that is --speculative-ngram-max-match-window-size")
    return Derived(num_steps + 1, "each pass of the draft model makes one draft, and one token comes after")
