"""The options of vLLM's server by the names that they have there, for `runtime translate` only: `runtime
serve` does not know them.

Options whose name and meaning are ours as well (--host, --dtype, --tensor-parallel-size ...) stand in COMMON.
"""

from runtime.options.declare import Value

# name and meaning are ours
COMMON = frozenset(
    {
        "--host",
        "--port",
        "--api-key",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--kv-events-config",
        "--dtype",
        "--trust-remote-code",
        "--revision",
        "--download-dir",
        "--load-format",
        "--chat-template",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--data-parallel-size",
        "--enable-lora",
        "--max-lora-rank",
        "--tool-call-parser",
        "--reasoning-parser",
        "--cpu-offload-gb",
        "--otlp-traces-endpoint",
        "--model-impl",
        "--tokenizer-mode",
        "--quantization",
        "--model",
        "--nnodes",
        "--node-rank",
        "--max-logprobs",
        "--enable-eplb",
    }
)

# flags of COMMON that turn on there what has a switch of its own here
TURNED_ON: dict[str, list[tuple[str, Value]]] = {"--otlp-traces-endpoint": [("--enable-trace", True)]}

# lengths, which may be written as 8k or 8K
LENGTHS = frozenset({"--max-model-len", "--max-num-batched-tokens"})

# (their flag, our flag, our value for each of their words)
SAME: tuple[tuple[str, str, dict[str, Value]], ...] = (
    ("-tp", "--tensor-parallel-size", {}),
    ("-pp", "--pipeline-parallel-size", {}),
    ("-dp", "--data-parallel-size", {}),
    ("-q", "--quantization", {}),
    ("--tokenizer", "--tokenizer-path", {}),
    ("--seed", "--random-seed", {}),
    ("--max-model-len", "--context-length", {"-1": "auto"}),
    ("--served-model-name", "--served-model-name", {}),
    ("--gpu-memory-utilization", "--mem-fraction-static", {}),
    ("--block-size", "--page-size", {}),
    ("--max-num-seqs", "--max-running-requests", {}),
    ("--max-num-batched-tokens", "--chunked-prefill-size", {}),
    ("--kv-cache-dtype", "--kv-cache-dtype", {"fp8": "fp8_e4m3"}),
    ("--max-loras", "--max-loras-per-batch", {}),
    ("--max-cpu-loras", "--max-loaded-loras", {}),
    ("--lora-modules", "--lora-paths", {}),
    ("--limit-mm-per-prompt", "--limit-mm-data-per-request", {}),
    ("--hf-overrides", "--json-model-override-args", {}),
    ("--guided-decoding-backend", "--grammar-backend", {"guidance": "llguidance"}),
    ("--structured-outputs-backend", "--grammar-backend", {"guidance": "llguidance"}),
    ("--generation-config", "--sampling-defaults", {"vllm": "openai", "auto": "model"}),
    ("--override-generation-config", "--preferred-sampling-params", {}),
    ("--root-path", "--fastapi-root-path", {}),
    ("--uvicorn-log-level", "--log-level-http", {}),
    ("--cuda-graph-sizes", "--cuda-graph-bs", {}),
    ("--cudagraph-capture-sizes", "--cuda-graph-bs", {}),
    ("--max-seq-len-to-capture", "--cuda-graph-max-bs", {}),
    (
        "--attention-backend",
        "--attention-backend",
        {"flash_attn": "fa3", "flashinfer": "flashinfer", "triton_attn": "triton"},
    ),
    (
        "--all2all-backend",
        "--moe-a2a-backend",
        {"deepep_high_throughput": "deepep", "deepep_low_latency": "deepep", "naive": "none"},
    ),
    ("--data-parallel-address", "--dist-init-addr", {}),
    ("--enable-log-requests", "--log-requests", {}),
    ("--enable-sleep-mode", "--enable-memory-saver", {}),
    ("--enable-dbo", "--enable-two-batch-overlap", {}),
    ("--skip-tokenizer-init", "--skip-tokenizer-init", {}),
    ("--enable-return-routed-experts", "--enable-return-routed-experts", {}),
)

# options whose value is a JSON list
JSON_LISTS = {"--allowed-origins": "--cors-origins", "--logits-processors": "--logit-processors"}

