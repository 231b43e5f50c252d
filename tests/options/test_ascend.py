"""Flags that the reference supports on Ascend: what works on the CPU device works on an NPU, with the
defaults and choices of there."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from runtime.devices.facts import DeviceFacts
from runtime.errors import OptionsError
from runtime.models.config.model_config import read_config
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.parse import from_argv
from runtime.options.resolve import resolve
from runtime.options.table import Row, rows

# ascend.json: of each flag its default there, if it is another one, and the choices that are named
REFERENCE = json.loads((Path(__file__).parent / "ascend.json").read_text())
SUPPORTED = {flag: (default, choices) for flag, default, choices in REFERENCE["flags"]}
MODEL = read_config(str(Path(__file__).parents[2] / "runtime" / "pocket"))
MACHINE = MachineFacts(cores=8, memory_bytes=2**36, entropy=1)
NPU, CPU = (msgspec.structs.replace(DEVICES[name], dtypes=("bfloat16", "float16")) for name in ("npu", "cpu"))

VALUES = {
    "--forward-hooks": "[]",
    "--fastapi-root-path": "/llm",
    "--tokenizer-metrics-allowed-custom-labels": "team",
    "--max-total-tokens": "4096",
    "--tensor-parallel-size": "2",
    "--preferred-sampling-params": "{}",
    "--constrained-json-whitespace-pattern": " ?",
    "--log-level": "debug",
    "--host": "0.0.0.0",
    "--device": "npu",
    "--lora-paths": "name=/adapter",
}
BESIDE = {
    "--debug-tensor-dump-layers": "--debug-tensor-dump-output-folder x",
    "--debug-tensor-dump-input-file": "--debug-tensor-dump-output-folder x --debug-tensor-dump-inject",
    "--enable-weights-cpu-backup": "--enable-memory-saver",
    "--enable-draft-weights-cpu-backup": "--enable-memory-saver --speculative-algorithm NEXTN",
    "--expert-parallel-size": "--tensor-parallel-size 1",
    "--constrained-json-whitespace-pattern": "--grammar-backend llguidance",
    "--hicache-ratio": "--enable-hierarchical-cache",
    "--hicache-size": "--enable-hierarchical-cache",
    "--hicache-write-policy": "--enable-hierarchical-cache",
    "--hicache-io-backend": "--enable-hierarchical-cache",
    "--hicache-mem-layout": "--enable-hierarchical-cache --hicache-io-backend direct",
    "--hicache-storage-backend": "--enable-hierarchical-cache",
    "--schedule-low-priority-values-first": "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold": "--enable-priority-scheduling",
}
# of what works on the CPU: what is refused, with the reason
OTHERWISE = dict.fromkeys(
    (
        "--cpu-offload-gb",
        "--offload-group-size",
        "--enable-weights-cpu-backup",
        "--enable-draft-weights-cpu-backup",
    ),
    "its kernels want them in tiles that host memory cannot keep",
)


def working() -> dict[str, Row]:
    found = {flag: row for row in rows() for flag in (row.flag, *row.aliases)}
    return {flag: found[flag] for flag in SUPPORTED if flag in found and found[flag].acts}


def cases() -> list[tuple[str, str | None]]:
    """Each flag with its default on Ascend and the choices there that are here; flags without either with a
    value of their type."""
    found: list[tuple[str, str | None]] = []
    for flag, row in working().items():
        default, choices = SUPPORTED[flag]
        wanted = [choice for choice in choices if choice not in row.later]
        if default is not None:
            wanted.append(str(default))
        if row.type == "bool":
            found.append((flag, None))
        elif wanted or not row.choices:
            found += [(flag, value) for value in wanted or [VALUES.get(flag, "1")]]
    return found


def problems(flag: str, value: str | None, device: DeviceFacts) -> set[str]:
    """One sentence each, without the name of the device."""
    words = [*BESIDE.get(flag, "").split(), flag, *([] if value is None else [value])]
    try:
        resolve(from_argv(words), MODEL, device, MACHINE)
    except OptionsError as error:
        return {re.sub(rf"\b{device.name}\b", "DEVICE", line) for line in str(error).splitlines()}
    return set()


def test_there_are_many() -> None:
    assert len(working()) > 80 and len(cases()) > 90
    assert all(flag in working() for flag in (*VALUES, *BESIDE)), "every flag here is used"


@pytest.mark.parametrize(("flag", "value"), cases())
def test_what_works_on_the_cpu_works_on_an_npu(flag: str, value: str | None) -> None:
    found = problems(flag, value, NPU)
    if flag in OTHERWISE:
        assert any(OTHERWISE[flag] in problem for problem in found)
    else:
        assert found <= problems(flag, value, CPU)


@pytest.mark.parametrize(
    ("words", "environment", "refusal"),
    [
        ("--npu-task-queue 2", {}, "--npu-task-queue 2 merges launches, which no graph can capture"),
        ("", {"TASK_QUEUE_ENABLE": "2"}, "TASK_QUEUE_ENABLE=2 merges launches, which no graph can capture"),
        ("--npu-task-queue 2 --disable-cuda-graph", {}, ""),
        ("--npu-task-queue 1", {"TASK_QUEUE_ENABLE": "2"}, ""),
    ],
)
def test_merged_launches_and_graphs(words: str, environment: dict[str, str], refusal: str) -> None:
    machine = msgspec.structs.replace(MACHINE, environment=environment)
    if not refusal:
        resolve(from_argv(words.split()), MODEL, NPU, machine)
        return
    with pytest.raises(OptionsError, match=re.escape(refusal)):
        resolve(from_argv(words.split()), MODEL, NPU, machine)


EXCHANGE = "--moe-a2a-backend deepep --deepep-mode low_latency --tp-size 16"


@pytest.mark.parametrize(
    ("words", "buffer_mb", "reason"),
    [
        # 8 experts of 7168 on each of 16 ranks: 4,059,136 bytes a token on A3, 3,670,016 on A2
        ("--npu-soc a3 --max-running-requests 256", 62, "holds 16 tokens of a rank"),
        ("--npu-soc a3 --max-running-requests 3200", 775, "decode steps have 200"),
        ("--npu-soc a2 --max-running-requests 3200", 704, "holds 200 tokens of a rank"),
        ("--npu-soc a2 --max-running-requests 32000", 900, "decode steps have 2000"),
        ("--npu-soc a3 --max-running-requests 32000", 1024, "holds 264 tokens of a rank"),
        ("--npu-soc a3 --max-running-requests 16 --enable-dp-attention --dp-size 16", 62, "have 16"),
        ("--max-running-requests 3200", None, "with --npu-soc it is computed"),
        ("--npu-soc a3 --npu-exchange-buffer-mb 50", 50, ""),
        ("--npu-soc a3 --deepep-mode normal --max-running-requests 3200", None, "no fused exchange"),
    ],
)
def test_the_buffer_of_the_exchange_of_experts(
    words: str, buffer_mb: int | None, reason: str, tmp_path: Path
) -> None:
    config = HF | {"hidden_size": 7168, "n_routed_experts": 128, "num_experts_per_tok": 8}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = resolve(from_argv(f"{EXCHANGE} {words}".split()), read_config(str(tmp_path)), NPU, MACHINE)
    assert plan.device_options["exchange_buffer_mb"] == buffer_mb
    assert reason in plan.why["npu_exchange_buffer_mb"].reason
    assert plan.ascend.rank_environment["HCCL_BUFFSIZE"] == "400", "the buffers of collectives"
    assert plan.device_options["soc"] == (words.split()[1] if words.startswith("--npu-soc") else None)


HF: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 300,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("words", "changes", "refusal"),
    [
        ("--npu-mla-prolog --npu-nz-cache --npu-multi-stream", {}, ""),
        ("--npu-gather-after-q --moe-a2a-backend deepep --tp-size 2 --ep-size 2", {}, ""),
        ("--npu-nz-cache", {"q_lora_rank": None}, ""),
        (
            "--npu-mla-prolog",
            {"q_lora_rank": None},
            "--npu-mla-prolog needs queries of low rank (q_lora_rank), which this model has not",
        ),
        (
            "--npu-gather-after-q",
            {},
            "--npu-gather-after-q needs ranks that have parts of a step's tokens; add --moe-a2a-backend",
        ),
        (
            "--npu-multi-stream",
            {"n_shared_experts": None},
            "--npu-multi-stream computes shared experts next to routed ones, and this model has",
        ),
        (
            "--npu-mla-prolog --npu-gather-after-q",
            None,
            "--npu-mla-prolog and --npu-gather-after-q needs latent attention (MLA), which this model has",
        ),
        ("--npu-nz-cache", None, ""),
        (
            "--npu-nz-cache --kv-cache-dtype int8 --quantization-param-path scales.json",
            None,
            "--npu-nz-cache is for latents (MLA) and for pages in the dtype of activations",
        ),
    ],
)
def test_latents_and_shared_experts(
    words: str, changes: dict[str, object] | None, refusal: str, tmp_path: Path
) -> None:
    """None: a model without either."""
    (tmp_path / "config.json").write_text(json.dumps(HF | (changes or {})))
    model = MODEL if changes is None else read_config(str(tmp_path))
    if not refusal:
        options = resolve(from_argv(words.split()), model, NPU, MACHINE).device_options
        assert all(
            options[name] == (f"--npu-{name.replace('_', '-')}" in words)
            for name in ("mla_prolog", "nz_cache", "int8_index", "multi_stream", "gather_after_q")
        )
        return
    with pytest.raises(OptionsError, match=re.escape(refusal)):
        resolve(from_argv(words.split()), model, NPU, MACHINE)
    with pytest.raises(OptionsError, match="does nothing on --device cpu"):
        resolve(from_argv(words.split()), model, CPU, MACHINE)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"head_dim": 96}, "heads of 64 or 128 numbers, and this model has some of 96"),
        ({"value_dim": 128}, "heads of 64 or 128 numbers, and this model has some of 64 and 128"),
        ({"score_cap": 50.0}, "attention of the NPU's own, and this model's scores are computed in torch"),
    ],
)
def test_pages_in_nz(change: dict[str, object], refusal: str) -> None:
    model = msgspec.structs.replace(MODEL, **change)
    text = re.escape(f"--npu-nz-cache is for latents (MLA) and for {refusal}")
    with pytest.raises(OptionsError, match=text):
        resolve(from_argv(["--npu-nz-cache"]), model, NPU, MACHINE)


def test_latents_in_int8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    words = ["--kv-cache-dtype", "int8", "--quantization-param-path", "scales.json"]
    with pytest.raises(OptionsError, match="latents in int8 with queries in int8 alone"):
        resolve(from_argv(words), read_config(str(tmp_path)), NPU, MACHINE)
