"""Ollama: `ollama serve` and `ollama run`, whose settings are environment variables."""

from runtime.options.compat.engines.table import FP8_PAGES, HAPPENS, Engine, Option, left_out, named, switch

_MODELS = left_out("one server serves one model; see docs/deploy.md for several")
_TERMINAL = left_out("`runtime chat` talks in the terminal")

# flags of `ollama run`
_RUN = named(
    {
        "--model-path": Option("--model-path", read="model"),
        "--verbose --nowordwrap --hidethinking --keepalive --format --think --dimensions --truncate "
        "--insecure": _TERMINAL,
    }
)
# variables, written as flags: --num-parallel is OLLAMA_NUM_PARALLEL
_SETTINGS = named(
    {
        "--host": Option("--host", read="address"),
        "--num-parallel": Option("--max-running-requests", {"0": None}),
        "--max-queue": Option("--max-queued-requests"),
        "--context-length": Option("--context-length", {"0": None}),
        "--origins": Option("--cors-origins", read="commas"),
        "--kv-cache-type": Option("--kv-cache-dtype", {"f16": None, "q8_0": "fp8_e4m3"}, note=FP8_PAGES),
        "--debug": switch(("--log-level", "debug")),
        "--keep-alive": left_out("the model stays loaded; see --enable-memory-saver"),
        "--models": left_out("its files are GGUF; --download-dir is where models of the hub are kept"),
        "--load-timeout": left_out("loading has no time limit"),
        "--max-loaded-models": _MODELS,
        "--sched-spread": left_out("--tensor-parallel-size splits every layer over that many devices"),
        "--gpu-overhead": left_out("see --mem-fraction-static"),
        "--max-vram": left_out("see --mem-fraction-static"),
        "--flash-attention": left_out("--attention-backend chooses kernels; auto by default"),
        "--multiuser-cache": HAPPENS,
        "--llm-library --runners-dir --tmpdir --intel-gpu --vulkan --new-engine --new-estimates": left_out(
            "there are no other runners; see --device"
        ),
        "--nohistory": _TERMINAL,
        "--noprune": left_out("stored models are never pruned"),
        "--no-cloud --remotes --home": left_out("no service is asked for answers"),
        "--editor": _TERMINAL,
    }
)

OPTIONS = {**_RUN, **_SETTINGS}
VARIABLES = {f"OLLAMA_{flag[2:].replace('-', '_').upper()}": flag for flag in _SETTINGS}

ENGINE = Engine(
    title="Ollama",
    port=11434,
    options=OPTIONS,
    variables=VARIABLES,
    takes_model=True,
    notes=(
        "`runtime chat` talks to the server in the terminal, as `ollama run` does",
        "clients of Ollama's API work unchanged; a server answers for the one model of --model-path",
    ),
)

# names in Ollama's library, with the size that a bare name stands for, and the same models on the hub
_LLAMA, _QWEN, _DISTILL = "meta-llama/Llama-", "Qwen/Qwen", "deepseek-ai/DeepSeek-R1-Distill-"
HUB: dict[str, str] = {
    "llama3": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3:8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3:70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3.1": f"{_LLAMA}3.1-8B-Instruct",
    "llama3.1:8b": f"{_LLAMA}3.1-8B-Instruct",
    "llama3.1:70b": f"{_LLAMA}3.1-70B-Instruct",
    "llama3.1:405b": f"{_LLAMA}3.1-405B-Instruct",
    "llama3.2": f"{_LLAMA}3.2-3B-Instruct",
    "llama3.2:1b": f"{_LLAMA}3.2-1B-Instruct",
    "llama3.2:3b": f"{_LLAMA}3.2-3B-Instruct",
    "llama3.3": f"{_LLAMA}3.3-70B-Instruct",
    "llama3.3:70b": f"{_LLAMA}3.3-70B-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "gemma2": "google/gemma-2-9b-it",
    "qwen2.5": f"{_QWEN}2.5-7B-Instruct",
    "qwen2.5-coder": f"{_QWEN}2.5-Coder-7B-Instruct",
    "qwq": "Qwen/QwQ-32B",
    "qwen3": f"{_QWEN}3-8B",
    "qwen3:30b": f"{_QWEN}3-30B-A3B",
    "qwen3:235b": f"{_QWEN}3-235B-A22B",
    "gpt-oss": "openai/gpt-oss-20b",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "gpt-oss:120b": "openai/gpt-oss-120b",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-r1:8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-r1:70b": f"{_DISTILL}Llama-70B",
    "deepseek-r1:671b": "deepseek-ai/DeepSeek-R1-0528",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    **{f"gemma2:{size}": f"google/gemma-2-{size}-it" for size in ("2b", "9b", "27b")},
    **{f"deepseek-r1:{size}b": f"{_DISTILL}Qwen-{size}B" for size in ("1.5", "7", "14", "32")},
    **{f"qwen3:{size}b": f"{_QWEN}3-{size}B" for size in ("0.6", "1.7", "4", "8", "14", "32")},
    **{
        f"qwen2.5:{size}b": f"{_QWEN}2.5-{size}B-Instruct"
        for size in ("0.5", "1.5", "3", "7", "14", "32", "72")
    },
    **{
        f"qwen2.5-coder:{size}b": f"{_QWEN}2.5-Coder-{size}B-Instruct"
        for size in ("0.5", "1.5", "3", "7", "14", "32")
    },
}
