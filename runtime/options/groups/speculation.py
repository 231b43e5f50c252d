"""Speculative decoding: drafts that the model verifies several tokens at a time."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Amount, Auto, Count, Group, on_device, planned
from runtime.options.groups.experts import MoeExchange, MoeRunner
from runtime.options.groups.model import LoadFormat
from runtime.options.groups.precision import Quantization


class Speculation(Group, frozen=True, kw_only=True):
    """Speculative decoding"""

    speculative_algorithm: A[
        Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"] | None, planned("How drafts are made.")
    ] = None
    speculative_draft_model_path: A[
        str | None, planned("Folder of the draft model.", aliases=("--speculative-draft-model",))
    ] = None
    speculative_draft_model_revision: A[str | None, planned("Branch, tag or commit of the draft model.")] = (
        None
    )
    speculative_draft_load_format: A[
        LoadFormat | None, planned("Where the draft model's weights come from.")
    ] = None
    speculative_num_steps: A[Count | Auto, planned("Forward passes of the draft model for one draft.")] = (
        "auto"
    )
    speculative_eagle_topk: A[Count | Auto, planned("Branches that a draft takes at each position.")] = "auto"
    speculative_num_draft_tokens: A[
        Count | Auto, planned("Tokens of a draft that the model verifies at once.")
    ] = "auto"
    speculative_accept_threshold_single: A[
        Amount, on_device("cuda", "Accept a draft token whose probability is at least this.")
    ] = 1.0
    speculative_accept_threshold_acc: A[
        Amount, on_device("cuda", "Raise the probability of acceptance to at least this.")
    ] = 1.0
    speculative_token_map: A[str | None, planned("Smaller vocabulary of the draft model.")] = None
    speculative_attention_mode: A[
        Literal["prefill", "decode"],
        planned("Whether verification uses the kernels of prompts or of decodes."),
    ] = "prefill"
    speculative_draft_attention_backend: A[str, planned("Kernels of attention in the draft model.")] = "auto"
    speculative_moe_runner_backend: A[MoeRunner | Auto, planned("Kernels of experts in the draft model.")] = (
        "auto"
    )
    speculative_moe_a2a_backend: A[
        MoeExchange | Auto, planned("Exchange of tokens between experts in the draft model.")
    ] = "auto"
    speculative_draft_model_quantization: A[
        Quantization | Literal["unquant"] | None, planned("Format of the draft model's quantized weights.")
    ] = None
    speculative_ngram_min_match_window_size: A[
        Count, planned("Shortest text that an n-gram draft must match.")
    ] = 1
    speculative_ngram_max_match_window_size: A[
        Count, planned("Longest text that an n-gram draft tries to match.")
    ] = 12
    speculative_ngram_min_bfs_breadth: A[Count, planned("Fewest branches of an n-gram draft.")] = 1
    speculative_ngram_max_bfs_breadth: A[Count, planned("Most branches of an n-gram draft.")] = 10
    speculative_ngram_match_type: A[
        Literal["BFS", "PROB"], planned("Choose branches by recency or by frequency.")
    ] = "BFS"
    speculative_ngram_branch_length: A[Count, planned("Longest branch that is remembered.")] = 18
    speculative_ngram_capacity: A[Count, planned("Tokens that the n-gram memory holds.")] = 10_000_000
    enable_multi_layer_eagle: A[bool, planned("Draft with several prediction layers.")] = False
