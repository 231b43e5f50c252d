"""LMDeploy: the options of `lmdeploy serve api_server`."""

from runtime.options.compat.engines.table import (
    FP8_PAGES,
    HAPPENS,
    QUANTIZED,
    Engine,
    Option,
    left_out,
    named,
    switch,
)

_IMAGES = left_out("images are not here yet")

OPTIONS = named(
    {
        "--model-path": Option("--model-path", read="model"),
        "--server-name": Option("--host"),
        "--server-port": Option("--port"),
        "--allow-origins": Option("--cors-origins", read="words"),
        "--allow-credentials --allow-methods --allow-headers": left_out(
            "the pages of --cors-origins may use what the API has"
        ),
        "--api-keys": Option("--api-key", read="words"),
        "--ssl": left_out("give --ssl-certfile and --ssl-keyfile; SSL_CERTFILE and SSL_KEYFILE are not read"),
        "--model-name": Option("--served-model-name"),
        "--log-level": Option("--log-level"),
        "--max-log-len": left_out("see --log-requests-level"),
        "--disable-fastapi-docs": left_out("/docs is always there"),
        "--enable-metrics": left_out("/metrics is always there"),
        "--chat-template": left_out(
            "its JSON form is another; the model's own template is used, or --chat-template FILE with Jinja"
        ),
        "--tool-call-parser": Option(
            "--tool-call-parser",
            {
                "qwen": "hermes",
                "qwen2d5": "qwen25",
                "qwen3": "hermes",
                "internlm": "auto",
                "intern-s1": "interns1",
            },
        ),
        "--reasoning-parser": Option(
            "--reasoning-parser",
            {"qwen-qwq": "qwen3-thinking", "intern-s1": "interns1", "deepseek-v3": "deepseek-v3"},
        ),
        "--revision": Option("--revision"),
        "--download-dir": Option("--download-dir"),
        "--trust-remote-code": left_out("no code of a model folder is ever run, and no family here needs it"),
        "--hf-overrides": Option("--json-model-override-args"),
        "--adapters": Option("--lora-paths", read="words"),
        "--backend": left_out("see --device and --attention-backend"),
        "--device": Option("--device", {"ascend": "npu"}),
        "--dtype": Option("--dtype"),
        "--tp": Option("--tensor-parallel-size"),
        "--dp": Option("--data-parallel-size"),
        "--ep": Option("--expert-parallel-size"),
        "--session-len": Option("--context-length"),
        "--max-batch-size": Option("--max-running-requests"),
        "--max-concurrent-requests": Option("--max-queued-requests"),
        "--cache-max-entry-count": left_out(
            "it is a part of what the weights leave; --mem-fraction-static counts the weights as well"
        ),
        "--cache-block-seq-len": Option("--page-size"),
        "--enable-prefix-caching": HAPPENS,
        "--max-prefill-token-num": Option("--chunked-prefill-size"),
        "--num-tokens-per-iter --max-prefill-iters": left_out("see --chunked-prefill-size"),
        "--quant-policy": Option("--kv-cache-dtype", {"0": None, "8": "fp8_e4m3"}, note=FP8_PAGES),
        "--model-format": Option(
            "--quantization",
            {"hf": None, "llama": None, "awq": "awq", "gptq": "gptq", "fp8": "fp8"},
            note=QUANTIZED,
        ),
        "--rope-scaling-factor": left_out("config.json says it; --json-model-override-args changes it"),
        "--eager-mode": switch(("--disable-cuda-graph", True)),
        "--enable-eplb": switch(("--enable-eplb", True)),
        "--enable-microbatch": switch(("--enable-two-batch-overlap", True)),
        "--speculative-algorithm": Option("--speculative-algorithm", {"eagle": "EAGLE", "eagle3": "EAGLE3"}),
        "--speculative-draft-model": Option("--speculative-draft-model-path"),
        "--speculative-num-draft-tokens": Option("--speculative-num-draft-tokens"),
        "--role": Option("--disaggregation-mode", {"hybrid": None, "prefill": "prefill", "decode": "decode"}),
        "--migration-backend": left_out("see --disaggregation-transfer-backend"),
        "--nnodes": Option("--nnodes"),
        "--node-rank": Option("--node-rank"),
        "--dist-init-addr": Option("--dist-init-addr"),
        "--proxy-url": left_out("no server reports to a proxy; name it to nginx, see docs/deploy.md"),
        "--communicator": left_out("see --disable-custom-all-reduce"),
        "--logprobs-mode": HAPPENS,
        "--allow-terminate-by-client": left_out("a client that leaves ends its request"),
        "--vision-max-batch-size --disable-vision-encoder": _IMAGES,
    }
)

ENGINE = Engine(title="LMDeploy", port=23333, everywhere=True, options=OPTIONS, takes_model=True)
