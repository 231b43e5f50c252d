"""The options of RTP-LLM by the names that they have there.

Those whose name is ours as well (--tp-size, --ep-size, --dp-size, --log-level) are not here: they are ours.
"""

from runtime.options.compat.aliases import Alias
from runtime.options.declare import Value

# (flag, default there, our flag[, our value for each of their words])
SAME: tuple[tuple[str, Value, str, dict[str, Value]], ...] = (
    ("--concurrency-limit", 32, "--max-running-requests", {}),
    ("--max-batch-size", 0, "--max-running-requests", {"0": "auto"}),
    ("--reuse-cache", False, "--disable-radix-cache", {"true": False, "1": False, "false": True, "0": True}),
    ("--fast-gen-context-budget", None, "--chunked-prefill-size", {}),
    ("--max-context-batch-size", 1, "--prefill-max-requests", {}),
    ("--enable-layer-micro-batch", 0, "--enable-two-batch-overlap", {"0": False, "1": True, "2": True}),
    (
        "--use-deepep-moe",
        False,
        "--moe-a2a-backend",
        {"true": "deepep", "1": "deepep", "false": "none", "0": "none"},
    ),
    (
        "--use-deepep-internode",
        False,
        "--deepep-mode",
        {"true": "normal", "1": "normal", "false": "auto", "0": "auto"},
    ),
    (
        "--use-deepep-low-latency",
        True,
        "--deepep-mode",
        {"true": "low_latency", "1": "low_latency", "false": "normal", "0": "normal"},
    ),
    ("--eplb_mode", "NONE", "--enable-eplb", {"none": False, "stats": False, "eplb": True, "all": True}),
    ("--balance_method", "mix", "--eplb-algorithm", {"mix": "auto"}),
    ("--redundant_expert", 0, "--ep-num-redundant-experts", {}),
    ("--eplb_update_time", 5000, "--eplb-rebalance-num-iterations", {}),
    ("--eplb_balance_layer_per_step", 1, "--eplb-rebalance-layers-per-chunk", {}),
    (
        "--fake_balance_expert",
        False,
        "--ep-dispatch-algorithm",
        {"true": "fake", "1": "fake", "false": None, "0": None},
    ),
    ("--eplb_stats_window_size", 10, "--expert-distribution-recorder-buffer-size", {}),
    ("--py-inference-log-response", False, "--log-requests", {}),
    (
        "--sp-type",
        "",
        "--speculative-algorithm",
        {
            "vanilla": None,
            "none": None,
            "": None,
            "deterministic": "NGRAM",
            "mtp": "NEXTN",
            "eagle": "EAGLE",
            "eagle3": "EAGLE3",
        },
    ),
    ("--sp-min-token-match", 2, "--speculative-ngram-min-match-window-size", {}),
    ("--sp-max-token-match", 2, "--speculative-ngram-max-match-window-size", {}),
    # drafts there, here with the token that they follow
    ("--gen-num-per-cycle", 1, "--speculative-num-draft-tokens", {str(n): n + 1 for n in range(1, 256)}),
    ("--sp-checkpoint-path", "", "--speculative-draft-model-path", {}),
    ("--sp-quantization", "", "--speculative-draft-model-quantization", {}),
    ("--remote-vit-server-ip", None, "--encoder-urls", {}),
    (
        "--load-balance",
        False,
        "--load-balance-method",
        {"true": "total_tokens", "1": "total_tokens", "false": "auto", "0": "auto"},
    ),
    (
        "--enable-3fs",
        False,
        "--hicache-storage-backend",
        {"true": "hf3fs", "1": "hf3fs", "false": None, "0": None},
    ),
    ("--ft-disable-custom-ar", True, "--disable-custom-all-reduce", {}),
)