# switches of theirs, as flags of ours with their values; an empty list is what happens anyway
SWITCHES: dict[str, list[tuple[str, Value]]] = {
    "--enable-expert-parallel": [("--expert-parallel-size", "tp")],
    "--enforce-eager": [("--disable-cuda-graph", True)],
    "--enable-prefix-caching": [],
    "--no-enable-prefix-caching": [("--disable-radix-cache", True)],
    "--enable-chunked-prefill": [],
    "--no-enable-chunked-prefill": [("--chunked-prefill-size", -1)],
    "--async-scheduling": [],
    "--no-async-scheduling": [("--disable-overlap-schedule", True)],
    "--disable-custom-all-reduce": [("--disable-custom-all-reduce", True)],
    "--disable-log-requests": [],
    "--no-enable-log-requests": [],
    "--disable-log-stats": [],
    "--enable-auto-tool-choice": [],
    "--enable-prompt-tokens-details": [],
    "--disable-uvicorn-access-log": [],
    "--disable-frontend-multiprocessing": [],
    "--disable-hybrid-kv-cache-manager": [("--disable-hybrid-swa-memory", True)],
}

# (their flag, its word), as flags of ours with their values. Their lower priorities go first; who has none
# comes last here, not as 0
CHOICES: dict[tuple[str, str], list[tuple[str, Value]]] = {
    **{("--task", task): [] for task in ("auto", "generate")},
    **{("--task", task): [("--is-embedding", True)] for task in ("embed", "embedding")},
    **{("--runner", runner): [] for runner in ("auto", "generate")},
    ("--runner", "pooling"): [("--is-embedding", True)],
    ("--scheduling-policy", "fcfs"): [],
    ("--scheduling-policy", "priority"): [
        ("--enable-priority-scheduling", True),
        ("--schedule-low-priority-values-first", True),
    ],
}

# --speculative-config
DRAFT_METHODS = {
    "ngram": "NGRAM",
    "ngram_gpu": "NGRAM",
    "suffix": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "deepseek_mtp": "NEXTN",
    "draft_model": "STANDALONE",
}
DRAFT = {
    "model": "--speculative-draft-model-path",
    "quantization": "--speculative-draft-model-quantization",
    "prompt_lookup_max": "--speculative-ngram-max-match-window-size",
    "prompt_lookup_min": "--speculative-ngram-min-match-window-size",
}

# (their flag, why there is nothing of the kind here)
WITHOUT: tuple[tuple[str, str], ...] = (
    ("--task", "a model that classifies or ranks does so by itself"),
    ("--runner", "a model that classifies or ranks does so by itself"),
    ("--convert", "a model that classifies or ranks does so by itself"),
    ("--chat-template-content-format", "templates show which form of content they read"),
    ("--response-role", "answers are of the role assistant"),
    ("--uds", "the server listens on TCP: --host and --port"),
    ("--log-config-file", "see --log-format and --log-level"),
    ("--rope-scaling", "config.json says it; --json-model-override-args changes it"),
    ("--rope-theta", "config.json says it; --json-model-override-args changes it"),
    (
        "--num-scheduler-steps",
        "a step is planned while the one before it runs; see --disable-overlap-schedule",
    ),
    ("--use-v2-block-manager", "there is one kind of pages"),
    ("--preemption-mode", "sequences that give their pages up are computed again, not swapped"),
    ("--guided-decoding-disable-any-whitespace", "see --constrained-json-disable-any-whitespace"),
    ("--tokenizer-revision", "the tokenizer is of the model's --revision"),
    ("--code-revision", "no code of a model folder is ever run"),
    ("--worker-use-ray", "ranks are processes that the server starts itself"),
    ("--headless", "several nodes are planned and not here yet"),
    ("--allow-credentials", "the pages of --cors-origins may use what the API has"),
    ("--allowed-methods", "the pages of --cors-origins may use what the API has"),
    ("--allowed-headers", "the pages of --cors-origins may use what the API has"),
    ("--swap-space", "sequences that give their pages up are computed again, not swapped"),
    ("--distributed-executor-backend", "ranks are processes that the server starts itself"),
    ("--num-gpu-blocks-override", "give --max-total-tokens, in tokens"),
    ("--compilation-config", "see --enable-torch-compile"),
    ("-O", "see --enable-torch-compile"),
    ("--kv-transfer-config", "see --disaggregation-mode and --disaggregation-transfer-backend"),
    ("--middleware", "mount runtime.asgi() in an application with your middleware"),
    ("--kv-cache-memory-bytes", "give --max-total-tokens, in tokens"),
    ("--max-log-len", "see --log-requests-level"),
    ("--config", "translate the options in that file"),
    ("--data-parallel-size-local", "the replicas of a node follow from --data-parallel-size and --nnodes"),
    ("--max-parallel-loading-workers", "weights are mapped, each rank reads its share"),
    ("--mm-processor-cache-gb", "see --mm-process-config"),
    ("--api-server-count", "one process serves HTTP"),
    ("--max-num-partial-prefills", "a step takes as many prompts as --chunked-prefill-size has room for"),
    ("--long-prefill-token-threshold", "a step takes as many prompts as --chunked-prefill-size has room for"),
)
