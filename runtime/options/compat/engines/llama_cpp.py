"""llama.cpp: the options of llama-server and llama-cli, with their short names and variables."""

from runtime.options.compat.engines.table import (
    FP8_PAGES,
    HAPPENS,
    Engine,
    Option,
    left_out,
    named,
    sampling,
    switch,
)

_CACHE = {"f16": None, "bf16": "bfloat16", "f32": None, "q8_0": "fp8_e4m3"}
_REQUEST = left_out("requests say it")
_DRAFT = left_out("a draft model runs as --model-path does: docs/speculation.md")
_NGRAM = (("--speculative-algorithm", "NGRAM"),)
_CHANCE = left_out("how many drafts are made follows from how many are accepted: docs/speculation.md")
_CPUS = left_out("ranks stay on the cores of --numa-node")
_LAYERS = left_out("all layers are on --device; --cpu-offload-gb leaves part of the weights in host memory")
_SPLIT = left_out("--tensor-parallel-size splits every layer over that many devices")
_ROPE = left_out("config.json says it; --json-model-override-args changes it")
_IMAGES = left_out("images are not here yet")
_CONSOLE = left_out("the console is at /console")
_TOOLS = left_out("clients run tools")

OPTIONS = named(
    {
        "-m --model": Option("--model-path", read="model"),
        "-hf -hfr --hf-repo": Option("--model-path", read="model"),
        "-mu --model-url -dr --docker-repo -hff --hf-file": left_out(
            "GGUF files are not downloaded yet; --model-path takes one of this machine, a folder, or the "
            "name of a model on the hub"
        ),
        "-hft --hf-token": left_out("set HF_TOKEN in the environment"),
        "--offline": left_out("set HF_HUB_OFFLINE=1 in the environment"),
        "-a --alias": Option("--served-model-name", read="first"),
        "-c --ctx-size": Option("--context-length", {"0": None}, read="length"),
        "-np --parallel": Option("--max-running-requests", {"-1": None}),
        "-ub --ubatch-size": Option("--chunked-prefill-size"),
        "-b --batch-size": left_out("a step has one size here, that of -ub"),
        "-t --threads": Option("--num-threads", {"-1": None}),
        "-tb --threads-batch": left_out("one number of threads serves prompts and answers: -t"),
        "-C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch "
        "--cpu-strict-batch --prio --prio-batch --poll --poll-batch": _CPUS,
        "--numa": left_out("--numa-node names the node of each rank; auto by default"),
        "-ngl --gpu-layers --n-gpu-layers": Option(
            "--device",
            {"0": "cpu", "all": None, "auto": None},
            note="all layers are on --device; --cpu-offload-gb leaves part of the weights in host memory",
        ),
        "-ncmoe --n-cpu-moe -cmoe --cpu-moe -ot --override-tensor -ncffn --n-cpu-ffn --moe-cache-mib "
        "-dev --device --list-devices --op-offload --no-op-offload -fit --fit -fitt --fit-target "
        "-fitc --fit-ctx": _LAYERS,
        "-sm --split-mode -ts --tensor-split --rpc": _SPLIT,
        "-mg --main-gpu": left_out("--base-gpu-id names the first device"),
        "-fa --flash-attn": left_out("--attention-backend chooses kernels; auto by default"),
        "-kvo --kv-offload": HAPPENS,
        "-nkvo --no-kv-offload": left_out("pages are on the device; see --enable-hierarchical-cache"),
        "-ctk --cache-type-k": Option("--kv-cache-dtype", _CACHE, note=FP8_PAGES),
        "-ctv --cache-type-v": Option("--kv-cache-dtype", _CACHE, note=FP8_PAGES),
        "--cache-prompt": HAPPENS,
        "--no-cache-prompt": switch(("--disable-radix-cache", True)),
        "--cache-reuse": left_out("prefixes are shared page by page; see --page-size"),
        "-cram --cache-ram": left_out(
            "--enable-hierarchical-cache --hicache-size keeps pages in host memory"
        ),
        "-kvu --kv-unified -no-kvu --no-kv-unified --kv-unified-per-slot --cache-idle-slots "
        "--no-cache-idle-slots -dt --defrag-thold -sps --slot-prompt-similarity": left_out(
            "all sequences share one pool of pages"
        ),
        "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step": HAPPENS,
        "--swa-full": switch(("--disable-hybrid-swa-memory", True)),
        "--context-shift --no-context-shift --keep": left_out(
            "an answer ends at the context length; no text is dropped within one"
        ),
        "-cb --cont-batching": HAPPENS,
        "-nocb --no-cont-batching": left_out(
            "steps are always batches; --max-running-requests 1 runs one at a time"
        ),
        "--warmup": HAPPENS,
        "--no-warmup --perf --no-perf --check-tensors --repack -nr --no-repack --no-host": left_out(
            "there is nothing to turn on or off"
        ),
        "--mlock --mmap --no-mmap -lm --load-mode --direct-io -lzm --lazy-mode": left_out(
            "weights are mapped and copied once, by each rank its share"
        ),
        "--override-kv": left_out("--json-model-override-args changes config.json"),
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast": _ROPE,
        "--lora --lora-scaled --lora-init-without-apply": left_out(
            "adapters are folders in PEFT's format: --lora-paths NAME=FOLDER"
        ),
        "--control-vector --control-vector-scaled --control-vector-layer-range": left_out(
            "there are no control vectors"
        ),
        "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
        "--no-mmproj-offload --image-min-tokens --image-max-tokens --media-path": _IMAGES,
        "--host": Option("--host"),
        "--port": Option("--port"),
        "--reuse-port": left_out("--port takes a free port with 0"),
        "--path": left_out("no files are served; nginx can, see docs/deploy.md"),
        "--api-prefix": Option("--fastapi-root-path"),
        "--cors-origins": Option("--cors-origins", read="commas"),
        "--cors-methods --cors-headers --cors-credentials --no-cors-credentials": left_out(
            "the pages of --cors-origins may use what the API has"
        ),
        "--api-key": Option("--api-key", read="commas"),
        "--api-key-file": left_out("--api-key-file has another form here: a name and its keys on each line"),
        "--ssl-key-file": Option("--ssl-keyfile"),
        "--ssl-cert-file": Option("--ssl-certfile"),
        "-to --timeout --sse-ping-interval": left_out("streams have no time limit; see --request-timeout"),
        "--threads-http": left_out("one event loop serves HTTP"),
        "--metrics": left_out("/metrics is always there"),
        "--props --slots --no-slots --slot-save-path": left_out("/server_info and /get_load show the state"),
        "--models-dir --models-preset --models-max --models-autoload --no-models-autoload": left_out(
            "one server serves one model; see docs/deploy.md for several"
        ),
        "--ui --webui --no-ui --no-webui --ui-config --webui-config --ui-config-file --webui-config-file "
        "--ui-mcp-proxy --webui-mcp-proxy --tags": _CONSOLE,
        "--tools --tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent": _TOOLS,
        "--embedding --embeddings": switch(("--is-embedding", True)),
        "--rerank --reranking": left_out("a model that is a cross-encoder ranks by itself, at /v1/rerank"),
        "--pooling": Option("--pooling"),
        "--embd-normalize": left_out("embeddings are of length 1 unless the model's modules say otherwise"),
        "--jinja --skip-chat-parsing --no-skip-chat-parsing": HAPPENS,
        "--prefill-assistant --no-prefill-assistant": HAPPENS,
        "--no-jinja": left_out("templates are always Jinja"),
        "--chat-template": Option(
            "--chat-template",
            {
                "chatml": "chatml",
                "llama2": "llama-2",
                "llama3": "llama-3",
                "gemma": "gemma-it",
                "phi3": "phi-3",
                "vicuna": "vicuna",
                "zephyr": "zephyr",
                "deepseek": "deepseek",
                "mistral-v1": "mistral",
            },
            note="the model's own template is used; --chat-template-file takes a file with Jinja",
        ),
        "--chat-template-file": Option("--chat-template"),
        "--chat-template-kwargs": left_out("requests send chat_template_kwargs"),
        "--reasoning-format": Option(
            "--reasoning-parser", {"none": "none", "deepseek": None, "auto": None, "deepseek-legacy": None}
        ),
        "-rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message "
        "--reasoning-preserve --no-reasoning-preserve": _REQUEST,
        "-lv --verbosity --log-verbosity": Option(
            "--log-level",
            {"0": "critical", "1": "error", "2": "warning", "3": "info", "4": "debug", "5": "debug"},
        ),
        "-v --verbose --log-verbose": switch(("--log-level", "debug")),
        "--log-disable": switch(("--log-level", "critical")),
        "--log-jsonl": switch(("--log-format", "json")),
        "--log-file --log-prompts-dir": left_out("lines go to the standard error; see --log-requests-target"),
        "--log-colors --log-prefix --no-log-prefix": left_out("lines have the form of --log-format"),
        "--log-timestamps --no-log-timestamps --no-log-jsonl": left_out("see --log-format"),
        "--sleep-idle-seconds": left_out("see --enable-memory-saver"),
        "--temp --temperature": sampling("temperature"),
        "--top-k": sampling("top_k"),
        "--top-p": sampling("top_p"),
        "--min-p": sampling("min_p"),
        "--repeat-penalty": sampling("repetition_penalty"),
        "--presence-penalty": sampling("presence_penalty"),
        "--frequency-penalty": sampling("frequency_penalty"),
        "-n --predict --n-predict": Option(values={"-1": None, "-2": None}, sampling="max_new_tokens"),
        "-s --seed": Option("--random-seed", {"-1": None}),
        "--ignore-eos": Option(values={"true": True}, sampling="ignore_eos"),
        "--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma --xtc-probability "
        "--xtc-threshold "
        "--typical --typical-p --repeat-last-n --dry-multiplier --dry-base --dry-allowed-length "
        "--dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat "
        "--mirostat-lr "
        "--mirostat-ent --adaptive-target --adaptive-decay -bs --backend-sampling": left_out(
            "this sampler is not here"
        ),
        "-l --logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file -r "
        "--reverse-prompt -sp --special --spm-infill": _REQUEST,
        "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf": Option(
            "--speculative-draft-model-path", sets=(("--speculative-algorithm", "STANDALONE"),)
        ),
        "--draft --draft-n --draft-max --spec-draft-n-max": Option(
            "--speculative-num-draft-tokens", read="drafts"
        ),
        "--draft-min --draft-n-min --draft-p-min --draft-p-split --spec-draft-n-min --spec-draft-p-min "
        "--spec-draft-p-split": _CHANCE,
        "--spec-type": Option(
            values={
                "none": None,
                "ngram-simple": _NGRAM,
                "ngram-cache": _NGRAM,
                "ngram-map-k": _NGRAM,
                "ngram-map-k4v": _NGRAM,
                "ngram-mod": _NGRAM,
                "draft-simple": (("--speculative-algorithm", "STANDALONE"),),
                "eagle3": (("--speculative-algorithm", "EAGLE3"),),
                "draft-eagle3": (("--speculative-algorithm", "EAGLE3"),),
                "mtp": (("--speculative-algorithm", "NEXTN"),),
                "draft-mtp": (("--speculative-algorithm", "NEXTN"),),
            },
            note="this way to draft is not here",
        ),
        "--spec-default": Option(sets=_NGRAM),
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": left_out(
            "--speculative-algorithm NGRAM remembers texts in memory"
        ),
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -cd --ctx-size-draft -devd "
        "--device-draft -td --threads-draft -tbd --threads-batch-draft -ctkd --cache-type-k-draft "
        "-ctvd --cache-type-v-draft": _DRAFT,
        "-p --prompt -f --file -cnv --conversation -no-cnv --no-conversation -i --interactive -st "
        "--single-turn -sys --system-prompt -e --escape --no-escape --color --multiline-input -mli": left_out(
            "`runtime chat` talks in the terminal; its --system gives a system message"
        ),
    }
)