# (flag, default there, what it is, what does its job here)
SUPERSEDED: tuple[tuple[str, Value, str, str], ...] = (
    ("--world-size", None, "Ranks in all.", "the number of ranks follows from --tensor-parallel-size."),
    (
        "--world-rank",
        None,
        "Number of this process among them.",
        "the server starts and numbers its ranks itself; of several nodes, --node-rank says which this is.",
    ),
    (
        "--local-world-size",
        None,
        "Ranks on this node.",
        "the number of ranks follows from --tensor-parallel-size and --nnodes.",
    ),
    (
        "--concurrency-with-block",
        False,
        "Let requests over the limit wait instead of refusing them.",
        "requests over --max-running-requests wait, up to --max-queued-requests.",
    ),
    (
        "--ft-alog-conf-path",
        None,
        "File that configures the log.",
        "log lines go to the standard error in the form of --log-format.",
    ),
    (
        "--use-local",
        False,
        "Look services up locally.",
        "the server needs no service discovery: it listens where --host and --port say.",
    ),
    (
        "--scheduler-reserve-resource-ratio",
        5,
        "Percentage of the cache that is kept free.",
        "pages are reserved exactly, by request.",
    ),
    (
        "--enable-fast-gen",
        False,
        "Compute long prompts in chunks.",
        "prompts are always computed in chunks of --chunked-prefill-size.",
    ),
    (
        "--enable-partial-fallback",
        False,
        "Let sequences give back part of their room.",
        "when pages run out a sequence gives up all of its pages and is computed again later.",
    ),
    (
        "--step-records-time-range",
        60_000_000,
        "Microseconds for which step times are kept.",
        "/metrics has histograms of all steps.",
    ),
    ("--step-records-max-size", 1000, "Step times that are kept.", "/metrics has histograms of all steps."),
    ("--sp-act-type", "", "Number format of the draft model.", "it is that of the model (--dtype)."),
    (
        "--sp-model-type",
        "",
        "Family of the draft model.",
        "--speculative-draft-model-path has a config.json, which says it.",
    ),
    (
        "--force-stream-sample",
        False,
        "Sample drafts as in streaming.",
        "streams and whole answers are sampled alike.",
    ),
    (
        "--force-score-context-attention",
        True,
        "Verify drafts with the kernels of prompts.",
        "rows that verify drafts always take them.",
    ),
    (
        "--eplb_force_repack",
        False,
        "Pack all experts of a layer anew at each rebalance.",
        "each rebalance does, and takes the old places where they are as even.",
    ),
    (
        "--eplb_control_step",
        100,
        "Steps after which ranks agree on the settings of the expert balancer.",
        "the event loop balances for all ranks, which get its moves with their plans.",
    ),
    (
        "--eplb_test_mode",
        False,
        "Wait for the weights of experts that move before the next step.",
        "all ranks change over between the same two steps, so tokens are the same without a wait.",
    ),
)

# (flag, default there, what it is, device)
OTHER_DEVICE: tuple[tuple[str, Value, str, str], ...] = (
    ("--enable-fmha", True, "Fused attention kernels.", "cuda"),
    ("--enable-trt-fmha", True, "TensorRT attention kernels.", "cuda"),
    ("--enable-paged-trt-fmha", True, "TensorRT attention kernels over pages.", "cuda"),
    ("--enable-open-source-fmha", True, "FlashAttention kernels.", "cuda"),
    ("--enable-paged-open-source-fmha", True, "FlashAttention kernels over pages.", "cuda"),
    ("--enable-trtv1-fmha", True, "Attention kernels of the older TensorRT form.", "cuda"),
    ("--fmha-perf-instrument", False, "Marks of attention kernels in profiles.", "cuda"),
    ("--fmha-show-params", False, "Print the parameters of attention kernels.", "cuda"),
    ("--disable-flash-infer", False, "Don't use FlashInfer's attention.", "cuda"),
    ("--enable-xqa", True, "XQA decode kernels.", "cuda"),
    ("--deep-gemm-num-sm", None, "Multiprocessors for DeepGEMM.", "cuda"),
    ("--enable-stable-scatter-add", False, "Deterministic scatter-add kernel.", "cuda"),
    ("--enable-multi-block-mode", True, "Split long sequences of decode attention.", "cuda"),
    ("--rocm-hipblaslt-config", "gemm_config.csv", "Tuned settings of hipBLASLt.", "rocm"),
    ("--overlap-math-sm-count", 0, "Multiprocessors for computation next to communication.", "cuda"),
    ("--overlap-comm-type", 0, "How communication overlaps with mathematics.", "cuda"),
    ("--m-split", 0, "Parts that a matrix product is split into for overlap.", "cuda"),
    ("--enable-comm-overlap", True, "Overlap communication with mathematics.", "cuda"),
    ("--not-use-default-stream", False, "Use a stream of its own.", "cuda"),
    ("--use-deepep-p2p-low-latency", False, "Low-latency expert exchange without a network.", "cuda"),
    ("--deep-ep-num-sm", 0, "Multiprocessors for the expert exchange.", "cuda"),
    ("--enable-flashinfer-sample-kernel", True, "FlashInfer's sampling kernels.", "cuda"),
    ("--ft-nvtx", False, "Marks in profiles.", "cuda"),
    ("--torch-cuda-profiler-dir", "", "Folder for profiles of torch.", "cuda"),
    ("--disable-pdl", False, "Don't launch dependent kernels early.", "cuda"),
)

