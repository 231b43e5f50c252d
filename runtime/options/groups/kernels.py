"""Kernels of attention, sampling, grammars and matrix multiplication."""

from typing import Annotated as A
from typing import Literal, get_args

from msgspec import Meta

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.cuda.options import GEMV_ROWS, MOST_GEMV_ROWS
from runtime.devices.facts import DeviceFacts
from runtime.messages.prompt_split import PromptSplit
from runtime.options.declare import Amount, Auto, Count, Derived, Group, on_device, option, refused
from runtime.options.facts import MachineFacts, ModelFacts

FewRows = A[int, Meta(ge=0, le=MOST_GEMV_ROWS)]

AttentionBackend = Literal[
    "triton",
    "torch_native",
    "flex_attention",
    "cudnn",
    "nsa",
    "cutlass_mla",
    "fa3",
    "fa4",
    "flashinfer",
    "flashmla",
    "trtllm_mla",
    "trtllm_mha",
    "dual_chunk_flash_attn",
    "aiter",
    "wave",
    "intel_amx",
    "ascend",
    "intel_xpu",
]
LATER = tuple(name for name in get_args(AttentionBackend) if name not in BACKENDS)
WITHOUT = "adapters for " + ", ".join(name for name, one in BACKENDS.items() if not one.has_adapter)
SparseAttention = Literal[
    "flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "aiter", "trtllm"
]


class Kernels(Group, frozen=True, kw_only=True):
    """Kernels"""

    attention_backend: A[
        AttentionBackend | Auto,
        option(
            "Kernels of attention: torch_native on the CPU, triton and others on CUDA, ascend on NPUs.",
            later=LATER,
            missing=WITHOUT,
        ),
    ] = "auto"
    prefill_attention_backend: A[
        AttentionBackend | Auto,
        option("Kernels of attention for prompts, where they differ.", later=LATER, missing=WITHOUT),
    ] = "auto"
    decode_attention_backend: A[
        AttentionBackend | Auto,
        option("Kernels of attention for decodes, where they differ.", later=LATER, missing=WITHOUT),
    ] = "auto"
    sampling_backend: A[
        Literal["ascend", "flashinfer", "pytorch"] | Auto,
        option(
            "Kernels of sampling: pytorch, our own, on CPU and CUDA; on NPUs ascend, or pytorch for the "
            "CPU's tokens by a whole sort.",
            later=("flashinfer",),
        ),
    ] = "auto"
    grammar_backend: A[
        Literal["auto", "xgrammar", "outlines", "llguidance", "none"],
        option("Library that turns grammars into masks of tokens; none: no structured outputs."),
    ] = "auto"
    mm_attention_backend: A[
        Literal["sdpa", "fa3", "fa4", "triton_attn", "ascend_attn", "aiter_attn"] | Auto,
        option(
            "Attention in image and audio towers: sdpa of torch; on CUDA also triton_attn, our own; on NPUs "
            "ascend_attn.",
            later=("fa3", "fa4", "aiter_attn"),
            missing="triton_attn has run on no card",
        ),
    ] = "auto"
    nsa_prefill_backend: A[
        SparseAttention | Auto, on_device("cuda", "Kernels of sparse attention for prompts.")
    ] = "auto"
    nsa_decode_backend: A[
        SparseAttention | Auto, on_device("cuda", "Kernels of sparse attention for decodes.")
    ] = "auto"
    fp8_gemm_backend: A[
        Literal[
            "auto", "deep_gemm", "flashinfer_trtllm", "flashinfer_deepgemm", "cutlass", "triton", "aiter"
        ],
        option(
            "Kernels of fp8 GEMM: triton, or cutlass for those of torch "
            "(CUTLASS, cuBLASLt); auto: by the number of rows.",
            note="weights with block scales, and cards before Ada, always have triton",
            later=("deep_gemm", "flashinfer_trtllm", "flashinfer_deepgemm", "aiter"),
            devices=("cuda",),
        ),
    ] = "auto"
    kernel_fusion: A[
        Literal["off", "safe", "all"],
        option(
            "How far kernels are joined to fewer launches.",
            note="safe: where a program needs rows of its own alone; all: also where the last program of "
            "those that split a sum merges it, and what may be slower than what it replaces (docs/cuda.md)",
            devices=("cuda",),
        ),
    ] = "safe"
    gemv_max_rows: A[
        FewRows,
        option(
            "Most rows of a product with weights in full that is not left to cuBLAS.",
            note="0: none; on an H100 cuBLAS was faster with two rows; it keeps large weights",
            devices=("cuda",),
        ),
    ] = GEMV_ROWS
    enable_decode_work_list: A[
        bool,
        option(
            "Divide the keys of decoding sequences among programs by a list that the device makes.",
            note="for lengths that differ much; no card has run it yet (docs/cuda.md)",
            devices=("cuda",),
        ),
    ] = False
    enable_pdl: A[
        bool,
        option(
            "Let kernels start before those ahead of them have ended (programmatic dependent launch).",
            note="compute capability 9; no card has run it yet (docs/cuda.md)",
            devices=("cuda",),
        ),
    ] = False
    fp4_gemm_backend: A[
        Literal["auto", "flashinfer_cudnn", "flashinfer_cutlass", "flashinfer_trtllm"],
        on_device("cuda", "Kernels of fp4 GEMM."),
    ] = "flashinfer_cutlass"
    disable_flashinfer_autotune: A[
        bool, on_device("cuda", "Don't let FlashInfer measure its kernels at start.")
    ] = False
    triton_attention_reduce_in_fp32: A[
        bool, on_device("cuda", "Reduce in float32 within Triton's attention.")
    ] = False
    triton_attention_num_kv_splits: A[
        Count, on_device("cuda", "Parts that Triton's decode attention splits a sequence into.")
    ] = 8
    triton_attention_split_tile_size: A[Count | None, on_device("cuda", "Tokens of such a part, fixed.")] = (
        None
    )
    flashinfer_mla_disable_ragged: A[
        bool, on_device("cuda", "Don't use FlashInfer's ragged kernel for MLA prompts.")
    ] = False
    enable_nsa_prefill_context_parallel: A[
        bool,
        option(
            "Share prompts over the ranks of --attention-context-parallel-size in sparse attention "
            "(DeepSeek V3.2).",
            note="docs/parallelism.md",
        ),
    ] = False
    nsa_prefill_cp_mode: A[
        PromptSplit,
        option("How a prompt is split over these ranks: in two blocks for each, or token by token in turn."),
    ] = "round-robin-split"
    enable_fused_qk_norm_rope: A[
        bool, on_device("cuda", "Fuse the norm of queries and keys with their rotation.")
    ] = False
    enable_deterministic_inference: A[
        bool,
        option(
            "Start only where a request has the same bits alone and in any batch.",
            note="the kernels of --device cpu compute so always, whatever is chunked or cached",
            devices=("cpu",),
        ),
    ] = False
    rl_on_policy_target: A[
        Literal["fsdp"] | None,
        refused(
            "Trainer whose numerics the server must match.",
            "kernels here are not the trainer's, so bits differ; --enable-return-hidden-states and log "
            "probabilities say by how much",
        ),
    ] = None
    enable_two_batch_overlap: A[
        bool,
        option(
            "Cut each step's tokens into two micro-batches, and compute one while ranks exchange what the "
            "other needs.",
            note="docs/parallelism.md",
            missing="steps that are replayed as graphs",
        ),
    ] = False
    tbo_token_distribution_threshold: A[
        Amount,
        option(
            "Least share of tokens in the smaller micro-batch of a cut between sequences; else prompts are "
            "cut. 0: never."
        ),
    ] = 0.48
    enable_single_batch_overlap: A[
        bool, option("Compute shared experts while tokens travel to the routed ones (--moe-a2a-backend).")
    ] = False
    enable_double_sparsity: A[
        bool, on_device("cuda", "Attend to the most important tokens and channels only.")
    ] = False
    ds_channel_config_path: A[str | None, on_device("cuda", "File with the important channels.")] = None
    ds_heavy_channel_num: A[Count, on_device("cuda", "Channels that are kept.")] = 32
    ds_heavy_token_num: A[Count, on_device("cuda", "Tokens that are kept.")] = 256
    ds_heavy_channel_type: A[str, on_device("cuda", "Which projection the channels are chosen by.")] = "qk"
    ds_sparse_decode_threshold: A[Count, on_device("cuda", "Length from which decodes become sparse.")] = 4096
    hierarchical_sparse_attention_extra_config: A[
        str | None,
        refused(
            "Settings of sparse attention over a tiered cache, as JSON.",
            "decodes of any model would attend to the pages that a score of their keys picks (quest), which "
            "its weights were not trained for; models with an indexer of their own are sparse by "
            "themselves, and --enable-hierarchical-cache keeps prefixes in host memory",
        ),
    ] = None