VARIABLES = {
    "LLAMA_ARG_MODEL": "--model",
    "LLAMA_ARG_HF_REPO": "--hf-repo",
    "LLAMA_ARG_ALIAS": "--alias",
    "LLAMA_ARG_CTX_SIZE": "--ctx-size",
    "LLAMA_ARG_N_PARALLEL": "--parallel",
    "LLAMA_ARG_BATCH": "--batch-size",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
    "LLAMA_ARG_THREADS": "--threads",
    "LLAMA_ARG_N_PREDICT": "--n-predict",
    "LLAMA_ARG_N_GPU_LAYERS": "--n-gpu-layers",
    "LLAMA_ARG_SPLIT_MODE": "--split-mode",
    "LLAMA_ARG_TENSOR_SPLIT": "--tensor-split",
    "LLAMA_ARG_MAIN_GPU": "--main-gpu",
    "LLAMA_ARG_FLASH_ATTN": "--flash-attn",
    "LLAMA_ARG_CACHE_TYPE_K": "--cache-type-k",
    "LLAMA_ARG_CACHE_TYPE_V": "--cache-type-v",
    "LLAMA_ARG_HOST": "--host",
    "LLAMA_ARG_PORT": "--port",
    "LLAMA_ARG_API_PREFIX": "--api-prefix",
    "LLAMA_ARG_CORS_ORIGINS": "--cors-origins",
    "LLAMA_ARG_SSL_KEY_FILE": "--ssl-key-file",
    "LLAMA_ARG_SSL_CERT_FILE": "--ssl-cert-file",
    "LLAMA_ARG_TIMEOUT": "--timeout",
    "LLAMA_ARG_EMBEDDINGS": "--embeddings",
    "LLAMA_ARG_RERANKING": "--reranking",
    "LLAMA_ARG_POOLING": "--pooling",
    "LLAMA_ARG_JINJA": "--jinja",
    "LLAMA_ARG_CHAT_TEMPLATE": "--chat-template",
    "LLAMA_ARG_CHAT_TEMPLATE_FILE": "--chat-template-file",
    "LLAMA_ARG_THINK": "--reasoning-format",
    "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    "LLAMA_ARG_LOG_VERBOSITY": "--verbosity",
    "LLAMA_ARG_MLOCK": "--mlock",
    "LLAMA_ARG_NO_MMAP": "--no-mmap",
    "LLAMA_ARG_TEMPERATURE": "--temperature",
    "LLAMA_ARG_TOP_K": "--top-k",
    "LLAMA_ARG_TOP_P": "--top-p",
    "LLAMA_ARG_MIN_P": "--min-p",
}

ENGINE = Engine(title="llama-server", port=8080, options=OPTIONS, variables=VARIABLES, splits_context=True)

# who publishes a model in Hugging Face layout as well, under the same name without -GGUF
PUBLISHERS = frozenset({"Qwen", "unsloth", "HuggingFaceTB", "ibm-granite", "LiquidAI"})