# (flag, default there, what it is, a pointer to what is nearest)
REFUSED: tuple[tuple[str, Value, str, str], ...] = (
    (
        "--enable_ffn_disaggregate",
        None,
        "Attention and feed-forward layers on servers of their own.",
        "they would exchange activations in every layer; --ep-size spreads experts over ranks, and "
        "--disaggregation-mode prompts and answers over servers",
    ),
    (
        "--multi-task-prompt",
        None,
        "File of system prompts that stay in the cache.",
        "the prefix cache keeps prompts that are in use",
    ),
    ("--multi-task-prompt-str", None, "The same as JSON.", "the prefix cache keeps prompts that are in use"),
    (
        "--arm-gemm-use-kai",
        False,
        "KleidiAI matrix products on ARM.",
        "the kernels of --device cpu have their own for ARM",
    ),
    (
        "--device-reserve-memory-bytes",
        0,
        "Device memory to leave alone, in bytes.",
        "see --mem-fraction-static",
    ),
    (
        "--host-reserve-memory-bytes",
        "4GB",
        "Host memory to leave alone, in bytes.",
        "see --mem-fraction-static",
    ),
    (
        "--trace-memory",
        False,
        "Trace memory.",
        "`runtime check memory` says what takes it, and /metrics what processes have",
    ),
    (
        "--trace-malloc-stack",
        False,
        "Trace allocations with their stacks.",
        "a profiler of allocations can be attached to a rank, as memray",
    ),
    (
        "--enable-device-perf",
        False,
        "Measure the device's speed at start.",
        "`runtime check doctor --bench` does",
    ),
    ("--ft-core-dump-on-exception", False, "Dump core on an exception.", "see --crash-dump-folder"),
    (
        "--gen-timeline-sync",
        False,
        "Collect a timeline of steps.",
        "POST /start_profile does, of a server that runs",
    ),
    ("--remote-rpc-server-ip", None, "Address of the prefill server.", "see --disaggregation-mode"),
    (
        "--decode-cm2-config",
        None,
        "Service discovery of decode servers.",
        "name them to the router: runtime route --pd-disaggregation --decode URL",
    ),
    ("--multimodal-part-cm2-config", None, "Service discovery of encoder servers.", "see --encoder-urls"),
    (
        "--cache-store-rdma-mode",
        False,
        "Move pages between servers by RDMA.",
        "see --disaggregation-transfer-backend",
    ),
    (
        "--wrr-available-ratio",
        80,
        "Share of free cache from which a server takes requests.",
        "see --load-balance-method",
    ),
    ("--rank-factor", 0, "What servers are ranked by.", "see --load-balance-method"),
    (
        "--use-batch-decode-scheduler",
        False,
        "Wait for a full batch before decoding, for measurements.",
        "bench/ of the repository measures ranks without a server",
    ),
    (
        "--batch-decode-scheduler-batch-size",
        1,
        "Size of that batch.",
        "bench/ of the repository measures batches of any size",
    ),
    ("--max-lora-model-size", -1, "Largest adapter.", "see --max-loaded-loras"),
)

RTP_LLM: tuple[Alias, ...] = (
    *(
        Alias(
            flag=flag,
            group="rtp_llm",
            default=default,
            help=f"Name of {means} there.",
            means=means,
            values=values,
        )
        for flag, default, means, values in SAME
    ),
    *(
        Alias(flag=flag, group="rtp_llm", default=default, help=help, status="superseded", note=note)
        for flag, default, help, note in SUPERSEDED
    ),
    *(
        Alias(flag=flag, group="rtp_llm", default=default, help=help, status="other-device", device=device)
        for flag, default, help, device in OTHER_DEVICE
    ),
    *(
        Alias(flag=flag, group="rtp_llm", default=default, help=help, status="refused", note=note)
        for flag, default, help, note in REFUSED
    ),
)
