"""Text Generation Inference: the options of text-generation-launcher. Each can be a variable as well."""

from runtime.options.compat.engines.table import HAPPENS, QUANTIZED, Engine, Option, left_out, named, switch

_ROPE = left_out("config.json says it; --json-model-override-args changes it")
_LIMIT = left_out("requests have the limits of OpenAI's API")
_PIECES = left_out("the server starts its ranks itself")

OPTIONS = named(
    {
        "--model-id": Option("--model-path", read="model"),
        "--revision": Option("--revision"),
        "--num-shard": Option("--tensor-parallel-size"),
        "--sharded": left_out("the number of ranks is --tensor-parallel-size"),
        "--quantize": Option(
            "--quantization",
            {
                "awq": "awq",
                "gptq": "gptq",
                "fp8": "fp8",
                "compressed-tensors": "compressed-tensors",
                "marlin": "gptq",
            },
            note=QUANTIZED,
        ),
        "--speculate": Option(
            "--speculative-num-draft-tokens",
            {"0": None},
            read="drafts",
            sets=(("--speculative-algorithm", "NGRAM"),),
        ),
        "--dtype": Option("--dtype"),
        "--kv-cache-dtype": Option("--kv-cache-dtype", {"fp8_e4m3fn": "fp8_e4m3"}),
        "--trust-remote-code": left_out("no code of a model folder is ever run, and no family here needs it"),
        "--max-total-tokens": Option("--context-length"),
        "--max-input-tokens --max-input-length": left_out(
            "a prompt may fill --context-length, less one token of answer"
        ),
        "--max-batch-total-tokens": Option("--max-total-tokens"),
        "--max-batch-prefill-tokens": Option("--chunked-prefill-size"),
        "--max-batch-size": Option("--max-running-requests"),
        "--max-concurrent-requests": Option("--max-queued-requests"),
        "--max-best-of --max-stop-sequences --max-client-batch-size": _LIMIT,
        "--max-top-n-tokens": Option("--max-logprobs"),
        "--enable-prefill-logprobs": HAPPENS,
        "--payload-limit": Option("--max-body-bytes"),
        "--waiting-served-ratio --max-waiting-tokens": left_out(
            "prompts join running sequences in the same steps; see docs/scheduling.md"
        ),
        "--cuda-graphs": Option("--cuda-graph-bs", {"0": (("--disable-cuda-graph", True),)}, read="commas"),
        "--cuda-memory-fraction": Option("--mem-fraction-static", {"1": None, "1.0": None}),
        "--hostname": Option("--host"),
        "-p --port": Option("--port"),
        "--huggingface-hub-cache --weights-cache-override": Option("--download-dir"),
        "--tokenizer-config-path": left_out("see --tokenizer-path and --chat-template"),
        "--validation-workers": left_out("one tokenizer actor encodes, long texts in worker threads"),
        "--rope-scaling --rope-factor": _ROPE,
        "--json-output": switch(("--log-format", "json")),
        "--otlp-endpoint": Option("--otlp-traces-endpoint", sets=(("--enable-trace", True),)),
        "--otlp-service-name": left_out("see --otlp-traces-endpoint"),
        "--cors-allow-origin": Option("--cors-origins", read="commas"),
        "--api-key": Option("--api-key"),
        "--lora-adapters": Option("--lora-paths", read="commas"),
        "--disable-grammar-support": switch(("--grammar-backend", "none")),
        "--usage-stats --disable-usage-stats --disable-crash-reports": left_out(
            "nothing is reported to anybody"
        ),
        "--prometheus-port": left_out("/metrics is on --port"),
        "--ngrok --ngrok-authtoken --ngrok-edge": left_out("see docs/deploy.md for a proxy in front"),
        "--watermark-gamma --watermark-delta": left_out("there are no watermarks"),
        "--disable-custom-kernels": left_out("see --attention-backend"),
        "--shard-uds-path --master-addr --master-port": _PIECES,
        "-e --env": left_out("`runtime check doctor` describes the machine"),
    }
)

# a container's own HOSTNAME is no setting, and keys are not taken from an environment
VARIABLES = {
    flag[2:].replace("-", "_").upper(): flag
    for flag in OPTIONS
    if flag.startswith("--") and flag not in ("--env", "--hostname", "--api-key")
}

ENGINE = Engine(
    title="text-generation-launcher",
    port=3000,
    everywhere=True,
    options=OPTIONS,
    variables=VARIABLES,
    notes=(
        "/v1/chat/completions and /v1/completions are as there; /generate has SGLang's form here, not TGI's",
    ),
)