class KernelsPlan(Kernels, frozen=True, kw_only=True):
    """Kernels in force."""

    attention_backend: str
    prefill_attention_backend: str
    decode_attention_backend: str
    sampling_backend: str
    grammar_backend: str  # none: no structured outputs
    mm_attention_backend: str
    fp8_gemm_backend: str  # by_rows, triton or cutlass on CUDA; own elsewhere


def attention_backend(device: DeviceFacts) -> Derived:
    """The device's own attention kernels."""
    return Derived(device.attention_backend, f"it is the attention of {device.name}")


def phase_backend(attention_backend: str) -> Derived:
    """Attention kernels of one phase, prefill or decode, are those of both."""
    return Derived(attention_backend, "--attention-backend is for both phases")


def sampling_backend(device: DeviceFacts) -> Derived:
    """The device's first sampling kernels."""
    return Derived(device.sampling_backends[0], f"it is the sampling of {device.name}")


def mm_attention_backend(device: DeviceFacts) -> Derived:
    """The device's attention in towers of images and sounds."""
    return Derived(device.tower_attentions[0], f"it is the attention of towers on {device.name}")


def fp8_gemm_backend(device: DeviceFacts) -> Derived:
    """fp8 matrix multiplication: on CUDA by the number of rows."""
    if device.name == "cuda":
        return Derived("by_rows", "Triton's for few rows, torch's for many")
    return Derived("own", f"{device.name} has one way")


def grammar_backend(
    device: DeviceFacts, machine: MachineFacts, model: ModelFacts, has_no_tokenizer: bool
) -> Derived:
    """The best installed grammar library; "none" where no grammar can be used."""
    if has_no_tokenizer:
        return Derived("none", "--skip-tokenizer-init leaves no tokens that a grammar could read")
    if model.pooling is not None:
        return Derived("none", "the model generates no text")
    if not device.has_logits:
        return Derived("none", f"{device.name} computes no logits that a grammar could mask")
    if not machine.grammar_backends:
        return Derived("none", "no library for grammars is installed")
    best = machine.grammar_backends[0]
    return Derived(
        best,
        "it compiles at once, and its masks are the fastest with large vocabularies"
        if best == "llguidance"
        else "of the libraries for grammars, it is installed",
    )
