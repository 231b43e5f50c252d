"""Environment variables of other systems' commands: kept in front of ours, turned into options, or left out.

ENVIRONMENT (environment.py) has those of the tuning guide for Ascend; this file the rest.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from runtime.options.compat.environment import ENVIRONMENT, RANK_VARIABLES
from runtime.options.declare import Value
from runtime.options.table import by_flag, canonical

# read by the libraries of ranks, by huggingface_hub and modelscope, or by the loader of programs
KEPT = re.compile(
    r"(CUDA|ASCEND_RT|HIP|ROCR)_VISIBLE_DEVICES|HF_[A-Z_]+|HUGGINGFACE_HUB_CACHE|TRANSFORMERS_OFFLINE"
    r"|(SGLANG|VLLM)_USE_MODELSCOPE|MODELSCOPE_[A-Z_]+|(NCCL|GLOO|HCCL|TORCH|TRITON)_[A-Z_]+"
    r"|PYTORCH_CUDA_ALLOC_CONF"
    r"|CUDA_(HOME|LAUNCH_BLOCKING|DEVICE_ORDER)|(http|https|no)_proxy|(HTTP|HTTPS|NO)_PROXY"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|XDG_CACHE_HOME"
)
# values that nothing prints; the first are read from the environment here as well
SECRET_KEPT = re.compile(r"HF_TOKEN|HUGGING_FACE_HUB_TOKEN|MODELSCOPE_API_TOKEN")
SECRET_KEY = re.compile(r"(VLLM|LLAMA|SGLANG|TGI)?_?API_KEY")

# variable -> our flag, and our value for each of their words
FLAGS: dict[str, tuple[str, Mapping[str, Value]]] = {
    "OMP_NUM_THREADS": ("--num-threads", {}),
    "VLLM_LOGGING_LEVEL": ("--log-level", {}),
    "VLLM_ATTENTION_BACKEND": (
        "--attention-backend",
        {
            "flash_attn": "fa3",
            "flash_attn_vllm_v1": "fa3",
            "flashinfer": "flashinfer",
            "flashmla": "flashmla",
            "triton_attn": "triton",
            "triton_attn_vllm_v1": "triton",
            "torch_sdpa": "torch_native",
            "flex_attention": "flex_attention",
        },
    ),
    "SGLANG_LOG_LEVEL": ("--log-level", {}),
}
# variable -> what stands for it here
NOTES: dict[str, str] = {
    "VLLM_HOST_IP": "several nodes are planned and not here yet",
    "VLLM_PORT": "ranks need no port of their own",
    "VLLM_CPU_KVCACHE_SPACE": "give --max-total-tokens, in tokens; `runtime check memory` shows their size",
    "VLLM_CPU_OMP_THREADS_BIND": "see --num-threads and --numa-node",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "see --num-threads",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "give --json-model-override-args with max_position_embeddings",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": (
        "give --json-model-override-args with max_position_embeddings"
    ),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "see --watchdog-timeout",
    "VLLM_TORCH_PROFILER_DIR": "there is no profiler to switch on",
    "SGLANG_TORCH_PROFILER_DIR": "there is no profiler to switch on",
    "VLLM_NO_USAGE_STATS": "nothing is reported to anybody",
    "VLLM_DO_NOT_TRACK": "nothing is reported to anybody",
    "DO_NOT_TRACK": "nothing is reported to anybody",
    "VLLM_USE_V1": "there is one engine",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "ranks are always processes of their own",
    "VLLM_WORKER_MULTIPROC_METHOD": "ranks are always processes of their own",
    "VLLM_SERVER_DEV_MODE": "routes of administrators need --admin-api-key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters can always be loaded, with --admin-api-key",
    "VLLM_LOGGING_CONFIG_PATH": "see --log-format",
    "VLLM_RPC_TIMEOUT": "the loop and the ranks share memory and wait without a time limit",
    "VLLM_USE_RAY": "ranks are processes that the server starts itself",
    "NVIDIA_VISIBLE_DEVICES": "CUDA_VISIBLE_DEVICES chooses devices",
}
TRUE = ("1", "true", "yes", "on")
_RANKS = {variable: "--" + option.replace("_", "-") for option, (variable, _, _) in RANK_VARIABLES.items()}
_GUIDE = {setting.name.removeprefix("sysctl: "): setting for setting in ENVIRONMENT}


class Carried(Struct):
    """What becomes of the variables of a command: variables of ours, options of the engine with their values,
    our settings, each behind the variable's name, and notes."""

    kept: dict[str, str] = {}
    settings: list[tuple[str, str, Value]] = []
    options: list[tuple[str, list[str]]] = []
    notes: list[str] = []


def carry(variables: Mapping[str, str], engine_flags: Mapping[str, str]) -> Carried:
    """Sorts the variables of a command. `engine_flags` are variables that the engine reads as options of its
    own. Values of secrets are in no result."""
    carried = Carried()
    for name, value in variables.items():
        if SECRET_KEPT.fullmatch(name):
            carried.notes.append(f"{name} is read from the environment here too: set it there")
        elif SECRET_KEY.fullmatch(name):
            carried.notes.append(f"{name} is left out: write the key to a file for --api-key-file")
        elif name in engine_flags:
            carried.options.append((engine_flags[name], [value]))
        elif name in _RANKS:
            carried.settings.append((name, _RANKS[name], value))
        elif name in FLAGS:
            flag, words = FLAGS[name]
            carried.settings.append((name, flag, words.get(value.lower(), value)))
        elif name in _GUIDE:
            _from_guide(name, value, carried)
        elif KEPT.fullmatch(name):
            carried.kept[name] = value
        else:
            why = NOTES.get(name, "the runtime takes no settings from the environment")
            carried.notes.append(f"{name} is left out: {why}")
    return carried


def _from_guide(name: str, value: str, carried: Carried) -> None:
    """A setting of the tuning guide for Ascend: a switch of ours, a variable of libraries, or a note."""
    setting = _GUIDE[name]
    row = by_flag().get(canonical(setting.counterpart))
    if setting.kind == "read":
        carried.kept[name] = value
        carried.notes.append(f"{name} is read from the environment here too")
    elif row is None or row.takes != "switch":
        carried.notes.append(f"{name} is left out; its counterpart here: {setting.counterpart}")
    elif value.lower() in TRUE:
        carried.settings.append((name, row.flag, True))
    else:
        carried.notes.append(f"{name}={value} is left out: {row.flag} is off where it is not given")
